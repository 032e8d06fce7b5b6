"""FlashMLA, as the shared object of a wheel ships it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..core.cost import D_QK, D_V
from ..core.device import Device
from ..core.implementation import Prepared
from ..core.recorders import Call
from ..ops.decode.cases import DecodeCase
from ..ops.decode.inputs import InputSet, Outputs
from .torch_ops import load, recorder_for

LIBRARY = "_flashmla_C.abi3.so"


class FlashMla:
    """Its dense decode with the scheduler's metadata made in advance, as its interface does after the first call."""

    name = "flashmla"

    def __init__(self, directory: Path) -> None:
        self._torch = load(directory, LIBRARY)
        self._decode: Any = self._torch.ops._flashmla_C.dense_decode_fwd

    def unsupported(self, case: DecodeCase, dtype: str) -> str | None:
        if case.d_qk != D_QK:
            return f"takes keys of width {D_QK} only"
        return None if case.page_size == 64 else "takes pages of 64 tokens only"

    def prepare(self, case: DecodeCase, dtype: str, sets: Sequence[InputSet], device: Device) -> Prepared:
        import cupy

        recorder = recorder_for(self._torch, device)
        tensors = [self._tensors(inputs) for inputs in sets]
        q, cache, table, seqlens = tensors[0]
        with recorder.current():
            *_, metadata, splits = self._decode(q, cache, D_V, seqlens, table, case.scale, True, None, None, None)
        latest: list[tuple[Any, Any]] = [(None, None)] * len(sets)

        def call(index: int) -> Call:
            q, cache, table, seqlens = tensors[index]

            def run() -> None:
                out, lse, *_ = self._decode(q, cache, D_V, seqlens, table, case.scale, True, metadata, splits, None)
                latest[index] = out, lse

            return run

        return Prepared(
            calls=[call(index) for index in range(len(sets))],
            outputs=lambda index: Outputs(*map(cupy.from_dlpack, latest[index])),
            recorder=recorder,
            includes="attention and merge; its metadata is made before",
        )

    def _tensors(self, inputs: InputSet) -> tuple[Any, ...]:
        """Arrays that the project reads, as tensors."""
        arrays = inputs.q, inputs.kv_cache, inputs.block_table, inputs.seqlens
        return tuple(self._torch.from_dlpack(array) for array in arrays)
