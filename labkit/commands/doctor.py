"""`python -m labkit doctor`: what runs here, what will be skipped, and the remedies."""

import argparse
import shutil
import socket
import sys
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

import torch

from labkit.hardware import Machine, Roofline, detect, measure
from labkit.hardware.units import memory, rate

GIB = 2**30
LEAST_MEMORY = 2 * GIB
"""One kernel of the book and its JupyterLab; below it, notebooks are killed."""

AMPLE_MEMORY = 4 * GIB
"""The same with a browser, and the benchmarks beside transformers."""

LEAST_DISK = GIB
"""Checkpoints and caches of all notebooks, and to spare."""

LEAST_TEXT = 2**20
"""Bytes of source for the corpus of the book."""

TERMS = {"seconds": "--seconds"}

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
BROWSER_REMEDY = "Debian and Ubuntu: sudo apt-get install chromium"
INSTALL = "pip install -e '.[test]'"


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """One line of the report."""

    subject: str
    state: Literal["ok", "skip", "FAIL"]
    """`skip` leaves something out; `FAIL` means that the book cannot run."""

    text: str
    """What was found; with its remedy, unless the state is `ok`."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `doctor`."""
    parser.add_argument(
        "--seconds",
        type=float,
        default=3.0,
        help="time for measuring matrix products and bandwidth (default 3)",
    )


def run(options: argparse.Namespace) -> int:
    """Print the report; return 0 if the book can run here, 1 if not."""
    findings = report(detect(), measure(seconds=options.seconds))
    for finding in findings:
        print(f"{finding.state:<5} {finding.subject:<13} {finding.text}")
    n_failed = sum(finding.state == "FAIL" for finding in findings)
    n_skipped = sum(finding.state == "skip" for finding in findings)
    verdict = "cannot run here: see FAIL above" if n_failed else "runs here"
    print(f"\nThe book {verdict}; {n_skipped} of {len(findings)} things are left out.")
    return 1 if n_failed else 0


def report(machine: Machine, roofline: Roofline) -> list[Finding]:
    """Return all findings about this machine and this installation."""
    return [
        _python(sys.version_info[:3]),
        *_packages(),
        _processor(machine),
        _dtypes(roofline),
        _bandwidth(roofline),
        _memory(machine),
        _disk(machine),
        _accelerators(machine),
        _text(Path(sysconfig.get_path("stdlib"))),
        _processes(),
        _compiler(machine),
        _browser(),
        _tensorboard(),
    ]


def _python(version: tuple[int, int, int]) -> Finding:
    text = ".".join(map(str, version))
    if (3, 11) <= version < (3, 14):
        return Finding(subject="python", state="ok", text=text)
    text += "; the book needs 3.11, 3.12 or 3.13: make lab PYTHON=/path/to/python3.12"
    return Finding(subject="python", state="FAIL", text=text)


def _packages() -> Iterator[Finding]:
    """Compare what is installed with the exact versions that labkit asks for."""
    pins = dict(_pins())
    installed = {name: _version(name) for name in pins}
    missing = [name for name, version in installed.items() if version is None]
    if missing:
        text = f"{', '.join(missing)} not installed: {INSTALL}"
        yield Finding(subject="packages", state="FAIL", text=text)
    # The local part, as in 2.13.0+cpu, names the build and not the version.
    other = [
        f"{name} {version} instead of {pins[name]}"
        for name, version in installed.items()
        if version is not None and version.partition("+")[0] != pins[name]
    ]
    if other:
        text = f"{', '.join(other)}: stored outputs may differ; {INSTALL}"
        yield Finding(subject="packages", state="skip", text=text)
    if not missing and not other:
        text = f"torch {torch.__version__}; all {len(pins)} at the pinned versions"
        yield Finding(subject="packages", state="ok", text=text)


