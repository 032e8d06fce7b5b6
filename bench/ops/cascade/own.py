"""`cascade_decode` through its public call, with results written in place."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import mla_cupy

from ...core.device import Device
from ...core.implementation import OWN, Prepared
from ...core.recorders import Call
from ..decode.inputs import InputSet, make_outputs
from .cases import CascadeCase


class Cascade:
    """The groups are found before, on the host: those that the model chooses, or with `always` all of them."""

    def __init__(self, always: bool = False, name: str = OWN) -> None:
        self.name, self._always = name, always

    def unsupported(self, case: CascadeCase, dtype: str) -> str | None:
        return None

    def prepare(self, case: CascadeCase, dtype: str, sets: Sequence[InputSet], device: Device) -> Prepared:
        sizes = {"page_size": case.page_size, "h_q": case.h_q, "s_q": case.s_q}
        groups = [mla_cupy.shared_prefixes(x.host_table, x.host_seqlens, **sizes, always=self._always) for x in sets]
        results = [make_outputs(case, dtype, device) for _ in sets]
        plan = mla_cupy.plan_cascade(
            groups[0],
            b=case.b,
            s_q=case.s_q,
            h_q=case.h_q,
            max_pages=case.max_pages,
            page_size=case.page_size,
            dtype=dtype,
        )
        plan.update(sets[0].seqlens)  # all sets have the same lengths and groups

        def calls(plan: mla_cupy.CascadePlan | None) -> list[Call]:
            return [
                partial(
                    mla_cupy.cascade_decode,
                    *(x.q, x.kv_cache, x.block_table, x.seqlens, groups[0]),
                    scale=case.scale,
                    out=result.out,
                    lse=result.lse,
                    plan=plan,
                )
                for x, result in zip(sets, results, strict=True)
            ]

        return Prepared(
            calls=calls(plan),
            outputs=lambda index: results[index],
            recorder=device.recorder(),
            kernel="the prefix once" if groups[0] else "plain",
            includes="attention and merges; the groups are found and the plan is updated before",
            figures={"no_plan": calls(None), "plan_update": [partial(plan.update, x.seqlens) for x in sets]},
        )
