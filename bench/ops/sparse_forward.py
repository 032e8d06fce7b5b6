"""The sparse forward: `sparse_mla_forward`, with results written in place."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import mla_cupy

from ..core.cost import D_V, ELEMENT_BYTES, SINGLE_BYTES, Cost
from ..core.device import Device
from ..core.implementation import Choices, Known, Own, Prepared, batch_invariant, own_kernels, with_kernel
from ..core.operation import BenchOperation
from ..core.recorders import Call
from ..core.samples import judge
from .sparse import (
    CASE_OPTIONS,
    FORM,
    PATTERN,
    SparseCase,
    SparseInputs,
    SparseOutputs,
    expect_forward,
    fields_of,
    make_inputs,
)

# ---- Cases -----------------------------------------------------------------------------------------------------------


class SparseForwardCase(SparseCase):
    """A case of `sparse_mla_forward`."""

    op = "sparse_mla_forward"

    @property
    def cost(self) -> Cost:
        """Every top-k entry counts, as in the peers' own benchmarks, and gathers one row of kv."""
        rows = self.s_q * self.h_q
        return Cost(
            flops=2 * self.pairs * self.h_q * (self.d_qk + D_V),
            nbytes=ELEMENT_BYTES * (self.s_kv * self.d_qk + rows * (self.d_qk + D_V)) + SINGLE_BYTES * self.pairs,
            l2_bytes=self.pairs * self.d_qk * ELEMENT_BYTES,
        )


CASES = (
    # s_q, s_kv, h_q; the peer is FlashMLA, which takes 64 or 128 heads
    SparseForwardCase(4096, 8192, 128, peer_us=3990, target_us=3700),
    SparseForwardCase(4096, 32768, 128, peer_us=4160, target_us=3800),
    SparseForwardCase(4096, 32768, 64, peer_us=2120, target_us=1950),
    SparseForwardCase(4096, 32768, 16),
)


# ---- What is timed ---------------------------------------------------------------------------------------------------

GENERIC = "attention_generic"  # without tensor cores
NAMED = ("attention_mma",)  # of GPUs without WGMMA


class SparseForward(Own):
    """The call of a prefill."""

    def call_options(self, case: SparseForwardCase) -> dict[str, Any]:
        """Further arguments of the call."""
        return {}

    def prepare(self, case: SparseForwardCase, dtype: str, sets: Sequence[SparseInputs], device: Device) -> Prepared:
        rows = case.s_q, case.h_q
        results = [
            SparseOutputs(
                out=device.empty((*rows, D_V), dtype),
                lse=device.empty(rows, "float32"),
                max_logits=device.empty(rows, "float32"),
            )
            for _ in sets
        ]
        forward = partial(with_kernel(mla_cupy.sparse_mla_forward, self._kernel), **self._options)
        calls: list[Call] = [
            partial(
                forward,
                *(inputs.q, inputs.kv, inputs.indices),
                scale=case.scale,
                **self.call_options(case),
                **vars(result),
            )
            for inputs, result in zip(sets, results, strict=True)
        ]
        return self.prepared(calls, results, device)


# ---- The operation ---------------------------------------------------------------------------------------------------


def implementations(choices: Choices) -> Known:
    """Everything that computes `sparse_mla_forward`."""
    from ..peers.flashmla_sparse import FlashMlaSparse
    from ..peers.tilelang import tilelang

    return {
        **own_kernels(SparseForward, choices, GENERIC, NAMED),
        **batch_invariant(SparseForward),
        "flashmla": choices.from_dir(FlashMlaSparse, "flashmla"),
        "tilelang": tilelang,
    }


SPARSE_FORWARD = BenchOperation(
    name="sparse-forward",
    title="sparse forward: each query attends to the rows that its indices select",
    examples="""examples:
  run sparse-forward --peers-dir peers                 all cases with FlashMLA beside us
  run sparse-forward --quick --indices clustered       indices as an indexer would select them
  run sparse-forward --case sq512-skv4096-hq16-topk512 any other shape, named in the same form
""",
    peers=f"flashmla (imports torch and needs --peers-dir), tilelang, generic, batch_invariant, batch_invariant_256 "
    f"(pieces of 4,096 or 256 tokens), {', '.join(NAMED)}; or none. "
    "Default: flashmla where --peers-dir is given",
    # Quick: compute-bound, and with more rows than fit easily in the L2.
    suites={"targets": CASES, "quick": CASES[:2]},
    case_form=FORM,
    pattern=PATTERN,
    case_of=lambda *groups: SparseForwardCase(**fields_of(*groups)),
    inputs=make_inputs,
    expect=expect_forward,
    judge=judge,
    implementations=implementations,
    peers_from_dir=("flashmla",),
    case_options=CASE_OPTIONS,
)
