"""What a `config.json` asks for that labkit does not compute, or cannot be read."""

import json

import pytest

from labkit.config import PRESETS, ModelConfig
from labkit.config.hf_reading import NULL_IS_NONE
from labkit.data import read_json


@pytest.fixture
def v3() -> dict:
    """The contents of DeepSeek-V3's config.json, to change and read."""
    return read_json("models", "v3-671b.json")


def error_of(source) -> str:
    with pytest.raises(ValueError) as caught:
        ModelConfig.from_hf(source)
    return str(caught.value)


@pytest.mark.parametrize("model_type", ["llama", None, 3, ["deepseek_v3"]])
def test_another_architecture_is_refused(v3, model_type):
    assert error_of(v3 | {"model_type": model_type}) == (
        f"model_type must be one of deepseek_v2, deepseek_v3; got {model_type!r}. "
        "labkit builds DeepSeek-V2/V3 architectures only."
    )


@pytest.mark.parametrize(
    ("key", "value", "only"),
    [
        ("hidden_act", "gelu", '"silu"'),
        ("attention_bias", True, "false"),
        ("mlp_bias", True, "false"),
        ("attention_dropout", 0.1, "0.0"),
        ("tie_word_embeddings", True, "false"),
        ("rope_interleave", False, "true"),
        ("rope_interleave", None, "true"),
        ("partial_rotary_factor", 0.5, "1.0"),
        ("moe_layer_freq", 2, "1"),
        ("seq_aux", False, "true"),
    ],
)
def test_a_key_that_asks_for_another_computation_is_refused(v3, key, value, only):
    assert error_of(v3 | {key: value}) == (
        f"{key} must be {only}, as in every DeepSeek-V2/V3 release; got "
        f"{json.dumps(value)}. labkit computes that form only; load a model that has "
        "it."
    )


@pytest.mark.parametrize(
    ("key", "value", "only"),
    [
        ("attention_factor", 1.2, "null"),
        ("truncate", False, "true"),
        ("partial_rotary_factor", 0.5, "1.0"),
    ],
)
def test_a_yarn_of_another_kind_is_refused(v3, key, value, only):
    v3["rope_scaling"][key] = value

    assert error_of(v3).startswith(
        f"{key} must be {only}, as in every DeepSeek-V2/V3 release; got "
    )


def test_the_same_keys_with_the_values_of_the_releases_are_read(v3):
    usual = {
        "attention_dropout": 0.0,
        "mlp_bias": False,
        "rope_interleave": True,
        "seq_aux": True,
        "pretraining_tp": 1,
        "use_cache": True,
    }
    assert ModelConfig.from_hf(v3 | usual) == ModelConfig.from_hf(v3)


def test_keys_of_experts_do_not_matter_to_a_dense_model(v3):
    dense = v3 | {"n_routed_experts": None, "moe_layer_freq": 2, "seq_aux": False}

    assert ModelConfig.from_hf(dense).moe is None


def test_keys_and_values_of_fewer_heads_are_refused(v3):
    assert error_of(v3 | {"num_key_value_heads": 8}) == (
        "num_key_value_heads must equal num_attention_heads, because the heads of MLA "
        "share a latent, not keys; got 8 and 128. Set num_key_value_heads=128."
    )


@pytest.mark.parametrize("method", ["random", None, 3])
def test_an_unknown_choice_of_experts_is_refused(v3, method):
    message = error_of(v3 | {"topk_method": method})

    if method is None:
        assert message.startswith("config.json must have topk_method; it is null. ")
    else:
        assert message == (
            "topk_method must be one of 'greedy', 'group_limited_greedy', 'noaux_tc'; "
            f"got {method!r}. Set topk_method='greedy' or another of these."
        )


@pytest.mark.parametrize("kind", ["longrope", None, 3])
def test_an_unknown_rope_is_refused(v3, kind):
    scaling = v3["rope_scaling"] | {"type": kind}

    assert error_of(v3 | {"rope_scaling": scaling}) == (
        f"rope_type must be 'default' or 'yarn'; got {kind!r}. DeepSeek-V2 and V3 "
        "extend their context with YaRN only."
    )


@pytest.mark.parametrize("key", ["rope_parameters", "rope_scaling"])
@pytest.mark.parametrize("value", [3, "yarn", [], ["yarn"], False])
def test_rotary_settings_that_are_no_object_are_refused(v3, key, value):
    assert error_of(v3 | {key: value}) == (
        f"{key} must be an object or null; got {value!r}. Take the file that was "
        "published with the weights."
    )


def test_an_extension_without_its_type_is_not_taken_for_none(v3):
    del v3["rope_scaling"]["type"]

    assert error_of(v3) == (
        "config.json must have rope_type; it is missing. Take the file that was "
        "published with the weights."
    )


def test_an_extension_to_no_longer_a_context_is_refused(v3):
    # Other programs extend all the same; labkit only beyond the original context.
    assert error_of(v3 | {"max_position_embeddings": 4096}) == (
        "max_position_embeddings must be above original_max_position_embeddings where "
        "YaRN extends the context; got 4096 and 4096. Set rope_type='default' to stay "
        "within the original context."
    )


NEEDED = [
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "intermediate_size",
    "max_position_embeddings",
    "num_attention_heads",
    "q_lora_rank",
    "kv_lora_rank",
    "qk_nope_head_dim",
    "qk_rope_head_dim",
    "v_head_dim",
    "first_k_dense_replace",
    "num_experts_per_tok",
    "moe_intermediate_size",
    "n_shared_experts",
    "n_group",
    "topk_group",
    "routed_scaling_factor",
]
NEEDED_OF_YARN = ["factor", "original_max_position_embeddings"]


