"""What the tests of the model share: one thread, quiet transformers, spoilt files."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Compute on one thread: on tensors this small, more only wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def quiet_transformers() -> None:
    """Show no progress bars and no reports on weights that a test leaves out."""
    from transformers.utils import logging

    logging.disable_progress_bar()
    logging.set_verbosity_error()


@pytest.fixture
def edit(
    tmp_path: Path,
) -> Callable[[Callable[[dict[str, torch.Tensor]], object]], None]:
    """Return what applies a change to the tensors of the single file in `tmp_path`."""

    def apply(change: Callable[[dict[str, torch.Tensor]], object]) -> None:
        path = tmp_path / "model.safetensors"
        tensors = load_file(path)
        change(tensors)
        save_file(tensors, path)

    return apply


@pytest.fixture
def edit_config(tmp_path: Path) -> Callable[..., None]:
    """Return what sets fields of `tmp_path/config.json`."""

    def apply(**fields: object) -> None:
        path = tmp_path / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | fields))

    return apply
