"""FlashAttention-2 through PyTorch: no loss, but what the times of one that is made of attention are compared with."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ..core.device import Device
from ..core.implementation import Prepared
from ..ops.indexer_loss import FORWARD, LossCase, LossInputs, LossOutputs
from .torch_ops import import_torch, peak_bytes, recorder_for

MAX_WIDTH = 256


class FlashAttention:
    """Causal attention with equally many heads, each with separate keys and values; its forward alone is a figure."""

    name = "flash"

    def __init__(self) -> None:
        self._torch = import_torch("peer 'flash'")

    def unsupported(self, case: LossCase, dtype: str) -> str | None:
        if case.topk:
            return "attends to all keys"
        if case.mha:
            return "takes whole keys"
        return None if case.d <= MAX_WIDTH else f"takes heads of {MAX_WIDTH} at most"

    def prepare(self, case: LossCase, dtype: str, sets: Sequence[LossInputs], device: Device) -> Prepared:
        import cupy

        recorder = recorder_for(self._torch, device)
        latest: list[Any] = [None] * len(sets)
        with recorder.current():
            made = [self._calls(case, inputs, latest, index) for index, inputs in enumerate(sets)]
        calls = [both for _, both in made]
        return Prepared(
            calls=calls,
            outputs=lambda index: LossOutputs(None, cupy.from_dlpack(latest[index][0]), None, None),
            recorder=recorder,
            includes="forward and backward of attention, of queries, keys and values per head; no loss",
            figures={FORWARD: [forward for forward, _ in made]},
            workspace_bytes=lambda: peak_bytes(self._torch, calls[0], lambda: latest[0]),
        )

    def _calls(
        self, case: LossCase, inputs: LossInputs, latest: list[Any], index: int
    ) -> tuple[Callable[[], object], Callable[[], object]]:
        """The forward, and both."""
        torch = self._torch
        q, k = (torch.from_dlpack(inputs.arguments[name]) for name in ("q", "k"))
        q = q.reshape(case.b, case.s, case.h, case.d).transpose(1, 2).contiguous().requires_grad_()
        shared = k.reshape(case.b, 1, case.s, case.d).expand(-1, case.h, -1, -1)
        key, value = (shared.contiguous().requires_grad_() for _ in range(2))
        ones = torch.ones_like(q)

        def forward() -> Any:
            with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.FLASH_ATTENTION):
                return torch.nn.functional.scaled_dot_product_attention(q, key, value, is_causal=True)

        def both() -> None:
            latest[index] = torch.autograd.grad(forward(), (q, key, value), ones)

        return forward, both
