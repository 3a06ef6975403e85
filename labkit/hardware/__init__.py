"""What the machine here can do, and what other accelerators could.

`detect` reads what is here, `measure` times it, and `ACCELERATORS` holds the data
sheets of those that are elsewhere.
"""

from labkit.hardware.accelerators import ACCELERATORS, Accelerator, accelerator
from labkit.hardware.cgroups import CgroupLimits, cgroup_limits
from labkit.hardware.machine import Device, Machine, detect
from labkit.hardware.roofline import GemmSample, Roofline, measure

__all__ = [
    "ACCELERATORS",
    "Accelerator",
    "CgroupLimits",
    "Device",
    "GemmSample",
    "Machine",
    "Roofline",
    "accelerator",
    "cgroup_limits",
    "detect",
    "measure",
]
