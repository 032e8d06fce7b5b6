"""mla_cupy through its public call: with a plan made before, and results written in place."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

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
        plan: Any = mla_cupy.plan_decode(
            max_b=case.b,
            s_q=case.s_q,
            h_q=case.h_q,
            h_kv=case.h_kv,
            max_pages=case.max_pages,
            page_size=case.page_size,
            dtype=dtype,
        )
        plan.update(sets[0].seqlens)
        results = [
            Outputs(device.empty(out_shape(case), dtype), device.empty(lse_shape(case), "float32")) for _ in sets
        ]

        def call(inputs: InputSet, result: Outputs, plan: Any) -> Call:
            return lambda: mla_cupy.mla_decode(
                inputs.q,
                inputs.kv_cache,
                inputs.block_table,
                inputs.seqlens,
                plan=plan,
                out=result.out,
                lse=result.lse,
                variant=self._variant,
            )

        return Prepared(
            calls=[call(inputs, result, plan) for inputs, result in zip(sets, results, strict=True)],
            outputs=lambda index: results[index],
            recorder=device.recorder(),
            variant=self._variant or "",
            figures={
                "no_plan": [call(inputs, result, None) for inputs, result in zip(sets, results, strict=True)],
                "plan_update": [partial(plan.update, inputs.seqlens) for inputs in sets],
            },
        )
