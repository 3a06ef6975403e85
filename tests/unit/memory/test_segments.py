"""Tapes in brief give the same sums as tapes in full."""

from hypothesis import given
from hypothesis import strategies as st

from labkit.memory.segments import Parts, chain, segment
from labkit.memory.tape import Kept, Op

BYTES = st.integers(0, 100)
OPS = st.builds(
    Op,
    module=st.uuids().map(str),
    kept=BYTES.map(lambda n: (Kept("input", n),)),
    gradient_bytes=BYTES,
    working_bytes=BYTES,
    early_bytes=BYTES,
)


@given(
    layer=st.lists(OPS, max_size=4, unique_by=lambda op: op.module),
    last=st.lists(OPS, max_size=3, unique_by=lambda op: op.module),
    n_layers=st.integers(0, 5),
    has_gradients=st.booleans(),
    has_buffer=st.booleans(),
)
def test_layers_in_brief_have_the_sums_of_layers_in_full(
    layer, last, n_layers, has_gradients, has_buffer
):
    options = {"has_gradients": has_gradients, "has_buffer": has_buffer}
    tape = [
        op._replace(module=f"{index}.{op.module}")
        for index in range(n_layers)
        for op in layer
    ]
    tape += last
    brief = segment(layer, **options)
    brief = chain([brief] * n_layers + [segment(last, **options)])
    full = segment(tape, **options)

    assert sum(brief.fullest) == sum(full.fullest)
    assert (brief.kept, brief.before, brief.after) == (
        full.kept,
        full.before,
        full.after,
    )


def test_what_a_run_owes_is_back_when_its_backward_begins():
    first = [Op("first", (Kept("input", 10),), working_bytes=1)]
    second = [Op("second", (Kept("input", 40),), working_bytes=5)]
    debt = Parts(activations=30)
    tape = [*first, *second, Op("debt", (Kept("input", -30),))]

    brief = chain([segment(first), segment(second).owing(debt)])

    assert brief.kept.activations == 20
    assert brief.fullest == Parts(activations=50, temporaries=5)
    assert brief == segment(tape)
