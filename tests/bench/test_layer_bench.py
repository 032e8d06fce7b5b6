"""The benchmark of a layer, on the NumPy device."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from bench.core.errors import BenchError
from bench.core.implementation import Choices, make
from bench.operations import LAYER
from bench.ops.layer.cases import CASES, MODELS, LayerCase
from bench.ops.layer.operation import ratios
from bench.ops.layer.steps import launches

SMALL = {"v3": "v3-hq2-b2-skv70", "k3": "k3-hq3-b2-skv5"}
SELECTED = {"v4flash": "v4flash-hq2-b1-skv70"}


def test_names_round_trip():
    assert LAYER.select([], "targets") == CASES
    for case in CASES:
        assert LAYER.parse(case.name) is case
    assert {case.model_name for case in CASES} == set(MODELS)


@pytest.mark.parametrize("name", ["", "v3-hq16", "v5-hq16-b1-skv64", "v3-hq0-b1-skv64"])
def test_a_bad_name_is_refused(name):
    with pytest.raises(BenchError, match="case"):
        LAYER.parse(name)


def test_bytes_of_a_dense_layer():
    case = LayerCase("v3", 16, 2, 100)
    weights = 16 * 256 * 512 * 2
    assert case.cost.nbytes == 2 * 100 * 576 * 2 + 2 * 16 * (192 + 128) * 2 + weights
    assert case.cost.flops == 2 * 2 * 16 * (100 * (576 + 512) + 512 * 256)
    assert case.scale == pytest.approx(192**-0.5)


@pytest.mark.parametrize("name", [*SMALL.values(), *SELECTED.values()])
def test_our_own(rows_of, name):
    (row,) = rows_of(LAYER, name).values()
    assert (row["status"], row["reason"]) == ("ok", "")
    assert row["figures_us"]


def test_an_indexer_selects(device, numpy_backend, monkeypatch):
    """Fewer tokens than a model selects, in the oracle's time."""
    monkeypatch.setitem(MODELS, "v32", MODELS["v32"].__class__("v32", index_heads=2, topk=16))
    case = LayerCase("v32", 2, 1, 40)
    inputs = LAYER.inputs(case, "bfloat16", 0, device)
    prepared = make([], LAYER.implementations(Choices()))[0].prepare(case, "bfloat16", [inputs], device)
    prepared.calls[0]()
    assert LAYER.judge([], prepared.outputs(0), "bfloat16", device).ok
    assert list(prepared.figures) == ["prepare and absorb", "index q and k", "select", "attention and W_UV"]


@pytest.mark.parametrize("name", SMALL.values())
def test_a_wrong_element_is_found(device, numpy_backend, name):
    case = LAYER.parse(name)
    inputs = LAYER.inputs(case, "bfloat16", 0, device)
    prepared = make([], LAYER.implementations(Choices()))[0].prepare(case, "bfloat16", [inputs], device)
    prepared.calls[0]()
    samples = LAYER.expect(case, "bfloat16", inputs, device)
    outputs = prepared.outputs(0)
    assert LAYER.judge(samples, outputs, "bfloat16", device).ok
    outputs.out[-1, 0, -1, 5] += 1
    assert not LAYER.judge(samples, outputs, "bfloat16", device).ok


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
