"""Small tables: aligned text for tests, HTML for the page, marks on what varies."""

from collections.abc import Mapping, Sequence
from html import escape

from labkit.workbook.display import Shown, varying
from labkit.workbook.spelling import spell

Cell = int | float | str | bool | None
Row = Mapping[str, Cell]

MEASURED = "(measured)"
"""What the text form says in place of a number that varies."""


def compare(
    rows: Sequence[Row],
    *,
    caption: str = "",
    varies: Sequence[str] = (),
    digits: int = 3,
) -> Shown:
    """Return a table whose columns are the keys of the first row.

    Args:
        rows: the same keys in each; put the unit into the key ("memory (GiB)").
        caption: what the table shows.
        varies: columns with timings or readings; the page shows them, tests do not
            compare them.
        digits: significant digits of fractions.

    Raises:
        ValueError: no rows, rows with different keys, or an unknown column in `varies`.
    """
    _check(rows, varies)
    names = list(rows[0])
    written = [{name: write(row[name], digits) for name in names} for row in rows]
    numeric = {name for name in names if _is_numeric(rows, name)}
    return Shown(
        text=_as_text(written, names, numeric, varies),
        html=_as_html(written, names, numeric, varies=varies, caption=caption),
        varies=bool(varies),
    )


def write(cell: Cell, digits: int = 3) -> str:
    """Return a cell as readers see it.

    >>> write(True), write(None), write(70272), write("MLA")
    ('yes', '–', '70,272', 'MLA')
    """
    if cell is None:
        return "–"
    if isinstance(cell, bool):
        return "yes" if cell else "no"
    return cell if isinstance(cell, str) else spell(cell, digits=digits)


def _check(rows: Sequence[Row], varies: Sequence[str]) -> None:
    if not rows:
        raise ValueError("a table needs at least one row; got none.")
    names = list(rows[0])
    for row in rows:
        if list(row) != names:
            raise ValueError(
                f"all rows must have the columns {names}; one has {list(row)}. "
                "Put None where there is no value."
            )
    if unknown := [name for name in varies if name not in names]:
        raise ValueError(f"varies must name columns of the table; {unknown} are none.")


def _is_numeric(rows: Sequence[Row], name: str) -> bool:
    """Return whether a column holds numbers, which are set to the right."""
    cells = [row[name] for row in rows if row[name] is not None]
    return all(isinstance(cell, int | float) for cell in cells)


def _as_text(
    written: Sequence[Mapping[str, str]],
    names: Sequence[str],
    numeric: set[str],
    varies: Sequence[str],
) -> str:
    """Return aligned columns, without the cells that vary."""
    columns = []
    for name in names:
        cells = [MEASURED if name in varies else row[name] for row in written]
        width = max(map(len, [name, *cells]))
        column = [name, *cells]
        columns.append(
            [
                cell.rjust(width) if name in numeric else cell.ljust(width)
                for cell in column
            ]
        )
    return "\n".join("  ".join(cells).rstrip() for cells in zip(*columns, strict=True))


def _as_html(
    written: Sequence[Mapping[str, str]],
    names: Sequence[str],
    numeric: set[str],
    *,
    varies: Sequence[str],
    caption: str,
) -> str:
    """Return the table for the page."""

    def cell(tag: str, name: str, text: str) -> str:
        side = "right" if name in numeric else "left"
        scope = ' scope="col"' if tag == "th" else ""
        return f'<{tag}{scope} style="text-align:{side}">{text}</{tag}>'

    head = "".join(cell("th", name, escape(name)) for name in names)
    body = "".join(
        "<tr>"
        + "".join(
            cell(
                "td", name, varying(row[name]) if name in varies else escape(row[name])
            )
            for name in names
        )
        + "</tr>"
        for row in written
    )
    title = f"<caption>{escape(caption)}</caption>" if caption else ""
    return f"<table>{title}<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
