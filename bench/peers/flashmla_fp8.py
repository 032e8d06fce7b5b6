"""vLLM's build of FlashMLA for caches of e4m3 with one scale, as the shared object of its wheel ships it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ..core.cost import D_QK, D_V
from ..core.device import Device
from ..core.implementation import Prepared
from ..core.recorders import Call
from ..ops.decode.inputs import Outputs
from ..ops.dense_decode_fp8.cases import Fp8DecodeCase
from ..ops.dense_decode_fp8.check import Fp8Verdict
from ..ops.dense_decode_fp8.inputs import Fp8InputSet
from .torch_ops import load, recorder_for

LIBRARY = "_flashmla_extension_C.abi3.so"
TRUNCATES = "its sums of e4m3 products stay in the tensor cores, which cut off what lies 13 bits below the largest term"
LARGEST_ERROR = 0.25
"""Relative, of results that are excused: 15 % are missing of sums of 8,192 tokens of one sign."""


class FlashMlaFp8:
    """Its dense decode with queries and keys in e4m3; the scheduler's metadata is made in advance."""

    name = "flashmla_fp8"

    def __init__(self, directory: Path) -> None:
        self._torch = load(directory, LIBRARY)
        self._ops: Any = self._torch.ops._flashmla_extension_C

    def unsupported(self, case: Fp8DecodeCase, dtype: str) -> str | None:
        if not case.one_scale:
            return "takes records with one scale only: cases -fp8"
        if dtype != "bfloat16":
            return "writes bfloat16 only"
        return None if case.page_size == 64 else "takes pages of 64 tokens only"

    def prepare(self, case: Fp8DecodeCase, dtype: str, sets: Sequence[Fp8InputSet], device: Device) -> Prepared:
        import cupy

        recorder = recorder_for(self._torch, device)
        with recorder.current():
            tensors = [self._tensors(inputs) for inputs in sets]
            one = self._torch.from_dlpack(device.upload(np.ones(1, np.float32)))
            seqlens = tensors[0][-1]
            metadata, splits = self._ops.get_mla_decoding_metadata_dense_fp8(seqlens, case.s_q * case.h_q, 1)
        latest: list[tuple[Any, Any]] = [(None, None)] * len(sets)

        def call(index: int) -> Call:
            q, cache, table, seqlens = tensors[index]

            def run() -> None:
                # Positional arguments of the operator, in its order: those behind the splits are scales of q and keys.
                arrays = q, cache, D_V, seqlens, table
                out, lse = self._ops.fwd_kvcache_mla_fp8(*arrays, case.scale, True, metadata, splits, one, one)
                latest[index] = out, lse

            return run

        return Prepared(
            calls=[call(index) for index in range(len(sets))],
            outputs=lambda index: Outputs(*map(cupy.from_dlpack, latest[index])),
            recorder=recorder,
            includes="attention and merge; queries are in e4m3 and its metadata is made before",
            excuse=excuse,
        )

    def _tensors(self, inputs: Fp8InputSet) -> tuple[Any, ...]:
        """Queries, records, block table and lengths; the queries are numbers of e4m3 already."""
        arrays = inputs.q, inputs.records, inputs.block_table, inputs.seqlens
        q, records, table, seqlens = (self._torch.from_dlpack(array) for array in arrays)
        e4m3 = self._torch.float8_e4m3fn
        pages, page_size, _ = inputs.records.shape
        return q.to(e4m3), records.view(e4m3).reshape(pages, page_size, 1, D_QK), table, seqlens


def excuse(verdict: Fp8Verdict) -> str:
    """Reason to time a result that misses the tolerance; "" if it is off by more than is known of it."""
    return TRUNCATES if verdict.not_finite == 0 and verdict.out_rms <= LARGEST_ERROR else ""
