"""Configurations of dense decode: everything that does not depend on pointers or on the batch size.

A decode divides its batch in one of four ways. Each has a class, with the fields, the workspace, the schedule and the
merge of that division alone.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

from mla_cupy.kernels.attention import combine, heuristics, schedule
from mla_cupy.kernels.attention.kernel import AttentionKernel, SplitGrid
from mla_cupy.kernels.decode import clusters, combine_pieces, schedule_groups, schedule_pieces
from mla_cupy.kernels.decode.finish import Finish, Merge, ProjectAfterMerge, ProjectInMerge
from mla_cupy.kernels.decode.problem import BatchStep, DecodeProblem
from mla_cupy.kernels.decode.schedule_groups import Groups
from mla_cupy.kernels.decode.schedule_pieces import Pieces
from mla_cupy.kernels.param_layout import NULL
from mla_cupy.kernels.params import DecodeParams
from mla_cupy.kernels.pipeline import LaunchArgs, Layout, Step, ZeroFill
from mla_cupy.kernels.spec import PLAIN, KernelSpec, Variant
from mla_cupy.runtime.launching import Dim3
from mla_cupy.shapes import D_V

Builds = list[tuple[KernelSpec[Any], Variant]]


@dataclass(frozen=True)
class _Config:
    """Fields and defaults that all configurations share; `*_part` names a part of the workspace, or is NULL.

    `after_prepare` says that the launch before attention writes only queries and the last `s_q` tokens of each sequence
    among what attention reads.
    """

    problem: DecodeProblem
    kernel: AttentionKernel[DecodeProblem]
    variant: Variant
    row_blocks: int
    after_prepare: bool = field(default=False, kw_only=True)

    schedule_part: ClassVar[str] = "schedule"
    tickets_part: ClassVar[str] = NULL
    groups_part: ClassVar[str] = NULL

    @property
    def s_q(self) -> int:
        """Query tokens of a request of the schedule."""
        return self.problem.s_q

    @property
    def max_b(self) -> int | None:
        """Sequences of the largest batch; None where it is not known."""
        return self.problem.batch.b if self.problem.batch else None

    @property
    def unit_tiles(self) -> int:
        """See `DecodeParams`."""
        return 0

    @property
    def bf16_partials(self) -> bool:
        """True if partial results are bfloat16 where results are."""
        return False

    @property
    def tokens(self) -> int:
        """The most query tokens of a call; only where the largest batch is known."""
        batch = self.problem.batch
        assert batch is not None
        return batch.queries or batch.b * self.problem.s_q

    def requests(self, b: int, s_q: int) -> int:
        """Requests of the schedule of `b` sequences with `s_q` queries each, or packed queries in all."""
        return b

    def grid(self, splits: int) -> Dim3:
        """Grid of the attention kernel."""
        return self.row_blocks, splits, 1


@dataclass(frozen=True)
class InClusters(_Config):
    """One launch, of clusters that divide the batch themselves: `num_splits` of them are resident at once."""

    num_splits: int
    finish: Merge | ProjectInMerge | ProjectAfterMerge

    schedule_part: ClassVar[str] = NULL
    tickets_part: ClassVar[str] = "tickets"

    @property
    def continued_index(self) -> int:
        """See `DecodeParams`."""
        return self.num_splits

    def workspace(self) -> Layout:
        """Memory of clusters that share requests; the tickets, which have to be zeros, are last."""
        splits = SplitGrid(self.row_blocks, self.num_splits)
        latents = self.finish.workspace(self.problem, self.max_b)
        return Layout({**latents, **clusters.workspace(self.kernel, self.variant.block_rows, splits)})

    def splits(self, b: int, s_q: int, max_tokens: int) -> int:
        """Clusters for each row block."""
        return clusters.clusters(self.kernel, self.num_splits, b, max_tokens)

    def grid(self, splits: int) -> Dim3:
        """See `_Config.grid`."""
        return splits * self.kernel.cluster_blocks, self.row_blocks, 1

    def schedule(self, step: BatchStep) -> list[Step]:
        """Zeros for the tickets, where clusters share requests."""
        return [ZeroFill("tickets")] if self.splits(step.b, step.s_q, step.max_tokens) > step.b else []

    def schedule_builds(self) -> Builds:
        """Kernels of the schedule."""
        return []

    def merge(self, requests: int, params: DecodeParams, args: LaunchArgs) -> list[Step]:
        """Nothing: clusters have merged."""
        return []

    def merge_builds(self) -> Builds:
        """Kernels of the merge."""
        return []


@dataclass(frozen=True)
class InSplits(_Config):
    """A schedule of `num_splits` splits of equal cost; `combine_blocks` is 0 where nothing is split."""

    num_splits: int
    combine_blocks: int
    finish: Finish

    @property
    def continued_index(self) -> int:
        """See `DecodeParams`."""
        return self.num_splits

    @property
    def unit_tiles(self) -> int:
        """See `DecodeParams`."""
        return self.finish.unit_tiles

    @property
    def bf16_partials(self) -> bool:
        """True if partial results are bfloat16 where results are: after FP8 matmuls in one term."""
        in_one_term = self.kernel.bf16_partials and self.problem.math == self.kernel.math
        return self.finish.combines and self.combine_blocks > 0 and in_one_term and self.problem.half == "bfloat16"

    def workspace(self) -> Layout:
        """The schedule, then two partial results per split, which begins and ends in the middle of a request."""
        rows = 2 * self.num_splits * self.problem.s_q * self.problem.h_q if self.combine_blocks else 0
        latents = self.finish.workspace(self.problem, self.max_b)
        return Layout({"schedule": schedule.nbytes(self.num_splits), **_partials(rows), **latents})

    def splits(self, b: int, s_q: int, max_tokens: int) -> int:
        """Splits of the schedule of a batch."""
        return self.num_splits

    def schedule(self, step: BatchStep) -> list[Step]:
        """The launch that cuts a batch into splits."""
        merge_cost, piece_cost = _costs(self.kernel, self.problem.rows)
        stride, tokens, splits = step.seqlens_stride, step.max_tokens, self.num_splits
        return [schedule.launch("seqlens", stride, tokens, step.b, splits, merge_cost, step.shard, piece_cost)]

    def schedule_builds(self) -> Builds:
        """Kernels of the schedule."""
        return [(schedule.KERNEL, PLAIN[0])]

    def merge(self, requests: int, params: DecodeParams, args: LaunchArgs) -> list[Step]:
        """The merge of split requests; `params` are those in the attention kernel's `args`."""
        if not self.combine_blocks:
            return []
        problem, bf16_partials = self.problem, combine.reads_bf16(args)
        blocks = combine.needed_blocks(self.combine_blocks, requests, problem.rows, self.num_splits)
        args = _args_of(params, args)
        return [combine.launch(problem.half, blocks, args, problem.d_v, bf16_partials=bf16_partials)]

    def merge_builds(self) -> Builds:
        """Kernels of the merge."""
        if not self.combine_blocks:
            return []
        bf16 = [(combine.KERNEL, combine.BF16_PARTIALS)] if self.bf16_partials else []
        return [(combine.KERNEL, combine.build(self.problem.half, self.problem.d_v)), *bf16]


