"""`torch.topk`, unsorted: exact, but which of equal logits it selects is not defined."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..core.device import Device
from ..core.implementation import Prepared
from ..core.recorders import Call
from ..ops.indexer_topk import Selection, TopkCase, TopkInputs
from .torch_ops import import_torch, peak_bytes, recorder_for


class TorchTopk:
    """Its values and 64-bit indices are allocated in the call."""

    name = "torch"

    def __init__(self) -> None:
        self._torch = import_torch("peer 'torch'")

    def unsupported(self, case: TopkCase, dtype: str) -> str | None:
        return None

    def prepare(self, case: TopkCase, dtype: str, sets: Sequence[TopkInputs], device: Device) -> Prepared:
        import cupy

        recorder = recorder_for(self._torch, device)
        latest: list[Any] = [None] * len(sets)
        with recorder.current():
            calls = [self._call(case, inputs, latest, index) for index, inputs in enumerate(sets)]
        return Prepared(
            calls=calls,
            outputs=lambda index: Selection(cupy.from_dlpack(latest[index].indices), lowest_ties=False),
            recorder=recorder,
            includes="the values, too, and indices of 64 bits, both unsorted",
            workspace_bytes=lambda: peak_bytes(self._torch, calls[0], lambda: latest[0]),
        )

    def _call(self, case: TopkCase, inputs: TopkInputs, latest: list[Any], index: int) -> Call:
        logits = self._torch.from_dlpack(inputs.logits)

        def call() -> None:
            latest[index] = self._torch.topk(logits, case.k, dim=1, sorted=False)

        return call
