import argparse
from dataclasses import replace

import pytest

from labkit.commands import doctor
from labkit.hardware import Device, GemmSample, Roofline, detect

GIB = 2**30


@pytest.fixture
def machine():
    """A machine on which nothing is missing."""
    return replace(
        detect(),
        n_usable_cores=2,
        n_logical_cores=8,
        available_memory_bytes=12 * GIB,
        memory_bytes=16 * GIB,
        memory_limit_bytes=None,
        disk_free_bytes=50 * GIB,
        devices=(Device(backend="cuda", name="NVIDIA H200", memory_bytes=None),),
        cxx_compiler="/usr/bin/c++",
    )


@pytest.fixture
def roofline() -> Roofline:
    rates = {"float32": 100e9, "bfloat16": 250e9, "float16": 2e9}
    return Roofline(
        device="cpu",
        n_threads=2,
        samples=tuple(
            GemmSample(dtype=dtype, size=512, flops=flops, n_runs=3)
            for dtype, flops in rates.items()
        ),
        copy_bytes_per_second=20e9,
        fp8_cast_elements_per_second=2e9,
    )


@pytest.fixture
def find(machine, roofline):
    """The finding on one subject, on a machine that differs in the given fields."""

    def find(subject: str, **changes) -> doctor.Finding:
        findings = doctor.report(replace(machine, **changes), roofline)
        return next(found for found in findings if found.subject == subject)

    return find


def test_the_fast_dtypes_are_named_with_their_rates(find):
    assert find("dtypes").text == (
        "float32 100 GFLOP/s, bfloat16 250 GFLOP/s (fast here), "
        "float16 2 GFLOP/s (slow here)"
    )


def test_this_installation_has_the_pinned_versions(find):
    assert find("packages").state == "ok"


def test_packages_go_by_the_names_that_pip_gives_them(find, monkeypatch):
    monkeypatch.setattr(
        doctor.metadata, "requires", lambda _: ['pytest-xdist==3.8.0; extra == "test"']
    )
    assert find("packages").state == "ok"


def test_another_version_is_named(find, monkeypatch):
    version = doctor.metadata.version
    monkeypatch.setattr(
        doctor.metadata,
        "version",
        lambda name: "1.26.4" if name == "numpy" else version(name),
    )
    wanted = dict(doctor._pins())["numpy"]

    assert find("packages").state == "skip"
    assert find("packages").text == (
        f"numpy 1.26.4 instead of {wanted}: stored outputs may differ; "
        "pip install -e '.[test]'"
    )


def test_a_missing_package_stops_the_book(find, monkeypatch):
    version = doctor.metadata.version

    def without_nbval(name):
        if name == "nbval":
            raise doctor.metadata.PackageNotFoundError(name)
        return version(name)

    monkeypatch.setattr(doctor.metadata, "version", without_nbval)
    assert find("packages").state == "FAIL"
    assert find("packages").text == "nbval not installed: pip install -e '.[test]'"


@pytest.mark.parametrize(
    ("version", "state"),
    [
        ((3, 10, 14), "FAIL"),
        ((3, 11, 0), "ok"),
        ((3, 13, 9), "ok"),
        ((3, 14, 0), "FAIL"),
    ],
)
def test_python_must_be_a_supported_one(version, state):
    assert doctor._python(version).state == state


def test_little_memory_leaves_out_the_benchmarks(find):
    found = find("memory", available_memory_bytes=3 * GIB)

    assert found.state == "skip"
    assert found.text == (
        "3 GiB usable of 16 GiB; benchmarks want 4 GiB: close other programs"
    )


def test_too_little_memory_stops_the_book(find):
    found = find("memory", memory_limit_bytes=GIB)

    assert found.state == "FAIL"
    assert found.text == (
        "1 GiB usable of 16 GiB; a notebook needs 2 GiB: close other programs"
    )


def test_a_full_disk_stops_the_book(find):
    found = find("disk", disk_free_bytes=2**29)

    assert found.state == "FAIL"
    assert found.text == "512 MiB free; checkpoints need 1 GiB: remove some files"


def test_a_missing_compiler_comes_with_its_remedy(find):
    found = find("compiler", cxx_compiler=None)

    assert found.state == "skip"
    assert found.text.endswith("sudo apt-get install g++")


def test_a_missing_browser_comes_with_its_remedy(find, monkeypatch):
    monkeypatch.setattr(doctor.shutil, "which", lambda name: None)

    assert find("browser").state == "skip"
    assert find("browser").text.endswith("sudo apt-get install chromium")


def test_without_an_accelerator_the_report_says_what_that_means(find):
    assert find("accelerator").text == "NVIDIA H200"
    assert find("accelerator", devices=()).state == "skip"


def test_a_python_without_its_source_has_no_corpus(tmp_path):
    found = doctor._text(tmp_path)

    assert found.state == "FAIL"
    assert found.text == (
        f"no source in {tmp_path}: pass a folder of text to corpus.from_folder"
    )


@pytest.mark.parametrize(("disk", "status"), [(50 * GIB, 0), (2**20, 1)])
def test_the_exit_status_tells_whether_the_book_runs(
    machine, roofline, monkeypatch, capsys, disk, status
):
    monkeypatch.setattr(
        doctor, "detect", lambda: replace(machine, disk_free_bytes=disk)
    )
    monkeypatch.setattr(doctor, "measure", lambda *, seconds: roofline)

    assert doctor.run(argparse.Namespace(seconds=1.0)) == status
    *lines, blank, verdict = capsys.readouterr().out.splitlines()
    assert blank == ""
    assert ("cannot run here" in verdict) == (status == 1)
    # Every line is aligned: state, subject, text.
    assert all(line[5] == " " and line[19] == " " for line in lines)
    assert len({line[:20].rstrip() for line in lines}) == len(lines)