@dataclass(frozen=True)
class InPieces(_Config):
    """A batch-invariant schedule: each request is cut alone, into pieces with a partial result each."""

    pieces: Pieces
    combine_blocks: int
    finish: Merge | ProjectInMerge

    continued_index: ClassVar[int] = 0

    @property
    def max_b(self) -> int:
        """See `_Config.max_b`."""
        return self.pieces.max_b

    @property
    def tokens(self) -> int:
        """See `_Config.tokens`."""
        return self.max_b * self.problem.s_q

    def workspace(self) -> Layout:
        """The schedule, then the partial results."""
        pieces = self.pieces.max_b * self.pieces.max_pieces if self.combine_blocks else 0
        partials = _partials(pieces * self.problem.s_q * self.problem.h_q)
        latents = self.finish.workspace(self.problem, self.max_b)
        return Layout({"schedule": schedule_pieces.nbytes(self.pieces), **partials, **latents})

    def splits(self, b: int, s_q: int, max_tokens: int) -> int:
        """Splits of the schedule of a batch."""
        return b * self.pieces.max_pieces

    def schedule(self, step: BatchStep) -> list[Step]:
        """The launch that cuts each request."""
        return [
            schedule_pieces.launch("seqlens", step.seqlens_stride, step.max_tokens, step.b, self.pieces, step.shard)
        ]

    def schedule_builds(self) -> Builds:
        """Kernels of the schedule."""
        return [(schedule_pieces.KERNEL, PLAIN[0])]

    def merge(self, requests: int, params: DecodeParams, args: LaunchArgs) -> list[Step]:
        """The merge of pieces; `params` are those in the attention kernel's `args`."""
        if not self.combine_blocks:
            return []
        rows, args = requests * self.problem.rows, _args_of(params, args)
        return [combine_pieces.launch(self.problem.half, self.combine_blocks, rows, self.pieces.max_pieces, args)]

    def merge_builds(self) -> Builds:
        """Kernels of the merge."""
        if not self.combine_blocks:
            return []
        return [(combine_pieces.KERNEL, combine.build(self.problem.half, self.problem.d_v))]


@dataclass(frozen=True)
class _OfGroups(_Config):
    """A schedule of groups of queries, for packed queries and windows."""

    groups: Groups

    finish: ClassVar[Merge] = Merge()
    groups_part: ClassVar[str] = "groups"

    @property
    def s_q(self) -> int:
        """See `_Config.s_q`."""
        return self.groups.queries

    @property
    def _rows(self) -> int:
        return self.groups.queries * self.problem.h_q

    def requests(self, b: int, s_q: int) -> int:
        """See `_Config.requests`."""
        return self.groups.most(b, s_q)


