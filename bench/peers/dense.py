"""Attention with keys and values per head: FlashAttention-3 as a wheel ships it, and cuDNN through PyTorch.

They take whole keys, so those are concatenated before the timing starts. What that takes is a figure of its own: calls
that concatenate first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ..core.device import Device
from ..core.implementation import Prepared
from ..core.recorders import Call
from ..ops.prefill import D_ROPE, PrefillCase, PrefillInputs, PrefillOutputs
from .torch_ops import import_torch, load, peak_bytes, recorder_for

LIBRARY = "_vllm_fa3_C.abi3.so"
CONCATENATES = "with_concatenation"
INCLUDES = "attention alone: keys are concatenated before"

#: Takes whole keys and values.
Attend = Callable[[Any, Any], object]


def whole_keys(torch: Any, case: PrefillCase, kv: Any, k_rope: Any) -> Any:
    shared = k_rope[:, None].expand(-1, case.heads_kv, -1)
    return torch.cat([kv[..., : case.d_qk - D_ROPE], shared], dim=-1)


class DensePeer:
    """Base of the peers: the operands, and both ways to call."""

    name = ""

    def __init__(self, torch: Any) -> None:
        self._torch = torch

    def unsupported(self, case: PrefillCase, dtype: str) -> str | None:
        if case.topk:
            return "takes no mask"
        if case.fp8:
            return "is called with 16 bits"
        return "merges no earlier state" if case.state else None

    def prepare(self, case: PrefillCase, dtype: str, sets: Sequence[PrefillInputs], device: Device) -> Prepared:
        torch = self._torch
        recorder = recorder_for(torch, device)
        latest: list[Any] = [None] * len(sets)
        calls: list[Call] = []
        concatenating: list[Call] = []
        with recorder.current():
            for index, inputs in enumerate(sets):
                kv, k_rope = torch.from_dlpack(inputs.kv), torch.from_dlpack(inputs.k_rope)
                values = kv[..., case.d_qk - D_ROPE :]
                attend = self._attend(case, inputs, latest, index)
                calls.append(_alone(attend, whole_keys(torch, case, kv, k_rope), values))
                concatenating.append(_after_concatenation(torch, case, attend, kv, k_rope, values))
        return Prepared(
            calls=calls,
            outputs=lambda index: self._outputs(case, latest[index]),
            recorder=recorder,
            includes=INCLUDES,
            figures={CONCATENATES: concatenating},
            workspace_bytes=lambda: peak_bytes(torch, calls[0], lambda: [latest[0]]),
        )

    def _attend(self, case: PrefillCase, inputs: PrefillInputs, latest: list[Any], index: int) -> Attend:
        raise NotImplementedError

    def _outputs(self, case: PrefillCase, out: Any) -> PrefillOutputs:
        import cupy

        return PrefillOutputs(cupy.from_dlpack(out.reshape(case.b * case.s_q, case.h_q, case.d_v)), None)


def _alone(attend: Attend, keys: Any, values: Any) -> Call:
    return lambda: attend(keys, values)


def _after_concatenation(torch: Any, case: PrefillCase, attend: Attend, kv: Any, k_rope: Any, values: Any) -> Call:
    return lambda: attend(whole_keys(torch, case, kv, k_rope), values)


class FlashAttention3Dense(DensePeer):
    """The varlen call; its lse is not checked."""

    name = "fa3"

    def __init__(self, directory: Path) -> None:
        super().__init__(load(directory, LIBRARY))
        self._forward: Any = self._torch.ops._vllm_fa3_C.fwd

    def _attend(self, case: PrefillCase, inputs: PrefillInputs, latest: list[Any], index: int) -> Attend:
        tensor = self._torch.from_dlpack
        q, starts_q, starts_kv = (tensor(x) for x in (inputs.q, inputs.starts_q, inputs.starts_kv))

        def attend(keys: Any, values: Any) -> None:
            # Positional arguments of the operator, in its order; what is not used is None.
            latest[index] = self._forward(
                *(q, keys, values, None, None, None, None),  # q, k, v, new k, new v, q_v, out
                *(starts_q, starts_kv, None, None, None),  # cumulated q lengths, k, new k; used q, used k
                *(case.s_q, case.s_kv, None),  # longest q, longest k, page table
                *(None,) * 8,  # batch index, left padding, rotary cos, sin and lengths, descale factors
                *(case.scale, case.causal, -1, -1, 0.0, True),  # scale, causal, window, softcap, interleaved rotary
                *(None, 0, None, 0, None),  # scheduler metadata, splits (its heuristic), packed heads, SM margin, sinks
                *(1, 0, None),
            )[0]

        return attend


class CudnnAttention(DensePeer):
    """PyTorch's scaled_dot_product_attention with its cuDNN backend."""

    name = "cudnn"

    def __init__(self) -> None:
        super().__init__(import_torch(f"peer {self.name!r}"))

    def unsupported(self, case: PrefillCase, dtype: str) -> str | None:
        if case.causal and case.s_q != case.s_kv:
            return "puts the diagonal at the top left"
        return super().unsupported(case, dtype)

    def _attend(self, case: PrefillCase, inputs: PrefillInputs, latest: list[Any], index: int) -> Attend:
        torch = self._torch

        def heads_first(x: Any, tokens: int) -> Any:
            return x.view(case.b, tokens, *x.shape[1:]).transpose(1, 2)

        q = heads_first(torch.from_dlpack(inputs.q), case.s_q)
        attention, kernels = torch.nn.functional.scaled_dot_product_attention, torch.nn.attention

        def attend(keys: Any, values: Any) -> None:
            k, v = heads_first(keys, case.s_kv), heads_first(values, case.s_kv)
            with kernels.sdpa_kernel(kernels.SDPBackend.CUDNN_ATTENTION):
                grouped = case.h_q != case.heads_kv
                found = attention(q, k, v, is_causal=case.causal, scale=case.scale, enable_gqa=grouped)
            latest[index] = found.transpose(1, 2)

        return attend
