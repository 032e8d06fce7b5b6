"""Dense decode straight from FP8 records: the NumPy backend, and the kernels in the simulator and on a GPU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from mla_cupy import ArgumentError, PlanError, ShapeError, UnsupportedDeviceError, reference
from mla_cupy.cache_formats import FORMATS
from mla_cupy.kernels import KERNELS
from tests.support.calls import assert_same, oracle, plan_of
from tests.support.cases import DecodeCase, DecodeInputs, make
from tests.support.flat import mla_decode
from tests.support.gpu import run_and_check
from tests.support.kernels import RECORD_KERNELS, in_both_sizes, takes
from tests.support.mutant_suite import mutant_suite
from tests.support.mutants import Mutant
from tests.support.recorder import Recorder
from tests.support.sim_driver import simulated
from tests.support.sim_modes import MODES
from tests.support.tolerance import check

Array = npt.NDArray[Any]

HOPPER = "decode_sm90_records"
SEESAW = "decode_sm90_records_seesaw"
GENERIC = "decode_generic_records"
SINCE_AMPERE = tuple(kernel for kernel in RECORD_KERNELS if "mma" in kernel)


def v32(**changes: Any) -> DecodeCase:
    return DecodeCase(record="v32", **changes)


def nope(**changes: Any) -> DecodeCase:
    return DecodeCase(record="v32-nope", d_qk=512, **changes)


def v4(**changes: Any) -> DecodeCase:
    return DecodeCase(record="v4", d_qk=512, **changes)


def v41(**changes: Any) -> DecodeCase:
    return DecodeCase(record="v41", d_qk=512, **changes)


def fp8(**changes: Any) -> DecodeCase:
    return DecodeCase(**{"record": "fp8", "kv_scale": 0.03, **changes})


CASES = (
    v32(b=1, seqlens=129, h_q=16),  # an odd number of tiles, the last one with a single token
    v32(b=3, seqlens=(200, 0, 70), h_q=5, dtype="float16", page_size=24),
    v32(b=2, seqlens=(65, 190), s_q=2, h_q=8, page_size=1),  # the causal edge within a tile
    v32(b=2, seqlens=(3, 130), s_q=3, h_q=11, scales="plain", missing_pages=1, page_size=16),  # two blocks of rows
    v32(b=2, seqlens=(100, 31), s_q=2, h_q=3, causal=False, head_axis=False, page_size=128),
    v32(b=3, seqlens=(189, 1, 193), s_q=4, h_q=4, cp_world=3, cp_rank=1),  # a third of the tokens
    fp8(b=1, seqlens=129, h_q=7),
    fp8(b=2, seqlens=(3, 70), s_q=3, h_q=4, missing_pages=1, page_size=16, dtype="float16", kv_scale=1.0),
    fp8(b=1, seqlens=66, s_q=2, h_q=12),
    v4(b=1, seqlens=129, h_q=7),
    v4(b=2, seqlens=(3, 70), s_q=3, h_q=4, missing_pages=1, page_size=16, dtype="float16"),
    v4(b=1, seqlens=66, s_q=2, h_q=12, page_size=24),
    nope(b=2, seqlens=(3, 130), s_q=3, h_q=11, scales="plain", missing_pages=1, page_size=16),
    nope(b=1, seqlens=129, h_q=7, dtype="float16", strides="odd"),
    nope(b=3, seqlens=(189, 1, 193), s_q=4, h_q=4, cp_world=3, cp_rank=1, page_size=1),
)
#: Blocks of 64 rows, each of one query token.
WIDE_CASES = (
    v32(b=1, seqlens=129, h_q=64),  # an odd number of tiles, the last one with a single token
    v32(b=3, seqlens=(200, 0, 70), h_q=40, dtype="float16", page_size=24),
    v32(b=2, seqlens=(65, 190), s_q=2, h_q=64, page_size=1, missing_pages=1),  # the causal edge within a tile
    v32(b=3, seqlens=(389, 1, 193), s_q=2, h_q=64, cp_world=3, cp_rank=1),
    v32(b=2, seqlens=(70, 5), h_q=33, scales="plain", strides="odd", head_axis=False, page_size=128),
    v32(b=2, seqlens=(129, 2), s_q=2, h_q=64, causal=False, dtype="float16"),
    fp8(b=1, seqlens=129, h_q=34),
    fp8(b=2, seqlens=(3, 130), s_q=2, h_q=64, dtype="float16", missing_pages=1, page_size=16, kv_scale=1.0),
    v4(b=2, seqlens=(3, 130), s_q=2, h_q=64, missing_pages=1, page_size=16),
    v4(b=1, seqlens=129, h_q=40, dtype="float16", page_size=24),
    nope(b=2, seqlens=(3, 130), s_q=2, h_q=64, missing_pages=1, page_size=16),
    nope(b=2, seqlens=(129, 70), h_q=33, scales="plain", strides="odd", head_axis=False, dtype="float16"),
)
MORE_WIDE_CASES = (
    v32(b=1, seqlens=400, h_q=128),  # split
    v32(b=5, seqlens=(70, 1, 0, 200, 130), h_q=7),
    v32(b=4, seqlens=(257, 321, 64, 1), h_q=96),
    fp8(b=2, seqlens=(300, 70), h_q=64),
    v4(b=2, seqlens=(300, 70), h_q=65),
    nope(b=4, seqlens=(257, 321, 64, 1), h_q=128),
)
GENERIC_CASES = (
    v32(b=2, seqlens=(3, 70), s_q=2, h_q=5, scales="plain", missing_pages=1, page_size=16),
    v4(b=3, seqlens=(66, 5, 131), s_q=3, h_q=3, missing_pages=1, page_size=16),
    v4(b=1, seqlens=70, h_q=9, dtype="float16", scales="power_of_2"),
    fp8(b=2, seqlens=(3, 70), s_q=2, h_q=2, missing_pages=1, page_size=16),
    nope(b=2, seqlens=(3, 70), s_q=2, h_q=2, missing_pages=1, page_size=16, scales="plain"),
    v41(b=2, seqlens=(3, 70), s_q=2, h_q=2, missing_pages=1, page_size=16, dtype="float16"),
)
MORE_CASES = (
    v32(b=1, seqlens=400, h_q=16),  # split
    v32(b=5, seqlens=(70, 1, 0, 200, 130), h_q=8),
    v32(b=2, seqlens=(300, 70), h_q=32, dtype="float16"),
    v32(b=1, seqlens=66, s_q=5, h_q=20),
    fp8(b=1, seqlens=400, h_q=16),
    fp8(b=2, seqlens=(300, 70), h_q=32, dtype="float16"),
    v4(b=1, seqlens=400, h_q=16),
    v4(b=2, seqlens=(300, 70), h_q=32, dtype="float16"),
    nope(b=2, seqlens=(300, 70), h_q=32, dtype="float16"),
    nope(b=5, seqlens=(70, 1, 0, 200, 130), h_q=16),
)


# ---- The oracle and the NumPy backend --------------------------------------------------------------------------


@pytest.mark.parametrize("case", [CASES[3], CASES[5], CASES[6], CASES[-3], GENERIC_CASES[1]], ids=lambda case: case.id)
def test_the_oracle_attends_to_dequantised_rows(case: DecodeCase) -> None:
    inputs = make(case)
    pages, page_size = inputs.kv_cache.shape[:2]
    slots = np.arange(pages * page_size)
    read = reference.cache_gather(inputs.kv_cache, slots, kv_format=case.record, kv_scale=case.kv_scale)[0]
    rows = read.reshape(pages, page_size, 1, -1)
    options = {**case.options, "kv_scale": 1.0}
    expected = reference.mla_decode(inputs.q, rows, inputs.block_table, inputs.seqlens, **options)
    for got, want in zip(inputs.exact, expected, strict=True):
        np.testing.assert_array_equal(got, want)
        assert not np.isnan(got).any()


@pytest.mark.parametrize("case", [CASES[2], CASES[4], CASES[6], CASES[-1], GENERIC_CASES[1]], ids=lambda case: case.id)
def test_the_numpy_backend_rounds_the_oracle(case: DecodeCase, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLA_CUPY_BACKEND", "numpy")
    inputs = make(case)
    plan = plan_of(inputs, cp_world=case.cp_world, cp_rank=case.cp_rank)
    plan.update(inputs.seqlens)
    for given in (None, plan):
        got = mla_decode(*inputs.arguments, **case.options, plan=given)
        for mine, expected in zip(got, oracle(inputs, **case.options), strict=True):
            assert_same(mine, expected)


# ---- Mistakes --------------------------------------------------------------------------------------------------


def _cache(record: str, heads: int = 1) -> Array:
    return np.zeros((3, 8, heads, FORMATS[record].token_bytes), np.uint8)


@pytest.mark.parametrize(
    ("cache", "d_qk", "error", "match"),
    [
        (
            _cache("v32")[..., :640],
            576,
            ShapeError,
            r"kv_cache.shape\[-1\]: got 640, expected 656 or 584 or 576 or 528 for uint8",
        ),
        (
            _cache("bf16").view(np.float16)[..., :512],
            576,
            ShapeError,
            r"kv_cache.shape\[-1\]: got 512, expected d_qk=576",
        ),
        (
            _cache("bf16")[..., :512],
            512,
            ShapeError,
            r"kv_cache.shape\[-1\]: got 512 of uint8, expected .*656 of uint8",
        ),
        (
            _cache("v32", 2),
            576,
            ShapeError,
            r"kv_cache.shape: got \(3, 8, 2, 656\), expected \(num_pages, page_size, 1, width\) or",
        ),
        (_cache("v32"), 320, ShapeError, r"q.shape\[-1\]: got 320, expected 576 for v32"),
        (_cache("v4"), 576, ShapeError, r"q.shape\[-1\]: got 576, expected 512 for v4"),
        (_cache("fp8"), 512, ShapeError, r"q.shape\[-1\]: got 512, expected 576 for fp8"),
        (np.zeros((3, 8, 1, 664), np.uint8)[..., :656], 576, ShapeError, "multiples of 16 bytes"),
        (np.zeros((3, 8, 1, 536), np.uint8)[..., :528], 512, ShapeError, "528 bytes per token: the pages of v41"),
    ],
    ids=[
        "no width",
        "narrow rows",
        "bytes of rows",
        "heads",
        "d_qk of v4",
        "d_qk of v32",
        "d_qk of fp8",
        "odd strides",
        "planes",
    ],
)
def test_mistakes(cache: Array, d_qk: int, error: type[Exception], match: str, recorder: Recorder) -> None:
    q, table, seqlens = np.ones((1, 1, 2, d_qk), np.float16), np.zeros((1, 2), np.int32), np.ones(1, np.int32)
    with pytest.raises(error, match=match):
        mla_decode(q, cache, table, seqlens)
    assert recorder.launches == []


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"record": "v31"}, "kv_format: got 'v31', expected None, or one of v32, v4, fp8"),
        ({"record": "v4"}, "d_qk: got 576, expected 512 for v4"),
        ({"record": "v32-nope"}, "d_qk: got 576, expected 512 for v32-nope"),
    ],
    ids=str,
)
def test_mistakes_of_plans(changes: dict[str, Any], match: str) -> None:
    with pytest.raises(ArgumentError, match=match):
        plan_of(make(DecodeCase(b=1, seqlens=3)), **changes)


@pytest.mark.parametrize(
    ("cache", "kv_scale", "match"),
    [
        (_cache("v32"), 0.5, r"fp8.kv_scale: got 0.5, expected 1 for the format v32; its tokens hold their own scales"),
        (_cache("bf16").view(np.float16), 0.5, r"kv_scale: got 0.5, expected 1 for 16-bit rows"),
        (_cache("fp8"), 0.0, r"kv_scale: got 0.0, expected a finite number above 0"),
        (_cache("fp8"), 2.0**126, r"scale \* fp8.kv_scale: got .*, expected a finite number above 0"),
    ],
    ids=["v32", "rows", "zero", "huge"],
)
def test_mistakes_of_scales(cache: Array, kv_scale: float, match: str, recorder: Recorder) -> None:
    q, table, seqlens = np.ones((1, 1, 2, 576), np.float16), np.zeros((1, 2), np.int32), np.ones(1, np.int32)
    with pytest.raises(ArgumentError, match=match):
        mla_decode(q, cache, table, seqlens, kv_scale=kv_scale, scale=4.0)
    assert recorder.launches == []


@pytest.mark.parametrize(
    ("cache", "name", "error", "match"),
    [
        (_cache("v32"), "v4", ShapeError, r"kv_cache.shape\[-1\]: got 656 of uint8, expected 584 of uint8 \(v4\)"),
        (_cache("v32"), "v32", ShapeError, r"q.shape\[-1\]: got 512, expected 576 for v32"),
        (
            _cache("v41"),
            "V32_NO_ROPE",
            ArgumentError,
            r"fp8.kv_format: got 'V32_NO_ROPE', expected None, or one of v32",
        ),
        (np.zeros((3, 8, 512), np.float16), "v32-nope", ArgumentError, "fp8.kv_format: got 'v32-nope', expected None"),
    ],
    ids=["width", "d_qk", "name", "rows"],
)
def test_mistakes_of_names(cache: Array, name: str, error: type[Exception], match: str, recorder: Recorder) -> None:
    q, table, seqlens = np.ones((1, 1, 2, 512), np.float16), np.zeros((1, 2), np.int32), np.ones(1, np.int32)
    with pytest.raises(error, match=match):
        mla_decode(q, cache, table, seqlens, kv_format=name)
    assert recorder.launches == []


def test_a_plan_is_for_one_kind_of_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLA_CUPY_BACKEND", "numpy")
    inputs, rows = make(v32(b=1, seqlens=5)), make(DecodeCase(b=1, seqlens=5))
    plan = plan_of(rows)
    plan.update(rows.seqlens)
    with pytest.raises(PlanError, match="kv_format='v32'"):
        mla_decode(*inputs.arguments, plan=plan)


def test_which_kernel(recorder: Recorder) -> None:
    """Records on Hopper's kernel, without a word about alignment; rows on none of these."""
    inputs = make(v32(b=1, seqlens=5, strides="odd"))
    for records in (inputs, make(v4(b=1, seqlens=5)), make(fp8(b=1, seqlens=5))):
        recorder.entries.clear()
        mla_decode(*records.arguments)
        assert HOPPER in recorder.entries
    for kernel in RECORD_KERNELS:
        with pytest.raises(UnsupportedDeviceError, match="reads a cache of FP8 records"):
            mla_decode(*make(DecodeCase(b=1, seqlens=5)).arguments, kernel=kernel)
    for kernel in ("decode_sm90_small", "attention_generic"):
        with pytest.raises(UnsupportedDeviceError, match="reads a cache of 16-bit rows"):
            mla_decode(*inputs.arguments, kernel=kernel)


