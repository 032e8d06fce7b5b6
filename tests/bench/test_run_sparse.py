"""The flow of sparse cases on the NumPy device: what is checked, what is timed, what the rows say."""

from __future__ import annotations

import json
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

import mla_cupy
from bench.core import report
from bench.core.implementation import NotAvailable
from bench.core.runner import Options, run_case
from bench.core.samples import judge
from bench.operations import SPARSE_BACKWARD, SPARSE_FORWARD
from bench.ops.sparse import SparseOutputs, choose_indices
from bench.ops.sparse_backward import SparseBackwardCase
from bench.ops.sparse_forward import SparseForwardCase
from mla_cupy import reference

FORWARD = SparseForwardCase(s_q=20, s_kv=30, h_q=3, topk=8)
BACKWARD = SparseBackwardCase(s_q=20, s_kv=30, h_q=3, topk=8)
KV_ROWS = [0, 15, 28, 29]  # those that are looked at: the last is selected by one query or none


@pytest.fixture
def run(device, limits, numpy_backend):
    options = Options("bfloat16", replays=20, check=True, limits=limits, env={"gpu": "host"}, repro="bench")

    def rows_of(case, *implementations):
        operation = SPARSE_FORWARD if case.op == "sparse_mla_forward" else SPARSE_BACKWARD
        rows = run_case(operation, case, implementations, device, options)
        for row in rows:
            report.validate(row)
            json.dumps(row, allow_nan=False)
        return {row["implementation"]: row for row in rows}

    return rows_of


@pytest.mark.parametrize("indices", ["random", "clustered"])
@pytest.mark.parametrize("case", [FORWARD, BACKWARD], ids=lambda case: case.op)
def test_right_results_are_timed(run, fake, case, indices):
    case = replace(case, indices=indices)
    peer = "cudnn" if case is BACKWARD else "flashmla"
    rows = run(case, fake("mla_cupy", 10.0), fake(peer, 8.0), NotAvailable("tilelang", "no wheel has it"))
    row = rows["mla_cupy"]
    assert row["status"] == "ok"
    assert row["op"] == case.op
    assert row["shape"]["indices"] == indices
    assert row["timing"]["us_median"] == pytest.approx(10.0)
    assert row["speed_vs_best_peer"] == pytest.approx(0.8)
    assert row["l2_bytes"] == case.cost.l2_bytes
    assert row["l2_tbps"] == pytest.approx(case.cost.l2_bytes / 10.0 / 1e6)
    assert row["workspace_bytes"] == 5000
    assert row["check"]["samples"].values()
    tilelang = rows["tilelang"]
    assert (tilelang["status"], tilelang["reason"]) == ("unsupported", "not available: no wheel has it")


def test_our_own_other_ways_are_no_peers(run, fake):
    rows = run(BACKWARD, fake("mla_cupy", 10.0), fake("deterministic", 20.0))
    assert rows["deterministic"]["status"] == "ok"
    assert rows["mla_cupy"]["speed_vs_best_peer"] is None
    assert rows["mla_cupy"]["speed_vs"] == {"deterministic": pytest.approx(2.0)}


def _add(output, *place):
    def spoil(calls, result):
        getattr(result, output)[place] += 0.5

    return spoil


def _nan_outside_the_sample(calls, result):
    array = result.out if hasattr(result, "out") else result.dkv
    array[1] = np.nan


