"""Traces: waits are found where the kernel waits, on one axis of time, and a build without a trace is as it was."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import itertools
import json
import re
import types
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from bench.cli import main
from bench.core.errors import BenchError
from bench.trace import command, report
from bench.trace.choice import NOWHERE, ONLY, Choice, places
from bench.trace.command import MAX_AUTO_PARTS, MAX_PARTS, Traced
from bench.trace.driver import MOMENT, NO_SLOT, OPENING, PRELUDE, RECORD, TARGET, Recorded, traced
from bench.trace.sites import UNKNOWN, number, sites
from bench.trace.waits import BASIC_BLOCK, clock_rate, roles, trace_of, unwrapped, with_times
from mla_cupy.errors import KernelCompileError
from mla_cupy.kernels import KERNELS
from mla_cupy.runtime import cache, loader, sources
from mla_cupy.runtime.build import BuildRequest, compile_kernel

GHZ = 2.0
#: Stands for a kernel: what counts are its lines.
TEXT = b"""MLA_DEVICE void run_load_role(Block& block) {
    mbarrier_wait(s.kv_empty[stage].left, ring.empty_parity(stage));
    wgmma_wait_group<0>();
}
    mla_toy(const Params p) {
    __syncthreads();
"""


def recorded(waits: dict[tuple[int, int], list[tuple[int, int, int]]], shape: tuple[int, int] = (2, 3)) -> Recorded:
    """Waits (end, cycles, line) by block and warp; every warp with waits begins at 1,000 ns and clock 2^32 - 100.

    It ends 10 cycles after its last wait.
    """
    room = 4
    counts = np.zeros(shape, "u4")
    records = np.zeros((*shape, room), RECORD)
    moments = np.zeros((*shape, 2), MOMENT)
    for place, each in waits.items():
        counts[place] = len(each)
        last = max(end for end, *_ in each) + 10
        moments[place] = [(1000 + 10 * place[0], 2**32 - 100, 7), (1020, (2**32 - 100 + last) % 2**32, 7)]
        for index, (end, cycles, line) in enumerate(each[:room]):
            clocks = ((2**32 - 100 + end) % 2**32, (2**32 - 100 + end - cycles) % 2**32)
            records[place][index] = (*clocks, number("toy/a.cu", line), 0)
    return Recorded("mla_toy", "plain", {"toy/a.cu": TEXT}, 0, counts, records, moments)


def test_places_have_their_calls() -> None:
    found = sites({"toy/a.cu": TEXT})
    assert str(found[number("toy/a.cu", 2)]) == "mbarrier_wait(s.kv_empty[stage].left) (a.cu:2)"
    assert found[number("toy/a.cu", 3)].text == "wgmma_wait_group<0>()"
    assert found[number("toy/a.cu", 3)].function == "run_load_role"
    assert found[number("toy/a.cu", 6)].function == "mla_toy"


def test_no_two_places_of_the_package_have_one_number() -> None:
    names = {name for spec in KERNELS.values() for name in sources.gather(spec.source)}
    texts = {name: sources.gather(name)[name] for name in names}
    assert len(sites(texts)) == sum(len(text.decode().splitlines()) for text in texts.values())


def test_clocks_wrap() -> None:
    assert unwrapped(np.array([2**32 - 1, 4, 4, 2], "u4"), 2**32 - 6).tolist() == [5, 10, 10, 10 + 2**32 - 2]
    moments = np.zeros((3, 2), MOMENT)
    moments[0] = [(5000, 2**32 - 1000, 0), (7000, 2500, 0)]
    moments[1] = [(5000, 10, 0), (0, 0, 0)]  # not launched
    moments[2] = [(5000, 10, 0), (5032, 10_000, 0)]  # too close
    assert clock_rate(moments) == 1.75
    assert clock_rate(moments[1:]) is None


def test_waits_lie_on_one_axis() -> None:
    trace = trace_of(recorded({(0, 0): [(200, 50, 2)], (1, 0): [(400, 100, 3), (500, 20, 99)]}), GHZ)
    first, second = trace.warps
    assert (first.begin, second.begin) == (0.0, 10.0)
    assert [(w.begin, w.end, w.cycles) for w in first.waits] == [(75.0, 100.0, 50)]
    assert [(w.begin, w.end) for w in second.waits] == [(160.0, 210.0), (250.0, 260.0)]
    assert second.waits[1].site == UNKNOWN
    assert list(report.running(second)) == [(10.0, 160.0), (210.0, 250.0), (260.0, 265.0)]
    assert (first.end, second.end) == (105.0, 265.0)
    assert second.waiting == 60.0


def test_the_last_warp_of_a_block_reads_the_time_for_all() -> None:
    moments = np.zeros((2, 3, 2), MOMENT)
    moments[0, :, 0] = [(1, 2**32 - 120, 7), (1, 2**32 - 90, 7), (50_000, 2**32 - 100, 7)]
    moments[0, :, 1] = [(1, 3900, 7), (1, 5900, 7), (51_000, 1900, 7)]
    assert with_times(moments, GHZ)["nanoseconds"].tolist() == [
        [[49_990, 52_000], [50_005, 53_000], [50_000, 51_000]],
        [[0, 0]] * 3,  # not launched
    ]
    assert clock_rate(moments) == GHZ


def test_warps_without_a_wait_run_and_blocks_that_were_not_launched_do_not() -> None:
    given = recorded({(0, 1): [(200, 50, 2)]})
    given.moments[0, 2] = [(1010, 0, 7), (1020, 20, 7)]
    trace = trace_of(given, GHZ)
    assert [(warp.block, warp.warp, warp.begin, warp.end) for warp in trace.warps] == [
        (0, 1, 0.0, 105.0),
        (0, 2, 10.0, 20.0),
    ]


def test_roles_are_neighbours_that_wait_at_one_place() -> None:
    waits = {(0, 0): [(10, 5, 2), (20, 5, 6)], (0, 1): [(10, 5, 6), (20, 5, 2)], (0, 2): [(10, 5, 3), (30, 5, 6)]}
    trace = trace_of(recorded({**waits, (1, 0): [(50, 5, 6)]}), GHZ)
    assert roles([trace]) == {"warps 0-1": [0, 1], "warp 2": [2]}
    shortened = trace_of(
        recorded({(0, 0): [(10, 5, 2), (20, 15, 6)], (0, 1): [(10, 5, 3), (20, 5, 6)]}), GHZ, min_cycles=10
    )
    assert roles([shortened]) == {"warp 0": [0], "warp 1": [1]}  # what is too short to be shown tells roles apart
    assert [len(warp.waits) for warp in shortened.warps] == [1, 0]
    assert [(w.block, w.warp) for w in trace.of_role([0, 1])] == [(0, 0), (0, 1), (1, 0)]


def test_shares_add_up_and_what_had_no_room_is_counted() -> None:
    given = recorded({(0, 0): [(100 * n, 40, 2 + n % 2) for n in range(1, 7)]})
    trace = trace_of(given, GHZ)
    assert trace.dropped == 2
    assert [warp.end for warp in trace.warps] == [200.0]  # nobody knows what it waited for after that
    rows = report.rows([trace])
    assert sum(row["share"] for row in rows) == pytest.approx(1.0)
    assert [row["waits_per_warp"] for row in rows] == [0, 2, 2]
    assert rows[1]["time_per_wait"] == pytest.approx(0.020)  # us
    assert len(report.rows([trace], most=1)) == 2


def test_a_chrome_trace_has_a_bar_for_each_wait(tmp_path: Path) -> None:
    trace = trace_of(recorded({(0, 0): [(200, 50, 2)], (1, 2): [(300, 10, 3)]}), GHZ)
    report.write_chrome_trace(tmp_path / "t.json", [trace])
    events = json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    bars = [event for event in events if event.get("cat") == "wait"]
    assert [(bar["name"], bar["dur"]) for bar in bars] == [
        ("mbarrier_wait(s.kv_empty[stage].left) (a.cu:2)", 0.025),
        ("wgmma_wait_group<0>() (a.cu:3)", 0.005),
    ]
    assert bars[0]["args"] == {
        "file": "toy/a.cu",
        "line": 2,
        "function": "run_load_role",
        "cycles": 50,
    }


def test_a_drawing_names_the_blocks_that_there_are(tmp_path: Path) -> None:
    trace = trace_of(recorded({(1, 0): [(200, 50, 2)]}), GHZ)
    report.draw(tmp_path / "t.svg", trace, 1, (0.0, 0.2))
    assert "kv_empty" in (tmp_path / "t.svg").read_text()
    with pytest.raises(BenchError, match=r"block 0 of toy: got no record, expected one of \[1\]"):
        report.draw(tmp_path / "t.svg", trace, 0, None)


def test_plain_builds_know_nothing_of_it() -> None:
    spec = KERNELS["decode_sm90_seesaw"]
    request = spec.request(spec.variants[0], "sm_90a")
    assert request.files() == sources.gather(request.source)
    assert PRELUDE not in {name for each in KERNELS.values() for name in sources.gather(each.source)}
    assert cache.image_key(traced(request)) != cache.image_key(request)
    assert traced(request).name == f"{request.name}-trace-waits"


def test_every_entry_opens_once() -> None:
    for spec in KERNELS.values():
        request = traced(spec.request(spec.variants[0], "sm_90a"))
        plain, opened = sources.gather(spec.source)[spec.source], request.files()[spec.source]
        (line,) = (line for line in opened.decode().splitlines() if OPENING in line)
        assert line.endswith(f"{{ {OPENING}"), spec.name
        assert opened.replace(f" {OPENING}".encode(), b"") == plain, spec.name
    with pytest.raises(KernelCompileError, match="places where mla_decode_sm90_seesaw opens: got 0, expected 1"):
        dataclasses.replace(request, entry="mla_decode_sm90_seesaw").files()


def test_structs_are_those_of_the_header() -> None:
    """A pointer has 8 bytes, everything else in them 4, in the order of the header."""
    header = sources.gather(PRELUDE)[PRELUDE].decode()
    sizes = {"u32": 4, "u64": 8}
    for name, layout in {"WaitRecord": RECORD, "Moment": MOMENT, "TraceTarget": TARGET}.items():
        body = header.partition(f"struct {name} {{")[2].partition("};")[0]
        members = [line.partition("//")[0].split() for line in body.splitlines() if ";" in line]
        expected = [(words[-1].rstrip(";"), 8 if "*" in words[0] else sizes[words[0]]) for words in members]
        assert [(n, layout.fields[n][0].itemsize) for n in layout.names] == expected, name
    assert f"kNoSlot = {NO_SLOT:#x};" in header


def request_of(name: str) -> BuildRequest:
    spec = KERNELS[name]
    return traced(spec.request(spec.variants[0], "sm_90a"))


def test_parts_share_all_places_that_the_kernel_comes_to() -> None:
    request = request_of("merge_states")
    every = {number for number, _ in places(request)}
    texts = [str(site) for _, site in places(request)]
    assert any(text.startswith("griddepcontrol_wait()") for text in texts)
    assert not any("wgmma" in text for text in texts)  # of headers that come with the prelude
    (lean,) = Choice().easier()
    halves = lean.easier()
    assert lean == Choice(lean=True)
    for parts in (halves, [*halves[0].easier()[0].easier(), halves[1]], [Choice("", part, 3) for part in range(3)]):
        listed = [listed_in(part.of(request)) for part in parts]
        assert sum(map(len, listed)) == len(every)
        assert set().union(*listed) == every
    assert [part.name for part in Choice("", 1, 2, lean=True).easier()] == ["2 of 4", "4 of 4"]
    assert Choice().of(request) == request


def listed_in(request: BuildRequest) -> set[int]:
    numbers = dict(request.defines)[ONLY]
    return {int(number.removesuffix("u")) for number in numbers.split(",") if number}


def test_waits_elsewhere_are_as_without_a_trace() -> None:
    """A wait that is chosen reads the clock twice; what reads it where a warp begins and ends is there in any case."""
    clocks = {}
    for pattern in ("no such place", "griddepcontrol"):
        request = Choice(pattern).of(request_of("merge_states"))
        assert (
            [site.text for _, site in places(request)] == []
            if pattern == "no such place"
            else ["griddepcontrol_wait()"]
        )
        clocks[pattern] = loader.obtain(request.as_virtual()).ptx.count(b"%clock;")
    assert clocks["griddepcontrol"] == clocks["no such place"] + 2


def simulated(tmp_path: Path, *options: str) -> tuple[int, dict[str, Any]]:
    path = tmp_path / "trace.json"
    case = ["trace", "decode", "b1-sq1-hq16-skv130", "--simulate", "1"]
    return main([*case, "--json", str(path), *options]), json.loads(path.read_text())


def test_a_simulated_decode(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, found = simulated(tmp_path, "--perfetto", str(tmp_path / "p.json"), "--min-cycles", "0")
    assert status == 0
    assert found["wrong"] == ""
    assert "equal to the oracle's" in capsys.readouterr().out
    kernels = {kernel["kernel"]: kernel["rows"] for kernel in found["kernels"]}
    assert "decode_sm90_small" in kernels
    rows = kernels["decode_sm90_small"]
    for place in ("kv_full", "q_full", "kv_empty", "wgmma_wait_group<0>()", "griddepcontrol_wait()"):
        assert any(place in row["site"] for row in rows), place
    assert all("unknown" not in row["site"] for each in kernels.values() for row in each)
    assert all(row["unit"] == BASIC_BLOCK.name and row["share"] >= 0 for each in kernels.values() for row in each)
    bars = [e for e in json.loads((tmp_path / "p.json").read_text())["traceEvents"] if e["ph"] == "X"]
    assert all(bar["dur"] >= 0 for bar in bars)


def test_what_has_no_room_is_counted_and_written_nowhere(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The simulator refuses stores behind an array; the waits that there is no room for are those that are missing."""
    waits = {}
    for capacity in (1024, 3):
        path = tmp_path / f"{capacity}.json"
        assert simulated(tmp_path, "--min-cycles", "0", "--perfetto", str(path), "--capacity", str(capacity))[0] == 0
        bars = [bar for bar in json.loads(path.read_text())["traceEvents"] if bar.get("cat") == "wait"]
        waits[capacity] = len(bars)
    lost = re.findall(r"(\d+) records had no room", capsys.readouterr().out)
    assert waits[1024] - waits[3] == sum(map(int, lost)) > 0


@pytest.mark.slow
def test_parts_find_what_one_trace_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One run, three runs and two of the lean form agree on how often each warp waits at each place; shares add up to
    1.
    """
    found = {}
    for parts in ("1", "3", "2"):
        if parts == "2":
            monkeypatch.setattr("bench.trace.command.Choice", functools.partial(Choice, lean=True))
        status, tables = simulated(tmp_path, "--min-cycles", "0", "--parts", parts)
        assert status == 0
        kernels = {kernel["kernel"]: kernel["rows"] for kernel in tables["kernels"]}
        assert len(kernels) == len(tables["kernels"])
        found[parts] = {
            (kernel, row["role"], row["site"]): row["waits_per_warp"]
            for kernel, rows in kernels.items()
            for row in rows
        }
        for rows in kernels.values():
            shares = {row["role"]: 0.0 for row in rows}
            for row in rows:
                shares[row["role"]] += row["share"]
            assert shares == pytest.approx(dict.fromkeys(shares, 1.0))
    assert found["1"] == found["3"] == found["2"]


def test_only_some_places(tmp_path: Path) -> None:
    _, found = simulated(tmp_path, "--only", "wgmma_wait")
    rows = [row for kernel in found["kernels"] for row in kernel["rows"] if row["site"]]
    assert rows
    assert all("wgmma_wait_group" in row["site"] for row in rows)


def test_only_what_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trace", "decode", "b1-sq1-hq16-skv1", "--simulate", "1", "--only", "no_such_role"]) == 2
    assert "--only: got 'no_such_role', which finds no place" in " ".join(capsys.readouterr().err.split())


def test_a_part_that_is_refused_is_halved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Builds that have the first place are refused; in the end it is alone, and everything else is traced."""
    tried: list[str] = []

    def add(found: Traced, choice: Choice, *_: object) -> Traced:
        tried.append(choice.name + " lean" * choice.lean)
        if choice.part == 0:
            raise KernelCompileError(f"mla_toy is refused, its code would be slow:\n{choice}")
        trace = trace_of(recorded({(0, 0): [(200, 50, 2)]}), GHZ)
        return dataclasses.replace(found, traces=[*found.traces, trace])

    monkeypatch.setattr("bench.trace.command._add_part", add)
    status, found = simulated(tmp_path)
    assert status == 0
    halves = [f"1 of {2**n}{lean}" for n in range(1, 7) for lean in ("", " lean")]
    assert tried == ["", " lean", *halves, *(f"{2**n // 2 + 1} of {2**n}" for n in range(6, 0, -1))]
    assert halves[-1] == f"1 of {MAX_PARTS} lean"
    assert found["refused"] == [f"part 1 of {MAX_PARTS}: mla_toy is refused, its code would be slow:"]
    assert f"not traced: part 1 of {MAX_PARTS}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("frame_us", "tried", "kept"),
    [
        # The first half is too dear, and its halves are not; the other one is at the aim.
        (100.0, ["", "1 of 2", "1 of 4", "3 of 4", "2 of 2"], ["1 of 4", "3 of 4", "2 of 2"]),
        # Close to the cost without places: a build with all places is enough.
        (107.5, [""], [""]),
        # The cost without places is unknown: its build is refused.
        (None, ["", "1 of 2", "1 of 4", "3 of 4", "2 of 2"], ["1 of 4", "3 of 4", "2 of 2"]),
    ],
)
def test_parts_are_halved_while_that_makes_them_cheaper(
    frame_us: float | None, tried: list[str], kept: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    times = {"": 108.0, "1 of 2": 105.0, "1 of 4": 102.9, "3 of 4": 101.0, "2 of 2": 103.0}
    seen: list[str] = []

    def add(found: Traced, choice: Choice, *_: object) -> Traced | None:
        seen.append(choice.name)
        if command._costs_too_much(times[choice.name], found, choice):
            return None
        trace = trace_of(recorded({(0, 0): [(200, 50, 2)]}), GHZ)
        return dataclasses.replace(
            found, traces=[*found.traces, trace], traced_us=found.traced_us | {choice.name: times[choice.name]}
        )

    monkeypatch.setattr(command, "_add_part", add)
    monkeypatch.setattr(command, "_frame_us", lambda *_: frame_us)
    monkeypatch.setattr(command, "_time", lambda *_: 100.0)
    subject: Any = types.SimpleNamespace(timed=True, prepare=lambda: None, device=None)
    found = command._trace(subject, cast(Any, None), [Choice()], auto=True)
    assert seen == tried
    assert list(found.traced_us) == kept
    assert len(found.traces) == len(kept)
    assert found.frame_us == frame_us


def test_a_part_that_stays_dear_is_kept_in_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sixteen parts are the most, whatever they cost; without auto none is made smaller. Only what is kept is read."""
    monkeypatch.setattr(command, "_frame_us", lambda *_: 100.0)
    read: list[str] = []
    monkeypatch.setattr(command, "_time", lambda prepared, _: prepared.us)
    plain = types.SimpleNamespace(us=100.0, figures={}, calls=[lambda: None])
    traced = types.SimpleNamespace(us=110.0, figures={}, calls=[lambda: None])
    calls = itertools.cycle([plain, *[traced] * (2 * MAX_AUTO_PARTS - 1)])

    class Recorder:
        def recorded(self) -> list[Recorded]:
            read.append("once")
            return [recorded({(0, 0): [(200, 50, 2)]})]

    device = types.SimpleNamespace(synchronize=lambda: None)
    subject: Any = types.SimpleNamespace(timed=True, prepare=lambda: next(calls), device=device, judge=lambda _: "")
    tracer: Any = types.SimpleNamespace(recording=lambda _: Recorder(), ghz=GHZ, min_cycles=0)
    monkeypatch.setattr(command, "_tracing", lambda _: contextlib.nullcontext())
    for auto, parts in ((True, MAX_AUTO_PARTS), (False, 1)):
        read.clear()
        found = command._trace(subject, tracer, [Choice()], auto)
        assert len(found.traced_us) == len(found.traces) == len(read) == parts


def test_parts_auto_in_the_simulator_is_one_run(tmp_path: Path) -> None:
    """Its time is not a GPU's."""
    status, found = simulated(tmp_path, "--parts", "auto", "--only", "wgmma_wait")
    assert status == 0
    assert found["frame_us"] is None
    assert found["refused"] == []
    with pytest.raises(SystemExit):
        main(["trace", "decode", "b1-sq1-hq16-skv130", "--simulate", "1", "--parts", "0"])


def test_too_many_records() -> None:
    assert main(["trace", "decode", "b1-sq1-hq16-skv130", "--simulate", "1", "--capacity", str(NO_SLOT)]) == 2


@pytest.mark.slow
def test_traced_builds_do_not_spill() -> None:
    """The time of math roles is what a trace is to measure; these kernels do not spill in any role."""
    for name in (
        "decode_sm90_seesaw",
        "decode_sm90_fp8",
        "dense_sm90",
        "dense_sm90_fp8",
        "sparse_forward_sm90",
        "sparse_backward_sm90",
    ):
        spec = KERNELS[name]
        request = traced(spec.request(spec.variants[0], "sm_90a"))
        try:
            build = compile_kernel(request)
        except KernelCompileError:
            build = compile_kernel(Choice(lean=True).of(request))
        assert build.info["spill_stores"] == 0, name


@pytest.mark.slow
@pytest.mark.parametrize("choice", [Choice(), Choice(NOWHERE)], ids=["all-places", "no-place"])
def test_the_kernel_without_a_register_to_spare_is_not_refused(choice: Choice) -> None:
    """All places in one run, and what `--parts auto` compares with: the frame leaves registers for both."""
    spec = KERNELS["dense_sm90_fp8"]
    request = traced(spec.request(spec.variants[0], "sm_90a"))
    assert compile_kernel(choice.of(request)).info["spill_stores"] == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("operation", "case"),
    [
        ("sparse-forward", "sq2-skv100-hq8-topk32"),
        ("sparse-backward", "sq2-skv100-hq128-topk70"),
        ("sparse-decode", "b1-sq1-hq16-topk64"),
        ("dense-decode-fp8", "b1-sq1-hq16-skv130-fp8-math"),
        ("prefill", "b1-sq70-skv70-hq1"),
        ("prefill", "b1-sq300-skv300-hq1-fp8"),
        ("sparse-forward-fp8", "sq2-skv320-hq64-topk200-fp8-math"),
        ("prefill-backward", "b1-sq70-skv70-hq1"),
        ("indexer-logits", "sq8-skv130-h8"),
        ("indexer-loss", "b1-s40-h8x64-i4x32"),
    ],
)
def test_other_operations_simulated(operation: str, case: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Every family's kernels take the header before them, and compute what they do without it."""
    assert main(["trace", operation, case, "--simulate", "1"]) == 0
    assert "equal to the oracle's" in capsys.readouterr().out


def test_wrong_names(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trace", "decode", "b1", "--simulate", "1"]) == 2
    assert "expected b<N>-sq<N>" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["trace", "decode", "b1-sq1-hq16-skv130", "--window", "3,3"])
    assert "FROM below TO" in capsys.readouterr().err


@pytest.mark.gpu
def test_a_decode_on_a_gpu(tmp_path: Path, gpu: object) -> None:
    path = tmp_path / "trace.json"
    assert main(["trace", "decode", "b64-sq1-hq128-skv4096", "--json", str(path)]) == 0
    found = json.loads(path.read_text())
    assert found["traced_us"] < 1.2 * found["plain_us"]
    rows = [row for kernel in found["kernels"] for row in kernel["rows"] if kernel["kernel"].startswith("decode")]
    assert rows
    assert all(0.2 < kernel["clock_ghz"] < 4 for kernel in found["kernels"])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            ("--draw", "x.svg", "--kernel-name", "decode_sm90_seesaw"),
            "--kernel-name: got 'decode_sm90_seesaw', expected",
        ),
        (("--draw", "x.svg", "--block", "99"), "--block: got 99, expected 0 to "),
        (("--kernel-name", "decode_sm90_small"), "add --draw FILE.svg"),
        (("--draw", "x.doc"), "expected a name that ends in .svg, .png, .pdf"),
        (("--json", "nowhere/x.json"), "expected a file in a directory that exists"),
        (("--only", "no_such_role"), "finds no place"),
    ],
)
def test_options_are_checked_before_the_work(
    options: tuple[str, ...], message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command, "_trace", lambda *given: pytest.fail("the work has begun"))
    assert main(["trace", "decode", "b1-sq1-hq16-skv130", "--simulate", "1", *options]) == 2
    assert message in capsys.readouterr().err


