"""The mma.sync kernels that read FP8 records, in the simulator, from the PTX of the GPUs that they are for."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest

import mla_cupy
from mla_cupy import dtypes, reference
from mla_cupy.cache_formats import FORMATS
from tests.decode import test_records as dense
from tests.decode.test_records import fp8, nope, v4, v32
from tests.sparse_decode import runs as sparse
from tests.sparse_decode.runs import SparseDecodeCase
from tests.support.cases import DecodeCase, make
from tests.support.flat import mla_decode
from tests.support.mutant_suite import mutant_suite
from tests.support.mutants import Mutant
from tests.support.sim_driver import simulated
from tests.support.tolerance import check

#: With two tiles of keys on the oldest GPU, which has no conversion of e4m3; with one on GPUs of less shared memory.
DENSE = (("decode_mma_records", (8, 0)), ("decode_mma_records", (8, 9)), ("decode_mma_records", (12, 0)))
SPARSE = (("sparse_decode_mma", (8, 0)), ("sparse_decode_mma", (12, 0)), ("sparse_decode_mma", (8, 6)))
OLD = ("decode_mma_records", (8, 6))
MODES = (("late", 0), ("random", 5), ("early", 0))

Gpu = tuple[str, tuple[int, int]]


def decode(case: DecodeCase, gpu: Gpu, mode: tuple[str, int], sm_count: int = 1) -> None:
    """Dense decode, against the oracle."""
    inputs = make(case)
    with simulated(sm_count, gpu[1], *mode) as target:
        got = mla_decode(*inputs.arguments, **case.options, kernel=gpu[0])
    assert "mla_decode_mma_records" in target.launched
    check(got, inputs.exact, inputs.rounded, case.dtype)


def sparse_decode(case: SparseDecodeCase, gpu: Gpu, mode: tuple[str, int]) -> None:
    """Sparse decode, against the oracle; results in float32, and some in the dtype of the queries."""
    with simulated(case.sm_count, gpu[1], *mode) as target:
        sparse.check(case, lambda x: x, np.asarray, gpu[0], case.dtype if case.s_q > 1 else "float32")
    assert case.topk + case.extra == 0 or "mla_sparse_decode_mma" in target.launched


FEW = (
    v32(b=1, seqlens=129, h_q=16),  # more steps than are on their way; the last one of a single token
    v32(b=2, seqlens=(3, 70), s_q=3, h_q=11, scales="plain", missing_pages=1, page_size=16),  # two blocks of rows
    v32(b=2, seqlens=(70, 5), h_q=3, dtype="float16", strides="odd", head_axis=False, page_size=24),
    fp8(b=2, seqlens=(3, 70), s_q=3, h_q=4, missing_pages=1, page_size=1, dtype="float16"),
    fp8(b=1, seqlens=66, s_q=2, h_q=12, causal=False),
    v4(b=2, seqlens=(3, 130), s_q=2, h_q=8, missing_pages=1, page_size=16),
    v4(b=3, seqlens=(189, 1, 0), s_q=2, h_q=8, dtype="float16", cp_world=3, cp_rank=1),
    nope(b=2, seqlens=(3, 70), s_q=3, h_q=11, scales="plain", missing_pages=1, page_size=16),
    nope(b=1, seqlens=129, h_q=5, dtype="float16", strides="odd"),
)


@pytest.mark.one_in(8)
@pytest.mark.parametrize("case", FEW, ids=lambda case: case.id)
def test_dense_decode(case: DecodeCase) -> None:
    number = FEW.index(case)
    decode(case, DENSE[number % len(DENSE)], MODES[number % len(MODES)], sm_count=1 + number % 2)


@pytest.mark.slow
@pytest.mark.parametrize("case", [*FEW, *dense.CASES, *dense.WIDE_CASES, *dense.MORE_CASES], ids=lambda case: case.id)
@pytest.mark.parametrize("gpu", [*DENSE, OLD], ids=str)
@pytest.mark.parametrize("mode", MODES, ids=str)
def test_dense_decode_in_all_modes(case: DecodeCase, gpu: Gpu, mode: tuple[str, int]) -> None:
    decode(case, gpu, mode, sm_count=3)


LISTS = (
    SparseDecodeCase(b=1, scales="plain", topk=140, sink=True, h_q=17),
    SparseDecodeCase(record="v4", topk=20, extra=33, lengths=True, sink=True, h_q=9),
    SparseDecodeCase(extra=1, empty=True, sink=True, s_q=2, topk=1),
    SparseDecodeCase(record="v4", dtype="float16", s_q=2, sm_count=1, b=1),
    SparseDecodeCase(topk=70, sm_count=1, b=2, lengths=True, h_q=1),
    SparseDecodeCase(b=1, topk=0),
    *sparse.NOPE_CASES,
)


@pytest.mark.one_in(8)
@pytest.mark.parametrize("case", LISTS, ids=str)
def test_sparse_decode(case: SparseDecodeCase) -> None:
    number = LISTS.index(case)
    sparse_decode(case, SPARSE[number % len(SPARSE)], MODES[number % len(MODES)])


#: V4.1's cases, with two kinds of second lists: each in one mode on one GPU.
V41 = (*sparse.V41_CASES, sparse.V41_WIDE)


@pytest.mark.one_in(8)
@pytest.mark.parametrize("case", sparse.V41_CASES, ids=str)
def test_v41(case: SparseDecodeCase) -> None:
    number = V41.index(case)
    sparse_decode(case, SPARSE[number % len(SPARSE)], MODES[number % len(MODES)])


@pytest.mark.slow
@pytest.mark.parametrize("case", [*LISTS, *V41, *sparse.CASES, *sparse.MORE_CASES], ids=str)
@pytest.mark.parametrize("gpu", SPARSE, ids=str)
@pytest.mark.parametrize("mode", MODES, ids=str)
def test_sparse_decode_in_all_modes(case: SparseDecodeCase, gpu: Gpu, mode: tuple[str, int]) -> None:
    sparse_decode(case, gpu, mode)


def row_of(record: str, latent: Any) -> Any:
    """A cache whose only token holds these e4m3 numbers, and zeros as RoPE columns."""
    form = FORMATS[record]
    cache = np.zeros((1, 16, 1, form.token_bytes), np.uint8)
    rows = np.zeros((1, 512), np.float32)
    reference.cache_append(rows[:, : form.d_latent], rows[:, :64], cache[:, :, 0], np.zeros(1, np.int64))
    reference.cache.field_view(cache[:, :, 0], form, form.field("latent"))[0, 0] = latent[: form.d_latent]
    return cache


@pytest.mark.one_in(4)
@pytest.mark.parametrize(("record", "dtype"), [("fp8", "float16"), ("v4", "bfloat16")])
@pytest.mark.parametrize("gpu", [DENSE[0], DENSE[1]], ids=str)
def test_every_number_is_read_exactly(record: str, dtype: str, gpu: Gpu) -> None:
    """A row that sees one token has its value: all finite e4m3 numbers, in both halves of the row."""
    codes = np.resize(np.setdiff1d(np.arange(256), (0x7F, 0xFF)).astype(np.uint8), 512)
    cache = row_of(record, codes)
    expected = reference.cache_gather(cache[:, :, 0], np.zeros(1, np.int64))[0][0, :512]
    q = np.zeros((1, 1, 2, FORMATS[record].d_qk), dtypes.numpy_dtype(dtype))
    q[0, 0, 1] = 2.0**-6
    table, seqlens = np.zeros((1, 1), np.int32), np.ones(1, np.int32)
    with simulated(1, gpu[1], "late"):
        out, _ = mla_decode(q, cache, table, seqlens, out_dtype="float32", kernel=gpu[0])
    np.testing.assert_array_equal(out[0, 0], np.stack([expected, expected]))


@pytest.mark.parametrize("gpu", [DENSE[0], DENSE[1]], ids=str)
@pytest.mark.parametrize("code", [0x7F, 0xFF])
def test_nan_is_nan(gpu: Gpu, code: int) -> None:
    latent = np.zeros(512, np.uint8)
    latent[70] = code
    q, table, seqlens = np.ones((1, 1, 1, 576), np.float16), np.zeros((1, 1), np.int32), np.ones(1, np.int32)
    with simulated(1, gpu[1], "late"):
        out, lse = mla_decode(q, row_of("fp8", latent), table, seqlens, kernel=gpu[0])
    assert np.isnan(out[..., 70].astype(np.float32)).all()
    assert np.isnan(lse).all()


@pytest.mark.one_in(4)
@pytest.mark.parametrize(("dtype", "gpu"), [("bfloat16", SPARSE[0]), ("float16", SPARSE[1])], ids=str)
def test_every_number_of_v41_is_read_exactly(dtype: str, gpu: Gpu) -> None:
    """Each number of either record, with different neighbouring scales: a list of one token returns its value."""
    usual, compact = FORMATS["v41"], FORMATS["v41-fp4"]
    caches = [np.zeros((1, 16, 1, form.token_bytes), np.uint8) for form in (usual, compact)]
    codes = np.resize(np.setdiff1d(np.arange(256), (0x7F, 0xFF)).astype(np.uint8), 512)
    scales = (120 + np.arange(16) % 8).astype(np.uint8)  # 2^-7 to 1
    caches[0].reshape(-1)[:512], caches[0].reshape(-1)[16 * 512 : 16 * 512 + 16] = codes, scales
    caches[1].reshape(-1)[:256] = np.arange(256)
    caches[1].reshape(-1)[16 * 256 : 16 * 256 + 32] = 0x28 + np.arange(32)  # 2^-2 to 2^2 in steps of 1/8
    values = [np.concatenate(reference.cache_gather(cache[:, :, 0], np.zeros(1, np.int64)), -1) for cache in caches]
    q, first, none = np.zeros((1, 1, 2, 512), dtypes.numpy_dtype(dtype)), np.zeros((1, 1, 1), np.int32), -1
    for number, expected in enumerate(values):
        lists = {"indices": first + (none if number else 0), "extra_indices": first + (0 if number else none)}
        with simulated(1, gpu[1], "late"):
            out, _ = mla_cupy.sparse_mla_decode(
                q, caches[0], **lists, scale=1.0, extra_kv_cache=caches[1], out_dtype="float32", kernel=gpu[0]
            )
        np.testing.assert_array_equal(out[0, 0], np.broadcast_to(expected, (2, 512)))


def test_tree_masks() -> None:
    case = v32(b=2, seqlens=(68, 3), s_q=4, h_q=6)
    inputs, mask = make(case), np.array([[1, 2, 5, 11], [1, 3, 5, 9]], np.uint64)
    exact = mla_decode(*inputs.arguments, tree_mask=mask)  # the oracle: there is no GPU
    with simulated(1, (8, 9), "random", 2):
        got = mla_decode(*inputs.arguments, tree_mask=mask, kernel="decode_mma_records")
    np.testing.assert_allclose(got[0].astype(np.float32), exact[0].astype(np.float32), atol=0.02, rtol=0.02)
    np.testing.assert_allclose(got[1], exact[1], atol=1e-3)


# ---- Planted bugs ----------------------------------------------------------------------------------------------

ONE_TILE = DENSE[1]
#: More steps than are on their way, an absent page, a token that only the second query sees.
CASE = v32(b=1, seqlens=150, s_q=2, h_q=3, page_size=32, missing_pages=1, scales="plain")
#: V4.1 with both kinds of tokens: more steps than are in flight, and invalid slots.
MIXED = SparseDecodeCase(record="v41", topk=38, extra=70, h_q=2, b=1, sm_count=1, extra_record="v41-fp4")


def run_case(gpu: Gpu, mode: tuple[str, int]) -> None:
    """The second query is beyond float16, and NaN, by a token that it alone sees."""
    inputs = make(CASE)
    inputs.q[0, 0, 1, 200] = 1e6  # in the second quarter of d
    form, hidden = FORMATS[CASE.record], CASE.lengths()[0] - 1
    codes = reference.cache.field_view(inputs.kv_cache[:, :, 0], form, form.field("latent"))
    codes[inputs.block_table[0, hidden // CASE.page_size], hidden % CASE.page_size, 5] = 0x7F
    with simulated(1, gpu[1], *mode):
        got = mla_decode(*inputs.arguments, kernel=gpu[0])
    assert np.isnan(got[0][0, 1].astype(np.float32)).all()
    first = [(out[:, :1], lse[..., :1]) for out, lse in (got, inputs.exact, inputs.rounded)]
    check(*first, CASE.dtype)


test_dense_is_caught, test_dense_as_it_is = mutant_suite(
    ONE_TILE[0],
    [partial(run_case, ONE_TILE, mode) for mode in MODES[:2]],
    {
        "bar.sync": (6, [3, 5]),
        "cp.async.mbarrier": (2, [0]),
        "mbarrier.test_wait": (2, [0, 1]),
    },
    [
        Mutant("power of a neighbour", "attention/mma/scaled_rows.cuh", "w1 * powers[i + 1]", "w1 * powers[i]"),
    ],
)
test_sparse_is_caught, test_sparse_as_it_is = mutant_suite(
    SPARSE[1][0],
    [partial(sparse_decode, MIXED, SPARSE[1], MODES[0])],
    {
        "bar.sync": (8, [4, 7]),
        "cp.async.wait_group": (2, [0]),
        "cp.async.commit_group": (3, [0]),
    },
    [
        Mutant(
            "scales of four lanes",
            "attention/mma/records.cuh",
            "stored[chunk / (compact ? 2 : 4)]",
            "stored[chunk / 4]",
        ),
    ],
)