@pytest.mark.parametrize(
    ("case", "kernel"),
    [
        (v32(b=1, seqlens=700, h_q=64, strides="odd"), SEESAW),
        (fp8(b=1, seqlens=700, s_q=2, h_q=128), SEESAW),
        (v32(b=2, seqlens=700, h_q=32), HOPPER),
        (v32(b=1, seqlens=700, s_q=4, h_q=16), HOPPER),  # rows of several tokens
        (v32(b=1, seqlens=40, h_q=128), HOPPER),  # short splits
    ],
    ids=lambda value: getattr(value, "id", value),
)
def test_which_hopper_kernel(case: DecodeCase, kernel: str, recorder: Recorder) -> None:
    recorder.gpu = replace(recorder.gpu, sm_count=3)
    mla_decode(*make(case).arguments)
    assert kernel in recorder.entries


def test_what_a_block_of_many_rows_does_not_take(recorder: Recorder) -> None:
    arguments = make(v32(b=1, seqlens=5, s_q=2, h_q=32)).arguments
    with pytest.raises(UnsupportedDeviceError, match="multiples of 64 heads"):
        mla_decode(*arguments, kernel=SEESAW)
    tree = np.ones((1, 2), np.uint64)
    with pytest.raises(UnsupportedDeviceError, match="takes no tree_mask"):
        mla_decode(*make(v32(b=1, seqlens=5, s_q=2, h_q=64)).arguments, tree_mask=tree, kernel=SEESAW)
    assert recorder.launches == []


