"""The project's plain CUDA kernel, without tensor cores: what a straightforward kernel reaches."""

from __future__ import annotations

from collections.abc import Sequence

import mla_cupy

from ..cases import DecodeCase
from ..device import Device
from ..inputs import InputSet, Outputs, lse_shape, out_shape
from ..recorders import Call
from . import Prepared

KERNEL = "dense_decode_generic"


class Generic:
    """The same public call, with the kernel forced."""

    name = "generic"

    def unsupported(self, case: DecodeCase, dtype: str) -> str | None:
        return None

    def prepare(self, case: DecodeCase, dtype: str, sets: Sequence[InputSet], device: Device) -> Prepared:
        results = [
            Outputs(device.empty(out_shape(case), dtype), device.empty(lse_shape(case), "float32")) for _ in sets
        ]

        def call(inputs: InputSet, result: Outputs) -> Call:
            return lambda: mla_cupy.mla_decode(
                inputs.q,
                inputs.kv_cache,
                inputs.block_table,
                inputs.seqlens,
                out=result.out,
                lse=result.lse,
                variant=KERNEL,
            )

        return Prepared(
            calls=[call(inputs, result) for inputs, result in zip(sets, results, strict=True)],
            outputs=lambda index: results[index],
            recorder=device.recorder(),
            variant=KERNEL,
        )
