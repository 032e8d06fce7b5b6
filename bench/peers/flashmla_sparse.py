"""FlashMLA's sparse prefill, as the shared object of a wheel ships it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..core.cost import D_V
from ..core.device import Device
from ..core.implementation import Prepared
from ..core.recorders import Call
from ..ops.sparse import SparseCase, SparseInputs, SparseOutputs
from .flashmla import LIBRARY
from .torch_ops import load, peak_bytes, recorder_for

HEADS = (64, 128)  # its kernels' head counts
TOPK_MULTIPLE = 128


class FlashMlaSparse:
    """Heads are padded with zeros to a count that it supports, before the timing; padding does not count as work."""

    name = "flashmla"

    def __init__(self, directory: Path) -> None:
        self._torch = load(directory, LIBRARY)
        self._prefill: Any = self._torch.ops._flashmla_C.sparse_prefill_fwd

    def unsupported(self, case: SparseCase, dtype: str) -> str | None:
        if dtype != "bfloat16":
            return "takes bfloat16 only"
        if case.h_q > max(HEADS):
            return f"takes at most {max(HEADS)} heads"
        return None if case.topk % TOPK_MULTIPLE == 0 else f"takes a topk that is a multiple of {TOPK_MULTIPLE}"

    def prepare(self, case: SparseCase, dtype: str, sets: Sequence[SparseInputs], device: Device) -> Prepared:
        import cupy

        heads = min(known for known in HEADS if known >= case.h_q)
        recorder = recorder_for(self._torch, device)
        with recorder.current():
            tensors = [self._tensors(inputs, heads) for inputs in sets]
        latest: list[tuple[Any, ...]] = [()] * len(sets)

        def call(index: int) -> Call:
            def run() -> None:
                latest[index] = tuple(self._prefill(*tensors[index], case.scale, D_V, None, None, None))

            return run

        def outputs(index: int) -> SparseOutputs:
            out, max_logits, lse = (cupy.from_dlpack(tensor)[:, : case.h_q] for tensor in latest[index])
            return SparseOutputs(out, lse, max_logits)

        calls = [call(index) for index in range(len(sets))]
        return Prepared(
            calls=calls,
            outputs=outputs,
            recorder=recorder,
            kernel="" if heads == case.h_q else f"padded to {heads} heads",
            workspace_bytes=lambda: peak_bytes(self._torch, calls[0], lambda: latest[0]),
        )

    def _tensors(self, inputs: SparseInputs, heads: int) -> tuple[Any, ...]:
        """Arrays that the project reads, as tensors with an axis for the one KV head."""
        q, kv, indices = (self._torch.from_dlpack(array) for array in (inputs.q, inputs.kv, inputs.indices))
        if q.shape[1] != heads:
            q = self._torch.nn.functional.pad(q, (0, 0, 0, heads - q.shape[1]))
        return q, kv.unsqueeze(1), indices.unsqueeze(1)
