"""Host side of `decode/schedule_groups.cu`: queries in groups, and their schedule."""

from __future__ import annotations

from dataclasses import dataclass

from mla_cupy.kernels.attention.split_schedule import MAX_SPLITS
from mla_cupy.kernels.decode.problem import BatchStep
from mla_cupy.kernels.param_layout import NULL
from mla_cupy.kernels.params import DecodeScheduleGroupsParams
from mla_cupy.kernels.pipeline import Launch, LaunchArgs
from mla_cupy.kernels.spec import PLAIN, KernelSpec, Variant

GROUP_BYTES = 24

IN_PIECES = Variant(pieces=1)
"""The build that cuts each group alone."""

KERNEL: KernelSpec[object] = KernelSpec(
    "decode_schedule_groups",
    "divides the queries of a batch into groups, and cuts the tiles that these see into splits",
    "decode/schedule_groups.cu",
    DecodeScheduleGroupsParams,
    variants=(*PLAIN, IN_PIECES),
    facts={"max_splits": MAX_SPLITS, "group_bytes": GROUP_BYTES},
)


@dataclass(frozen=True)
class Groups:
    """Division of the queries of a batch: up to `queries` per group; the starts of `packed` ones are on the device."""

    queries: int
    packed: bool
    window: int

    def most(self, b: int, queries: int) -> int:
        """Most groups of `b` sequences with `queries` queries each, or in all if packed.

        Packed queries before the first sequence and after the last one are groups, too.
        """
        if not self.packed:
            return b * -(-queries // self.queries)
        return min(queries, b + 2 + queries // self.queries)


def launch(
    groups: Groups, step: BatchStep, num_splits: int, merge_cost: int = 0, piece_cost: int = 0, piece_tiles: int = 0
) -> Launch:
    """Write the groups of a batch and its schedule to the workspace's `groups` and `schedule`.

    With `piece_tiles` each group is cut alone, into pieces of that many tiles.
    """
    params = DecodeScheduleGroupsParams(
        seqlens="seqlens",
        cu_seqlens_q="cu_seqlens_q" if groups.packed else NULL,
        groups="groups",
        schedule="schedule",
        seqlens_stride_elems=step.seqlens_stride,
        cu_seqlens_q_stride_elems=step.starts_stride,
        max_tokens=step.max_tokens,
        b=step.b,
        s_q=step.s_q,
        max_groups=groups.most(step.b, step.s_q),
        group_queries=groups.queries,
        window=groups.window,
        num_splits=num_splits,
        merge_cost=merge_cost,
        piece_cost=piece_cost,
        piece_tiles=piece_tiles,
    )
    return Launch(KERNEL, IN_PIECES if piece_tiles else PLAIN[0], (1, 1, 1), LaunchArgs(params))
