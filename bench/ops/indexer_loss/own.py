"""`indexer_warmup_loss` and `indexer_sparse_loss` through their public calls, with results written in place."""

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

GENERIC = "indexer_loss_generic_scores"  # without tensor cores
DETERMINISTIC = "deterministic"
FORWARD = "forward"
"""The figure of the loss alone; per head, with the attention's output."""


class IndexerLoss:
    """The call of a training step; the loss alone is a further figure."""

    def __init__(self, kernel: str | None = None, name: str = OWN, *, deterministic: bool = False) -> None:
        self.name, self._kernel, self._deterministic = name, kernel, deterministic

    def unsupported(self, case: LossCase, dtype: str) -> str | None:
        if self._deterministic and not case.topk:
            return "the warm-up loss is deterministic anyway"
        return None

    def prepare(self, case: LossCase, dtype: str, sets: Sequence[LossInputs], device: Device) -> Prepared:
        function = with_kernel(getattr(mla_cupy, case.op), self._kernel)
        options: dict[str, Any] = {"scale": case.d**-0.5}
        if case.topk:
            options["deterministic"] = self._deterministic
        if case.per_head:
            options["target"] = "per_head"
        shape = (case.tokens, case.h) if case.per_head else (case.tokens,)
        rows = [{name: device.empty(shape, "float32") for name in ("kl", "mass", "index_lse")} for _ in sets]
        if case.per_head:
            for row in rows:
                row["out"] = device.empty((case.tokens, case.h, case.d), "bfloat16")
                row["attention_lse"] = device.empty((case.tokens, case.h), "float32")
        gradients = [
            {
                "d_index_q": device.empty((case.tokens, case.h_i, case.d_i), "bfloat16"),
                "d_index_k": device.empty((case.tokens, case.d_i), "bfloat16"),
                "d_weights": device.empty((case.tokens, case.h_i), "float32"),
            }
            for _ in sets
        ]
        calls: list[Call] = [
            partial(function, **inputs.call, **options, results=mla_cupy.LossResults(**row, **gradient))
            for inputs, row, gradient in zip(sets, rows, gradients, strict=True)
        ]
        alone: list[Call] = [
            partial(function, **inputs.call, **options, results=mla_cupy.LossResults(**row), gradients=False)
            for inputs, row in zip(sets, rows, strict=True)
        ]

        def outputs(index: int) -> Any:
            return LossOutputs(rows[index]["kl"], **gradients[index])

        includes = "loss, gradients, the attention's output and log-sum-exps" if case.per_head else "loss and gradients"
        return Prepared(
            calls=calls,
            outputs=outputs,
            recorder=device.recorder(),
            kernel=self._kernel or "",
            includes=includes if case.per_head else f"{includes}; the log-sum-exps are given",
            figures={FORWARD: alone} if self.name == OWN else {},
            workspace_bytes=lambda: device.allocated_by(calls[0]),
        )
