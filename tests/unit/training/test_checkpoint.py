import json
import math

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


@pytest.mark.parametrize("text", ["", "{", "[1]", "null"])
def test_a_header_without_values_is_refused(tmp_path, text):
    path = tmp_path / CHECKPOINT_NAME
    header = {"format": "labkit-checkpoint-1", "values": text}
    save_file({"w": torch.zeros(1)}, path, metadata=header)
    with pytest.raises(ValueError) as error:
        read_checkpoint(path)
    assert str(error.value) == (
        f"{path} is not whole: its header holds no JSON object of values. "
        "Take a whole copy of the checkpoint, or start a new run."
    )


def test_moments_before_the_first_update_are_those_adamw_begins_with(make_model):
    model, other = make_model(), make_model()
    optimizer, fresh = (build_optimizer(m, TrainConfig()) for m in (model, other))
    scatter_tensors(gather_tensors(model, optimizer), model, optimizer)
    assert all(len(optimizer.state[p]) == 3 for p in model.parameters())
    for ours, theirs in zip(model.parameters(), other.parameters(), strict=True):
        ours.grad = torch.randn_like(ours)
        theirs.grad = ours.grad.clone()
    optimizer.step()
    fresh.step()
    for ours, theirs in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(ours, theirs)


def test_tensors_that_do_not_fit_the_model_are_all_named(make_model):
    model = make_model()
    optimizer = stepped(model)
    tensors = gather_tensors(model, optimizer)
    tensors["model.norm.weight"] = torch.ones(3)
    tensors["model.extra"] = tensors.pop("model.head.weight")
    with pytest.raises(ValueError) as error:
        scatter_tensors(tensors, model, optimizer)
    assert str(error.value) == (
        "the checkpoint is not whole: missing: model.head.weight; unknown: "
        "model.extra; of another kind: model.norm.weight is float32 (3,), not float32 "
        "(16,). Take a whole copy of the checkpoint, or start a new run."
    )


HEAD = "optimizer.exp_avg.head.weight"

DAMAGES = {
    f"missing: {HEAD}. ": lambda tensors: tensors.pop(HEAD),
    f"of another kind: {HEAD} is float32 (2,), not float32 (256, 16). ": (
        lambda tensors: tensors.update({HEAD: torch.zeros(2)})
    ),
    f"of another kind: {HEAD} is float16 (256, 16), not float32 (256, 16). ": (
        lambda tensors: tensors.update({HEAD: torch.zeros(256, 16).half()})
    ),
    "not finite: model.norm.weight. ": (
        lambda tensors: tensors["model.norm.weight"].fill_(math.nan)
    ),
    f"not finite: {HEAD}. ": lambda tensors: tensors[HEAD].fill_(math.inf),
    "missing: random.cpu. ": lambda tensors: tensors.pop("random.cpu"),
    "no state of random numbers: random.cpu. ": (
        lambda tensors: tensors["random.cpu"].fill_(255)
    ),
}


@pytest.mark.parametrize("fault", DAMAGES)
def test_damaged_tensors_are_named_and_nothing_is_changed(make_model, fault):
    saved = make_model()
    tensors = gather_tensors(saved, stepped(saved))
    tensors = {name: tensor.clone() for name, tensor in tensors.items()}
    DAMAGES[fault](tensors)

    model = make_model()
    optimizer = stepped(model)
    before = {n: t.clone() for n, t in gather_tensors(model, optimizer).items()}
    with pytest.raises(ValueError) as error:
        scatter_tensors(tensors, model, optimizer)
    assert str(error.value).startswith(f"the checkpoint is not whole: {fault}Take a")
    after = gather_tensors(model, optimizer)
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())
