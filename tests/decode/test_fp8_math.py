"""Dense decode with both products in FP8: the rule for queries, refusals, the kernel in the simulator and on a GPU."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest

import mla_cupy
from mla_cupy import ArgumentError, DTypeError, PlanError, UnsupportedDeviceError, dtypes, reference
from mla_cupy.cache_formats import without_heads
from mla_cupy.kernels.attention import combine
from mla_cupy.kernels.decode import DECODE
from mla_cupy.kernels.decode.problem import Batch, DecodeProblem
from mla_cupy.kernels.decode.sm90_fp8 import kv_maps
from mla_cupy.kernels.spec import Variant
from mla_cupy.reference.fp8_queries import dequantised, quantise_queries
from tests.decode.test_tree_mask import tree_inputs
from tests.support.calls import assert_same, oracle, plan_of
from tests.support.cases import DecodeCase, DecodeInputs, make
from tests.support.flat import cascade_decode, mla_decode, plan_cascade
from tests.support.gpu import run_and_check
from tests.support.recorder import H200, Recorder, address
from tests.support.sim_driver import simulated
from tests.support.sim_modes import MODES
from tests.support.tolerance import check

Array = npt.NDArray[Any]

KERNEL = "decode_sm90_fp8"
E4M3 = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float64)


def fp8(**changes: Any) -> DecodeCase:
    return DecodeCase(**{"record": "fp8", "math": "fp8", "kv_scale": 0.03, **changes})


CASES = (
    fp8(b=1, seqlens=129, h_q=16),  # an odd number of tiles, the last one with a single token
    fp8(b=3, seqlens=(200, 0, 70), h_q=5, page_size=24),  # boxes of 8 tokens; a sequence without any
    fp8(b=1, seqlens=66, h_q=3, page_size=1, strides="odd", kv_scale=1.0),  # boxes of one token; queries anywhere
    fp8(b=2, seqlens=(3, 130), s_q=3, h_q=5, page_size=16, missing_pages=1),
    fp8(b=3, seqlens=(189, 1, 193), s_q=4, h_q=4, cp_world=3, cp_rank=1),  # a third of the tokens
    fp8(b=1, seqlens=400, h_q=16),  # split
    fp8(b=2, seqlens=(3, 130), s_q=2, h_q=40, page_size=16, missing_pages=1),  # the causal edge; two blocks of rows
    fp8(b=1, seqlens=66, h_q=64, head_axis=False, causal=False),
)
CODED = (
    fp8(b=2, seqlens=(129, 1), h_q=16, queries="float8_e4m3fn", q_scale=0.02),
    fp8(b=2, seqlens=(3, 130), s_q=3, h_q=5, page_size=16, missing_pages=1, queries="uint8"),
    fp8(b=1, seqlens=66, h_q=3, page_size=1, strides="odd", queries="float8_e4m3fn"),  # rows at any byte
    fp8(b=1, seqlens=200, s_q=2, h_q=40, queries="float8_e4m3fn", q_scale=3.0, kv_scale=1.0),  # two blocks; split
)
#: In all modes, and with other types and widths: where builds are many.
MORE_CASES = (
    fp8(b=2, seqlens=(300, 70), h_q=32, dtype="float16"),
    fp8(b=2, seqlens=(129, 2), s_q=2, h_q=12, causal=False),
    fp8(b=5, seqlens=(70, 1, 0, 200, 130), h_q=7, dtype="float16"),
    fp8(b=4, seqlens=(257, 321, 64, 1), h_q=128),
    fp8(b=2, seqlens=(700, 130), h_q=64, dtype="float16", page_size=1),
    fp8(b=1, seqlens=1100, h_q=64, page_size=65, strides="dense"),
)


def test_small_batches_have_blocks_of_32_rows() -> None:
    """Up to eight tiles for each split; not with a tree of drafts, nor where nothing is known of the batch."""
    problem = DecodeProblem(1, 128, "bfloat16", record="fp8", math="fp8")

    def blocks(problem: DecodeProblem) -> tuple[int, int, Any]:
        config = DECODE.configure(problem, H200)
        return config.row_blocks, config.num_splits, config.variant.block_rows

    assert blocks(replace(problem, batch=Batch(1, 264 * 64))) == (4, 33, 32)
    assert blocks(replace(problem, batch=Batch(1, 265 * 64))) == (2, 66, 64)
    assert blocks(replace(problem, h_q=33, batch=Batch(4, 64 * 66))) == (2, 66, 32)
    assert blocks(replace(problem, h_q=32, batch=Batch(1, 64))) == (1, 132, 32)
    assert blocks(replace(problem, h_q=9, batch=Batch(1, 64))) == (1, 132, 16)
    assert blocks(replace(problem, tree_mask=True, batch=Batch(1, 64))) == (2, 66, 64)
    assert blocks(problem) == (2, 66, 64)


# ---- Queries ---------------------------------------------------------------------------------------------------


def _by_hand(row: Array) -> tuple[Array, float]:
    """The rule, element by element, from the 256 codes."""
    values = row.astype(np.float64)
    if not np.isfinite(values).all():
        return np.full(len(row), 0x7F, np.uint8), np.nan
    scale = 2.0**-100
    while np.abs(values).max(initial=0.0) > 448 * scale:
        scale *= 2
    codes = np.arange(256)[np.isfinite(E4M3)]
    out = []
    for x in values / scale:
        distance = np.abs(E4M3[codes] - x)
        nearest = codes[(distance == distance.min()) & ((codes >= 0x80) == np.signbit(x))]
        out.append(min(nearest, key=lambda code: code % 2))  # a tie goes to the even one
    return np.array(out, np.uint8), scale


def hostile_rows(dtype: str) -> Array:
    """Ties, zeros, the largest and the smallest numbers, and a largest magnitude on both sides of 448."""
    kind = dtypes.numpy_dtype(dtype)
    info = ml_dtypes.finfo(kind)
    rng = np.random.default_rng(3)
    rows = [
        rng.standard_normal(24),
        np.zeros(24),
        -np.zeros(24),
        np.r_[448.0, 17.0, 19.0, -17.0, 2.0**-10, 3 * 2.0**-10, 2.0**-7 + 2.0**-10, -(2.0**-10), np.zeros(16)],  # ties
        np.r_[449.0 if dtype == "float16" else 450.0, rng.standard_normal(23)],
        np.r_[447.0, rng.standard_normal(23)],
        np.full(24, float(info.max)),
        np.r_[float(info.max), np.full(23, float(info.smallest_subnormal))],
        np.full(24, float(info.smallest_subnormal)),
        np.r_[np.nan, np.ones(23)],
        np.r_[np.ones(3), -np.inf, np.ones(20)],
    ]
    return np.array(rows).astype(kind)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_queries_are_rounded_by_the_rule(dtype: str) -> None:
    rows = hostile_rows(dtype)
    codes, scales = quantise_queries(rows)
    for row, mine, scale in zip(rows, codes, scales, strict=True):
        expected, expected_scale = _by_hand(row)
        np.testing.assert_array_equal(mine, expected)
        np.testing.assert_equal(float(scale), expected_scale)
    assert (codes[3, 1:3] == [0x58, 0x5A]).all()  # 17 and 19 lie between 16, 18 and 20
    np.testing.assert_array_equal(dequantised(rows)[5, 0], 448.0)


@pytest.mark.parametrize("case", [CASES[1], CASES[3]], ids=lambda case: case.id)
def test_the_oracle_attends_with_rounded_queries(case: DecodeCase) -> None:
    inputs = make(case)
    options = {**case.options, "math": "exact"}
    expected = reference.mla_decode(dequantised(inputs.q), *inputs.arguments[1:], **options)
    for mine, other in zip(inputs.exact, expected, strict=True):
        np.testing.assert_array_equal(mine, other)
    plain = reference.mla_decode(*inputs.arguments, **options)
    assert np.abs(plain[0] - expected[0]).max() > 1e-3


@pytest.mark.parametrize("case", CODED, ids=lambda case: case.id)
def test_the_oracle_attends_with_queries_in_e4m3(case: DecodeCase) -> None:
    """e4m3 queries give the same as their numbers times their scale."""
    inputs = make(case)
    numbers = E4M3[inputs.q.view(np.uint8)] * case.q_scale
    options = {**case.options, "math": "exact", "q_scale": 1.0}
    expected = reference.mla_decode(numbers, *inputs.arguments[1:], **options)
    for mine, other in zip(inputs.exact, expected, strict=True):
        np.testing.assert_allclose(mine, other, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    "case", [CASES[3], *CODED[:2], replace(CASES[3], math="fp8x2", h_q=12)], ids=lambda case: case.id
)
def test_the_numpy_backend_rounds_the_oracle(case: DecodeCase, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLA_CUPY_BACKEND", "numpy")
    inputs = make(case)
    plan = plan_of(inputs)
    plan.update(inputs.seqlens)
    for given in (None, plan):
        got = mla_decode(*inputs.arguments, **inputs.case.options, plan=given)
        for mine, expected in zip(got, oracle(inputs, **inputs.case.options), strict=True):
            assert_same(mine, expected)


# ---- Refusals --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("math", ["fp8", "fp8x2"])
@pytest.mark.parametrize(
    ("case", "match"),
    [
        (DecodeCase(b=1, seqlens=5), r"expected \"exact\" for 16-bit rows.*leave fp8.math out"),
        (DecodeCase(b=1, seqlens=5, record="v32"), r"expected \"exact\" for the format v32"),
        (DecodeCase(b=1, seqlens=5, record="v4", d_qk=512), r"expected \"exact\" for the format v4.*cache_append"),
    ],
    ids=["rows", "v32", "v4"],
)
def test_other_caches_are_refused(case: DecodeCase, match: str, math: str, recorder: Recorder) -> None:
    inputs, match = make(case), f"fp8.math: got '{math}', {match}"
    with pytest.raises(ArgumentError, match=match):
        mla_decode(*inputs.arguments, math=math)
    with pytest.raises(ArgumentError, match=match):
        plan_of(inputs, math=math, device=0)
    assert recorder.launches == []


@pytest.mark.parametrize(
    ("case", "options", "error", "match"),
    [
        (
            CODED[0],
            {"math": "exact"},
            ArgumentError,
            r'math: got .exact., expected "fp8" for queries in (float8_e4m3fn|uint8); pass fp8=',
        ),
        (
            CODED[1],
            {"math": "exact"},
            ArgumentError,
            r'math: got .exact., expected "fp8" for queries in (float8_e4m3fn|uint8); pass fp8=',
        ),
        (CASES[0], {"q_scale": 2.0}, ArgumentError, "q_scale: got 2.0, expected 1 for queries in bfloat16; .*multiply"),
        (
            CODED[0],
            {"q_scale": 1e-30, "scale": 1e-30},
            ArgumentError,
            r"scale \* fp8.kv_scale \* fp8.q_scale: got .*e-6",
        ),
        (CODED[0], {"out_dtype": "float16"}, DTypeError, "out_dtype: got float16, expected bfloat16 or float32"),
    ],
    ids=["exact", "exact-bytes", "scale", "product", "out"],
)
def test_what_queries_in_e4m3_cannot_have(
    case: DecodeCase, options: dict[str, Any], error: type[Exception], match: str, recorder: Recorder
) -> None:
    inputs = make(case)
    with pytest.raises(error, match=match):
        mla_decode(*inputs.arguments, **{**case.options, **options})
    assert recorder.launches == []


def test_queries_in_e4m3_over_other_caches_are_refused(recorder: Recorder) -> None:
    queries = {"queries": "float8_e4m3fn", "math": "fp8"}
    for record, match in (("v32", "for the format v32"), ("", "kv_cache.dtype: got bfloat16, expected float8_e4m3fn")):
        case = DecodeCase(b=1, seqlens=5, record=record, **queries)
        with pytest.raises((ArgumentError, DTypeError), match=match):
            mla_decode(*make(case).arguments, math="fp8")
    assert recorder.launches == []


def test_plans_for_queries_in_e4m3(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLA_CUPY_BACKEND", "numpy")
    coded, plain = make(CODED[0]), make(replace(CODED[0], queries="", q_scale=1.0))
    with pytest.raises(
        ArgumentError, match=r"fp8.math: got 'exact', expected \"fp8\" for queries in (float8_e4m3fn|uint8)"
    ):
        plan_of(coded, math="exact")
    with pytest.raises(DTypeError, match="dtype: got float8_e5m2, expected bfloat16, float16 or float8_e4m3fn"):
        plan_of(coded, dtype="float8_e5m2")
    plan = plan_of(plain)
    plan.update(plain.seqlens)
    with pytest.raises(PlanError, match="plan: got dtype='bfloat16', expected dtype='float8_e4m3fn'"):
        mla_decode(*coded.arguments, **coded.case.options, plan=plan)


@pytest.mark.parametrize(
    ("math", "kernels"),
    [
        ("fp8", ["decode_sm90_records", "decode_generic_records"]),
        ("fp8x2", ["decode_sm90_records", "decode_generic_records", "decode_sm100_fp8"]),
    ],
)
def test_other_kernels_are_refused(math: str, kernels: list[str], recorder: Recorder) -> None:
    inputs = make(replace(CASES[0], h_q=17))
    for kernel in kernels:
        with pytest.raises(
            ArgumentError, match=f"kernel: got '{kernel}', expected for fp8.math='{math}' one of {KERNEL}"
        ):
            mla_decode(*inputs.arguments, math=math, kernel=kernel)
    with pytest.raises(ArgumentError, match=f"kernel: got '{KERNEL}', expected for fp8.math='exact' one of"):
        mla_decode(*inputs.arguments, kernel=KERNEL)
    assert recorder.launches == []


@pytest.mark.parametrize("math", ["fp8", "fp8x2"])
@pytest.mark.parametrize(("cc", "arch"), [((8, 0), "8.0"), ((10, 0), "10.0"), ((7, 5), "7.5")])
def test_other_gpus_are_refused(cc: tuple[int, int], arch: str, math: str) -> None:
    problem = DecodeProblem(1, 64, "bfloat16", record="fp8", math=math)
    with pytest.raises(UnsupportedDeviceError, match=f"needs compute capability 9.0.* has {arch}: leave fp8.math out"):
        DECODE.configure(problem, replace(H200, cc=cc))


def test_a_plan_is_for_one_arithmetic(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLA_CUPY_BACKEND", "numpy")
    inputs = make(CASES[0])
    plan = plan_of(inputs, math="exact")
    plan.update(inputs.seqlens)
    with pytest.raises(PlanError, match="plan: got math='exact', expected math='fp8'"):
        mla_decode(*inputs.arguments, math="fp8", plan=plan)


# ---- Launches --------------------------------------------------------------------------------------------------


def test_a_launch(recorder: Recorder) -> None:
    """The record's two maps, the scale of keys and values, and the build for the rows."""
    inputs = make(fp8(b=2, seqlens=(300, 70), h_q=8, page_size=48))
    mla_decode(*inputs.arguments, **inputs.case.options, scale=0.25)
    assert recorder.entries[:2] == ["attention_schedule", KERNEL]
    p = recorder.launches[1].params
    assert p["scale_log2"] == pytest.approx(0.25 * 0.03 / np.log(2), rel=1e-6)
    assert p["value_scale"] == pytest.approx(0.03, rel=1e-6)
    latent, rope = recorder.maps
    assert {latent.base, rope.base} == {address(inputs.kv_cache)}
    assert (latent.box, latent.swizzle) == ((128, 16, 1, 1), "128B")
    assert (rope.box, rope.swizzle) == ((64, 16, 1, 1), "64B")
    assert latent.dims == (576, 48, 1, len(inputs.kv_cache))
    assert latent.strides_bytes == (inputs.kv_cache.strides[1], 576, inputs.kv_cache.strides[0])


