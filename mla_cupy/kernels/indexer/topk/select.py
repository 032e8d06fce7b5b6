"""Host side of `indexer/topk/select.cu`: a block per row, or a cluster of blocks for few long ones."""

from __future__ import annotations

from mla_cupy.kernels.indexer.topk.problem import MAX_TOPK, TopkProblem
from mla_cupy.kernels.params import TopkParams
from mla_cupy.kernels.spec import BLACKWELL, HOPPER, KernelSpec, Variant, variants
from mla_cupy.runtime.device import DeviceInfo

ITEMS = 32
"""Logits that a thread holds in its registers."""
MAX_THREADS = 1024
BLOCK_ELEMS = ITEMS * MAX_THREADS
"""Most elements that a block holds."""
CLUSTER_BLOCKS = 8


_HAVE_CLUSTERS = (*HOPPER, *BLACKWELL)


def in_clusters(problem: TopkProblem, device: DeviceInfo) -> bool:
    """True if a cluster of blocks processes each row: few rows, longer than a block holds.

    A cluster takes about as long for a row of any length as a block for BLOCK_ELEMS logits that it reads again.
    """
    if device.arch not in _HAVE_CLUSTERS:
        return False
    rounds_of_blocks = -(-problem.s_q // device.sm_count)
    rounds_of_clusters = -(-CLUSTER_BLOCKS * problem.s_q // device.sm_count)
    return rounds_of_clusters * BLOCK_ELEMS < rounds_of_blocks * problem.s_kv


def variant(problem: TopkProblem, device: DeviceInfo) -> Variant:
    """The build for a problem; a block has the fewest threads that hold a row, or the most for longer rows."""
    if in_clusters(problem, device):
        return Variant(cluster_blocks=CLUSTER_BLOCKS, threads=MAX_THREADS)
    return Variant(cluster_blocks=1, threads=MAX_THREADS // 2 if problem.s_kv <= BLOCK_ELEMS // 2 else MAX_THREADS)


KERNEL: KernelSpec[TopkProblem] = KernelSpec(
    "indexer_topk_select",
    "exact top-k by radix select: a block per row, or a cluster of blocks for few long rows",
    "indexer/topk/select.cu",
    TopkParams,
    variants=(
        *variants(cluster_blocks=(1,), threads=(MAX_THREADS, MAX_THREADS // 2)),
        Variant(cluster_blocks=CLUSTER_BLOCKS, threads=MAX_THREADS),
    ),
    runs_on=lambda variant, arch: variant.cluster_blocks == 1 or arch in _HAVE_CLUSTERS,
    facts={"max_sorted": MAX_TOPK, "items": ITEMS},
    facts_of=lambda variant: {"cluster": variant.cluster_blocks},
)
