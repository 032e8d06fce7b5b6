"""Check of gradients: samples of each against the float64 oracle, over all queries that see a key."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from mla_cupy import reference
from mla_cupy.dtypes import round_to

from ...core.device import Device
from ...core.errors import BenchError
from ...core.samples import Sample, tolerance
from ...core.tolerance import spaced
from ..prefill import check as forward
from ..prefill.cases import D_ROPE
from ..prefill.inputs import PrefillOutputs
from .cases import PrefillBackwardCase
from .inputs import GradientInputs

Array = npt.NDArray[Any]
QUERIES, KEYS = 3, 3
CANCELLED = 4 * 2.0**-23
"""Error that dP - delta may have, as a share of the magnitudes of what is added up: four float32 units."""


def expect(case: PrefillBackwardCase, dtype: str, inputs: GradientInputs, device: Device) -> list[Sample]:
    """dq of a few queries and heads, dk and dv of a few keys and heads, dk_rope of a few keys.

    Before that, whether `out` and `lse` are correct.
    """
    expected = forward.expect(case, dtype, inputs, device)
    verdict = forward.judge(expected, PrefillOutputs(inputs.out, inputs.lse), dtype, device)
    if not verdict.ok:
        raise BenchError(f"the forward that gives the backward its out and lse is wrong: {verdict.reason}")
    return [*_of_queries(case, dtype, inputs, device), *_of_keys(case, dtype, inputs, device)]


def _of_queries(case: PrefillBackwardCase, dtype: str, inputs: GradientInputs, device: Device) -> Iterator[Sample]:
    batch, width = case.b - 1, case.d_qk - D_ROPE
    for head in spaced(case.h_q).tolist():
        kv = device.to_host(inputs.kv[_keys(case, batch), head * case.heads_kv // case.h_q])[:, None]
        k_rope = device.to_host(inputs.k_rope[_keys(case, batch)])
        for i in spaced(case.s_q, QUERIES).tolist():
            query = batch * case.s_q + i
            seen = max(0, case.s_kv - (case.s_q - 1 - i)) if case.causal else case.s_kv
            at = slice(query, query + 1), slice(head, head + 1)
            q, out, dout, lse = (device.to_host(x[at]) for x in (inputs.q, inputs.out, inputs.dout, inputs.lse))
            arguments = q, kv[:seen, :, :width], kv[:seen, :, width:], out, dout, lse
            options: dict[str, Any] = {"k_rope": k_rope[:seen], "causal": False, "scale": case.scale}
            want = reference.mla_prefill_backward(*arguments, **options)[0]
            near = reference.mla_prefill_backward(*arguments, **options, rounding=dtype)[0]
            # If no product of dP and delta had a sign: how much may cancel.
            sizes = (np.abs(x.astype(np.float64)) for x in (out, dout, kv[:seen, :, width:]))
            yield _sample("dq", (query, head), want[0, 0], near[0, 0], dtype, CANCELLED * _largest(*sizes))


def _largest(out: Array, dout: Array, values: Array) -> float:
    """The largest magnitude of dP - delta, if nothing in them cancelled."""
    delta = float((out * dout).sum())
    return delta + float((values[:, 0] @ dout[0, 0]).max(initial=0.0))


Both = tuple[Array, Array]
"""A number exactly, and with the kernels' roundings."""


def _of_keys(case: PrefillBackwardCase, dtype: str, inputs: GradientInputs, device: Device) -> Iterator[Sample]:
    """The first key, which all see, one in the middle, and the last, which one query sees."""
    group, width = case.h_q // case.heads_kv, case.d_qk - D_ROPE
    for j in spaced(case.s_kv, KEYS).tolist():
        for kv_head in spaced(case.heads_kv).tolist():
            dk, dv = _of_heads(case, dtype, inputs, device, j, range(kv_head * group, (kv_head + 1) * group))
            yield _sample("dk", (j, kv_head), dk[0][:width], dk[1][:width], dtype)
            yield _sample("dv", (j, kv_head), *dv, dtype)
    # All heads, hence of keys that few queries see.
    for j in sorted({case.s_kv - 1, max(0, case.s_kv - 1 - case.s_q // 16)}):
        dk, _ = _of_heads(case, dtype, inputs, device, j, range(case.h_q))
        yield _sample("dk_rope", (j,), dk[0][width:], dk[1][width:], dtype)


def _of_heads(
    case: PrefillBackwardCase, dtype: str, inputs: GradientInputs, device: Device, key: int, heads: range
) -> tuple[Both, Both]:
    """dk and dv of a key, summed over query heads."""
    made = [_pair(case, dtype, inputs, device, key, head) for head in heads]
    dk, near_dk, dv, near_dv = (np.sum([one[which][at] for one in made], axis=0) for which in (0, 1) for at in (0, 1))
    return (dk, near_dk), (dv, near_dv)


def _pair(
    case: PrefillBackwardCase, dtype: str, inputs: GradientInputs, device: Device, key: int, head: int
) -> tuple[Both, Both]:
    """Gradients of a key of the first sequence, and of its value, by one head: exact, and with roundings."""
    first = max(0, key - (case.s_kv - case.s_q)) if case.causal else 0
    rows, kv_head = slice(first, case.s_q), head * case.heads_kv // case.h_q
    arrays = (inputs.q, inputs.out, inputs.dout, inputs.lse)
    q, out, dout, lse = (device.to_host(x[rows, head]).astype(np.float64) for x in arrays)
    kv = device.to_host(inputs.kv[key, kv_head]).astype(np.float64)
    width = case.d_qk - D_ROPE
    row = np.concatenate([kv[:width], device.to_host(inputs.k_rope[key]).astype(np.float64)])
    weights = np.exp(case.scale * (q @ row) - lse)
    d_scores = case.scale * weights * (dout @ kv[width:] - (out * dout).sum(axis=-1))
    near = round_to(weights, dtype), round_to(d_scores, dtype)
    return (d_scores @ q, near[1] @ q), (weights @ dout, near[0] @ dout)


def _sample(output: str, at: tuple[int, ...], want: Array, near: Array, dtype: str, cancelled: float = 0.0) -> Sample:
    near = near.astype(np.dtype(dtype)).astype(np.float64)
    return Sample(output, at, want, tolerance(output, want, near, dtype) + cancelled)


def _keys(case: PrefillBackwardCase, batch: int) -> slice:
    return slice(batch * case.s_kv, (batch + 1) * case.s_kv)
