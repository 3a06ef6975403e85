"""What every test may rely on: two cores, fixed seeds, no network, own folders.

Nothing here imports labkit: the shape checks of the main run are woven in as it is
first imported, which is after this file.
"""

import os
import random
import shutil
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
BUILD = ROOT / "build"

OFFLINE = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "MPLBACKEND": "agg",
}


def pytest_configure(config: pytest.Config) -> None:
    """Set the environment before anything reads it."""
    scratch = Path(tempfile.mkdtemp(prefix="labkit-test-home-"))
    config.add_cleanup(lambda: shutil.rmtree(scratch, ignore_errors=True))
    own_folders = {
        "HF_HOME": scratch / "hf",
        "IPYTHONDIR": scratch / "ipython",
        "JUPYTER_CONFIG_DIR": scratch / "jupyter",
        "JUPYTER_DATA_DIR": scratch / "jupyter" / "data",
        "JUPYTER_RUNTIME_DIR": scratch / "jupyter" / "runtime",
        "XDG_CONFIG_HOME": scratch / "config",
        "XDG_CACHE_HOME": scratch / "cache",
        "MPLCONFIGDIR": BUILD / "matplotlib",
        # Kept between runs, because compiling takes longer than the tests themselves.
        "TORCHINDUCTOR_CACHE_DIR": BUILD / "inductor",
    }
    os.environ.update(OFFLINE | {name: str(path) for name, path in own_folders.items()})
    # What a shell starts in the background ignores it, and so would all its children.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    _limit_threads()
    _fix_hypothesis()


def _limit_threads() -> None:
    import torch

    n_workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    torch.set_num_threads(max(1, min(2, torch.get_num_threads()) // n_workers))


def _fix_hypothesis() -> None:
    """Draw the same examples in every run, so that a failure can be seen twice."""
    from hypothesis import settings

    settings.register_profile("same", derandomize=True, deadline=None, database=None)
    settings.load_profile("same")


@pytest.fixture(autouse=True)
def same_seed() -> Iterator[None]:
    """Start every test from the same global random state."""
    import numpy as np
    import torch

    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
    yield


@pytest.fixture
def unchecked() -> Iterator[None]:
    """Leave out the shape and type checks, for calls that are wrong on purpose."""
    from jaxtyping import config

    before = config.jaxtyping_disable
    config.update("jaxtyping_disable", True)
    yield
    config.update("jaxtyping_disable", before)
