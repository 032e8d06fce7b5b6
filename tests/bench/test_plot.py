"""The figures: one roofline and one ratio chart per operation, limits and labels where they belong."""

from __future__ import annotations

import itertools
import math
from pathlib import Path

import pytest

from bench.cli import main
from bench.core import plot, report
from bench.core.errors import BenchError
from bench.core.limits import Limits
from bench.core.selection import one_run_per_case
from bench.core.timer import Timing
from bench.ops.decode_cases import CASES as DECODE
from bench.ops.sparse_backward import CASES as BACKWARD
from bench.ops.sparse_forward import CASES as FORWARD

figure_module = pytest.importorskip("matplotlib.figure")
Text = pytest.importorskip("matplotlib.text").Text
RESULTS = Path(__file__).parents[2] / "bench" / "results"
LIMITS = Limits(4.0, 700.0, "given", "given")
RIDGE = 175.0
SPARE = {"limits": LIMITS, "env": {}, "repro": ""}
BENCHMARKS = {"mla_decode": "decode", "sparse_mla_forward": "sparse-forward", "sparse_mla_backward": "sparse-backward"}


def rows_of(case, times, limits=LIMITS, **changes):
    env = {"gpu": "G", "date": "2026-01-02T00:00:00+00:00"}
    rows = [
        report.make_row(
            case,
            "bfloat16",
            name,
            benchmark=BENCHMARKS[case.op],
            limits=limits,
            env=env,
            repro="",
            timing=Timing(us, us, us, 32, 4),
            method="cuda-graph",
            **changes,
        )
        for name, us in times.items()
    ]
    report.relate(rows)
    return rows


def drawn(paint, rows):
    figure = figure_module.Figure(layout="constrained")
    paint(figure, rows)
    (axes,) = figure.axes
    return figure, axes


def limit_lines(axes):
    return [line for line in axes.lines if line.get_label().startswith("limits")]


@pytest.mark.parametrize("case", [DECODE[0], DECODE[7], FORWARD[0], BACKWARD[0]], ids=lambda case: case.op)
def test_no_limit_is_drawn_above_the_roof(case):
    """Right of the ridge, left of it, and on both sides."""
    _, axes = drawn(plot.roofline, rows_of(case, {"mla_cupy": 1e4, "cudnn": 2e4}))
    (line,) = limit_lines(axes)
    xs, ys = line.get_data()
    assert (xs[0], xs[-1]) == axes.get_xlim()
    assert max(ys) == 700.0
    assert xs[1] == pytest.approx(RIDGE)
    assert all(y == pytest.approx(min(4.0 * x, 700.0)) for x, y in zip(xs, ys, strict=True))
    assert xs[0] < case.cost.intensity < xs[-1]


@pytest.mark.parametrize(
    ("copy", "gemm", "want"),
    [
        (4.0, None, [40.0, 400.0]),
        (None, 700.0, [700.0, 700.0]),
        (4.0, 20.0, [20.0, 20.0]),  # the ridge is left of both ends
        (4.0, 4000.0, [40.0, 400.0]),  # and right of them
        (4.0, 200.0, [40.0, 200.0, 200.0]),
    ],
)
def test_the_roof_is_the_smaller_limit(copy, gemm, want):
    assert plot.limit_line(copy, gemm, 10.0, 100.0)[1] == want


def test_each_run_has_its_own_roof():
    rows = rows_of(FORWARD[0], {"mla_cupy": 4000.0})
    rows += rows_of(FORWARD[1], {"mla_cupy": 4000.0}, limits=Limits(4.0, 650.0, "given", "given"))
    rows += rows_of(FORWARD[2], {"mla_cupy": 4000.0}, limits=Limits(None, None, "not measured", "not measured"))
    lines = limit_lines(drawn(plot.roofline, rows)[1])
    assert [max(line.get_ydata()) for line in lines] == [700.0, 650.0]


def test_every_case_is_named_and_every_implementation_has_its_own_marker():
    rows = [row for case in DECODE for row in rows_of(case, {"mla_cupy": 100.0, "flashmla": 90.0, "fa3": 80.0})]
    figure, axes = drawn(plot.roofline, rows)
    assert sorted(text.get_text() for text in axes.texts) == sorted(case.name for case in DECODE)
    (legend,) = figure.legends
    names = [text.get_text() for text in legend.get_texts()]
    assert names[1:] == ["mla_cupy", "flashmla", "fa3"]
    lines = [line for line in axes.lines if line.get_label() in names[1:]]
    assert len({line.get_marker() for line in lines}) == len({line.get_color() for line in lines}) == 3
    assert "mla_decode" in axes.get_title()


@pytest.mark.one_in(8)
@pytest.mark.parametrize("path", sorted(RESULTS.glob("*.jsonl")), ids=lambda path: path.name)
def test_labels_of_the_kept_results_do_not_overlap(path):
    rows = report.read(path)
    for op in {row["op"] for row in rows if row["flops"]}:
        labels_do_not_overlap([row for row in rows if row["op"] == op and row["status"] == "ok"])


def labels_do_not_overlap(rows):
    figure, axes = drawn(plot.roofline, rows)
    figure.draw_without_rendering()
    boxes = [Text.get_window_extent(text) for text in axes.texts]  # without the leader lines
    whole = figure.bbox
    for at, box in enumerate(boxes):
        assert box.x1 <= whole.x1
        assert axes.bbox.y0 <= box.y0 < box.y1 <= axes.bbox.y1
        assert not any(box.overlaps(other) for other in boxes[:at])
    return axes


