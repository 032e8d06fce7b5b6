"""Decode of sequences that share a prefix: the cases of dense decode, with block tables that begin alike."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

import mla_cupy

from ..core.cost import D_QK, D_V, ELEMENT_BYTES, Cost
from ..core.device import Device
from ..core.implementation import OWN, Choices, Known, Own, Prepared
from ..core.operation import BenchOperation
from ..core.recorders import Call
from .decode import Decode, DecodeInputs, expect, inputs_of, judge, make_outputs
from .decode_cases import DecodeCase

# ---- Cases -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class CascadeCase(DecodeCase):
    """All sequences share the first `prefix` tokens, and have the others of `s_kv` for themselves; whole pages."""

    prefix: int = 0

    op = "cascade_decode"

    @property
    def name(self) -> str:
        return f"b{self.b}-hq{self.h_q}-prefix{self.prefix}-suffix{self.s_kv - self.prefix}"

    @property
    def prefix_pages(self) -> int:
        """Pages that all sequences share."""
        return self.prefix // self.page_size

    @property
    def num_pages(self) -> int:
        return self.prefix_pages + self.b * (self.max_pages - self.prefix_pages)

    @property
    def cost(self) -> Cost:
        """The products of plain decode; every page of the cache once."""
        queries_and_out = self.b * self.s_q * self.h_q * (D_QK + D_V) * ELEMENT_BYTES
        cache = self.num_pages * self.page_size * D_QK * ELEMENT_BYTES
        return Cost(super().cost.flops, cache + queries_and_out)

    def shape(self) -> dict[str, Any]:
        return {**super().shape(), "prefix": self.prefix}


def case_of(b: str | int, h_q: str | int, prefix: str | int, suffix: str | int) -> CascadeCase:
    """A case with one query per sequence."""
    sizes = b, h_q, prefix, suffix = int(b), int(h_q), int(prefix), int(suffix)
    case = CascadeCase(b, 1, h_q, prefix + suffix, prefix=prefix)
    if min(sizes) < 1 or prefix % case.page_size or suffix % case.page_size:
        raise ValueError(f"every size must be at least 1, and tokens whole pages of {case.page_size}")
    return case


CASES = (
    *(case_of(64, h_q, 16384, 256) for h_q in (8, 16, 32, 64)),
    case_of(64, 16, 2048, 256),
    case_of(16, 16, 16384, 256),
    case_of(8, 16, 8192, 256),
)

# ---- Inputs ----------------------------------------------------------------------------------------------------------


def make_inputs(case: CascadeCase, dtype: str, seed: int, device: Device) -> DecodeInputs:
    """Random queries and latents; the keys are in shuffled pages of one block table."""
    order = np.random.default_rng(seed).permutation(case.num_pages).astype(np.int32)
    table = np.empty((case.b, case.max_pages), np.int32)
    table[:, : case.prefix_pages] = order[: case.prefix_pages]
    table[:, case.prefix_pages :] = order[case.prefix_pages :].reshape(case.b, -1)
    return inputs_of(case, dtype, seed, device, table)


# ---- What is timed ---------------------------------------------------------------------------------------------------


class Cascade(Own):
    """The groups are found before, on the host: those that the model chooses, or with `always` all of them."""

    def __init__(self, always: bool = False, name: str = OWN) -> None:
        super().__init__(None, name)
        self._always = always

    def prepare(self, case: CascadeCase, dtype: str, sets: Sequence[DecodeInputs], device: Device) -> Prepared:
        sizes = {"page_size": case.page_size, "h_q": case.h_q, "s_q": case.s_q}
        groups = [mla_cupy.shared_prefixes(x.host_table, x.host_seqlens, **sizes, always=self._always) for x in sets]
        results = [make_outputs(case, dtype, device) for _ in sets]
        plan = mla_cupy.plan_cascade(
            groups[0],
            b=case.b,
            s_q=case.s_q,
            h_q=case.h_q,
            max_pages=case.max_pages,
            page_size=case.page_size,
            dtype=dtype,
        )
        plan.update(sets[0].seqlens)  # all sets have the same lengths and groups

        def calls(plan: mla_cupy.CascadePlan | None) -> list[Call]:
            return [
                partial(
                    mla_cupy.cascade_decode,
                    *(x.q, x.kv_cache, x.block_table, x.seqlens, groups[0]),
                    scale=case.scale,
                    out=result.out,
                    lse=result.lse,
                    plan=plan,
                )
                for x, result in zip(sets, results, strict=True)
            ]

        return Prepared(
            calls=calls(plan),
            outputs=lambda index: results[index],
            recorder=device.recorder(),
            kernel="the prefix once" if groups[0] else "plain",
            includes="attention and merges; the groups are found and the plan is updated before",
            figures={"no_plan": calls(None), "plan_update": [partial(plan.update, x.seqlens) for x in sets]},
        )


# ---- The operation ---------------------------------------------------------------------------------------------------


def implementations(choices: Choices) -> Known:
    """Ours as the model chooses, ours with the prefix once whatever it says, and plain decode on the same table."""
    from ..peers.fa3 import FlashAttention3
    from ..peers.flashmla import FlashMla

    return {
        OWN: Cascade,
        "always": lambda: Cascade(always=True, name="always"),
        "plain": lambda: Decode(None, "plain"),
        "flashmla": choices.from_dir(FlashMla, "flashmla"),
        "fa3": choices.from_dir(FlashAttention3, "fa3"),
    }


CASCADE = BenchOperation(
    name="cascade",
    title="dense paged decode of sequences that share a prefix, all on one block table",
    examples="""examples:
  run cascade --peers-dir peers                        all cases, FlashMLA and FlashAttention-3 on the same block tables
  run cascade --case b32-hq16-prefix4096-suffix512     any other shape, named in the same form
""",
    peers="always (the prefix once, whatever the model says), plain (our mla_decode), flashmla, fa3 (they import torch "
    "and need --peers-dir); or none. Default: always,plain, and flashmla,fa3 where --peers-dir is given",
    suites={"targets": CASES, "quick": CASES[:2]},
    case_form="b<N>-hq<N>-prefix<N>-suffix<N>",
    pattern=r"b(\d+)-hq(\d+)-prefix(\d+)-suffix(\d+)",
    case_of=case_of,
    inputs=make_inputs,
    expect=expect,
    judge=judge,
    implementations=implementations,
    default_peers=("always", "plain"),
    peers_from_dir=("flashmla", "fa3"),
)
