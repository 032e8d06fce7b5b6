"""The gradients of sparse attention: the tolerance rule for each of the three, and the public call on a GPU."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import mla_cupy
from mla_cupy.kernels.exact_sums.launches import NUM_BINS
from mla_cupy.kernels.sparse_backward.problem import SparseBackwardProblem
from mla_cupy.kernels.spec import Reason
from mla_cupy.runtime.device import DeviceInfo
from tests.support.flat import flat
from tests.support.gpu import upload
from tests.support.kernels import BACKWARD_KERNELS
from tests.support.sparse_cases import Array, SparseCase, SparseInputs
from tests.support.tolerance import check_out

#: float32 sums in another order, in units of the largest gradient of a sink.
SINK_ERROR = 2e-5
#: Smallest share of a gradient's terms that is left if they do not count as cancelled.
CANCELLED = 2.0**-5
#: Tensor cores cut off bits at each step: dP and delta, which nearly cancel where a query has one key, may err by 128
#: units in the last place of such terms.
BUDGET = 128 * 2.0**-23 / CANCELLED
#: Between the levels of deterministic sums: `kLevelBits`.
LEVEL_BITS = 4
ALL_KERNELS = tuple(BACKWARD_KERNELS)


def check_gradients(
    got: Sequence[Any], inputs: SparseInputs, dkv_dtype: str | None = None, deterministic: bool = False
) -> None:
    """Assert the rule for (dq, dkv, d_sink)."""
    exact, rounded = inputs.exact_gradients, inputs.rounded_gradients
    dtype = inputs.case.dtype
    terms_of_dq, terms_of_dkv = (CANCELLED * x for x in terms(inputs))
    check_out(got[0], exact[0], rounded[0], dtype, budget=BUDGET, least_unit=terms_of_dq, name="dq")
    budget, angle = BUDGET, 0.0
    if deterministic:
        angle = error_of_exact_additions(inputs)
        budget = max(BUDGET, angle)
        terms_of_dkv = np.maximum(terms_of_dkv, least_of_exact_additions(inputs) / budget)
    check_out(
        got[1], exact[1], rounded[1], dkv_dtype or dtype,
        budget=budget, least_unit=terms_of_dkv, direction=angle, name="dkv",
    )  # fmt: skip
    if inputs.attn_sink is None:
        assert got[2] is None
        return
    assert exact[2] is not None
    unit = np.abs(np.where(np.isfinite(exact[2]), exact[2], 0)).max()
    np.testing.assert_allclose(got[2], exact[2], rtol=SINK_ERROR, atol=SINK_ERROR * unit)


def error_of_exact_additions(inputs: SparseInputs) -> float:
    """Largest relative rounding of a number, if 8 heads at a time are added: `exact_addition.cuh`."""
    return 2.0 ** (LEVEL_BITS - 1 - bits_of_exact_additions(inputs))


def least_of_exact_additions(inputs: SparseInputs) -> float:
    """Largest error of a sum of numbers so small that all are rounded to the finest level's quantum."""
    largest = 0.0
    scale = inputs.case.d_qk**-0.5
    q, kv, out, dout = (x.astype(np.float64) for x in (inputs.q, inputs.kv, inputs.out, inputs.dout))
    with np.errstate(all="ignore"):
        lengths = np.linalg.norm(kv.reshape(-1, inputs.case.d_qk)[:, :512], axis=-1)
        delta = np.abs((out * dout).sum(axis=-1)) + (0 if inputs.dlse is None else np.abs(inputs.dlse))
        for i, rows in enumerate(inputs.rows):
            longest = np.nan_to_num(lengths[rows], nan=0, posinf=0).max(initial=0)
            d_scores = np.linalg.norm(dout[i], axis=-1) * longest + delta[i]
            bounds = np.abs(dout[i]).max(axis=-1) + scale * d_scores * np.abs(q[i]).max(axis=-1)
            largest = max(largest, bounds[np.isfinite(bounds) & np.isfinite(inputs.lse[i])].sum())
    if largest == 0:
        return 0.0
    bits = bits_of_exact_additions(inputs)
    finest = LEVEL_BITS * (NUM_BINS - 1)
    quantum = 2.0 ** (math.ceil(math.log2(largest)) - finest - bits)
    return 2.0 ** (23 - bits) * quantum / 2


