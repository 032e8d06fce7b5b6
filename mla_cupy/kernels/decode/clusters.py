"""Decode kernels whose blocks share a request in clusters: their number, and their part of the workspace.

The clusters find their shares of the batch themselves (`decode/cluster_work.cuh`). They need memory only where several
of them share a request: for their partial results, and for the tickets that identify the last cluster.
"""

from __future__ import annotations

from dataclasses import dataclass

from mla_cupy.kernels.attention.kernel import AttentionKernel, SplitGrid
from mla_cupy.kernels.decode.heuristics import MAX_CLUSTERS, MIN_TILES_PER_BLOCK, USABLE_SMS
from mla_cupy.kernels.decode.problem import DecodeProblem
from mla_cupy.runtime.device import DeviceInfo
from mla_cupy.shapes import D_V, TILE_TOKENS

_LSE_BYTES = _TICKET_BYTES = 4


@dataclass(frozen=True)
class ClusterKernel(AttentionKernel[DecodeProblem]):
    """A kernel that clusters of `cluster_blocks` blocks run, in one launch."""

    def splits(self, rows: int, device: DeviceInfo) -> SplitGrid:
        """`num_splits` clusters per row block: all that are resident at once."""
        row_blocks = -(-rows // self.block_rows)
        return SplitGrid(row_blocks, min(MAX_CLUSTERS, max(1, self.resident(device) // row_blocks)))

    def resident(self, device: DeviceInfo) -> int:
        """Number of clusters that are resident at once."""
        usable, of = USABLE_SMS
        return device.sm_count * usable // of // self.cluster_blocks


def clusters(kernel: AttentionKernel[DecodeProblem], num_splits: int, b: int, max_tokens: int) -> int:
    """The clusters to launch for each row block: one per request, or more where they may share requests.

    `num_splits` clusters are resident; a line of the block table holds `max_tokens`.
    """
    tiles_per_block = -(-max_tokens // (TILE_TOKENS * kernel.cluster_blocks))
    return num_splits if b < num_splits and tiles_per_block > MIN_TILES_PER_BLOCK else b


def workspace(kernel: AttentionKernel[DecodeProblem], block_rows: int, splits: SplitGrid) -> dict[str, int]:
    """The sizes of the parts of the workspace: nothing where clusters never share a request."""
    shared = splits.num_splits if splits.num_splits > 1 else 0
    slices = shared * splits.row_blocks * kernel.cluster_blocks
    return {
        "partial_lse": _LSE_BYTES * slices * block_rows,
        "partial_out": 4 * D_V // kernel.cluster_blocks * slices * block_rows,
        "tickets": _TICKET_BYTES * slices,
    }
