"""The command line: `python -m labkit doctor | train | notebooks`."""

import argparse
import importlib
import io
import os
import sys
from collections.abc import Sequence

from labkit.commands.terms import in_options

COMMANDS = {
    "doctor": "say what this machine can run, what will be skipped, and the remedies",
    "train": "train a preset on a folder of text, here or under torchrun",
    "notebooks": "list, execute or test the notebooks of the book",
}
"""Modules of `labkit.commands`, each loaded only when it is called."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status.

    A mistake in its use gives 2; a disk or a memory that fails it, or a run that
    diverges, gives 1.
    An interrupt gives 130 and a reader that goes away 141, as in a shell.
    """
    if isinstance(sys.stdout, io.TextIOWrapper):  # what it cannot show becomes "?"
        sys.stdout.reconfigure(errors="replace")
    listing = "\n".join(f"  {name:<12}{text}" for name, text in COMMANDS.items())
    parser = argparse.ArgumentParser(
        prog="python -m labkit",
        description="Train a DeepSeek-V3-class model inside what you have.",
        epilog=f"commands:\n{listing}\n\npython -m labkit COMMAND --help says more.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("command", choices=COMMANDS, metavar="COMMAND")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    arguments = sys.argv[1:] if arguments is None else arguments
    if not arguments:
        parser.print_help()
        return 2
    chosen = parser.parse_args(arguments)
    return _run(chosen.command, chosen.arguments)


def _run(name: str, arguments: Sequence[str]) -> int:
    command = importlib.import_module(f"labkit.commands.{name}")
    parser = argparse.ArgumentParser(
        prog=f"python -m labkit {name}", description=f"{COMMANDS[name].capitalize()}."
    )
    command.add_arguments(parser)
    options = parser.parse_args(arguments)
    try:
        status = command.run(options)
        sys.stdout.flush()
        return status
    except BrokenPipeError:
        # At exit Python would write the rest again, and complain.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except (ValueError, OSError, FloatingPointError, MemoryError) as error:
        message = in_options(str(error) or "out of memory", command.TERMS)
        print(f"labkit {name}: {message}", file=sys.stderr)
        return 2 if isinstance(error, ValueError) else 1
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
