"""The operations on a paged cache through their public calls, and a copy of as many bytes beside each."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import mla_cupy
from mla_cupy.cache_formats import FORMATS

from ...core.device import Device
from ...core.implementation import OWN, Prepared
from ...core.recorders import Call
from .cases import CacheCase
from .inputs import CacheInputs, CacheOutputs


class Cache:
    """One launch; the figure `copy` reads and writes together what it does."""

    name = OWN

    def unsupported(self, case: CacheCase, dtype: str) -> str | None:
        return None

    def prepare(self, case: CacheCase, dtype: str, sets: Sequence[CacheInputs], device: Device) -> Prepared:
        made = [_call(case, dtype, inputs, device) for inputs in sets]
        return Prepared(
            calls=[call for call, _ in made],
            outputs=lambda index: CacheOutputs(made[index][1]),
            recorder=device.recorder(),
            figures={"copy": [_copy(case, device) for _ in sets]},
            workspace_bytes=lambda: device.allocated_by(made[0][0]),
        )


def _call(case: CacheCase, dtype: str, inputs: CacheInputs, device: Device) -> tuple[Call, Any]:
    """A call, and what it writes."""
    if case.kind == "append":
        append = partial(mla_cupy.cache_append, inputs.latent, inputs.rope, inputs.cache, inputs.slots)
        return append, inputs.pool[0]
    if case.kind == "gather":
        rows = device.empty((case.tokens, FORMATS[case.record].d_qk), dtype)
        return partial(mla_cupy.cache_gather, inputs.cache, inputs.slots, out=rows), rows
    return partial(mla_cupy.cache_copy_pages, inputs.pool, inputs.pairs), inputs.pool[0][case.pages :]


def _copy(case: CacheCase, device: Device) -> Call:
    """A copy of half as many bytes as the case moves: a copy reads and writes each."""
    source, destination = (device.empty((case.cost.nbytes // 2,), "uint8") for _ in range(2))

    def call() -> None:
        destination[...] = source

    return call
