"""What the tests of the model share: one thread, and transformers kept quiet."""

from collections.abc import Iterator

import pytest
import torch


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
