"""Dense decode of FlashMLA, and of vLLM's build of it for caches of e4m3, as the shared objects of wheels ship them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ..core.cost import D_QK, D_V
from ..core.device import Device
from ..core.implementation import Prepared
from ..core.recorders import Call
from ..ops.decode import DecodeInputs, DecodeOutputs
from ..ops.decode_cases import DecodeCase
from .torch_ops import load, recorder_for

if TYPE_CHECKING:
    from ..ops.dense_decode_fp8 import Fp8DecodeCase, Fp8DecodeInputs, Fp8Verdict

LIBRARY = "_flashmla_C.abi3.so"
TRUNCATES = "its sums of e4m3 products stay in the tensor cores, which cut off what lies 13 bits below the largest term"
LARGEST_ERROR = 0.25
"""Relative, of results that are excused: 15 % are missing of sums of 8,192 tokens of one sign."""
PAGE_SIZE = 64

Tensors = tuple[Any, ...]


class _Dense:
    """Decode with the scheduler's metadata made in advance, as the interface does after the first call."""

    name: str
    library: str
    includes: str

    def __init__(self, directory: Path) -> None:
        self._torch = load(directory, self.library)

    def prepare(self, case: Any, dtype: str, sets: Sequence[Any], device: Device) -> Prepared:
        import cupy

        recorder = recorder_for(self._torch, device)
        with recorder.current():
            tensors = [self._tensors(inputs) for inputs in sets]
            attend = self._scheduled(case, tensors[0], device)
        latest: list[tuple[Any, Any]] = [(None, None)] * len(sets)

        def call(index: int) -> Call:
            def run() -> None:
                latest[index] = attend(*tensors[index])

            return run

        return Prepared(
            calls=[call(index) for index in range(len(sets))],
            outputs=lambda index: DecodeOutputs(*map(cupy.from_dlpack, latest[index])),
            recorder=recorder,
            includes=self.includes,
            excuse=self.excuse,
        )

    def _tensors(self, inputs: Any) -> Tensors:
        """Queries, cache, block table and lengths."""
        raise NotImplementedError

    def _scheduled(self, case: Any, tensors: Tensors, device: Device) -> Callable[..., tuple[Any, Any]]:
        """The function of such tensors that returns out and lse, with the metadata for these."""
        raise NotImplementedError

    def excuse(self, verdict: Any) -> str:
        """Reason to time a result that misses the tolerance; "" if there is none."""
        return ""


class FlashMla(_Dense):
    """Over 16-bit rows."""

    name = "flashmla"
    library = LIBRARY
    includes = "attention and merge; its metadata is made before"

    def unsupported(self, case: DecodeCase, dtype: str) -> str | None:
        if case.d_qk != D_QK:
            return f"takes keys of width {D_QK} only"
        return None if case.page_size == PAGE_SIZE else f"takes pages of {PAGE_SIZE} tokens only"

    def _tensors(self, inputs: DecodeInputs) -> Tensors:
        arrays = inputs.q, inputs.kv_cache, inputs.block_table, inputs.seqlens
        return tuple(self._torch.from_dlpack(array) for array in arrays)

    def _scheduled(self, case: DecodeCase, tensors: Tensors, device: Device) -> Callable[..., tuple[Any, Any]]:
        decode: Any = self._torch.ops._flashmla_C.dense_decode_fwd

        def run(arrays: Tensors, metadata: Any = None, splits: Any = None) -> Any:
            q, cache, table, seqlens = arrays
            return decode(q, cache, D_V, seqlens, table, case.scale, True, metadata, splits, None)

        *_, metadata, splits = run(tensors)
        return lambda *arrays: run(arrays, metadata, splits)[:2]


class FlashMlaFp8(_Dense):
    """Queries and keys in e4m3."""

    name = "flashmla_fp8"
    library = "_flashmla_extension_C.abi3.so"
    includes = "attention and merge; queries are in e4m3 and its metadata is made before"

    def unsupported(self, case: Fp8DecodeCase, dtype: str) -> str | None:
        if not case.one_scale:
            return "takes records with one scale only: cases -fp8"
        if dtype != "bfloat16":
            return "writes bfloat16 only"
        return None if case.page_size == PAGE_SIZE else f"takes pages of {PAGE_SIZE} tokens only"

    def _tensors(self, inputs: Fp8DecodeInputs) -> Tensors:
        """The queries are numbers of e4m3 already."""
        arrays = inputs.q, inputs.records, inputs.block_table, inputs.seqlens
        q, records, table, seqlens = (self._torch.from_dlpack(array) for array in arrays)
        e4m3 = self._torch.float8_e4m3fn
        pages, page_size, _ = inputs.records.shape
        return q.to(e4m3), records.view(e4m3).reshape(pages, page_size, 1, D_QK), table, seqlens

    def _scheduled(self, case: Fp8DecodeCase, tensors: Tensors, device: Device) -> Callable[..., tuple[Any, Any]]:
        ops: Any = self._torch.ops._flashmla_extension_C
        one = self._torch.from_dlpack(device.upload(np.ones(1, np.float32)))
        plan = ops.get_mla_decoding_metadata_dense_fp8(tensors[-1], case.s_q * case.h_q, 1)

        def run(q: Any, cache: Any, table: Any, seqlens: Any) -> tuple[Any, Any]:
            # Positional arguments of the operator, in its order: those behind the plan are scales of q and keys.
            out, lse = ops.fwd_kvcache_mla_fp8(q, cache, D_V, seqlens, table, case.scale, True, *plan, one, one)
            return out, lse

        return run

    def excuse(self, verdict: Fp8Verdict) -> str:
        """Excuse results that are off by no more than is known of it."""
        return TRUNCATES if verdict.not_finite == 0 and verdict.out_rms <= LARGEST_ERROR else ""
