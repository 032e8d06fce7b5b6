"""The arrays of a case."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ...core.cost import D_QK, D_V
from ...core.device import Device
from .cases import D_HEAD, ProjectionCase


@dataclass(frozen=True)
class ProjectionInputs:
    """One set of inputs: queries, or partial results and, of several, their log-sum-exps."""

    kv_b_proj: Any  # (h_q, 128 + 128, 512)
    q_nope: Any = None  # (t, h_q, 128)
    outs: Any = None  # (n, t, 1, h_q, 512)
    lses: Any = None  # (n, t, h_q, 1)

    @property
    def w_uk(self) -> Any:
        """(h_q, 128, 512), where it lies."""
        return self.kv_b_proj[:, :D_HEAD]

    @property
    def w_uv(self) -> Any:
        """(h_q, 128, 512), where it lies."""
        return self.kv_b_proj[:, D_HEAD:]


@dataclass(frozen=True)
class ProjectionOutputs:
    """Results of a call: (t, h_q, 512) or (t, h_q, 128)."""

    out: Any


def make_inputs(case: ProjectionCase, dtype: str, seed: int, device: Device) -> ProjectionInputs:
    """Normal numbers; whole queries, of which the columns without RoPE are multiplied."""
    n, t, h_q = case.states, case.tokens, case.h_q
    weights = device.normal((h_q, 2 * D_HEAD, D_V), dtype, 3 * seed + 1, scale=D_V**-0.5)
    if not n:
        return ProjectionInputs(weights, device.normal((t, h_q, D_HEAD + 64), dtype, 3 * seed + 2)[..., :D_HEAD])
    if n == 1:
        return ProjectionInputs(weights, outs=device.normal((1, t, 1, h_q, D_V), dtype, 3 * seed + 2))
    outs = device.normal((n, t, 1, h_q, D_V), "float16", 3 * seed + 2).astype("float32")
    lses = device.normal((n, t, h_q, 1), "float16", 3 * seed + 3).astype("float32")
    return ProjectionInputs(weights, outs=outs, lses=lses)


def make_result(case: ProjectionCase, dtype: str, device: Device) -> Any:
    """Memory for the result: columns of absorbed queries, or heads."""
    if case.states:
        return device.empty((case.tokens, case.h_q, D_HEAD), dtype)
    return device.empty((case.tokens, case.h_q, D_QK), dtype)[..., :D_V]
