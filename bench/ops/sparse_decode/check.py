"""Check of results: all heads of a few queries against the float64 oracle, see `ops/sparse/check.py`."""

from __future__ import annotations

from typing import Any

from mla_cupy import reference

from ...core.device import Device
from ...core.samples import Sample, samples
from ...core.tolerance import spaced
from ..sparse.check import QUERIES
from .cases import SparseDecodeCase
from .inputs import SparseDecodeInputs, host_cache, host_pages


def expect(case: SparseDecodeCase, dtype: str, inputs: SparseDecodeInputs, device: Device) -> list[Sample]:
    """The oracle's out and lse, with the tolerance of kernels that round weights to `dtype`."""
    queries = spaced(case.b * case.s_q, QUERIES)
    rows = inputs.q.reshape(case.b * case.s_q, case.h_q, case.d_qk)
    call: dict[str, Any] = {"q": device.take(rows, queries)[:, None]}
    kinds = ("", case.record), ("extra_", case.extra_record)
    for number, (source, (prefix, record)) in enumerate(zip(inputs.sources, kinds, strict=False)):
        lists = source.host_indices.reshape(case.b * case.s_q, -1)[queries, None]
        call[prefix + "kv_cache"] = host_cache(record, host_pages(record, case.pool, number))
        call[prefix + "indices"] = lists
    if case.has_sink:
        call["attn_sink"] = device.to_host(inputs.sink)
    call["math"] = case.math
    want, near = (
        [x[:, 0] for x in reference.sparse_mla_decode(**call, scale=case.scale, rounding=rounding)]
        for rounding in (None, dtype)
    )
    outputs = zip(("out", "lse"), want, near, strict=True)
    return [sample for name, exact, rounded in outputs for sample in samples(name, queries, exact, rounded, dtype)]
