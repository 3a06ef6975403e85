"""The map of the book: what is there, what is planned, and where it belongs."""

from collections.abc import Mapping
from html import escape
from pathlib import Path
from types import MappingProxyType

from labkit.workbook.display import Shown
from labkit.workbook.runner import NOTEBOOKS, PARTS, Header, table

PLAN: Mapping[str, str] = MappingProxyType(
    {
        "00_start_here": "What can this machine do, and how will this book use it?",
        "01_model_tour": "What is in the model?",
        "02_memory_anatomy": "Where do the bytes go?",
        "03_time_anatomy": "Where do the seconds go?",
        "04_leaks_and_caches": "Why does memory keep growing?",
        "05_precision": "Which numbers can be narrow?",
        "06_attention_and_cache": "What does a past token cost?",
        "07_recompute": "What is worth computing twice?",
        "08_batch_and_accumulation": "How large should a step be?",
        "09_expert_balance": "What keeps all experts busy?",
        "10_parallel_layouts": "How is one model laid out over many devices?",
        "11_communication": "What does a link cost, and what hides it?",
        "12_autotune": "Who finds the best settings?",
        "13_stability": "What does a run do when it goes wrong?",
        "14_long_context_and_tasks": "Is the model any good?",
        "15_capstone": "Does the full-size plan hold?",
    }
)
"""The question of every notebook, written or not, in reading order."""

AIMS: Mapping[str, str] = MappingProxyType(
    {
        "Diagnose": "where do the bytes and the seconds go?",
        "Tune": "what is each remedy worth, and what does it cost?",
        "Validate": "does it hold, at full length and full size?",
    }
)
"""What each part of the book is about."""


def book_map(folder: Path = NOTEBOOKS) -> Shown:
    """Return the book by part; notebooks that are in the folder are linked.

    A written notebook shows the question and the minutes of its own header, a planned
    one the question of `PLAN`.
    """
    written = {row.name: row for row in table(folder)}
    lines, pages = [], []
    for part, names in parts().items():
        lines.append(f"{part}: {AIMS[part]}")
        pages.append(_part_row(part))
        for name in names:
            lines.append(_line(name, written.get(name)))
            pages.append(_row(name, written.get(name)))
    names = ("number", "notebook", "question", "minutes")
    cells = (f'<th scope="col" style="text-align:left">{name}</th>' for name in names)
    head = f"<tr>{''.join(cells)}</tr>"
    page = f"<table><thead>{head}</thead><tbody>{''.join(pages)}</tbody></table>"
    return Shown(text="\n".join(lines), html=page)


def parts() -> dict[str, list[str]]:
    """Return the names of all notebooks, written or planned, by part.

    >>> [len(names) for names in parts().values()]
    [5, 8, 3]
    """
    grouped: dict[str, list[str]] = {part: [] for _, part in PARTS}
    for name in PLAN:
        part = next(part for end, part in PARTS if int(name[:2]) < end)
        grouped[part].append(name)
    return grouped


def title_of(name: str) -> str:
    """Return a planned notebook's title.

    >>> title_of("10_parallel_layouts")
    'Parallel layouts'
    """
    return name[3:].replace("_", " ").capitalize()


def _line(name: str, row: Header | None) -> str:
    if row is None:
        return f"  {name[:2]} {title_of(name)} · {PLAN[name]} · planned"
    return f"  {name[:2]} {row.title} · {row.question} · {row.minutes} min"


def _part_row(part: str) -> str:
    return (
        '<tr><td colspan="4" style="text-align:left">'
        f"<strong>{part}</strong>: {escape(AIMS[part])}</td></tr>"
    )


def _row(name: str, row: Header | None) -> str:
    """Return one notebook as a row of the table: a link if it is there."""
    title, question, minutes = title_of(name), PLAN[name], "planned"
    if row is not None:
        title = f'<a href="{name}.ipynb">{escape(row.title)}</a>'
        question, minutes = row.question, f"{row.minutes}"
    cells = (name[:2], title, escape(question), minutes)
    return (
        "<tr>"
        + "".join(f'<td style="text-align:left">{cell}</td>' for cell in cells)
        + "</tr>"
    )
