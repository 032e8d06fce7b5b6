"""DeepGEMM's logits of the lightning indexer: a Python package that compiles its kernels with nvcc."""

from __future__ import annotations

import importlib
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..core.device import Device
from ..core.errors import BenchError, RefusedError
from ..core.implementation import Prepared
from ..core.recorders import Call
from ..ops.indexer_logits import PAGE_SIZE, LogitsCase, LogitsInputs, outputs_of
from .torch_ops import recorder_for

HEADS = (32, 64)  # its kernels' head counts
TOKENS_OF_A_PAIR = 4  # next tokens for which thread blocks work in pairs, in versions that support 4 on Hopper


class DeepGemm:
    """Its public calls; the metadata of paged calls is made in advance. In prefill, -inf outside the ranges as ours."""

    name = "deep_gemm"

    def __init__(self, directory: Path) -> None:
        if not (directory / "deep_gemm" / "__init__.py").is_file():
            raise BenchError(f"--peers-dir: {directory / 'deep_gemm'} is not there; unpack its package there")
        sys.path.insert(0, str(directory))
        try:
            self._torch: Any = importlib.import_module("torch")
            self._gemm: Any = importlib.import_module("deep_gemm")
        except ImportError as error:
            raise BenchError(f"deep_gemm cannot be imported here: {error}") from error

    def unsupported(self, case: LogitsCase, dtype: str) -> str | None:
        if case.bf16 or case.e2m1:
            return "takes e4m3 only"
        return None if case.h in HEADS else f"takes {HEADS[0]} or {HEADS[1]} heads"

    def prepare(self, case: LogitsCase, dtype: str, sets: Sequence[LogitsInputs], device: Device) -> Prepared:
        import cupy

        recorder = recorder_for(self._torch, device)
        latest: list[Any] = [None] * len(sets)
        with recorder.current():
            calls = [self._call(case, inputs, latest, index) for index, inputs in enumerate(sets)]
        shape = (case.b, case.s_q, case.num_keys) if case.b else (case.s_q, case.num_keys)

        def outputs(index: int) -> Any:
            logits = cupy.from_dlpack(latest[index])[:, : case.num_keys].reshape(shape)
            if case.b:  # it leaves what a token does not see undefined
                for token in range(case.s_q):
                    logits[:, token, max(0, case.keys_of_first + token) :] = -math.inf
            return outputs_of(case, logits)

        paged = "no -inf past a token's last key, and a schedule that is made in advance"
        return Prepared(calls=calls, outputs=outputs, recorder=recorder, includes=paged if case.b else "")

    def _call(self, case: LogitsCase, inputs: LogitsInputs, latest: list[Any], index: int) -> Call:
        tensors = {name: self._torch.from_dlpack(x) for name, x in inputs.arguments.items()}
        tensors["q"] = tensors["q"].view(self._torch.float8_e4m3fn)
        run = self._paged(case, tensors) if case.b else self._prefill(tensors)

        def call() -> None:
            latest[index] = run()

        return call

    def _prefill(self, x: dict[str, Any]) -> Any:
        keys = x["k"].view(self._torch.float8_e4m3fn), x["k_scale"]
        return lambda: self._gemm.fp8_mqa_logits(x["q"], keys, x["weights"], x["ks"], x["ke"], clean_logits=True)

    def _paged(self, case: LogitsCase, x: dict[str, Any]) -> Any:
        """Lengths are per token, (b, s_q); blocks that share keys count once in the schedule."""
        weights, seqlens = x["weights"].reshape(case.b * case.s_q, case.h), x["seqlens"]
        tokens = self._torch.arange(case.s_q, device=seqlens.device, dtype=seqlens.dtype)
        lengths = (seqlens[:, None] - case.s_q + 1 + tokens).contiguous()
        shares = self._gemm.get_num_sms() // (2 if case.s_q == TOKENS_OF_A_PAIR else 1)
        try:
            metadata = self._gemm.get_paged_mqa_logits_metadata(lengths, PAGE_SIZE, shares)
            arrays = (x["q"], x["cache"], weights, lengths, x["block_table"], metadata, case.num_keys)
            self._gemm.fp8_paged_mqa_logits(*arrays, clean_logits=False)
        except RuntimeError as error:
            first_line = str(error).strip().partition("\n")[0]
            if first_line.startswith("Assertion error"):  # on the host, before a launch
                raise RefusedError(
                    f"this version does not take {case.s_q} tokens per sequence: {first_line}"
                ) from error
            raise BenchError(f"deep_gemm: {first_line}") from error
        return lambda: self._gemm.fp8_paged_mqa_logits(*arrays, clean_logits=False)
