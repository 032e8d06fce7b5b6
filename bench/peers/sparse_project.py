"""The project's sparse operations through their public calls, with results written in place."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import mla_cupy

from ..costs import D_V
from ..device import Device
from ..recorders import Call
from ..sparse_cases import SparseCase
from ..sparse_inputs import GradientInputs, Gradients, SparseInputs, SparseOutputs
from . import OWN, Prepared

GENERIC_FORWARD, GENERIC_BACKWARD = "dense_decode_generic", "sparse_backward_generic"  # without tensor cores


class ProjectForward:
    """`sparse_mla_forward`."""

    def __init__(self, variant: str | None = None, name: str = OWN) -> None:
        self.name, self._variant = name, variant

    def unsupported(self, case: SparseCase, dtype: str) -> str | None:
        return None

    def prepare(self, case: SparseCase, dtype: str, sets: Sequence[SparseInputs], device: Device) -> Prepared:
        rows = case.s_q, case.h_q
        results = [
            SparseOutputs(
                out=device.empty((*rows, D_V), dtype),
                lse=device.empty(rows, "float32"),
                max_logits=device.empty(rows, "float32"),
            )
            for _ in sets
        ]
        calls: list[Call] = [
            partial(
                mla_cupy.sparse_mla_forward,
                inputs.q,
                inputs.kv,
                inputs.indices,
                scale=case.scale,
                variant=self._variant,
                **vars(result),
            )
            for inputs, result in zip(sets, results, strict=True)
        ]
        return Prepared(
            calls=calls,
            outputs=lambda index: results[index],
            recorder=device.recorder(),
            variant=self._variant or "",
            workspace_bytes=lambda: device.allocated_by(calls[0]),
        )


class ProjectBackward:
    """`sparse_mla_backward`, gradients in the dtype of the inputs."""

    def __init__(self, variant: str | None = None, name: str = OWN, deterministic: bool = False) -> None:
        self.name, self._variant, self._deterministic = name, variant, deterministic

    def unsupported(self, case: SparseCase, dtype: str) -> str | None:
        return None

    def prepare(self, case: SparseCase, dtype: str, sets: Sequence[GradientInputs], device: Device) -> Prepared:
        results = [
            Gradients(
                dq=device.empty((case.s_q, case.h_q, case.d_qk), dtype),
                dkv=device.empty((case.s_kv, case.d_qk), dtype),
            )
            for _ in sets
        ]
        calls: list[Call] = [
            partial(
                mla_cupy.sparse_mla_backward,
                *(inputs.q, inputs.kv, inputs.out, inputs.dout, inputs.lse, inputs.indices),
                scale=case.scale,
                deterministic=self._deterministic,
                variant=self._variant,
                **vars(result),
            )
            for inputs, result in zip(sets, results, strict=True)
        ]
        return Prepared(
            calls=calls,
            outputs=lambda index: results[index],
            recorder=device.recorder(),
            variant=self._variant or "",
            workspace_bytes=lambda: device.allocated_by(calls[0]),
        )
