import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from labkit.model.transformer import IGNORED
from labkit.training.ranks import Ranks
from labkit.training.windows import Batch, BatchCursor, Windows


def counting(n: int) -> np.ndarray:
    return np.arange(n, dtype=np.uint8)


def following(cursor: BatchCursor, global_batch: int) -> torch.Tensor:
    """Return the tokens of the next batch and move past it."""
    tokens = cursor.peek(global_batch).tokens
    cursor.advance(global_batch)
    return tokens


def test_targets_are_the_tokens_one_place_further():
    batch = Windows(counting(100), seq_len=10).take(0, 4)
    assert batch.tokens.dtype == batch.targets.dtype == torch.int64
    assert torch.equal(batch.targets, batch.tokens + 1)


@given(
    n_tokens=st.integers(2, 200), seq_len=st.integers(1, 20), epoch=st.integers(0, 3)
)
def test_an_epoch_visits_disjoint_windows_that_leave_less_than_one_out(
    n_tokens, seq_len, epoch
):
    assume(n_tokens > seq_len)
    windows = Windows(counting(n_tokens), seq_len)
    first = epoch * windows.per_epoch
    starts = sorted(windows.start(first + i) for i in range(windows.per_epoch))
    assert all(np.diff(starts) == seq_len)
    assert starts[0] >= 0 and starts[-1] + seq_len + 1 <= n_tokens
    assert n_tokens - 1 - windows.per_epoch * seq_len < seq_len


def test_order_differs_between_epochs_and_seeds_and_repeats_with_the_seed():
    def order(seed: int, epoch: int) -> list[int]:
        windows = Windows(counting(250), seq_len=5, seed=seed)
        return [windows.start(epoch * windows.per_epoch + i) for i in range(20)]

    assert order(0, 0) == order(0, 0)
    assert len({tuple(order(*key)) for key in ((0, 0), (0, 1), (1, 0))}) == 3


@given(
    share=st.integers(1, 4),
    world=st.sampled_from([1, 2, 3, 4]),
    n_steps=st.integers(1, 5),
)
def test_the_shares_of_all_ranks_are_the_batch_of_one_process(share, world, n_steps):
    windows = Windows(counting(120), seq_len=7)
    alone = BatchCursor(windows)
    ranks = [BatchCursor(windows, ranks=Ranks(rank, world)) for rank in range(world)]
    for _ in range(n_steps):
        whole = following(alone, share * world)
        shares = [following(cursor, share * world) for cursor in ranks]
        assert torch.equal(torch.cat(shares), whole)


@given(n_before=st.integers(0, 9), batch=st.integers(1, 5))
def test_a_restored_cursor_continues_exactly(n_before, batch):
    cursor = BatchCursor(Windows(counting(120), seq_len=7, seed=3))
    for _ in range(n_before):
        cursor.advance(batch)
    resumed = BatchCursor(Windows(counting(120), seq_len=7, seed=3))
    resumed.load_state_dict(cursor.state_dict())
    for _ in range(4):
        assert torch.equal(following(cursor, batch), following(resumed, batch))


def test_looking_at_a_batch_does_not_move_past_it():
    cursor = BatchCursor(Windows(counting(120), seq_len=7))
    assert torch.equal(cursor.peek(2).tokens, cursor.peek(2).tokens)
    assert cursor.n_taken == 0


def test_a_cursor_of_other_windows_is_refused():
    state = BatchCursor(Windows(counting(120), seq_len=7)).state_dict()
    with pytest.raises(ValueError) as error:
        BatchCursor(Windows(counting(120), seq_len=8)).load_state_dict(state)
    assert str(error.value) == (
        "the data cursor belongs to other windows: seq_len was 7 and is 8. Continue "
        "with the same corpus and TrainConfig, or start a new run."
    )


def test_a_text_without_one_window_is_refused():
    with pytest.raises(ValueError) as error:
        Windows(counting(16), seq_len=16, name="validation text")
    assert str(error.value) == (
        "the validation text is too short: a window needs seq_len + 1 = 17 bytes, but "
        "only 16 are there. Give more text, or set seq_len=15 or less."
    )


def test_a_text_of_one_byte_fits_no_length():
    with pytest.raises(ValueError, match="only 1 are there. Give more text.$"):
        Windows(counting(1), seq_len=16)


def test_a_batch_that_ranks_cannot_share_is_refused():
    with pytest.raises(ValueError) as error:
        Ranks(0, 3).share(8)
    assert str(error.value) == (
        "global_batch must be a multiple of the number of ranks, because each takes "
        "an equal share; got 8 and 3. Set global_batch=9."
    )


def test_micro_batches_keep_order_and_the_last_may_be_smaller():
    batch = Windows(counting(120), seq_len=7).take(0, 5)
    parts = batch.split(2)
    assert [part.n_sequences for part in parts] == [2, 2, 1]
    assert torch.equal(torch.cat([part.targets for part in parts]), batch.targets)


def test_ignored_targets_are_not_counted():
    targets = torch.tensor([[1, IGNORED, 3]])
    assert Batch(torch.zeros_like(targets), targets).n_targets == 2
