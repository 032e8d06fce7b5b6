"""`absorb` and `merge_project` through their public calls, results in place."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import mla_cupy

from ...core.device import Device
from ...core.implementation import OWN, Prepared
from ...core.recorders import Call
from .cases import ProjectionCase
from .inputs import ProjectionInputs, ProjectionOutputs, make_result


class Projection:
    """One launch; the figure `copy` reads and writes together as many bytes."""

    name = OWN

    def unsupported(self, case: ProjectionCase, dtype: str) -> str | None:
        return None

    def prepare(self, case: ProjectionCase, dtype: str, sets: Sequence[ProjectionInputs], device: Device) -> Prepared:
        results = [make_result(case, dtype, device) for _ in sets]
        calls = [_call(case, inputs, result, device) for inputs, result in zip(sets, results, strict=True)]
        return Prepared(
            calls=calls,
            outputs=lambda index: ProjectionOutputs(results[index]),
            recorder=device.recorder(),
            figures={"copy": [_copy(case, device) for _ in sets]},
            workspace_bytes=lambda: device.allocated_by(calls[0]),
        )


def _call(case: ProjectionCase, inputs: ProjectionInputs, result: Any, device: Device) -> Call:
    if not case.states:
        return partial(mla_cupy.absorb, inputs.q_nope, inputs.w_uk, out=result)
    options: dict[str, Any] = {"out": result[:, None]}
    if inputs.lses is not None:
        options |= {"lses": inputs.lses, "lse": device.empty((case.tokens, case.h_q, 1), "float32")}
    return partial(mla_cupy.merge_project, inputs.outs, inputs.w_uv, **options)


def _copy(case: ProjectionCase, device: Device) -> Call:
    """A copy of half as many bytes as the case moves: a copy reads and writes each."""
    source, destination = (device.empty((case.cost.nbytes // 2,), "uint8") for _ in range(2))

    def call() -> None:
        destination[...] = source

    return call
