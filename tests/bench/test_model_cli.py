"""`bench model`: laws, figures, tables, JSON, and what it refuses."""

from __future__ import annotations

import json
from dataclasses import fields

import pytest

from bench.cli import main
from bench.core.errors import BenchError
from bench.model import counts, prediction
from bench.model import report as model_report
from bench.model.counts import Kernel, Product
from bench.model.machine import MACHINES, Machine
from bench.ops.sparse_backward import SparseBackwardCase
from mla_cupy.errors import KernelCompileError
from mla_cupy.runtime import loader, sources

B200 = MACHINES["sm_100a"]
KERNEL = "sparse_backward_sm100"


@pytest.mark.parametrize(
    ("m", "n", "weight_stationary", "measured"),
    [
        # SemiAnalysis' microbenchmarks of a B200.
        *((128, n, False, cycles) for n, cycles in ((64, 48.6), (96, 56.6), (128, 64.6), (256, 128.6))),
        *((64, n, False, cycles) for n, cycles in ((64, 32.5), (128, 64.5), (256, 128.5))),
        # KevinZeng08's of a GB200, weight-stationary.
        *((32, n, True, cycles) for n, cycles in ((64, 28.5), (128, 44.5), (256, 76.5))),
        *((64, n, True, cycles) for n, cycles in ((64, 32.5), (128, 48.5), (256, 80.5))),
        *((128, n, True, cycles) for n, cycles in ((64, 48.6), (128, 74.6), (256, 138.6))),
    ],
)
def test_laws_are_what_others_measured(m: int, n: int, weight_stationary: bool, measured: float) -> None:
    assert prediction.product_cycles(Product("S", m, n, 1), weight_stationary, B200) == pytest.approx(measured, abs=0.7)


def made_up(**facts: object) -> Kernel:
    sizes = {"threads": 128, "smem_bytes": 1000, "block_heads": 64, "tile_keys": 32, "tmem_columns": 512}
    products = [64, 32, 36, 64, 32, 32, 128, 32, 32, 64, 32, 4, 128, 64, 8, 64, 64, 2]
    return Kernel.from_facts("made_up", {**sizes, "products": products, **facts})


def test_weight_stationary_products_have_their_own_law() -> None:
    plain, stationary = (prediction.tile_cycles(made_up(weight_stationary=ws), 64, B200) for ws in (0, 1))
    assert plain.operands == stationary.operands == plain.products
    assert plain.pipe != stationary.pipe


def test_products_without_facts_are_refused() -> None:
    with pytest.raises(BenchError, match="fact products of made_up: got 3, expected"):
        made_up(products=[64, 32, 36])


def test_steps_without_a_head_are_not_issued() -> None:
    issued = {one.name: one.count for one in made_up().issued(17)}
    assert issued == {"S": 36, "dP": 32, "dKV": 16, "dKV RoPE": 2, "dQ": 8, "dQ RoPE": 2}
    assert made_up().blocks(100) == [64, 36]


def test_figures_of_the_plan() -> None:
    """Computed by hand for the design with tiles of 32 keys."""
    cycles = prediction.tile_cycles(made_up(), 64, B200)
    assert (cycles.peak, cycles.pipe, cycles.operands) == (1376, 1984, 3456)
    assert (cycles.products, cycles.other, cycles.total) == (3456, 352, 3808)
    assert cycles.bound == "shared memory"
    case = SparseBackwardCase(4096, 8192, 64)
    slow, fast = (prediction.predict(made_up(), case, B200, rate) for rate in B200.addition_rates)
    assert slow.bound == "additions in the L2"
    assert slow.us == pytest.approx(4096 * 2048 * 2304 / 4.3e6)
    assert slow.tflops == pytest.approx(657, abs=1)
    assert slow.added_tbps == pytest.approx(4.3)
    assert fast.bound == "shared memory"
    assert fast.us == pytest.approx(28 * (64 * 3808 + 2240) / 1830)
    both = prediction.predict(made_up(), SparseBackwardCase(4096, 8192, 128), B200, 4.3)
    assert (both.added_bytes, both.gathered_bytes) == (2 * slow.added_bytes, 2 * slow.gathered_bytes)


def test_every_assumption_has_a_source() -> None:
    for one in B200.record():
        assert one["value"] > 0
        assert all(one[key] for key in ("unit", "source", "confidence"))


def test_tables(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["model", "sparse-backward"]) == 0
    text = capsys.readouterr().out
    assert text.startswith("PREDICTED, NOT MEASURED")
    assert text.count("PREDICTED, NOT MEASURED: the main kernel alone") == 2
    for expected in ("hq64-topk2048", "hq128-topk2048", "bound by", "36 of 64 x 32", "Not counted", "N = 32"):
        assert expected in text
    for name in (*counts.names("sm_100a"), *(one.name for one in fields(Machine))):
        assert name in text
    assert "WARNING" not in text


def test_sums_larger_than_the_l2_are_warned_about(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["model", "sparse-backward", "--kernel", KERNEL, "--heads", "16", "--s-kv", "131072"]) == 0
    assert "WARNING: 302 MB of sums do not fit in the L2" in capsys.readouterr().out


