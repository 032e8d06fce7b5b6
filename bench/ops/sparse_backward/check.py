"""Check of gradients: dq of some queries, dkv of some rows summed over every query that selects them.

A row of kv that no query selects must have a gradient of exactly 0.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from mla_cupy import reference

from ...core.device import Device
from ...core.errors import BenchError
from ...core.samples import Sample, judge, samples
from ..sparse.check import expect_forward, sampled_queries
from ..sparse.inputs import SparseOutputs
from .cases import SparseBackwardCase
from .inputs import GradientInputs

Array = npt.NDArray[Any]
CANCELLED = 4 * 2.0**-23
"""Error that dP - delta may have, as a share of the magnitudes of what is added up: four float32 units.

Both are float32 sums of 512 products. Tensor cores cut off bits at each step, and delta is added up in another order.
"""
CHUNK = 256  # queries whose gradients with respect to one row of kv are computed at a time


def expect(case: SparseBackwardCase, dtype: str, inputs: GradientInputs, device: Device) -> list[Sample]:
    """The oracle's dq of a few queries and dkv of a few rows; before that, whether `out` and `lse` are correct."""
    forward = expect_forward(case, dtype, inputs, device)
    verdict = judge(forward, SparseOutputs(inputs.out, inputs.lse, None), dtype, device)
    if not verdict.ok:
        raise BenchError(f"the forward that gives the backward its out and lse is wrong: {verdict.reason}")
    return [*_expect_dq(case, dtype, inputs, device), *_expect_dkv(case, dtype, inputs, device)]


def _expect_dq(case: SparseBackwardCase, dtype: str, inputs: GradientInputs, device: Device) -> list[Sample]:
    queries = sampled_queries(case)
    arguments = _arguments(inputs, device.to_host(inputs.kv), queries, inputs.host_indices[queries], device)
    want, *_ = reference.sparse_mla_backward(*arguments, scale=case.scale)
    near, *_ = reference.sparse_mla_backward(*arguments, scale=case.scale, rounding=dtype)
    return samples("dq", queries, want, near, dtype, CANCELLED * _magnitudes(*arguments, scale=case.scale))


def _magnitudes(
    q: Array, kv: Array, out: Array, dout: Array, lse: Array, indices: Array, *, scale: float
) -> npt.NDArray[np.float64]:
    """The largest element of each query's dq if no product of dP and delta had a sign: how much may cancel.

    With a single key, P is 1, dP equals delta, and dq is 0, whatever the size of the two.
    """
    queries, d_out = q.astype(np.float64), np.abs(dout.astype(np.float64))
    delta = (np.abs(out.astype(np.float64)) * d_out).sum(axis=-1)
    largest = np.zeros(len(q))
    for i, selected in enumerate(indices):
        keys = kv[selected[selected >= 0]].astype(np.float64)
        weights = np.exp(scale * (queries[i] @ keys.T) - lse[i].astype(np.float64)[:, None])
        d_weights = d_out[i] @ np.abs(keys[:, : d_out.shape[-1]]).T + delta[i][:, None]
        largest[i] = (scale * (weights * d_weights) @ np.abs(keys)).max(initial=0.0)
    return largest


def _expect_dkv(case: SparseBackwardCase, dtype: str, inputs: GradientInputs, device: Device) -> list[Sample]:
    rows = _sampled_rows(case)
    sums = [_gradient_of_row(case, dtype, inputs, row, device) for row in rows]
    want, near = (np.stack(values) for values in zip(*sums, strict=True))
    return samples("dkv", rows, want, near.astype(np.dtype(dtype)).astype(np.float64), dtype)


def _gradient_of_row(
    case: SparseBackwardCase, dtype: str, inputs: GradientInputs, row: int, device: Device
) -> tuple[Array, Array]:
    """Without and with the kernels' roundings, as if the row were the only one of kv: lse is given, so it may be."""
    key = device.take(inputs.kv, np.array([row]))
    (queries,) = np.nonzero((inputs.host_indices == row).any(axis=1))
    want, near = np.zeros(case.d_qk), np.zeros(case.d_qk)
    for start in range(0, len(queries), CHUNK):
        some = queries[start : start + CHUNK]
        arguments = _arguments(inputs, key, some, np.zeros((len(some), 1), np.int32), device)
        _, dkv, *_ = reference.sparse_mla_backward(*arguments, scale=case.scale)
        _, rounded, *_ = reference.sparse_mla_backward(
            *arguments, scale=case.scale, rounding=dtype, dkv_dtype="float32"
        )
        want += dkv[0]
        near += rounded[0]
    return want, near


def _sampled_rows(case: SparseBackwardCase) -> list[int]:
    """The first, one in the middle, one near the end that few queries can see, and the last, which one can see."""
    return sorted({0, case.s_kv // 2, max(0, case.s_kv - 1 - case.s_q // 16), case.s_kv - 1})


def _arguments(
    inputs: GradientInputs, kv: Array, queries: npt.NDArray[np.int64], indices: Array, device: Device
) -> tuple[Array, ...]:
    q, out, dout, lse = (device.take(array, queries) for array in (inputs.q, inputs.out, inputs.dout, inputs.lse))
    return q, kv, out, dout, lse, indices
