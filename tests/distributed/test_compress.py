"""Compressed sums of gradients on four real processes: exact in bytes, none lost."""

import pytest

from labkit.parallel.launch import launch
from tests.distributed import compressed

ERRORS = {
    "fp32": (0, 1e-6),
    "bf16": (1e-4, 5e-3),
    "fp8": (5e-3, 5e-2),
    "int8": (1e-3, 1e-2),
    "top-k": (0.5, 0.97),
    "power": (0.5, 0.97),
}
"""Of the first sum, relative to it: at least and at most. The last two keep little of
noise, which is what the gradients of these tests are."""


@pytest.fixture(scope="module")
def found() -> list[dict]:
    return launch(compressed.work_of_a_rank, compressed.N_RANKS, timeout=500)


EACH = pytest.mark.parametrize("name", compressed.MAKERS)
EACH_CODEC = pytest.mark.parametrize(
    "name", [n for n in compressed.MAKERS if n != "power"]
)


@EACH
def test_the_first_sum_is_as_near_as_the_bytes_allow(found, name):
    least, most = ERRORS[name]
    for rank in found:
        assert least <= rank[name]["steps"]["first"] <= most


@EACH
def test_with_feedback_nothing_is_lost_but_late(found, name):
    for rank in found:
        assert rank[name]["steps"]["lost"] < 1e-6


@pytest.mark.parametrize("name", ["top-k", "power"])
def test_without_feedback_what_is_not_sent_is_lost(found, name):
    for rank in found:
        forgetful, steps = rank[name]["forgetful"], rank[name]["steps"]
        assert forgetful["lost"] == forgetful["applied"]
        assert steps["applied"] < 0.9 * forgetful["applied"]


@EACH
def test_all_ranks_have_the_same_sum_bit_for_bit(found, name):
    assert all(rank[name]["steps"]["is_same"] for rank in found)


@EACH
def test_bytes_and_messages_are_as_predicted(found, name):
    for rank in found:
        assert rank[name]["steps"]["counted"] == rank[name]["steps"]["expected"]


@EACH
def test_feedback_holds_four_bytes_a_value_and_nothing_is_held_without(found, name):
    n_values = {"power": 24 * 18 + 720}.get(name, 24 * 18 + 7 + 720)
    starts = {"power": 4 * 2 * (18 + 3 * 12)}.get(name, 0)
    for rank in found:
        assert rank[name]["steps"]["state_bytes"] == 4 * n_values + starts
        assert rank[name]["forgetful"]["state_bytes"] == starts


@EACH
def test_an_overflow_is_seen_by_all_ranks_and_gone_in_the_next_step(found, name):
    for rank in found:
        assert rank[name]["overflow"] == {
            "is_seen": True,
            "is_kept_finite": True,
            "is_finite_after": True,
        }


@EACH
def test_ddp_with_several_buckets_sends_what_is_predicted(found, name):
    for rank in found:
        assert rank[name]["replicas"]["n_buckets"] > 2
        assert rank[name]["replicas"]["counted"] == rank[name]["replicas"]["expected"]


@EACH
def test_ddp_replicas_stay_the_same_and_gradients_are_sums(found, name):
    for rank in found:
        assert rank[name]["replicas"]["diverged"] == ()
        assert rank[name]["replicas"]["first"] < {"fp32": 1e-6}.get(name, 1)


@EACH_CODEC
def test_ddp_keeps_the_rest_of_each_parameter_once_whatever_the_buckets(found, name):
    for rank in found:
        replicas = rank[name]["replicas"]
        assert replicas["state_bytes"] == 4 * replicas["n_values"]


@EACH_CODEC
def test_fsdp_scatters_sums_in_the_bytes_that_are_predicted(found, name):
    for rank in found:
        shards = rank[name]["shards"]
        assert shards["counted"] == shards["expected"]
        assert shards["scattered"] == 0
        assert shards["first"] <= {"fp32": 1e-6, "top-k": 1}.get(name, ERRORS[name][1])


def test_a_gradient_of_low_rank_is_exact_also_after_a_step_without_any(found):
    assert all(rank["low rank"] < 1e-5 for rank in found)


def test_products_are_those_of_the_power_sgd_of_pytorch(found):
    for rank in found:
        assert len(rank["torch"]) == 2
        assert max(rank["torch"]) < 1e-5


def test_ranks_that_drift_apart_are_found_and_named(found):
    apart = tuple(
        f"{layer}.{name}" for layer in (1, 2, 3) for name in ("weight", "bias")
    )
    assert all(rank["unsummed"] == apart for rank in found)
