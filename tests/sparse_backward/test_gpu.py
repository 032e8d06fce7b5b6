"""The sparse backward on a GPU against the oracle, on hostile inputs: poisoned, ragged, non-contiguous."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import mla_cupy
from mla_cupy import reference
from mla_cupy.runtime.device import DeviceInfo
from tests.support.gradients import (
    ALL_KERNELS,
    backward,
    check_gradients,
    need,
    on_host,
    reason_against,
    run_and_check,
    uploaded,
)
from tests.support.sparse_cases import SparseCase, SparseInputs, make

pytestmark = pytest.mark.gpu

DTYPES = ("bfloat16", "float16")
SEQUENCES = ((5, 400), (0, 30), (3, 2), (1, 0), (9, 700), (1, 1))

HEADS = [
    SparseCase(h_q=h_q, dtype=DTYPES[h_q % 2], d_qk=(576, 512)[h_q % 3 == 0], topk=150, sink=h_q % 4 == 0)
    for h_q in (1, 2, 5, 8, 16, 24, 32, 33, 48, 63, 64, 65, 96, 100, 128, 192)
]
TOPK = [
    SparseCase(topk=topk, h_q=h_q, s_kv=700, dtype=DTYPES[topk % 2], lengths=topk % 3 == 0)
    for topk in (0, 1, 2, 63, 64, 65, 127, 128, 129, 192, 256, 257, 500, 1024)
    for h_q in (8, 64)
]
MASKS = [
    SparseCase(s_q=30, h_q=h_q, topk=130, s_kv=s_kv, causal=causal, lengths=lengths, sink=lengths)
    for h_q in (16, 128)
    for s_kv in (20, 400)  # fewer rows than queries, and more
    for causal in (False, True)
    for lengths in (False, True)
]
RAGGED = [
    SparseCase(s_q=21, s_kv=1200, h_q=h_q, topk=200, sequences=SEQUENCES, causal=causal, sink=causal, lengths=causal)
    for h_q in (16, 64, 128)
    for causal in (False, True)
]
SIZES = [
    SparseCase(s_q=1, s_kv=20_000, h_q=128, topk=9000, invalid=0.01),
    SparseCase(s_q=600, s_kv=900, h_q=16, topk=70, lengths=True),  # more queries than blocks
    SparseCase(s_q=600, s_kv=900, h_q=128, topk=64, sink=True),
    SparseCase(s_q=40, s_kv=60_000, h_q=64, topk=700, sink=True),  # kv is walked in order
    SparseCase(s_q=40, s_kv=60_000, h_q=16, topk=700, d_qk=512, lengths=True),
    SparseCase(s_q=4, s_kv=3, h_q=16, topk=300, invalid=0.0),  # each row a hundred times
    SparseCase(s_q=1, s_kv=1, h_q=1, topk=1, invalid=0.0),
    SparseCase(s_kv=0, sink=True),
    SparseCase(s_q=0, sink=True),
]
LAYOUTS = [
    SparseCase(strides="dense", h_q=64),
    SparseCase(head_axis=True, h_q=64),
    SparseCase(head_axis=True, strides="dense", lengths=True, sequences=((3, 100), (4, 200))),
    SparseCase(invalid=1.0, h_q=64, sink=True),
    SparseCase(invalid=0.9, h_q=128, topk=300),
]
ALL = [*HEADS, *TOPK, *MASKS, *RAGGED, *SIZES, *LAYOUTS]


@pytest.mark.parametrize("case", ALL, ids=lambda case: case.id)
@pytest.mark.parametrize("kernel", ALL_KERNELS)
def test_matches_oracle(gpu: DeviceInfo, case: SparseCase, kernel: str) -> None:
    need(kernel, gpu, case)
    run_and_check(make(case), kernel=kernel)


@pytest.mark.parametrize("case", ALL[::3], ids=lambda case: case.id)
@pytest.mark.parametrize("kernel", ALL_KERNELS)
@pytest.mark.parametrize("dkv_dtype", [None, "float32"])
def test_deterministic_matches_oracle(gpu: DeviceInfo, case: SparseCase, kernel: str, dkv_dtype: str | None) -> None:
    need(kernel, gpu, case, deterministic=True)
    run_and_check(make(case), kernel=kernel, deterministic=True, dkv_dtype=dkv_dtype)


@pytest.mark.parametrize(
    "case",
    [
        SparseCase(strides="odd", h_q=16, lengths=True, sink=True),
        SparseCase(strides="odd", h_q=128, dtype="float16", d_qk=512, head_axis=True),
        SparseCase(strides="odd", s_q=21, s_kv=1200, h_q=5, sequences=SEQUENCES, causal=True, lengths=True),
    ],
    ids=lambda case: case.id,
)
@pytest.mark.parametrize("deterministic", [False, True])
def test_any_strides(gpu: DeviceInfo, case: SparseCase, deterministic: bool) -> None:
    """What the fast kernels cannot take falls to the generic one."""
    run_and_check(make(case), deterministic=deterministic)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("d_qk", [576, 512])
@pytest.mark.parametrize("h_q", [1, 16, 64, 128])
@pytest.mark.parametrize("kernel", ALL_KERNELS)
def test_tolerance_at_topk_2048(gpu: DeviceInfo, kernel: str, h_q: int, d_qk: int, dtype: str) -> None:
    """DeepSeek's number of rows; few enough of them in kv that many queries add to each."""
    case = SparseCase(s_q=12, s_kv=4000, h_q=h_q, topk=2048, d_qk=d_qk, dtype=dtype, invalid=0.02, sink=d_qk == 512)
    need(kernel, gpu, case)
    inputs = make(case)
    for dkv_dtype in (None, "float32"):
        run_and_check(inputs, kernel=kernel, dkv_dtype=dkv_dtype)
    if not reason_against(kernel, gpu, case, deterministic=True):
        run_and_check(inputs, kernel=kernel, dkv_dtype="float32", deterministic=True)


