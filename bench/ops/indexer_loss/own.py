"""`indexer_warmup_loss` through its public call, with results written in place."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import mla_cupy

from ...core.device import Device
from ...core.implementation import OWN, Prepared, with_kernel
from ...core.recorders import Call
from .cases import LossCase
from .inputs import LossInputs, LossOutputs

GENERIC = "indexer_loss_scores_generic"  # without tensor cores


class IndexerLoss:
    """The call of a training step; the loss alone is a further figure."""

    def __init__(self, kernel: str | None = None, name: str = OWN) -> None:
        self.name, self._kernel = name, kernel

    def unsupported(self, case: LossCase, dtype: str) -> str | None:
        return None

    def prepare(self, case: LossCase, dtype: str, sets: Sequence[LossInputs], device: Device) -> Prepared:
        function = with_kernel(mla_cupy.indexer_warmup_loss, self._kernel)
        rows = [{name: device.empty((case.tokens,), "float32") for name in ("kl", "mass", "index_lse")} for _ in sets]
        gradients = [
            {
                "d_index_q": device.empty((case.tokens, case.h_i, case.d_i), "bfloat16"),
                "d_index_k": device.empty((case.tokens, case.d_i), "bfloat16"),
                "d_weights": device.empty((case.tokens, case.h_i), "float32"),
            }
            for _ in sets
        ]
        calls: list[Call] = [
            partial(function, **inputs.arguments, **row, **gradient)
            for inputs, row, gradient in zip(sets, rows, gradients, strict=True)
        ]
        alone: list[Call] = [
            partial(function, **inputs.arguments, **row, gradients=False)
            for inputs, row in zip(sets, rows, strict=True)
        ]

        def outputs(index: int) -> Any:
            return LossOutputs(rows[index]["kl"], **gradients[index])

        return Prepared(
            calls=calls,
            outputs=outputs,
            recorder=device.recorder(),
            kernel=self._kernel or "",
            includes="loss and gradients",
            figures={"loss_alone": alone} if self.name == OWN else {},
            workspace_bytes=lambda: device.allocated_by(calls[0]),
        )