@pytest.mark.parametrize(
    ("options", "bf16"),
    [
        ({}, True),
        ({"dtype": "float16"}, False),
        ({"out_dtype": "float32"}, False),
        ({"math": "fp8x2"}, False),
        ({"batch_invariant": True}, False),
    ],
    ids=str,
)
def test_partial_results_that_are_bfloat16(options: dict[str, Any], bf16: bool, recorder: Recorder) -> None:
    """Partial results of bfloat16 results, in one term, merged by `attention_combine`."""
    inputs = make(fp8(b=2, seqlens=(3000, 70), h_q=40, dtype=options.get("dtype", "bfloat16")))
    options = {name: x for name, x in options.items() if name != "dtype"}
    if options.pop("batch_invariant", False):
        options["plan"] = plan_of(inputs, batch_invariant=True)
        options["plan"].update(inputs.seqlens)
    mla_decode(*inputs.arguments, **{**inputs.case.options, **options})
    (p,) = (launch.params for launch in recorder.launches if launch.entry == f"mla_{KERNEL}")
    assert p["bf16_partials"] == bf16


def test_the_merge_of_bfloat16_is_built_beside_the_other() -> None:
    """A plan serves results of either kind."""
    for math, wanted in (("fp8", {"bfloat16", "bfloat16-bfloat16"}), ("fp8x2", {"bfloat16"}), ("exact", {"bfloat16"})):
        config = DECODE.configure(DecodeProblem(1, 128, "bfloat16", record="fp8", math=math), H200)
        assert {str(build) for kernel, build in DECODE.builds(config) if kernel is combine.KERNEL} == wanted


