"""Published ranges beside a prediction, by hand, and the verdict that they allow."""

import re

import pytest

from labkit.config import PRESETS, Layout, TrainConfig
from labkit.memory.overheads import Range, fits, overheads
from labkit.memory.predict import predict
from labkit.memory.report import Instant, MemoryReport

TINY, TRAIN = PRESETS["tiny"], TrainConfig(seq_len=64)
GB = 10**9

REPORT = MemoryReport(
    timeline=(Instant(name="backward", by_part={"activations": 40 * GB}),),
    by_module={"0": 30 * GB, "1": 10 * GB},
)


def bounds(part: Range) -> tuple[int, int]:
    return part.low, part.high


def test_each_part_takes_what_is_published():
    more = overheads(REPORT, Layout(dp=8))

    assert bounds(more.rounding) == (0, 2 * 16 * 511)
    assert bounds(more.fragmentation) == (2 * GB, 12 * GB)
    assert bounds(more.communication) == (0.8 * GB, 2 * GB)
    assert bounds(more.context) == (0.3 * GB, 0.5 * GB)
    assert more.low == 3.1 * GB
    assert more.high == 14.5 * GB + 2 * 16 * 511
    assert all(part.source for part in more)


def test_a_rank_alone_has_no_buffers_for_others():
    assert bounds(overheads(REPORT).communication) == (0, 0)


def test_pipelines_round_up_what_each_micro_batch_keeps():
    rounding = overheads(REPORT, Layout(pp=4)).rounding

    assert rounding.high == 9 * 2 * 16 * 511


def test_a_cpu_has_none_of_them():
    more = overheads(REPORT, Layout(dp=8), "cpu")

    assert (more.low, more.high) == (0, 0)


@pytest.mark.parametrize(
    ("gigabytes", "verdict"),
    [(43, "does not fit"), (44, "uncertain"), (54, "uncertain"), (55, "fits")],
)
def test_between_least_and_most_the_verdict_is_uncertain(gigabytes, verdict):
    layout = Layout(dp=8)  # 40 GB, and 3.1 to 14.5 GB more

    assert fits(REPORT, gigabytes * GB + 2**20, layout=layout) == verdict


def test_what_a_verdict_calls_fitting_is_below_the_share_that_never_ran_out():
    # arXiv 2411.06465: of 454 runs none did whose estimate was below 80 % of a card.
    for peak in (20 * GB, 60 * GB):
        instant = Instant(name="backward", by_part={"activations": peak})
        report = MemoryReport(timeline=(instant,))
        fitting = next(n for n in range(1, 10**6) if fits(report, n * 10**8) == "fits")

        assert peak < 0.8 * fitting * 10**8


def test_the_capacity_of_an_accelerator_is_its_drivers():
    report = predict(PRESETS["v2-lite-16b"], TRAIN, device="h200")

    assert fits(report, device="h200") == "does not fit"
    assert fits(report, 2**40, device="h200") == "fits"


@pytest.mark.parametrize("device", ["cpu", "gpu"])
def test_a_device_without_a_name_has_no_capacity(device):
    with pytest.raises(ValueError) as error:
        fits(predict(TINY, TRAIN), device=device)

    assert str(error.value) == (
        "capacity must be given where device names no accelerator; got device="
        f"'{device}'. Set capacity to its bytes, or device='h800' or another."
    )


@pytest.mark.parametrize("layout", [0, "", []])
@pytest.mark.usefixtures("unchecked")
def test_only_none_is_one_rank_alone(layout):
    rule = re.escape(f"layout must be of type Layout or None; got {layout!r}.")
    with pytest.raises(ValueError, match=rule):
        overheads(REPORT, layout)
    with pytest.raises(ValueError, match=rule):
        fits(REPORT, GB, layout=layout)


@pytest.mark.parametrize("device", ["tpu", None, 0])
@pytest.mark.usefixtures("unchecked")
def test_a_verdict_is_of_a_device_that_is_known(device):
    rule = f"device must be 'cpu', 'gpu' or one of v100, .*; got {device!r}."
    for capacity in (None, GB):
        with pytest.raises(ValueError, match=rule):
            fits(REPORT, capacity, device=device)