@pytest.mark.parametrize(
    ("case", "spoil", "reason"),
    [
        (FORWARD, _add("out", 19, 2, 511), "out[19]"),
        (FORWARD, _add("lse", 0, 0), "lse[0]"),
        (FORWARD, _add("max_logits", 5, 1), "max_logits[5]"),
        (FORWARD, _nan_outside_the_sample, "1536 values of out"),
        (BACKWARD, _add("dq", 10, 1, 575), "dq[10]"),
        (BACKWARD, _add("dkv", 29, 575), "dkv[29]"),
        (BACKWARD, _nan_outside_the_sample, "576 values of dkv"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_wrong_result_is_said_and_not_timed(run, fake, case, spoil, reason):
    rows = run(case, fake("mla_cupy", 1.0, spoil=spoil), fake("cudnn", 8.0))
    assert rows["mla_cupy"]["status"] == "wrong"
    assert rows["mla_cupy"]["reason"].startswith(reason)
    assert rows["mla_cupy"]["timing"] is None
    assert rows["cudnn"]["status"] == "ok"


def test_a_nan_in_the_sample_can_be_written_down(run, fake):
    def spoil(calls, result):
        result.out[0, 0, 0] = np.nan

    row = run(FORWARD, fake("mla_cupy", 1.0, spoil=spoil))["mla_cupy"]
    assert row["status"] == "wrong"
    assert row["check"]["errors"]["out"] is None


@pytest.mark.parametrize("output", ["dq", "dkv"])
def test_what_a_replay_never_writes_is_caught(run, fake, output):
    """Every gradient is poisoned before the replays, and the second set of inputs is another array."""

    def spoil(calls, result):
        if calls > 2:
            getattr(result, output)[...] = np.nan

    row = run(BACKWARD, fake("mla_cupy", 1.0, spoil=spoil))["mla_cupy"]
    assert row["status"] == "wrong"


def test_a_wrong_forward_spoils_the_backward(run, fake, monkeypatch):
    def zeros(q, kv, indices, *, scale):
        return np.zeros((20, 3, 512), q.dtype), np.zeros((20, 3), np.float32), None

    monkeypatch.setattr(mla_cupy, "sparse_mla_forward", zeros)
    row = run(BACKWARD, fake("mla_cupy", 1.0))["mla_cupy"]
    assert row["status"] == "error"
    assert "the forward that gives the backward its out and lse is wrong" in row["reason"]


@pytest.mark.parametrize("chunk", [1, 7, 256])
def test_a_row_alone_has_the_gradient_that_it_has_among_all(device, numpy_backend, monkeypatch, chunk):
    monkeypatch.setattr("bench.ops.sparse_backward.CHUNK", chunk)
    inputs = SPARSE_BACKWARD.inputs(BACKWARD, "bfloat16", 0, device)
    arrays = inputs.q, inputs.kv, inputs.out, inputs.dout, inputs.lse, inputs.indices
    dq, dkv, _ = reference.sparse_mla_backward(*arrays, scale=BACKWARD.scale)
    samples = SPARSE_BACKWARD.expect(BACKWARD, "bfloat16", inputs, device)
    assert [sample.row for sample in samples if sample.output == "dkv"] == KV_ROWS
    for sample in samples:
        whole = {"dq": dq, "dkv": dkv}[sample.output][sample.row]
        np.testing.assert_allclose(sample.want, whole, rtol=1e-12, atol=1e-12)
        assert sample.tolerance < 0.05 * np.abs(whole).max() or not whole.any()


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_gradient_that_cancels_has_the_tolerance_of_its_terms(device, numpy_backend, dtype):
    """Query 0 sees one key: P is 1, dP equals delta, and dq is what rounding leaves of their difference."""
    case = SparseBackwardCase(s_q=24, s_kv=24, h_q=2, topk=16, indices="clustered")
    inputs = SPARSE_BACKWARD.inputs(case, dtype, 0, device)
    expected = SPARSE_BACKWARD.expect(case, dtype, inputs, device)
    arrays = inputs.q, inputs.kv, inputs.out, inputs.dout, inputs.lse, inputs.indices
    dq, dkv, _ = reference.sparse_mla_backward(*arrays, scale=case.scale)
    assert np.abs(dq[0]).max() < 1e-12

    # dP as float32 in another order, what tensor cores cut off with it
    key, d_out = inputs.kv[inputs.host_indices[0].max()].astype(np.float32), inputs.dout[0].astype(np.float32)
    d_weights = np.cumsum(d_out * key[:512], axis=-1, dtype=np.float32)[:, -1]
    delta = (inputs.out[0].astype(np.float64) * d_out).sum(axis=-1)
    dq[0] = case.scale * (d_weights - delta)[:, None] * key
    assert np.abs(dq[0]).max() > 1e-7

    def judged():
        got = SimpleNamespace(dq=dq.astype(inputs.q.dtype), dkv=dkv.astype(inputs.kv.dtype))
        return SPARSE_BACKWARD.judge(expected, got, dtype, device)

    assert judged().ok, judged().reason
    dq[0] += 1e-3 * np.abs(dq[-1]).max()  # a thousandth of another gradient, not of this one
    assert judged().reason.startswith("dq[0]")


def test_a_row_that_nobody_selects_has_no_tolerance(device, numpy_backend, monkeypatch):
    def without_row_15(case, seed):
        chosen = choose_indices(case, seed)
        return np.where(chosen == 15, np.int32(-1), chosen)

    monkeypatch.setattr("bench.ops.sparse.choose_indices", without_row_15)
    inputs = SPARSE_BACKWARD.inputs(BACKWARD, "bfloat16", 0, device)
    samples = SPARSE_BACKWARD.expect(BACKWARD, "bfloat16", inputs, device)
    (nobody,) = (sample for sample in samples if (sample.output, sample.row) == ("dkv", 15))
    assert nobody.tolerance == 0
    assert not nobody.want.any()


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_tolerance_lets_rounding_pass_and_little_more(device, dtype):
    inputs = SPARSE_FORWARD.inputs(FORWARD, dtype, 5, device)
    samples = SPARSE_FORWARD.expect(FORWARD, dtype, inputs, device)
    values = reference.sparse_mla_forward(inputs.q, inputs.kv, inputs.indices, scale=FORWARD.scale)
    out = values[0].astype(inputs.q.dtype)
    assert judge(samples, SparseOutputs(out, values[1], values[2]), dtype, device).ok
    verdict = judge(samples, SparseOutputs(out, None, None), dtype, device)
    assert verdict.errors.keys() == {"out"}
    assert verdict.samples == {"out": 5}
    out[19, 0, 0] += 3 * verdict.tolerances["out"]
    assert not judge(samples, SparseOutputs(out, None, None), dtype, device).ok


def test_an_empty_query_is_compared_exactly(device):
    case = SparseForwardCase(s_q=20, s_kv=10, h_q=2, topk=4)  # the first ten queries see nothing
    inputs = SPARSE_FORWARD.inputs(case, "bfloat16", 0, device)
    samples = SPARSE_FORWARD.expect(case, "bfloat16", inputs, device)
    out, lse, top = reference.sparse_mla_forward(inputs.q, inputs.kv, inputs.indices, scale=case.scale)
    outputs = SparseOutputs(out.astype(inputs.q.dtype), lse, top)
    assert judge(samples, outputs, "bfloat16", device).ok
    lse[0, 0] = 0
    assert "lse[0]" in judge(samples, outputs, "bfloat16", device).reason
