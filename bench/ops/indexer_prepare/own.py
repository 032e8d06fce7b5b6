"""The preparation through its public call, with results written in place, and a copy of as many bytes beside it."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import mla_cupy

from ...core.device import Device
from ...core.implementation import OWN, Prepared
from ...core.recorders import Call
from .cases import PrepareCase
from .inputs import PreparedQueries, PrepareInputs


class IndexerPrepare:
    """One launch; the figure `copy` reads and writes together what it does."""

    name = OWN

    def unsupported(self, case: PrepareCase, dtype: str) -> str | None:
        return None

    def prepare(self, case: PrepareCase, dtype: str, sets: Sequence[PrepareInputs], device: Device) -> Prepared:
        made = [_call(case, inputs, device) for inputs in sets]
        calls = [call for call, _ in made]
        return Prepared(
            calls=calls,
            outputs=lambda index: made[index][1],
            recorder=device.recorder(),
            figures={"copy": [_copy(case, device) for _ in sets]},
            workspace_bytes=lambda: device.allocated_by(calls[0]),
        )


def _call(case: PrepareCase, inputs: PrepareInputs, device: Device) -> tuple[Call, PreparedQueries]:
    """A call, and where its results go."""
    results = {
        "codes": device.empty((case.s_q, case.h, case.d), "uint8"),
        "folded": device.empty((case.s_q, case.h), "float32"),
    }
    if not case.keys:
        return partial(mla_cupy.indexer_prepare_q, inputs.q, **inputs.arguments, **results), PreparedQueries(**results)
    results["k_codes"] = device.empty((case.s_q, case.d), "uint8")
    results["k_scale"] = device.empty((case.s_q,), "float32")
    call = partial(mla_cupy.indexer_prepare, inputs.q, **inputs.arguments, **results, return_k=True)
    return call, PreparedQueries(**results)


def _copy(case: PrepareCase, device: Device) -> Call:
    """A copy of half as many bytes as the case moves: a copy reads and writes each."""
    source, destination = (device.empty((case.cost.nbytes // 2,), "uint8") for _ in range(2))

    def call() -> None:
        destination[...] = source

    return call
