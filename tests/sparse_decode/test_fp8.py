"""Sparse decode with products in FP8: the oracle, refusals, launches, the call in the simulator and on a GPU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest

import mla_cupy
from mla_cupy import ArgumentError, UnsupportedDeviceError, reference
from mla_cupy.kernels.sparse_decode import SPARSE_DECODE
from mla_cupy.kernels.sparse_decode.problem import SparseDecodeProblem
from mla_cupy.reference.fp8_queries import dequantised
from tests.sparse_decode.runs import SparseDecodeCase, make
from tests.support.flat import flat
from tests.support.gpu import fetch, upload
from tests.support.recorder import B200, H200, Recorder
from tests.support.sim_driver import simulated
from tests.support.sim_modes import MODES
from tests.support.tolerance import check

Array = npt.NDArray[Any]

KERNEL = "sparse_forward_sm90_fp8"
SCALE = 0.25
E4M3 = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float64)


def fp8(**changes: Any) -> SparseDecodeCase:
    return SparseDecodeCase(**{"record": "fp8", "h_q": 2, **changes})


CASES = (
    fp8(s_q=2, topk=70, lengths=True, sink=True, empty=True),  # one length for the queries of a sequence; no token
    fp8(b=1, topk=200, dtype="float16", page_size=1, sm_count=5, lse_base="2"),  # split
    fp8(b=1, h_q=66, topk=5, page_size=64, sm_count=1),  # two blocks of heads
    fp8(b=1, topk=0),
)


def inputs_of(case: SparseDecodeCase) -> dict[str, Any]:
    """A call whose indices step unevenly from sequence to sequence."""
    call = {**make(case), "math": "fp8", "kv_scale": SCALE, "lse_base": case.lse_base, "empty_lse": 7.0}
    whole = np.full((case.b, case.s_q + 1, 2 * case.topk + 1), 2, np.int32)
    whole[:, :-1, 1::2] = call["indices"]
    call["indices"] = whole[:, :-1, 1::2]
    return call


def same(x: Any) -> Any:
    return x


def compare(case: SparseDecodeCase, to: Callable[[Any], Any], back: Callable[[Any], Array]) -> None:
    """A call's results, in both dtypes, are as exact as the rounding oracle's."""
    call = inputs_of(case)
    exact = reference.sparse_mla_decode(**call)
    rounded = reference.sparse_mla_decode(**call, rounding=case.dtype)
    given = {name: to(x) if isinstance(x, np.ndarray) else x for name, x in call.items()}
    out_dtype = case.dtype if case.sink else "float32"
    out, lse = flat(mla_cupy.sparse_mla_decode)(**given, out_dtype=out_dtype)
    check((back(out), back(lse)), exact, rounded, out_dtype)


# ---- The oracle ------------------------------------------------------------------------------------------------


def test_the_oracle_attends_with_rounded_queries_to_scaled_codes() -> None:
    call = inputs_of(CASES[0])
    rows = (E4M3 * SCALE)[call["kv_cache"]].reshape(-1, 576)
    for i, s in np.ndindex(2, 2):
        entries = call["indices"][i, s][: np.clip(call["topk_length"][i], 0, 70)]
        entries = entries[(entries >= 0) & (entries < len(rows))]
        out, lse, _ = reference.sparse_mla_forward(
            dequantised(call["q"][i, s : s + 1]),
            rows,
            entries[None],
            scale=576**-0.5,
            attn_sink=call["attn_sink"],
            empty_lse=7.0,
        )
        mine = reference.sparse_mla_decode(**call)
        np.testing.assert_allclose(mine[0][i, s], out[0], rtol=1e-12)
        np.testing.assert_allclose(mine[1][i, s], lse[0], rtol=1e-12)


def test_the_numpy_backend_rounds_the_oracle(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLA_CUPY_BACKEND", "numpy")
    call = inputs_of(CASES[0])
    exact = reference.sparse_mla_decode(**call)
    out, lse = flat(mla_cupy.sparse_mla_decode)(**call)
    np.testing.assert_array_equal(out, exact[0].astype(out.dtype))
    np.testing.assert_array_equal(lse, exact[1].astype(np.float32))


# ---- Refusals and launches -------------------------------------------------------------------------------------


def test_the_product_of_scales_is_checked(recorder: Recorder) -> None:
    call = inputs_of(CASES[2])
    with pytest.raises(ArgumentError, match=r"scale \* fp8.kv_scale: got "):
        flat(mla_cupy.sparse_mla_decode)(**{**call, "scale": 1e-30, "kv_scale": 1e-30})
    with pytest.raises(ArgumentError, match=f"kernel: got .*, expected for fp8.math='fp8' one of {KERNEL}"):
        flat(mla_cupy.sparse_mla_decode)(**call, kernel="sparse_decode_generic")
    assert recorder.launches == []


@pytest.mark.parametrize("device", [B200, replace(H200, cc=(8, 0))], ids=["10.0", "8.0"])
def test_other_gpus_are_refused(device: Any) -> None:
    problem = SparseDecodeProblem(4, 16, 64, "bfloat16", "fp8", math="fp8")
    with pytest.raises(UnsupportedDeviceError, match=f"{KERNEL} needs compute capability 9.0"):
        SPARSE_DECODE.configure(problem, device)


def test_launches(recorder: Recorder) -> None:
    call = inputs_of(CASES[0])
    for times in (1, 2):
        flat(mla_cupy.sparse_mla_decode)(**{**call, "scale": 0.5})
        names = ["attention_row_lists", "attention_schedule", KERNEL, "attention_combine"]
        assert recorder.entries == names * times
    lists, launch = recorder.launches[0].params, recorder.launches[2].params
    assert (lists["s_q"], lists["topk"], lists["s_kv"], lists["queries_of_length"]) == (4, 70, 45, 2)
    assert launch["scale_log2"] == pytest.approx(0.5 * SCALE / np.log(2), rel=1e-6)
    assert launch["value_scale"] == SCALE
    assert (launch["num_pages"], launch["page_size"]) == (9, 5)
    least = 4 * 4 * 128  # lists of two tiles
    assert mla_cupy.workspace_bytes(flat(mla_cupy.sparse_mla_decode), **call) > least


# ---- In the simulator ------------------------------------------------------------------------------------------


@pytest.mark.one_in(8)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_equals_the_oracle(case: SparseDecodeCase) -> None:
    mode, seed = MODES[CASES.index(case) % len(MODES)]
    with simulated(case.sm_count, mode=mode, seed=seed) as target:
        compare(case, same, np.asarray)
    assert f"mla_{KERNEL}" in target.launched


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES, ids=str)
@pytest.mark.parametrize("case", [*CASES, fp8(b=3, s_q=3, h_q=35, topk=450, lengths=True)], ids=str)
def test_all_modes(case: SparseDecodeCase, mode: tuple[str, int]) -> None:
    for sm_count in (1, 3):
        with simulated(sm_count, mode=mode[0], seed=mode[1]):
            compare(case, same, np.asarray)


@pytest.mark.slow
def test_projected() -> None:
    """Results that are multiplied by W_UV where they would be merged, whole and in pieces."""
    rng = np.random.default_rng(2)
    for case in (CASES[0], CASES[1]):
        call = inputs_of(case)
        shape = (case.h_q, 128, 512)
        call["w_uv"] = (rng.standard_normal(shape, np.float32) / 20).astype(call["q"].dtype)
        exact = reference.sparse_mla_decode(**call)
        rounded = reference.sparse_mla_decode(**call, rounding=case.dtype)
        with simulated(case.sm_count):
            got = flat(mla_cupy.sparse_mla_decode)(**call, out_dtype="float32")
        check(got, exact, rounded, "float32")


# ---- On a GPU --------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("case", [*CASES, fp8(b=33, s_q=2, h_q=128, topk=700, page_size=64)], ids=str)
def test_on_a_gpu(hopper: object, case: SparseDecodeCase) -> None:
    compare(case, upload, fetch)
