"""Attention with keys and values per head by FlashAttention-4 (CuTe DSL), forward and backward.

Its kernels are compiled when they are first called. They take whole keys, and sequences packed behind each other.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from ..core.errors import BenchError
from ..ops.prefill import PrefillCase, PrefillInputs
from ..ops.prefill_backward import GradientInputs, PrefillBackwardCase
from .dense import Attend, DensePeer
from .dense_backward import BackwardPeer
from .torch_ops import import_torch


def load() -> tuple[Any, Any]:
    """PyTorch and the module of its calls."""
    torch = import_torch("peer 'fa4'")
    try:
        return torch, importlib.import_module("flash_attn.cute.interface")
    except ImportError as error:
        raise BenchError(f"peer 'fa4' needs flash-attn-4, which cannot be imported here: {error}") from error


def _sequences(torch: Any, case: PrefillCase, inputs: PrefillInputs) -> dict[str, Any]:
    return {
        "cu_seqlens_q": torch.from_dlpack(inputs.starts_q),
        "cu_seqlens_k": torch.from_dlpack(inputs.starts_kv),
        "max_seqlen_q": case.s_q,
        "max_seqlen_k": case.s_kv,
        "softmax_scale": case.scale,
        "causal": case.causal,
    }


class FlashAttention4(DensePeer):
    """The varlen call with its lse, which is not checked."""

    name = "fa4"

    def __init__(self) -> None:
        torch, self._interface = load()
        super().__init__(torch)

    def _attend(self, case: PrefillCase, inputs: PrefillInputs, latest: list[Any], index: int) -> Attend:
        q, sequences = self._torch.from_dlpack(inputs.q), _sequences(self._torch, case, inputs)
        forward = self._interface.flash_attn_varlen_func

        def attend(keys: Any, values: Any) -> None:
            latest[index] = forward(q, keys, values, return_lse=True, **sequences)[0]

        return attend


class FlashAttention4Backward(BackwardPeer):
    """Backward that autograd calls after the varlen call; autograd itself would run it on the forward's stream."""

    name, deterministic = "fa4", False

    def __init__(self) -> None:
        torch, self._interface = load()
        super().__init__(torch)

    def unsupported(self, case: PrefillBackwardCase, dtype: str) -> str | None:
        return None

    def _laid_out(self, case: PrefillBackwardCase, x: Any) -> Any:
        return x

    def _tokens_first(self, x: Any) -> Any:
        return x

    def _backward(
        self, case: PrefillBackwardCase, inputs: GradientInputs, q: Any, keys: Any, values: Any, dout: Any
    ) -> Callable[[Any], Any]:
        sequences = _sequences(self._torch, case, inputs)
        out, lse = self._interface.flash_attn_varlen_func(q, keys, values, return_lse=True, **sequences)[:2]
        backward, deterministic = self._interface._flash_attn_bwd, self.deterministic

        def with_keys(keys: Any) -> Any:
            return backward(q, keys, values, out, dout, lse, deterministic=deterministic, **sequences)

        return with_keys


class FlashAttention4Deterministic(FlashAttention4Backward):
    """Sums of dq in a fixed order, by a counter for each of its tiles."""

    name, deterministic = "fa4_deterministic", True
