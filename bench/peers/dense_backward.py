"""The backward of attention with keys and values per head: cuDNN through PyTorch, or its deterministic algorithm.

PyTorch's call has no way to ask for that; a graph of cudnn-frontend's has. Both take whole keys and return whole
gradients of them. The figure `with_concatenation` is of calls that make the keys first, and the gradient of the columns
that all heads share, a sum over them, after.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from ..core.device import Device
from ..core.errors import BenchError
from ..core.implementation import Prepared
from ..core.recorders import Call
from ..ops.prefill import D_ROPE
from ..ops.prefill_backward import GradientInputs, Gradients, PrefillBackwardCase
from .dense import CONCATENATES, whole_keys
from .torch_ops import import_torch, peak_bytes, recorder_for


class BackwardPeer:
    """Base of the peers, whatever the order of their arrays' axes: the operands, and both ways to call."""

    name = ""

    def __init__(self, torch: Any) -> None:
        self._torch = torch

    def unsupported(self, case: PrefillBackwardCase, dtype: str) -> str | None:
        raise NotImplementedError

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
        q, kv, dout = (self._laid_out(case, tensor(x)) for x in (inputs.q, inputs.kv, inputs.dout))
        rows, k_rope = tensor(inputs.kv), tensor(inputs.k_rope)  # here: DLPack may not synchronise in a capture
        keys, values = self._laid_out(case, whole_keys(torch, case, rows, k_rope)), kv[..., width:]
        with_keys = self._backward(case, inputs, q, keys, values, dout)

        def alone() -> None:
            latest[index] = with_keys(keys)

        def whole() -> None:
            dq, dk, dv = with_keys(self._laid_out(case, whole_keys(torch, case, rows, k_rope)))
            latest[index] = dq, dk, dv, dk[..., width:].sum(dim=1)  # heads are axis 1 in either order

        return alone, whole

    def _laid_out(self, case: PrefillBackwardCase, x: Any) -> Any:
        """An array (b s, h, d) in the peer's order."""
        raise NotImplementedError

    def _tokens_first(self, x: Any) -> Any:
        """The inverse."""
        raise NotImplementedError

    def _backward(
        self, case: PrefillBackwardCase, inputs: GradientInputs, q: Any, keys: Any, values: Any, dout: Any
    ) -> Callable[[Any], Any]:
        """Takes keys and returns the gradients. Arrays are in the peer's order."""
        raise NotImplementedError

    def _outputs(self, case: PrefillBackwardCase, latest: Any) -> Gradients:
        import cupy

        dq, dk, dv = (cupy.from_dlpack(self._tokens_first(x)) for x in latest[:3])
        return Gradients(dq, dk[..., : case.d_qk - D_ROPE], dv, None)


class CudnnBackward(BackwardPeer):
    """Backward that autograd calls after PyTorch's scaled_dot_product_attention with its cuDNN backend."""

    name = "cudnn"

    def __init__(self) -> None:
        super().__init__(import_torch(f"peer {self.name!r}"))

    def unsupported(self, case: PrefillBackwardCase, dtype: str) -> str | None:
        if case.causal and case.s_q != case.s_kv:
            return "puts the diagonal at the top left"
        return "needs one key head per query head" if case.h_q != case.heads_kv else None

    def _laid_out(self, case: PrefillBackwardCase, x: Any) -> Any:
        return x.view(case.b, -1, *x.shape[1:]).transpose(1, 2)

    def _tokens_first(self, x: Any) -> Any:
        return x.transpose(1, 2).reshape(-1, *x.shape[1:2], x.shape[3])

    def _backward(
        self, case: PrefillBackwardCase, inputs: GradientInputs, q: Any, keys: Any, values: Any, dout: Any
    ) -> Callable[[Any], Any]:
        torch = self._torch
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

        return with_keys


class CudnnDeterministicBackward(CudnnBackward):
    """A graph of cudnn-frontend's with the deterministic algorithm, on what PyTorch's forward has left."""

    name = "cudnn_deterministic"

    def __init__(self) -> None:
        super().__init__()
        try:
            self._cudnn: Any = importlib.import_module("cudnn")
        except ImportError as error:
            raise BenchError(f"peer {self.name!r} needs nvidia-cudnn-frontend: {error}") from error
        self._handle: Any = None
        self._workspace: Any = None

    def prepare(
        self, case: PrefillBackwardCase, dtype: str, sets: Sequence[GradientInputs], device: Device
    ) -> Prepared:
        self._handle, self._workspace = self._cudnn.create_handle(), None
        prepared = super().prepare(case, dtype, sets, device)
        return replace(prepared, workspace_bytes=lambda: self._workspace.numel())

    def _backward(
        self, case: PrefillBackwardCase, inputs: GradientInputs, q: Any, keys: Any, values: Any, dout: Any
    ) -> Callable[[Any], Any]:
        torch, cudnn, handle = self._torch, self._cudnn, self._handle
        forward = torch.ops.aten._scaled_dot_product_cudnn_attention
        out, lse = forward(q, keys, values, None, True, 0.0, case.causal, False, scale=case.scale)[:2]
        given = {"q": q, "k": keys, "v": values, "o": out, "dO": dout, "stats": lse.view(*q.shape[:3], 1)}
        kind = {torch.bfloat16: cudnn.data_type.BFLOAT16, torch.float16: cudnn.data_type.HALF}
        single = cudnn.data_type.FLOAT
        graph = cudnn.pygraph(
            handle=handle, io_data_type=kind[q.dtype], intermediate_data_type=single, compute_data_type=single
        )
        nodes = {
            name: graph.tensor(
                name=name, dim=list(x.shape), stride=list(x.stride()), data_type=kind.get(x.dtype, single)
            )
            for name, x in given.items()
        }
        gradients = graph.sdpa_backward(
            **nodes, attn_scale=case.scale, use_causal_mask=case.causal, use_deterministic_algorithm=True
        )
        for node, x in zip(gradients, (q, keys, values), strict=True):
            node.set_output(True).set_dim(list(x.shape)).set_stride(_packed_strides(x.shape))
            node.set_data_type(kind[q.dtype])
        graph.build([cudnn.heur_mode.A, cudnn.heur_mode.FALLBACK])
        size = graph.get_workspace_size()
        if self._workspace is None:  # all sets have one shape, and one call runs at a time
            self._workspace = torch.empty(max(size, 1), device=q.device, dtype=torch.uint8)

        def with_keys(keys: Any) -> Any:
            made = [
                torch.empty_strided(x.shape, _packed_strides(x.shape), dtype=x.dtype, device=x.device)
                for x in (q, keys, values)
            ]
            arrays = dict(zip(nodes.values(), {**given, "k": keys}.values(), strict=True))
            cudnn.set_stream(handle=handle, stream=torch.cuda.current_stream().cuda_stream)
            graph.execute({**arrays, **dict(zip(gradients, made, strict=True))}, self._workspace, handle=handle)
            return made

        return with_keys


def _packed_strides(shape: Sequence[int]) -> list[int]:
    """Strides of (b, h, s, d), which lie as (b, s, h, d)."""
    _, h, s, d = shape
    return [s * h * d, d, h * d, 1]
