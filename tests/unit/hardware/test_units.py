"""Sizes as people write them, there and back."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from labkit.hardware.units import from_memory, memory


@given(st.integers(1, 999 * 2**40))
def test_a_size_that_was_spelled_is_read_to_its_three_digits(n_bytes):
    assert from_memory(memory(n_bytes)) == pytest.approx(n_bytes, rel=0.006)


@pytest.mark.parametrize("text", ["", "GiB", "2GB", "-1GiB", "0", "0.5B", "1e3", "2 3"])
def test_what_is_no_size_is_refused(text):
    with pytest.raises(ValueError) as error:
        from_memory(text)
    assert str(error.value) == (
        "a size must be a number above 0 with a unit of B, KiB, MiB, GiB, TiB; got "
        f"{text!r}. Write 2GiB or 500MiB, for example."
    )
