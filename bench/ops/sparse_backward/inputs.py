"""The arrays of one case of the sparse backward."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import mla_cupy

from ...core.cost import D_V
from ...core.device import Device
from ..sparse import inputs as sparse
from .cases import SparseBackwardCase


@dataclass(frozen=True)
class GradientInputs(sparse.SparseInputs):
    """One set of inputs of the backward."""

    out: Any  # (s_q, h_q, 512)
    dout: Any  # (s_q, h_q, 512)
    lse: Any  # (s_q, h_q) float32


@dataclass(frozen=True)
class Gradients:
    """Results of a backward."""

    dq: Any
    dkv: Any


def make_inputs(case: SparseBackwardCase, dtype: str, seed: int, device: Device) -> GradientInputs:
    """Inputs of the forward with a random gradient; `out` and `lse` are the project's own forward's."""
    forward = sparse.make_inputs(case, dtype, seed, device)
    dout = device.normal((case.s_q, case.h_q, D_V), dtype, 3 * seed + 3)
    out, lse, _ = mla_cupy.sparse_mla_forward(forward.q, forward.kv, forward.indices, scale=case.scale)
    return GradientInputs(**vars(forward), out=out, dout=dout, lse=lse)
