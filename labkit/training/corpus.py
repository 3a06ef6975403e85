"""Real text as byte tokens: the standard library's source, or any folder.

A token is a byte, so the vocabulary has 256 entries and no tokenizer is needed.
Documents follow one another, each closed by `SEPARATOR`, and training windows are
cut across them without a mask, as DeepSeek-V3 packs its own (section 4.1). The
token stream is written once to the user's cache folder and memory-mapped, so that
several processes share one copy.
"""

import hashlib
import logging
import platform
import sysconfig
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Int, UInt8
from torch import Tensor

from labkit.data import cache_folder
from labkit.training.documents import (
    Found,
    Piece,
    find_documents,
    read_text_bytes,
    split_documents,
)
from labkit.training.windows import require_window

SEPARATOR = 0
"""The token that closes each document; no text contains it."""

VALID_FRACTION = 0.05

LIBRARY_SKIPPED = frozenset(
    {"test", "tests", "idle_test", "site-packages", "dist-packages"}
    | {"idlelib", "turtledemo", "lib2to3", "ensurepip"}
    | {"encodings", "pydoc_data"}  # generated tables
)
"""Folders of the standard library that are not library source."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class Corpus:
    """A training and a validation stream of byte tokens."""

    name: str
    train: UInt8[np.ndarray, "n"] = field(repr=False)
    valid: UInt8[np.ndarray, "m"] = field(repr=False)
    fingerprint: str
    """Digest of the content and its order: equal streams have equal fingerprints."""

    folder: Path | None = None
    """Where the text came from; None for the standard library."""

    n_documents: int = 1
    n_skipped: int = 0
    """Files passed over as binary, unreadable or not UTF-8."""

    def __repr__(self) -> str:
        return (
            f"Corpus({self.name}: {self.n_documents:,} documents, "
            f"{len(self.train):,} training and {len(self.valid):,} validation bytes)"
        )

    @property
    def source(self) -> dict[str, Any]:
        """What `reopen` needs to find this text again, as plain values."""
        folder = None if self.folder is None else str(self.folder)
        return {"folder": folder, "fingerprint": self.fingerprint}


@dataclass(frozen=True, eq=False, slots=True)
class _Text:
    """Documents shared out between training and validation, not yet read."""

    name: str
    folder: Path | None
    found: Found
    train: list[Piece]
    valid: list[Piece]
    fingerprint: str


def standard_library(
    *, seq_len: int | None = None, cache: Path | None = None
) -> Corpus:
    """Return the Python standard library's own source, from this machine.

    Tests, generated tables and installed packages are left out. The text differs
    between Python versions; `fingerprint` tells which one it was.

    Args:
        seq_len: as for `from_folder`.
        cache: folder for the token file; None takes the user's cache folder.
    """
    return _open(_library_text(), seq_len=seq_len, cache=cache)


def _library_text() -> _Text:
    folder = Path(sysconfig.get_paths()["stdlib"])
    found = find_documents(folder, suffix=".py", skip=LIBRARY_SKIPPED)
    if not found.documents:
        raise ValueError(
            f"this Python has no library source: no .py file is below {folder}. "
            "Give a folder of text to corpus.from_folder instead."
        )
    name = f"Python {platform.python_version()} standard library"
    return _share_out(name, found, folder=None)


def from_folder(
    path: str | Path, *, seq_len: int | None = None, cache: Path | None = None
) -> Corpus:
    """Return all UTF-8 text below a folder, hidden folders left out.

    Args:
        path: the folder; it is searched at every depth.
        seq_len: tokens per sequence of the run to come: a text too short for it is
            refused before its token file is written. None does not ask.
        cache: folder for the token file; None takes the user's cache folder.
    """
    return _open(_folder_text(path), seq_len=seq_len, cache=cache)


def _folder_text(path: str | Path) -> _Text:
    folder = _resolved(path)
    if folder.is_file():
        raise ValueError(
            f"a corpus is a folder, but {folder} is a file. Give {folder.parent}."
        )
    if not folder.is_dir():
        raise ValueError(
            f"corpus folder not found: {folder}. Give a folder that holds text files."
        )
    found = find_documents(folder)
    if not found.documents:
        raise ValueError(
            f"no text found below {folder}: {found.n_skipped} files were skipped as "
            "binary, unreadable or not UTF-8. Give a folder that holds text files."
        )
    return _share_out(folder.name, found, folder=folder)


def _resolved(path: str | Path) -> Path:
    """Return the absolute path; ValueError if it leads nowhere, as `~nobody` does."""
    try:
        folder = Path(path).expanduser().resolve()
        folder.is_dir()
    except (RuntimeError, OSError) as error:  # RuntimeError: links in a loop, no home
        reason = getattr(error, "strerror", None) or str(error).rstrip(".")
        raise ValueError(
            f"corpus folder not found: {path} ({reason}). "
            "Give a folder that holds text files."
        ) from error
    return folder


def reopen(source: dict[str, Any], *, cache: Path | None = None) -> Corpus:
    """Return the corpus that `Corpus.source` described, if its text is unchanged."""
    folder = source["folder"]
    text = _library_text() if folder is None else _folder_text(folder)
    require_same_text(text, source["fingerprint"])
    return _open(text, cache=cache)


def require_same_text(text: Corpus | _Text, fingerprint: str) -> None:
    """Raise ValueError unless a text has the fingerprint of an earlier run."""
    if text.fingerprint != fingerprint:
        raise ValueError(
            f"the text of {text.name} changed since the run began: its fingerprint "
            f"is {text.fingerprint[:12]}, not {fingerprint[:12]}. "
            "Restore the text, or start a new run."
        )


def encode(text: str) -> Int[Tensor, "s"]:
    """Return the tokens of a text: its UTF-8 bytes.

    >>> encode("def").tolist()
    [100, 101, 102]
    """
    return torch.tensor(list(text.encode("utf-8")), dtype=torch.int64)


def decode(tokens: Int[Tensor, "s"]) -> str:
    """Return the text of some tokens; bytes that are not UTF-8 show as `�`.

    >>> decode(encode("naïve"))
    'naïve'
    """
    return bytes(tokens.tolist()).decode("utf-8", errors="replace")


def _share_out(name: str, found: Found, *, folder: Path | None) -> _Text:
    train, valid = split_documents(found.documents, VALID_FRACTION)
    return _Text(
        name=name,
        folder=folder,
        found=found,
        train=train,
        valid=valid,
        fingerprint=_fingerprint(train, valid),
    )


def _open(
    text: _Text, *, seq_len: int | None = None, cache: Path | None = None
) -> Corpus:
    n_train, n_valid = (
        sum(piece.n_tokens for piece in side) for side in (text.train, text.valid)
    )
    if seq_len is not None:
        require_window(n_train, seq_len, "training text")
        require_window(n_valid, seq_len, "validation text")
    pieces = [*text.train, *text.valid]
    tokens = _open_tokens(text.fingerprint, pieces, cache)
    return Corpus(
        name=text.name,
        train=tokens[:n_train],
        valid=tokens[n_train:],
        fingerprint=text.fingerprint,
        folder=text.folder,
        n_documents=len(text.found.documents),
        n_skipped=text.found.n_skipped,
    )


def _fingerprint(train: list[Piece], valid: list[Piece]) -> str:
    digest = hashlib.sha256()
    for side in (train, valid):
        digest.update(b"side")
        for piece in side:
            digest.update(piece.document.digest)
            digest.update(f"{piece.start}:{piece.stop};".encode())
    return digest.hexdigest()


def _open_tokens(
    fingerprint: str, pieces: list[Piece], cache: Path | None
) -> UInt8[np.ndarray, "n"]:
    """Map the token file of this content, writing it first if it is missing."""
    n_tokens = sum(piece.n_tokens for piece in pieces)
    try:
        path = (cache or cache_folder()) / f"tokens-{fingerprint[:32]}.bin"
        if not path.is_file() or path.stat().st_size != n_tokens:
            _write_tokens(path, pieces)
        return np.memmap(path, dtype=np.uint8, mode="r")
    except OSError as error:
        logger.warning("tokens are kept in memory, not in a file: %s", error)
        stream = b"".join(map(_read_piece, pieces))
        return np.frombuffer(stream, dtype=np.uint8)


def _write_tokens(path: Path, pieces: list[Piece]) -> None:
    """Write the token stream under another name, then move it into place."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=".tokens-") as folder:
        partial = Path(folder, path.name)
        with partial.open("wb") as file:
            for piece in pieces:
                file.write(_read_piece(piece))
        partial.replace(path)


def _read_piece(piece: Piece) -> bytes:
    path = piece.document.path
    content = read_text_bytes(path)
    if content is None or len(content) != piece.document.n_bytes:
        raise ValueError(f"{path} changed while it was read. Read the corpus again.")
    return content[piece.start : piece.stop] + bytes([SEPARATOR])
