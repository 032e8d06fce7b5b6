"""`indexer_logits` and `indexer_logits_paged` through their public calls, with results written in place."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import mla_cupy

from ...core.device import Device
from ...core.implementation import OWN, Prepared, with_kernel
from ...core.recorders import Call
from .cases import LogitsCase
from .inputs import LogitsInputs, outputs_of

GENERIC = "indexer_logits_generic"  # without tensor cores
MMA = "indexer_logits_mma"  # with those of every GPU since Ampere


class IndexerLogits:
    """The call of an indexer; without -inf outside the ranges, and in bfloat16, are further figures."""

    def __init__(self, kernel: str | None = None, name: str = OWN) -> None:
        self.name, self._kernel = name, kernel

    def unsupported(self, case: LogitsCase, dtype: str) -> str | None:
        return None

    def prepare(self, case: LogitsCase, dtype: str, sets: Sequence[LogitsInputs], device: Device) -> Prepared:
        shape = (case.b, case.s_q, case.num_keys) if case.b else (case.s_q, case.num_keys)
        results = [device.empty(shape, "float32") for _ in sets]
        public: Callable[..., Any] = mla_cupy.indexer_logits_paged if case.b else mla_cupy.indexer_logits
        function = with_kernel(public, self._kernel)
        chosen = {"accumulate": "float16"} if case.float16 else {}

        def calls(**options: Any) -> list[Call]:
            return [
                partial(function, **inputs.arguments, logits=result, **chosen, **options)
                for inputs, result in zip(sets, results, strict=True)
            ]

        return Prepared(
            calls=calls(),
            outputs=lambda index: outputs_of(case, results[index]),
            recorder=device.recorder(),
            kernel=self._kernel or "",
            figures={"not_clean": calls(clean=False)} if self.name == OWN else {},
            workspace_bytes=lambda: device.allocated_by(calls()[0]),
        )
