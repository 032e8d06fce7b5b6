"""FlashMLA's sparse decode from FP8 records, as the shared object of a wheel ships it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..core.cost import D_V
from ..core.device import Device
from ..core.implementation import Prepared
from ..core.recorders import Call
from ..ops.sparse_decode import SparseDecodeCase, SparseDecodeInputs, SparseDecodeOutputs
from .flashmla import LIBRARY
from .flashmla_sparse import HEADS
from .torch_ops import load, recorder_for

TOPK_MULTIPLE = 64


class FlashMlaSparseDecode:
    """Heads are padded with zeros to a count that it supports, before the timing; padding does not count as work."""

    name = "flashmla"

    def __init__(self, directory: Path) -> None:
        self._torch = load(directory, LIBRARY)
        self._decode: Any = self._torch.ops._flashmla_C.sparse_decode_fwd

    def unsupported(self, case: SparseDecodeCase, dtype: str) -> str | None:
        if dtype != "bfloat16":
            return "takes bfloat16 only"
        if case.record in ("v32-nope", "v41", "fp8"):
            return "takes v32 and v4"
        if case.h_q > max(HEADS):
            return f"takes at most {max(HEADS)} heads"
        multiples = case.topk % TOPK_MULTIPLE == 0 and case.extra % TOPK_MULTIPLE == 0
        return None if multiples else f"takes a topk that is a multiple of {TOPK_MULTIPLE}"

    def prepare(
        self, case: SparseDecodeCase, dtype: str, sets: Sequence[SparseDecodeInputs], device: Device
    ) -> Prepared:
        import cupy

        heads = min(known for known in HEADS if known >= case.h_q)
        recorder = recorder_for(self._torch, device)
        with recorder.current():
            arguments = [self._arguments(inputs, heads) for inputs in sets]
            *_, metadata, splits = self._call(case, arguments[0], None, None)
        latest: list[tuple[Any, ...]] = [()] * len(sets)

        def call(index: int) -> Call:
            def run() -> None:
                latest[index] = tuple(self._call(case, arguments[index], metadata, splits))

            return run

        def outputs(index: int) -> SparseDecodeOutputs:
            out, lse = (cupy.from_dlpack(tensor) for tensor in latest[index][:2])  # lse: (b, heads, s_q)
            queries = case.b * case.s_q
            return SparseDecodeOutputs(
                out.reshape(queries, heads, D_V)[:, : case.h_q],
                lse.transpose(0, 2, 1).reshape(queries, heads)[:, : case.h_q],
            )

        padded = "" if heads == case.h_q else f"; q is padded from {case.h_q} to {heads} heads before"
        return Prepared(
            calls=[call(index) for index in range(len(sets))],
            outputs=outputs,
            recorder=recorder,
            kernel="" if heads == case.h_q else f"padded to {heads} heads",
            includes=f"attention and merge; its metadata is made before{padded}",
        )

    def _call(self, case: SparseDecodeCase, arguments: tuple[Any, ...], metadata: Any, splits: Any) -> Any:
        """Without lengths and sinks; the last argument would be where the result goes."""
        q, (cache, indices), (extra_cache, extra_indices) = arguments
        further = (extra_cache, extra_indices, None, D_V, case.scale, None)
        return self._decode(q, cache, indices, None, None, metadata, splits, *further)

    def _arguments(self, inputs: SparseDecodeInputs, heads: int) -> tuple[Any, ...]:
        """Arrays that the project reads, as tensors; caches have an axis for the one KV head."""
        q = self._torch.from_dlpack(inputs.q)
        if q.shape[2] != heads:
            q = self._torch.nn.functional.pad(q, (0, 0, 0, heads - q.shape[2]))
        pairs: list[tuple[Any, Any]] = []
        for source in inputs.sources:
            cache = self._torch.from_dlpack(source.cache).view(self._torch.float8_e4m3fn)
            pairs.append((cache.unsqueeze(2), self._torch.from_dlpack(source.indices)))
        return q, *pairs, *[(None, None)] * (2 - len(pairs))
