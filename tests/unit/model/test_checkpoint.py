"""Published checkpoints: names, dtypes, MTP, and what is said of wrong ones."""

import logging
import weakref
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file

from labkit.config import GQAConfig, MLAConfig, ModelConfig, MoEConfig, MTPConfig
from labkit.model import Transformer, load_hf, save_hf
from labkit.model.checkpoint_files import Archive

CONFIG = ModelConfig(
    vocab_size=11,
    dim=6,
    n_layers=2,
    n_dense_layers=1,
    inter_dim=10,
    attention=MLAConfig(
        n_heads=2,
        q_lora_rank=5,
        kv_lora_rank=3,
        qk_nope_head_dim=3,
        qk_rope_head_dim=2,
        v_head_dim=4,
    ),
    moe=MoEConfig(n_routed_experts=2, n_activated_experts=1, moe_inter_dim=7),
    mtp=MTPConfig(),
)
WITHOUT_MTP = replace(CONFIG, mtp=None)

ATTENTION = {
    "self_attn.q_a_proj.weight": (5, 6),
    "self_attn.q_a_layernorm.weight": (5,),
    "self_attn.q_b_proj.weight": (10, 5),
    "self_attn.kv_a_proj_with_mqa.weight": (5, 6),
    "self_attn.kv_a_layernorm.weight": (3,),
    "self_attn.kv_b_proj.weight": (14, 3),
    "self_attn.o_proj.weight": (6, 8),
    "input_layernorm.weight": (6,),
    "post_attention_layernorm.weight": (6,),
}
DENSE = {
    "mlp.gate_proj.weight": (10, 6),
    "mlp.up_proj.weight": (10, 6),
    "mlp.down_proj.weight": (6, 10),
}
MOE = {
    "mlp.gate.weight": (2, 6),
    "mlp.gate.e_score_correction_bias": (2,),
    "mlp.shared_experts.gate_proj.weight": (7, 6),
    "mlp.shared_experts.up_proj.weight": (7, 6),
    "mlp.shared_experts.down_proj.weight": (6, 7),
    "mlp.experts.0.gate_proj.weight": (7, 6),
    "mlp.experts.0.up_proj.weight": (7, 6),
    "mlp.experts.0.down_proj.weight": (6, 7),
    "mlp.experts.1.gate_proj.weight": (7, 6),
    "mlp.experts.1.up_proj.weight": (7, 6),
    "mlp.experts.1.down_proj.weight": (6, 7),
}
MTP = {
    "embed_tokens.weight": (11, 6),
    "enorm.weight": (6,),
    "hnorm.weight": (6,),
    "eh_proj.weight": (6, 12),
    "shared_head.norm.weight": (6,),
    "shared_head.head.weight": (11, 6),
}


def random_model(cfg=CONFIG, dtype=None):
    model = Transformer(cfg, dtype=dtype, generator=torch.Generator().manual_seed(1))
    for router in model.routers():
        if router.bias is not None:
            router.bias.uniform_(-3, 3)
    for name, parameter in model.named_parameters():
        if name.endswith("norm.weight"):
            parameter.data.uniform_(0.5, 1.5)
    return model


def assert_same_weights(model, other):
    expected, found = model.state_dict(), other.state_dict()
    assert expected.keys() == found.keys()
    for name, tensor in expected.items():
        assert torch.equal(tensor, found[name]), name
        assert tensor.dtype == found[name].dtype, name


