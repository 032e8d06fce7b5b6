"""Host side of `indexer/topk/select.cu`: a block per row, or a cluster of blocks."""

from __future__ import annotations

from dataclasses import replace

from mla_cupy.kernels.indexer.topk.problem import MAX_TOPK, TopkProblem
from mla_cupy.kernels.params import TopkParams
from mla_cupy.kernels.spec import BLACKWELL, HOPPER, KernelSpec, Reason, Variant, needs_cc, variants
from mla_cupy.runtime.device import DeviceInfo

ITEMS = 32
"""Logits that a thread holds in its registers."""
MAX_THREADS = 1024
BLOCK_ELEMS = ITEMS * MAX_THREADS
"""Most elements that a block holds."""
CLUSTER_BLOCKS = 8
MIN_SHARE = 4096
"""Elements of a row per block of a cluster: one vector of each thread. What is shorter is not worth the exchange."""


KERNEL: KernelSpec[TopkProblem] = KernelSpec(
    "indexer_topk_select",
    "exact top-k by radix select, a block per row",
    "indexer/topk/select.cu",
    TopkParams,
    variants=variants(cluster_blocks=(1,), threads=(MAX_THREADS, MAX_THREADS // 2)),
    facts={"max_sorted": MAX_TOPK, "items": ITEMS, "cluster": 1},
)


def _not_by_clusters(problem: TopkProblem, device: DeviceInfo) -> Reason | None:
    """Reason that clusters cannot, or should not, take the problem; None if they can."""
    if device.arch not in (*HOPPER, *BLACKWELL):
        return needs_cc(device, "9.0", "10.0", "10.3")
    if problem.s_kv > BLOCK_ELEMS or (2 * problem.s_q <= device.sm_count and problem.s_kv > MIN_SHARE):
        return None
    return Reason(f"is for rows of more than {BLOCK_ELEMS} logits, and for few rows of more than {MIN_SHARE}")


CLUSTER = replace(
    KERNEL,
    name="indexer_topk_select_cluster",
    base=KERNEL.name,
    about="exact top-k by radix select, a cluster of blocks per row: for long rows, and for few",
    archs=(*HOPPER, *BLACKWELL),
    variants=variants(cluster_blocks=(CLUSTER_BLOCKS,), threads=(MAX_THREADS,)),
    facts={**KERNEL.facts, "cluster": CLUSTER_BLOCKS},
    unsupported=_not_by_clusters,
)

KERNELS = (CLUSTER, KERNEL)


def variant(kernel: KernelSpec[TopkProblem], problem: TopkProblem) -> Variant:
    """The build with the fewest threads that hold a row; for longer rows, the one with the most."""
    fits = [v for v in kernel.variants if problem.s_kv <= v.cluster_blocks * v.threads * ITEMS]
    return min(fits or kernel.variants, key=lambda v: int(v.threads if fits else -v.threads))
