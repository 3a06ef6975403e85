"""Folders of weights: what is refused, and that nothing is ever half written."""

import json
from contextlib import contextmanager

import pytest
import torch
from safetensors.torch import load_file, save_file

from labkit.config import MLAConfig, ModelConfig
from labkit.model import Transformer, load_hf, save_hf
from labkit.model import checkpoint_files as files

CONFIG = ModelConfig(
    vocab_size=16,
    dim=8,
    n_layers=2,
    inter_dim=12,
    attention=MLAConfig(
        n_heads=2,
        kv_lora_rank=4,
        qk_nope_head_dim=2,
        qk_rope_head_dim=2,
        v_head_dim=2,
    ),
)


def model_of(value):
    """Return a model whose weights all have one value, to tell two apart."""
    model = Transformer(CONFIG)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(value)
    return model


def value_in(folder):
    values = torch.cat([p.flatten() for p in load_hf(folder).parameters()]).unique()
    assert len(values) == 1
    return values.item()


def test_shards_keep_to_the_limit_and_the_index_names_each_tensor(tmp_path):
    save_hf(model_of(1), tmp_path, max_shard_bytes=1500)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    shards = sorted(tmp_path.glob("model-*.safetensors"))
    names = [f"model-{i:05}-of-00004.safetensors" for i in (1, 2, 3, 4)]
    assert [path.name for path in shards] == names
    found, total = {}, 0
    for path in shards:
        tensors = load_file(path)
        assert sum(tensor.nbytes for tensor in tensors.values()) <= 1500
        total += sum(tensor.nbytes for tensor in tensors.values())
        found |= dict.fromkeys(tensors, path.name)
    assert index == {"metadata": {"total_size": total}, "weight_map": found}


def test_saving_again_replaces_the_weights_and_keeps_other_files(tmp_path):
    (tmp_path / "tokenizer.json").write_text("{}")
    save_hf(model_of(1), tmp_path, max_shard_bytes=1)
    save_hf(model_of(2), tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "config.json",
        "model.safetensors",
        "tokenizer.json",
    ]
    assert value_in(tmp_path) == 2


def test_going_back_to_shards_leaves_no_single_file_behind(tmp_path):
    save_hf(model_of(1), tmp_path)
    save_hf(model_of(2), tmp_path, max_shard_bytes=1500)
    assert not (tmp_path / "model.safetensors").exists()
    assert value_in(tmp_path) == 2


@contextmanager
def small_disk():
    """Let no file grow past 2000 bytes, as a full disk would not.

    For one call only: the log that pytest itself writes is a file, too.
    """
    resource = pytest.importorskip("resource")  # Unix has it
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2000, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_full_disk_leaves_the_previous_weights_intact(tmp_path):
    save_hf(model_of(1), tmp_path)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    model = model_of(2)
    with pytest.raises(OSError) as error, small_disk():
        save_hf(model, tmp_path)
    text = str(error.value)
    assert text.startswith(f"weights not written to {tmp_path}: ")
    assert text.endswith(
        "What it held before is intact; free some space or choose another folder."
    )
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_a_full_disk_in_a_later_shard_leaves_no_new_folder(tmp_path, monkeypatch):
    written = []

    def fills_up(tensors, path, **options):
        if len(written) == 2:
            raise OSError(28, "No space left on device")
        written.append(path)
        save_file(tensors, path, **options)

    monkeypatch.setattr(files, "save_file", fills_up)
    with pytest.raises(OSError, match="No space left on device"):
        save_hf(model_of(1), tmp_path / "new", max_shard_bytes=1500)
    assert len(written) == 2
    assert list(tmp_path.iterdir()) == []


def test_an_interrupt_leaves_the_previous_weights_intact(tmp_path, monkeypatch):
    save_hf(model_of(1), tmp_path)

    def interrupted(*args, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr(files, "save_file", interrupted)
    with pytest.raises(KeyboardInterrupt):
        save_hf(model_of(2), tmp_path)
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        "config.json",
        "model.safetensors",
    ]
    assert value_in(tmp_path) == 1


@pytest.mark.parametrize("n_moved", range(6))
def test_a_kill_while_files_are_moved_never_leaves_a_folder_that_loads_wrongly(
    tmp_path, monkeypatch, n_moved
):
    save_hf(model_of(1), tmp_path, max_shard_bytes=1500)
    staging = tmp_path / ".partial"
    move, moved = files.os.replace, []

    def dies(source, target):
        if target.parent == tmp_path and len(moved) == n_moved:
            raise SystemExit
        if target.parent == tmp_path:
            moved.append(target)
        move(source, target)

    with monkeypatch.context() as patch:
        patch.setattr(files.os, "replace", dies)
        with pytest.raises(SystemExit):
            save_hf(model_of(2), tmp_path, max_shard_bytes=1500)
    with pytest.raises(ValueError, match="it has neither.*save them again"):
        load_hf(tmp_path)
    assert staging.exists()  # complete, and cleared away by the next save
    save_hf(model_of(3), tmp_path, max_shard_bytes=1500)
    assert not staging.exists()
    assert value_in(tmp_path) == 3


@pytest.mark.parametrize(
    "name", ["pytorch_model.bin", "model.pt", "consolidated.00.pth"]
)
def test_pickles_are_refused_unread(tmp_path, name):
    save_hf(model_of(1), tmp_path)
    (tmp_path / "model.safetensors").unlink()
    (tmp_path / name).write_bytes(b"not even a pickle")
    with pytest.raises(ValueError) as error:
        load_hf(tmp_path)
    assert str(error.value) == (
        "weights must be safetensors, because loading a pickle runs whatever code it "
        f"contains; {tmp_path} holds only {name}. Take the release's safetensors "
        "files, or convert in a place where that code may run."
    )