@pytest.mark.parametrize(("page_size", "rope"), [(1, (128, "128B")), (65, (128, "128B")), (2, (64, "64B"))])
def test_boxes_of_one_token_are_as_wide_as_the_swizzle(page_size: int, rope: tuple[int, str]) -> None:
    """Since a box begins at a multiple of 128 bytes of shared memory."""
    from mla_cupy import arrays

    cache = without_heads(make(fp8(b=1, seqlens=5, page_size=page_size)).kv_cache)

    _, spec = kv_maps(arrays.family_of(cache, "kv_cache").native.view(cache, "kv_cache"), Variant())
    assert (spec.box[0], spec.swizzle) == rope
    spec.validate()


@pytest.mark.parametrize(("s_q", "h_q", "rows"), [(1, 1, 16), (1, 16, 16), (2, 16, 32), (1, 33, 64), (2, 128, 64)])
def test_builds_by_rows(s_q: int, h_q: int, rows: int) -> None:
    config = DECODE.configure(DecodeProblem(s_q, h_q, "bfloat16", record="fp8", math="fp8"), H200)
    assert (config.kernel.name, config.variant.block_rows) == (KERNEL, rows)
    assert config.row_blocks == -(-s_q * h_q // 64)


# ---- The kernel in the simulator -------------------------------------------------------------------------------


def run(inputs: DecodeInputs, sm_count: int, mode: tuple[str, int], **options: Any) -> Any:
    with simulated(sm_count, mode=mode[0], seed=mode[1]) as target:
        got = mla_decode(*inputs.arguments, **{**inputs.case.options, **options})
    assert f"mla_{KERNEL}" in target.launched
    return got


@pytest.mark.one_in(8)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_kernel(case: DecodeCase) -> None:
    inputs, number = make(case), CASES.index(case)
    got = run(inputs, (1, 3)[number % 2], MODES[number % len(MODES)])
    check(got, inputs.exact, inputs.rounded, case.dtype)


@pytest.mark.one_in(8)
@pytest.mark.parametrize("case", CODED, ids=lambda case: case.id)
def test_queries_in_e4m3(case: DecodeCase) -> None:
    inputs, number = make(case), CODED.index(case)
    got = run(inputs, (1, 3)[number % 2], MODES[number % len(MODES)])
    assert got[0].dtype == ml_dtypes.bfloat16
    check(got, inputs.exact, inputs.rounded, case.dtype)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("h_q", [3, 40])
def test_queries_that_start_at_an_odd_byte(h_q: int) -> None:
    """Warps without a row copy zeros."""
    inputs = make(fp8(b=2, seqlens=(70, 1), h_q=h_q, queries="float8_e4m3fn", q_scale=0.02))
    anywhere = np.zeros(inputs.q.nbytes + 1, np.uint8)[1:].view(inputs.q.dtype).reshape(inputs.q.shape)
    anywhere[:] = inputs.q
    assert address(anywhere) % 16 != 0
    for got, expected in zip(
        run(replace(inputs, q=anywhere), 1, ("late", 0)), run(inputs, 1, ("late", 0)), strict=True
    ):
        assert_same(got, expected)


def test_a_pool_without_pages(recorder: Recorder) -> None:
    """Its maps have one page, which nothing fetches, at an address that there is: an empty array may have none."""
    inputs = make(fp8(b=2, seqlens=(5, 0), h_q=16))
    empty = inputs.kv_cache[:0]
    workspace = np.zeros(16 << 20, np.uint8)
    at = -address(workspace) % 256
    given = (inputs.q, empty, *inputs.arguments[2:])
    mla_decode(*given, **inputs.case.options, workspace=workspace[at:])
    (launch,) = [launch for launch in recorder.launches if launch.entry == f"mla_{KERNEL}"]
    assert launch.params["num_pages"] == 0
    assert {spec.base for spec in recorder.maps} == {address(workspace) + at}
    for spec in recorder.maps:
        spec.validate()


def test_without_pages_no_token_is_visible() -> None:
    inputs = make(fp8(b=2, seqlens=(70, 0), h_q=16))
    given = DecodeInputs(inputs.case, inputs.q, inputs.kv_cache[:0], *inputs.arguments[2:])
    out, lse = run(given, 2, MODES[1], empty_lse=3.0)
    assert (out == 0).all()
    assert (lse == 3).all()


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES, ids=str)
@pytest.mark.parametrize("case", [*CASES, *CODED, *MORE_CASES], ids=lambda case: case.id)
def test_kernel_in_all_modes(case: DecodeCase, mode: tuple[str, int]) -> None:
    inputs = make(case)
    for sm_count in (1, 3, 5):
        check(run(inputs, sm_count, mode), inputs.exact, inputs.rounded, case.dtype)


