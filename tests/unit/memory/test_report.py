"""A report's peak is the fullest instant, and its total the sum of fullest parts."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from labkit.memory.report import PARTS, Instant, MemoryReport

INSTANTS = st.builds(
    Instant,
    name=st.text(max_size=3),
    by_part=st.dictionaries(st.sampled_from(PARTS), st.integers(0, 10**15)),
)


def test_parts_that_never_meet_are_not_added():
    forward = Instant(name="forward", by_part={"weights": 10, "activations": 7})
    update = Instant(name="update", by_part={"weights": 10, "temporaries": 5})
    report = MemoryReport(timeline=(forward, update))

    assert report.peak == 17
    assert report.peak_instant is forward
    assert report.total == 22
    assert report.persistent == 10
    assert report.by_part == {"weights": 10, "activations": 7, "temporaries": 5}


@given(st.lists(INSTANTS, min_size=1, max_size=4))
def test_the_peak_lies_between_the_persistent_parts_and_the_total(instants):
    report = MemoryReport(timeline=tuple(instants))

    assert report.peak == max(instant.total for instant in instants)
    assert report.peak <= report.total
    assert report.persistent <= report.total
    assert list(report.by_part) == [part for part in PARTS if part in report.by_part]


@pytest.mark.parametrize("by_part", [{"stuff": 1}, {"weights": -1}])
def test_a_part_without_a_name_or_with_negative_bytes_is_refused(by_part):
    with pytest.raises(ValueError, match="by_part maps names in weights, master"):
        Instant(name="x", by_part=by_part)


def test_a_report_without_an_instant_is_refused():
    with pytest.raises(ValueError, match="timeline must hold an instant at least"):
        MemoryReport(timeline=())
