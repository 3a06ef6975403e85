from collections.abc import Callable
from pathlib import Path

import pytest

from labkit.__main__ import main
from labkit.training import corpus as corpora


@pytest.fixture
def text_folder(tmp_path: Path, monkeypatch) -> Path:
    monkeypatch.setattr(corpora, "cache_folder", lambda: tmp_path / "cache")
    folder = tmp_path / "text"
    folder.mkdir()
    for index in range(6):
        (folder / f"{index}.txt").write_text(f"document {index}\n" * 20)
    return folder


@pytest.fixture
def train(text_folder, tmp_path) -> Callable[..., int]:
    """Run `train` on the text in steps of a few tokens, into `tmp_path/run`."""

    def call(*options: str) -> int:
        return main(
            [
                "train",
                *("--corpus", str(text_folder), "--out", str(tmp_path / "run")),
                *("--seq-len", "16", "--global-batch", "2", *options),
            ]
        )

    return call
