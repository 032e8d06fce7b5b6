"""`cascade_decode` through its public call, with results written in place."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import mla_cupy

from ...core.device import Device
from ...core.implementation import OWN, Prepared
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
        calls = [
            partial(
                mla_cupy.cascade_decode,
                *(x.q, x.kv_cache, x.block_table, x.seqlens, found),
                scale=case.scale,
                out=result.out,
                lse=result.lse,
            )
            for x, found, result in zip(sets, groups, results, strict=True)
        ]
        return Prepared(
            calls=calls,
            outputs=lambda index: results[index],
            recorder=device.recorder(),
            kernel="the prefix once" if groups[0] else "plain",
            includes="schedules, attention, merges and lengths; the groups are found before",
            workspace_bytes=lambda: device.allocated_by(calls[0]),
        )
