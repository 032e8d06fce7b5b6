"""`mla-cupy demo`: its GPU half on the NumPy device of the benchmarks, and what it draws."""

from __future__ import annotations

import argparse
import json
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest

from bench.core.limits import Limits
from mla_cupy import demo
from mla_cupy.demo import measured
from mla_cupy.errors import ArgumentError
from mla_cupy.kernels import KERNELS
from mla_cupy.parts import part
from mla_cupy.runtime.loader import Outcome
from mla_cupy.shapes import D_QK, D_V

SMALL = (("decode", "b3-sq1-hq4-skv200-mix1"), ("sparse-forward", "sq4-skv64-hq4-topk16"))


def options(*arguments):
    parser = argparse.ArgumentParser()
    demo.add_arguments(parser)
    parser.add_argument("--json", action="store_true")
    return parser.parse_args(arguments)


@pytest.fixture
def gpu(monkeypatch, device, fake):
    """A GPU whose only implementation is the oracle, which takes 12.5 us; holds what was compiled."""
    bench = partial(part, "bench")
    seen = SimpleNamespace(compiled=[], error="", spoil=None)

    def compile_all(requests, jobs, *, quiet):
        seen.compiled += requests
        return [Outcome(request, None, seen.error) for request in requests]

    device.arch = "sm_90a"
    monkeypatch.setattr(demo.device, "gpu_count", lambda: 1)
    monkeypatch.setattr(measured, "CASES", SMALL)
    monkeypatch.setattr(measured, "compile_all", compile_all)
    monkeypatch.setattr(bench("core.device"), "CudaDevice", lambda: device)
    monkeypatch.setattr(bench("core.limits"), "measure", lambda gpu: Limits(4.0, None, "given", "no cuBLAS"))
    monkeypatch.setattr(bench("core.environment"), "describe", lambda *what: {"gpu": "host", "date": "2026-01-01"})
    monkeypatch.setattr(
        bench("core.implementation"), "make", lambda names, known: [fake("mla_cupy", 12.5, spoil=seen.spoil)]
    )
    monkeypatch.setattr(bench("core.runner"), "LOAD_US", 0.0)
    return seen


def test_core_kernels_are_compiled_those_of_this_gpu_first(gpu):
    assert demo.run(options()) == 0
    core = [spec.request(variant, "sm_90a") for spec in KERNELS.values() for variant in spec.core_on("sm_90a")]
    assert set(gpu.compiled) == set(core)
    special = [bool(KERNELS[request.entry.removeprefix("mla_")].archs) for request in gpu.compiled]
    assert any(special)
    assert special == sorted(special, reverse=True)


def test_cases_are_checked_timed_and_shown_beside_the_roofline(gpu, capsys):
    assert demo.run(options()) == 0
    said = capsys.readouterr().out
    for _, case in SMALL:
        (row,) = (line for line in said.splitlines() if case in line)
        assert "12.5" in row
        assert row.split()[-1] == "ok"
    assert "of roofline" in said
    assert "GEMM unknown" in said
    assert demo.run(options("--json")) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    tokens = rows[0]["bytes"] // 2 - 3 * 4 * (D_QK + D_V)  # elements of the cache
    assert rows[0]["share_roofline"] == pytest.approx(rows[0]["bytes"] / 4e6 / 12.5)
    assert tokens % D_QK == 0


def test_a_wrong_result_is_said_and_not_timed(gpu, capsys):
    def spoil(calls, results):
        results.out[...] = np.nan

    gpu.spoil = spoil
    assert demo.run(options()) == 1
    said = capsys.readouterr().out
    assert "wrong" in said
    assert "12.5" not in said


def test_a_kernel_that_does_not_compile_ends_it(gpu, capsys):
    gpu.error = "seesaw does not compile"
    assert demo.run(options()) == 1
    said = capsys.readouterr()
    assert "seesaw does not compile" in said.err
    assert "12.5" not in said.out


def test_the_roofline_is_drawn(gpu, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    picture = tmp_path / "roofline.png"
    assert demo.run(options("--png", str(picture))) == 0
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert str(picture) in capsys.readouterr().out


def test_a_page_is_the_simulators(gpu):
    with pytest.raises(ArgumentError, match="--simulate"):
        demo.run(options("--html", "timeline.html"))


def test_a_picture_without_matplotlib_is_refused_before_the_work(gpu, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ArgumentError, match="pip install matplotlib"):
        demo.run(options("--png", "roofline.png"))
    assert gpu.compiled == []


@pytest.mark.parametrize(
    ("check", "worst"),
    [
        ({"out_max": 2.0, "out_tolerance": 4.0}, (2.0, 4.0)),
        ({"errors": {"dq": 1.0, "dkv": 3.0}, "tolerances": {"dq": 4.0, "dkv": 4.0}}, (3.0, 4.0)),
    ],
)
def test_the_error_that_is_nearest_to_its_tolerance(check, worst):
    assert measured._worst(check) == worst


def test_an_error_that_is_no_number_is_the_worst():
    check = {"errors": {"dq": None, "dkv": 3.0}, "tolerances": {"dq": 4.0, "dkv": 4.0}}
    assert np.isnan(measured._worst(check)[0])
    assert np.isnan(measured._worst(None)[0])
