"""The one door to `data/`: facts as files, each row with its source.

Both install routes are editable, so the folder is found beside the package. What a
program makes, and can make again, goes into the user's cache folder instead.
"""

import csv
import json
import os
import sys
from pathlib import Path
from typing import Any

DATA = Path(__file__).resolve().parent.parent / "data"


def data_path(*parts: str) -> Path:
    """Return the path of a file below `data/`; it must exist.

    Raises:
        ValueError: no such file, which means that the package was copied out of
            its checkout.
    """
    path = DATA.joinpath(*parts)
    if not path.exists():
        raise ValueError(
            f"data file not found: {'/'.join(parts)} is not below {DATA}. "
            "labkit runs from its checkout: install it with `pip install -e .`."
        )
    return path


def read_rows(*parts: str) -> list[dict[str, str]]:
    """Return the rows of a CSV file below `data/`, keyed by its header.

    >>> read_rows("models", "sources.csv")[0]["file"]
    'v2-lite-16b.json'
    """
    with data_path(*parts).open(newline="", encoding="utf-8") as lines:
        return list(csv.DictReader(lines))


def read_json(*parts: str) -> dict[str, Any]:
    """Return a JSON object below `data/`.

    >>> read_json("models", "v3-671b.json")["n_routed_experts"]
    256
    """
    return json.loads(data_path(*parts).read_text(encoding="utf-8"))


def cache_folder() -> Path:
    """Return where this platform keeps files that a program can make again.

    Raises:
        FileNotFoundError: the user has no home.
    """
    try:
        if sys.platform == "darwin":
            base = Path.home() / "Library" / "Caches"
        elif sys.platform == "win32":
            local = os.environ.get("LOCALAPPDATA")
            base = Path(local or Path.home() / "AppData" / "Local")
        else:
            base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    except RuntimeError as error:
        raise FileNotFoundError(
            f"there is no folder for caches: {error} Set HOME to a folder."
        ) from error
    return base / "labkit"
