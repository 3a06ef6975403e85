import json

import pytest
import torch
from safetensors.torch import save_file

from labkit.config import TrainConfig
from labkit.training.checkpoint import (
    CHECKPOINT_NAME,
    Checkpoint,
    gather_tensors,
    read_checkpoint,
    scatter_tensors,
    write_checkpoint,
)
from labkit.training.optimizer import build_optimizer

resource = pytest.importorskip("resource", reason="no limits on file size here")


def a_checkpoint(value: float, n: int = 4) -> Checkpoint:
    return Checkpoint({"model.w": torch.full((n,), value)}, {"step": int(value)})


def stepped(model: torch.nn.Module) -> torch.optim.Optimizer:
    """An optimizer with moments, after one step on made-up gradients."""
    optimizer = build_optimizer(model, TrainConfig())
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    return optimizer


def test_weights_biases_moments_and_random_numbers_come_back_bit_for_bit(
    make_model, tmp_path
):
    model = make_model()
    model.layers[1].ffn.gate.bias.copy_(torch.tensor([0.1, -0.2, 0.3, -0.4]))
    optimizer = stepped(model)
    path = tmp_path / CHECKPOINT_NAME
    write_checkpoint(path, Checkpoint(gather_tensors(model, optimizer), {"a": [1]}))
    drawn = torch.randn(3)

    other = make_model()
    other_optimizer = build_optimizer(other, TrainConfig())
    saved = read_checkpoint(tmp_path)
    scatter_tensors(saved.tensors, other, other_optimizer)
    assert torch.equal(torch.randn(3), drawn)
    assert saved.values == {"a": [1]}
    for ours, theirs in zip(
        model.state_dict().items(), other.state_dict().items(), strict=True
    ):
        assert ours[0] == theirs[0] and torch.equal(ours[1], theirs[1])
    for ours, theirs in zip(model.parameters(), other.parameters(), strict=True):
        state, copied = optimizer.state[ours], other_optimizer.state[theirs]
        assert set(state) == {"step", "exp_avg", "exp_avg_sq"} == set(copied)
        assert all(torch.equal(state[key], copied[key]) for key in state)


def test_the_file_is_plain_safetensors_with_a_json_header(tmp_path):
    path = tmp_path / CHECKPOINT_NAME
    write_checkpoint(path, a_checkpoint(1.0))
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    assert set(header) == {"__metadata__", "model.w"}
    assert len(content) == 8 + length + 4 * 4  # nothing besides header and values


def test_a_full_disk_leaves_the_previous_checkpoint_and_says_so(tmp_path):
    path = tmp_path / CHECKPOINT_NAME
    write_checkpoint(path, a_checkpoint(1.0))
    # A limit on file size fails a write midway, as a full disk does.
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, limits[1]))
    try:
        with pytest.raises(OSError) as error:
            write_checkpoint(path, a_checkpoint(2.0, n=500_000))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert str(error.value).startswith(f"checkpoint of 2 MB not written to {path}: ")
    assert str(error.value).endswith(
        "The previous one is intact; free some space or choose another folder."
    )
    assert read_checkpoint(path).values == {"step": 1}
    assert list(tmp_path.iterdir()) == [path]


def test_a_folder_that_cannot_be_made_says_that_nothing_was_written(tmp_path):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(OSError) as error:
        write_checkpoint(tmp_path / "file" / CHECKPOINT_NAME, a_checkpoint(1.0))
    assert str(error.value).endswith(
        "Nothing was written; free some space or choose another folder."
    )


def test_what_a_killed_save_left_is_cleared_by_the_next(tmp_path):
    path = tmp_path / CHECKPOINT_NAME
    partial = tmp_path / f".{CHECKPOINT_NAME}.partial"
    partial.mkdir()
    (partial / CHECKPOINT_NAME).write_bytes(b"half")
    write_checkpoint(path, a_checkpoint(1.0))
    assert list(tmp_path.iterdir()) == [path]


def test_a_missing_checkpoint_is_named(tmp_path):
    with pytest.raises(ValueError) as error:
        read_checkpoint(tmp_path)
    assert str(error.value) == (
        f"checkpoint not found: {tmp_path / CHECKPOINT_NAME}. "
        "Give the file, or the folder of the run."
    )


def test_another_safetensors_file_is_refused(tmp_path):
    path = tmp_path / "model.safetensors"
    save_file({"w": torch.zeros(1)}, path)
    with pytest.raises(ValueError) as error:
        read_checkpoint(path)
    assert str(error.value) == (
        f"{path} is not a training checkpoint: its format is None, not "
        "'labkit-checkpoint-1'. Give a file that Trainer.save wrote; load_hf reads "
        "published weights."
    )


def test_a_damaged_file_is_refused(tmp_path):
    path = tmp_path / CHECKPOINT_NAME
    write_checkpoint(path, a_checkpoint(1.0))
    path.write_bytes(path.read_bytes()[:-3])
    with pytest.raises(ValueError, match="is not a readable safetensors file"):
        read_checkpoint(path)


def test_tensors_that_do_not_fit_the_model_are_all_named(make_model):
    model = make_model()
    optimizer = stepped(model)
    tensors = gather_tensors(model, optimizer)
    tensors["model.norm.weight"] = torch.ones(3)
    tensors["model.extra"] = tensors.pop("model.head.weight")
    with pytest.raises(ValueError) as error:
        scatter_tensors(tensors, model, optimizer)
    assert str(error.value) == (
        "the checkpoint belongs to another model: missing head.weight; norm.weight "
        "has shape (3,), not (16,); unknown extra. "
        "Build the model from the checkpoint's own config."
    )
