"""What this machine is: processor, memory, disk, accelerators, compiler."""

import os
import platform
import shutil
from dataclasses import dataclass

import psutil
import torch

from labkit.data import DATA
from labkit.hardware.cgroups import cgroup_limits
from labkit.hardware.units import memory

CPU_FEATURES = (
    "avx2",
    "avx512_f",
    "avx512_bf16",
    "avx512_fp16",
    "amx_bf16",
    "amx_fp16",
    "neon",
    "sve",
)
"""Instruction sets that decide how fast matrix products are, by torch's names."""

CXX_COMPILERS = ("c++", "g++", "clang++", "cl")
"""Compilers that torch.compile can use for CPU code."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Device:
    """One accelerator that torch can use here."""

    backend: str
    """`cuda` (also for AMD), `mps`, `xpu`, …"""

    name: str
    memory_bytes: int | None
    """None where torch does not say."""


@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class Machine:
    """This machine, as far as it concerns training."""

    system: str
    processor: str
    cpu_features: tuple[str, ...]
    n_physical_cores: int
    n_logical_cores: int

    n_usable_cores: int
    """Cores left by the affinity mask and the control group."""

    memory_bytes: int
    available_memory_bytes: int

    memory_limit_bytes: int | None
    """Limit of the control group, as in a container; None is no limit."""

    disk_free_bytes: int
    """On the disk that holds the checkout."""

    python_version: str
    torch_version: str
    devices: tuple[Device, ...]

    cxx_compiler: str | None
    """Path of a C++ compiler, which torch.compile needs on a CPU."""

    @property
    def usable_memory_bytes(self) -> int:
        """Memory that a run may count on now."""
        limit = self.memory_limit_bytes
        free = self.available_memory_bytes
        return free if limit is None else min(free, limit)

    @property
    def backends(self) -> tuple[str, ...]:
        """Where torch can compute; the CPU is first and always there."""
        return ("cpu", *dict.fromkeys(device.backend for device in self.devices))

    def __repr__(self) -> str:
        cores = f"{self.n_usable_cores} of {self.n_logical_cores} logical cores usable"
        rows = {
            "processor": f"{self.processor}, {cores}",
            "instructions": ", ".join(self.cpu_features) or "none of note",
            "memory": f"{memory(self.usable_memory_bytes)} usable of "
            f"{memory(self.memory_bytes)}",
            "disk": f"{memory(self.disk_free_bytes)} free",
            "accelerators": "; ".join(map(_describe, self.devices)) or "none",
            "software": f"torch {self.torch_version}, Python {self.python_version}, "
            f"{self.system}",
            "C++ compiler": self.cxx_compiler or "none",
        }
        return "\n".join(f"{name:<14}{text}" for name, text in rows.items())


def detect() -> Machine:
    """Return what is here; takes milliseconds and measures nothing.

    Accelerators are listed by torch's own account; that path ran on a machine without
    one only.
    """
    limits = cgroup_limits()
    virtual = psutil.virtual_memory()
    capabilities = torch.cpu.get_capabilities()
    n_logical = psutil.cpu_count() or 1
    return Machine(
        system=platform.platform(terse=True),
        processor=capabilities.get("cpu_name") or platform.processor(),
        cpu_features=tuple(name for name in CPU_FEATURES if capabilities.get(name)),
        n_physical_cores=psutil.cpu_count(logical=False) or n_logical,
        n_logical_cores=n_logical,
        n_usable_cores=_usable_cores(n_logical, limits.cpus),
        memory_bytes=virtual.total,
        available_memory_bytes=virtual.available,
        memory_limit_bytes=limits.memory_bytes,
        disk_free_bytes=shutil.disk_usage(DATA).free,
        python_version=platform.python_version(),
        torch_version=torch.__version__,
        devices=_devices(),
        cxx_compiler=next(filter(None, map(shutil.which, CXX_COMPILERS)), None),
    )


def _usable_cores(n_logical: int, quota: float | None) -> int:
    n_cores = n_logical
    if hasattr(os, "sched_getaffinity"):
        n_cores = len(os.sched_getaffinity(0))
    return n_cores if quota is None else max(1, min(n_cores, int(quota)))


def _devices() -> tuple[Device, ...]:
    if not torch.accelerator.is_available():
        return ()
    backend = torch.accelerator.current_accelerator().type
    module = torch.get_device_module(backend)
    found = []
    for index in range(torch.accelerator.device_count()):
        name, n_bytes = backend, None
        if hasattr(module, "get_device_properties"):
            properties = module.get_device_properties(index)
            name, n_bytes = properties.name, properties.total_memory
        found.append(Device(backend=backend, name=name, memory_bytes=n_bytes))
    return tuple(found)


def _describe(device: Device) -> str:
    size = "" if device.memory_bytes is None else f", {memory(device.memory_bytes)}"
    return f"{device.name} ({device.backend}{size})"