def test_a_folder_without_weights_is_refused(tmp_path):
    save_hf(model_of(1), tmp_path)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(ValueError) as error:
        load_hf(tmp_path)
    assert str(error.value) == (
        f"{tmp_path} must hold model.safetensors, or model.safetensors.index.json and "
        "the files it names; it has neither. Download the weights, or save them again "
        "if saving was interrupted."
    )


def test_a_path_that_is_no_folder_is_refused(tmp_path):
    save_hf(model_of(1), tmp_path)
    path = tmp_path / "config.json"
    with pytest.raises(ValueError, match=f"{path} is none. Give the folder"):
        load_hf(path)


def test_an_empty_name_is_not_the_current_folder(tmp_path, monkeypatch):
    save_hf(model_of(1), tmp_path)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError) as error:
        load_hf("")
    assert str(error.value) == (
        "a checkpoint is a folder of config.json and safetensors files; an empty name "
        "is none. Give the folder of the downloaded model."
    )


def test_nothing_is_saved_under_an_empty_name(tmp_path, monkeypatch):
    save_hf(model_of(1), tmp_path)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError) as error:
        save_hf(model_of(2), "")
    assert str(error.value) == (
        "a checkpoint is written to a folder; got an empty name. "
        'Give the name of one, or "." for the current folder.'
    )
    assert value_in(tmp_path) == 1


def test_a_name_too_long_for_the_system_is_no_folder():
    with pytest.raises(ValueError, match="aaa is none. Give the folder"):
        load_hf("a" * 5000)
    with pytest.raises(OSError, match="weights not written to aaa"):
        save_hf(model_of(1), "a" * 5000)


def test_a_model_without_weights_is_not_saved(tmp_path):
    with pytest.raises(ValueError) as error:
        save_hf(model_of(1).to("meta"), tmp_path / "new")
    n = len(list(model_of(1).parameters()))
    assert str(error.value) == (
        f"a model must hold weights to be saved; {n} of {n} parameters are on the meta "
        'device, which keeps shapes alone. Build the model with device="cpu", or load '
        "it."
    )
    assert not (tmp_path / "new").exists()


def test_shards_that_the_index_names_but_the_folder_lacks_are_named(tmp_path):
    save_hf(model_of(1), tmp_path, max_shard_bytes=1500)
    (tmp_path / "model-00002-of-00004.safetensors").unlink()
    with pytest.raises(
        ValueError, match=r"names; model-00002-of-00004.safetensors missing. Download"
    ):
        load_hf(tmp_path)


def test_a_truncated_file_is_named(tmp_path):
    save_hf(model_of(1), tmp_path, max_shard_bytes=1500)
    path = tmp_path / "model-00002-of-00004.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(ValueError, match=f"{path} must be a whole safetensors file"):
        load_hf(tmp_path)


@pytest.mark.parametrize(
    "contents",
    [
        b"{",
        b"{}",
        b"[]",
        b'{"weight_map": ["model.safetensors"]}',
        b'{"weight_map": {"lm_head.weight": 1}}',
        b'{"weight_map": {"lm_head.weight": "\xff"}}',
    ],
    ids=["cut", "empty", "list", "list of files", "numbers", "no UTF-8"],
)
def test_a_damaged_index_is_named(tmp_path, contents):
    save_hf(model_of(1), tmp_path, max_shard_bytes=1500)
    path = tmp_path / "model.safetensors.index.json"
    path.write_bytes(contents)
    with pytest.raises(ValueError) as error:
        load_hf(tmp_path)
    assert str(error.value) == (
        f"{path} must be JSON with a weight_map from tensors to files; it is not. "
        "Download it again."
    )


@pytest.mark.parametrize("where", ["absolute", "above", "below"])
def test_an_index_that_leaves_its_folder_is_refused(tmp_path, where):
    folder, below = tmp_path / "model", tmp_path / "model" / "more"
    save_hf(model_of(1), folder, max_shard_bytes=1500)
    save_hf(model_of(2), tmp_path)
    save_hf(model_of(2), below)
    name = {
        "absolute": str(tmp_path / "model.safetensors"),
        "above": "../model.safetensors",
        "below": "more/model.safetensors",
    }[where]
    path = folder / "model.safetensors.index.json"
    path.write_text(json.dumps({"weight_map": {"lm_head.weight": name}}))
    with pytest.raises(ValueError) as error:
        load_hf(folder)
    assert str(error.value) == (
        f"{path} must name files beside it, by their names alone; got {name}. "
        "Take the index that was published with the weights."
    )


@pytest.mark.parametrize(
    ("contents", "rule"),
    [
        (b"{", "must be valid JSON"),
        (b'{"model_type": "\xff"}', "must be valid JSON"),
        (b"[]", "must be a JSON object"),
    ],
    ids=["cut", "no UTF-8", "list"],
)
def test_a_damaged_config_is_named(tmp_path, contents, rule):
    save_hf(model_of(1), tmp_path)
    path = tmp_path / "config.json"
    path.write_bytes(contents)
    with pytest.raises(ValueError, match=f"config {rule}; {path} .*Download it again"):
        load_hf(tmp_path)
