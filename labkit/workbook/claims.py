"""The ledger of popular claims, and what this book found about each.

`data/claims.csv` is the ledger. A notebook settles a claim with a verdict that it has
computed; the ledger must say the same, so that neither can drift from the other. A
claim of several parts, which several notebooks settle, has a row for each of them.
"""

from dataclasses import dataclass
from html import escape

from labkit.data import read_rows
from labkit.workbook.display import Shown, line_html

VERDICTS: dict[str, str] = {
    "right": "✓",
    "wrong": "✗",
    "only if": "◐",
    "not checkable here": "?",
}
"""The four verdicts with the mark that goes with each."""

OPEN = "open"
"""In the ledger, instead of a verdict: not settled yet."""

TONES = {"right": "good", "wrong": "bad"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Claim:
    """One row of the ledger."""

    id: str
    claim: str
    """As articles put it."""

    notebook: str
    """The notebook that settles it, or a part of it."""

    verdict: str
    """One of `VERDICTS`, or "open"."""

    figure: str
    """What this book found, with its unit; for "only if", the condition."""

    evidence: str
    """Dotted names of the functions that produced the figure, separated by spaces."""


def ledger() -> list[Claim]:
    """Return all claims, in the order of the ledger."""
    return [Claim(**row) for row in read_rows("claims.csv")]


def find(claim_id: str) -> list[Claim]:
    """Return the rows of one claim, one for each notebook that settles a part of it.

    Raises:
        ValueError: the ledger has no such claim.
    """
    claims = ledger()
    found = [claim for claim in claims if claim.id == claim_id]
    if not found:
        raise ValueError(
            f"no claim has the id {claim_id!r}. data/claims.csv has: "
            f"{', '.join(dict.fromkeys(claim.id for claim in claims))}."
        )
    return found


def settle(claim_id: str, verdict: str, figure: str) -> Shown:
    """Return a claim with the verdict on it, as the last value of a cell.

    Args:
        claim_id: as in the ledger.
        verdict: one of `VERDICTS`, computed by the notebook, for example
            `"right" if terabytes > 5 else "wrong"`.
        figure: what was found, with its unit.

    Raises:
        ValueError: not a verdict, or not what the ledger says.
    """
    rows = find(claim_id)
    claim = rows[0]
    if verdict not in VERDICTS:
        raise ValueError(
            f"a verdict is one of {', '.join(map(repr, VERDICTS))}; got {verdict!r}."
        )
    if all((row.verdict, row.figure) != (verdict, figure) for row in rows):
        says = " or ".join(f"{row.verdict!r}, {row.figure!r}" for row in rows)
        raise ValueError(
            f"the ledger and the notebook must agree on {claim_id}: data/claims.csv "
            f"says {says}; the notebook found {verdict!r}, {figure!r}. Correct "
            "whichever is wrong."
        )
    line = f"{VERDICTS[verdict]} {verdict} · “{claim.claim}” · {figure}"
    page = (
        f"<strong>{VERDICTS[verdict]} {verdict}</strong> · "
        f"“{escape(claim.claim)}” · {escape(figure)}"
    )
    tone = TONES.get(verdict, "quiet")
    return Shown(text=line, html=line_html(page, tone=tone, safe=True))
