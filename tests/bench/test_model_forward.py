"""`bench model forward`: laws, plans, published cases, predictions, and what the page says of them."""

from __future__ import annotations

import json
from dataclasses import fields, replace
from pathlib import Path

import pytest

from bench.cli import main
from bench.model import forward_report, plans, published
from bench.model.forward import Plan, Product, Work, at_clock, forecast, tile
from bench.model.machine import FORWARD_RATES, MACHINES, ForwardRates
from bench.model.plans import pair_plan, swapped_plan
from mla_cupy.kernels import KERNELS
from tests.support.mutants import sound

B200, RATES = MACHINES["sm_100a"], FORWARD_RATES["sm_100a"]
PAGE = Path(__file__).resolve().parents[2] / "bench" / "log" / "blackwell_forward.md"


@pytest.mark.parametrize(
    ("product", "measured"),
    [
        # SemiAnalysis' microbenchmarks of a B200: one SM, a pair, A in tensor memory.
        *((Product(128, n, 1), cycles) for n, cycles in ((64, 48.6), (96, 56.6), (128, 64.6), (256, 128.6))),
        *((Product(64, n, 1), cycles) for n, cycles in ((64, 32.5), (128, 64.5), (256, 128.5))),
        *((Product(128, n, 1, pair=True), cycles) for n, cycles in ((128, 32.7), (256, 64.7))),
        *((Product(256, n, 1, pair=True), cycles) for n, cycles in ((128, 64.8), (256, 128.7))),
        *((Product(m, n, 1, a_in_tmem=True), n / 2) for m in (64, 128) for n in (64, 128, 256)),
    ],
    ids=str,
)
def test_laws_are_what_others_measured(product: Product, measured: float) -> None:
    assert product.cycles(B200) == pytest.approx(measured, abs=0.9)


@pytest.mark.parametrize(("m", "law", "measured"), [(128, 24, 25.7), (256, 40, 43.7)])
def test_a_pair_with_64_columns_is_slower_than_the_law(m: int, law: int, measured: float) -> None:
    """Slower by less than a tenth; no plan has such products."""
    product = Product(m, 64, 1, pair=True)
    assert product.cycles(B200) == law
    assert law < measured < 1.1 * law
    every = [*(case.plan for case in published.CASES), *(plan for plan, _ in plans.OURS)]
    assert not any(one.pair and one.n == 64 for plan in every for one in (*plan.scores, *plan.values))


def test_a_plan_computes_every_flop() -> None:
    """The products' own FLOPs follow from the rows, keys and columns, whatever the plan."""
    swapped = [swapped_plan("", rows, keys, blocks) for rows in (16, 64) for keys in (64, 128) for blocks in (1, 2)]
    for plan in (*swapped, pair_plan("", 1), pair_plan("", 2), pair_plan("", 2, tmem_dims=384)):
        depth = 32 // plan.element_bytes
        issued = sum(2 * one.m * one.n * depth * one.count for one in (*plan.scores, *plan.values))
        groups = 1 if plan.scores[0].pair else plan.blocks
        assert issued * groups == plan.flops == 2 * plan.rows * plan.keys * 1088


def test_what_a_pair_fetches() -> None:
    """Each block: half of the keys whole, and half of the value columns of the other half."""
    assert pair_plan("", 2).filled == 64 * 1152 + 64 * 512
    assert pair_plan("", 1).filled == 64 * 576 + 64 * 256
    assert pair_plan("", 2, apart=True).filled == 64 * 1152 + 128 * 512
    assert swapped_plan("", 64, 128).filled == 128 * 1152


def test_a_gather_is_shared_by_blocks_and_threads() -> None:
    joint = pair_plan("", 2, apart=True, gathered=True)
    assert joint.messages == 16 * 9 + 32 * 4
    assert pair_plan("", 2, apart=True).messages == 0
    alone, two = (swapped_plan("", 64, 64, blocks, gathered=True) for blocks in (1, 2))
    assert (alone.messages, two.messages) == (16 * 9, 8 * 9)
    slow = replace(RATES, gather_issue_cycles=1000.0)
    assert tile(alone, B200, slow).total == 144 * 1000 / 4
    assert tile(alone, B200, slow).bound == "gather"
    assert tile(two, B200, slow).total == tile(alone, B200, slow).total / 2


