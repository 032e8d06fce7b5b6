"""`mla_prefill_backward` through its public call, with results written in place."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import mla_cupy

from ...core.device import Device
from ...core.implementation import OWN, Prepared, with_kernel
from ...core.recorders import Call
from ..prefill.cases import D_ROPE
from .cases import PrefillBackwardCase
from .inputs import GradientInputs, Gradients

GENERIC = "dense_generic_backward_keys"  # without tensor cores
DETERMINISTIC = "deterministic"


class PrefillBackward:
    """The call of a training step: keys and values, and their gradients, are views of one array each."""

    def __init__(self, kernel: str | None = None, name: str = OWN, *, deterministic: bool = False) -> None:
        self.name, self._kernel, self._deterministic = name, kernel, deterministic

    def unsupported(self, case: PrefillBackwardCase, dtype: str) -> str | None:
        return None

    def prepare(
        self, case: PrefillBackwardCase, dtype: str, sets: Sequence[GradientInputs], device: Device
    ) -> Prepared:
        results = [self._results(case, dtype, device) for _ in sets]
        calls = [self._call(case, inputs, result) for inputs, result in zip(sets, results, strict=True)]
        return Prepared(
            calls=calls,
            outputs=lambda index: results[index],
            recorder=device.recorder(),
            kernel=self._kernel or "",
            includes="the schedule, statistics and sums; operands as projections leave them",
            workspace_bytes=lambda: device.allocated_by(calls[0]),
        )

    def _results(self, case: PrefillBackwardCase, dtype: str, device: Device) -> Gradients:
        width, keys = case.d_qk - D_ROPE, case.b * case.s_kv
        dq = device.empty((case.b * case.s_q, case.h_q, case.d_qk), dtype)
        dkv = device.empty((keys, case.heads_kv, width + case.d_v), dtype)
        return Gradients(dq, dkv[..., :width], dkv[..., width:], device.empty((keys, D_ROPE), dtype))

    def _call(self, case: PrefillBackwardCase, inputs: GradientInputs, result: Gradients) -> Call:
        width = case.d_qk - D_ROPE
        return partial(
            with_kernel(mla_cupy.mla_prefill_backward, self._kernel),
            *(inputs.q, inputs.kv[..., :width], inputs.kv[..., width:], inputs.out, inputs.dout, inputs.lse),
            k_rope=inputs.k_rope,
            packed=mla_cupy.Packed(inputs.starts_q, inputs.starts_kv),
            causal=case.causal,
            scale=case.scale,
            deterministic=self._deterministic,
            **vars(result),
        )
