"""Lists cut into pieces: the queries of the last round, where they would leave most SMs without work.

Each piece has a block, and a part of dq in float32; `sparse_backward/dq_pieces.cu` adds these up. dkv is sums anyway.
"""

from __future__ import annotations

from dataclasses import dataclass

from mla_cupy.kernels.params import DqPiecesParams
from mla_cupy.kernels.pipeline import Call, Launch, LaunchArgs
from mla_cupy.kernels.sparse_backward import heuristics
from mla_cupy.kernels.sparse_backward.problem import BackwardKernel, SparseBackwardProblem
from mla_cupy.kernels.spec import DTYPE_VARIANTS, HOPPER, KernelSpec, Variant
from mla_cupy.runtime.device import DeviceInfo
from mla_cupy.shapes import TILE_TOKENS


@dataclass(frozen=True)
class Pieces:
    """The queries from `first_query` on, each in `pieces` pieces of `piece_keys` entries of its list."""

    build: Variant
    first_query: int
    queries: int
    pieces: int
    piece_keys: int

    @property
    def items(self) -> int:
        """Pieces of all these queries, one block each."""
        return self.queries * self.pieces


def cut(kernel: BackwardKernel, problem: SparseBackwardProblem, device: DeviceInfo) -> Pieces | None:
    """Cut the queries of the last round; None if that is not worth it, or the kernel has no build for it."""
    queries = problem.s_q % device.sm_count
    build = kernel.pieces_variant(problem, device) if kernel.pieces_variant else None
    if build is None or queries == 0:
        return None
    tiles = -(-problem.topk // TILE_TOKENS)
    piece_tiles = -(-tiles // max(1, device.sm_count // queries))
    if tiles - piece_tiles < heuristics.MIN_SAVED_TILES:
        return None
    pieces = -(-tiles // piece_tiles)
    return Pieces(build, problem.s_q - queries, queries, pieces, piece_tiles * TILE_TOKENS)


DQ: KernelSpec[object] = KernelSpec(
    "sparse_backward_dq_pieces",
    "adds up dq of queries with split lists",
    "sparse_backward/dq_pieces.cu",
    DqPiecesParams,
    HOPPER,
    variants=DTYPE_VARIANTS,
)


def launch_dq(problem: SparseBackwardProblem, call: Call, pieces: Pieces) -> Launch:
    """Write dq of these queries."""
    params = DqPiecesParams(
        dq_pieces="dq_pieces",
        counts="counts",
        dq="dq",
        dq_stride_s_h_elems=call.strides("dq", 2),
        first_query=pieces.first_query,
        pieces=pieces.pieces,
        piece_keys=pieces.piece_keys,
        h_q=problem.h_q,
        d_qk=problem.d_qk,
    )
    blocks = pieces.queries * problem.h_q
    return Launch(DQ, Variant(dtype=problem.dtype), (blocks, 1, 1), LaunchArgs(params), dependent=False)


KERNELS = (DQ,)
