"""Check of a result: some heads of some sequences against the float64 oracle; the rest is finite.

Where an indexer selects, tokens with nearly the same logits may be on either side of the cut, and lists of V4 are drawn
from caches that every call changes: there only finiteness is checked. The tests of the operations do the rest.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from mla_cupy import reference
from mla_cupy.dtypes import numpy_dtype, round_to

from ...core.device import Device
from ...core.tolerance import SampledVerdict, distance, epsilon, spaced
from .cases import D_ROPE, LayerCase
from .inputs import LayerInputs, LayerOutputs

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class Expected:
    """The correct values of one sequence and head, and what roundings in between may change."""

    sequence: int
    head: int
    exact: Array
    error: float


def expect(case: LayerCase, dtype: str, inputs: LayerInputs, device: Device) -> list[Expected]:
    """The oracle's values for a few sequences and heads; none where something was selected."""
    if case.model.record:
        return []
    found = []
    for sequence in spaced(case.b, 2).tolist():
        pages = _with_the_new_token(case, inputs, sequence, device)
        for head in spaced(case.h_q, 2).tolist():
            exact, rounded = (_expected(case, inputs, device, sequence, head, pages, x) for x in (None, dtype))
            found.append(Expected(sequence, head, exact, distance(rounded, exact)))
    return found


def _tables(inputs: LayerInputs, sequence: int, device: Device) -> dict[str, Any]:
    tables = {"cos": device.to_host(inputs.cos), "sin": device.to_host(inputs.sin)}
    return {**tables, "positions": device.to_host(inputs.positions[sequence : sequence + 1])}


def _with_the_new_token(case: LayerCase, inputs: LayerInputs, sequence: int, device: Device) -> Array:
    """The sequence's pages on the host, after the append."""
    pages: Array = device.take(inputs.cache, inputs.host_table[sequence]).copy()
    one = slice(sequence, sequence + 1)
    latent, rope = device.to_host(inputs.latent[one]), device.to_host(inputs.rope[one])
    slot = np.array([case.s_kv - 1], np.int32)
    if not case.model.has_rope:
        reference.cache_append(latent, None, pages, slot)
    else:
        reference.cache_append(latent, rope, pages, slot, **_tables(inputs, sequence, device))
    return pages


def _expected(
    case: LayerCase,
    inputs: LayerInputs,
    device: Device,
    sequence: int,
    head: int,
    pages: Array,
    rounding: str | None,
) -> Array:
    model, one, heads = case.model, slice(sequence, sequence + 1), slice(head, head + 1)
    q, weights = device.to_host(inputs.q[one, heads]), device.to_host(inputs.kv_b_proj[heads])
    (absorbed,) = reference.absorb(q[..., : model.d_nope], weights[:, : model.d_nope])
    kind = numpy_dtype(str(q.dtype))
    parts = [absorbed]
    if model.has_rope:
        turned = reference.mla_prepare(q[..., -D_ROPE:], **_tables(inputs, sequence, device))[0]
        parts.append(np.asarray(turned).astype(kind).astype(np.float64))
    queries = np.concatenate(parts, axis=-1)
    if rounding is not None:
        queries = round_to(queries, rounding).astype(kind)
    gate = device.to_host(inputs.gate[one, :, heads]) if model.has_gate else None
    table = np.arange(len(pages), dtype=np.int32)[None]
    out: Array = reference.mla_decode(
        *(queries[:, None], pages, table, np.array([case.s_kv], np.int32)),
        scale=case.scale,
        w_uv=weights[:, model.d_nope :],
        gate=gate,
        rounding=rounding,
    )[0]
    found: Array = out[0, 0, 0]
    return found


def judge(expected: Sequence[Expected], outputs: LayerOutputs, dtype: str, device: Device) -> SampledVerdict:
    """Compares what was written with the samples."""
    errors = [distance(device.to_host(outputs.out[one.sequence, 0, one.head]), one.exact) for one in expected] or [0.0]
    largest = max((float(np.abs(one.exact).max()) for one in expected), default=0.0)
    tolerance = 2 * max((one.error for one in expected), default=0.0) + epsilon(dtype) * largest
    reasons = [] if max(errors) <= tolerance else [f"out differs by {max(errors):.3g}, more than {tolerance:.3g}"]
    if count := device.count_not_finite(outputs.out):
        reasons.append(f"{count} values of out are not finite or were never written")
    sizes = {"out": max(errors)}, {"out": tolerance}, {"out": len(expected)}
    return SampledVerdict(not reasons, "; ".join(reasons), *sizes)
