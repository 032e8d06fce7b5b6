"""Host side of `indexer/topk/select.cu`, a cluster of blocks per row."""

from __future__ import annotations

from dataclasses import replace

from mla_cupy.kernels.indexer.topk import select
from mla_cupy.kernels.indexer.topk.problem import TopkProblem
from mla_cupy.kernels.spec import BLACKWELL, HOPPER, Reason, needs_cc, variants
from mla_cupy.runtime.device import DeviceInfo

CLUSTER_BLOCKS = 8
MIN_SHARE = 4096
"""Elements of a row per block of a cluster: one vector of each thread. What is shorter is not worth the exchange."""


def unsupported(problem: TopkProblem, device: DeviceInfo) -> Reason | None:
    """Why the kernel cannot, or should not, take the problem; None if it can."""
    if device.arch not in (*HOPPER, *BLACKWELL):
        return needs_cc(device, "9.0", "10.0", "10.3")
    if problem.s_kv > select.BLOCK_ELEMS or (2 * problem.s_q <= device.sm_count and problem.s_kv > MIN_SHARE):
        return None
    return Reason(f"is for rows of more than {select.BLOCK_ELEMS} logits, and for few rows of more than {MIN_SHARE}")


KERNEL = replace(
    select.KERNEL,
    name="indexer_topk_select_cluster",
    about="the same with a cluster of blocks per row: for long rows, and for few",
    archs=(*HOPPER, *BLACKWELL),
    variants=variants(cluster_blocks=(CLUSTER_BLOCKS,), threads=(select.MAX_THREADS,)),
    facts={**select.KERNEL.facts, "cluster": CLUSTER_BLOCKS},
    unsupported=unsupported,
)
