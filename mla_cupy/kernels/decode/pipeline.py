"""Dense decode: schedule, attention over the splits, merge of the requests that were split."""

from __future__ import annotations

from dataclasses import replace

from mla_cupy.kernels import choice
from mla_cupy.kernels.attention import combine, combine_project, generic, mma, quantize_output
from mla_cupy.kernels.attention.kernel import AttentionKernel
from mla_cupy.kernels.attention.projection import is_apart
from mla_cupy.kernels.decode import (
    records,
    sm90,
    sm90_fp8,
    sm90_small,
    sm90_small_cluster8,
    sm100,
    sm100_fp8,
)
from mla_cupy.kernels.decode.arguments import args_of, params_of
from mla_cupy.kernels.decode.configs import (
    Builds,
    DecodeConfig,
    InClusters,
    InGroupedPieces,
    InGroups,
    InPieces,
    InSplits,
)
from mla_cupy.kernels.decode.finish import Merge, ProjectAfterMerge, ProjectInMerge
from mla_cupy.kernels.decode.problem import Batch, BatchStep, DecodeProblem
from mla_cupy.kernels.decode.queries import batch_of
from mla_cupy.kernels.decode.schedule_groups import Groups
from mla_cupy.kernels.decode.schedule_pieces import Pieces
from mla_cupy.kernels.pipeline import Call, Launch, Layout, Pipeline, Step
from mla_cupy.kernels.projection import results
from mla_cupy.kernels.spec import PLAIN
from mla_cupy.runtime.device import DeviceInfo


class DecodePipeline(Pipeline[DecodeConfig]):
    """The kernels of dense decode."""

    kernels = (
        sm90_small_cluster8.KERNEL,
        sm90_small.KERNEL,
        sm90.KERNEL,
        *sm100.KERNELS,
        *mma.KERNELS,
        generic.KERNEL,
        sm90_fp8.KERNEL,
        sm100_fp8.KERNEL,
        records.SEESAW,
        records.SMALL,
        records.SM100,
        records.MMA,
        records.GENERIC,
    )

    def configure(self, problem: DecodeProblem, device: DeviceInfo, kernel: str | None = None) -> DecodeConfig:
        """See `Pipeline.configure`."""
        chosen = choice.choose("decode", choice.of_math(self.kernels, problem.math, kernel), problem, device, kernel)
        chosen = chosen.sized(problem, device) or chosen
        if problem.forms.grouped:
            return _in_groups(problem, chosen, device)
        variant = chosen.variant(problem, device)
        splits, finish = chosen.splits(problem.rows, device), _finish(problem, device)
        if chosen.cluster_blocks > 1:
            return InClusters(problem, chosen, variant, splits.row_blocks, splits.num_splits, finish)
        blocks = finish.blocks(combine.blocks(splits.num_splits, device))
        return InSplits(problem, chosen, variant, splits.row_blocks, splits.num_splits, blocks, finish)

    def in_pieces(self, config: InSplits | InGroups, pieces: Pieces, device: DeviceInfo) -> InPieces | InGroupedPieces:
        """Configuration of batch-invariant calls, in pieces."""
        blocks = combine.blocks(pieces.max_pieces, device)
        same = (config.problem, config.kernel, config.variant, config.row_blocks)
        if isinstance(config, InSplits):
            return InPieces(*same, pieces, blocks, _finish_of_pieces(config, device))
        s_q = config.problem.s_q * (pieces.max_b if config.groups.packed else 1)
        of_groups = replace(pieces, max_b=config.groups.most(pieces.max_b, s_q))
        return InGroupedPieces(*same, config.groups, of_groups, blocks)

    def workspace(self, config: DecodeConfig) -> Layout:
        """See `Pipeline.workspace`."""
        problem, layout = config.problem, config.workspace()
        if not problem.fp8_out:
            return layout
        results_16 = quantize_output.workspace(config.tokens * problem.h_q, problem.d_head or problem.d_v)
        return Layout({**results_16, **layout.sizes})  # the tickets stay last

    def steps(self, config: DecodeConfig, call: Call) -> list[Step]:
        """The launches up to results in 16 bits or float32, and the conversion to FP8 for such a result."""
        return quantize_output.steps(call, config.problem.half, lambda call: self._attend(config, call))

    def _attend(self, config: DecodeConfig, call: Call) -> list[Step]:
        """The schedule, unless a plan has it, the attention and the merge; nothing for an empty batch."""
        b, s_q = batch_of(call)
        if b == 0 or s_q == 0:
            return []
        max_tokens = call.view("block_table").shape[1] * call.view("kv_cache").shape[1]
        splits = config.splits(b, s_q, max_tokens)
        params = params_of(config, call, splits)
        args = args_of(config, call, params)
        attend = Launch(config.kernel, config.variant, config.grid(splits), args)
        schedule = [] if call.planned else config.schedule(_step(call, b, s_q, max_tokens))
        merge = config.merge(params.b, params, args) if config.finish.combines else []
        return [*schedule, attend, *merge, *config.finish.steps(call, params)]

    def builds(self, config: DecodeConfig) -> Builds:
        """Every kernel that a call of this configuration may launch."""
        merge = config.merge_builds() if config.finish.combines else []
        codes = [(quantize_output.KERNEL, PLAIN[0])] if config.problem.fp8_out else []
        return [*config.schedule_builds(), (config.kernel, config.variant), *merge, *config.finish.builds(), *codes]


