"""The ledger of claims, and that notebooks and ledger cannot disagree."""

import importlib
from pathlib import Path

import pytest

from labkit.workbook import claims, lab

ROOT = Path(claims.__file__).resolve().parents[2]
LEDGER = claims.ledger()


def by_id(claim):
    return f"{claim.id}-{claim.notebook[:2]}"


def resolve(name):
    """Return what a dotted name stands for, or raise."""
    module, _, rest = name.partition(":")
    found = importlib.import_module(module)
    for part in rest.split("."):
        found = getattr(found, part)
    return found


def test_the_ledger_holds_the_27_claims_once_for_each_notebook():
    places = [(claim.id, claim.notebook) for claim in LEDGER]
    texts = {(claim.id, claim.claim) for claim in LEDGER}

    assert len(set(places)) == len(places)
    assert len({claim.id for claim in LEDGER}) == len(texts) == 27
    assert LEDGER[0].id == "size-5.4tb"


@pytest.mark.parametrize("claim", LEDGER, ids=by_id)
def test_a_claim_is_open_or_settled_with_figure_and_evidence(claim):
    if claim.verdict == claims.OPEN:
        assert (claim.figure, claim.evidence) == ("", "")
        return
    assert claim.verdict in claims.VERDICTS
    assert claim.figure
    assert (ROOT / "notebooks" / f"{claim.notebook}.ipynb").exists()
    for name in claim.evidence.split():
        assert callable(resolve(name))
    assert claim.evidence


def settled(**changes):
    values = {
        "id": "size",
        "claim": "8 bits are 8 bytes",
        "notebook": "01_model_tour",
        "verdict": "wrong",
        "figure": "1 byte",
        "evidence": "labkit.data:data_path",
    }
    return claims.Claim(**values | changes)


def test_settling_shows_verdict_claim_and_figure(monkeypatch):
    monkeypatch.setattr(claims, "ledger", lambda: [settled()])

    shown = lab.settle("size", "wrong", "1 byte")
    assert shown.text == "✗ wrong · “8 bits are 8 bytes” · 1 byte"
    assert "<strong>✗ wrong</strong>" in shown.html


def test_a_notebook_that_finds_something_else_fails(monkeypatch):
    monkeypatch.setattr(claims, "ledger", lambda: [settled()])

    with pytest.raises(ValueError) as error:
        lab.settle("size", "right", "1 byte")
    assert str(error.value) == (
        "the ledger and the notebook must agree on size: data/claims.csv says 'wrong', "
        "'1 byte'; the notebook found 'right', '1 byte'. Correct whichever is wrong."
    )


def test_each_notebook_settles_its_part_of_a_claim(monkeypatch):
    rows = [settled(), settled(notebook="02_memory_anatomy", verdict="only if")]
    monkeypatch.setattr(claims, "ledger", lambda: rows)

    assert lab.settle("size", "wrong", "1 byte").text.startswith("✗ wrong")
    assert lab.settle("size", "only if", "1 byte").text.startswith("◐ only if")
    with pytest.raises(ValueError, match="says 'wrong', '1 byte' or 'only if', '1"):
        lab.settle("size", "right", "1 byte")


def test_only_four_verdicts_exist():
    with pytest.raises(ValueError, match="a verdict is one of 'right', 'wrong'"):
        lab.settle("size-5.4tb", "perhaps", "")


def test_an_unknown_claim_is_named():
    with pytest.raises(ValueError, match="no claim has the id 'size-5'"):
        lab.settle("size-5", "right", "")
