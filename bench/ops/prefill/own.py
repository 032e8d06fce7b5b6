"""`mla_prefill` through its public call, with results written in place."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import mla_cupy

from ...core.device import Device
from ...core.implementation import OWN, Prepared, with_kernel
from ...core.recorders import Call
from .cases import D_ROPE, PrefillCase
from .inputs import PrefillInputs, PrefillOutputs

GENERIC = "dense_generic"  # without tensor cores


class Prefill:
    """The call of a layer: keys and values are views of one array, and nothing is concatenated."""

    def __init__(self, kernel: str | None = None, name: str = OWN) -> None:
        self.name, self._kernel = name, kernel

    def unsupported(self, case: PrefillCase, dtype: str) -> str | None:
        return None

    def prepare(self, case: PrefillCase, dtype: str, sets: Sequence[PrefillInputs], device: Device) -> Prepared:
        rows = case.b * case.s_q, case.h_q
        results = [PrefillOutputs(device.empty((*rows, case.d_v), dtype), device.empty(rows, "float32")) for _ in sets]
        calls = [self._call(case, inputs, result) for inputs, result in zip(sets, results, strict=True)]
        return Prepared(
            calls=calls,
            outputs=lambda index: results[index],
            recorder=device.recorder(),
            kernel=self._kernel or "",
            includes="the schedule; operands as projections leave them",
            workspace_bytes=lambda: device.allocated_by(calls[0]),
        )

    def _call(self, case: PrefillCase, inputs: PrefillInputs, result: PrefillOutputs) -> Call:
        width = case.d_qk - D_ROPE
        return partial(
            with_kernel(mla_cupy.mla_prefill, self._kernel),
            inputs.q,
            inputs.kv[..., :width],
            inputs.kv[..., width:],
            k_rope=inputs.k_rope,
            cu_seqlens_q=inputs.starts_q,
            cu_seqlens_kv=inputs.starts_kv,
            state_out=inputs.state_out,
            state_lse=inputs.state_lse,
            causal=case.causal,
            scale=case.scale,
            out=result.out,
            lse=result.lse,
        )
