"""One stored form for a notebook, so that two runs of it give the same bytes.

What differs between runs is taken out (timings, process numbers, versions, widget
models). Numbers that a reader should see although they differ stay as they were
stored, for as long as everything around them is equal.
"""

import hashlib
import re
from collections.abc import Mapping
from typing import Any

from nbformat import NotebookNode, from_dict, writes

Output = Mapping[str, Any]

METADATA = {
    "kernelspec": {
        "display_name": "Python 3 (ipykernel)",
        "language": "python",
        "name": "python3",
    },
    "language_info": {"name": "python"},
}
"""Metadata of every stored notebook: no version, no widget state, no timings."""

KERNEL_FILE = re.compile(r"/\S*?ipykernel_\d+/\d+\.py")
"""A cell as warnings name it; the number is the kernel's process."""

VOLATILE = (
    re.compile(r'(?<=<data class="varies">)[^<]*(?=</data>)'),
    re.compile(r"(?<=data:image/png;base64,)[A-Za-z0-9+/=]*"),
)
"""Parts of a page that tests do not compare, and that may differ from run to run."""

IGNORED = "nbval-ignore-output"
"""Tag of a cell whose output no test compares."""


def normalise(
    notebook: NotebookNode, stored: NotebookNode | None = None
) -> NotebookNode:
    """Return the form in which a notebook is stored.

    Args:
        notebook: fresh from a run, or as it lies on disk.
        stored: the earlier form. Outputs that differ from it only in what varies are
            taken from it.
    """
    before = {} if stored is None else _by_id(stored)
    cells = []
    for cell, cell_id in zip(notebook.cells, _ids(notebook), strict=True):
        clean = {
            "id": cell_id,
            "cell_type": cell.cell_type,
            "source": cell.source.rstrip(),
            "metadata": {k: cell.metadata[k] for k in ("tags",) if k in cell.metadata},
        }
        if cell.cell_type == "code":
            clean["execution_count"] = cell.execution_count
            clean["outputs"] = _outputs(cell, before.get(cell_id))
        cells.append(clean)
    return from_dict(
        {"cells": cells, "metadata": METADATA, "nbformat": 4, "nbformat_minor": 5}
    )


def to_text(notebook: NotebookNode) -> str:
    """Return the notebook as the text of its file."""
    return writes(notebook, version=4) + "\n"


def comparable(text: str) -> str:
    """Return a page without what varies.

    >>> comparable('took <data class="varies">3 ms</data>')
    'took <data class="varies"></data>'
    """
    for pattern in VOLATILE:
        text = pattern.sub("", text)
    return text


def _ids(notebook: NotebookNode) -> list[str]:
    """Return an id for each cell, made of its text: whoever wrote it, the same id."""
    ids: list[str] = []
    for cell in notebook.cells:
        text = f"{cell.cell_type}\n{cell.source.rstrip()}"
        digest = hashlib.sha256(text.encode()).hexdigest()[:8]
        copies = sum(known.startswith(digest) for known in ids)
        ids.append(f"{digest}-{copies}" if copies else digest)
    return ids


def _by_id(notebook: NotebookNode) -> dict[str, NotebookNode]:
    return dict(zip(_ids(notebook), notebook.cells, strict=True))


def _outputs(cell: NotebookNode, before: NotebookNode | None) -> list[Output]:
    """Return the cell's clean outputs, or the stored ones where only noise differs."""
    fresh = [_clean(output) for output in _join_streams(cell.outputs)]
    if before is None:
        return fresh
    old = [_clean(output) for output in _join_streams(before.outputs)]
    if IGNORED in cell.metadata.get("tags", []):
        return old if [*map(_kind, old)] == [*map(_kind, fresh)] else fresh
    if len(old) != len(fresh):
        return fresh
    pairs = zip(fresh, old, strict=True)
    return [earlier if _same(now, earlier) else now for now, earlier in pairs]


def _join_streams(outputs: list[Output]) -> list[dict[str, Any]]:
    """Return the outputs with all text of one stream in one place, as nbval reads it.

    How a stream is cut into pieces depends on timing alone.
    """
    joined: list[dict[str, Any]] = []
    streams: dict[str, dict[str, Any]] = {}
    for output in map(dict, outputs):
        if output["output_type"] != "stream":
            joined.append(output)
        elif output["name"] in streams:
            streams[output["name"]]["text"] += output["text"]
        else:
            streams[output["name"]] = output
            joined.append(output)
    return joined


def _clean(output: dict[str, Any]) -> dict[str, Any]:
    """Return one output without process numbers and widget models."""
    if output["output_type"] == "stream":
        return output | {
            "text": KERNEL_FILE.sub("/tmp/ipykernel/cell.py", output["text"])
        }
    if "data" not in output:
        return output
    kept = {k: v for k, v in output["data"].items() if "widget-view" not in k}
    return output | {"data": kept}


def _kind(output: Output) -> tuple[str, ...]:
    """Return what an output consists of, whatever it says."""
    parts = output.get("data") or {output.get("name", ""): ""}
    return (output["output_type"], *sorted(parts))


def _same(fresh: Output, stored: Output) -> bool:
    """Return whether an output that may vary differs in nothing else."""
    varies = fresh.get("metadata", {}).get("labkit", {}).get("varies", False)
    if not varies or _kind(fresh) != _kind(stored):
        return False
    return all(
        comparable(fresh["data"][kind]) == comparable(stored["data"][kind])
        for kind in fresh["data"]
    )
