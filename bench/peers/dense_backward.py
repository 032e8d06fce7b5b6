"""The backward of attention with keys and values per head: cuDNN through PyTorch.

It takes whole keys and returns whole gradients of them. The figure `with_concatenation` is of calls that make the keys
first, and the gradient of the columns that all heads share, a sum over them, after.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any

from ..core.device import Device
from ..core.errors import BenchError
from ..core.implementation import Prepared
from ..core.recorders import Call
from ..ops.prefill.cases import D_ROPE
from ..ops.prefill_backward.cases import PrefillBackwardCase
from ..ops.prefill_backward.inputs import GradientInputs, Gradients
from .dense import CONCATENATES, whole_keys
from .torch_ops import peak_bytes, recorder_for


class CudnnBackward:
    """Backward that autograd calls after PyTorch's scaled_dot_product_attention with its cuDNN backend."""

    name = "cudnn"

    def __init__(self) -> None:
        try:
            self._torch: Any = importlib.import_module("torch")
        except ImportError as error:
            raise BenchError(f"peer 'cudnn' needs PyTorch, which cannot be imported here: {error}") from error

    def unsupported(self, case: PrefillBackwardCase, dtype: str) -> str | None:
        if case.causal and case.s_q != case.s_kv:
            return "puts the diagonal at the top left"
        return "takes as many heads of keys as of queries" if case.h_q != case.heads_kv else None

    def prepare(
        self, case: PrefillBackwardCase, dtype: str, sets: Sequence[GradientInputs], device: Device
    ) -> Prepared:
        recorder = recorder_for(self._torch, device)
        latest: list[Any] = [None] * len(sets)
        calls: list[Call] = []
        concatenating: list[Call] = []
        with recorder.current():
            for index, inputs in enumerate(sets):
                alone, whole = self._calls(case, inputs, latest, index)
                calls.append(alone)
                concatenating.append(whole)
        return Prepared(
            calls=calls,
            outputs=lambda index: self._outputs(case, latest[index]),
            recorder=recorder,
            includes="attention alone: keys are concatenated before, and the shared columns' gradient is not summed",
            figures={CONCATENATES: concatenating},
            workspace_bytes=lambda: peak_bytes(self._torch, calls[0], lambda: latest[0]),
        )

    def _calls(
        self, case: PrefillBackwardCase, inputs: GradientInputs, latest: list[Any], index: int
    ) -> tuple[Call, Call]:
        torch, width = self._torch, case.d_qk - D_ROPE
        tensor = torch.from_dlpack

        def heads_first(x: Any) -> Any:
            return x.view(case.b, -1, *x.shape[1:]).transpose(1, 2)

        q, kv, dout = (heads_first(tensor(x)) for x in (inputs.q, inputs.kv, inputs.dout))
        rows, k_rope = tensor(inputs.kv), tensor(inputs.k_rope)  # here: DLPack may not synchronise in a capture
        keys, values = heads_first(whole_keys(torch, case, rows, k_rope)), kv[..., width:]
        forward = torch.ops.aten._scaled_dot_product_cudnn_attention
        out, lse, starts_q, starts_k, longest_q, longest_k, seed, offset, _ = forward(
            q, keys, values, None, True, 0.0, case.causal, False, scale=case.scale
        )
        backward = torch.ops.aten._scaled_dot_product_cudnn_attention_backward

        def with_keys(keys: Any) -> Any:
            return backward(
                *(dout, q, keys, values, out, lse, seed, offset, None, starts_q, starts_k, longest_q, longest_k),
                *(0.0, case.causal),
                scale=case.scale,
            )

        def alone() -> None:
            latest[index] = with_keys(keys)

        def whole() -> None:
            dq, dk, dv = with_keys(heads_first(whole_keys(torch, case, rows, k_rope)))
            latest[index] = dq, dk, dv, dk[..., width:].sum(dim=1)

        return alone, whole

    def _outputs(self, case: PrefillBackwardCase, latest: Any) -> Gradients:
        import cupy

        def tokens_first(x: Any) -> Any:
            return cupy.from_dlpack(x.transpose(1, 2).reshape(-1, *x.shape[1:2], x.shape[3]))

        dq, dk, dv = (tokens_first(x) for x in latest[:3])
        return Gradients(dq, dk[..., : case.d_qk - D_ROPE], dv, None)
