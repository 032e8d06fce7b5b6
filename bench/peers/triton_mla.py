"""Triton's MLA decode, as vLLM has it: a Python file of its kernels, which needs Triton and PyTorch only."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path

from ..core.cost import D_QK, D_V
from ..core.device import Device
from ..core.errors import BenchError
from ..core.implementation import Prepared
from ..core.recorders import Call
from ..ops.decode import DecodeInputs, DecodeOutputs, out_shape
from ..ops.decode_cases import DecodeCase
from .torch_ops import import_torch, recorder_for

FILE = "triton_mla.py"
SPLITS = (1, 2, 4, 8, 16, 32)


class TritonMla:
    """Decode with the number of splits that is fastest for the case; its lse is in 16 bits and is not checked."""

    name = "triton"

    def __init__(self, directory: Path) -> None:
        if not (directory / FILE).is_file():
            raise BenchError(f"--peers-dir: {directory / FILE} is not there")
        self._torch = import_torch(FILE)
        spec = importlib.util.spec_from_file_location("triton_mla", directory / FILE)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        self._attend = module.decode_attention_fwd

    def unsupported(self, case: DecodeCase, dtype: str) -> str | None:
        if case.s_q != 1:
            return "takes one query token"
        return None if case.d_qk == D_QK else f"takes keys of width {D_QK} only"

    def prepare(self, case: DecodeCase, dtype: str, sets: Sequence[DecodeInputs], device: Device) -> Prepared:
        recorder = recorder_for(self._torch, device)
        results = [DecodeOutputs(device.empty(out_shape(case), dtype), None) for _ in sets]
        with recorder.current():
            by_splits = {splits: self._call(case, sets[0], results[0], splits) for splits in SPLITS}
            best = min(SPLITS, key=lambda splits: self._milliseconds(by_splits[splits]))
            calls = [self._call(case, inputs, result, best) for inputs, result in zip(sets, results, strict=True)]
        return Prepared(
            calls=calls,
            outputs=lambda index: results[index],
            recorder=recorder,
            includes=f"attention and merge, in {best} splits",
        )

    def _milliseconds(self, call: Call) -> float:
        events = [self._torch.cuda.Event(enable_timing=True) for _ in range(2)]
        for _ in range(2):
            call()
        events[0].record()
        for _ in range(3):
            call()
        events[1].record()
        events[1].synchronize()
        return float(events[0].elapsed_time(events[1]))

    def _call(self, case: DecodeCase, inputs: DecodeInputs, result: DecodeOutputs, splits: int) -> Call:
        torch, tensor = self._torch, self._torch.from_dlpack
        q, cache = tensor(inputs.q)[:, 0], tensor(inputs.kv_cache)
        out, table, seqlens = tensor(result.out)[:, 0], tensor(inputs.block_table), tensor(inputs.seqlens)
        lse = torch.empty(case.b, case.h_q, device=q.device, dtype=q.dtype)
        partial = torch.empty(case.b, case.h_q, splits, D_V + 1, device=q.device)
        one = torch.ones((), device=q.device)
        arguments = (q, cache, cache[..., :D_V], out, lse, table, seqlens, partial, splits, case.scale, case.page_size)
        return lambda: self._attend(*arguments, k_scale=one, v_scale=one, is_mla=True)
