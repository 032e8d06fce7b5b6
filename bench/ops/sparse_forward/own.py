"""`sparse_mla_forward` through its public call, with results written in place."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import mla_cupy

from ...core.cost import D_V
from ...core.device import Device
from ...core.implementation import OWN, Prepared, with_kernel
from ...core.recorders import Call
from ..sparse.inputs import SparseInputs, SparseOutputs
from .cases import SparseForwardCase

GENERIC = "attention_generic"  # without tensor cores
NAMED = ("attention_mma_163kb", "attention_mma")  # of GPUs without WGMMA


class SparseForward:
    """The call of a prefill."""

    def __init__(self, kernel: str | None = None, name: str = OWN) -> None:
        self.name, self._kernel = name, kernel

    def unsupported(self, case: SparseForwardCase, dtype: str) -> str | None:
        return None

    def call_options(self, case: SparseForwardCase) -> dict[str, Any]:
        """Further arguments of the call."""
        return {}

    def prepare(self, case: SparseForwardCase, dtype: str, sets: Sequence[SparseInputs], device: Device) -> Prepared:
        rows = case.s_q, case.h_q
        results = [
            SparseOutputs(
                out=device.empty((*rows, D_V), dtype),
                lse=device.empty(rows, "float32"),
                max_logits=device.empty(rows, "float32"),
            )
            for _ in sets
        ]
        forward = with_kernel(mla_cupy.sparse_mla_forward, self._kernel)
        calls: list[Call] = [
            partial(
                forward,
                inputs.q,
                inputs.kv,
                inputs.indices,
                scale=case.scale,
                **self.call_options(case),
                **vars(result),
            )
            for inputs, result in zip(sets, results, strict=True)
        ]
        return Prepared(
            calls=calls,
            outputs=lambda index: results[index],
            recorder=device.recorder(),
            kernel=self._kernel or "",
            workspace_bytes=lambda: device.allocated_by(calls[0]),
        )
