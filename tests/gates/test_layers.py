"""Which room of labkit may import which, and what none may import."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
MODULES = sorted((ROOT / "labkit").rglob("*.py"))

LEVEL = {
    "data": 0,
    "config": 1,
    "hardware": 1,
    "model": 2,
    "precision": 3,
    "memory": 3,
    "parallel": 3,
    "monitor": 3,
    "evals": 4,
    "training": 4,
    "tuning": 5,
    "workbook": 6,
    "commands": 7,
    "__main__": 8,
}
"""Rooms from the bottom up: each may import from lower levels only, and from itself."""

NOTEBOOK_PACKAGES = {"IPython", "ipywidgets", "matplotlib", "nbclient", "nbformat"}
"""Only `workbook` may import these."""

TEST_PACKAGES = {"pytest", "hypothesis", "transformers", "beartype", "playwright"}

UNSAFE_PACKAGES = {"pickle", "dill"}
"""Loading these runs code: weights come from safetensors, records from JSON."""


def imports_of(source: str) -> Iterator[str]:
    """Yield the absolute name of everything that a module imports, at any depth."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports name the package: from labkit.config …"
            # `from labkit import config` imports the room labkit.config.
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def upward_imports(room: str, source: str) -> list[str]:
    """Return the imports of a module in `room` from its own level or above."""
    return [
        name
        for name in imports_of(source)
        if name.startswith("labkit.")
        and (other := name.split(".")[1]) in LEVEL
        and other != room
        and LEVEL[other] >= LEVEL[room]
    ]


def room_of(path: Path) -> str:
    return path.relative_to(ROOT / "labkit").parts[0].removesuffix(".py")


def test_every_room_has_a_level():
    assert {room_of(path) for path in MODULES} <= {*LEVEL, "__init__"}


@pytest.mark.parametrize(
    "path", MODULES, ids=[str(path.relative_to(ROOT)) for path in MODULES]
)
def test_imports_point_down(path):
    room = room_of(path)
    source = path.read_text(encoding="utf-8")
    if room == "__init__":
        assert not [name for name in imports_of(source) if name.startswith("labkit")]
        return
    assert upward_imports(room, source) == []


@pytest.mark.parametrize(
    ("room", "source"),
    [
        ("config", "from labkit.hardware import detect"),
        ("model", "import labkit.training.trainer"),
        ("training", "from labkit import evals"),
        ("monitor", "def f():\n    from labkit.workbook import lab"),
        ("memory", "if TYPE_CHECKING:\n    from labkit.precision import QTensor"),
    ],
)
def test_an_upward_or_sideways_import_is_seen(room, source):
    assert len(upward_imports(room, source)) == 1


@pytest.mark.parametrize(
    ("room", "source"),
    [
        ("model", "from labkit.config import PRESETS"),
        ("model", "from labkit.model.rope import rotate"),
        ("__main__", "from labkit.commands import doctor"),
        ("commands", "from labkit.workbook.runner import execute"),
    ],
)
def test_a_downward_import_is_allowed(room, source):
    assert upward_imports(room, source) == []


def packages_of(room: str) -> set[str]:
    sources = [p.read_text(encoding="utf-8") for p in MODULES if room_of(p) == room]
    return {name.split(".")[0] for source in sources for name in imports_of(source)}


@pytest.mark.parametrize("room", [room for room in LEVEL if room != "workbook"])
def test_only_the_workbook_knows_notebooks(room):
    assert packages_of(room) & NOTEBOOK_PACKAGES == set()


@pytest.mark.parametrize("room", LEVEL)
def test_labkit_runs_without_the_test_packages_and_loads_no_pickle(room):
    assert packages_of(room) & (TEST_PACKAGES | UNSAFE_PACKAGES) == set()


def test_torch_load_is_never_called():
    calls = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for path in MODULES
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Attribute)
        and node.attr == "load"
        and isinstance(node.value, ast.Name)
        and node.value.id == "torch"
    ]
    assert calls == []
