"""The benchmark of a layer, on the NumPy device."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from bench.core.implementation import Choices, make
from bench.operations import LAYER
from bench.ops.layer import launches, ratios
from bench.ops.layer_cases import MODELS, LayerCase


def test_every_model_has_a_case():
    assert {case.model_name for case in LAYER.suites["targets"]} == set(MODELS)
    assert LayerCase("v3", 16, 2, 100).scale == pytest.approx(192**-0.5)


def test_an_indexer_selects(device, numpy_backend, monkeypatch):
    """Fewer tokens than a model selects, in the oracle's time."""
    monkeypatch.setitem(MODELS, "v32", MODELS["v32"].__class__("v32", index_heads=2, topk=16))
    case = LayerCase("v32", 2, 1, 40)
    inputs = LAYER.inputs(case, "bfloat16", 0, device)
    prepared = make([], LAYER.implementations(Choices()))[0].prepare(case, "bfloat16", [inputs], device)
    prepared.calls[0]()
    assert LAYER.judge([], prepared.outputs(0), "bfloat16", device).ok
    assert list(prepared.figures) == ["prepare and absorb", "index q and k", "select", "attention and W_UV"]


def test_without_rope_one_step_precedes_attention(device, numpy_backend):
    case = LAYER.parse("k3-hq2-b1-skv5")
    inputs = LAYER.inputs(case, "float16", 0, device)
    prepared = make([], LAYER.implementations(Choices()))[0].prepare(case, "float16", [inputs], device)
    assert list(prepared.figures) == ["prepare and absorb", "attention and W_UV"]


def test_launches_are_counted_where_there_is_a_stream(device, monkeypatch):
    assert launches(lambda: None, device) == 0
    made = []

    def get_nodes(graph, nodes, count):
        made.append(graph.value)
        count._obj.value = 3
        return 0

    monkeypatch.setattr("ctypes.CDLL", lambda name: SimpleNamespace(cuGraphGetNodes=get_nodes))
    stream = SimpleNamespace(begin_capture=lambda: None, end_capture=lambda: SimpleNamespace(graph=5))
    calls = []
    assert launches(lambda: calls.append(1), SimpleNamespace(stream=stream, synchronize=lambda: None)) == 3
    assert (made, calls) == ([5], [1, 1])


def test_ratios():
    def row(name, us, count, case="v3-hq16-b64-skv4096"):
        return {
            "implementation": name,
            "status": "ok",
            "case": case,
            "timing": {"us_median": us},
            "includes": f"{count} launches: all of them",
        }

    rows = [row("mla_cupy", 30.0, 4), row("separate", 50.0, 6)]
    time, count = ratios(rows)
    assert (time.value, time.aim) == (pytest.approx(0.6), 0.75)
    assert (count.value, count.aim) == (pytest.approx(4 / 6), None)
    assert ratios(rows[:1]) == []
    assert [one.aim for one in ratios([{**one, "case": "v32-hq16-b1-skv64"} for one in rows])] == [None, 2 / 3]
    assert np.isfinite(time.value)