def test_hostile_queries() -> None:
    """Each row beside keys of a single 1: `lse` is then a number of the rounded query."""
    columns = np.array([0, 63, 127, 128, 400, 511, 512, 575])
    rows = hostile_rows("bfloat16")
    inputs = make(fp8(b=len(columns), seqlens=1, h_q=len(rows), kv_scale=1.0))
    inputs.q[...] = 0
    inputs.q[:, 0, :, columns] = rows.T[: len(columns), None]
    first, one = inputs.block_table[:, 0], 0x38
    inputs.kv_cache[first, 0] = 0
    inputs.kv_cache[first, 0, 0, columns] = one
    _, lse = run(inputs, 3, ("random", 1), scale=0.125)  # the largest score, in base 2, is a float
    rounded = dequantised(inputs.q[0, 0])[:, columns].T
    assert np.isnan(rounded).all(axis=0).sum() == 2
    np.testing.assert_allclose(lse[:, :, 0], rounded / 8, rtol=1e-6, atol=1e-6)


def test_every_code_of_a_query() -> None:
    """Each code beside a key of a single 1: `lse` is then its number; NaN makes its own row NaN, and no other."""
    inputs = make(fp8(b=1, seqlens=1, h_q=256, kv_scale=1.0, queries="uint8", strides="dense"))
    inputs.q[...] = 0
    inputs.q[0, 0, :, 300] = np.arange(256)
    inputs.kv_cache[inputs.block_table[0, 0], 0] = 0
    inputs.kv_cache[inputs.block_table[0, 0], 0, 0, 300] = 0x38
    out, lse = run(inputs, 2, ("random", 3), scale=0.125)
    np.testing.assert_allclose(lse[0, :, 0], E4M3 / 8, rtol=1e-6, atol=1e-6)
    assert (np.isnan(out[0, 0].astype(np.float32)).any(axis=-1) == np.isnan(E4M3)).all()


