"""What a notebook of the book must be, as rules that each answer in a sentence."""

import ast
import base64
import re
import statistics
from collections.abc import Callable, Iterator
from pathlib import Path

from nbformat import NotebookNode

from labkit.workbook import claims
from labkit.workbook.exercises.catalogue import exercises_of, modules
from labkit.workbook.figures.export import MAX_PNG_BYTES
from labkit.workbook.normalise import normalise, to_text
from labkit.workbook.runner import header, list_notebooks, read

MAX_LINES = 20
MEDIAN_LINES = 8
MIN_EXERCISES = 3
MAX_IGNORED = 2

SECTIONS = ("## Exercises", "## What is really true", "## Next")

ABSOLUTE_PATH = re.compile(r"(?<![\w.~/>])/(home|root|Users|work|tmp|opt|mnt)/\S+")
ALLOWED_PATH = "/tmp/ipykernel/cell.py"

BANNED_CALLS = re.compile(r"\bsys\.path\b|\bos\.chdir\b|^\s*[%!]", re.MULTILINE)

WIDGET = re.compile(r"\b(widgets\.(explore|experiment)|live_training)\(")

OTHER_NOTEBOOK = re.compile(r"\b[Nn]otebook (\d\d)\b|\]\((\d\d)_\w+\.ipynb\)")
"""How prose points to another notebook: by its number, or by a link."""

FORBIDDEN_TAGS = ("nbval-skip", "raises-exception")

Rule = Callable[[Path, NotebookNode], Iterator[str]]


def complaints(path: Path) -> list[str]:
    """Return what is wrong with a notebook, one sentence each; [] if nothing."""
    notebook = read(path)
    return [text for rule in RULES for text in rule(path, notebook)]


def code_cells(notebook: NotebookNode) -> list[NotebookNode]:
    """Return the code cells that hold code."""
    cells = notebook.cells
    return [cell for cell in cells if cell.cell_type == "code" and cell.source.strip()]


def must_be_executed_in_order(path: Path, notebook: NotebookNode) -> Iterator[str]:
    """Complain unless the cells were run once each, from a fresh kernel."""
    counts = [cell.execution_count for cell in code_cells(notebook)]
    if counts != list(range(1, len(counts) + 1)):
        yield "its cells were not run in order from a fresh kernel: make notebooks"


def must_be_normalised(path: Path, notebook: NotebookNode) -> Iterator[str]:
    """Complain unless the file is in its stored form."""
    if path.read_text(encoding="utf-8") != to_text(normalise(notebook)):
        yield "its file is not in the stored form: make notebooks"


def must_have_short_cells(path: Path, notebook: NotebookNode) -> Iterator[str]:
    """Complain about long cells."""
    lengths = [len(cell.source.splitlines()) for cell in code_cells(notebook)]
    for number, length in enumerate(lengths, start=1):
        if length > MAX_LINES:
            yield f"code cell {number} has {length} lines, at most {MAX_LINES}"
    if lengths and statistics.median(lengths) > MEDIAN_LINES:
        median = statistics.median(lengths)
        yield f"half of its code cells have over {MEDIAN_LINES} lines ({median:g})"


def must_hold_no_absolute_path(path: Path, notebook: NotebookNode) -> Iterator[str]:
    """Complain about paths that exist on one machine only."""
    for cell in notebook.cells:
        for text in (cell.source, *_output_texts(cell)):
            for found in ABSOLUTE_PATH.finditer(text):
                if not found.group().startswith(ALLOWED_PATH):
                    yield f"it holds an absolute path: {found.group()[:60]}"


def must_be_plain_python(path: Path, notebook: NotebookNode) -> Iterator[str]:
    """Complain about shell lines, path surgery, star imports and late imports."""
    for number, cell in enumerate(code_cells(notebook), start=1):
        if found := BANNED_CALLS.search(cell.source):
            yield f"code cell {number} uses {found.group().strip()}"
            continue
        try:
            tree = ast.parse(cell.source)
        except SyntaxError as error:
            yield f"code cell {number} is not Python: {error.msg}"
            continue
        for node in ast.walk(tree):
            if not isinstance(node, ast.Import | ast.ImportFrom):
                continue
            if any(alias.name == "*" for alias in node.names):
                yield f"code cell {number} has a star import: name what you use"
            if number > 1:
                yield f"code cell {number} imports: the first code cell does that"


def must_describe_its_figures(path: Path, notebook: NotebookNode) -> Iterator[str]:
    """Complain about figures without alt text, and about large ones."""
    for number, cell in enumerate(code_cells(notebook), start=1):
        for output in cell.outputs:
            data = output.get("data", {})
            if "image/png" in data or "image/svg+xml" in data:
                yield f"code cell {number} shows a bare image: use figures.figure"
            for tag in re.findall(r"<img\b[^>]*>", data.get("text/html", "")):
                if not re.search(r'\balt="[^"]+"', tag):
                    yield f"code cell {number} shows a figure without alt text"
                if (size := _png_bytes(tag)) > MAX_PNG_BYTES:
                    yield f"code cell {number} stores a figure of {size:,} bytes"