def made_up(**changes: object) -> Plan:
    """One block, one score product of 100 cycles, one of the values of 50; P 16 by 10, 2,560 bytes of keys."""
    plan = Plan("", 1, 16, 10, (Product(64, 200, 1),), (Product(64, 100, 1),), filled=2560)
    return replace(plan, **changes)


def test_a_tile() -> None:
    """Computed by hand: operands 66 + 41 cycles, keys 20, P 320 bytes; 160 exponentials."""
    rates = replace(RATES, handoff_cycles=70.0)
    cost = tile(made_up(), B200, rates)
    assert (cost.products, cost.chain, cost.gather) == (150, 150, 0)
    assert cost.smem == 264 * 32 / 128 + 164 * 32 / 128 + 2560 / 128 + 320 / 128
    assert (cost.total, cost.bound) == (150, "products")
    assert tile(made_up(), B200, replace(rates, handoff_cycles=500.0)).chain == 50 + 10 + 500
    full = tile(made_up(filled=12800), B200, rates)
    assert (full.total, full.bound) == (pytest.approx(cost.smem + 80), "shared memory")


@pytest.mark.parametrize(
    ("items", "keys", "balanced", "tiles", "kernels"),
    [
        (148, 100, False, 10, 1),  # one item for each SM
        (149, 100, False, 20, 1),  # one SM has two
        (74, 100, False, 5, 2),  # cut in two
        (1, 100, False, 1, 2),  # cut into its tiles
        (149, 100, True, 11, 2),
        (296, 100, True, 20, 1),
    ],
)
def test_how_items_are_divided(items: int, keys: int, balanced: bool, tiles: int, kernels: int) -> None:
    work = Work("", items, 16, keys, 0, balanced)
    found = forecast(made_up(), work, B200, RATES)
    cost = tile(made_up(), B200, RATES).total
    assert found.sm_us == pytest.approx(tiles * cost / B200.clock_ghz / 1e3)
    assert found.start_us == kernels * RATES.start_us
    assert found.us == found.sm_us + found.start_us
    assert found.tflops == pytest.approx(work.flops / found.us / 1e6)


def test_the_bound_is_the_longest_part() -> None:
    work = Work("", 148, 16, 100, 1 << 20)
    assert forecast(made_up(), work, B200, RATES).bound == "memory"
    weak = replace(RATES, sustained_half_tflops=0.001)
    assert forecast(made_up(), replace(work, row_bytes=0), B200, weak).bound == "power"
    assert forecast(made_up(), replace(work, row_bytes=0), B200, RATES).bound == "softmax"
    assert forecast(made_up(), work, B200, RATES).memory_us == pytest.approx(148 * 100 * (1 << 20) / 7.2e6)


def test_more_rows_than_a_plan_has_take_several_passes() -> None:
    plan, work = swapped_plan("", 64, 64), Work("", 148, 64, 4096, 1152)
    one, two = (forecast(plan, replace(work, rows=rows), B200, RATES) for rows in (64, 128))
    assert two.sm_us == 2 * one.sm_us
    assert two.memory_us == one.memory_us


# ---- Published cases -----------------------------------------------------------------------------------------------

BEYOND = {("vllm#41778, tokenspeed", 201.0), ("flash-attention#2621, 1,180 TFLOP/s", 1980.1)}
BEYOND |= {("flash-attention#2621, 820 TFLOP/s", 2849.3)}


def test_published_times_within_a_fifth_but_for_those_named() -> None:
    """One set of constants predicts the times; the page names the exceptions."""
    beyond = set()
    for case in published.CASES:
        ratio = forecast(case.plan, case.work, B200, RATES).us / case.us
        if abs(ratio - 1) > forward_report.TOLERANCE:
            beyond.add((case.source, round(case.us, 1)))
    assert beyond == BEYOND


def test_published_figures() -> None:
    """FLOPs and bytes of the cases give the rates published in the threads."""
    by_us = {case.us: case.work for case in published.CASES}
    assert by_us[145.0].flops / 145.0e6 == pytest.approx(2014, rel=0.002)
    assert by_us[145.0].nbytes / 145.0e6 == pytest.approx(4.17, rel=0.002)
    assert by_us[610.0].flops / 610e6 == pytest.approx(1200, rel=0.01)
    assert by_us[610.0].nbytes / 610e6 == pytest.approx(4.95, rel=0.01)
    assert any(not case.fitted for case in published.CASES)