# ---- Kernels in the simulator ----------------------------------------------------------------------------------


def run(inputs: DecodeInputs, kernel: str, sm_count: int, mode: tuple[str, int], **options: Any) -> Any:
    with simulated(sm_count, mode=mode[0], seed=mode[1]) as target:
        got = mla_decode(*inputs.arguments, **inputs.case.options, kernel=kernel, **options)
    assert KERNELS[kernel].entry in target.launched
    return got


@pytest.mark.one_in(8)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_hopper_kernel(case: DecodeCase) -> None:
    inputs, number = make(case), CASES.index(case)
    got = run(inputs, HOPPER, (1, 3)[number % 2], MODES[number % len(MODES)])
    check(got, inputs.exact, inputs.rounded, case.dtype)


@pytest.mark.slow
@pytest.mark.parametrize("case", [*CASES, *MORE_CASES], ids=lambda case: case.id)
@pytest.mark.parametrize("mode", MODES, ids=str)
@pytest.mark.parametrize("sm_count", [1, 3, 5])
def test_hopper_kernel_in_all_modes(case: DecodeCase, mode: tuple[str, int], sm_count: int) -> None:
    inputs = make(case)
    check(run(inputs, HOPPER, sm_count, mode), inputs.exact, inputs.rounded, case.dtype)


