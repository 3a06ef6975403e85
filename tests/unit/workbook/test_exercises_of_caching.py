"""Exercises of notebook 06 that look at how an answer gets its value."""

from dataclasses import replace

import pytest
import torch

from labkit.workbook.exercises import grade
from labkit.workbook.exercises.catalogue import find
from labkit.workbook.exercises.n06_attention_and_cache import V3


def by_multiplying_and_summing(q_nope, w_uk, latent):
    return (q_nope[:, :, None] * w_uk).sum(1) @ latent.T


def by_a_loop_over_heads(q_nope, w_uk, latent):
    return torch.stack([latent @ (q @ w) for q, w in zip(q_nope, w_uk, strict=True)])


def by_one_einsum(q_nope, w_uk, latent):
    return torch.einsum("hn,hnc,tc->ht", q_nope, w_uk, latent)


@pytest.mark.parametrize(
    "scores", [by_multiplying_and_summing, by_a_loop_over_heads, by_one_einsum]
)
def test_any_way_that_makes_no_keys_passes(scores):
    assert grade(find("absorbed_scores"), scores).mark == "✓"


def keys_of_all_heads(q_nope, w_uk, latent):
    keys = torch.einsum("hnc,tc->htn", w_uk, latent)
    return torch.einsum("hn,htn->ht", q_nope, keys)


def keys_of_one_head_after_another(q_nope, w_uk, latent):
    rows = [(latent @ w.T) @ q for q, w in zip(q_nope, w_uk, strict=True)]
    return torch.stack(rows)


def keys_of_one_token_after_another(q_nope, w_uk, latent):
    columns = [(q_nope * (w_uk @ row)).sum(1) for row in latent]
    return torch.stack(columns, dim=1)


def keys_without_a_product_of_matrices(q_nope, w_uk, latent):
    keys = (w_uk[:, None] * latent[:, None, :]).sum(-1)
    return (q_nope[:, None] * keys).sum(-1)


@pytest.mark.parametrize(
    "scores",
    [
        keys_of_all_heads,
        keys_of_one_head_after_another,
        keys_of_one_token_after_another,
        keys_without_a_product_of_matrices,
    ],
)
def test_any_way_that_makes_keys_is_told_so(scores):
    line = grade(find("absorbed_scores"), scores).line

    assert line.startswith("✗ for the past tokens that get a key on the way: you gave ")
    assert "'all', expected 'none' (the scores are right, but" in line


@pytest.mark.parametrize(
    ("widths", "complaint"),
    [
        ({"qk_rope_head_dim": 32}, "✗ for the rotary width: you gave 32, expected 64"),
        ({"q_lora_rank": 2048}, "✗ for the query rank: you gave 2,048, expected 1,536"),
    ],
)
def test_widths_that_were_to_stay_are_held(widths, complaint):
    narrow = replace(V3.attention, kv_lora_rank=192, v_head_dim=176, **widths)
    verdict = grade(find("smaller_cache"), replace(V3, attention=narrow))

    assert verdict.line == complaint


def test_fewer_layers_are_no_smaller_attention():
    fewer = replace(find("smaller_cache").solution, n_layers=30)

    assert grade(find("smaller_cache"), fewer).line == (
        "✗ for what changed outside attention: you gave 'n_layers', expected 'nothing'"
    )


@pytest.mark.parametrize(("gigabytes", "mark"), [(8.15, "✓"), (8, "✓"), (9.21, "✗")])
def test_the_number_that_the_explorer_opens_with_is_no_answer(gigabytes, mark):
    assert grade(find("cache_of_a_batch"), gigabytes).mark == mark


@pytest.mark.parametrize("name", ["smaller_cache", "sparse_giant"])
@pytest.mark.parametrize("part", [V3.attention, V3.moe, {"kv_lora_rank": 192}])
def test_a_part_of_a_config_is_no_config(name, part):
    assert grade(find(name), part).line.endswith(
        "(give a whole ModelConfig, not a part of it)"
    )


def test_fewer_layers_are_no_sparser_experts():
    solution = find("sparse_giant").solution
    # Enough experts to stay within 10 to 16 billion parameters.
    moe = replace(solution.moe, n_routed_experts=570)
    fewer = replace(solution, n_layers=26, moe=moe)

    assert grade(find("sparse_giant"), fewer).line == (
        "✗ for what changed outside the experts: you gave 'n_layers', expected "
        "'nothing'"
    )