def missing(name, state="missing") -> str:
    return (
        f"config.json must have {name}; it is {state}. Take the file that was "
        "published with the weights."
    )


@pytest.mark.parametrize("name", NEEDED)
def test_a_missing_key_is_named(v3, name):
    del v3[name]

    assert error_of(v3) == missing(name)


@pytest.mark.parametrize("name", NEEDED_OF_YARN)
def test_a_missing_key_of_the_extension_is_named(v3, name):
    del v3["rope_scaling"][name]

    assert error_of(v3) == missing(name)


@pytest.mark.parametrize("name", [name for name in NEEDED if name not in NULL_IS_NONE])
def test_a_key_that_is_null_is_named(v3, name):
    assert error_of(v3 | {name: None}) == missing(name, "null")


NUMBERS = [
    *NEEDED,
    "n_routed_experts",
    "rms_norm_eps",
    "initializer_range",
    "aux_loss_alpha",
    "num_nextn_predict_layers",
    "rope_theta",
]


@pytest.mark.parametrize("name", NUMBERS)
@pytest.mark.parametrize("value", ["1", True, float("nan"), -1, [2]])
def test_a_key_that_is_no_number_is_named(v3, name, value):
    message = error_of(v3 | {name: value})

    assert message.startswith(f"{name} must be ")
    assert f"; got {value!r}. Set {name} to " in message


OF_YARN = [*NEEDED_OF_YARN, "rope_theta", "beta_fast", "beta_slow"]


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("name", [*OF_YARN, "mscale", "mscale_all_dim"])
@pytest.mark.parametrize("value", [None, "40", True, float("inf"), -1])
def test_a_key_of_the_extension_that_is_no_number_is_named(v3, name, value):
    v3["rope_scaling"][name] = value

    message = error_of(v3)
    if value is None and name in NEEDED_OF_YARN:
        assert message == missing(name, "null")
    else:
        assert message.startswith(f"{name} must be ")
        assert f"; got {value!r}. Set {name} to " in message


@pytest.mark.parametrize("value", [None, 1, "false"])
def test_a_flag_must_be_true_or_false(v3, value):
    message = error_of(v3 | {"norm_topk_prob": value})

    assert message == (
        missing("norm_topk_prob", "null")
        if value is None
        else f"norm_topk_prob must be True or False; got {value!r}. Set norm_topk_prob "
        "to one of these."
    )


@pytest.mark.parametrize("source", [3, None, [], 2.5, b"config.json"])
def test_what_is_neither_a_path_nor_contents_is_refused(unchecked, source):
    assert error_of(source) == (
        "config must be a config.json, a folder that holds one, or its contents; got "
        f"{source!r}. Give the path of the downloaded model."
    )


def test_empty_contents_are_told_what_they_lack():
    assert error_of({}) == missing("vocab_size")


def test_an_empty_name_is_not_the_current_folder(v3, tmp_path, monkeypatch):
    (tmp_path / "config.json").write_text(json.dumps(v3))
    monkeypatch.chdir(tmp_path)
    assert error_of("") == (
        "config must be a config.json, a folder that holds one, or its contents; got "
        "''. Give the path of the downloaded model."
    )


def test_a_name_too_long_for_the_system_is_no_config():
    assert f"found none at {'a' * 5000}. Give the path" in error_of("a" * 5000)


def test_a_folder_without_a_config_is_named(tmp_path):
    assert error_of(tmp_path) == (
        "config must be a config.json or a folder that holds one; found none at "
        f"{tmp_path / 'config.json'}. Give the path of the downloaded model."
    )


@pytest.mark.parametrize(
    ("contents", "fault"),
    [
        (b"{", "Expecting property name enclosed in double quotes: line 1 column 2"),
        (b"", "Expecting value: line 1 column 1"),
        (b'{"model_type": "\xff"}', "'utf-8' codec can't decode byte 0xff"),
    ],
)
def test_a_broken_file_is_named(tmp_path, contents, fault):
    file = tmp_path / "config.json"
    file.write_bytes(contents)

    message = error_of(file)
    assert message.startswith(f"config must be valid JSON; {file} is not ({fault}")
    assert message.endswith("). Download it again.")


@pytest.mark.parametrize(
    ("contents", "kind"), [("[1, 2]", "list"), ("3", "int"), ("null", "NoneType")]
)
def test_a_file_that_holds_no_object_is_named(tmp_path, contents, kind):
    file = tmp_path / "config.json"
    file.write_text(contents)

    assert error_of(file) == (
        f"config must be a JSON object; {file} holds a {kind}. Download it again."
    )


@pytest.mark.parametrize("extra", [3, None, ["rope"]])
def test_our_own_key_must_be_an_object(extra):
    assert error_of(PRESETS["tiny"].to_hf() | {"labkit": extra}) == (
        f"labkit must be an object, as to_hf writes it; got {extra!r}. Remove the key "
        "to read the model without it."
    )


@pytest.mark.parametrize("rope", [3, {"base": 1e4}])
def test_our_own_key_must_hold_rotary_settings_of_ours(rope):
    # "tiny" is not extended, so that its YaRN waits under our own key.
    assert error_of(PRESETS["tiny"].to_hf() | {"labkit": {"rope": rope}}) == (
        "labkit.rope must hold fields of RopeConfig, as to_hf writes them; got "
        f"{rope!r}. Remove the key labkit to read the model without it."
    )


@pytest.mark.parametrize("name", ["tiny", "v3-671b"])
def test_the_formats_own_keys_come_before_ours(name):
    written = PRESETS[name].to_hf()
    written["rope_parameters"]["rope_theta"] = 5e5

    rope = ModelConfig.from_hf(written).rope
    assert rope.rope_theta == 5e5
    assert rope.rope_factor == PRESETS[name].rope.rope_factor
