"""mla_cupy through its public call: with a plan made before, and results written in place."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import mla_cupy

from ..cases import DecodeCase
from ..device import Device
from ..inputs import InputSet, Outputs, lse_shape, out_shape
from ..recorders import Call
from . import OWN, Prepared


class Project:
    """The call that a serving loop makes; the plan's update and the call without a plan are figures of their own."""

    name = OWN

    def __init__(self, variant: str | None = None) -> None:
        self._variant = variant

    def unsupported(self, case: DecodeCase, dtype: str) -> str | None:
        return None

    def prepare(self, case: DecodeCase, dtype: str, sets: Sequence[InputSet], device: Device) -> Prepared:
        plan = mla_cupy.plan_decode(
            max_b=case.b,
            s_q=case.s_q,
            h_q=case.h_q,
            h_kv=case.h_kv,
            max_pages=case.max_pages,
            page_size=case.page_size,
            dtype=dtype,
            variant=self._variant,
        )
        plan.update(sets[0].seqlens)  # the lengths of all sets are equal
        results = [
            Outputs(device.empty(out_shape(case), dtype), device.empty(lse_shape(case), "float32")) for _ in sets
        ]

        def calls(plan: mla_cupy.DecodePlan | None) -> list[Call]:
            return [
                partial(
                    mla_cupy.mla_decode,
                    inputs.q,
                    inputs.kv_cache,
                    inputs.block_table,
                    inputs.seqlens,
                    scale=case.scale,
                    plan=plan,
                    out=result.out,
                    lse=result.lse,
                    variant=self._variant,
                )
                for inputs, result in zip(sets, results, strict=True)
            ]

        return Prepared(
            calls=calls(plan),
            outputs=lambda index: results[index],
            recorder=device.recorder(),
            variant=plan.variant,
            figures={
                "no_plan": calls(None),
                "plan_update": [partial(plan.update, inputs.seqlens) for inputs in sets],
            },
        )
