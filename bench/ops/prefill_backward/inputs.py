"""The arrays of a case of un-absorbed prefill, backward."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import mla_cupy

from ...core.device import Device
from ..prefill import inputs as forward
from ..prefill.cases import D_ROPE
from .cases import PrefillBackwardCase


@dataclass(frozen=True)
class GradientInputs(forward.PrefillInputs):
    """One set of inputs of the backward."""

    out: Any  # (b s_q, h_q, d_v)
    dout: Any
    lse: Any  # (b s_q, h_q) float32


@dataclass(frozen=True)
class Gradients:
    """Results of a backward: dk without the last 64 columns, which all heads share."""

    dq: Any
    dk: Any
    dv: Any
    dk_rope: Any


def make_inputs(case: PrefillBackwardCase, dtype: str, seed: int, device: Device) -> GradientInputs:
    """Inputs of the forward with a random gradient; `out` and `lse` are the project's own forward's."""
    made = forward.make_inputs(case, dtype, seed, device)
    width = case.d_qk - D_ROPE
    out, lse = mla_cupy.mla_prefill(
        made.q,
        made.kv[..., :width],
        made.kv[..., width:],
        k_rope=made.k_rope,
        packed=mla_cupy.Packed(made.starts_q, made.starts_kv),
        causal=case.causal,
        scale=case.scale,
    )
    dout = device.normal((case.b * case.s_q, case.h_q, case.d_v), dtype, 3 * seed + 4)
    return GradientInputs(**vars(made), out=out, dout=dout, lse=lse)
