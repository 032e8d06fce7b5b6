"""The sparse forward with products in FP8: the oracle, refusals, the kernel in the simulator, bugs planted in it."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest

import mla_cupy
from mla_cupy import ArgumentError, UnsupportedDeviceError, reference
from mla_cupy.kernels.sparse_forward import SPARSE_FORWARD
from mla_cupy.kernels.sparse_forward.problem import SparseForwardProblem
from mla_cupy.reference.fp8_queries import dequantised
from mla_cupy.reference.sparse import selected_rows
from tests.sparse_forward.test_forward_records import RecordCase, RecordInputs, Results, make
from tests.support.flat import flat
from tests.support.gpu import fetch, upload
from tests.support.mutant_suite import mutant_suite
from tests.support.mutants import Mutant
from tests.support.recorder import B200, H200, Recorder
from tests.support.sim_driver import simulated
from tests.support.sim_modes import MODES
from tests.support.sparse_cases import SparseCase
from tests.support.tolerance import check, check_lse

Array = npt.NDArray[Any]

KERNEL = "sparse_forward_sm90_fp8"
SCALE = 0.25


def fp8(page_size: int = 5, **changes: Any) -> RecordCase:
    return RecordCase(SparseCase(**changes), "fp8", page_size)


CASES = (
    fp8(s_q=2, h_q=3, topk=130, lengths=True, sink=True),
    fp8(s_q=2, h_q=66, topk=65, dtype="float16", page_size=0),  # two blocks of heads
    fp8(s_q=6, h_q=3, topk=70, sequences=((2, 90), (0, 5), (3, 80)), causal=True, page_size=4),
    fp8(s_q=3, h_q=4, topk=40, invalid=1.0, sink=True),  # nothing to attend to
    fp8(s_q=1, h_q=5, topk=450, strides="odd", page_size=1),  # more tiles than stages
)


def inputs_of(case: RecordCase) -> RecordInputs:
    inputs = make(case)
    return replace(inputs, options={**inputs.options, "math": "fp8", "kv_scale": SCALE})


def rounded(inputs: RecordInputs) -> Results:
    dtype = inputs.case.of.dtype
    return reference.sparse_mla_forward(*inputs.arguments, **inputs.options, rounding=dtype, out_dtype=dtype)


def check_all(got: Results, inputs: RecordInputs) -> None:
    exact, own = inputs.exact, rounded(inputs)
    check(got[:2], exact[:2], own[:2], inputs.case.of.dtype)
    check_lse(got[2], exact[2], own[2])


def run(inputs: RecordInputs, sm_count: int, mode: tuple[str, int], **options: Any) -> Results:
    with simulated(sm_count, mode=mode[0], seed=mode[1]) as target:
        got: Results = flat(mla_cupy.sparse_mla_forward)(*inputs.arguments, **{**inputs.options, **options})
    assert f"mla_{KERNEL}" in target.launched
    return got


# ---- The oracle ------------------------------------------------------------------------------------------------


def test_the_oracle_attends_with_rounded_queries_to_scaled_codes() -> None:
    inputs = inputs_of(CASES[0])
    numbers = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float64) * SCALE
    rows = numbers[inputs.kv].reshape(-1, 576)
    options = {name: x for name, x in inputs.options.items() if name not in ("math", "kv_scale")}
    expected = reference.sparse_mla_forward(dequantised(inputs.q), rows, inputs.indices, **options)
    for mine, other in zip(inputs.exact, expected, strict=True):
        np.testing.assert_array_equal(mine, other)


def test_the_numpy_backend_rounds_the_oracle(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLA_CUPY_BACKEND", "numpy")
    inputs = inputs_of(CASES[0])
    out, lse, _ = flat(mla_cupy.sparse_mla_forward)(*inputs.arguments, **inputs.options)
    np.testing.assert_array_equal(out, inputs.exact[0].astype(out.dtype))
    np.testing.assert_array_equal(lse, inputs.exact[1].astype(np.float32))


# ---- Refusals and launches -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("record", "options", "match"),
    [
        (
            "fp8",
            {"math": "exact"},
            r"fp8.math: got 'exact', expected \"fp8\" for the format fp8; or read .* cache_g",
        ),
        ("v32", {}, r"fp8.math: got 'fp8', expected \"exact\" for the format v32"),
        ("v32", {"math": "exact", "kv_scale": 0.5}, "fp8.kv_scale: got 0.5, expected 1 for the format v32; its tokens"),
        ("fp8", {"scale": 1e-30, "kv_scale": 1e-30}, r"scale \* fp8.kv_scale: got "),
        ("fp8", {"kernel": "sparse_forward_sm90"}, f"kernel: got .*, expected for fp8.math='fp8' one of {KERNEL}"),
    ],
)
def test_refusals(record: str, options: dict[str, Any], match: str, recorder: Recorder) -> None:
    inputs = make(RecordCase(SparseCase(s_q=1, h_q=2, topk=5), record))
    with pytest.raises(ArgumentError, match=match):
        flat(mla_cupy.sparse_mla_forward)(*inputs.arguments, **{"scale": 0.04, "math": "fp8", **options})
    assert recorder.launches == []


@pytest.mark.parametrize("device", [B200, replace(H200, cc=(8, 0))], ids=["10.0", "8.0"])
def test_other_gpus_are_refused(device: Any) -> None:
    problem = SparseForwardProblem(4, 100, 16, 64, 576, "bfloat16", record="fp8", math="fp8")
    with pytest.raises(UnsupportedDeviceError, match=f"{KERNEL} needs compute capability 9.0"):
        SPARSE_FORWARD.configure(problem, device)


def test_many_gathers_are_not_converted_first() -> None:
    problem = SparseForwardProblem(4096, 100, 16, 64, 576, "bfloat16", record="fp8", math="fp8")
    config = SPARSE_FORWARD.configure(problem, H200)
    assert (config.kernel.name, config.converted) == (KERNEL, "")


def test_a_launch(recorder: Recorder) -> None:
    """The scale of keys and values, and the strides of pages."""
    inputs = inputs_of(CASES[0])
    flat(mla_cupy.sparse_mla_forward)(*inputs.arguments, **{**inputs.options, "scale": 0.5})
    (launch,) = [launch for launch in recorder.launches if launch.entry == f"mla_{KERNEL}"]
    assert launch.params["scale_log2"] == pytest.approx(0.5 * SCALE / np.log(2), rel=1e-6)
    assert launch.params["value_scale"] == SCALE
    assert (launch.params["num_pages"], launch.params["page_size"]) == inputs.kv.shape[:2]


# ---- The kernel in the simulator -------------------------------------------------------------------------------


@pytest.mark.one_in(8)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_kernel(case: RecordCase) -> None:
    inputs, number = inputs_of(case), CASES.index(case)
    check_all(run(inputs, (1, 3)[number % 2], MODES[number % len(MODES)]), inputs)


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES, ids=str)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_kernel_in_all_modes(case: RecordCase, mode: tuple[str, int]) -> None:
    inputs = inputs_of(case)
    for sm_count in (1, 3, 5):
        check_all(run(inputs, sm_count, mode), inputs)


def test_nan_stays_with_the_queries_that_select_it() -> None:
    """NaN in a latent and in the RoPE part; the largest score of such a query is NaN, too."""
    inputs = inputs_of(fp8(s_q=3, h_q=2, topk=70, invalid=0.0))
    row = next(rows[0] for rows in selected_rows(inputs.indices, inputs.case.of.s_kv) if len(rows))
    inputs.kv[row // 5, row % 5, [3, 570]] = 0x7F
    sees = (inputs.indices == row).any(axis=1)
    out, lse, top = run(inputs, 1, ("late", 0))
    assert sees.tolist() != [True] * 3
    for got in (out, lse, top):
        bad = np.isnan(got.astype(np.float32)).reshape(len(sees), -1)
        assert bad[sees].all()
        assert not bad[~sees].any()


# ---- On a GPU --------------------------------------------------------------------------------------------------


def compare(case: RecordCase) -> None:
    inputs = inputs_of(case)
    arrays = {name: upload(x) if isinstance(x, np.ndarray) else x for name, x in inputs.options.items()}
    out, lse, top = map(fetch, flat(mla_cupy.sparse_mla_forward)(*map(upload, inputs.arguments), **arrays))
    check_all((out, lse, top), inputs)


@pytest.mark.gpu
@pytest.mark.parametrize("case", [*CASES, fp8(s_q=40, h_q=128, s_kv=2000, topk=700)], ids=lambda case: case.id)
def test_kernel_on_a_gpu(hopper: object, case: RecordCase) -> None:
    compare(case)


# ---- Planted bugs ----------------------------------------------------------------------------------------------


def run_and_check(inputs: RecordInputs, mode: tuple[str, int]) -> None:
    check_all(run(inputs, 1, mode), inputs)


TEXTS = [
    Mutant(
        "the last tile's maximum",
        "attention/sm90/fp8_math.cuh",
        "fmaxf(quad_state[r], tops[r]) : moved",
        "tops[r] : moved",
    ),
]
PLANTED_IN = inputs_of(fp8(s_q=2, h_q=3, topk=300, lengths=True, sink=True))
test_is_caught, test_as_it_is = mutant_suite(
    KERNEL,
    [partial(run_and_check, PLANTED_IN, mode) for mode in (("late", 0), ("early", 0), ("random", 1))],
    {
        "bar.sync": (6, [0, 3]),
        "mbarrier.try_wait": (10, [0, 5]),
        "mbarrier.arrive": (8, [0]),
        "fence.proxy": (5, [2]),
        "cp.async.mbarrier": (1, [0]),
        "wgmma.fence": (19, [0]),
        "wgmma.wait_group": (17, [0]),
    },
    TEXTS,
)
