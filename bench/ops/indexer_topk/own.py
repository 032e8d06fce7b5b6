"""`indexer_topk` through its public call, with results written in place."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import mla_cupy

from ...core.device import Device
from ...core.implementation import OWN, Prepared, with_kernel
from ...core.recorders import Call
from .cases import TopkCase
from .inputs import Selection, TopkInputs


class IndexerTopk:
    """Indices in ascending order; by value is a further figure."""

    name = OWN

    def __init__(self, kernel: str | None = None) -> None:
        self._kernel = kernel

    def unsupported(self, case: TopkCase, dtype: str) -> str | None:
        return None

    def prepare(self, case: TopkCase, dtype: str, sets: Sequence[TopkInputs], device: Device) -> Prepared:
        indices = [device.empty((case.s_q, case.k), "int32") for _ in sets]
        counts = [device.empty((case.s_q,), "int32") for _ in sets]
        function: Callable[..., Any] = with_kernel(mla_cupy.indexer_topk, self._kernel)

        def calls(**options: Any) -> list[Call]:
            return [
                partial(function, inputs.logits, case.k, return_values=False, indices=to, counts=number, **options)
                for inputs, to, number in zip(sets, indices, counts, strict=True)
            ]

        return Prepared(
            calls=calls(),
            outputs=lambda index: Selection(indices[index], lowest_ties=True),
            recorder=device.recorder(),
            kernel=self._kernel or "",
            figures={"by_value": calls(order="value")},
            workspace_bytes=lambda: device.allocated_by(calls()[0]),
        )
