"""The sparse operations on a GPU: host inputs there, results back, against the oracle."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy.typing as npt
import pytest

import mla_cupy
from mla_cupy.kernels.sparse_forward.problem import SparseForwardProblem
from mla_cupy.runtime.device import DeviceInfo
from tests.support.flat import flat
from tests.support.gpu import upload
from tests.support.kernels import FORWARD_KERNELS
from tests.support.sparse_cases import SparseCase, SparseInputs
from tests.support.tolerance import check_lse, check_out

Array = npt.NDArray[Any]
Forward = tuple[Array, Array, Array]

ALL_KERNELS = tuple(FORWARD_KERNELS)


def problem_of(case: SparseCase, **changes: Any) -> SparseForwardProblem:
    """Problem for the pipeline."""
    sizes = (case.s_q, case.s_kv, case.h_q, case.topk, case.d_qk, case.dtype)
    return replace(SparseForwardProblem(*sizes, aligned=case.strides != "odd"), **changes)


def need(kernel: str, device: DeviceInfo, case: SparseCase) -> None:
    """Skip where the kernel cannot run, or not this case."""
    reason = FORWARD_KERNELS[kernel].unsupported(problem_of(case), device)
    if reason:
        pytest.skip(f"{kernel} {reason}")


def uploaded(inputs: SparseInputs) -> tuple[list[Any], dict[str, Any]]:
    """The positional and the named arguments of `sparse_mla_forward` on the GPU, gaps and strides included."""
    named = {name: upload(x) for name, x in inputs.optional.items()}
    return [upload(x) for x in inputs.arguments], {**named, "scale": inputs.scale, "causal": inputs.case.causal}


def on_host(results: tuple[Any, ...]) -> Any:
    """CuPy results as NumPy arrays."""
    import cupy

    return tuple(cupy.asnumpy(x) for x in results)


def forward(inputs: SparseInputs, **options: Any) -> Forward:
    """The public call on the GPU."""
    arguments, named = uploaded(inputs)
    results: Forward = on_host(flat(mla_cupy.sparse_mla_forward)(*arguments, **{**named, **options}))
    return results


def check_forward(got: Forward, exact: Forward, rounded: Forward, dtype: str) -> None:
    """The tolerance rule for out, lse and max_logits."""
    check_out(got[0], exact[0], rounded[0], dtype)
    for name, result, wanted, budget in zip(("lse", "max_logits"), got[1:], exact[1:], rounded[1:], strict=True):
        try:
            check_lse(result, wanted, budget)
        except AssertionError as error:
            raise AssertionError(f"of {name}: {error}") from None


def run_and_check(inputs: SparseInputs, **options: Any) -> None:
    """The public call on the GPU against the oracle."""
    check_forward(forward(inputs, **options), inputs.exact, inputs.rounded, inputs.case.dtype)
