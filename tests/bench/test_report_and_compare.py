from __future__ import annotations

import io
import json
from pathlib import Path

import pytest

from bench.cli import main
from bench.core import report, table
from bench.core.compare import compare
from bench.core.errors import BenchError
from bench.core.limits import Limits
from bench.core.timer import Timing
from bench.ops.decode_cases import DecodeCase

RESULTS = Path(__file__).parents[2] / "bench" / "results"
LIMITS = Limits(4.0, 700.0, "given", "given")


def make(case=None, implementation="mla_cupy", us=100.0, **changes):
    case = case or DecodeCase(128, 1, 128, 4096)
    timing = Timing(us, us * 0.99, us * 1.02, 32, 4) if us else None
    given = {
        "benchmark": "decode",
        "limits": LIMITS,
        "env": {"gpu": "G", "date": "2026-01-02T00:00:00+00:00"},
        "repro": "",
        "timing": timing,
    }
    return report.make_row(case, "bfloat16", implementation, **(given | {"method": "cuda-graph", "sets": 2} | changes))


def write(path, *rows):
    with path.open("w") as stream:
        report.write(stream, rows)
    return path


def test_a_row_is_one_json_line_and_comes_back(tmp_path):
    rows = [make(), make(implementation="fa3", us=None, status=report.UNSUPPORTED, reason="no")]
    stream = io.StringIO()
    report.write(stream, rows)
    lines = stream.getvalue().splitlines()
    assert [json.loads(line) for line in lines] == rows
    path = tmp_path / "rows.jsonl"
    path.write_text(stream.getvalue() + "\n")
    assert report.read(path) == rows


def test_the_row_holds_what_the_schema_promises():
    row = make()
    assert row.keys() == report.SCHEMA.keys()
    assert row["case"] == "b128-sq1-hq128-skv4096"
    shape = {"b": 128, "s_q": 1, "h_q": 128, "s_kv": 4096, "page_size": 64, "d_qk": 576, "d_v": 512}
    assert row["shape"] == shape
    assert row["timing"]["spread"] == pytest.approx(0.03)
    assert row["share_gemm"] == pytest.approx(146.03 / 100 * 1000 / 700, rel=1e-4)


@pytest.mark.parametrize(
    "spoil",
    [
        lambda row: row.pop("tflops"),
        lambda row: row.update(extra=1),
        lambda row: row.update(flops="many"),
        lambda row: row.update(schema_version=99),
        lambda row: row.update(timing=None),
        lambda row: row["timing"].pop("us_median"),
    ],
)
def test_validation_finds(spoil, tmp_path):
    row = make()
    spoil(row)
    with pytest.raises(BenchError):
        report.validate(row)
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(make()) + "\n" + json.dumps(row) + "\n")
    with pytest.raises(BenchError, match="line 2"):
        report.read(path)


@pytest.mark.parametrize("version", [1, 2, 3, 4])
def test_rows_of_earlier_versions_are_read(tmp_path, version):
    new = make(kernel="some_kernel", repro="python -m bench run decode --quick")
    old = {key: value for key, value in new.items() if key not in ("kernel", "benchmark")}
    old |= {"schema_version": version, "kernel" if version >= 3 else "variant": "some_kernel"}
    if version < 4:
        del old["includes"]
    for key in report.SINCE_VERSION_1 if version == 1 else ():
        del old[key]
    path = tmp_path / "old.jsonl"
    path.write_text(json.dumps(old) + "\n")
    assert report.read(path) == [new]


@pytest.mark.parametrize(
    "path",
    [path for kind in ("*.jsonl", "again/*.jsonl") for path in sorted(RESULTS.glob(kind))],
    ids=lambda path: path.name,
)
def test_the_kept_results_can_be_read(path):
    assert report.read(path)


def test_nan_is_never_written():
    with pytest.raises(ValueError, match="JSON"):
        report.write(io.StringIO(), [make(figures_us={"plan_update": float("nan")})])


