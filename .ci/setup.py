"""Make `.venv` with labkit in it, or mend one that an earlier try left half done.

Runs on the standard library of any Python 3.11 to 3.13, from any folder:

    python3 .ci/setup.py [--torch-index ADDRESS]

A stamp is written last. It holds this folder and the text of pyproject.toml, so that
a moved checkout or a changed requirement installs again, and all else costs nothing.
"""

import argparse
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
STAMP = VENV / "labkit-installed"
LOG = VENV / "pip.log"
PYTHON = VENV / ("Scripts/python.exe" if sys.platform == "win32" else "bin/python")

NEEDED_BYTES = 3 * 10**9
"""Free disk for the CPU build of torch, everything else, and pip's unpacking."""

REMEDIES = {
    "No space left on device": "the disk is full: free about 3 GB (10 GB for a torch "
    "with CUDA), then run this again",
    "connection broken by": "the package index cannot be reached: connect to the "
    "network, or set pip's proxy or index, then run this again",
    "No matching distribution found for torch": "there is no torch for this computer "
    "and Python: use 64-bit Linux, Windows, or macOS on Apple silicon, and Python 3.11 "
    "to 3.13",
    "No matching distribution found": "a package is not in the index, as the line "
    "above says: check which index pip is set to",
}
"""What pip's log says, and what to do about it; the first that is found counts."""

CHECK = """
import importlib.metadata as metadata, pip, sys

def is_whole(distribution):
    files = distribution.files
    return files is not None and all(
        file.locate().exists() for file in files if file.suffix != ".pyc"
    )

assert (3, 11) <= sys.version_info < (3, 14)
assert all(map(is_whole, metadata.distributions()))
"""
"""Run by the Python inside: fails where a package was unpacked in part."""


def main() -> None:
    """Bring `.venv` up to date, or end with one line that says what is lacking."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--torch-index", default="", help="an extra package index, for torch only"
    )
    options = parser.parse_args()
    if is_up_to_date():
        return
    check_python()
    try:
        make_environment()
        install(options.torch_index)
    except KeyboardInterrupt:
        sys.exit("\nset-up stopped; run the same command again to go on")
    STAMP.write_text(stamp(), encoding="utf-8")


def stamp() -> str:
    """Return what a finished installation is for: this folder, these requirements."""
    return f"{ROOT}\n{(ROOT / 'pyproject.toml').read_text(encoding='utf-8')}"


def is_up_to_date() -> bool:
    """Return whether the last installation ended well and still fits."""
    is_stamped = STAMP.is_file() and STAMP.read_text(encoding="utf-8") == stamp()
    return is_stamped and PYTHON.exists()


def check_python() -> None:
    """Exit unless this Python can make a virtual environment that labkit runs in."""
    version = ".".join(map(str, sys.version_info[:3]))
    if not (3, 11) <= sys.version_info < (3, 14):
        sys.exit(f"set-up needs Python 3.11, 3.12 or 3.13; this is {version}")
    try:
        import ensurepip  # noqa: F401
        import venv  # noqa: F401
    except ImportError:
        package = f"python{sys.version_info[0]}.{sys.version_info[1]}-venv"
        sys.exit(
            f"set-up needs Python's venv module, which this Python {version} came "
            f"without: on Debian and Ubuntu, sudo apt-get install {package}"
        )


def make_environment() -> None:
    """Make `.venv`, unless a whole one is there: then only its packages are mended."""
    if VENV.exists() and passes_check():
        return
    free = shutil.disk_usage(ROOT).free
    if VENV.exists():
        print("set-up: .venv is not whole; making it anew")
    elif free < NEEDED_BYTES:
        sys.exit(
            f"set-up needs about {NEEDED_BYTES / 1e9:.0f} GB of disk; {ROOT} has "
            f"{free / 1e9:.1f} GB free: free some, then run this again"
        )
    import venv

    STAMP.unlink(missing_ok=True)
    try:
        venv.create(VENV, clear=True, with_pip=True, symlinks=sys.platform != "win32")
    except (OSError, subprocess.CalledProcessError) as error:
        sys.exit(f"set-up cannot make {VENV}: {error}")


def passes_check() -> bool:
    """Return whether `.venv` starts, and every package in it has all its files."""
    if not PYTHON.exists():
        return False
    # Isolated, or it would ask for files that the checkout had at the last build.
    command = [PYTHON, "-I", "-c", CHECK]
    return subprocess.run(command, capture_output=True).returncode == 0


def install(torch_index: str) -> None:
    """Install torch at its pinned version, then labkit: nothing may bring another."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    requirements = project["project"]["dependencies"]
    torch = next(line for line in requirements if line.startswith("torch=="))
    pip(torch, *(["--extra-index-url", torch_index] if torch_index else []))
    print("set-up: about a hundred small packages follow, in a minute or two")
    pip("--editable", ".[test]", is_quiet=True)


def pip(*arguments: str, is_quiet: bool = False) -> None:
    """Run `pip install`, and end with one line that says why if it fails."""
    print("set-up: pip install", *arguments, flush=True)
    LOG.unlink(missing_ok=True)
    volume = ["--quiet"] if is_quiet else []
    command = [PYTHON, "-m", "pip", *volume, "--log", LOG, "install", *arguments]
    if subprocess.run(command, cwd=ROOT).returncode == 0:
        LOG.unlink(missing_ok=True)  # tens of megabytes
        return
    log = LOG.read_text(encoding="utf-8", errors="replace") if LOG.exists() else ""
    found = (remedy for sign, remedy in REMEDIES.items() if sign in log)
    sys.exit(f"set-up failed: {next(found, f'pip says why above and in {LOG}')}")


if __name__ == "__main__":
    main()