def _in_groups(problem: DecodeProblem, kernel: AttentionKernel[DecodeProblem], device: DeviceInfo) -> InGroups:
    """Groups of the queries that fill a block of the kernel, or that most sequences have."""
    queries = max(1, min(problem.s_q, kernel.block_rows // problem.h_q))
    groups = Groups(queries, problem.forms.packed, problem.forms.window)
    splits = kernel.splits(queries * problem.h_q, device)
    batch = problem.batch or Batch(1, 0)
    most = groups.most(batch.b, batch.queries or problem.s_q)
    blocks = combine.blocks(splits.num_splits, device)
    return InGroups(
        problem, kernel, kernel.variant(problem, device), splits.row_blocks, groups, most, splits.num_splits, blocks
    )


def _finish(problem: DecodeProblem, device: DeviceInfo) -> Merge | ProjectInMerge | ProjectAfterMerge:
    """The merge, and the multiplication by W_UV where the problem has one."""
    if not problem.d_head:
        return Merge()
    batch = problem.batch or Batch(1, 0)
    tokens = batch.queries or batch.b * problem.s_q
    if is_apart(problem.h_q, problem.d_head, tokens):
        return ProjectAfterMerge(results.build(problem.half, problem.h_q, problem.d_head, tokens, device))
    return _project_in_merge(problem, tokens, device)


def _finish_of_pieces(config: InSplits, device: DeviceInfo) -> Merge | ProjectInMerge:
    """The finish of a batch-invariant call.

    The order of a row's sums must not depend on the batch, but the projecting combine uses another order.
    """
    if isinstance(config.finish, ProjectAfterMerge):
        return replace(_project_in_merge(config.problem, 0, device), has_pieces=True)
    if isinstance(config.finish, ProjectInMerge):
        return replace(config.finish, has_pieces=True)
    return Merge()


def _project_in_merge(problem: DecodeProblem, tokens: int, device: DeviceInfo) -> ProjectInMerge:
    build = combine_project.KERNEL.build
    return ProjectInMerge(build(problem.half, problem.h_q, problem.d_head, tokens, device))


def _step(call: Call, b: int, s_q: int, max_tokens: int) -> BatchStep:
    shard = call.options.cp_world, call.options.cp_rank
    return BatchStep(b, s_q, max_tokens, call.stride("seqlens"), call.stride("cu_seqlens_q"), shard)


DECODE = DecodePipeline()
