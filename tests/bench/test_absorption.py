"""The benchmark of attention in both forms, on the NumPy device; the whole forms with tensors on the CPU."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from bench.core.errors import BenchError
from bench.core.recorders import Eager
from bench.operations import ABSORPTION
from bench.ops.absorption.cases import CASES

SMALL = ABSORPTION.parse("sq3-skv70-hq2")


def test_names_round_trip():
    assert ABSORPTION.select([], "targets") == CASES
    for case in CASES:
        assert ABSORPTION.parse(case.name) is case


@pytest.mark.parametrize("name", ["", "sq3-skv2-hq2", "sq0-skv2-hq2", "b1-sq3-skv70-hq2"])
def test_a_bad_name_is_refused(name):
    with pytest.raises(BenchError, match="case"):
        ABSORPTION.parse(name)


def test_costs():
    """Three queries that see 68, 69 and 70 keys."""
    pairs = 207
    assert SMALL.cost.flops == 2 * pairs * 2 * 1088
    assert SMALL.absorbed.flops == SMALL.cost.flops + 2 * (3 * 2) * (128 * 512 + 512 * 128)
    assert SMALL.unabsorbed.flops == 2 * pairs * 2 * 320 + 2 * 70 * 512 * 2 * 256
    assert SMALL.shape()["unabsorbed_flops"] == SMALL.unabsorbed.flops


def test_equal_flops_at_171_queries():
    """Over a long context: what kv_b_proj takes for each key, against what absorbing adds to each pair."""
    case = ABSORPTION.parse("sq171-skv1000000-hq16")
    assert case.absorbed.flops == pytest.approx(case.unabsorbed.flops, rel=3e-3)


def test_attention_alone(rows_of):
    (row,) = rows_of(ABSORPTION, SMALL.name, []).values()
    assert (row["status"], row["reason"]) == ("ok", "")


@pytest.mark.parametrize("name", ["absorbed", "unabsorbed"])
def test_whole_forms(name, device, numpy_backend, monkeypatch):
    """Both have the same result, which a wrong one would not pass for."""
    pytest.importorskip("torch")
    monkeypatch.setattr("bench.peers.torch_absorption.recorder_for", lambda torch, device: Eager())
    inputs = ABSORPTION.inputs(SMALL, "float16", 0, device)
    expected = ABSORPTION.expect(SMALL, "float16", inputs, device)
    form = ABSORPTION.implementations(None)[name]()
    prepared = form.prepare(SMALL, "float16", [inputs], device)
    with np.errstate(invalid="ignore"):
        assert not ABSORPTION.judge(expected, prepared.outputs(0), "float16", device).ok, "nothing has run"
    prepared.calls[0]()
    verdict = ABSORPTION.judge(expected, prepared.outputs(0), "float16", device)
    assert verdict.ok, verdict.reason
    wrong = [replace(one, out=one.out + 0.02) for one in expected]
    assert not ABSORPTION.judge(wrong, prepared.outputs(0), "float16", device).ok
    assert list(prepared.figures)[1 if name == "absorbed" else 2] == "attention"
