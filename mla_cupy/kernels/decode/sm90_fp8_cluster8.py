"""Host side of `decode/sm90_fp8_cluster8.cu`: small batches of few rows in FP8, in one launch."""

from __future__ import annotations

from mla_cupy.kernels.attention.kernel import NO_TREE
from mla_cupy.kernels.decode import sm90_fp8
from mla_cupy.kernels.decode.clusters import ClusterKernel
from mla_cupy.kernels.decode.heuristics import MAX_CLUSTERS, MIN_TILES_PER_BLOCK
from mla_cupy.kernels.decode.problem import DecodeProblem
from mla_cupy.kernels.spec import Reason, Variant, variants
from mla_cupy.runtime.device import DeviceInfo

BLOCKS = 8
"""Thread blocks per cluster."""
BLOCK_ROWS = 16
MAX_TOKENS = 8192
"""The longest sequences that it is preferred for."""


def unsupported(problem: DecodeProblem, device: DeviceInfo) -> Reason | None:
    """Reason that the kernel cannot take the problem; None if it can."""
    return NO_TREE if problem.tree_mask else sm90_fp8.unsupported(problem, device)


def preferred(problem: DecodeProblem, device: DeviceInfo) -> bool:
    """Prefer it for the rows of one block, where every cluster is resident at once and has one share."""
    batch = problem.batch
    if batch is None or batch.tokens > MAX_TOKENS or problem.rows > BLOCK_ROWS:
        return False
    return batch.b * problem.h_kv <= KERNEL.resident(device)


def variant(problem: DecodeProblem) -> Variant:
    """The build of a problem; more rows than it has are divided among blocks."""
    return Variant(dtype=problem.dtype, block_rows=BLOCK_ROWS)


KERNEL = ClusterKernel(
    "decode_sm90_fp8_cluster8",
    f"dense decode in FP8 of few rows in one launch: clusters of {BLOCKS} blocks share a request and merge",
    "decode/sm90_fp8_cluster8.cu",
    sm90_fp8.KERNEL.params,
    sm90_fp8.KERNEL.archs,
    variants(dtype=sm90_fp8.QUERIES, block_rows=(BLOCK_ROWS,)),
    facts={
        **sm90_fp8.KERNEL.facts,
        "cluster": BLOCKS,
        "max_clusters": MAX_CLUSTERS,
        "min_tiles_per_block": MIN_TILES_PER_BLOCK,
    },
    facts_of=sm90_fp8.KERNEL.facts_of,
    unsupported=unsupported,
    preferred=preferred,
    on_request=True,
    variant=variant,
    block_rows=BLOCK_ROWS,
    kv_maps=sm90_fp8.kv_maps,
    cluster_blocks=BLOCKS,
    math="fp8",
)