def bits_of_exact_additions(inputs: SparseInputs) -> int:
    """Bits of a number that are kept at most, so that float32 holds the sum of all numbers that one row gets."""
    selected = np.concatenate([np.zeros(0, np.int64), *inputs.rows])
    numbers = np.bincount(selected, minlength=1).max() * -(-inputs.case.h_q // 8)
    return 23 - math.ceil(math.log2(max(2, numbers)))


def terms(inputs: SparseInputs) -> tuple[Array, Array]:
    """Size of the rows of dq and dkv without cancellation; the last axis has one element."""
    working = np.float32
    scale = working(inputs.case.d_qk**-0.5)
    delta = np.abs((inputs.out.astype(working) * inputs.dout.astype(working)).sum(axis=-1))
    sink = np.full(inputs.case.h_q, -np.inf) if inputs.attn_sink is None else inputs.attn_sink
    total = np.where(np.isinf(inputs.lse), np.inf, np.logaddexp(inputs.lse, sink)).astype(working)
    if inputs.dlse is not None:
        share = np.where(np.isinf(total), 0, np.exp(np.minimum(total - inputs.lse, 60)))
        delta += np.abs(inputs.dlse) * share
    kv = inputs.kv.reshape(-1, inputs.case.d_qk)
    of_dq, of_dkv = np.zeros(inputs.q.shape, working), np.zeros(kv.shape, working)
    with np.errstate(all="ignore"):
        for i, rows in enumerate(inputs.rows):
            keys, queries, dout = (x.astype(working) for x in (kv[rows], inputs.q[i], inputs.dout[i]))
            weights = np.exp(scale * (queries @ keys.T) - total[i][:, None])
            d_scores = scale * weights * (np.abs(dout @ keys[:, :512].T) + delta[i][:, None])
            of_dq[i] = d_scores @ np.abs(keys)
            d_keys = d_scores.T @ np.abs(queries)
            d_keys[:, :512] += weights.T @ np.abs(dout)
            np.add.at(of_dkv, rows, d_keys)
    # Non-finite rows are not compared.
    both = (of_dq, of_dkv.reshape(inputs.kv.shape))
    return tuple(np.nan_to_num(x, nan=0, posinf=0).max(axis=-1, keepdims=True) for x in both)


def problem_of(case: SparseCase, **changes: Any) -> SparseBackwardProblem:
    """Problem for the pipeline."""
    sizes = (case.s_q, case.s_kv, case.h_q, case.topk, case.d_qk, case.dtype)
    return replace(SparseBackwardProblem(*sizes, case.sink, aligned=case.strides != "odd"), **changes)


def reason_against(kernel: str, device: DeviceInfo, case: SparseCase, deterministic: bool = False) -> Reason | None:
    """Reason why the main kernel cannot run there, or not this case; None if it can."""
    return BACKWARD_KERNELS[kernel].unsupported(problem_of(case, deterministic=deterministic), device)


def need(kernel: str, device: DeviceInfo, case: SparseCase, deterministic: bool = False) -> None:
    """Skip where the main kernel cannot run, or not this case."""
    reason = reason_against(kernel, device, case, deterministic)
    if reason:
        pytest.skip(f"{kernel} {reason}")


def uploaded(inputs: SparseInputs) -> tuple[list[Any], dict[str, Any]]:
    """The positional and the named arguments of `sparse_mla_backward` on the GPU, gaps and strides included."""
    named = {name: upload(x) if isinstance(x, np.ndarray) else x for name, x in inputs.backward_options.items()}
    return [upload(x) for x in inputs.backward_arguments], named


def on_host(results: Sequence[Any]) -> list[Any]:
    """CuPy results as NumPy arrays."""
    import cupy

    return [None if x is None else cupy.asnumpy(x) for x in results]


def backward(inputs: SparseInputs, **options: Any) -> list[Any]:
    """The public call on the GPU."""
    arguments, named = uploaded(inputs)
    return on_host(flat(mla_cupy.sparse_mla_backward)(*arguments, **{**named, **options}))


def run_and_check(inputs: SparseInputs, **options: Any) -> None:
    """The public call on the GPU against the oracle."""
    got = backward(inputs, **options)
    check_gradients(got, inputs, options.get("dkv_dtype"), options.get("deterministic", False))
