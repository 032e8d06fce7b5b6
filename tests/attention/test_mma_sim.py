"""The mma.sync kernels in the simulator, from the PTX of the GPUs that they are for, against the oracle."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from tests.attention.runs import GPUS, HARD, SMALL, WIDE, Gpu, decode, sparse_forward
from tests.support.cases import DecodeCase, make
from tests.support.flat import mla_decode
from tests.support.sim_driver import simulated
from tests.support.sparse_cases import SparseCase
from tests.support.sparse_cases import make as make_sparse
from tests.support.tolerance import check

#: Cases of up to 16 and up to 32 rows for the kernels for few rows; all kernels take them.
FEW = [
    DecodeCase(b=2, seqlens=(1, 97), h_q=16, dtype="float16"),  # a single token; a step that ends within an octet
    DecodeCase(b=1, seqlens=130, h_q=20, d_qk=512, page_size=24),  # split between two blocks
    DecodeCase(b=2, seqlens=(66, 35), s_q=4, h_q=16, page_size=3),
]
MANY = [
    DecodeCase(b=1, seqlens=70, h_q=64, dtype="float16"),  # split between two blocks
    DecodeCase(b=2, seqlens=(15, 50), h_q=37, d_qk=512, page_size=1),
    DecodeCase(b=1, seqlens=40, s_q=2, h_q=80, causal=False),  # 80 rows of each KV head: two blocks
]


def _ids(case: DecodeCase | SparseCase) -> str:
    return case.id


@pytest.mark.one_in(4)
@pytest.mark.parametrize(("gpu", "case"), [(SMALL[i % 2], case) for i, case in enumerate(FEW)], ids=str)
def test_few_rows(gpu: Gpu, case: DecodeCase) -> None:
    decode(make(case), gpu)


@pytest.mark.one_in(4)
@pytest.mark.parametrize(("gpu", "case"), [(WIDE[i % 2], case) for i, case in enumerate(MANY)], ids=str)
def test_many_rows(gpu: Gpu, case: DecodeCase) -> None:
    decode(make(case), gpu)


@pytest.mark.one_in(8)
@pytest.mark.parametrize("gpu", GPUS, ids=str)
@pytest.mark.parametrize("mode", [("late", 0), ("random", 5)], ids=str)
def test_hard_case(gpu: Gpu, mode: tuple[str, int]) -> None:
    decode(make(HARD), gpu, mode, sm_count=1)


@pytest.mark.slow
@pytest.mark.parametrize("gpu", GPUS, ids=str)
@pytest.mark.parametrize("case", [*FEW, *MANY, replace(HARD, seqlens=(389, 1, 193), cp_world=3, cp_rank=1)], ids=_ids)
@pytest.mark.parametrize("mode", [("early", 0), ("late", 0), ("random", 1)], ids=str)
def test_all_pairs(gpu: Gpu, case: DecodeCase, mode: tuple[str, int]) -> None:
    decode(make(case), gpu, mode)


@pytest.mark.parametrize("gpu", [SMALL[0], WIDE[1]], ids=str)
def test_what_only_later_queries_see_does_not_reach_earlier_ones(gpu: Gpu) -> None:
    inputs = make(DecodeCase(b=1, seqlens=66, s_q=3, h_q=4))
    hidden = 64  # from the first query only
    inputs.kv_cache[inputs.block_table[0, hidden // 64], hidden % 64, 0, [3, 300]] = np.nan, np.inf
    with simulated(1, gpu[1], "late"):
        got = mla_decode(*inputs.arguments, kernel=gpu[0])
    assert np.isfinite(got[0][:, :1].astype(np.float32)).all()
    check(got, inputs.exact, inputs.rounded, "bfloat16")


@pytest.mark.one_in(2)
@pytest.mark.parametrize("gpu", [SMALL[1], WIDE[0]], ids=str)
def test_tree_masks(gpu: Gpu) -> None:
    inputs = make(DecodeCase(b=2, seqlens=(68, 3), s_q=4, h_q=6))
    mask = np.array([[1, 2, 5, 11], [1, 3, 5, 9]], np.uint64)
    q, kv_cache, block_table, seqlens = inputs.arguments[:4]
    exact = mla_decode(q, kv_cache, block_table, seqlens, tree_mask=mask)  # the oracle: there is no GPU
    with simulated(1, gpu[1], "random", 2):
        got = mla_decode(q, kv_cache, block_table, seqlens, tree_mask=mask, kernel=gpu[0])
    np.testing.assert_allclose(got[0].astype(np.float32), exact[0].astype(np.float32), atol=0.02, rtol=0.02)
    np.testing.assert_allclose(got[1], exact[1], atol=1e-4)


@pytest.mark.one_in(8)
@pytest.mark.parametrize(
    ("gpu", "case"),
    [
        (SMALL[0], SparseCase(s_q=3, h_q=5, topk=70, sequences=((2, 90), (0, 5), (1, 80)), causal=True)),
        (SMALL[1], SparseCase(s_q=3, h_q=20, topk=100, lengths=True, sink=True)),
        (WIDE[0], SparseCase(s_q=2, h_q=64, topk=40, invalid=1.0, sink=True)),  # nothing to attend to
        (WIDE[1], SparseCase(s_q=1, h_q=70, topk=100, d_qk=512, dtype="float16")),
    ],
    ids=str,
)
def test_sparse_forward(gpu: Gpu, case: SparseCase) -> None:
    sparse_forward(make_sparse(case), gpu)