@pytest.mark.one_in(4)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_numbers_of_e4m3_give_the_same_bits_in_16_bits(dtype: str) -> None:
    """A row with a largest number of 448 has a scale of 1."""
    inputs = make(fp8(b=2, seqlens=(130, 65), h_q=5, queries="float8_e4m3fn"))
    inputs.q[..., 9] = -448
    got = run(inputs, 1, ("late", 1), out_dtype="float32")
    expected = run(replace(inputs, q=inputs.q.astype(dtypes.numpy_dtype(dtype))), 1, ("late", 1), out_dtype="float32")
    for mine, other in zip(got, expected, strict=True):
        assert_same(mine, other)


def test_results_in_float32() -> None:
    """They are not rounded to 16 bits on the way."""
    inputs = make(fp8(b=2, seqlens=(90, 3), h_q=13))
    got = run(inputs, 1, ("early", 0), out_dtype="float32")
    check(got, inputs.exact, inputs.rounded, "bfloat16")
    assert (got[0] != got[0].astype(inputs.q.dtype).astype(np.float32)).mean() > 0.5


@pytest.mark.slow
def test_partial_results_in_bfloat16_cost_less_than_results() -> None:
    """Rounding many pieces adds less than the result's own rounding."""
    inputs = make(fp8(b=1, seqlens=800, h_q=40))
    wide, wide_lse = run(inputs, 8, ("early", 0), out_dtype="float32")
    out, lse = run(inputs, 8, ("early", 0))
    error, rounding = (x.astype(np.float64) - wide for x in (out, wide.astype(inputs.q.dtype)))
    assert (rounding**2).mean() < (error**2).mean() < 2 * (rounding**2).mean()
    assert np.abs(error).max() <= 2**-7 * np.abs(wide).max()
    assert_same(lse, wide_lse)


