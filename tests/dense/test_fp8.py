"""Dense attention over e4m3 codes: both kernels in the simulator against the oracle, refusals, the oracle itself.

Keys and values that no query sees are the code of NaN, and sequences end anywhere in a tile. Each case runs
with each kernel once; modes take turns.
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest

import mla_cupy
from mla_cupy import ArgumentError, DTypeError, ShapeError, UnsupportedDeviceError, reference
from mla_cupy.kernels.dense import DENSE
from mla_cupy.kernels.dense.problem import DenseProblem
from tests.dense.runs import GENERIC, GENERIC_FP8, GPUS, HOPPER, HOPPER_FP8, MMA, run
from tests.support.dense_cases import DenseCase, DenseInputs, make
from tests.support.flat import flat
from tests.support.recorder import H200, Recorder
from tests.support.sim_driver import simulated
from tests.support.sim_modes import parametrize_pairs

Array = npt.NDArray[Any]
F8 = "float8_e4m3fn"
KERNELS = (HOPPER_FP8, GENERIC_FP8)
E4M3 = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float64)

CASES = [
    DenseCase(((1, 1),), starts=False, dtype="uint8"),
    DenseCase(((129, 129),), starts=False, dtype=F8, scales="q"),  # two tiles of queries, the second with one
    DenseCase(((65, 300),), h_q=2, h_kv=1, dtype=F8, q_pair=True),  # a tile that all queries see as a whole
    DenseCase(((63, 40), (1, 130), (2, 0), (0, 9), (5, 128)), h_q=3, around=(3, 2), dtype=F8, scales="qkv"),
    DenseCase(((40, 140), (3, 0), (7, 20)), h_q=4, h_kv=2, k_rope="per_head", dtype="uint8", scales="qv"),
    DenseCase(((33, 260),), causal=False, dtype=F8, scales="k"),
    DenseCase(((66, 386),), scale=1.0, dtype=F8),  # maxima that rise; a warpgroup sees a tile less
    DenseCase(((70, 3),), h_q=2, k_rope="within", dtype=F8),  # most queries see nothing
]
SMALL = (
    DenseCase(((3, 5), (0, 2), (2, 0), (4, 2)), h_q=2, h_kv=1, around=(1, 1), dtype="uint8", scales="qkv", q_pair=True),
    DenseCase(((2, 40),), h_q=2, causal=False, k_rope="per_head", dtype=F8),
    DenseCase(((2, 3),), k_rope="within", starts=False, dtype=F8, scales="v"),
)
ENDS = DenseCase(((3, 5), (4, 4)), h_q=2, dtype=F8, scales="qkv")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if metafunc.function is test_hopper_kernel:
        parametrize_pairs(metafunc, list(itertools.product(CASES, [HOPPER_FP8])))


# ---- Results ---------------------------------------------------------------------------------------------------


@pytest.mark.one_in(8)
def test_hopper_kernel(case: DenseCase, kernel: str, mode: tuple[str, int], sm_count: int) -> None:
    run(make(case), kernel, sm_count, mode)


@pytest.mark.parametrize(
    ("case", "cc"), [(SMALL[0], (7, 5)), (SMALL[1], (8, 9)), (SMALL[2], (10, 0))], ids=["many", "full", "within"]
)
def test_plain_kernel(case: DenseCase, cc: tuple[int, int]) -> None:
    run(make(case), GENERIC_FP8, 1, ("random", 3), cc)


@pytest.mark.parametrize("kernel", KERNELS)
def test_results_in_other_dtypes(kernel: str) -> None:
    """They are rounded once: to bfloat16 where nothing is said."""
    inputs = make(DenseCase(((3, 5),), dtype=F8, scales="v"))
    wide, lse = call(inputs, kernel, out_dtype="float32")
    assert wide.dtype == np.float32
    assert (wide != wide.astype(np.float16).astype(np.float32)).mean() > 0.5
    for given, dtype in ((None, ml_dtypes.bfloat16), ("float16", np.float16)):
        out, same_lse = call(inputs, kernel, out_dtype=given)
        np.testing.assert_array_equal(out, wide.astype(dtype))
        np.testing.assert_array_equal(same_lse, lse)
    half = np.zeros(wide.shape, np.float16)
    assert call(inputs, kernel, out=half)[0] is half
    np.testing.assert_array_equal(half, wide.astype(np.float16))


def call(inputs: DenseInputs, kernel: str, **options: Any) -> tuple[Array, Array]:
    with simulated(1, GPUS[kernel]):
        out, lse = flat(mla_cupy.mla_prefill)(*inputs.arguments, **inputs.options, kernel=kernel, **options)
    return out, lse


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("code", [0x7F, 0xFF])
def test_what_one_query_sees_stays_with_it(kernel: str, code: int) -> None:
    """Both codes of NaN in values and keys of the same tile that only later queries see, and in the next sequence's."""
    inputs = make(DenseCase(((6, 6), (3, 3)), dtype="uint8"))
    inputs.v[[4, 4, 5], 0, [7, 64, 127]] = code
    inputs.k[5, 0, 3] = code
    inputs.v[6:] = code
    out, lse = (x.astype(np.float32) for x in run(inputs, kernel))
    assert np.isfinite(out[:4]).all()
    assert (np.flatnonzero(np.isnan(out[4, 0])) == [7, 64]).all()
    assert np.isnan(out[5:]).all()
    assert np.isnan(lse[5]).all()


