"""A function on its way to other processes.

What those can import travels by name; the rest by value, along with the globals it
uses. Tracebacks there show the lines of notebook cells, so these travel too.
"""

import linecache
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from importlib.machinery import ModuleSpec
from types import CodeType, ModuleType
from typing import IO

import cloudpickle

INSTALLED = (sys.prefix, sys.base_prefix)
"""Below these, modules are the same in all processes."""


class _Pickler(cloudpickle.Pickler):
    """As cloudpickle, but code keeps the name of its file, which tracebacks show."""

    dispatch_table = cloudpickle.Pickler.dispatch_table.new_child()


def _reduce_code(code: CodeType) -> tuple[Callable, tuple]:
    _, args = cloudpickle.Pickler.dispatch_table[CodeType](code)
    return _make_code, (code.co_filename, *args)


def _make_code(filename: str, *args: object) -> CodeType:
    return CodeType(*args).replace(co_filename=filename)


_Pickler.dispatch_table[CodeType] = _reduce_code


def pack(fn: Callable, args: tuple, file: IO[bytes]) -> None:
    """Write a function and its arguments to a file."""
    for module in _not_importable():
        cloudpickle.register_pickle_by_value(module)
    try:
        _Pickler(file).dump((fn, args, _cells()))
    except Exception as error:  # an object may refuse in any way
        raise ValueError(
            "fn and its arguments are sent to other processes, so they must be "
            f"picklable; got {type(error).__name__}: {error}. Make what cannot be "
            "sent (locks, open files, generators) inside fn."
        ) from error
    file.flush()


def unpack(packed: bytes) -> tuple[Callable, tuple]:
    """Return the function and its arguments."""
    fn, args, cells = cloudpickle.loads(packed)
    linecache.cache.update(cells)
    return fn, args


def _cells() -> dict[str, tuple]:
    """Return the known source of what is in no file."""
    return {
        name: entry
        for name, entry in linecache.cache.items()
        if len(entry) == 4 and not os.path.exists(name)
    }


def _not_importable() -> Iterator[ModuleType]:
    """Yield loaded modules that another process would not find, or find elsewhere.

    pytest loads test modules so.
    """
    for name, module in tuple(sys.modules.items()):
        file = getattr(module, "__file__", None)
        if not file or file.startswith(INSTALLED) or name == "__main__":
            continue
        if _origin(name) != os.path.realpath(file):
            yield module


def _origin(name: str) -> str | None:
    """Return the file that `import name` would read in a new process."""
    spec, path, parts = None, None, name.split(".")
    for end in range(1, len(parts) + 1):
        spec = _found(".".join(parts[:end]), path)
        if spec is None:
            return None
        path = spec.submodule_search_locations
    return os.path.realpath(spec.origin) if spec.origin else None


def _found(name: str, path: Iterable[str] | None) -> ModuleSpec | None:
    for finder in sys.meta_path:
        spec = finder.find_spec(name, path)
        if spec is not None:
            return spec
    return None