def test_the_published_names_and_shapes_are_written(tmp_path):
    save_hf(random_model(), tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    layers = {0: ATTENTION | DENSE, 1: ATTENTION | MOE, 2: ATTENTION | MOE | MTP}
    expected = {
        "model.embed_tokens.weight": (11, 6),
        "model.norm.weight": (6,),
        "lm_head.weight": (11, 6),
    } | {
        f"model.layers.{i}.{name}": shape
        for i, layer in layers.items()
        for name, shape in layer.items()
    }
    assert {name: tuple(tensor.shape) for name, tensor in stored.items()} == expected


def test_without_query_rank_there_is_one_query_projection(tmp_path):
    attention = replace(CONFIG.attention, q_lora_rank=None)
    save_hf(random_model(replace(WITHOUT_MTP, attention=attention)), tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    queries = {name for name in stored if "self_attn.q_" in name}
    assert queries == {f"model.layers.{i}.self_attn.q_proj.weight" for i in (0, 1)}


@pytest.mark.parametrize("max_shard_bytes", [1, 700, 10**9])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_was_saved_is_loaded_bit_for_bit(tmp_path, max_shard_bytes, dtype):
    model = random_model(dtype=dtype)
    save_hf(model, tmp_path, max_shard_bytes=max_shard_bytes)
    loaded = load_hf(tmp_path)
    assert loaded.cfg == model.cfg
    assert_same_weights(model, loaded)


@pytest.mark.parametrize(
    "cfg",
    [
        replace(CONFIG, mtp=MTPConfig(depth=2)),
        replace(CONFIG, moe=replace(CONFIG.moe, n_shared_experts=0)),
        replace(
            WITHOUT_MTP,
            moe=replace(
                CONFIG.moe,
                score_func="softmax",
                group_score="max",
                has_bias=False,
                norm_topk_prob=False,
            ),
        ),
    ],
    ids=["two MTP modules", "no shared experts", "V2"],
)
def test_other_architectures_survive_the_round_trip(tmp_path, cfg):
    model = random_model(cfg)
    save_hf(model, tmp_path)
    loaded = load_hf(tmp_path)
    assert loaded.cfg == cfg
    assert_same_weights(model, loaded)


def test_parameters_take_the_dtype_that_is_asked_for_but_biases_stay_fp32(tmp_path):
    model = random_model()
    save_hf(model, tmp_path)
    loaded = load_hf(tmp_path, dtype=torch.bfloat16)
    assert {p.dtype for p in loaded.parameters()} == {torch.bfloat16}
    for ours, theirs in zip(model.routers(), loaded.routers(), strict=True):
        assert torch.equal(ours.bias, theirs.bias)


def test_experts_stacked_as_transformers_holds_them_are_read(tmp_path, edit):
    model = random_model()
    save_hf(model, tmp_path)

    def stack(tensors):
        for layer in ("model.layers.1.mlp.experts", "model.layers.2.mlp.experts"):
            gate, up, down = (
                torch.stack([tensors.pop(f"{layer}.{e}.{p}.weight") for e in (0, 1)])
                for p in ("gate_proj", "up_proj", "down_proj")
            )
            tensors[f"{layer}.gate_up_proj"] = torch.cat((gate, up), dim=1)
            tensors[f"{layer}.down_proj"] = down

    edit(stack)
    assert_same_weights(model, load_hf(tmp_path))


def test_tables_that_follow_from_the_config_and_empty_tensors_are_ignored(
    tmp_path, edit
):
    model = random_model()
    save_hf(model, tmp_path)

    def add(tensors):
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(1)
        tensors["model.layers.1.mlp.old_experts.up_proj.weight"] = torch.ones(0, 6)

    edit(add)
    assert_same_weights(model, load_hf(tmp_path))


def test_mtp_false_leaves_the_mtp_layers_out(tmp_path):
    model = random_model()
    save_hf(model, tmp_path)
    loaded = load_hf(tmp_path, mtp=False)
    assert loaded.cfg == WITHOUT_MTP
    tokens = torch.tensor([[1, 2, 3]])
    assert torch.equal(loaded(tokens), model(tokens))


def test_a_promise_of_mtp_that_the_files_break_is_logged(tmp_path, caplog, edit_config):
    save_hf(random_model(WITHOUT_MTP), tmp_path)
    edit_config(num_nextn_predict_layers=1)
    with caplog.at_level(logging.WARNING):
        loaded = load_hf(tmp_path)
    assert loaded.cfg == WITHOUT_MTP
    assert caplog.messages == [
        "the config promises MTP modules (1), but the files hold none: "
        "the model is loaded without them"
    ]


COPIES = (
    "model.layers.2.embed_tokens.weight",
    "model.layers.2.shared_head.head.weight",
)


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize(
    "lacking",
    [COPIES, ("model.embed_tokens.weight", "lm_head.weight")],
    ids=["copies", "originals"],
)
def test_embedding_and_head_may_be_stored_once(tmp_path, edit, lacking, depth):
    model = random_model(replace(CONFIG, mtp=MTPConfig(depth=depth)))
    save_hf(model, tmp_path)
    edit(lambda tensors: [tensors.pop(name) for name in lacking])
    assert_same_weights(model, load_hf(tmp_path))


def test_a_copy_that_differs_from_the_shared_weight_is_named(tmp_path, edit):
    save_hf(random_model(), tmp_path)
    edit(lambda tensors: tensors[COPIES[1]].mul_(2))
    message = "1 unlike the shared weight: model.layers.2.shared_head.head.weight."
    with pytest.raises(ValueError) as error:
        load_hf(tmp_path)
    assert message in str(error.value)


def test_all_wrong_tensors_are_named_in_one_error(tmp_path, edit):
    save_hf(random_model(), tmp_path)

    def spoil(tensors):
        del tensors["model.layers.0.mlp.up_proj.weight"]
        del tensors["model.layers.1.mlp.experts.1.down_proj.weight"]
        tensors["model.layers.0.self_attn.q_proj.weight"] = torch.ones(10, 6)
        tensors["model.norm.weight"] = torch.ones(7)

    edit(spoil)
    with pytest.raises(ValueError) as error:
        load_hf(tmp_path)
    assert str(error.value) == (
        f"{tmp_path} must hold exactly the tensors of the model in its config.json. "
        "2 missing: model.layers.0.mlp.up_proj.weight, "
        "model.layers.1.mlp.experts.1.down_proj.weight; "
        "1 unknown: model.layers.0.self_attn.q_proj.weight; "
        "1 of another shape: model.norm.weight (7,) instead of (6,). "
        "Take config.json and weights from one release; with mtp=False, layers of "
        "multi-token prediction are left out."
    )


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.float8_e5m2])
def test_tensors_of_another_dtype_are_named(tmp_path, edit, dtype):
    save_hf(random_model(), tmp_path)
    names = ["lm_head.weight", "model.layers.1.mlp.gate.e_score_correction_bias"]
    edit(lambda t: t.update({name: t[name].to(dtype) for name in names}))
    with pytest.raises(ValueError, match="2 of a dtype that is not read here: ") as e:
        load_hf(tmp_path)
    label = {torch.bool: "BOOL", torch.int64: "I64"}.get(dtype, "F8_E5M2")
    for name in names:
        assert f"{name} {label}" in str(e.value)


