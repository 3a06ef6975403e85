import os
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
import torch

from labkit.hardware import CgroupLimits, Device, cgroup_limits, detect, machine

GIB = 2**30


@pytest.fixture
def groups(tmp_path: Path):
    """A function that lays files of a fake cgroup tree and reads its limits."""

    def read(membership: str, files: dict[str, str]) -> CgroupLimits:
        (tmp_path / "cgroup").write_text(membership)
        for name, text in files.items():
            file = tmp_path / "mount" / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text + "\n")
        return cgroup_limits(tmp_path / "cgroup", mount=tmp_path / "mount")

    return read


def test_version_2_limits_are_read(groups):
    limits = groups(
        "0::/pod/app\n",
        {"pod/app/memory.max": "1073741824", "pod/app/cpu.max": "150000 100000"},
    )
    assert limits == CgroupLimits(memory_bytes=GIB, cpus=1.5)


def test_an_ancestor_may_be_tighter(groups):
    limits = groups(
        "0::/pod/app\n", {"pod/app/memory.max": "2000", "pod/memory.max": "1000"}
    )
    assert limits.memory_bytes == 1000


def test_max_is_no_limit(groups):
    limits = groups("0::/app\n", {"app/memory.max": "max", "app/cpu.max": "max 100000"})
    assert limits == CgroupLimits()


def test_a_container_finds_its_own_group_at_the_mount(groups):
    limits = groups("0::/docker/4f2a\n", {"memory.max": "4096"})
    assert limits.memory_bytes == 4096


def test_version_1_limits_are_read_per_controller(groups):
    limits = groups(
        "4:memory:/app\n3:cpu,cpuacct:/app\n1:name=systemd:/app\n",
        {
            "memory/app/memory.limit_in_bytes": "1073741824",
            "memory/memory.limit_in_bytes": "9223372036854771712",
            "cpu,cpuacct/app/cpu.cfs_quota_us": "50000",
            "cpu,cpuacct/app/cpu.cfs_period_us": "100000",
        },
    )
    assert limits == CgroupLimits(memory_bytes=GIB, cpus=0.5)


def test_an_unlimited_version_1_group_is_no_limit(groups):
    limits = groups(
        "4:memory:/\n3:cpu:/\n",
        {
            "memory/memory.limit_in_bytes": "9223372036854771712",
            "cpu/cpu.cfs_quota_us": "-1",
            "cpu/cpu.cfs_period_us": "100000",
        },
    )
    assert limits == CgroupLimits()


def test_a_system_without_groups_has_no_limits(tmp_path):
    assert cgroup_limits(tmp_path / "none", mount=tmp_path) == CgroupLimits()


def test_detect_agrees_with_the_system():
    found = detect()

    assert found.torch_version == torch.__version__
    assert found.n_logical_cores == psutil.cpu_count()
    assert found.memory_bytes == psutil.virtual_memory().total
    assert 1 <= found.n_usable_cores <= found.n_logical_cores
    assert 0 < found.usable_memory_bytes <= found.memory_bytes
    assert found.backends[0] == "cpu"


def test_a_container_with_one_and_a_half_cpus_has_one_core(monkeypatch):
    limits = CgroupLimits(cpus=1.5, memory_bytes=2**20)
    monkeypatch.setattr(machine, "cgroup_limits", lambda: limits)

    assert detect().n_usable_cores == 1
    assert detect().usable_memory_bytes == 2**20


def test_a_fraction_of_a_cpu_still_counts_as_one_core(monkeypatch):
    monkeypatch.setattr(machine, "cgroup_limits", lambda: CgroupLimits(cpus=0.2))

    assert detect().n_usable_cores == 1


@pytest.mark.skipif(
    not hasattr(os, "sched_getaffinity"), reason="needs an affinity mask: run on Linux"
)
def test_the_affinity_mask_counts(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0})

    assert detect().n_usable_cores == 1


def test_a_limit_above_the_free_memory_does_not_add_any():
    found = replace(detect(), available_memory_bytes=GIB, memory_limit_bytes=8 * GIB)

    assert found.usable_memory_bytes == GIB


def test_the_repr_names_what_matters():
    gpu = Device(backend="cuda", name="NVIDIA H200", memory_bytes=139 * GIB)
    found = replace(
        detect(),
        processor="Some CPU",
        n_usable_cores=2,
        n_logical_cores=8,
        memory_bytes=16 * GIB,
        available_memory_bytes=12 * GIB,
        memory_limit_bytes=None,
        disk_free_bytes=50 * GIB,
        devices=(gpu, gpu),
        cpu_features=("avx2",),
        cxx_compiler=None,
        torch_version="2.13.0",
        python_version="3.12.1",
        system="Linux",
    )
    assert found.backends == ("cpu", "cuda")
    assert repr(found).splitlines() == [
        "processor     Some CPU, 2 of 8 logical cores usable",
        "instructions  avx2",
        "memory        12 GiB usable of 16 GiB",
        "disk          50 GiB free",
        "accelerators  NVIDIA H200 (cuda, 139 GiB); NVIDIA H200 (cuda, 139 GiB)",
        "software      torch 2.13.0, Python 3.12.1, Linux",
        "C++ compiler  none",
    ]
