"""The decode plans of an engine: one for each shape of step, shared by all layers and all replays."""

from __future__ import annotations

from typing import Any

from mla_cupy.torch import TorchDecodePlan, plan_decode


class Plans:
    """Plans for one model on one device, made when they are first needed.

    None is ever dropped: a captured graph may replay in its workspace.

    Parameters
    ----------
    **sizes
        What they have in common: h_q, d_qk, record, page_size, dtype, batch_invariant, device.

    Attributes
    ----------
    sizes : dict
    """

    def __init__(self, **sizes: Any) -> None:
        self.sizes = sizes
        self._made: dict[tuple[int, int, int], TorchDecodePlan] = {}

    def __len__(self) -> int:
        return len(self._made)

    def get(self, max_b: int, s_q: int, max_pages: int) -> TorchDecodePlan:
        """The plan for steps of up to `max_b` sequences with `s_q` query tokens each."""
        key = (max_b, s_q, max_pages)
        if key not in self._made:
            self._made[key] = plan_decode(max_b=max_b, s_q=s_q, max_pages=max_pages, **self.sizes)
        return self._made[key]