def test_matplotlib_is_looked_for_before_the_work(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command, "_trace", lambda *given: pytest.fail("the work has begun"))
    monkeypatch.setattr(command.importlib.util, "find_spec", lambda name: None)
    assert main(["trace", "decode", "b1-sq1-hq16-skv130", "--simulate", "1", "--draw", "x.svg"]) == 2
    assert "pip install matplotlib" in capsys.readouterr().err


def test_without_a_gpu_the_simulator_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command, "gpu_count", lambda: 0)
    assert main(["trace", "decode", "b1-sq1-hq16-skv130"]) == 2
    assert "add --simulate 2" in capsys.readouterr().err


def test_help_and_guide_name_a_kernel_that_runs(tmp_path: Path) -> None:
    """Help and guide name a kernel of the one case that they simulate."""
    guide = (Path(__file__).resolve().parents[2] / "docs" / "guides" / "tracing.md").read_text()
    lines = [line.split() for text in (guide, command.EPILOG) for line in text.splitlines() if "--kernel-name" in line]
    assert len(lines) == 2
    for words in lines:
        operation, case, *options = words[words.index("decode") :]
        options[options.index("--draw") + 1] = str(tmp_path / "x.svg")
        parser = argparse.ArgumentParser()
        command.add_arguments(parser)
        args = parser.parse_args([operation, case, *options])
        implementation = command.OPERATIONS[operation].implementations(command.Choices(None, None))[command.OWN]()
        (chosen,) = command.OPERATIONS[operation].select([case], "targets")
        with command._device(args) as (device, tracer):
            subject = command.Subject(command.OPERATIONS[operation], chosen, implementation, args.dtype, device)
            command._check_names(args, subject, tracer)


def test_a_role_that_only_waits_runs_for_no_time() -> None:
    """And not for a negative one that rounding leaves."""
    row = report._running("warp 0", -4.314e-16, 1000.0, BASIC_BLOCK)
    assert command._cells(row)[2:4] == ("0.0%", "0")
    assert command._cells({**row, "share": -0.0004})[2] == "0.0%"


def test_every_wait_has_a_colour_of_its_own(tmp_path: Path) -> None:
    waits = {(0, 0): [(100 * n, 50, 2) for n in range(1, 5)]}
    trace = trace_of(recorded(waits), GHZ)
    (warp,) = trace.warps
    many = tuple(warp.waits[0]._replace(site=dataclasses.replace(warp.waits[0].site, line=line)) for line in range(30))
    report.draw(tmp_path / "t.svg", dataclasses.replace(trace, warps=(dataclasses.replace(warp, waits=many),)), 0, None)
    fills = set(re.findall(r"fill: (#[0-9a-f]{6})", (tmp_path / "t.svg").read_text()))
    assert len(fills - {"#ffffff", "#000000"}) == 31