# ---- Predictions ---------------------------------------------------------------------------------------------------


def test_every_prediction_has_a_plan_that_fits() -> None:
    for plan, work in plans.OURS:
        assert work.balanced
        assert plan.rows in (plans.ROWS, 2 * plans.ROWS)
        assert work.rows in (plans.ROWS, 2 * plans.ROWS)


OUR_KERNELS = {
    "decode_sm100": ("block_rows", plans.SWAPPED_64),
    "decode_sm100_joint": ("", plans.JOINT),
    "sparse_forward_sm100": ("block_heads", plans.SWAPPED_64_ALONE),
    "sparse_forward_sm100_joint": ("", plans.JOINT_GATHERED),
}


@pytest.mark.parametrize("name", OUR_KERNELS)
def test_a_plan_is_that_of_its_kernel(name: str) -> None:
    """The products that the kernel's build for 64 rows says it issues for a tile."""
    kernel, (rows, plan) = KERNELS[name], OUR_KERNELS[name]
    wanted = {"dtype": "bfloat16", **({rows: plans.ROWS} if rows else {})}
    variants = [one for one in kernel.variants if wanted.items() <= dict(one.macros).items()]
    build = next(
        one for one in variants if getattr(one, "head_dim_qk", 576) == 576 if "tree_mask" not in str(one.macros)
    )
    facts = sound(kernel.request(build, "sm_100a")).facts
    (scores,), (values,) = plan.scores, plan.values
    assert list(facts["products"]) == [*(scores.m, scores.n, scores.count), *(values.m, values.n, values.count)]
    tiles = 2 if scores.pair else 1  # of schedules, for one of the products
    assert (tiles * facts["tile_tokens"], facts.get("cluster", 1)) == (plan.keys, plan.blocks)


def test_aims_are_judged_at_their_own_clock() -> None:
    aims = [(work.nbytes > 0, plan.name) for plan, work in plans.OURS if forward_report.aim(plan, work, B200, RATES)]
    assert len(aims) == 9
    sparse = next(work for plan, work in plans.OURS if work.rows == 128 and not work.nbytes)
    fast = at_clock(B200, 1.85)
    said = forward_report.aim(plans.SWAPPED_128_GATHERED, sparse, B200, RATES)
    tflops = forecast(plans.SWAPPED_128_GATHERED, sparse, fast, RATES).tflops
    assert said == f"missed: {tflops:,.0f} of 1,200 TFLOP/s"
    assert forward_report.aim(plans.PAIR, sparse, B200, RATES).startswith("reached: ")
    assert forward_report.aim(plans.JOINT_GATHERED, sparse, B200, RATES).startswith("reached: ")


# ---- The command and the page --------------------------------------------------------------------------------------


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "model.json"
    assert main(["model", "forward", "--json", str(path)]) == 0
    text = capsys.readouterr().out
    assert text.startswith("PREDICTED, NOT MEASURED: attention forwards on sm_100a")
    for expected in ("published against model", "no GPU has run them", *(one.name for one in fields(ForwardRates))):
        assert expected in text
    data = json.loads(path.read_text())
    assert (data["operation"], data["label"]) == ("forward", "predicted, not measured")
    assert data["assumptions"] == [*B200.record(), *RATES.record()]
    assert len(data["published"]) == len(published.CASES)
    assert len(data["predictions"]) == len(plans.OURS)
    assert {"plan", "work", "tile_cycles", "model"} <= data["predictions"][0].keys()


def test_the_page_shows_what_the_command_prints() -> None:
    page = PAGE.read_text()
    for heads, rows in (
        (forward_report.PUBLISHED_HEADS, forward_report.published_rows(B200, RATES)),
        (forward_report.OUR_HEADS, forward_report.our_rows(B200, RATES)),
        (forward_report.TILE_HEADS, forward_report.tile_rows(B200, RATES)),
    ):
        table = [f"| {' | '.join(row)} |" for row in (heads, *rows)]
        assert [line for line in table if line not in page] == []
    assert [line for line in forward_report.NOT_COUNTED if f"- {line}\n" not in page] == []
    for figure in (RATES.memory_tbps, RATES.handoff_cycles, RATES.start_us, RATES.gather_issue_cycles):
        assert f"{figure:g}" in page
