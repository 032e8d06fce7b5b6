"""`mla_prepare` through its public call, with results written in place, and a copy of as many bytes beside it."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import mla_cupy

from ...core.device import Device
from ...core.implementation import OWN, Prepared
from ...core.recorders import Call
from .cases import MlaPrepareCase
from .inputs import MlaPrepareInputs, MlaPrepareOutputs


class MlaPrepare:
    """One launch; the figure `copy` reads and writes together what it does."""

    name = OWN

    def unsupported(self, case: MlaPrepareCase, dtype: str) -> str | None:
        return None

    def prepare(self, case: MlaPrepareCase, dtype: str, sets: Sequence[MlaPrepareInputs], device: Device) -> Prepared:
        made = [_call(case, dtype, inputs, device) for inputs in sets]
        return Prepared(
            calls=[call for call, _ in made],
            outputs=lambda index: made[index][1],
            recorder=device.recorder(),
            figures={"copy": [_copy(case, device) for _ in sets]},
            workspace_bytes=lambda: device.allocated_by(made[0][0]),
        )


def _call(case: MlaPrepareCase, dtype: str, inputs: MlaPrepareInputs, device: Device) -> tuple[Call, MlaPrepareOutputs]:
    """A call, and what it writes beside the queries."""
    results: dict[str, Any] = {"out": inputs.q}
    if case.kind != "inplace":
        codes = case.kind == "codes"
        results["out"] = device.empty((case.n, case.h, case.d), "uint8" if codes else dtype)
        if codes:
            results |= {"q_scales": device.empty((case.n, case.h), "float32"), "quantise": True}
    queries = None if case.kind == "inplace" else results["out"]
    outputs = MlaPrepareOutputs(queries, results.get("q_scales"), inputs.pool)
    return partial(mla_cupy.mla_prepare, inputs.q, **inputs.arguments, **results), outputs


def _copy(case: MlaPrepareCase, device: Device) -> Call:
    """A copy of half as many bytes as the case moves: a copy reads and writes each."""
    source, destination = (device.empty((case.cost.nbytes // 2,), "uint8") for _ in range(2))

    def call() -> None:
        destination[...] = source

    return call
