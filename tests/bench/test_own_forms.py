"""Checks of single operations that `test_each_operation.py` does not cover, on the NumPy device."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from bench.core.implementation import Choices, make
from bench.core.recorders import Eager
from bench.operations import ABSORPTION, CASCADE, DECODE, DENSE_DECODE_FP8, PREFILL, SPARSE_FORWARD_FP8
from bench.ops.prefill import NAMED
from mla_cupy import reference
from tests.bench.small import DECODE as DENSE
from tests.bench.small import SMALL, SPARSE

SHORT = ABSORPTION.parse("sq3-skv70-hq2")
SHARED = SMALL["cascade"][0]


# ---- Absorption ------------------------------------------------------------------------------------------------------


def test_costs_of_both_forms():
    assert SHORT.absorbed.flops == SHORT.cost.flops + 2 * (3 * 2) * (128 * 512 + 512 * 128)
    assert SHORT.unabsorbed.flops == 2 * 207 * 2 * 320 + 2 * 70 * 512 * 2 * 256
    assert SHORT.shape()["unabsorbed_flops"] == SHORT.unabsorbed.flops


def test_equal_flops_at_171_queries():
    """Over a long context: what kv_b_proj takes for each key, against what absorbing adds to each pair."""
    case = ABSORPTION.parse("sq171-skv1000000-hq16")
    assert case.absorbed.flops == pytest.approx(case.unabsorbed.flops, rel=3e-3)


@pytest.mark.parametrize("name", ["absorbed", "unabsorbed"])
def test_whole_forms(name, device, numpy_backend, monkeypatch):
    """Both have the same result, which a wrong one would not pass for."""
    pytest.importorskip("torch")
    monkeypatch.setattr("bench.peers.torch_absorption.recorder_for", lambda torch, device: Eager())
    inputs = ABSORPTION.inputs(SHORT, "float16", 0, device)
    expected = ABSORPTION.expect(SHORT, "float16", inputs, device)
    form = ABSORPTION.implementations(Choices())[name]()
    prepared = form.prepare(SHORT, "float16", [inputs], device)
    with np.errstate(invalid="ignore"):
        assert not ABSORPTION.judge(expected, prepared.outputs(0), "float16", device).ok, "nothing has run"
    prepared.calls[0]()
    verdict = ABSORPTION.judge(expected, prepared.outputs(0), "float16", device)
    assert verdict.ok, verdict.reason
    wrong = [replace(one, whole=replace(one.whole, want=one.whole.want + 0.02)) for one in expected]
    assert not ABSORPTION.judge(wrong, prepared.outputs(0), "float16", device).ok
    assert list(prepared.figures)[1 if name == "absorbed" else 2] == "attention"


# ---- A shared prefix -------------------------------------------------------------------------------------------------


def test_tables_begin_alike(device):
    table = CASCADE.inputs(CASCADE.parse(SHARED), "bfloat16", 0, device).host_table
    assert sorted(np.unique(table)) == [0, 1, 2]
    assert table[0, 0] == table[1, 0]
    assert table[0, 1] != table[1, 1]


def test_the_prefix_once_and_plain(rows_of):
    rows = list(rows_of(CASCADE, SHARED, ["always", "plain"]).values())
    assert [(row["status"], row["reason"]) for row in rows] == [("ok", "")] * 3
    assert [row["kernel"] for row in rows[:2]] == ["plain", "the prefix once"]


# ---- FP8 -------------------------------------------------------------------------------------------------------------


def test_codes_have_half_the_bytes(device):
    coded = PREFILL.parse("b2-sq3-skv5-hq2-fp8")
    half, others = replace(coded, fp8=False).cost, 2 * 3 * 2 * (2 * coded.d_v + 4)
    assert coded.cost.flops == half.flops
    assert 2 * (coded.cost.nbytes - others) == half.nbytes - others
    inputs = PREFILL.inputs(coded, "bfloat16", 1, device)
    assert inputs.q.dtype == inputs.kv.dtype == inputs.k_rope.dtype == np.uint8
    own, named = make([NAMED[0]], PREFILL.implementations(Choices()))
    assert own.unsupported(coded, "bfloat16") is None
    assert named.unsupported(coded, "bfloat16") == "e4m3 codes"


def test_records_are_what_the_sparse_forward_reads():
    cases = SPARSE_FORWARD_FP8.suites["targets"]
    assert cases[0].cost.l2_bytes == 4096 * 2048 * 656
    assert [case.cost.l2_bytes for case in cases[-3:]] == [4096 * 2048 * 584, *[4096 * 2048 * 576] * 2]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize(
    ("operation", "name"),
    [
        *((DENSE_DECODE_FP8, f"{DENSE}{record}") for record in ("", "-fp8")),
        *((SPARSE_FORWARD_FP8, f"{SPARSE}{width}") for width in ("", "-dqk512")),
    ],
    ids=lambda x: getattr(x, "name", x),
)
def test_rows_are_the_numbers_of_the_records(device, numpy_backend, operation, name, dtype):
    case = operation.parse(name)
    inputs = operation.inputs(case, dtype, 1, device)
    dense = operation is DENSE_DECODE_FP8
    rows = inputs.kv_cache if dense else inputs.kv
    slots = np.arange(case.num_pages * case.page_size if dense else case.s_kv)
    record = {"kv_format": case.record.name} if dense else {}
    exact = reference.cache_gather(inputs.records, slots, **record)[0].reshape(rows.shape)
    assert rows.dtype == inputs.q.dtype
    if dtype == "bfloat16" or dense:
        np.testing.assert_array_equal(rows[..., :512].astype(np.float32), exact[..., :512])
    np.testing.assert_allclose(rows[..., 512:].astype(np.float32), exact[..., 512:], rtol=1e-3)
    assert np.abs(exact).max() > 2


@pytest.mark.parametrize(
    ("operation", "name", "peers"),
    [
        (DENSE_DECODE_FP8, DENSE, ["rows"]),
        (DENSE_DECODE_FP8, f"{DENSE}-fp8", ["rows"]),
        (SPARSE_FORWARD_FP8, SPARSE, ["rows", "gathered"]),
        (SPARSE_FORWARD_FP8, f"{SPARSE}-dqk512", ["rows", "gathered"]),
        (SPARSE_FORWARD_FP8, f"{SPARSE}-fp8-math", ["rows"]),  # queries are numbers of e4m3
    ],
    ids=lambda x: getattr(x, "name", None),
)
def test_ours_and_ours_over_rows(rows_of, operation, name, peers):
    rows = rows_of(operation, name, peers)
    assert [(row["status"], row["reason"]) for row in rows.values()] == [("ok", "")] * len(rows)
    assert list(rows) == ["mla_cupy", *peers]


@pytest.mark.slow
def test_forms_that_change_no_result(rows_of):
    """A sink of -inf, and results that are turned back by an angle of 0."""
    records = rows_of(DENSE_DECODE_FP8, "b2-sq1-hq3-skv20-page16", ["attn_sink"])
    assert records["attn_sink"]["check"]["out_max"] == records["mla_cupy"]["check"]["out_max"]
    rows = rows_of(DECODE, "b2-sq1-hq3-skv20-page16-dqk512", ["out_rope"])
    assert rows["out_rope"]["check"]["out_max"] == rows["mla_cupy"]["check"]["out_max"]
    row = rows_of(DECODE, "b2-sq1-hq3-skv20-page16", ["out_rope"])["out_rope"]
    assert (row["status"], "keys of 512" in row["reason"]) == ("unsupported", True)
