"""The sparse attention backward of cudnn-frontend (CuTe DSL), which compiles its kernels at the first call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..core.device import Device
from ..core.implementation import Prepared
from ..core.recorders import Call
from ..ops.sparse import SparseCase
from ..ops.sparse_backward import GradientInputs, Gradients
from . import cudnn
from .torch_ops import peak_bytes, recorder_for


class CudnnSparse:
    """Its convenience call, which allocates results and workspace. No sink is expressed as a sink of -inf."""

    name = "cudnn"

    def __init__(self) -> None:
        self._torch, dsa = cudnn.load()
        self._backward = dsa.sparse_attention_backward_wrapper

    def unsupported(self, case: SparseCase, dtype: str) -> str | None:
        return None if case.h_q > 1 else "takes more than one head"

    def prepare(self, case: SparseCase, dtype: str, sets: Sequence[GradientInputs], device: Device) -> Prepared:
        import cupy

        torch = self._torch
        recorder = recorder_for(torch, device)
        with recorder.current():
            sink = torch.full((case.h_q,), float("-inf"), device="cuda")
        latest: list[tuple[Any, ...]] = [()] * len(sets)

        def call(index: int) -> Call:
            inputs = sets[index]
            arrays = inputs.q, inputs.kv, inputs.out, inputs.dout, inputs.lse, inputs.indices
            q, kv, out, dout, lse, indices = (torch.from_dlpack(array) for array in arrays)

            def run() -> None:
                found = self._backward(q, kv, out, dout, lse, sink, indices, softmax_scale=case.scale)
                latest[index] = found["dq"], found["dkv"], found["d_sink"]

            return run

        calls = [call(index) for index in range(len(sets))]
        return Prepared(
            calls=calls,
            outputs=lambda index: Gradients(*map(cupy.from_dlpack, latest[index][:2])),
            recorder=recorder,
            workspace_bytes=lambda: peak_bytes(torch, calls[0], lambda: latest[0]),
        )