def must_teach(path: Path, notebook: NotebookNode) -> Iterator[str]:
    """Complain unless the header, the closing sections and a widget are there."""
    try:
        header(path)
    except ValueError as error:
        yield str(error)
    prose = [cell.source for cell in notebook.cells if cell.cell_type == "markdown"]
    titles = [line.strip() for text in prose for line in text.splitlines()]
    for section in SECTIONS:
        if section not in titles:
            yield f"it has no section {section!r}"
    if not any(WIDGET.search(cell.source) for cell in code_cells(notebook)):
        yield "it has no widget: widgets.explore"


def must_point_to_what_is_there(path: Path, notebook: NotebookNode) -> Iterator[str]:
    """Complain about prose that sends a reader to a notebook that is not written."""
    prose = [cell.source for cell in notebook.cells if cell.cell_type == "markdown"]
    written = {other.name[:2] for other in list_notebooks(path.parent)}
    for found in OTHER_NOTEBOOK.finditer("\n".join(prose)):
        if (number := found.group(1) or found.group(2)) not in written:
            yield f"it points to notebook {number}, which is not in the folder"


def must_have_its_exercises(path: Path, notebook: NotebookNode) -> Iterator[str]:
    """Complain unless each exercise of the notebook is shown, started and checked."""
    module = f"n{path.stem}"
    if module not in modules():
        yield f"labkit/workbook/exercises/{module}.py does not exist"
        return
    sources = [cell.source.rstrip() for cell in code_cells(notebook)]
    shown = re.findall(r"\bexercise\(\"([^\"]+)\"\)", "\n".join(sources))
    known = {spec.name: spec for spec in exercises_of(module)}
    for name in shown:
        if name not in known:
            yield f"exercise {name!r} is not in {module}.py"
        elif known[name].stub not in sources:
            yield f"the stub of {name!r} is no cell of its own, as {module}.py has it"
    for name in known.keys() - set(shown):
        yield f"exercise {name!r} is in {module}.py and not in the notebook"
    if len(shown) < MIN_EXERCISES:
        yield f"it has {len(shown)} exercises, at least {MIN_EXERCISES}"
    n_checks = sum(source.count(".check(") for source in sources)
    if n_checks < len(shown):
        yield f"it shows {len(shown)} exercises and checks {n_checks}"


def must_settle_its_claims(path: Path, notebook: NotebookNode) -> Iterator[str]:
    """Complain unless exactly the claims that the ledger gives it are settled."""
    text = "\n".join(cell.source for cell in code_cells(notebook))
    here = set(re.findall(r"\bsettle\(\s*\"([^\"]+)\"", text))
    ledger = claims.ledger()
    due = {
        claim.id
        for claim in ledger
        if claim.notebook == path.stem and claim.verdict != claims.OPEN
    }
    for claim in sorted(due - here):
        yield f"data/claims.csv says that it settles {claim!r}: it does not"
    for claim in sorted(here - due):
        yield f"it settles {claim!r}, which data/claims.csv does not say"


def must_be_compared(path: Path, notebook: NotebookNode) -> Iterator[str]:
    """Complain about tags that keep nbval from comparing outputs."""
    tags = [tag for cell in notebook.cells for tag in cell.metadata.get("tags", [])]
    for tag in FORBIDDEN_TAGS:
        if tag in tags:
            yield f"a cell has the tag {tag}"
    ignored = tags.count("nbval-ignore-output")
    if ignored > MAX_IGNORED:
        yield f"{ignored} cells are not compared, at most {MAX_IGNORED}"


RULES: tuple[Rule, ...] = (
    must_be_executed_in_order,
    must_be_normalised,
    must_have_short_cells,
    must_hold_no_absolute_path,
    must_be_plain_python,
    must_describe_its_figures,
    must_teach,
    must_point_to_what_is_there,
    must_have_its_exercises,
    must_settle_its_claims,
    must_be_compared,
)


def _output_texts(cell: NotebookNode) -> Iterator[str]:
    """Yield the texts of a cell's outputs, images left out."""
    for output in cell.get("outputs", []):
        yield output.get("text", "")
        for kind, text in output.get("data", {}).items():
            if kind.startswith("text/"):
                yield re.sub(r"base64,[A-Za-z0-9+/=]*", "", text)


def _png_bytes(tag: str) -> int:
    """Return the size of the image that an `<img>` holds."""
    found = re.search(r"base64,([A-Za-z0-9+/=]*)", tag)
    return len(base64.b64decode(found.group(1))) if found else 0
