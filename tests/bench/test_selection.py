"""Selection of a case's row among several runs: the newest run of its own benchmark, with its peers."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from bench.core import plot, report
from bench.core.selection import case_of, newest, one_run_per_case

ROOT = Path(__file__).parents[2]
BENCHMARKS = {
    "decode": "decode",
    "sparse decode, FP8": "sparse-decode",
    "sparse forward": "sparse-forward",
    "sparse backward": "sparse-backward",
}
"""Benchmarks by their names in README's table."""
PEERS = ("flashmla", "fa3", "cudnn")  # README's columns behind our time


def row(implementation="mla_cupy", *, us=100.0, day="2026-01-01", benchmark="decode", record=None, **changes):
    return {
        "benchmark": benchmark,
        "op": "mla_decode",
        "case": "b1-sq1-hq16-skv1024",
        "dtype": "bfloat16",
        "shape": {"record": record} if record else {},
        "implementation": implementation,
        "status": report.OK,
        "timing": {"us_median": us},
        "env": {"date": f"{day}T00:00:00+00:00"},
        "repro": f"python -m bench run {benchmark}",
        **changes,
    }


def times(rows):
    return {row["implementation"]: row["timing"]["us_median"] for row in rows}


def test_the_newest_row_wins_in_any_order():
    old, new = row(us=200.0), row(us=100.0, day="2026-01-02")
    for rows in ([old, new], [new, old]):
        assert list(newest(rows).values()) == [new]
        assert one_run_per_case(rows) == [new]
    again = row(us=150.0, day="2026-01-02")
    assert list(newest([new, again]).values()) == [again], "of one date, the last"


def test_what_differs_in_its_benchmark_or_record_is_another_row():
    rows = [row(), row(benchmark="dense-decode-fp8", record="v32"), row(benchmark="dense-decode-fp8", record="fp8")]
    assert list(newest(rows).values()) == one_run_per_case(rows) == rows


def test_all_rows_of_a_case_are_of_one_run():
    old = [row(us=200.0), row("fa3", us=210.0), row("deterministic", us=300.0)]
    new = [row(us=100.0, day="2026-01-02"), row("fa3", us=110.0, day="2026-01-02")]
    for rows in (old + new, new + old):
        assert times(one_run_per_case(rows)) == {"mla_cupy": 100.0, "fa3": 110.0}


def test_a_later_run_without_peers_hides_none():
    with_peer = [row(us=100.0), row("fa3", us=110.0)]
    alone = [row(us=90.0, day="2026-01-02"), row("generic", us=900.0, day="2026-01-02")]
    failed = [row(us=90.0, day="2026-01-03"), row("fa3", day="2026-01-03", status=report.ERROR, timing=None)]
    assert one_run_per_case(with_peer + alone + failed) == with_peer
    assert one_run_per_case(alone) == alone


def test_rows_of_early_versions_are_of_the_benchmark_in_their_command_line():
    kept = report.read(ROOT / "bench" / "results" / "dense-decode-fp8-h200-2026-11-23.jsonl")
    assert {row["benchmark"] for row in kept} == {"dense-decode-fp8"}


@pytest.fixture(scope="module")
def chosen():
    paths = sorted((ROOT / "bench" / "results").glob("*.jsonl"))
    return one_run_per_case(row for path in paths for row in report.read(path) if report.microseconds(row) is not None)


def readme_rows():
    """Benchmark, case, time and ratios of README's table, as they are written."""
    lines = re.findall(r"^\| ([^|]+) \| `([^`]+)` \| ([^|]+) \|(.+)\|$", (ROOT / "README.md").read_text(), re.MULTILINE)
    return [
        (BENCHMARKS[name], case, time.strip(), [cell.strip() for cell in cells.split("|")])
        for name, case, time, cells in lines
        if name in BENCHMARKS
    ]


def test_the_figures_of_all_kept_results_say_what_the_readme_says(chosen):
    table = readme_rows()
    assert {benchmark for benchmark, *_ in table} == set(BENCHMARKS.values())
    by_case = {(row["benchmark"], row["case"]): row for row in chosen if row["implementation"] == "mla_cupy"}
    for benchmark, case, time, cells in table:
        us = by_case[benchmark, case]["timing"]["us_median"]
        assert time == (f"{us:.1f} us" if us < 1000 else f"{us / 1000:.2f} ms"), case
        drawn = plot.ratios(by_case[benchmark, case])
        assert cells == [f"{drawn[peer]:.2f}x" if peer in drawn else "" for peer in PEERS], case


def test_no_row_of_records_is_in_the_figure_of_rows(chosen):
    records = {(row["benchmark"], case_of(row).record) for row in chosen if row["op"] == "mla_decode"}
    assert records == {("decode", ""), ("absorption", ""), ("dense-decode-fp8", "v32"), ("dense-decode-fp8", "fp8")}
