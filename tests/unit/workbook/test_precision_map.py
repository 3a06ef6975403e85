"""The precision map: what it says is what the plan says, whatever is pressed."""

import math

import pytest
import torch
from ipywidgets import Button

from labkit.config import PRESETS
from labkit.model import Transformer
from labkit.precision import POLICIES, QuantSpec, plan
from labkit.workbook.figures.precision_map import LOOKS
from labkit.workbook.precision_map import (
    DEVICES,
    MODELS,
    ROW_OF,
    Cell,
    MapPlan,
    kept_bytes,
)
from labkit.workbook.product_error import ProductSample, sample_of
from labkit.workbook.widgets.precision_map import PrecisionMap

OUTPUT = Cell("layers 3-60", "attention output")
ROUTER = Cell("layers 3-60", "router")


@pytest.fixture(scope="module")
def sample():
    generator = torch.Generator().manual_seed(0)
    x, w = (torch.randn(64, 256, generator=generator) for _ in range(2))
    return ProductSample(operands={"experts": (x, w), "wo": (x, w)})


@pytest.fixture
def view(sample):
    return PrecisionMap(sample)


@pytest.fixture
def controls(view):
    return view.controls()["plan"]


def map_plan(**changed):
    start = {
        "model": "DeepSeek-V3 (671B)",
        "device": "H100, H800",
        "policy": "deepseek-v3",
        "percent": 160,
        "selected": OUTPUT,
    }
    return MapPlan(**start | changed)


def test_every_operator_of_every_model_has_one_place():
    for key in MODELS.values():
        assert {row.operator.part for row in plan(PRESETS[key]).rows} <= set(ROW_OF)
    cells = map_plan().cells
    names = [row.operator.name for rows in cells.values() for row in rows]

    assert sorted(names) == sorted(r.operator.name for r in map_plan().planned.rows)


def test_layers_that_get_the_same_share_a_column():
    columns = map_plan(policy="conservative").columns

    assert columns == (
        *("outside", "layers 0-1", "layer 2", "layers 3-58", "layers 59-60", "MTP"),
    )


def test_levels_come_round_to_the_policys_own_which_is_no_edit():
    chosen, seen = map_plan(), []
    for _ in range(3):
        chosen = map_plan(edits=chosen.next_edits(OUTPUT))
        row = chosen.cells[OUTPUT][0]
        seen.append((row.compute, row.kept, len(chosen.edits)))

    assert seen == [("bf16", "bf16", 1), ("fp8", "e4m3", 1), ("fp8", "e5m6", 0)]


def test_an_edit_touches_its_cell_alone():
    before = map_plan()
    after = map_plan(edits=before.next_edits(OUTPUT))
    changed = [cell for cell in before.cells if before.cells[cell] != after.cells[cell]]

    assert changed == [OUTPUT]


def test_a_router_refuses_fp8_and_says_why(view, controls):
    grid = controls.controls["map"]
    grid.press(ROUTER)
    assert "sensitive" in view.describe(controls.value)
    grid.press(ROUTER)

    text = view.describe(controls.value)
    assert "never FP8: rounding would swap experts that are nearly equal" in text
    assert "with 1 change" in text


def test_a_button_selects_and_then_changes(controls):
    grid = controls.controls["map"]
    buttons = [child for child in grid.children if isinstance(child, Button)]
    (button,) = [
        each
        for each in buttons
        if each.tooltip.startswith("attention output, layers 3-60")
    ]
    button.click()
    assert grid.value == (OUTPUT, ())
    assert button.layout.border_top == "2px solid #222222"
    button.click()

    assert button.description == "• BF16"
    assert button.style.button_color == LOOKS["bf16"].colour
    assert dict(controls.value["map"][1])[OUTPUT].compute == "bf16"


def test_a_press_makes_no_new_widgets(controls):
    grid = controls.controls["map"]
    before = grid.children
    grid.press(OUTPUT)
    grid.press(OUTPUT)

    assert grid.children is before


def test_another_device_keeps_edits_another_policy_forgets_them(controls):
    grid = controls.controls["map"]
    grid.press(OUTPUT)
    grid.press(OUTPUT)
    controls.controls["device"].value = "B200"
    assert len(grid.value[1]) == 1
    controls.controls["policy"].value = "aggressive"

    assert grid.value[1] == ()


