"""Host side of `indexer/topk/select.cu`, a block per row."""

from __future__ import annotations

from mla_cupy.kernels.indexer.topk.problem import MAX_TOPK, TopkProblem
from mla_cupy.kernels.params import TopkParams
from mla_cupy.kernels.spec import KernelSpec, Variant, variants

ITEMS = 32
"""Logits that a thread holds in its registers."""
MAX_THREADS = 1024
BLOCK_ELEMS = ITEMS * MAX_THREADS
"""What a block holds at most."""


KERNEL: KernelSpec[TopkProblem] = KernelSpec(
    "indexer_topk_select",
    "exact top-k by radix select, a block per row",
    "indexer/topk/select.cu",
    TopkParams,
    variants=variants(cluster_blocks=(1,), threads=(MAX_THREADS, MAX_THREADS // 2)),
    facts={"max_sorted": MAX_TOPK, "items": ITEMS, "cluster": 1},
)


def variant(kernel: KernelSpec[TopkProblem], problem: TopkProblem) -> Variant:
    """The build with the fewest threads that hold a row; for longer rows, the one with the most."""
    fits = [v for v in kernel.variants if problem.s_kv <= v.cluster_blocks * v.threads * ITEMS]
    return min(fits or kernel.variants, key=lambda v: int(v.threads if fits else -v.threads))