@pytest.mark.one_in(16)
@pytest.mark.parametrize("case", WIDE_CASES, ids=lambda case: case.id)
def test_hopper_kernel_for_many_rows(case: DecodeCase) -> None:
    inputs, number = make(case), WIDE_CASES.index(case)
    got = run(inputs, SEESAW, (1, 3)[number % 2], MODES[number % len(MODES)])
    check(got, inputs.exact, inputs.rounded, case.dtype)


@pytest.mark.slow
@pytest.mark.parametrize("case", [*WIDE_CASES, *MORE_WIDE_CASES], ids=lambda case: case.id)
@pytest.mark.parametrize("mode", MODES, ids=str)
@pytest.mark.parametrize("sm_count", [1, 3, 5])
def test_hopper_kernel_for_many_rows_in_all_modes(case: DecodeCase, mode: tuple[str, int], sm_count: int) -> None:
    inputs = make(case)
    check(run(inputs, SEESAW, sm_count, mode), inputs.exact, inputs.rounded, case.dtype)


@pytest.mark.one_in(8)
@pytest.mark.parametrize("case", GENERIC_CASES, ids=lambda case: case.id)
def test_generic_kernel_computes_in_float32(case: DecodeCase) -> None:
    inputs = make(case)
    got = run(inputs, GENERIC, 1, ("random", 3), out_dtype="float32")
    for mine, exact in zip(got, inputs.exact, strict=True):
        np.testing.assert_allclose(mine, exact, rtol=2e-5, atol=2e-5)