@pytest.mark.parametrize("kernel", KERNELS)
def test_results_stay_within_their_rows(kernel: str) -> None:
    """Memory between the rows of `out` and `lse`, and beyond a tile's last query, is not written."""
    inputs = make(DenseCase(((3, 4), (6, 5)), h_q=2, dtype=F8))
    s_q, h_q, d_v = *inputs.q.shape[:2], inputs.v.shape[2]
    out, lse = (
        np.full((s_q + 2, h_q + 1, d_v + 8), 7, ml_dtypes.bfloat16),
        np.full((s_q + 2, h_q + 3), 7, np.float32),
    )
    run(inputs, kernel, out=out[1:-1, :h_q, :d_v], lse=lse[1:-1, :h_q])
    for array in (out, lse):
        array[1:-1, :h_q, ...][..., : d_v if array is out else None] = 7
        assert (array == 7).all()


@pytest.mark.parametrize("kernel", KERNELS)
def test_hostile_starts(kernel: str) -> None:
    """They are clamped, and never go down; a sequence without queries, whose scales nobody uses, is among them."""
    inputs = make(DenseCase(((9, 11),), starts=False, dtype=F8))
    inputs.options["cu_seqlens_q"] = np.array([-(2**31), 4, 2, 2**31 - 1, 5], np.int32)
    inputs.options["cu_seqlens_kv"] = np.array([3, -1, 7, 6, 2**31 - 1], np.int32)
    for at, name in enumerate(("q_scales", "k_scales", "v_scales")):
        inputs.options[name] = np.array([[2.0], [np.nan], [0.5], [np.nan]], np.float32) / (1 + at)
    run(inputs, kernel)


@pytest.mark.one_in(4)
@pytest.mark.parametrize(("kernel", "count"), [(HOPPER_FP8, 5), (GENERIC_FP8, 34)])
def test_each_sequence_and_head_has_its_scales(kernel: str, count: int) -> None:
    """Some sequences have no queries; a stride of the scales is negative."""
    case = DenseCase(tuple((n % 3, n % 5) for n in range(count)), h_q=2, around=(2, 1), dtype=F8, scales="qkv")
    inputs = make(case)
    for name in ("q_scales", "k_scales", "v_scales"):
        scales = (np.arange(2 * count, dtype=np.float32) / count + 0.1).reshape(2, count)
        inputs.options[name] = scales[::-1].T
    run(inputs, kernel, 3)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("name", ["q_scales", "v_scales"])
def test_a_scale_of_zero(kernel: str, name: str) -> None:
    """A scale of zero acts like zeros: for queries, keys weigh the same; for values, the result is 0."""
    inputs = make(DenseCase(((2, 3),), dtype=F8))
    inputs.options[name] = np.zeros((1, 1), np.float32)
    out, lse = run(inputs, kernel)
    if name == "v_scales":
        assert not out.astype(np.float32).any()
    else:
        np.testing.assert_allclose(lse[:, 0], np.log([2, 3]), rtol=1e-6)


@pytest.mark.parametrize("kernel", KERNELS)
def test_no_keys_and_no_queries(kernel: str) -> None:
    out, lse = run(make(DenseCase(((3, 0),), starts=False, dtype=F8)), kernel)
    assert not out.astype(np.float32).any()
    assert (lse == -np.inf).all()
    inputs = make(DenseCase(((0, 3),), starts=False, dtype=F8))
    with simulated(1, GPUS[kernel]) as target:
        out, lse = flat(mla_cupy.mla_prefill)(*inputs.arguments, **inputs.options, kernel=kernel)
    assert (out.shape, out.dtype, lse.shape) == ((0, 1, 128), ml_dtypes.bfloat16, (0, 1))
    assert not target.launched


