"""Reading and writing `config.json`, in all the spellings that are about."""

import json
from dataclasses import replace

import pytest

from labkit.config import (
    PRESETS,
    GQAConfig,
    ModelConfig,
    MoEConfig,
    RopeConfig,
)
from labkit.data import data_path, read_json

PUBLISHED = ["v2-lite-16b", "v2-236b", "v3-671b", "v3.1-671b"]


@pytest.fixture
def v3() -> dict:
    """The contents of DeepSeek-V3's config.json, to change and read."""
    return read_json("models", "v3-671b.json")


@pytest.mark.parametrize("name", PUBLISHED)
def test_presets_are_the_published_configs(name):
    published = ModelConfig.from_hf(data_path("models", f"{name}.json"))

    # The files say 0.02; the report says that everything starts from 0.006.
    assert published.init_std == 0.02
    assert replace(published, init_std=0.006) == PRESETS[name]


@pytest.mark.parametrize("name", PRESETS)
def test_presets_survive_being_written_and_read(name):
    assert ModelConfig.from_hf(PRESETS[name].to_hf()) == PRESETS[name]


def test_a_folder_is_read_by_its_config_json(tmp_path, v3):
    (tmp_path / "config.json").write_text(json.dumps(v3))

    assert ModelConfig.from_hf(tmp_path) == ModelConfig.from_hf(v3)
    assert ModelConfig.from_hf(str(tmp_path)) == ModelConfig.from_hf(v3)


def test_the_spelling_of_transformers_5_reads_the_same(v3):
    new = dict(v3)
    scaling = new.pop("rope_scaling")
    scaling["rope_type"] = scaling.pop("type")
    new["rope_parameters"] = {"rope_theta": new.pop("rope_theta"), **scaling}

    assert ModelConfig.from_hf(new) == ModelConfig.from_hf(v3)


@pytest.mark.parametrize("scaling", [None, {}, {"rope_type": "default"}])
def test_without_scaling_yarn_stays_off(v3, scaling):
    cfg = ModelConfig.from_hf(
        v3 | {"rope_scaling": scaling, "max_position_embeddings": 4096}
    )
    assert cfg.rope == RopeConfig(original_seq_len=4096)
    assert not cfg.is_extended


def test_a_missing_mscale_all_dim_leaves_the_softmax_alone(v3):
    del v3["rope_scaling"]["mscale_all_dim"]

    cfg = ModelConfig.from_hf(v3)
    assert cfg.is_extended
    assert cfg.softmax_scale == 192**-0.5


def test_our_own_key_is_not_needed_to_read_what_we_wrote():
    written = PRESETS["v3-671b"].to_hf()
    del written["labkit"]

    assert ModelConfig.from_hf(written) == PRESETS["v3-671b"]


def test_what_the_format_has_no_field_for_is_kept_under_our_own_key():
    # Rope settings that wait for a longer context have no place while YaRN is off.
    cfg = replace(PRESETS["v3-671b"], max_seq_len=4096)
    written = cfg.to_hf()

    assert written["rope_parameters"] == {"rope_type": "default", "rope_theta": 1e4}
    assert ModelConfig.from_hf(written) == cfg
    assert ModelConfig.from_hf(written).rope.rope_factor == 40


@pytest.mark.parametrize("absent", [0, None])
def test_a_query_rank_of_zero_or_none_is_a_plain_projection(v3, absent):
    assert ModelConfig.from_hf(v3 | {"q_lora_rank": absent}).attention == replace(
        PRESETS["v3-671b"].attention, q_lora_rank=None
    )


@pytest.mark.parametrize("field", ["num_nextn_predict_layers", "num_mtp_layers"])
def test_mtp_depth_is_read_in_both_spellings(v3, field):
    del v3["num_nextn_predict_layers"]

    assert ModelConfig.from_hf(v3 | {field: 2}).n_mtp == 2
    assert ModelConfig.from_hf(v3).mtp is None


def test_a_config_without_experts_is_dense(v3):
    del v3["n_routed_experts"]

    cfg = ModelConfig.from_hf(v3)
    assert cfg.moe is None
    assert cfg.n_moe_layers == 0


def test_greedy_routing_of_v2_lite_has_one_group():
    moe = ModelConfig.from_hf(data_path("models", "v2-lite-16b.json")).moe

    assert (moe.n_expert_groups, moe.n_limited_groups) == (1, 1)
    assert (moe.score_func, moe.has_bias, moe.norm_topk_prob) == (
        "softmax",
        False,
        False,
    )


def test_the_balance_loss_that_v3s_file_leaves_out_comes_from_its_report(v3):
    assert "aux_loss_alpha" not in v3
    assert ModelConfig.from_hf(v3).moe.balance_loss_weight == 1e-4


@pytest.mark.parametrize("version", [2, 3])
def test_what_transformers_builds_by_default_is_read(version):
    import transformers

    hf = getattr(transformers, f"DeepseekV{version}Config")(num_experts_per_tok=6)
    cfg = ModelConfig.from_hf(hf.to_dict())

    assert (cfg.dim, cfg.n_layers) == (hf.hidden_size, hf.num_hidden_layers)
    assert cfg.moe.n_shared_experts == hf.n_shared_experts
    assert cfg.rope == RopeConfig(original_seq_len=hf.max_position_embeddings)


def test_transformers_reads_what_we_write():
    from transformers import AutoConfig

    written = PRESETS["v3-671b"].to_hf()
    read = AutoConfig.for_model(**written)

    assert type(read).__name__ == "DeepseekV3Config"
    for name in ("hidden_size", "kv_lora_rank", "n_group", "routed_scaling_factor"):
        assert getattr(read, name) == written[name]
    assert read.rope_parameters["factor"] == 40


def test_grouped_attention_has_no_place_in_the_format():
    cfg = replace(PRESETS["tiny"], attention=GQAConfig(n_heads=8, n_kv_heads=2))

    with pytest.raises(ValueError) as caught:
        cfg.to_hf()
    assert str(caught.value) == (
        "attention must be MLA to be written in DeepSeek's format; got 'gqa'. Save it "
        "with the trainer's checkpoint instead."
    )


@pytest.mark.parametrize(
    ("score_func", "group_score", "has_bias", "message"),
    [
        (
            "sigmoid",
            "max",
            True,
            "a sigmoid router must have group_score='top2' and has_bias=True to be "
            "written in DeepSeek's format; got 'max' and True. Change them with "
            "dataclasses.replace.",
        ),
        (
            "softmax",
            "max",
            True,
            "a softmax router must have group_score='max' and has_bias=False to be "
            "written in DeepSeek's format; got 'max' and True. Change them with "
            "dataclasses.replace.",
        ),
    ],
)
def test_a_mixed_router_has_no_place_in_the_format(
    score_func, group_score, has_bias, message
):
    moe = MoEConfig(
        n_routed_experts=8,
        n_activated_experts=2,
        moe_inter_dim=16,
        score_func=score_func,
        group_score=group_score,
        has_bias=has_bias,
    )
    with pytest.raises(ValueError) as caught:
        replace(PRESETS["tiny"], moe=moe).to_hf()
    assert str(caught.value) == message