@pytest.mark.one_in(4)
@pytest.mark.parametrize("sm_count", [1, 5])
@pytest.mark.parametrize("tokens", [2, 300])
def test_a_sink_is_weighed_with_the_sum_before_rounding(tokens: int, sm_count: int) -> None:
    """So that a few tokens' rounded weights do not count beside it; whether a request is split or not."""
    inputs = make(fp8(b=1, seqlens=tokens, h_q=9))
    sink = np.linspace(-3, 5, 9, dtype=np.float32)
    out, lse = run(inputs, sm_count, ("late", 0), out_dtype="float32")
    shared, _ = run(inputs, sm_count, ("late", 0), out_dtype="float32", attn_sink=sink)
    weight = 1 / (1 + np.exp(sink - lse[0, :, 0].astype(np.float64)))
    np.testing.assert_allclose(shared[0, 0], out[0, 0] * weight[:, None], rtol=2e-5)


def test_what_only_later_queries_see_does_not_reach_earlier_ones() -> None:
    """NaN in a latent and in the RoPE part of a token that the first of three queries does not see."""
    inputs = make(fp8(b=1, seqlens=193, s_q=3, h_q=4))
    page, token = inputs.block_table[0, 191 // 64], 191 % 64
    inputs.kv_cache[page, token, 0, [3, 300]] = 0x7F, 0xFF
    inputs.kv_cache[page, token, 0, 570] = 0x7F
    got = run(inputs, 1, ("late", 0))
    assert np.isfinite(got[0][:, :1].astype(np.float32)).all()
    assert np.isnan(got[0][:, 1:].astype(np.float32)).all()
    first = [(out[:, :1], lse[..., :1]) for out, lse in (got, inputs.exact, inputs.rounded)]
    check(*first, "bfloat16")


@pytest.mark.one_in(4)
@pytest.mark.parametrize("rising", [True, False])
def test_scores_of_all_sizes(rising: bool) -> None:
    """Each tile's scores are 90 above, or below, the previous tile's: beyond where references stay."""
    inputs = make(fp8(b=1, seqlens=250, h_q=4, kv_scale=1.0))
    inputs.q[..., 575] = 448.0
    tiles = np.arange(250) // 64 * (1 if rising else -1)
    inputs.kv_cache[inputs.block_table[0, np.arange(250) // 64], np.arange(250) % 64, 0, 575] = (
        (tiles * 4.0).astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
    )
    got = run(inputs, 1, ("early", 0), scale=90 / (448 * 4))
    exact = reference.mla_decode(*inputs.arguments, math="fp8", scale=90 / (448 * 4))
    rounded = reference.mla_decode(*inputs.arguments, math="fp8", scale=90 / (448 * 4), rounding="bfloat16")
    assert np.ptp(exact[1]) < 100
    assert abs(exact[1].max()) > 250 if rising else True
    check(got, exact, rounded, "bfloat16")


TREES = (
    fp8(b=2, s_q=5, h_q=3, seqlens=(3, 70), page_size=16, missing_pages=1),
    fp8(b=1, s_q=5, h_q=3, seqlens=70, page_size=16, queries="float8_e4m3fn", q_scale=0.5),
    fp8(b=1, s_q=7, h_q=2, seqlens=201, cp_world=3, cp_rank=1),
)


@pytest.mark.one_in(4)
@pytest.mark.parametrize("case", TREES, ids=lambda case: case.id)
def test_trees_of_drafts(case: DecodeCase) -> None:
    inputs = tree_inputs(case)
    got = run(inputs.base, 1, ("random", 2), tree_mask=inputs.masks)
    check(got, inputs.exact, inputs.rounded, case.dtype)


@pytest.mark.one_in(4)
@pytest.mark.parametrize("queries", ["", "float8_e4m3fn"])
def test_a_plan_gives_the_same_bits_in_any_batch(queries: str) -> None:
    """Pieces of 64 tokens, three of the same sequence in different batches."""
    inputs = make(fp8(b=3, seqlens=(130, 0, 129), h_q=3, queries=queries))
    with simulated(2):
        plan = plan_of(inputs, device=0, batch_invariant=True, split_tokens=64)
        plan.update(inputs.seqlens)
        out, lse = mla_decode(*inputs.arguments, **inputs.case.options, plan=plan)
        assert plan.kernel == KERNEL
    check((out, lse), inputs.exact, inputs.rounded, "bfloat16")
    with simulated(3, mode="late"):
        plan = plan_of(inputs, device=0, batch_invariant=True, split_tokens=64)
        plan.update(inputs.seqlens[2:])
        q, cache, table, _ = inputs.arguments
        got = mla_decode(q[2:], cache, table[2:], inputs.seqlens[2:], **inputs.case.options, plan=plan)
    assert (got[0].tobytes(), got[1].tobytes()) == (out[2:].tobytes(), lse[2:].tobytes())


@pytest.mark.one_in(4)
@pytest.mark.parametrize("queries", ["", "float8_e4m3fn", "uint8"])
def test_a_shared_prefix(queries: str) -> None:
    """Two query tokens in sequences that do not step evenly: queries of the group are copied."""
    inputs = make(fp8(b=2, s_q=2, seqlens=(100, 90), h_q=4, page_size=32, kv_scale=1.0, queries=queries))
    inputs.block_table[1, 0] = inputs.block_table[0, 0]
    groups = (mla_cupy.PrefixGroup(0, 2, 1),)
    with simulated(1) as target:
        plan = plan_cascade(
            groups,
            b=2,
            s_q=2,
            h_q=4,
            record="fp8",
            math="fp8",
            max_pages=inputs.block_table.shape[1],
            page_size=32,
            dtype="float8_e4m3fn" if queries else "bfloat16",
            device=0,
        )
        plan.update(inputs.seqlens)
        for given in (None, plan):
            got = cascade_decode(*inputs.arguments, groups, math="fp8", plan=given)
            check(got, inputs.exact, inputs.rounded, "bfloat16")
    assert f"mla_{KERNEL}" in target.launched


# ---- On a GPU --------------------------------------------------------------------------------------------------

EDGES = tuple(64 * blocks + off for blocks in range(1, 9) for off in (-1, 0, 1))
ON_GPU = (
    *CASES,
    *MORE_CASES,
    *(
        fp8(b=len(EDGES), seqlens=EDGES, h_q=h_q, dtype=d)
        for h_q, d in ((16, "bfloat16"), (64, "float16"), (128, "bfloat16"))
    ),
    *(fp8(s_q=s_q, h_q=h_q) for s_q, h_q in ((1, 1), (2, 16), (4, 128), (1, 64))),
    *(fp8(page_size=page_size, s_q=2, b=5, seqlens="ragged-500") for page_size in (1, 2, 16, 65, 256)),
    fp8(b=1, h_q=64, seqlens=9000),
    fp8(b=300, h_q=8, seqlens="ragged-200", kv_scale=1.0),
    fp8(b=4, missing_pages=2, page_size=16, seqlens="ragged-300"),
    *CODED,
    *(fp8(b=len(EDGES), seqlens=EDGES, h_q=h_q, queries="float8_e4m3fn", q_scale=0.1) for h_q in (16, 128)),
)


@pytest.mark.gpu
@pytest.mark.parametrize("case", ON_GPU, ids=lambda case: case.id)
def test_kernel_on_a_gpu(hopper: object, case: DecodeCase) -> None:
    run_and_check(case, kernel=KERNEL)
