"""The mma.sync kernels that read FP8 records, in the simulator, from the PTX of the GPUs that they are for."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import mla_cupy
from mla_cupy import dtypes, reference
from mla_cupy.cache_formats import FORMATS
from tests.decode import test_records as dense
from tests.decode.test_records import fp8, v4, v32
from tests.sparse_decode import runs as sparse
from tests.sparse_decode.runs import SparseDecodeCase
from tests.support.cases import DecodeCase, make
from tests.support.flat import mla_decode
from tests.support.mutants import CAUGHT, Mutant, Plant, as_verdict, steps
from tests.support.sim_driver import simulated
from tests.support.tolerance import check

#: With two tiles of keys on the oldest GPU, which has no conversion of e4m3; with one on GPUs of less shared memory.
DENSE = (("decode_mma_records_163kb", (8, 0)), ("decode_mma_records", (8, 9)), ("decode_mma_records", (12, 0)))
SPARSE = (("sparse_decode_mma_163kb", (8, 0)), ("sparse_decode_mma", (12, 0)), ("sparse_decode_mma", (8, 6)))
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
)


@pytest.mark.one_in(8)
@pytest.mark.parametrize("case", LISTS, ids=str)
def test_sparse_decode(case: SparseDecodeCase) -> None:
    number = LISTS.index(case)
    sparse_decode(case, SPARSE[number % len(SPARSE)], MODES[number % len(MODES)])


#: V4.1's, of which the second list may have two kinds: each in one mode on one GPU.
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
    """Of either record, each number beside different scales: a list of one token has its value."""
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

RECORDS, CODES, DECODE = "attention/mma/records.cuh", "attention/mma/codes.cuh", "decode/mma_records.cu"
SOFTMAX, SCALED = "attention/mma/softmax.cuh", "attention/mma/scaled_rows.cuh"
TWO_TILES, ONE_TILE = DENSE[0], DENSE[1]
#: More steps than are on their way, an absent page, a token that only the second query sees.
CASE = v32(b=1, seqlens=150, s_q=2, h_q=3, page_size=32, missing_pages=1, scales="plain")
UNSCALED = fp8(b=1, seqlens=150, s_q=2, h_q=3, page_size=32, missing_pages=1, kv_scale=1.0)
CONVERTED = v4(b=1, seqlens=150, s_q=2, h_q=3, page_size=32, missing_pages=1)
#: More than are looked up at once.
LONG = v32(b=1, seqlens=270, h_q=1)
PLANTED = [
    # Codes that become numbers in registers
    (ONE_TILE, CASE, Mutant("first codes not waited for", DECODE, *steps("mbarrier.test_wait", 0, of=2))),
    (ONE_TILE, CASE, Mutant("codes not waited for", DECODE, *steps("mbarrier.test_wait", 1, of=2))),
    (ONE_TILE, CASE, Mutant("scores of codes not awaited", DECODE, *steps("bar.sync", 3, of=6))),
    (ONE_TILE, CASE, Mutant("P of codes not awaited", DECODE, *steps("bar.sync", 4, of=6))),
    (TWO_TILES, CASE, Mutant("nothing is NaN", RECORDS, "nan = size + 0x00800080 & 0x40004000", "nan = 0")),
    (TWO_TILES, CASE, Mutant("codes of the first half", RECORDS, ": 0x3424);", ": 0x1404);")),
    (
        ONE_TILE,
        CASE,
        Mutant("codes overwritten", CODES, "(step > 0) & (math.loader.asked < steps)", "math.loader.asked < steps"),
    ),
    (
        ONE_TILE,
        CASE,
        Mutant("scales taken for RoPE", CODES, "Token::kLatentChunks ? Raw::kGap : 0", "1 << 20 ? Raw::kGap : 0"),
    ),
    (
        ONE_TILE,
        CASE,
        Mutant("one scale for all groups", CODES, "s.scales[slot][token][quarter]", "s.scales[slot][token][0]"),
    ),
    (
        ONE_TILE,
        CASE,
        Mutant("values have the first scale", CODES, "s.rests[slot][warp / 2]", "s.rests[slot][0]"),
    ),
    (ONE_TILE, CASE, Mutant("power of a neighbour", SCALED, "w1 * powers[i + 1]", "w1 * powers[i]")),
    (
        ONE_TILE,
        CASE,
        Mutant("largest of one quarter", RECORDS, "quarter < kQuarters; ++quarter", "quarter < 1; ++quarter"),
    ),
    (ONE_TILE, CASE, Mutant("absent codes are there", CODES, "(lanes >> (i * kTokenLanes) & 1) << i", "1 << i")),
    (ONE_TILE, CASE, Mutant("hidden codes not cleaned", CODES, "if (masked) clean_codes", "if (false) clean_codes")),
    (ONE_TILE, CASE, Mutant("columns not parted", CODES, "__byte_perm(codes[i], 0, 0x3120)", "codes[i]")),
    (
        ONE_TILE,
        CASE,
        Mutant(
            "values of the next step",
            CODES,
            "slot = math.last_slot();\n    mbarrier",
            "slot = math.slot;\n    mbarrier",
        ),
    ),
    (ONE_TILE, CASE, Mutant("codes of the other half", CODES, "(at.keys ^ number % 2 * 64)", "at.keys")),
    (ONE_TILE, CASE, Mutant("values of the other half", CODES, "(at.values ^ part * 32)", "at.values")),
    (ONE_TILE, CASE, Mutant("rows not scaled back", CODES, "scale_log2 * row_factor(s, math.row.row())", "scale_log2")),
    (ONE_TILE, CASE, Mutant("no copies of scales", CODES, "copies.due & (copies.k == 0)", "false")),
    (
        ONE_TILE,
        UNSCALED,
        Mutant(
            "maximum never follows",
            SOFTMAX,
            "any_sync(kFullWarp, is_far_above(largest, max))",
            "any_sync(kFullWarp, is_far_above(largest, max, 1e30f))",
        ),
    ),
    (
        ONE_TILE,
        UNSCALED,
        Mutant("maximum of a thread", SOFTMAX, "move_max(max_over_lanes(largest))", "move_max(largest)"),
    ),
    (
        ONE_TILE,
        LONG,
        Mutant("next tokens not looked up", CODES, "if (at == kPlaceSteps / 2) place", "if (false) place"),
    ),
    (
        ONE_TILE,
        LONG,
        Mutant("a lane's token for eight steps", CODES, "source = asked % kPlaceSteps * kLaneTokens +", "source ="),
    ),
    # Codes that are converted to keys
    (
        TWO_TILES,
        CONVERTED,
        Mutant("raw step not waited for", RECORDS, "wait_group<kRawSteps - 1>", "wait_group<kRawSteps>"),
    ),
    (
        TWO_TILES,
        CONVERTED,
        Mutant("tile overwritten", RECORDS, "steps, math.warp), tile ^ 1)", "steps, math.warp), tile)"),
    ),
    (ONE_TILE, CONVERTED, Mutant("values overwritten", DECODE, *steps("bar.sync", 5, of=8))),
    (ONE_TILE, CONVERTED, Mutant("next keys not awaited", DECODE, *steps("bar.sync", 6, of=8))),
    (ONE_TILE, CONVERTED, Mutant("scale of the first group", RECORDS, "word >> 8 * (group % 4) & 0xff", "word & 0xff")),
    (
        ONE_TILE,
        CONVERTED,
        Mutant("absent tokens are there", RECORDS, "(lanes >> (i * kTokenLanes) & 1) << i", "1 << i"),
    ),
    (
        ONE_TILE,
        CONVERTED,
        Mutant("hidden values not cleaned", RECORDS, "if (masked) clean_values", "if (false) clean_values"),
    ),
]


@as_verdict
def verdict(gpu: Gpu, case: DecodeCase, mode: tuple[str, int]) -> None:
    """What a run shows; empty if nothing."""
    if case is LONG:
        decode(case, gpu, mode)
        return
    inputs = make(case)
    inputs.q[0, 0, 1, 200] = 1e6  # in the second quarter of d, and beyond float16
    form, hidden = FORMATS[case.record], case.lengths()[0] - 1
    codes = reference.cache.field_view(inputs.kv_cache[:, :, 0], form, form.field("latent"))
    codes[inputs.block_table[0, hidden // case.page_size], hidden % case.page_size, 5] = (
        0x7F  # NaN, for the second query
    )
    with simulated(1, gpu[1], *mode):
        got = mla_decode(*inputs.arguments, kernel=gpu[0])
    assert np.isnan(got[0][0, 1].astype(np.float32)).all()
    first = [(out[:, :1], lse[..., :1]) for out, lse in (got, inputs.exact, inputs.rounded)]
    check(*first, case.dtype)


@pytest.mark.parametrize(
    ("gpu", "case", "mutant"),
    PLANTED,
    ids=lambda x: x.id if isinstance(x, Mutant) else x[0] if isinstance(x, tuple) else "",
)
def test_is_caught(gpu: Gpu, case: DecodeCase, mutant: Mutant, plant: Plant) -> None:
    plant(mutant)
    assert any(verdict(gpu, case, mode) for mode in MODES[:2]), f"nothing shows that {mutant.name}"


@pytest.mark.one_in(4)
@pytest.mark.parametrize(
    ("gpu", "case"),
    [(TWO_TILES, CASE), (ONE_TILE, UNSCALED), (ONE_TILE, CONVERTED), (TWO_TILES, CONVERTED), (ONE_TILE, LONG)],
    ids=lambda x: x[0] if isinstance(x, tuple) else x.id,
)
def test_kernels_as_they_are(gpu: Gpu, case: DecodeCase) -> None:
    assert [verdict(gpu, case, mode) for mode in MODES[:2]] == ["", ""]


#: Of V4.1's records, on the case of both kinds: more steps than are on their way, tokens that are none.
MIXED = SparseDecodeCase(record="v41", topk=38, extra=70, h_q=2, b=1, sm_count=1, extra_record="v41-fp4")
PLANTED_IN_V41 = [
    Mutant("all are e4m3", RECORDS, "this->compact = step.compact[warp][token];", "this->compact = false;"),
    Mutant("kinds of the first token", RECORDS, "= step.compact[warp][token];", "= step.compact[warp][0];"),
    Mutant("codes of a neighbour", RECORDS, "(from + chunk * kPieceCodes /", "(from + (chunk ^ 1) * kPieceCodes /"),
    Mutant("scales of four lanes", RECORDS, "stored[chunk / (compact ? 2 : 4)]", "stored[chunk / 4]"),
    Mutant("scales of two lanes", RECORDS, "stored[chunk / (compact ? 2 : 4)]", "stored[chunk / 2]"),
    Mutant("half of the compact scales", RECORDS, "if (k < (compact ? 2 : 1))", "if (k < 1)"),
    Mutant("scales of the usual record", RECORDS, "this->compact ? cvt_f32_x2_e4m3(code).x : ", ""),
    Mutant("scales of other pieces", RECORDS, "(piece < 4 ? scales.x : scales.y)", "(piece < 4 ? scales.y : scales.x)"),
    Mutant("a quarter of the bytes", RECORDS, "kCompactChunks = kChunks / 2;", "kCompactChunks = kChunks / 4;"),
    Mutant("RoPE without scales", RECORDS, "(kScaledRope ? kRopeChunks : 0)) * kRecordChunk", "0) * kRecordChunk"),
]  # fmt: skip


@pytest.mark.parametrize(
    "mutant",
    [*PLANTED_IN_V41[:2], *(pytest.param(mutant, marks=pytest.mark.slow) for mutant in PLANTED_IN_V41[2:])],
    ids=lambda mutant: mutant.id,
)
def test_bugs_in_reading_v41_show(mutant: Mutant, plant: Plant) -> None:
    plant(mutant)
    with pytest.raises(CAUGHT):
        sparse_decode(MIXED, SPARSE[1], MODES[0])


def test_the_case_of_the_bugs_as_it_is() -> None:
    sparse_decode(MIXED, SPARSE[1], MODES[0])
