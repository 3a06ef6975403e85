"""The set-up starts anew where an earlier one broke off, and says what it lacks."""

import importlib.util
import shutil
import subprocess
import sys
import venv
from collections import namedtuple
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def setup(tmp_path, monkeypatch):
    """The set-up script of a checkout in an empty folder."""
    spec = importlib.util.spec_from_file_location("setup", ROOT / ".ci" / "setup.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    for name in ("VENV", "STAMP", "LOG", "PYTHON"):
        inside = getattr(module, name).relative_to(ROOT)
        monkeypatch.setattr(module, name, tmp_path / inside)
    monkeypatch.setattr(module, "ROOT", tmp_path)
    monkeypatch.setattr(sys, "argv", ["setup.py"])
    return module


@pytest.fixture
def installed(setup, monkeypatch):
    """The same after a set-up whose packages came at once; `setup.runs` counts."""
    setup.runs = []
    monkeypatch.setattr(setup, "make_environment", lambda: make_empty(setup))
    monkeypatch.setattr(setup, "pip", lambda *call, **_: setup.runs.append(call))
    setup.main()
    setup.runs.clear()
    return setup


def make_empty(setup) -> None:
    setup.PYTHON.parent.mkdir(parents=True, exist_ok=True)
    setup.PYTHON.touch()


def test_a_finished_installation_is_left_alone(installed):
    installed.main()

    assert installed.runs == []


def test_changed_requirements_install_again(installed):
    with (installed.ROOT / "pyproject.toml").open("a") as file:
        file.write("\n# changed\n")
    installed.main()

    assert len(installed.runs) == 2


def test_a_moved_checkout_installs_again(installed, monkeypatch):
    moved = installed.ROOT / "moved"
    moved.mkdir()
    shutil.copy(installed.ROOT / "pyproject.toml", moved)
    monkeypatch.setattr(installed, "ROOT", moved)
    installed.main()

    assert len(installed.runs) == 2


@pytest.mark.parametrize("end", [KeyboardInterrupt, SystemExit])
def test_an_installation_that_did_not_finish_leaves_no_stamp(
    installed, monkeypatch, end
):
    installed.STAMP.unlink()

    def break_off(*call, **_):
        raise end

    monkeypatch.setattr(installed, "pip", break_off)
    with pytest.raises(SystemExit):
        installed.main()
    assert not installed.is_up_to_date()


def test_a_half_unpacked_package_is_noticed(setup):
    venv.create(setup.VENV, with_pip=True)
    assert setup.passes_check()

    (found,) = setup.VENV.glob("[lL]ib/**/site-packages/pip/_internal/main.py")
    found.unlink()
    assert not setup.passes_check()


def test_a_file_renamed_in_the_checkout_breaks_nothing(setup, monkeypatch, tmp_path):
    venv.create(setup.VENV, with_pip=True)
    built = tmp_path / "labkit.egg-info"
    built.mkdir()
    (built / "PKG-INFO").write_text("Name: labkit\nVersion: 0\n")
    (built / "SOURCES.txt").write_text("labkit/old_name.py\n")
    monkeypatch.chdir(tmp_path)

    assert setup.passes_check()


def test_a_broken_environment_is_made_anew(setup, monkeypatch):
    setup.VENV.mkdir()
    setup.STAMP.write_text(setup.stamp())
    made = []
    monkeypatch.setattr(venv, "create", lambda *at, **how: made.append((at, how)))
    setup.make_environment()

    ((at, how),) = made
    assert at == (setup.VENV,)
    assert how["clear"]
    assert not setup.is_up_to_date()


def test_an_environment_whose_python_is_gone_is_noticed(setup):
    setup.VENV.mkdir()

    assert not setup.passes_check()


def message_of(function, *arguments) -> str:
    with pytest.raises(SystemExit) as caught:
        function(*arguments)
    return str(caught.value)


def test_another_python_is_refused(setup, monkeypatch):
    monkeypatch.setattr(setup.sys, "version_info", (3, 10, 14, "final", 0))

    assert message_of(setup.check_python) == (
        "set-up needs Python 3.11, 3.12 or 3.13; this is 3.10.14"
    )


def test_a_python_without_venv_comes_with_the_remedy(setup, monkeypatch):
    monkeypatch.setattr(setup.sys, "version_info", (3, 12, 1, "final", 0))
    monkeypatch.setitem(sys.modules, "ensurepip", None)

    assert message_of(setup.check_python) == (
        "set-up needs Python's venv module, which this Python 3.12.1 came without: on "
        "Debian and Ubuntu, sudo apt-get install python3.12-venv"
    )


def test_a_full_disk_is_noticed_before_anything_is_written(setup, monkeypatch):
    usage = namedtuple("usage", "total used free")(10**12, 10**12, 10**9)
    monkeypatch.setattr(setup.shutil, "disk_usage", lambda folder: usage)

    assert message_of(setup.make_environment) == (
        f"set-up needs about 3 GB of disk; {setup.ROOT} has 1.0 GB free: free some, "
        "then run this again"
    )
    assert not setup.VENV.exists()


UNREACHABLE = (
    "WARNING: Retrying after connection broken by 'NewConnectionError'\n"
    "ERROR: No matching distribution found for torch==2.13.0\n"
)


@pytest.mark.parametrize(
    ("log", "remedy"),
    [
        ("OSError: [Errno 28] No space left on device", "the disk is full"),
        (UNREACHABLE, "the package index cannot be reached"),
        ("No matching distribution found for torch==2.13.0", "there is no torch for"),
        ("No matching distribution found for numpy==2.4.6", "a package is not in"),
        ("anything else", "pip says why above and in"),
    ],
)
def test_a_failed_pip_ends_in_one_line_with_the_remedy(setup, monkeypatch, log, remedy):
    setup.VENV.mkdir()

    def fail(command, cwd):
        setup.LOG.write_text(log)
        return subprocess.CompletedProcess(command, 1)

    monkeypatch.setattr(setup.subprocess, "run", fail)
    message = message_of(setup.pip, "torch")

    assert message.startswith(f"set-up failed: {remedy}")
    assert "\n" not in message


@pytest.mark.skipif(shutil.which("make") is None, reason="needs make: install it")
def test_make_says_which_pythons_it_looked_for():
    command = ["make", "setup", "PYTHON=no-such-python"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)

    assert done.returncode != 0
    assert done.stderr.splitlines()[0] == (
        "labkit needs Python 3.11, 3.12 or 3.13, and found none of: no-such-python. "
        "Install one, or name it: make lab PYTHON=/path/to/python3.12"
    )
