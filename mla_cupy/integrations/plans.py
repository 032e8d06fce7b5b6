"""The decode plans of an engine: one for each shape of step, shared by all layers and all replays."""

from __future__ import annotations

from typing import Any

from mla_cupy.ops.groups import Fp8
from mla_cupy.runtime import env
from mla_cupy.torch import TorchDecodePlan, plan_decode


def math_of(record: str | None) -> str:
    """The user's arithmetic for a cache in this FP8 format; 16-bit rows have only one."""
    return env.get("ENGINE_MATH") if record else "exact"


_spare: dict[tuple[Any, ...], Plans] = {}


class Plans:
    """Plans for one model on one device, made when they are first needed.

    Used plans are never dropped: a captured graph may replay in their workspaces.

    Parameters
    ----------
    **sizes
        Sizes and options that they share: h_q, d_qk, kv_format, page_size, dtype, math, q_rope, batch_invariant,
        device.

    Attributes
    ----------
    sizes : dict
    """

    def __init__(self, **sizes: Any) -> None:
        self.sizes = sizes
        self._made: dict[tuple[int, int, int], TorchDecodePlan] = {}
        self._unused: dict[tuple[int, int, int], TorchDecodePlan] = {}

    def __len__(self) -> int:
        return len(self._made)

    def get(self, max_b: int, s_q: int, max_pages: int) -> TorchDecodePlan:
        """The plan for steps of up to `max_b` sequences with `s_q` query tokens each."""
        key = (max_b, s_q, max_pages)
        if key not in self._made:
            found = self._unused.pop(key, None)
            if found is None:  # first give back what has been set aside for it
                self._unused = {other: plan for other, plan in self._unused.items() if other[1] != s_q}
                found = self._make(*key)
            self._made[key] = found
        return self._made[key]

    def set_aside(self, max_b: int, s_q: int, max_pages: int) -> None:
        """Make a plan before it is needed: its kernels are loaded, its memory is taken."""
        key = (max_b, s_q, max_pages)
        if key not in self._unused:
            self._unused[key] = self._make(*key)

    def _make(self, max_b: int, s_q: int, max_pages: int) -> TorchDecodePlan:
        sizes = {name: size for name, size in self.sizes.items() if name != "math"}
        return plan_decode(max_b=max_b, s_q=s_q, max_pages=max_pages, fp8=Fp8(self.sizes["math"]), **sizes)


def set_aside(max_b: int, lengths: tuple[int, ...], max_tokens: int, **sizes: Any) -> None:
    """Make plans while a model is loaded, before its engine measures how much memory is left for the cache.

    Parameters
    ----------
    max_b : int
    lengths : tuple of int
        Query tokens per sequence, of the steps to come.
    max_tokens : int
        Tokens of the longest sequence.
    **sizes
        As for `Plans`. What is set aside once is not set aside again.
    """
    key = tuple(sizes.values())
    if key not in _spare:
        _spare[key] = Plans(**sizes)
        for s_q in lengths:
            _spare[key].set_aside(max_b, s_q, -(-max_tokens // sizes["page_size"]))


def claim(**sizes: Any) -> Plans:
    """The plans that were set aside for these sizes, for the first caller; later callers, and other sizes, get new
    ones.

    Callers may not share: a plan has one schedule at a time. Plans set aside for other sizes are released, since their
    memory is needed for these.
    """
    found = _spare.pop(tuple(sizes.values()), None)
    if found is None:
        _spare.clear()
        return Plans(**sizes)
    return found