def _version(name: str) -> str | None:
    """Return the installed version of a distribution, whatever its modules' names."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _pins() -> Iterator[tuple[str, str]]:
    for requirement in metadata.requires("labkit") or ():
        requirement, _, marker = requirement.partition(";")
        name, is_pin, version = requirement.strip().partition("==")
        if is_pin and (not marker or 'extra == "test"' in marker):
            yield name, version


def _processor(machine: Machine) -> Finding:
    cores = f"{machine.n_usable_cores} of {machine.n_logical_cores} cores usable"
    features = ", ".join(machine.cpu_features) or "no vector units known"
    text = f"{machine.processor}, {cores}; {features}"
    return Finding(subject="processor", state="ok", text=text)


def _dtypes(roofline: Roofline) -> Finding:
    def judge(dtype: str, flops: float) -> str:
        speed = "fast" if dtype in roofline.fast_dtypes else "slow"
        verdict = "" if dtype == "float32" else f" ({speed} here)"
        return f"{dtype} {rate(flops, 'FLOP/s')}{verdict}"

    text = ", ".join(judge(*item) for item in roofline.gemm_flops.items())
    return Finding(subject="dtypes", state="ok", text=text)


def _bandwidth(roofline: Roofline) -> Finding:
    copy = rate(roofline.copy_bytes_per_second, "B/s")
    cast = rate(roofline.fp8_cast_elements_per_second, "values/s")
    text = f"copy {copy}; FP8 is storage on a CPU, rounded at {cast}"
    return Finding(subject="bandwidth", state="ok", text=text)


def _memory(machine: Machine) -> Finding:
    free = machine.usable_memory_bytes
    text = f"{memory(free)} usable of {memory(machine.memory_bytes)}"
    if free >= AMPLE_MEMORY:
        return Finding(subject="memory", state="ok", text=text)
    if free >= LEAST_MEMORY:
        text += f"; benchmarks want {memory(AMPLE_MEMORY)}: close other programs"
        return Finding(subject="memory", state="skip", text=text)
    text += f"; a notebook needs {memory(LEAST_MEMORY)}: close other programs"
    return Finding(subject="memory", state="FAIL", text=text)


def _disk(machine: Machine) -> Finding:
    text = f"{memory(machine.disk_free_bytes)} free"
    if machine.disk_free_bytes >= LEAST_DISK:
        return Finding(subject="disk", state="ok", text=text)
    text += f"; checkpoints need {memory(LEAST_DISK)}: remove some files"
    return Finding(subject="disk", state="FAIL", text=text)


def _accelerators(machine: Machine) -> Finding:
    names = ", ".join(device.name for device in machine.devices)
    if names:
        return Finding(subject="accelerator", state="ok", text=names)
    text = "none: everything runs on the CPU, and what needs a GPU is planned only"
    return Finding(subject="accelerator", state="skip", text=text)


def _text(library: Path) -> Finding:
    n_bytes = sum(path.stat().st_size for path in library.glob("*.py"))
    if n_bytes >= LEAST_TEXT:
        text = f"{memory(n_bytes)} of the standard library's source, and its packages"
        return Finding(subject="corpus", state="ok", text=text)
    text = f"no source in {library}: pass a folder of text to corpus.from_folder"
    return Finding(subject="corpus", state="FAIL", text=text)


def _processes() -> Finding:
    """Several ranks talk to each other over the loopback address."""
    if not torch.distributed.is_available():
        text = "this torch has no torch.distributed: install the wheel from PyPI"
        return Finding(subject="processes", state="FAIL", text=text)
    try:
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", 0))
    except OSError as error:
        text = f"no port on 127.0.0.1 ({error}): allow it in the firewall or sandbox"
        return Finding(subject="processes", state="FAIL", text=text)
    text = "torch.distributed over 127.0.0.1"
    return Finding(subject="processes", state="ok", text=text)


def _compiler(machine: Machine) -> Finding:
    if machine.cxx_compiler:
        return Finding(subject="compiler", state="ok", text=machine.cxx_compiler)
    text = "no C++ compiler, so no torch.compile; Debian: sudo apt-get install g++"
    return Finding(subject="compiler", state="skip", text=text)


def _browser() -> Finding:
    found = next(filter(None, map(shutil.which, BROWSERS)), None)
    if found:
        return Finding(subject="browser", state="ok", text=found)
    text = f"no Chromium, so browser tests are skipped; {BROWSER_REMEDY}"
    return Finding(subject="browser", state="skip", text=text)


def _tensorboard() -> Finding:
    if find_spec("tensorboard") is not None:
        version = metadata.version("tensorboard")
        return Finding(subject="tensorboard", state="ok", text=version)
    text = "not installed, so curves go to JSONL and the notebook only; "
    text += "pip install -e '.[tensorboard]'"
    return Finding(subject="tensorboard", state="skip", text=text)
