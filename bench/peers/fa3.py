"""FlashAttention-3 in its MLA form (values of 512 beside keys of 64), as the shared object of a wheel ships it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..core.cost import D_QK, D_V
from ..core.device import Device
from ..core.implementation import Prepared
from ..core.recorders import Call
from ..ops.decode import DecodeInputs, DecodeOutputs, out_shape
from ..ops.decode_cases import DecodeCase
from .torch_ops import load, recorder_for

LIBRARY = "_vllm_fa3_C.abi3.so"


class FlashAttention3:
    """It takes q as two contiguous arrays, split before the timing starts; its lse is not checked."""

    name = "fa3"

    def __init__(self, directory: Path) -> None:
        self._torch = load(directory, LIBRARY)
        self._forward: Any = self._torch.ops._vllm_fa3_C.fwd

    def unsupported(self, case: DecodeCase, dtype: str) -> str | None:
        return None if case.d_qk == D_QK else f"takes keys of width {D_QK} only"

    def prepare(self, case: DecodeCase, dtype: str, sets: Sequence[DecodeInputs], device: Device) -> Prepared:
        import cupy

        recorder = recorder_for(self._torch, device)
        starts = self._torch.from_dlpack(cupy.arange(0, case.b * case.s_q + 1, case.s_q, dtype="int32"))
        results = [DecodeOutputs(device.empty(out_shape(case), dtype), None) for _ in sets]
        with recorder.current():
            calls = [self._call(case, inputs, result, starts) for inputs, result in zip(sets, results, strict=True)]
        return Prepared(
            calls=calls,
            outputs=lambda index: results[index],
            recorder=recorder,
            includes="its preparing kernel, attention and merge; q is split in two before",
        )

    def _call(self, case: DecodeCase, inputs: DecodeInputs, result: DecodeOutputs, starts: Any) -> Call:
        tensor = self._torch.from_dlpack
        q, cache = tensor(inputs.q), tensor(inputs.kv_cache)
        table, seqlens = tensor(inputs.block_table), tensor(inputs.seqlens)
        out = tensor(result.out).view(-1, case.h_q, D_V)
        q_nope, q_rope = q.view(-1, case.h_q, D_QK).split([D_V, D_QK - D_V], dim=-1)
        q_nope, q_rope = q_nope.contiguous(), q_rope.contiguous()
        k_rope, values = cache[..., D_V:], cache[..., :D_V]
        # Positional arguments of the operator, in its order; what is not used is None.
        arguments = (
            *(q_rope, k_rope, values, None, None, q_nope, out),  # q, k, v, new k, new v, q_v, out
            *(starts, None, None, None, seqlens),  # cumulated q lengths, k, new k; used q, used k
            *(case.s_q, case.s_kv, table),  # longest q, longest k, page table
            *(None,) * 8,  # batch index, left padding, rotary cos, sin and lengths, descale factors
            *(case.scale, True, -1, -1, 0.0, False),  # scale, causal, window, softcap, interleaved rotary
            *(None, 0, True, 0, None),  # scheduler metadata, splits (its heuristic), packed heads, SM margin, sinks
            *(1, 0, None),
        )
        return lambda: self._forward(*arguments)