def test_odd_strides_fall_to_the_plain_kernel() -> None:
    inputs = make(DenseCase(((2, 3),), dtype=F8))
    odd = np.zeros((*inputs.k.shape[:2], inputs.k.shape[2] + 1), inputs.k.dtype)[..., 1:]
    odd[:] = inputs.k
    moved: dict[str, Any] = {"k": odd}
    run(replace(inputs, **moved), GENERIC_FP8)
    with simulated(1) as target:
        flat(mla_cupy.mla_prefill)(inputs.q, odd, inputs.v, **inputs.options)
    assert target.launched[-1] == f"mla_{GENERIC_FP8}"


# ---- Sums ------------------------------------------------------------------------------------------------------


def sums(keys: int, mean: float, deviation: float, score: float = 1.0) -> tuple[Array, Array]:
    """Results of the kernel for Hopper, and those in float64, for values of a mean."""
    rng = np.random.default_rng(5)
    q, k, v = (
        rng.normal(at, by, shape).astype(np.float32).astype(ml_dtypes.float8_e4m3fn)
        for at, by, shape in ((0, 1, (64, 1, 192)), (0, 1, (keys, 1, 192)), (mean, deviation, (keys, 1, 128)))
    )
    options: dict[str, Any] = {"causal": False, "scale": score * 192**-0.5}
    with simulated(1):
        out, _ = flat(mla_cupy.mla_prefill)(q, k, v, **options, out_dtype="float32", kernel=HOPPER_FP8)
    return out, reference.mla_prefill(q, k, v, **options)[0]


LONG_SUMS = [(2048, 1.0, 0.5, 1.0), (1024, -1.0, 0.25, 1.0), (1024, 100.0, 1.0, 1.0), (1024, 1.0, 0.5, 2.0)]


@pytest.mark.parametrize(
    ("keys", "mean", "deviation", "score"),
    [(512, 1.0, 0.5, 1.0), *(pytest.param(*one, marks=pytest.mark.slow) for one in LONG_SUMS)],
)
def test_sums_do_not_shrink(keys: int, mean: float, deviation: float, score: float) -> None:
    """Values of one sign keep their size to 3e-4, and their root mean square error is at most 1e-3."""
    out, exact = sums(keys, mean, deviation, score)
    error = (out - exact) / exact
    assert abs(error.mean()) < 3e-4
    assert np.sqrt((error**2).mean()) < 1e-3


def test_equal_values_have_no_error() -> None:
    """Whatever their weights lose, the sum of weights loses, too."""
    out, exact = sums(200, 1.0, 0.0)
    np.testing.assert_allclose(exact, 1, rtol=1e-12)
    np.testing.assert_allclose(out, 1, rtol=1e-6)


# ---- Oracle ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", [CASES[3], CASES[4]], ids=lambda case: case.id)
def test_the_oracle_attends_to_the_codes_numbers(case: DenseCase) -> None:
    """Codes act like float64 numbers that are multiplied by their scales first."""
    inputs = make(case)
    options = {name: x for name, x in inputs.options.items() if not name.endswith("_scales")}
    starts = options["cu_seqlens_q"], options["cu_seqlens_kv"]

    def numbers(codes: Array, scales: str, of: int) -> Array:
        x, group = E4M3[codes.view(np.uint8)], codes.shape[1] // case.heads_kv
        for n, row in enumerate(inputs.options.get(scales, [])):
            x[starts[of][n] : starts[of][n + 1]] *= np.repeat(row, group)[:, None]
        return x

    queries, keys = numbers(inputs.q, "q_scales", 0), numbers(inputs.k, "k_scales", 1)
    values, rope = numbers(inputs.v, "v_scales", 1), E4M3[options.pop("k_rope").view(np.uint8)]
    keys = np.concatenate([keys, np.broadcast_to(rope.reshape(len(rope), -1, 64), (*keys.shape[:2], 64))], axis=2)
    for n, row in enumerate(inputs.options.get("k_scales", [])):
        keys[starts[1][n] : starts[1][n + 1], :, -64:] *= row[:, None]
    expected = reference.mla_prefill(queries, keys, values, **options)
    for mine, other in zip(inputs.exact, expected, strict=True):
        np.testing.assert_allclose(mine, other, rtol=1e-12, atol=1e-12)