@dataclass(frozen=True)
class InGroups(_OfGroups):
    """Up to `max_groups` groups in splits of equal cost."""

    max_groups: int
    num_splits: int
    combine_blocks: int

    @property
    def continued_index(self) -> int:
        """See `DecodeParams`."""
        return self.num_splits

    def workspace(self) -> Layout:
        """The schedule and the groups, then two partial results per split."""
        partials = _partials(2 * self.num_splits * self._rows if self.combine_blocks else 0)
        groups = schedule_groups.GROUP_BYTES * self.max_groups
        return Layout({"schedule": schedule.nbytes(self.num_splits), "groups": groups, **partials})

    def splits(self, b: int, s_q: int, max_tokens: int) -> int:
        """Splits of the schedule of a batch."""
        return self.num_splits

    def schedule(self, step: BatchStep) -> list[Step]:
        """The launch that divides the queries of a batch into groups, and cuts the tokens that they see."""
        return [schedule_groups.launch(self.groups, step, self.num_splits, *_costs(self.kernel, self._rows))]

    def schedule_builds(self) -> Builds:
        """Kernels of the schedule."""
        return [(schedule_groups.KERNEL, PLAIN[0])]

    def merge(self, requests: int, params: DecodeParams, args: LaunchArgs) -> list[Step]:
        """The merge of split groups, by the attention kernel's `args`, which have the groups."""
        if not self.combine_blocks:
            return []
        blocks = combine.needed_blocks(self.combine_blocks, requests, self._rows, self.num_splits)
        return [combine.launch_of_groups(self.problem.half, blocks, args)]

    def merge_builds(self) -> Builds:
        """Kernels of the merge."""
        if not self.combine_blocks:
            return []
        return [(combine.KERNEL, combine.build_of_groups(self.problem.half))]


@dataclass(frozen=True)
class InGroupedPieces(_OfGroups):
    """A batch-invariant schedule: each group is cut alone, into pieces with a partial result each."""

    pieces: Pieces
    combine_blocks: int

    continued_index: ClassVar[int] = 0

    @property
    def tokens(self) -> int:
        """See `_Config.tokens`: `pieces` counts groups."""
        return self.pieces.max_b * self.groups.queries

    def workspace(self) -> Layout:
        """The schedule and the groups, then the partial results."""
        partials = _partials(self.pieces.num_splits * self._rows if self.combine_blocks else 0)
        groups = schedule_groups.GROUP_BYTES * self.pieces.max_b
        return Layout({"schedule": schedule_pieces.nbytes(self.pieces), "groups": groups, **partials})

    def splits(self, b: int, s_q: int, max_tokens: int) -> int:
        """Splits of the schedule of a batch."""
        return self.requests(b, s_q) * self.pieces.max_pieces

    def schedule(self, step: BatchStep) -> list[Step]:
        """The launch that divides the queries of a batch into groups, and cuts each of these."""
        splits = self.splits(step.b, step.s_q, step.max_tokens)
        return [schedule_groups.launch(self.groups, step, splits, piece_tiles=self.pieces.tiles)]

    def schedule_builds(self) -> Builds:
        """Kernels of the schedule."""
        return [(schedule_groups.KERNEL, schedule_groups.IN_PIECES)]

    def merge(self, requests: int, params: DecodeParams, args: LaunchArgs) -> list[Step]:
        """The merge of pieces, by the attention kernel's `args`, which have the groups."""
        if not self.combine_blocks:
            return []
        rows, most = requests * self._rows, self.pieces.max_pieces
        return [combine_pieces.launch(self.problem.half, self.combine_blocks, rows, most, args, of_groups=True)]

    def merge_builds(self) -> Builds:
        """Kernels of the merge."""
        if not self.combine_blocks:
            return []
        return [(combine_pieces.KERNEL, combine.build_of_groups(self.problem.half))]


DecodeConfig = InClusters | InSplits | InPieces | InGroups | InGroupedPieces


def _partials(rows: int) -> dict[str, int]:
    """Parts of the workspace for `rows` rows of partial results."""
    return {"partial_lse": 4 * rows, "partial_out": 4 * D_V * rows}


def _costs(kernel: AttentionKernel[DecodeProblem], rows: int) -> tuple[int, int]:
    """Costs of a merge and of a piece for requests of `rows` rows, for the schedule."""
    merge_cost = heuristics.merge_cost(min(rows, kernel.block_rows))
    return merge_cost, heuristics.piece_cost(rows) if kernel.counts_partials else 0


def _args_of(params: DecodeParams, args: LaunchArgs) -> LaunchArgs:
    """`args` itself if its struct is `params`, so that two launches share one block; else separate arguments."""
    return args if args.params is params else LaunchArgs(params)
