"""`sparse_mla_decode` through its public call, with results written in place."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import mla_cupy

from ...core.cost import D_V
from ...core.device import Device
from ...core.implementation import OWN, Prepared, with_kernel
from ...core.recorders import Call
from .cases import SparseDecodeCase
from .inputs import SparseDecodeInputs, SparseDecodeOutputs

GENERIC = "sparse_decode_generic"  # without tensor cores
#: Kernels to be compared with the one that is chosen: Hopper's two, and those of GPUs without WGMMA.
NAMED = "sparse_decode_sm90", "sparse_decode_sm90_small", "sparse_decode_mma", "sparse_decode_mma_163kb"


class SparseDecode:
    """The call of a decoding step: attention and merge."""

    def __init__(self, kernel: str | None = None, name: str = OWN) -> None:
        self.name, self._kernel = name, kernel

    def unsupported(self, case: SparseDecodeCase, dtype: str) -> str | None:
        return "converts" if case.math != "exact" and self._kernel in (GENERIC, *NAMED) else None

    def prepare(
        self, case: SparseDecodeCase, dtype: str, sets: Sequence[SparseDecodeInputs], device: Device
    ) -> Prepared:
        rows = case.b, case.s_q, case.h_q
        results = [(device.empty((*rows, D_V), dtype), device.empty(rows, "float32")) for _ in sets]
        decode = with_kernel(mla_cupy.sparse_mla_decode, self._kernel)

        def call(inputs: SparseDecodeInputs, out: object, lse: object) -> Call:
            first, *more = inputs.sources
            extra = {"extra_kv_cache": more[0].cache, "extra_indices": more[0].indices} if more else {}
            if inputs.sink is not None:
                extra["attn_sink"] = inputs.sink
            if case.math != "exact":  # older trees know one
                extra["fp8"] = mla_cupy.Fp8("fp8")
            return partial(decode, inputs.q, first.cache, first.indices, **extra, scale=case.scale, out=out, lse=lse)

        calls = [call(inputs, *result) for inputs, result in zip(sets, results, strict=True)]
        return Prepared(
            calls=calls,
            outputs=lambda index: flat(case, *results[index]),
            recorder=device.recorder(),
            kernel=self._kernel or "",
            includes="attention and merge",
            workspace_bytes=lambda: device.allocated_by(calls[0]),
        )


def flat(case: SparseDecodeCase, out: object, lse: object) -> SparseDecodeOutputs:
    """Results with one axis of queries."""
    queries = case.b * case.s_q
    arrays = (x.reshape(queries, case.h_q, *more) for x, more in ((out, (D_V,)), (lse, ())))  # type: ignore[attr-defined]
    return SparseDecodeOutputs(*arrays)
