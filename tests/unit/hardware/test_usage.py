import psutil
import torch

from labkit.hardware import detect
from labkit.hardware.usage import reachable_memory, used_memory

CPU = torch.device("cpu")


def test_a_process_uses_less_than_it_can_reach_and_that_less_than_there_is():
    assert 10**7 < used_memory(CPU) < reachable_memory(CPU)
    assert reachable_memory(CPU) <= psutil.virtual_memory().total


def test_a_control_group_limits_what_can_be_reached():
    limit = detect().memory_limit_bytes
    assert limit is None or reachable_memory(CPU) <= limit