def test_of_many_cases_the_extremes_are_labelled():
    rows = [row for path in sorted(RESULTS.glob("decode-*.jsonl")) for row in report.read(path)]
    rows = one_run_per_case(row for row in rows if row["status"] == "ok")
    axes = labels_do_not_overlap(rows)
    own = {row["case"]: row for row in rows if row["implementation"] == "mla_cupy"}
    labelled = {text.get_text() for text in axes.texts}
    assert len(own) > plot.MAX_LABELS
    assert 8 <= len(labelled) <= 20
    rates, intensities = ({case: f(row) for case, row in own.items()} for f in (lambda row: row["tflops"], intensity))
    for extreme in (max(rates, key=rates.get), min(rates, key=rates.get), max(intensities, key=intensities.get)):
        assert extreme in labelled
    assert f"{len(labelled)} of {len(own)} cases are labelled" in axes.get_xlabel()


def intensity(row):
    return row["flops"] / row["bytes"]


def test_the_roofs_of_many_runs_are_a_band():
    limits = [(4.0, 700.0), (4.1, 650.0), (None, 680.0), (4.05, None)]
    rows = [
        row
        for case, (copy, gemm) in zip(FORWARD, limits, strict=False)
        for row in rows_of(case, {"mla_cupy": 4000.0}, limits=Limits(copy, gemm, "", ""))
    ]
    _, axes = drawn(plot.roofline, rows)
    (line,) = limit_lines(axes)
    assert line.get_label() == "limits of 4 runs: copy 4.00 to 4.10 TB/s, GEMM 650 to 700 TFLOP/s"
    (band,) = axes.collections
    right = max(x for x, _ in band.get_paths()[0].vertices)
    assert min(y for x, y in band.get_paths()[0].vertices if x == right) == 650.0


def test_labels_move_no_further_than_they_must():
    assert plot.spread([1.0, 10.0, 100.0], 2.0, (0.1, 1000.0)) == pytest.approx([1.0, 10.0, 100.0])
    close = plot.spread([10.0, 10.0, 500.0], 4.0, (0.1, 1000.0))
    assert close == pytest.approx([5.0, 20.0, 500.0])
    top = plot.spread([900.0, 990.0, 1000.0], 2.0, (1.0, 1000.0))
    assert top == pytest.approx([250.0, 500.0, 1000.0])
    crowded = plot.spread([5.0] * 6, 1.5, (1.0, 1000.0))
    assert all(b / a == pytest.approx(1.5) for a, b in itertools.pairwise(crowded))
    assert math.prod(crowded) == pytest.approx(5.0**6)


def test_bars_are_the_ratios_of_the_run():
    rows = rows_of(BACKWARD[0], {"mla_cupy": 100.0, "deterministic": 150.0, "cudnn": 120.0})
    rows += rows_of(BACKWARD[1], {"mla_cupy": 100.0})
    rows += rows_of(BACKWARD[2], {"mla_cupy": 100.0, "cudnn": 90.0, "generic": 500.0})
    figure, axes = drawn(plot.ratio_bars, rows)
    widths = {bars.get_label(): [bar.get_width() for bar in bars] for bars in axes.containers}
    assert widths == {"vs. cudnn": pytest.approx([1.2, 0.9]), "vs. generic": pytest.approx([5.0])}
    assert [text.get_text() for text in axes.get_yticklabels()] == [BACKWARD[0].name, BACKWARD[2].name]
    assert [text.get_text().strip() for text in axes.texts] == ["1.20", "0.90", "5.00"]
    assert figure.legends


@pytest.mark.parametrize("suffix", plot.FORMATS)
def test_each_operation_has_its_own_figures(tmp_path, suffix, capsys):
    source = tmp_path / "rows.jsonl"
    with source.open("w") as stream:
        report.write(stream, rows_of(DECODE[0], {"mla_cupy": 100.0, "fa3": 90.0}))
        report.write(stream, rows_of(FORWARD[0], {"mla_cupy": 4000.0}))
    assert main(["plot", str(source), "-o", str(tmp_path / "new"), "--format", suffix]) == 0
    names = {f"{name}.{suffix}" for name in ("decode-roofline", "decode-ratios", "sparse-forward-roofline")}
    assert {path.name for path in (tmp_path / "new").iterdir()} == names
    head = {"png": b"\x89PNG", "pdf": b"%PDF", "svg": b"<?xml"}[suffix]
    assert all(path.read_bytes().startswith(head) for path in (tmp_path / "new").iterdir())
    assert capsys.readouterr().out.count("wrote") == 3


def test_what_computes_nothing_has_no_roofline(tmp_path):
    rows = [row | {"flops": 0} for row in rows_of(DECODE[0], {"mla_cupy": 100.0, "fa3": 120.0})]
    assert [path.name for path in plot.draw(rows, tmp_path)] == ["decode-ratios.png"]


def test_what_cannot_be_drawn(tmp_path, monkeypatch):
    failed = report.make_row(DECODE[0], "bfloat16", "mla_cupy", benchmark="", **SPARE, status=report.ERROR)
    with pytest.raises(BenchError, match="no row was timed"):
        plot.draw([failed], tmp_path)
    rows = rows_of(DECODE[0], {"mla_cupy": 100.0})
    (tmp_path / "file").touch()
    with pytest.raises(BenchError, match="cannot write"):
        plot.draw(rows, tmp_path / "file")
    monkeypatch.setitem(__import__("sys").modules, "matplotlib", None)
    with pytest.raises(BenchError, match=r"matplotlib.*pip install"):
        plot.draw(rows, tmp_path)
