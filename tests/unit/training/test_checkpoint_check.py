import copy
import json
from collections.abc import Callable
from typing import Any

import pytest

from labkit.config import PRESETS, GQAConfig, ModelConfig, model_to_dict
from labkit.training import Trainer, read_checkpoint
from labkit.training.checkpoint_check import read_configs


@pytest.fixture
def values(make_model, train_config, corpus, tmp_path) -> dict[str, Any]:
    """What a run of the micro model saves, as it is read back."""
    Trainer(make_model(), train_config, corpus).save(tmp_path / "a.safetensors")
    return read_checkpoint(tmp_path / "a.safetensors").values


def fault(values: dict[str, Any]) -> str:
    with pytest.raises(ValueError) as error:
        read_configs(values)
    return str(error.value)


def test_what_a_run_saves_gives_its_configs_back(values, micro_config, train_config):
    assert read_configs(values) == (micro_config, train_config)


@pytest.mark.parametrize(
    "cfg",
    [
        PRESETS["v3-671b"],
        ModelConfig(
            vocab_size=256,
            dim=8,
            n_layers=1,
            inter_dim=8,
            attention=GQAConfig(n_heads=2, n_kv_heads=1, head_dim=4),
        ),
    ],
)
def test_every_kind_of_model_is_known(values, cfg, train_config):
    saved = json.loads(json.dumps(values | {"model": model_to_dict(cfg)}))
    assert read_configs(saved) == (cfg, train_config)


def test_all_names_that_are_missing_or_unknown_are_listed(values):
    del values["n_tokens_seen"], values["train"]["seed"], values["model"]["rope"]
    values["train"]["sead"] = 1
    values["model"]["moe"]["n_expert"] = values["extra"] = 2
    assert fault(values) == (
        "the checkpoint is not whole: n_tokens_seen is missing, extra is unknown, "
        "model.rope is missing, model.moe.n_expert is unknown, train.seed is missing, "
        "train.sead is unknown. "
        "Take a whole copy of the checkpoint, or start a new run."
    )


def set_at(*path: str, to: object) -> Callable[[dict[str, Any]], None]:
    def change(values: dict[str, Any]) -> None:
        for name in path[:-1]:
            values = values[name]
        values[path[-1]] = to

    return change


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (set_at("model", to=3), "whole: model is 3. "),
        (set_at("model", "rope", to=None), "whole: model.rope is None. "),
        (set_at("model", "attention", "kind", to="x"), "attention.kind is 'x'. "),
        (set_at("cursor", "n_taken", to=-4), "whole: cursor.n_taken is -4. "),
        (set_at("n_steps_done", to=1.5), "whole: n_steps_done is 1.5. "),
        (set_at("corpus", "fingerprint", to=None), "corpus.fingerprint is None. "),
        (set_at("train", "n_steps", to=0), "not valid (n_steps must be a whole"),
        (set_at("train", "lr", to="x"), "a config that is not valid ("),
    ],
)
def test_a_value_of_another_kind_is_named(values, change, text):
    changed = copy.deepcopy(values)
    change(changed)
    message = fault(changed)
    assert text in message
    assert message.endswith("Take a whole copy of the checkpoint, or start a new run.")
