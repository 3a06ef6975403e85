"""Published figures: each can be read, and ours agree with them as far as they go."""

import pytest

from labkit.config import PRESETS, GQAConfig
from labkit.data import read_rows
from labkit.workbook.published import published

ROWS = read_rows("published.csv")


@pytest.mark.parametrize(
    "row", ROWS, ids=lambda row: f"{row['model']} {row['quantity']}"
)
def test_every_row_is_a_figure_with_a_unit(row):
    assert published(row["model"], row["quantity"]) > 0
    assert row["unit"]


def test_no_figure_stands_twice():
    assert len({(row["model"], row["quantity"]) for row in ROWS}) == len(ROWS)


@pytest.mark.parametrize(("model", "digits"), [("v2-lite-16b", 1), ("v2-236b", 0)])
def test_published_totals_are_ours_rounded(model, digits):
    ours = PRESETS[model].n_params() / 1e9

    assert round(ours, digits) == published(model, "total parameters")


@pytest.mark.parametrize("model", ["v2-lite-16b", "v2-236b", "v3-671b"])
def test_published_activated_parameters_count_the_head_and_not_the_embedding(model):
    cfg, said = PRESETS[model], published(model, "activated parameters") * 1e9
    ways = {
        "both": cfg.n_active_params(include_embedding=True),
        "head": cfg.n_active_params(),
        "neither": cfg.n_active_params() - cfg.parameter_counts().head,
    }

    assert min(ways, key=lambda way: abs(ways[way] - said)) == "head"


def test_published_caches_are_those_of_eight_kv_heads():
    width = GQAConfig(n_heads=64, n_kv_heads=8, head_dim=128).cache_width
    layers = {"deepseek-67b": 95, "qwen2.5-72b": 80, "llama-3.1-405b": 126}

    assert {name: published(name, "cache") for name in layers} == {
        name: 2 * width * n_layers for name, n_layers in layers.items()
    }
    assert published("v3-671b", "cache") == PRESETS["v3-671b"].kv_bytes_per_token()


def test_an_unknown_figure_is_refused_with_those_there_are():
    with pytest.raises(ValueError) as error:
        published("v3-671b", "price")
    message = str(error.value)
    assert message.startswith(
        "data/published.csv has no 'price' of 'v3-671b'. Add a row with its source, or "
        "use one of v2-lite-16b: total parameters, "
    )