def test_the_numpy_backend_rounds_the_oracle(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLA_CUPY_BACKEND", "numpy")
    inputs = make(ENDS)
    out, lse = flat(mla_cupy.mla_prefill)(*inputs.arguments, **inputs.options)
    np.testing.assert_array_equal(out, inputs.exact[0].astype(ml_dtypes.bfloat16))
    np.testing.assert_array_equal(lse, inputs.exact[1].astype(np.float32))


# ---- Refusals --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("case", "changes", "error", "match"),
    [
        (replace(ENDS, mask=0.5), {}, ArgumentError, f"mask: got an array, expected None for queries in {F8}; convert"),
        (
            replace(ENDS, dtype="uint8", state="float32"),
            {},
            ArgumentError,
            "state_out: got an array, expected None for queries in uint8; .*merge_states",
        ),
        (
            replace(ENDS, d_qk=256, d_v=256),
            {},
            ShapeError,
            r"got \(256, 256\), expected \(192, 128\) for queries in float8",
        ),
        (
            ENDS,
            {"k_scales": np.ones((3, 2), np.float32)},
            ShapeError,
            r"k_scales|b=2",
        ),
        (
            replace(ENDS, scales=""),
            {"v_scales": np.ones((1, 2), np.float32)},
            ShapeError,
            r"v_scales.shape\[0\]: got 1, expected b=2, as in cu_seqlens_q",
        ),
        (ENDS, {"q_scales": np.ones((2, 3), np.float32)}, ShapeError, "q_scales"),
        (ENDS, {"q_scales": np.ones((2, 2))}, DTypeError, "q_scales.dtype: got float64, expected float32"),
        (ENDS, {"out_dtype": F8}, DTypeError, f"out_dtype: got {F8}, expected bfloat16, float16 or float32"),
        (
            replace(ENDS, dtype="bfloat16", scales=""),
            {"v_scales": np.ones((2, 2), np.float32)},
            ArgumentError,
            "v_scales: got an array, expected None for queries in bfloat16; .*e4m3",
        ),
        (
            ENDS,
            {"k_scales": np.array([[1, 1], [1, -0.5]], np.float32), "check": True},
            ArgumentError,
            r"k_scales\[1, 1\]: got -0.5, expected a finite number, at least 0",
        ),
        (
            ENDS,
            {"q_scales": np.array([[1, np.nan], [1, 1]], np.float32), "check": True},
            ArgumentError,
            r"q_scales\[0, 1\]: got nan, expected a finite number, at least 0",
        ),
    ],
    ids=["mask", "state", "width", "sequences", "one-row", "heads", "dtype", "out", "bfloat16", "negative", "nan"],
)
def test_what_codes_cannot_have(
    case: DenseCase, changes: dict[str, Any], error: type[Exception], match: str, recorder: Recorder
) -> None:
    inputs = make(case)
    with pytest.raises(error, match=match):
        flat(mla_cupy.mla_prefill)(*inputs.arguments, **{**inputs.options, **changes})
    assert recorder.launches == []


def test_operands_of_one_dtype(recorder: Recorder) -> None:
    inputs = make(ENDS)
    with pytest.raises(DTypeError, match=f"v.dtype: got uint8, expected {F8}"):
        flat(mla_cupy.mla_prefill)(inputs.q, inputs.k, inputs.v.view(np.uint8), **inputs.options)
    assert recorder.launches == []


@pytest.mark.parametrize(("cc", "chosen"), [((9, 0), HOPPER_FP8), ((8, 0), GENERIC_FP8), ((10, 0), GENERIC_FP8)])
def test_choice(cc: tuple[int, int], chosen: str) -> None:
    device = replace(H200, cc=cc)
    problem = DenseProblem(5, 5, 2, 2, 192, 128, F8)
    assert DENSE.configure(problem, device).kernel.name == chosen
    assert DENSE.configure(replace(problem, aligned=False), device).kernel.name == GENERIC_FP8
    for kernel in (HOPPER, MMA, GENERIC):
        with pytest.raises(UnsupportedDeviceError, match=f"{kernel} reads queries, keys and values in 16 bits"):
            DENSE.configure(problem, device, kernel)
    half = replace(problem, dtype="bfloat16")
    for kernel in KERNELS:
        with pytest.raises(UnsupportedDeviceError, match=f"{kernel} reads queries, keys and values in e4m3"):
            DENSE.configure(half, device, kernel)