@pytest.mark.one_in(8)
@pytest.mark.parametrize(
    ("of", "kernel"),
    [
        (of, kernel)
        for of in (v32, v4)
        for kernel in RECORD_KERNELS
        if kernel not in SINCE_AMPERE and takes(kernel, of(b=1, seqlens=1))  # see tests/attention
    ],
)
def test_what_only_later_queries_see_does_not_reach_earlier_ones(of: Callable[..., DecodeCase], kernel: str) -> None:
    """A NaN among the elements, and one in a scale or in the RoPE part; in a tile that another one follows."""
    inputs = make(of(b=1, seqlens=193, s_q=3, h_q=64 if kernel.startswith(SEESAW) else 4))
    page, token = inputs.block_table[0, 191 // 64], 191 % 64  # hidden from the first query only
    record = FORMATS[inputs.case.record]
    latent, other = (
        reference.cache.field_view(inputs.kv_cache[:, :, 0], record, record.field(name))
        for name in ("latent", "scales" if of is v32 else "rope")
    )
    infinity = np.array([np.inf], np.float32).view(np.uint8)[-4 if of is v32 else -2 :]  # of bfloat16 the upper half
    latent[page, token, 3] = 0x7F
    other[page, token, 8 : 8 + len(infinity)] = infinity
    got = run(inputs, kernel, 1, ("late", 0))
    assert np.isfinite(got[0][:, :1].astype(np.float32)).all()
    assert not np.isfinite(got[0][:, 1:, :, 3].astype(np.float32)).any()
    first = [(out[:, :1], lse[..., :1]) for out, lse in (got, inputs.exact, inputs.rounded)]
    check(*first, "bfloat16")


@pytest.mark.one_in(8)
@pytest.mark.parametrize("kernel", RECORD_KERNELS)
def test_reserved_bytes_do_not_matter(kernel: str) -> None:
    """Nor whether there are any: tokens of 528 bytes, in place or copied, give the same bits."""
    case = nope(b=2, seqlens=(130, 3), s_q=2, h_q=64 if kernel == SEESAW else 5, scales="plain", page_size=16)
    if not takes(kernel, case):
        pytest.skip("reads records with RoPE columns")
    inputs = make(case)
    infinities = np.array(inputs.kv_cache)
    infinities[..., 528:] = np.array([0x80, 0xFF], np.uint8).repeat(64)  # NaN and -inf as bfloat16
    whole = run(inputs, kernel, 1, ("early", 0))
    for cache in (infinities, infinities[..., :528], infinities[..., :528].copy()):
        other = replace(inputs, kv_cache=cache)
        named = {"kv_format": "v32-nope"} if cache.shape[-1] == 528 else {}
        for mine, expected in zip(run(other, kernel, 1, ("early", 0), **named), whole, strict=True):
            np.testing.assert_array_equal(mine, expected)


def test_a_plan_serves_records() -> None:
    case = v32(b=2, seqlens=(100, 65), h_q=4)
    inputs = make(case)
    with simulated(2):
        plan = plan_of(inputs, device=0)
        plan.update(inputs.seqlens)
        got = mla_decode(*inputs.arguments, plan=plan)
    assert plan.kernel == HOPPER
    check(got, inputs.exact, inputs.rounded, case.dtype)


# ---- Planted bugs ----------------------------------------------------------------------------------------------


def run_case(kernel: str, case: DecodeCase, mode: tuple[str, int]) -> None:
    """Only the last of two queries sees the first request's last token, which has a NaN."""
    inputs = make(case)
    last = case.lengths()[0] - 1
    if case.s_q > 1:
        page = inputs.block_table[0, last // case.page_size]
        assert 0 <= page < len(inputs.kv_cache)
        inputs.kv_cache[page, last % case.page_size, 0, 7] = 0x7F
    check(run(inputs, kernel, 1, mode), inputs.exact, inputs.rounded, case.dtype)


PLANTED = v32(b=2, seqlens=(130, 70), s_q=2, h_q=5, page_size=16, missing_pages=1)
#: The earlier of two queries sees one tile less.
PLANTED_WIDE = v32(b=2, seqlens=(129, 65), s_q=2, h_q=64, page_size=16)

test_few_rows_is_caught, test_few_rows_as_it_is = mutant_suite(
    HOPPER,
    [partial(run_case, HOPPER, PLANTED, mode) for mode in MODES[1:3]],
    {
        "bar.sync": (8, [0, 4]),
        "mbarrier.try_wait": (7, [0, 6]),
        "mbarrier.arrive": (11, [5]),
        "fence.proxy": (4, [0]),
        "wgmma.fence": (4, [0]),
        "wgmma.commit_group": (4, [0]),
        "wgmma.wait_group": (4, [0]),
    },
    [Mutant("places of the first page", "attention/record_tokens.cuh", "token - index * p.page_size", "token")],
)
#: The reserved bytes of the tokens are NaN.
PLANTED_NOPE = nope(b=1, seqlens=70, h_q=5, page_size=16)

test_no_rope_is_caught, test_no_rope_as_it_is = mutant_suite(
    HOPPER,
    [partial(run_case, HOPPER, PLANTED_NOPE, MODES[1])],
    {},
    [
        Mutant(
            "reserved bytes as RoPE columns",
            "attention/token_record.cuh",
            "kSame<Record, v32_nope> ? 0 : kRopeChunks",
            "kRopeChunks",
        )
    ],
)
test_many_rows_is_caught, test_many_rows_as_it_is = mutant_suite(
    SEESAW,
    [partial(run_case, SEESAW, PLANTED_WIDE, mode) for mode in MODES[1:3]],
    {
        "bar.sync": (6, [0, 3]),
        "bar.arrive": (2, [0]),
        "mbarrier.try_wait": (17, [0, 8]),
        "mbarrier.arrive": (17, [0]),
        "fence.proxy": (10, [5]),
        "cp.async.wait_group": (1, [0]),
        "cp.async.wait_all": (2, [0]),
        "cp.async.commit_group": (1, [0]),
        "wgmma.fence": (12, [0]),
        "wgmma.commit_group": (11, [0]),
        "wgmma.wait_group": (13, [0]),
    },
    [Mutant("hidden tokens are there", "attention/sm90/seesaw_records.cuh", "Tokens::kMasked ? block.hidden : 0", "0")],
)


# ---- On a GPU --------------------------------------------------------------------------------------------------

EDGES = tuple(64 * blocks + off for blocks in range(1, 9) for off in (-1, 0, 1))
ON_GPU = (
    *CASES,
    *MORE_CASES,
    *(v32(b=len(EDGES), seqlens=EDGES, h_q=h_q, dtype=d) for h_q, d in ((16, "bfloat16"), (8, "float16"))),
    *(v32(s_q=s_q, h_q=h_q, scales="plain") for s_q, h_q in ((1, 1), (2, 16), (4, 128), (1, 64))),
    *(v32(page_size=page_size, s_q=2, b=5, seqlens="ragged-500") for page_size in (1, 16, 65, 256)),
    v32(b=1, h_q=16, seqlens=20000),
    v32(b=300, h_q=8, seqlens="ragged-200"),
    v32(b=4, missing_pages=2, page_size=16, seqlens="ragged-300"),
    fp8(b=len(EDGES), seqlens=EDGES, h_q=16),
    fp8(b=3, s_q=4, h_q=128, seqlens="ragged-500", dtype="float16"),
    fp8(b=300, h_q=8, seqlens="ragged-200", kv_scale=1.0),
    fp8(b=1, h_q=16, seqlens=20000),
    v4(b=len(EDGES), seqlens=EDGES, h_q=16),
    v4(b=3, s_q=4, h_q=128, seqlens="ragged-500", dtype="float16"),
    v4(b=300, h_q=8, seqlens="ragged-200"),
    v4(b=1, h_q=16, seqlens=20000, page_size=256),
)


@pytest.mark.gpu
@pytest.mark.parametrize("case", ON_GPU, ids=lambda case: case.id)
def test_hopper_kernel_on_a_gpu(hopper: object, case: DecodeCase) -> None:
    run_and_check(case, kernel=HOPPER)


WIDE_ON_GPU = (
    *WIDE_CASES,
    *MORE_WIDE_CASES,
    *(v32(b=len(EDGES), seqlens=EDGES, h_q=h_q, dtype=d) for h_q, d in ((64, "bfloat16"), (128, "float16"))),
    *(v32(s_q=s_q, h_q=h_q, scales="plain") for s_q, h_q in ((1, 1), (2, 64), (4, 128), (1, 80))),
    *(v32(page_size=page_size, s_q=2, h_q=128, b=5, seqlens="ragged-500") for page_size in (1, 16, 65, 256)),
    v32(b=1, h_q=128, seqlens=20000),
    v32(b=300, h_q=64, seqlens="ragged-200"),
    v32(b=4, h_q=64, missing_pages=2, page_size=16, seqlens="ragged-300"),
    fp8(b=len(EDGES), seqlens=EDGES, h_q=128),
    fp8(b=3, s_q=4, h_q=128, seqlens="ragged-500", dtype="float16"),
    fp8(b=300, h_q=64, seqlens="ragged-200", kv_scale=1.0),
    v4(b=len(EDGES), seqlens=EDGES, h_q=64),
    v4(b=3, s_q=4, h_q=128, seqlens="ragged-500", dtype="float16"),
    v4(b=1, h_q=64, seqlens=20000, page_size=256),
)


@pytest.mark.gpu
@pytest.mark.parametrize("case", WIDE_ON_GPU, ids=lambda case: case.id)
def test_hopper_kernel_for_many_rows_on_a_gpu(hopper: object, case: DecodeCase) -> None:
    run_and_check(case, kernel=SEESAW)


@pytest.mark.gpu
@pytest.mark.parametrize("case", [*GENERIC_CASES, *ON_GPU[::4]], ids=lambda case: case.id)
def test_generic_kernel_on_a_gpu(gpu: object, case: DecodeCase) -> None:
    run_and_check(case, kernel=GENERIC)


@pytest.mark.gpu
@pytest.mark.parametrize("kernel", in_both_sizes(SINCE_AMPERE))
@pytest.mark.parametrize("case", [*ON_GPU, *WIDE_ON_GPU], ids=lambda case: case.id)
def test_kernels_since_ampere_on_a_gpu(gpu: object, kernel: str, case: DecodeCase) -> None:
    run_and_check(case, kernel=kernel)