def test_scalars_are_named_with_all_other_faults(tmp_path, edit):
    save_hf(random_model(WITHOUT_MTP), tmp_path)
    names = ["model.norm.weight", "model.embed_tokens.weight"]
    edit(lambda t: t.update({name: torch.tensor(1.0) for name in names}))
    with pytest.raises(ValueError) as error:
        load_hf(tmp_path)
    assert (
        "2 of another shape: model.embed_tokens.weight () instead of (11, 6), "
        "model.norm.weight () instead of (6,). Take"
    ) in str(error.value)


def test_long_lists_of_wrong_tensors_end_with_a_count(tmp_path, edit):
    save_hf(random_model(WITHOUT_MTP), tmp_path)
    extra = {f"model.extra.{i:02}": torch.ones(1) for i in range(25)}
    edit(lambda tensors: tensors.update(extra))
    with pytest.raises(ValueError, match=r"25 unknown: .*extra\.19 and 5 more\. Take"):
        load_hf(tmp_path)


def test_nothing_is_computed_from_wrong_files(tmp_path, edit, monkeypatch):
    save_hf(random_model(WITHOUT_MTP), tmp_path)
    edit(lambda tensors: tensors.pop("model.norm.weight"))
    monkeypatch.setattr(Archive, "read", None)  # a call would fail otherwise
    with pytest.raises(ValueError, match="1 missing: model.norm.weight"):
        load_hf(tmp_path)


def test_loading_holds_one_stored_tensor_at_a_time(tmp_path, monkeypatch):
    save_hf(random_model(), tmp_path, max_shard_bytes=700)
    read, alive, most = Archive.read, weakref.WeakSet(), []

    def watched(self, name):
        most.append(len(alive))
        tensor = read(self, name)
        alive.add(tensor)
        return tensor

    monkeypatch.setattr(Archive, "read", watched)
    load_hf(tmp_path)
    assert len(most) > 60
    assert max(most) <= 1  # the last one, while the next is being read


def test_saving_holds_views_of_the_weights_not_copies(tmp_path, monkeypatch):
    model = random_model(WITHOUT_MTP)
    inside = {
        parameter.untyped_storage().data_ptr() for parameter in model.parameters()
    }
    inside |= {buffer.untyped_storage().data_ptr() for buffer in model.buffers()}
    seen = []

    def watched(tensors, *args, **kwargs):
        seen.extend(t.untyped_storage().data_ptr() for t in tensors.values())
        save_file(tensors, *args, **kwargs)

    monkeypatch.setattr("labkit.model.checkpoint_files.save_file", watched)
    save_hf(model, tmp_path)
    assert len(seen) == 35
    assert set(seen) == inside


def test_attention_that_the_format_cannot_express_is_refused(tmp_path):
    attention = GQAConfig(n_heads=2, n_kv_heads=1, head_dim=4)
    model = random_model(replace(WITHOUT_MTP, attention=attention))
    with pytest.raises(ValueError, match="attention must be MLA to be written"):
        save_hf(model, tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_a_limit_of_no_bytes_is_refused(tmp_path):
    with pytest.raises(
        ValueError, match="max_shard_bytes must be a whole number of at least 1; got 0"
    ):
        save_hf(random_model(), tmp_path, max_shard_bytes=0)


@pytest.mark.parametrize("dtype", [torch.int64, torch.float8_e4m3fn])
def test_a_model_is_not_loaded_in_a_dtype_that_nothing_computes_in(tmp_path, dtype):
    save_hf(random_model(), tmp_path)
    with pytest.raises(ValueError, match=f"dtype must be .* got {dtype}. Use one of"):
        load_hf(tmp_path, dtype=dtype)
