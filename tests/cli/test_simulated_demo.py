"""`mla-cupy demo` without a GPU: the simulator runs decode's own kernels."""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from mla_cupy import demo, reference
from mla_cupy.demo import lanes, simulated
from mla_cupy.errors import KernelCompileError
from mla_cupy.runtime import nvrtc
from mla_cupy.runtime.build import Build
from mla_cupy.runtime.loader import Outcome

REPOSITORY = Path(__file__).resolve().parents[2]


def options(*arguments: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    demo.add_arguments(parser)
    parser.add_argument("--json", action="store_true")
    return parser.parse_args(["--simulate", *arguments])


@pytest.fixture(scope="module")
def decoded() -> simulated.Simulated:
    """One run of the kernels."""
    return simulated.simulate(simulated.make_inputs("bfloat16", 0))


def test_what_runs_is_what_was_compiled(decoded: simulated.Simulated) -> None:
    requested = [request.entry for request in simulated.requests_of("bfloat16")]
    assert sorted(requested) == sorted(decoded.launched)
    assert simulated.ATTENTION in requested


@pytest.fixture
def replayed(decoded: simulated.Simulated, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The demo with the results of that run; holds the results, which a test may spoil, and what was compiled."""
    kept: dict[str, Any] = {"out": decoded.out.copy(), "lse": decoded.lse.copy(), "requests": []}
    info: Any = {"registers": 168, "static_smem": 0, "facts": {"smem_bytes": 231424}, "seconds": 1.5, "stack": 0}
    build = Build(b"", b"", {**info, "spill_stores": 0, "spill_loads": 0})

    def compile_all(requests: Any, jobs: int, *, quiet: bool) -> list[Outcome]:
        kept["requests"] = requests
        return [Outcome(request, build) for request in requests]

    def simulate(inputs: simulated.Inputs) -> simulated.Simulated:
        rest = decoded.launched, decoded.reports, decoded.timelines, decoded.seconds
        return simulated.Simulated(kept["out"], kept["lse"], *rest)

    monkeypatch.setattr(simulated, "compile_all", compile_all)
    monkeypatch.setattr(simulated, "simulate", simulate)
    return kept


def test_everything_is_shown(replayed: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    assert demo.run(options()) == 0
    said = capsys.readouterr().out
    assert "No GPU" in said
    row = next(line.split() for line in said.splitlines() if line.startswith("decode_sm90_seesaw"))
    assert row[:6] == ["decode_sm90_seesaw", "4", "384", "168", "231,424", "0"]
    results = [line.split() for line in said.splitlines() if re.match(r"(out|lse) ", line)]
    assert [row[-1] for row in results] == ["right", "right"]
    assert all(0 < float(error) < float(tolerance) for _, error, tolerance, _ in results)
    for lane in ("left: even tiles", "right: odd tiles", "load", "wgmma in flight"):
        assert lane in said


def test_json(replayed: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    assert demo.run(options("--json")) == 0
    found = json.loads(capsys.readouterr().out)
    assert [kernel["kernel"] for kernel in found["kernels"]] == [
        "attention_schedule",
        "decode_sm90_seesaw",
        "attention_combine",
    ]
    assert [result["right"] for result in found["results"]] == [True, True]


@pytest.mark.parametrize(("result", "sequence"), [("out", 3), ("lse", 1), ("out", 0)])
def test_a_wrong_result_is_said_and_is_the_exit_status(
    replayed: dict[str, Any], capsys: pytest.CaptureFixture[str], result: str, sequence: int
) -> None:
    replayed[result][sequence].flat[7] += np.asarray(0.25, replayed[result].dtype)
    assert demo.run(options()) == 1
    assert len([line for line in capsys.readouterr().out.splitlines() if line.endswith("WRONG")]) == 1


def test_one_key_too_few_is_a_wrong_result(replayed: dict[str, Any]) -> None:
    inputs = simulated.make_inputs("bfloat16", 0)
    fewer = inputs._replace(seqlens=np.maximum(inputs.seqlens - 1, 0))
    replayed["out"], replayed["lse"] = reference.mla_decode(*fewer, scale=simulated.SCALE)
    assert demo.run(options()) == 1


def test_pictures(replayed: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    page, picture = tmp_path / "timeline.html", tmp_path / "timeline.png"
    assert demo.run(options("--html", str(page), "--png", str(picture))) == 0
    assert simulated.ATTENTION in page.read_text()
    assert picture.read_bytes().startswith(b"\x89PNG")
    said = capsys.readouterr().out
    assert str(page) in said
    assert str(picture) in said


def test_without_nvrtc_the_oracle_computes_and_nothing_is_called_simulated(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def missing() -> str:
        raise KernelCompileError("no NVRTC; run pip install something")

    monkeypatch.setenv("MLA_CUPY_BACKEND", "numpy")
    monkeypatch.setattr(nvrtc, "find_nvrtc", missing)
    assert demo.run(options()) == 0
    said = capsys.readouterr().out
    assert "pip install something" in said
    assert "none ran" in said
    assert "right" not in said
    assert demo.run(options("--json")) == 0
    assert json.loads(capsys.readouterr().out)["place"] == "numpy"


def test_a_kernel_that_does_not_compile(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def fail(requests: Any, jobs: int, *, quiet: bool) -> list[Outcome]:
        return [Outcome(request, None, f"{request.name} does not compile") for request in requests]

    monkeypatch.setattr(simulated, "compile_all", fail)
    assert demo.run(options()) == 1
    assert "mla_decode_sm90_seesaw-bfloat16-sm_90a does not compile" in capsys.readouterr().err


def test_roles_are_those_of_the_source() -> None:
    source = (REPOSITORY / "cuda_src" / "decode" / "sm90_seesaw.cu").read_text()
    for lane, role in simulated.ROLES.items():
        first, last = re.findall(r"\d+", lane)
        name, _, task = role.partition(": ")
        row = next(line for line in source.splitlines() if re.match(rf"// {name}\b.* {first}\.\.{last} ", line))
        assert task in row


# -- lanes -----------------------------------------------------------------------------------------------------------


def span(track: str, kind: str, start: int, end: int, block: tuple[int, ...] = (0, 0, 0)) -> Any:
    return SimpleNamespace(block=block, track=track, label="", kind=kind, start=start, end=end)


SPANS = [
    span("warp 0", "run", 100, 120),
    span("warp 5", "run", 120, 135),
    span("warp 0", "wait", 120, 200),
    span("warp 1", "run", 140, 200),
    span("wgmma", "async", 150, 151, ()),
    span("wgmma", "async", 50, 60, ()),
    span("warp 0", "run", 0, 40, (1, 0, 0)),
]


def test_lanes() -> None:
    assert lanes.busiest_block(SPANS) == (0, 0, 0)
    assert lanes.extent(SPANS, (0, 0, 0)) == (100, 200)
    assert lanes.lanes(SPANS, (0, 0, 0), 10) == {
        "warps 0-3": "##  ######",
        "warps 4-7": "  ##      ",
        "wgmma in flight": "     -    ",
    }


def test_a_lane_of_less_than_half_a_column() -> None:
    spans = [span("warp 0", "run", 0, 4), span("warp 4", "run", 4, 100)]
    assert lanes.lanes(spans, (0, 0, 0), 10) == {"warps 0-3": "-         ", "warps 4-7": "##########"}
