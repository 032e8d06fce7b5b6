"""Expected results of a sparse forward from FP8 records: samples from the float64 oracle."""

from __future__ import annotations

from mla_cupy import reference

from ...core.device import Device
from ...core.samples import Sample, samples
from ..sparse import check
from .cases import Fp8ForwardCase
from .inputs import Fp8ForwardInputs


def expect(case: Fp8ForwardCase, dtype: str, inputs: Fp8ForwardInputs, device: Device) -> list[Sample]:
    """The oracle's results of a few queries: over rows, or, with products in FP8, over the records.

    Queries are then numbers of e4m3, so only the tolerance differs.
    """
    if not case.fp8_math:
        return check.expect_forward(case, dtype, inputs, device)
    queries = check.sampled_queries(case)
    arguments = device.take(inputs.q, queries), device.to_host(inputs.records), inputs.host_indices[queries]
    want = reference.sparse_mla_forward(*arguments, scale=case.scale, math="fp8")
    rounded = reference.sparse_mla_forward(*arguments, scale=case.scale, math="fp8", rounding=dtype)
    outputs = zip(("out", "lse", "max_logits"), want, rounded, strict=True)
    return [sample for name, exact, near in outputs for sample in samples(name, queries, exact, near, dtype)]
