"""Every public function of labkit says what it does, and the shapes of its tensors."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
MODULES = sorted((ROOT / "labkit").rglob("*.py"))
BY_MODULE = pytest.mark.parametrize(
    "path", MODULES, ids=[str(path.relative_to(ROOT)) for path in MODULES]
)

SHAPED = {
    *("Bool", "Complex", "Float", "Float8e4m3fn", "Float16", "Float32", "Float64"),
    *("BFloat16", "Int", "Int8", "Int32", "Int64", "Integer", "Num", "Real"),
    *("Shaped", "UInt8"),
}
"""Names of jaxtyping that carry a shape."""

COLLECTIONS = {
    *("Callable", "Iterable", "Iterator", "Mapping", "Sequence", "Generator"),
    *("dict", "list", "set"),
}
"""Holders of tensors whose shapes differ, as of a model's parameters."""

SKIPPED = {"self", "cls", "ctx"}

Function = ast.FunctionDef | ast.AsyncFunctionDef


def public_functions(node: ast.AST) -> Iterator[Function]:
    """Yield functions and methods, except those inside something private."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, Function | ast.ClassDef) and re.match("_[^_]", child.name):
            continue
        if isinstance(child, Function):
            yield child
        yield from public_functions(child)


def annotations_of(function: Function) -> Iterator[ast.expr]:
    arguments = function.args
    named = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
    yield from (a.annotation for a in named if a.annotation and a.arg not in SKIPPED)
    if function.returns is not None:
        yield function.returns


def has_bare_tensor(node: ast.AST) -> bool:
    """Return whether a Tensor stands here without a shape."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return has_bare_tensor(ast.parse(node.value, mode="eval").body)
    if isinstance(node, ast.Name):
        return node.id == "Tensor"
    if isinstance(node, ast.Attribute):
        return node.attr == "Tensor"
    if isinstance(node, ast.Subscript):
        owner = node.value
        name = owner.id if isinstance(owner, ast.Name) else getattr(owner, "attr", "")
        is_sequence = name == "tuple" and "Ellipsis" in ast.dump(node.slice)
        if name in SHAPED | COLLECTIONS or is_sequence:
            return False
    return any(map(has_bare_tensor, ast.iter_child_nodes(node)))


def unshaped(source: str) -> list[str]:
    """Return what takes or returns a tensor without saying its shape."""
    return [
        f"{function.name}, line {function.lineno}"
        for function in public_functions(ast.parse(source))
        if any(map(has_bare_tensor, annotations_of(function)))
    ]


def undocumented(source: str) -> list[str]:
    """Return the public functions of a module that have no docstring."""
    return [
        node.name
        for node in ast.parse(source).body
        if isinstance(node, Function)
        and not node.name.startswith("_")
        and ast.get_docstring(node) is None
    ]


@BY_MODULE
def test_public_functions_have_a_docstring(path):
    assert undocumented(path.read_text(encoding="utf-8")) == []


@BY_MODULE
def test_tensors_have_a_shape_in_every_signature(path):
    assert unshaped(path.read_text(encoding="utf-8")) == []


@BY_MODULE
def test_modules_open_with_a_docstring(path):
    assert ast.get_docstring(ast.parse(path.read_text(encoding="utf-8")))


@pytest.mark.parametrize(
    "signature",
    [
        "def f(x: Tensor): ...",
        "def f(*, x: torch.Tensor | None): ...",
        "def f() -> tuple[Tensor, int]: ...",
        'def f(x: "Tensor"): ...',
        "class C:\n    def f(self, x: Tensor): ...",
        "class C:\n    def __call__(self, x: Tensor): ...",
    ],
)
def test_a_tensor_without_a_shape_is_seen(signature):
    assert len(unshaped(signature)) == 1


@pytest.mark.parametrize(
    "signature",
    [
        'def f(x: Float[Tensor, "b s d"]) -> Int[Tensor, "b"] | None: ...',
        "def f(state: dict[str, Tensor]) -> list[Tensor]: ...",
        "def f(*, saved: tuple[Tensor, ...]): ...",
        "def f(x: int) -> str: ...",
        "def _f(x: Tensor): ...",
        "class _C:\n    def f(self, x: Tensor): ...",
    ],
)
def test_shapes_and_collections_are_allowed(signature):
    assert unshaped(signature) == []


def test_a_public_function_without_a_docstring_is_seen():
    assert undocumented("def f(): ...\ndef _g(): ...") == ["f"]
