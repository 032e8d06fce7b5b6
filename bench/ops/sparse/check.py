"""Expected results of a sparse forward: samples from the float64 oracle."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from mla_cupy import reference

from ...core.device import Device
from ...core.samples import Sample, samples
from ...core.tolerance import spaced
from .cases import SparseCase
from .inputs import SparseInputs

QUERIES = 5


def sampled_queries(case: SparseCase) -> npt.NDArray[np.int64]:
    """The queries that are checked, with all their heads."""
    return spaced(case.s_q, QUERIES)


def expect_forward(case: SparseCase, dtype: str, inputs: SparseInputs, device: Device) -> list[Sample]:
    """The oracle's out, lse and max_logits of a few queries."""
    queries = sampled_queries(case)
    arguments = device.take(inputs.q, queries), device.to_host(inputs.kv), inputs.host_indices[queries]
    want = reference.sparse_mla_forward(*arguments, scale=case.scale)
    rounded = reference.sparse_mla_forward(*arguments, scale=case.scale, rounding=dtype)
    outputs = zip(("out", "lse", "max_logits"), want, rounded, strict=True)
    return [sample for name, exact, near in outputs for sample in samples(name, queries, exact, near, dtype)]
