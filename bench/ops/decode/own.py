"""`mla_decode` through its public call, with a plan made before and results written in place."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np

import mla_cupy

from ...core.cost import D_QK
from ...core.device import Device
from ...core.implementation import OWN, Prepared, with_kernel
from ...core.recorders import Call
from .cases import DecodeCase
from .inputs import InputSet, make_outputs

LAYERS = (1, 61)
"""Layers that share an update of the plan: the worst case, and DeepSeek-V3's."""
GENERIC = "attention_generic"  # without tensor cores
#: Kernels to be compared with the one that is chosen: those among which the size of a batch decides, and those of GPUs
#: without WGMMA.
NAMED = (
    *("decode_sm90_seesaw", "decode_sm90_small", "decode_sm90_small_cluster8"),
    *("attention_mma", "attention_mma_163kb", "attention_mma_small", "attention_mma_small_163kb"),
)
#: Batch-invariant plans, and the `split_tokens` of each.
INVARIANT = {"batch_invariant": 4096, "batch_invariant_512": 512}
TREE = "tree_mask"


class Decode:
    """The call of a serving loop; updating the plan and calling without a plan are further figures."""

    def __init__(self, kernel: str | None = None, name: str = OWN) -> None:
        self.name, self._kernel = name, kernel

    def unsupported(self, case: DecodeCase, dtype: str) -> str | None:
        return None

    def plan_options(self, case: DecodeCase) -> dict[str, Any]:
        """Further arguments of the plan."""
        return {} if case.d_qk == D_QK else {"d_qk": case.d_qk}  # older trees know one width

    def call_options(self, case: DecodeCase, device: Device) -> dict[str, Any]:
        """Further arguments of the call."""
        return {}

    def prepare(self, case: DecodeCase, dtype: str, sets: Sequence[InputSet], device: Device) -> Prepared:
        plan = with_kernel(mla_cupy.plan_decode, self._kernel)(
            max_b=case.b,
            s_q=case.s_q,
            h_q=case.h_q,
            h_kv=case.h_kv,
            max_pages=case.max_pages,
            page_size=case.page_size,
            **{"dtype": dtype, **self.plan_options(case)},
        )
        plan.update(sets[0].seqlens)  # all sets have the same lengths
        results = [make_outputs(case, dtype, device) for _ in sets]
        decode = partial(with_kernel(mla_cupy.mla_decode, self._kernel), **self.call_options(case, device))

        def calls(plan: mla_cupy.DecodePlan | None) -> list[Call]:
            return [
                partial(
                    decode,
                    *(inputs.q, inputs.kv_cache, inputs.block_table, inputs.seqlens),
                    scale=case.scale,
                    plan=plan,
                    out=result.out,
                    lse=result.lse,
                )
                for inputs, result in zip(sets, results, strict=True)
            ]

        updates: list[Call] = [partial(plan.update, inputs.seqlens) for inputs in sets]
        planned = calls(plan)
        figures = {
            "no_plan": calls(None),
            "plan_update": updates,
            **{f"update_and_{layers}_layers": _steps(updates, planned, layers) for layers in LAYERS},
        }
        return Prepared(
            calls=planned,
            outputs=lambda index: results[index],
            recorder=device.recorder(),
            includes="attention and merge; the plan is updated before",
            kernel=kernel_of(plan),
            figures=figures if self.name in (OWN, *NAMED) else {},
        )


class BatchInvariant(Decode):
    """Decode with a batch-invariant plan: the cost of its reproducible bits."""

    def __init__(self, name: str, split_tokens: int) -> None:
        super().__init__(name=name)
        self._split_tokens = split_tokens

    def plan_options(self, case: DecodeCase) -> dict[str, Any]:
        return {**super().plan_options(case), "batch_invariant": True, "split_tokens": self._split_tokens}


class TreeMasked(Decode):
    """The causal mask given as a tree, that of a chain of drafts: the same results, with the tree's kernels."""

    def plan_options(self, case: DecodeCase) -> dict[str, Any]:
        return {**super().plan_options(case), "tree_mask": True}

    def call_options(self, case: DecodeCase, device: Device) -> dict[str, Any]:
        chain = [(2 << draft) - 1 for draft in range(case.s_q)]  # itself, and those before it
        return {"tree_mask": device.upload(np.tile(np.array(chain, np.uint64), (case.b, 1)))}


def _steps(updates: Sequence[Call], planned: Sequence[Call], layers: int) -> list[Call]:
    """Steps of a serving loop: one update of the plan, then a call per layer; each step begins with another set."""

    def step(first: int) -> None:
        updates[first]()
        for layer in range(layers):
            planned[(first + layer) % len(planned)]()

    return [partial(step, first) for first in range(len(planned))]


def kernel_of(plan: mla_cupy.DecodePlan) -> str:
    """The kernel that a plan chose. `compare-trees` also meets older trees, where the attribute is `variant`."""
    return str(getattr(plan, "kernel", None) or getattr(plan, "variant", ""))
