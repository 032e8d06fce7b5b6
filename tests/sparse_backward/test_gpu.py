"""The sparse backward on a GPU against the oracle, on hostile inputs: poisoned, ragged, non-contiguous."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

import mla_cupy
from mla_cupy import reference
from mla_cupy.runtime.device import DeviceInfo
from tests.support.flat import flat
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
from tests.support.kernels import in_both_sizes
from tests.support.sparse_cases import SparseCase, SparseInputs, make
from tests.support.sparse_gpu_cases import CASES, DTYPES, ODD_STRIDES, without_heaviest

pytestmark = pytest.mark.gpu

ALL = [*CASES, SparseCase(s_q=0, sink=True)]


@pytest.mark.parametrize("case", ALL, ids=lambda case: case.id)
@pytest.mark.parametrize("kernel", in_both_sizes(ALL_KERNELS))
def test_matches_oracle(gpu: DeviceInfo, case: SparseCase, kernel: str) -> None:
    need(kernel, gpu, case)
    run_and_check(make(case), kernel=kernel)


@pytest.mark.parametrize("case", ALL[::3], ids=lambda case: case.id)
@pytest.mark.parametrize("kernel", in_both_sizes(ALL_KERNELS))
@pytest.mark.parametrize("dkv_dtype", [None, "float32"])
def test_deterministic_matches_oracle(gpu: DeviceInfo, case: SparseCase, kernel: str, dkv_dtype: str | None) -> None:
    need(kernel, gpu, case, deterministic=True)
    run_and_check(make(case), kernel=kernel, deterministic=True, dkv_dtype=dkv_dtype)


@pytest.mark.parametrize("case", ODD_STRIDES, ids=lambda case: case.id)
@pytest.mark.parametrize("deterministic", [False, True])
def test_any_strides(gpu: DeviceInfo, case: SparseCase, deterministic: bool) -> None:
    """Strides that the fast kernels do not support run the generic one."""
    run_and_check(make(case), deterministic=deterministic)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("d_qk", [576, 512])
@pytest.mark.parametrize("h_q", [1, 16, 32, 64, 128])
@pytest.mark.parametrize("kernel", in_both_sizes(ALL_KERNELS))
def test_tolerance_at_topk_2048(gpu: DeviceInfo, kernel: str, h_q: int, d_qk: int, dtype: str) -> None:
    """DeepSeek's number of rows; few enough of them in kv that many queries add to each."""
    case = SparseCase(s_q=12, s_kv=4000, h_q=h_q, topk=2048, d_qk=d_qk, dtype=dtype, invalid=0.02, sink=d_qk == 512)
    need(kernel, gpu, case)
    inputs = make(case)
    for dkv_dtype in (None, "float32"):
        run_and_check(inputs, kernel=kernel, dkv_dtype=dkv_dtype)
    if not reason_against(kernel, gpu, case, deterministic=True):
        run_and_check(inputs, kernel=kernel, dkv_dtype="float32", deterministic=True)


@pytest.mark.parametrize("kernel", in_both_sizes(ALL_KERNELS))
def test_the_forward_s_own_results_go_in(gpu: DeviceInfo, kernel: str) -> None:
    """Not the oracle's: what a training step does."""
    case = SparseCase(s_q=20, h_q=64, topk=200, s_kv=500, sink=True, lengths=True)
    need(kernel, gpu, case)
    inputs = make(case)
    (q, kv, _, dout, _, indices), named = uploaded(inputs)
    out, lse, _ = flat(mla_cupy.sparse_mla_forward)(q, kv, indices, **named)
    got = on_host(flat(mla_cupy.sparse_mla_backward)(q, kv, out, dout, lse, indices, **named, kernel=kernel))
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
    good = backward(inputs, deterministic=deterministic)
    spoiled = remembering(replace(inputs, indices=without_heaviest(inputs)), out=inputs.out, lse=inputs.lse)
    bad = backward(spoiled, deterministic=deterministic)
    check_gradients(good, inputs, deterministic=deterministic)
    for mixed in ([bad[0], good[1], None], [good[0], bad[1], None]):
        with pytest.raises(AssertionError, match="allowed"):
            check_gradients(mixed, inputs, deterministic=deterministic)


def remembering(inputs: SparseInputs, **known: Any) -> SparseInputs:
    """Inputs with cached oracle results."""
    changed = replace(inputs)
    changed.__dict__.update(known)
    return changed
