"""`mla_prefill` through its public call, with results written in place."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import mla_cupy

from ...core.cost import D_V
from ...core.device import Device
from ...core.implementation import OWN, Prepared, with_kernel
from ...core.recorders import Call
from .cases import D_ROPE, PrefillCase
from .inputs import PrefillInputs, PrefillOutputs

D_QK = 576  # absorbed

GENERIC = "dense_generic"  # without tensor cores
GENERIC_NAME = "generic"
NAMED = ("dense_mma_163kb", "dense_mma")  # of GPUs without WGMMA


MASK_GIVEN, WITHOUT_MASK, SPARSE = "mask_given", "without_mask", "sparse_forward"
"""Figures of a selection: the mask made before; no mask; `sparse_mla_forward` of as many heads and the same indices."""


class Prefill:
    """The call of a layer: keys and values are views of one array, and nothing is concatenated."""

    def __init__(self, kernel: str | None = None, name: str = OWN) -> None:
        self.name, self._kernel = name, kernel

    def unsupported(self, case: PrefillCase, dtype: str) -> str | None:
        if case.fp8 and self.name in (GENERIC_NAME, *NAMED):
            return "e4m3 codes"
        return "values of 256 columns" if self.name in NAMED and case.d_v > 128 else None

    def prepare(self, case: PrefillCase, dtype: str, sets: Sequence[PrefillInputs], device: Device) -> Prepared:
        rows = case.b * case.s_q, case.h_q
        results = [PrefillOutputs(device.empty((*rows, case.d_v), dtype), device.empty(rows, "float32")) for _ in sets]
        both = list(zip(sets, results, strict=True))
        calls: list[Call]
        if case.topk:
            calls = [self._after_mask(case, of_set[0], self._call(case, *of_set, mask=True)) for of_set in both]
        else:
            calls = [self._call(case, *of_set) for of_set in both]
        figures: dict[str, list[Call]] = {}
        if case.topk and self.name == OWN:
            figures[MASK_GIVEN] = [self._call(case, *of_set, mask=True) for of_set in both]
            figures[WITHOUT_MASK] = [self._call(case, *of_set) for of_set in both]
            figures[SPARSE] = _sparse(case, dtype, sets, device)
        return Prepared(
            calls=calls,
            outputs=lambda index: results[index],
            recorder=device.recorder(),
            kernel=self._kernel or "",
            includes="the schedule; operands as projections leave them" + ("; the mask" if case.topk else ""),
            figures=figures,
            workspace_bytes=lambda: device.allocated_by(calls[0]),
        )

    def _call(self, case: PrefillCase, inputs: PrefillInputs, result: PrefillOutputs, mask: bool = False) -> Call:
        width = case.d_qk - D_ROPE
        return partial(
            with_kernel(mla_cupy.mla_prefill, self._kernel),
            inputs.q,
            inputs.kv[..., :width],
            inputs.kv[..., width:],
            k_rope=inputs.k_rope,
            packed=mla_cupy.Packed(inputs.starts_q, inputs.starts_kv),
            state_out=inputs.state_out,
            state_lse=inputs.state_lse,
            mask=inputs.mask if mask else None,
            causal=case.causal,
            scale=case.scale,
            out=result.out,
            lse=result.lse,
        )

    def _after_mask(self, case: PrefillCase, inputs: PrefillInputs, attend: Call) -> Call:
        packed = mla_cupy.Packed(inputs.starts_q, inputs.starts_kv)

        def call() -> None:
            mla_cupy.prefill_mask(inputs.indices, case.s_kv, relative=True, mask=inputs.mask, packed=packed)
            attend()

        return call


def _sparse(case: PrefillCase, dtype: str, sets: Sequence[PrefillInputs], device: Device) -> list[Call]:
    """Absorbed: the same queries and results for all sets, which a case is far too large to keep in a cache."""
    rows = case.b * case.s_q, case.h_q
    q, kv = device.normal((*rows, D_QK), dtype, 1), device.normal((case.b * case.s_kv, D_QK), dtype, 2)
    out, lse, top = device.empty((*rows, D_V), dtype), device.empty(rows, "float32"), device.empty(rows, "float32")
    return [
        partial(
            mla_cupy.sparse_mla_forward,
            *(q, kv, inputs.indices),
            packed=mla_cupy.Packed(inputs.starts_q, inputs.starts_kv),
            scale=case.scale,
            out=out,
            lse=lse,
            max_logits=top,
        )
        for inputs in sets
    ]