@pytest.mark.parametrize("kernel", ALL_KERNELS)
def test_the_forward_s_own_results_go_in(gpu: DeviceInfo, kernel: str) -> None:
    """Not the oracle's: what a training step does."""
    case = SparseCase(s_q=20, h_q=64, topk=200, s_kv=500, sink=True, lengths=True)
    need(kernel, gpu, case)
    inputs = make(case)
    (q, kv, _, dout, _, indices), named = uploaded(inputs)
    out, lse, _ = mla_cupy.sparse_mla_forward(q, kv, indices, **named)
    got = on_host(mla_cupy.sparse_mla_backward(q, kv, out, dout, lse, indices, **named, kernel=kernel))
    host_out, host_lse = on_host((out, lse))
    given = (inputs.q, inputs.kv, host_out, inputs.dout, host_lse, inputs.indices)
    exact, rounded = (
        reference.sparse_mla_backward(*given, **inputs.options, rounding=rounding) for rounding in (None, case.dtype)
    )
    check_gradients(got, remembering(inputs, exact_gradients=exact, rounded_gradients=rounded))


@pytest.mark.parametrize("deterministic", [False, True])
def test_the_rule_has_teeth(gpu: DeviceInfo, deterministic: bool) -> None:
    """One row of 2048 left out, the heaviest of a query, is more than the rule allows; in dq and in dkv."""
    inputs = make(SparseCase(s_q=8, s_kv=16_000, h_q=64, topk=2048, invalid=0.0))
    keys = inputs.kv[inputs.rows[0]].astype(np.float32)
    scores = inputs.q[0].astype(np.float32) @ keys.T
    heaviest = inputs.rows[0][np.argmax(scores.max(axis=0))]
    without = inputs.indices.copy()
    without[0, inputs.indices[0] == heaviest] = -1
    good = backward(inputs, deterministic=deterministic)
    spoiled = remembering(replace(inputs, indices=without), out=inputs.out, lse=inputs.lse)
    bad = backward(spoiled, deterministic=deterministic)
    check_gradients(good, inputs, deterministic=deterministic)
    for mixed in ([bad[0], good[1], None], [good[0], bad[1], None]):
        with pytest.raises(AssertionError, match="allowed"):
            check_gradients(mixed, inputs, deterministic=deterministic)


def remembering(inputs: SparseInputs, **known: Any) -> SparseInputs:
    """The same inputs, but what they would compute when first asked is given."""
    changed = replace(inputs)
    changed.__dict__.update(known)
    return changed
