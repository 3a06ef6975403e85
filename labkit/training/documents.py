"""Text files below a folder: which count as documents, and how they are split.

A document is a regular file of UTF-8 text without the byte 0, which separates
documents in the token stream. Everything else is skipped and counted.
"""

import hashlib
import os
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

SKIPPED_FOLDERS = frozenset({"__pycache__", "node_modules"})
"""Folders that hold no text anyone wrote, besides all hidden ones."""

FAR_OFF = 4
"""Factor between the wanted share of validation and one that will not do."""


@dataclass(frozen=True, slots=True)
class Document:
    """A text file, known by its content."""

    path: Path
    digest: bytes
    """SHA-256 of the content."""

    n_bytes: int


@dataclass(frozen=True, slots=True)
class Piece:
    """The bytes `start` to `stop` of a document."""

    document: Document
    start: int
    stop: int

    @property
    def n_tokens(self) -> int:
        """Bytes of the piece and the separator behind them."""
        return self.stop - self.start + 1


@dataclass(frozen=True, slots=True)
class Found:
    """What a search found: documents by path, and how many files it skipped."""

    documents: tuple[Document, ...]
    n_skipped: int
    """Files that were binary, unreadable or not UTF-8."""


def find_documents(
    folder: Path, *, suffix: str = "", skip: Collection[str] = ()
) -> Found:
    """Read every file below `folder` whose name ends in `suffix`, in path order.

    Hidden folders, `SKIPPED_FOLDERS` and folders named in `skip` are left out. Empty
    files and copies of an earlier file are passed over. Links to folders are not
    followed.
    """
    documents: dict[bytes, Document] = {}
    n_skipped = 0
    for path in _files(folder, SKIPPED_FOLDERS.union(skip)):
        if not path.name.endswith(suffix):
            continue
        content = read_text_bytes(path)
        if content is None:
            n_skipped += 1
        elif content:
            digest = hashlib.sha256(content).digest()
            documents.setdefault(digest, Document(path, digest, len(content)))
    return Found(tuple(documents.values()), n_skipped)


def _files(folder: Path, skip: Collection[str]) -> Iterator[Path]:
    """Yield the files below `folder` in an order that any machine repeats."""
    for parent, folders, names in os.walk(folder):
        folders[:] = sorted(
            name for name in folders if name[0] != "." and name not in skip
        )
        for name in sorted(names):
            yield Path(parent, name)


def read_text_bytes(path: Path) -> bytes | None:
    """Return the content of a text file, or None if it is not one."""
    try:
        if not path.is_file():  # a pipe or a device would block the reader
            return None
        content = path.read_bytes()
        content.decode("utf-8")
    except (OSError, UnicodeDecodeError):
        return None
    return None if 0 in content else content


def split_documents(
    documents: tuple[Document, ...], valid_fraction: float
) -> tuple[list[Piece], list[Piece]]:
    """Share the documents between training and validation by their content.

    A document keeps its side whatever else the folder holds, unless that side would
    leave the other one empty. Where few documents, or very unequal ones, would then
    make the validation share of bytes `FAR_OFF` times too large or too small, the
    largest is cut near its end instead, for validation.
    """
    by_digest = sorted(documents, key=lambda document: document.digest)
    bound = int(valid_fraction * 2**64).to_bytes(8, "big")
    n_below = sum(document.digest < bound for document in documents)
    chosen = set(by_digest[: min(max(n_below, 1), len(documents) - 1)])
    n_valid = sum(document.n_bytes for document in chosen)
    wanted = valid_fraction * sum(document.n_bytes for document in documents)
    largest = max(documents, key=lambda document: (document.n_bytes, document.digest))
    is_far_off = not wanted / FAR_OFF <= n_valid <= wanted * FAR_OFF
    if (is_far_off or not chosen) and largest.n_bytes > 1:
        cut = max(largest.n_bytes - max(int(wanted), 1), 1)
        ends = [cut if d == largest else d.n_bytes for d in documents]
        pieces = zip(documents, ends, strict=True)
        train = [Piece(document, 0, end) for document, end in pieces]
        return train, [Piece(largest, cut, largest.n_bytes)]
    train, valid = [], []
    for document in documents:
        side = valid if document in chosen else train
        side.append(Piece(document, 0, document.n_bytes))
    return train, valid
