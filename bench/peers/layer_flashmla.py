"""A layer of separate calls whose attention is FlashMLA's: dense, or sparse from FP8 records."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

from ..core.cost import D_QK, D_V
from ..core.device import Device
from ..core.recorders import Call
from ..ops.layer import Buffers
from ..ops.layer_cases import LayerCase, LayerInputs
from .flashmla import LIBRARY
from .flashmla_sparse import HEADS
from .layer_calls import SeparateCalls
from .torch_ops import load


class FlashMlaLayer(SeparateCalls):
    """Its metadata is made before; results of dense decode are where it allocates them."""

    name = "flashmla"

    def __init__(self, directory: Path) -> None:
        self._torch = load(directory, LIBRARY)

    def unsupported(self, case: LayerCase, dtype: str) -> str | None:
        if dtype != "bfloat16":
            return "takes bfloat16 only"
        if not case.model.record and case.model.d_qk != D_QK:
            return f"takes keys of width {D_QK} only"
        if case.model.record and case.h_q not in HEADS:
            return f"takes {HEADS[0]} or {HEADS[1]} heads of records: padding would be a further copy"
        return super().unsupported(case, dtype)

    def attend(
        self, case: LayerCase, dtype: str, inputs: LayerInputs, buffers: Buffers, device: Device
    ) -> tuple[Call, Call]:
        """The call, and a function that returns its results."""
        call = self._sparse(case, inputs, buffers) if case.model.record else self._dense(case, inputs, buffers)
        stream = self._torch.cuda.ExternalStream(device.stream.ptr)
        latest: list[Any] = [None]

        def run() -> None:
            with self._torch.cuda.stream(stream):
                latest[0] = call()

        run()
        return run, lambda: _as_array(latest[0], buffers.queries.dtype)

    def _tensor(self, array: Any) -> Any:
        return self._torch.from_dlpack(array)

    def _dense(self, case: LayerCase, inputs: LayerInputs, buffers: Buffers) -> Call:
        decode: Any = self._torch.ops._flashmla_C.dense_decode_fwd
        q, cache = self._tensor(buffers.queries).unsqueeze(1), self._tensor(inputs.cache).unsqueeze(2)
        lengths, table = self._tensor(inputs.seqlens), self._tensor(inputs.block_table)
        run = functools.partial(decode, q, cache, D_V, lengths, table, case.scale, True)
        *_, metadata, splits = run(None, None, None)
        return lambda: run(metadata, splits, None)[0]

    def _sparse(self, case: LayerCase, inputs: LayerInputs, buffers: Buffers) -> Call:
        decode: Any = self._torch.ops._flashmla_C.sparse_decode_fwd
        q = self._tensor(buffers.queries).unsqueeze(1)
        lists = inputs.lists if case.model.extra else buffers.indices
        sink = self._tensor(inputs.sink) if case.model.extra else None
        extra: tuple[Any, Any] = (None, None)
        if case.model.extra:
            extra = self._records(inputs.extra_cache), self._tensor(inputs.extra_lists)
        out = self._tensor(buffers.latents if case.model.absorbs else buffers.out)
        first = q, self._records(inputs.cache), self._tensor(lists), None, sink
        last = *extra, None, D_V, case.scale, out
        *_, metadata, splits = decode(*first, None, None, *last)
        return lambda: decode(*first, metadata, splits, *last)[0]

    def _records(self, cache: Any) -> Any:
        return self._tensor(cache).view(self._torch.float8_e4m3fn).unsqueeze(2)


def _as_array(tensor: Any, dtype: Any) -> Any:
    """A view of a tensor (b, 1, heads, 512) as (b, heads, 512): DLPack would wait for streams."""
    import cupy

    b, _, heads, width = tensor.shape
    memory = cupy.cuda.UnownedMemory(tensor.data_ptr(), 2 * tensor.numel(), tensor)
    return cupy.ndarray((b, heads, width), "uint16", cupy.cuda.MemoryPointer(memory, 0)).view(dtype)
