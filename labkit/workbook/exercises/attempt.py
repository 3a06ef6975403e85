"""Telling an attempt from a stub that nobody has touched, by its bytecode."""

import dis
import inspect
from types import CodeType

EMPTY_BODY = {"RESUME", "NOP", "LOAD_CONST", "RETURN_VALUE", "RETURN_CONST"}
"""Instructions of a function whose body is `...`, `pass` or a docstring."""


def is_untouched(answer: object, stub: str) -> bool:
    """Return whether an answer is nothing yet, or a function of the stub as given."""
    if answer is None or answer is ...:
        return True
    code = code_of(answer)
    if code is None:
        return False
    given = compile(stub, "<stub>", "exec").co_consts
    return _is_empty(code) or any(
        _same_code(code, part) for part in given if isinstance(part, CodeType)
    )


def is_left_open(answer: object, error: BaseException | None) -> bool:
    """Return whether an answer ends at a `raise NotImplementedError` of its own.

    PyTorch raises the same error, for a tensor of a dtype that it does not take:
    inside a function of its own, or within a call in the answer's last frame.
    """
    code = code_of(answer)
    if not isinstance(error, NotImplementedError) or code is None:
        return False
    last = error.__traceback__
    while last.tb_next is not None:
        last = last.tb_next
    where = last.tb_frame.f_code
    is_raise = dis.opname[where.co_code[last.tb_lasti]] == "RAISE_VARARGS"
    return is_raise and where.co_filename == code.co_filename


def code_of(answer: object) -> CodeType | None:
    """Return the code of a function written in Python, else None."""
    if not callable(answer):
        return None
    code = getattr(inspect.unwrap(answer), "__code__", None)
    return code if isinstance(code, CodeType) else None


def _is_empty(code: CodeType) -> bool:
    """Return whether a function does nothing but return None."""
    steps = list(dis.get_instructions(code))
    return {step.opname for step in steps} <= EMPTY_BODY and all(
        step.argval is None for step in steps if "CONST" in step.opname
    )


def _same_code(left: CodeType, right: CodeType) -> bool:
    """Return whether two functions have the same instructions, wherever they stand."""
    if (left.co_code, left.co_names) != (right.co_code, right.co_names):
        return False
    if len(left.co_consts) != len(right.co_consts):
        return False
    return all(
        _same_code(a, b)
        if isinstance(a, CodeType) and isinstance(b, CodeType)
        else a == b
        for a, b in zip(left.co_consts, right.co_consts, strict=True)
    )