def test_speed_follows_from_the_share_of_fp8_units(view, controls):
    share = map_plan().planned.fp8_flop_share
    faster = 100 * (1 / ((1 - share) + share / 1.6) - 1)

    assert f"at 160 % of BF16's speed that is +{faster:.0f} %" in view.describe(
        controls.value
    )


def test_devices_without_fp8_units_gain_nothing(view, controls):
    controls.controls["device"].value = "A100 80 GB"

    text = view.describe(controls.value)
    assert "never multiplied. 160 % of BF16's speed gains nothing here" in text


def test_reasons_of_several_operators_are_said_once(view, controls):
    controls.controls["model"].value = "tiny (this book's)"
    controls.controls["map"].press(Cell("layer 0", "keys, values"))

    why = view.describe(controls.value).partition("Why: ")[2]
    assert why == (
        "a linear layer: most of the work, and it bears the rounding; a side of 48 is "
        "less than the 128 of its FP8 units; a side of 32 is less than the 128 of its "
        "FP8 units."
    )


def test_inputs_that_several_read_are_kept_once():
    cfg = PRESETS["v2-lite-16b"]
    bf16 = plan(cfg, "bf16")
    row = [each for each in bf16.rows if each.operator.depth == 0]
    width = cfg.attention.n_heads * cfg.attention.v_head_dim
    inputs = (cfg.dim, cfg.attention.kv_lora_rank, width, cfg.dim, 3 * cfg.inter_dim)

    assert kept_bytes(bf16, cfg, row) == {"bf16": 2 * sum(inputs)}


def test_the_result_of_swiglu_is_not_kept_where_its_inputs_are_in_fp8():
    chosen = map_plan()
    down = chosen.cells[Cell("layers 0-2", "down")]

    assert kept_bytes(chosen.planned, chosen.cfg, down) == {}


def test_the_error_is_that_of_the_operands_as_the_device_rounds_them(
    view, controls, sample
):
    error = sample.error("experts", QuantSpec(scale="fp32"), weights())

    assert f"off by {100 * error:.2g} % ({-20 * math.log10(error):.1f} dB)" in (
        view.describe(controls.value)
    )


def weights():
    return QuantSpec(tile=(128, 128), scale="fp32")


def test_a_sample_holds_what_each_product_of_a_model_reads():
    cfg = PRESETS["tiny"]
    model = Transformer(cfg, generator=torch.Generator().manual_seed(0))
    tokens = torch.randint(cfg.vocab_size, (1, 8))
    taken = sample_of(model, tokens).operands
    products = {r.operator.part for r in plan(cfg).rows if r.operator.kind == "product"}

    assert set(taken) == products
    assert taken["wo"][1] is not model.layers[0].attn.wo.weight
    assert torch.equal(taken["wo"][1], model.layers[0].attn.wo.weight)
    assert not any(module._forward_pre_hooks for module in model.modules())


@pytest.mark.parametrize("device", DEVICES)
def test_all_plans_of_a_small_model_are_drawn_and_described(view, controls, device):
    model = "tiny (this book's)"
    controls.controls["model"].value = model
    controls.controls["device"].value = device
    for policy in POLICIES:
        controls.controls["policy"].value = policy
        text = view.describe(controls.value)
        assert f"{model} on {device}, “{policy}”:" in text
    fig = view.draw(controls.value)

    assert len(fig.axes[0].patches) == 4


def test_all_models_are_drawn_and_described(view, controls):
    for model in MODELS:
        controls.controls["model"].value = model
        assert view.describe(controls.value).startswith(f"{model} on H100, H800")
        assert view.draw(controls.value).axes


def test_a_page_without_controls_shows_the_map(view, controls):
    fig = view.draw_static(controls.value)
    words = {text.get_text() for text in fig.axes[0].texts}

    assert {"FP8", "FP8, keeps E5M6", "BF16, keeps E4M3", "FP8 sent"} <= words
    assert len(fig.axes[0].patches) == len(map_plan().cells)


def test_every_control_changes_what_is_said(view):
    controls = view.controls()["plan"]
    for control in list(controls.controls.values())[:-1]:
        before = view.describe(controls.value)
        options = [o[1] if isinstance(o, tuple) else o for o in control.options]
        control.value = next(value for value in options if value != control.value)
        assert view.describe(controls.value) != before
