"""`sparse_mla_backward` through its public call, with results written in place."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import mla_cupy

from ...core.device import Device
from ...core.implementation import OWN, Prepared, with_kernel
from ...core.recorders import Call
from .cases import SparseBackwardCase
from .inputs import GradientInputs, Gradients

GENERIC = "sparse_backward_generic"  # without tensor cores
DETERMINISTIC = "deterministic"
NAMED = ("sparse_backward_mma_163kb", "sparse_backward_mma")  # of GPUs without WGMMA


class SparseBackward:
    """The call of a training step, gradients in the dtype of the inputs."""

    def __init__(self, kernel: str | None = None, name: str = OWN, *, deterministic: bool = False) -> None:
        self.name, self._kernel, self._deterministic = name, kernel, deterministic

    def unsupported(self, case: SparseBackwardCase, dtype: str) -> str | None:
        return None

    def prepare(self, case: SparseBackwardCase, dtype: str, sets: Sequence[GradientInputs], device: Device) -> Prepared:
        results = [
            Gradients(
                dq=device.empty((case.s_q, case.h_q, case.d_qk), dtype),
                dkv=device.empty((case.s_kv, case.d_qk), dtype),
            )
            for _ in sets
        ]
        backward = with_kernel(mla_cupy.sparse_mla_backward, self._kernel)
        calls: list[Call] = [
            partial(
                backward,
                *(inputs.q, inputs.kv, inputs.out, inputs.dout, inputs.lse, inputs.indices),
                scale=case.scale,
                deterministic=self._deterministic,
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