def test_json(tmp_path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "model.json"
    arguments = ["model", "sparse-backward", "--kernel", KERNEL, "--heads", "64,100", "--d-qk", "512"]
    assert main([*arguments, "--topk", "100", "--s-q", "7", "--json", str(path)]) == 0
    data = json.loads(path.read_text())
    assert (data["schema_version"], data["label"]) == (model_report.SCHEMA_VERSION, "predicted, not measured")
    assert (data["operation"], data["arch"], data["dtype"]) == ("sparse-backward", "sm_100a", "bfloat16")
    assert [shape["h_q"] for shape in data["shapes"]] == [64, 100]
    assert data["assumptions"] == B200.record()
    assert data["not_counted"]
    (kernel,) = data["kernels"]
    assert (kernel["name"], kernel["block_heads"], kernel["tile_keys"]) == (KERNEL, 64, 32)
    assert [one["name"] for one in kernel["products"]] == ["S", "dP", "dKV", "dQ"]
    assert kernel["tile_cycles"]["total"] > kernel["tile_cycles"]["peak"]
    assert kernel["tile_counts"]["loaded"] == 32 * 512 * 2
    assert kernel["block_counts"]["stored"] == 64 * 512 * 2
    assert [(row["h_q"], row["addition_tbps"]) for row in data["predictions"]] == [
        (heads, rate) for heads in (64, 100) for rate in B200.addition_rates
    ]
    assert data["predictions"][2]["added_bytes"] == 2 * 7 * 100 * 512 * 4
    assert data["repro"].startswith("python -m bench model sparse-backward")


@pytest.mark.parametrize("model", ["sparse-backward", "forward"])
@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--arch", "sm_90a"], "--arch: got sm_90a, expected sm_100a"),
        (["--json", "/nowhere/x.json"], "--json: got /nowhere/x.json, expected"),
    ],
)
def test_what_no_model_can_predict(model, arguments, text, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["model", model, *arguments]) == 2
    assert text in capsys.readouterr().err


@pytest.mark.parametrize("option", ["--topk", "--s-q", "--s-kv", "--heads"])
def test_options_of_this_model_are_refused_by_the_other(option: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["model", "forward", option, "32"])
    assert stop.value.code == 2
    assert f"{option}: `model forward` has cases of its own" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--arch", "sm_103a"], "--arch: got sm_103a, expected sm_100a"),
        (["--kernel", "sparse_backward_sm90"], "--kernel: got sparse_backward_sm90, expected one of " + KERNEL),
    ],
)
def test_what_cannot_be_predicted_says_why(arguments, text, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["model", "sparse-backward", *arguments]) == 2
    assert text in capsys.readouterr().err


def test_a_kernel_that_does_not_compile_says_so(monkeypatch, capsys: pytest.CaptureFixture[str]) -> None:
    def refuse(request):
        raise KernelCompileError(f"{request.name} does not compile")

    monkeypatch.setattr(loader, "obtain", refuse)
    assert main(["model", "sparse-backward", "--kernel", KERNEL]) == 2
    assert "mla_sparse_backward_sm100-bfloat16-576-0-sm_100a does not compile" in capsys.readouterr().err


@pytest.mark.parametrize(
    "bad", [["--heads", "0"], ["--heads", "64,"], ["--topk", "-1"], ["--s-q", "x"], ["--d-qk", "64"]], ids=" ".join
)
def test_bad_options_of_the_model_are_refused(bad, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["model", "sparse-backward", *bad])
    assert stop.value.code == 2
    assert bad[0] in capsys.readouterr().err


def test_the_page_on_the_original_plan() -> None:
    """The speed that 500 GB/s would allow, and the traffic at the predicted rate."""
    page = (sources.source_root().parent / "docs" / "explainers" / "tensor-memory.md").read_text()
    plain = counts.load(KERNEL, "sm_100a", 576)
    tile = counts.tile_counts(plain, 64, 32)
    gathered, added = tile.flops / tile.loaded, tile.flops / tile.added
    both = tile.flops / (tile.loaded + tile.added)
    assert f"{tile.loaded:,} B a tile: {gathered:.0f} FLOP per byte" in page
    assert f"{tile.added:,} B a tile, float32: {added:.0f} FLOP per byte" in page
    assert f"at {0.5 * gathered:.0f} TFLOP/s, gather and additions together at {0.5 * both:.0f}." in page
    rates = prediction.predict(plain, SparseBackwardCase(4096, 8192, 64), B200, B200.seen_addition_tbps)
    said = f"At the predicted {rates.tflops:.0f} TFLOP/s the gather reads {rates.gathered_tbps:.1f} TB/s"
    assert f"{said} and the additions write {rates.added_tbps:.1f}" in page
    for name in counts.names("sm_100a"):
        kernel = counts.load(name, "sm_100a", 576)
        assert f"{kernel.smem_bytes:,} B" in page
        assert str(kernel.tmem_columns_used) in page


def test_the_kernel_page_shows_what_the_command_prints() -> None:
    """Predictions and counts, row by row."""
    page = (sources.source_root() / "sparse_backward" / "sm100.md").read_text()
    known = [counts.load(name, "sm_100a", 576) for name in counts.names("sm_100a")]
    rows = [
        f"| {one.h_q} | `{one.kernel}` | {one.addition_tbps:g} | {one.sm_us / 1e3:.2f} | {one.l2_us / 1e3:.2f} | "
        f"{one.us / 1e3:.2f} | {one.tflops:.0f} | {one.bound} |"
        for heads in (64, 128)
        for one in model_report.predictions(known, SparseBackwardCase(4096, 8192, heads), B200)
    ]
    table = model_report.tile_table(known, B200)
    facts = [f"| {' | '.join(row)} |" for row in table.rows]
    once_a_block = 6
    missing = [row for row in rows + facts[:-once_a_block] if row not in page]
    assert not missing
