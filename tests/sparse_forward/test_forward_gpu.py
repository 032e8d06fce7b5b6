"""The sparse forward on a GPU against the oracle, on hostile inputs: poisoned, ragged, non-contiguous."""

from __future__ import annotations

from dataclasses import replace

import pytest

from mla_cupy.runtime.device import DeviceInfo
from tests.support.kernels import in_both_sizes
from tests.support.sparse_cases import SparseCase, make
from tests.support.sparse_gpu import ALL_KERNELS, check_forward, forward, need, run_and_check
from tests.support.sparse_gpu_cases import CASES, DTYPES, ODD_STRIDES, without_heaviest

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
@pytest.mark.parametrize("kernel", in_both_sizes(ALL_KERNELS))
def test_matches_oracle(gpu: DeviceInfo, case: SparseCase, kernel: str) -> None:
    need(kernel, gpu, case)
    run_and_check(make(case), kernel=kernel)


@pytest.mark.parametrize("case", ODD_STRIDES, ids=lambda case: case.id)
def test_any_strides(gpu: DeviceInfo, case: SparseCase) -> None:
    """Strides that the fast kernels do not support run the generic one."""
    run_and_check(make(case))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("d_qk", [576, 512])
@pytest.mark.parametrize("h_q", [1, 16, 64, 128])
@pytest.mark.parametrize("kernel", in_both_sizes(ALL_KERNELS))
def test_tolerance_at_topk_2048(gpu: DeviceInfo, kernel: str, h_q: int, d_qk: int, dtype: str) -> None:
    """DeepSeek's number of rows."""
    case = SparseCase(s_q=24, s_kv=16_000, h_q=h_q, topk=2048, d_qk=d_qk, dtype=dtype, invalid=0.02)
    need(kernel, gpu, case)
    for seed in range(2):
        run_and_check(make(replace(case, seed=seed)), kernel=kernel)


def test_the_rule_has_teeth(gpu: DeviceInfo) -> None:
    """One row of 2048 left out, the heaviest of a query, is more than the rule allows."""
    inputs = make(SparseCase(s_q=8, s_kv=16_000, h_q=64, topk=2048, invalid=0.0))
    without = replace(inputs, indices=without_heaviest(inputs))
    with pytest.raises(AssertionError, match="allowed"):
        check_forward(forward(without), inputs.exact, inputs.rounded, inputs.case.dtype)