def test_a_file_that_is_not_there_or_not_json(tmp_path):
    with pytest.raises(BenchError, match=r"nothing\.jsonl"):
        report.read(tmp_path / "nothing.jsonl")
    with pytest.raises(
        BenchError, match=rf"{tmp_path} is a directory, expected a file of results: {tmp_path}/\*.jsonl"
    ):
        report.read(tmp_path)
    bad = tmp_path / "bad.jsonl"
    bad.write_text("{")
    with pytest.raises(BenchError, match="line 1"):
        report.read(bad)


def test_the_table_shows_every_row(capsys):
    from rich.console import Console

    rows = [
        make(us=100.0),
        make(implementation="flashmla", us=80.0),
        make(implementation="fa3", us=None, status="wrong", reason="[off]"),
    ]
    rows[0]["figures_us"] = {"plan_update": 3.25}
    rows[0]["host_us"] = {"call": 9.5, "repeated_call": 8.7, "empty_launch": 4.3, "plan_update": 4.0}
    report.relate(rows)
    table.show(Console(width=160), rows)
    text = capsys.readouterr().out
    for piece in (
        "100.00",
        "80.00",
        "0.800x",
        "3.0%",
        "plan_update 3.25 us, host 4.0 us",
        "host us",
        "8.7",
        "9.5",
        "4.3",
        "wrong: [off]",
        "cuda-graph",
    ):
        assert piece in text


def test_single_calls_have_a_column(capsys):
    from rich.console import Console

    rows = [make(us=100.0), make(implementation="fa3", us=80.0)]
    rows[0]["figures_us"] = {"single_call": 123.25, "without_mask": 3.5}
    report.relate(rows)
    table.show(Console(width=200), rows)
    text = capsys.readouterr().out
    for piece in ("single call us", "123.25", "without_mask 3.50 us"):
        assert piece in text
    assert "single_call" not in text


def test_compare_matches_rows_by_key_and_keeps_the_last():
    other = DecodeCase(1, 1, 16, 1024)
    before = [make(us=50.0), make(us=100.0), make(other, us=10.0), make(implementation="fa3", us=90.0)]
    after = [make(us=104.0), make(implementation="fa3", us=180.0), make(implementation="flashmla", us=70.0)]
    ours, gone, fa3, new = compare(before, after)
    assert ours.slowdown == pytest.approx(0.04)
    assert (ours.fails(5), ours.fails(3)) == (False, True)
    assert (gone.after_status, gone.fails(5)) == ("missing", True)
    assert fa3.slowdown == pytest.approx(1.0)
    assert not fa3.fails(5), "a peer that became slower is not our failure"
    assert new.slowdown is None
    assert not new.fails(5)


def test_compare_relative_to_a_peer_takes_the_machine_out():
    before = [make(us=100.0), make(implementation="flashmla", us=80.0)]
    after = [make(us=200.0), make(implementation="flashmla", us=160.0)]
    assert compare(before, after)[0].fails(5)
    change = compare(before, after, relative_to="flashmla")[0]
    assert change.before == pytest.approx(1.25)
    assert change.slowdown == pytest.approx(0.0)


def test_compare_fails_on_a_result_that_became_wrong():
    after = [make(us=None, status=report.WRONG, reason="off")]
    assert compare([make()], after)[0].fails(1000)


def test_compare_command(tmp_path, capsys):
    fast, slow = write(tmp_path / "a.jsonl", make(us=100.0)), write(tmp_path / "b.jsonl", make(us=107.0))
    assert main(["compare", str(fast), str(slow)]) == 0
    assert main(["compare", str(fast), str(slow), "--fail-if-slower", "5%"]) == 1
    assert "FAIL" in capsys.readouterr().out
    assert main(["compare", str(fast), str(slow), "--fail-if-slower", "8"]) == 0
    assert main(["compare", str(slow), str(fast), "--fail-if-slower", "0"]) == 0
    text = capsys.readouterr().out
    assert "+7.0%" in text
    assert "-6.5%" in text
