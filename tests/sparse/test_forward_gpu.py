"""The sparse forward on a GPU against the oracle, on hostile inputs: poisoned, ragged, non-contiguous."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from mla_cupy.runtime.device import DeviceInfo
from tests.support.sparse_cases import SparseCase, make
from tests.support.sparse_gpu import ALL_KERNELS, check_forward, forward, need, run_and_check

pytestmark = pytest.mark.gpu

DTYPES = ("bfloat16", "float16")
SEQUENCES = ((5, 400), (0, 30), (3, 2), (1, 0), (9, 700), (1, 1))

HEADS = [
    SparseCase(h_q=h_q, dtype=DTYPES[h_q % 2], d_qk=(576, 512)[h_q % 3 == 0], topk=150, sink=h_q % 4 == 0)
    for h_q in (1, 2, 5, 8, 16, 24, 32, 33, 48, 64, 65, 96, 128, 192)
]
TOPK = [
    SparseCase(topk=topk, h_q=h_q, s_kv=700, dtype=DTYPES[topk % 2], lengths=topk % 3 == 0)
    for topk in (0, 1, 2, 63, 64, 65, 127, 128, 129, 192, 256, 257, 500, 1024, 1500)
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
    SparseCase(s_q=1, s_kv=20_000, h_q=128, topk=9000, invalid=0.01),  # one query, over the whole GPU
    SparseCase(s_q=2, s_kv=20_000, h_q=16, topk=4000, sink=True),
    SparseCase(s_q=600, s_kv=900, h_q=16, topk=70, lengths=True),  # more queries than parts
    SparseCase(s_q=600, s_kv=900, h_q=128, topk=64),
    SparseCase(s_q=40, s_kv=60_000, h_q=64, topk=700, sink=True),  # kv is walked in order
    SparseCase(s_q=40, s_kv=60_000, h_q=16, topk=700, d_qk=512, lengths=True),
    SparseCase(s_q=4, s_kv=3, h_q=16, topk=300, invalid=0.0),  # each row a hundred times
    SparseCase(s_q=1, s_kv=1, h_q=1, topk=1, invalid=0.0),
    SparseCase(s_kv=0),
]
LAYOUTS = [
    SparseCase(strides="dense", h_q=64),
    SparseCase(head_axis=True, h_q=64),
    SparseCase(head_axis=True, strides="dense", lengths=True, sequences=((3, 100), (4, 200))),
    SparseCase(invalid=1.0, h_q=64, sink=True),
    SparseCase(invalid=0.9, h_q=128, topk=300),
]


@pytest.mark.parametrize("case", [*HEADS, *TOPK, *MASKS, *RAGGED, *SIZES, *LAYOUTS], ids=lambda case: case.id)
@pytest.mark.parametrize("kernel", ALL_KERNELS)
def test_matches_oracle(gpu: DeviceInfo, case: SparseCase, kernel: str) -> None:
    need(kernel, gpu, case)
    run_and_check(make(case), kernel=kernel)


@pytest.mark.parametrize(
    "case",
    [
        SparseCase(strides="odd", h_q=16, lengths=True, sink=True),
        SparseCase(strides="odd", h_q=128, dtype="float16", d_qk=512, head_axis=True),
        SparseCase(strides="odd", s_q=21, s_kv=1200, h_q=5, sequences=SEQUENCES, causal=True, lengths=True),
    ],
    ids=lambda case: case.id,
)
def test_any_strides(gpu: DeviceInfo, case: SparseCase) -> None:
    """What the fast kernels cannot take falls to the generic one."""
    run_and_check(make(case))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("d_qk", [576, 512])
@pytest.mark.parametrize("h_q", [1, 16, 64, 128])
@pytest.mark.parametrize("kernel", ALL_KERNELS)
def test_tolerance_at_topk_2048(gpu: DeviceInfo, kernel: str, h_q: int, d_qk: int, dtype: str) -> None:
    """DeepSeek's number of rows."""
    case = SparseCase(s_q=24, s_kv=16_000, h_q=h_q, topk=2048, d_qk=d_qk, dtype=dtype, invalid=0.02)
    need(kernel, gpu, case)
    for seed in range(2):
        run_and_check(make(replace(case, seed=seed)), kernel=kernel)


def test_the_rule_has_teeth(gpu: DeviceInfo) -> None:
    """One row of 2048 left out, the heaviest of a query, is more than the rule allows."""
    inputs = make(SparseCase(s_q=8, s_kv=16_000, h_q=64, topk=2048, invalid=0.0))
    keys = inputs.kv[inputs.rows[0]].astype(np.float32)
    scores = inputs.q[0].astype(np.float32) @ keys.T
    heaviest = inputs.rows[0][np.argmax(scores.max(axis=0))]
    without = replace(inputs, indices=inputs.indices.copy())
    without.indices[0, inputs.indices[0] == heaviest] = -1
    with pytest.raises(AssertionError, match="allowed"):
        check_forward(forward(without), inputs.exact, inputs.rounded, inputs.case.dtype)
