"""Division of the queries of sparse decode into splits: by `sparse_decode/schedule.cu`, or by arithmetic alone."""

from __future__ import annotations

from typing import NamedTuple

from mla_cupy.kernels.attention.heuristics import merge_cost, piece_cost
from mla_cupy.kernels.attention.split_schedule import ITEM_COST, MAX_SPLITS, PRICE_SCALE, SHORT_SPLIT
from mla_cupy.kernels.params import SparseDecodeScheduleParams
from mla_cupy.kernels.pipeline import Call, Launch, LaunchArgs
from mla_cupy.kernels.sparse_decode.heuristics import NARROW_BLOCKS, NARROW_COST, NARROW_ROWS
from mla_cupy.kernels.sparse_decode.problem import SparseDecodeProblem
from mla_cupy.kernels.spec import PLAIN, KernelSpec, Variant

IN_PIECES = Variant(pieces=1)
"""The build that writes the batch-invariant schedule."""
MAX_UNITS = 1 << 30
"""The most units of work that 32 bits hold."""

KERNEL: KernelSpec[object] = KernelSpec(
    "sparse_decode_schedule",
    "cuts the lists of sparse decode into splits, where their lengths are in memory",
    "sparse_decode/schedule.cu",
    SparseDecodeScheduleParams,
    variants=(*PLAIN, IN_PIECES),
    facts={"max_splits": MAX_SPLITS},
)


def launch(call: Call, problem: SparseDecodeProblem, num_splits: int, merge_cost: int) -> Launch:
    """Write the schedule to the workspace; `schedule_pieces` does it for a problem in pieces."""
    _, s_q, topk = call.view("indices").shape
    params = SparseDecodeScheduleParams(
        topk_length=call.name("topk_length"),
        extra_topk_length=call.name("extra_topk_length"),
        schedule="schedule",
        topk_length_stride_elems=call.stride("topk_length"),
        extra_topk_length_stride_elems=call.stride("extra_topk_length"),
        queries=problem.queries,
        s_q=s_q,
        topk=topk,
        extra_topk=problem.topk - topk,
        num_splits=num_splits,
        merge_cost=merge_cost,
        piece_tiles=problem.piece_tiles,
    )
    return Launch(KERNEL, IN_PIECES if problem.piece_tiles else PLAIN[0], (1, 1, 1), LaunchArgs(params))


class Cuts(NamedTuple):
    """Queries of one length as a line of `request_units` units of `unit_tiles` tiles each, cut evenly."""

    num_splits: int
    request_units: int
    unit_tiles: int


def even_cuts(problem: SparseDecodeProblem, block_rows: int, most: int) -> Cuts:
    """Cut into at most `most` splits: whole queries, equal pieces of each, or cuts anywhere, whichever is fastest.

    Costs are in tiles, as in `attention/split_schedule.cuh`. But all blocks share the memory: a tile of records
    is small and slow.
    """
    queries, tiles = max(1, problem.queries), max(1, problem.tiles)
    total, merge = queries * tiles, merge_cost(min(problem.h_q, block_rows))
    longest = -(-total // most)
    counted = longest <= SHORT_SPLIT
    narrow = block_rows <= NARROW_ROWS and problem.h_q > (NARROW_BLOCKS - 1) * block_rows
    partial = piece_cost(problem.h_q) / PRICE_SCALE * (NARROW_COST if narrow else 1)

    def cost(longest: int, items: int, partials: int) -> float:
        price = longest + ITEM_COST * items + (merge if partials else 0)
        return price + partials * partial if counted else price

    per_split = -(-queries // most)
    costs = {Cuts(-(-queries // per_split), 1, tiles): cost(per_split * tiles, per_split, 0)}
    if total < MAX_UNITS:
        anywhere = Cuts(min(most, total), tiles, 1)
        costs[anywhere] = cost(longest, 1 + -(-longest // tiles), most + queries)
    for pieces in range(2, min(tiles, most // queries) + 1):
        costs[Cuts(queries * pieces, tiles, 1)] = cost(-(-tiles // pieces), 1, queries * pieces)
    return min(costs, key=costs.__getitem__)
