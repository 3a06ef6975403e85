"""What Linux control groups leave to a process: containers set their limits there."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, kw_only=True, slots=True)
class CgroupLimits:
    """Limits of the control group and its ancestors; None is unlimited."""

    memory_bytes: int | None = None

    cpus: float | None = None
    """CPU seconds per second."""


def cgroup_limits(
    membership: Path = Path("/proc/self/cgroup"),
    *,
    mount: Path = Path("/sys/fs/cgroup"),
) -> CgroupLimits:
    """Return the tightest limits that hold for this process, in version 1 or 2.

    Args:
        membership: which group the process belongs to, per controller.
        mount: where the groups are found. A container often mounts its own group
            there, so that the path in `membership` does not exist below it.
    """
    if not membership.is_file():
        return CgroupLimits()
    memory: list[int] = []
    cpus: list[float] = []
    for line in membership.read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        for group in _with_ancestors(mount, controllers, path):
            memory += _memory_limits(group)
            cpus += _cpu_limits(group)
    return CgroupLimits(
        memory_bytes=min(memory, default=None), cpus=min(cpus, default=None)
    )


def _with_ancestors(mount: Path, controllers: str, path: str) -> Iterator[Path]:
    root = mount / controllers if controllers else mount
    group = root / path.lstrip("/")
    yield group
    for parent in group.parents:
        if not parent.is_relative_to(root):
            return
        yield parent


def _memory_limits(group: Path) -> Iterator[int]:
    for name in ("memory.max", "memory.limit_in_bytes"):
        text = _read(group / name)
        # Version 1 spells "unlimited" as the largest page-aligned number.
        if text.isdigit() and int(text) < 2**60:
            yield int(text)


def _cpu_limits(group: Path) -> Iterator[float]:
    quota, _, period = _read(group / "cpu.max").partition(" ")
    if not quota:
        quota = _read(group / "cpu.cfs_quota_us")
        period = _read(group / "cpu.cfs_period_us")
    if quota.isdigit() and period.isdigit():
        yield int(quota) / int(period)


def _read(path: Path) -> str:
    return path.read_text().strip() if path.is_file() else ""
