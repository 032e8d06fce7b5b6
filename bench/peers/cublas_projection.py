"""Projections by cuBLAS; several partial results are merged by `merge_states` before."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mla_cupy

from ..core.cost import D_V
from ..core.device import Device
from ..core.implementation import Prepared
from ..core.recorders import Call
from ..ops.projection import ProjectionCase, ProjectionInputs, ProjectionOutputs, make_result
from .cublas import Cublas, why_missing


class CublasProjection:
    """A batched product with the weights where they lie."""

    name = "cublas"

    def unsupported(self, case: ProjectionCase, dtype: str) -> str | None:
        return why_missing()

    def prepare(self, case: ProjectionCase, dtype: str, sets: Sequence[ProjectionInputs], device: Device) -> Prepared:
        library = Cublas(device.stream)
        results = [make_result(case, dtype, device) for _ in sets]

        def call(inputs: ProjectionInputs, result: Any) -> Call:
            if not case.states:
                return lambda: library.by_heads(inputs.q_nope, inputs.w_uk, result, transposed=False)
            if case.states == 1:
                return lambda: library.by_heads(inputs.outs[0, :, 0], inputs.w_uv, result, transposed=True)
            merged = device.empty((case.tokens, 1, case.h_q, D_V), dtype)
            lse = device.empty((case.tokens, case.h_q, 1), "float32")

            def both() -> None:
                mla_cupy.merge_states(inputs.outs, inputs.lses, out=merged, lse=lse)
                library.by_heads(merged[:, 0], inputs.w_uv, result, transposed=True)

            return both

        return Prepared(
            calls=[call(inputs, result) for inputs, result in zip(sets, results, strict=True)],
            outputs=lambda index: ProjectionOutputs(results[index]),
            recorder=device.recorder(),
            includes="merge_states before the product" if case.states > 1 else "",
        )
