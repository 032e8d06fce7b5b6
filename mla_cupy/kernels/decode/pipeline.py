"""Dense decode: schedule, attention over the splits, merge of the requests that were split."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from mla_cupy.arrays.view import View
from mla_cupy.cache_formats import FORMATS
from mla_cupy.dtypes import TABLE
from mla_cupy.kernels import choice
from mla_cupy.kernels.attention import (
    combine,
    combine_forms,
    combine_project,
    generic,
    generic_forms,
    heuristics,
    mma,
    mma_narrow,
    schedule,
)
from mla_cupy.kernels.attention.kernel import AttentionKernel, SplitGrid
from mla_cupy.kernels.attention.projection import Build, is_apart
from mla_cupy.kernels.attention.record_layout import page_and_token_bytes
from mla_cupy.kernels.decode import (
    clusters,
    combine_pieces,
    forms,
    narrow,
    records,
    schedule_groups,
    schedule_pieces,
    sm90,
    sm90_fp8,
    sm90_small,
    sm90_small_cluster8,
    sm100,
    sm100_fp8,
)
from mla_cupy.kernels.decode.problem import Batch, DecodeOptions, DecodeProblem
from mla_cupy.kernels.decode.schedule_groups import Groups
from mla_cupy.kernels.decode.schedule_pieces import Pieces
from mla_cupy.kernels.lse import LseOptions
from mla_cupy.kernels.numbers import LOG2_E
from mla_cupy.kernels.param_layout import NULL
from mla_cupy.kernels.params import (
    DecodeFormParams,
    DecodeFp8Params,
    DecodeParams,
    FormAddresses,
    Fp8ScaleAddresses,
)
from mla_cupy.kernels.pipeline import Call, Launch, LaunchArgs, Layout, Pipeline, Step, ZeroFill
from mla_cupy.kernels.projection import results
from mla_cupy.kernels.spec import PLAIN, KernelSpec, Variant
from mla_cupy.runtime.device import DeviceInfo
from mla_cupy.shapes import D_V


@dataclass(frozen=True)
class DecodeConfig:
    """Everything about a decode that does not depend on pointers or on the batch size.

    `combine_blocks` is 0 where nothing is split; `pieces` are those of a batch-invariant plan, `groups` are of queries
    whose number varies or that have a window, up to `max_groups`. Of a kernel that runs in clusters, `num_splits` are
    the clusters that are resident at once. With `merged` False partial results stay in the workspace. `projection` is
    the kernel that takes the combine's place where there is a W_UV, or with `apart` the one after the combine.
    """

    problem: DecodeProblem
    kernel: AttentionKernel[DecodeProblem]
    row_blocks: int
    num_splits: int
    combine_blocks: int
    pieces: Pieces | None = None
    merged: bool = True
    projection: Build | None = None
    apart: bool = False
    groups: Groups | None = None
    max_groups: int = 0

    @property
    def s_q(self) -> int:
        """Query tokens of what the schedule takes for a request."""
        return self.groups.queries if self.groups else self.problem.s_q

    @property
    def in_clusters(self) -> bool:
        """True if one launch does it all."""
        return self.kernel.cluster_blocks > 1

    def splits(self, b: int) -> int:
        """Splits of the schedule of a batch."""
        return b * self.pieces.max_pieces if self.pieces else self.num_splits

    @property
    def bf16_partials(self) -> bool:
        """True if partial results are bfloat16 where results are: of products in FP8, in one term."""
        merged = self.merged and not self.pieces and not self.groups and self.combine_blocks > 0
        in_one_term = self.kernel.bf16_partials and self.problem.math == self.kernel.math
        return merged and in_one_term and self.problem.half == "bfloat16"

    @property
    def num_partials(self) -> int:
        """Two per split, which begins and ends in the middle of a request; or one per piece."""
        if not self.combine_blocks:
            return 0
        return self.splits(self.pieces.max_b) if self.pieces else 2 * self.num_splits

    @property
    def latents(self) -> dict[str, int]:
        """The part of the workspace that takes results of attention before they are projected, and its size."""
        if not self.projection:
            return {}
        assert self.pieces or self.problem.batch
        b = self.pieces.max_b if self.pieces else self.problem.batch.b if self.problem.batch else 0
        return {
            combine_project.LATENTS: combine_project.latents_nbytes(b * self.problem.s_q * self.problem.h_q, self.apart)
        }


class DecodePipeline(Pipeline[DecodeConfig]):
    """The kernels of dense decode."""

    kernels = (
        sm90_small_cluster8.KERNEL,
        sm90_small.KERNEL,
        sm90.BOXES,
        sm90.KERNEL,
        forms.SMALL,
        forms.SEESAW,
        *sm100.KERNELS,
        *mma.KERNELS,
        narrow.KERNEL,
        mma_narrow.KERNEL,
        generic.KERNEL,
        generic_forms.KERNEL,
        sm90_fp8.KERNEL,
        sm100_fp8.KERNEL,
        records.SEESAW,
        records.SMALL,
        records.SEESAW_FORMS,
        records.SMALL_FORMS,
        records.SM100,
        records.MMA_163KB,
        records.MMA,
        records.GENERIC,
    )

    def configure(self, problem: DecodeProblem, device: DeviceInfo, kernel: str | None = None) -> DecodeConfig:
        """See `Pipeline.configure`."""
        chosen = choice.choose("decode", choice.of_math(self.kernels, problem.math, kernel), problem, device, kernel)
        chosen = sm90_fp8.sized(chosen, problem, device)
        groups = _groups(problem, chosen)
        rows = groups.queries * problem.h_q if groups else problem.rows
        splits = chosen.splits(rows, device)
        blocks = 0 if chosen.cluster_blocks > 1 else combine.blocks(splits.num_splits, device)
        config = DecodeConfig(problem, chosen, splits.row_blocks, splits.num_splits, blocks)
        if problem.d_head:
            batch = problem.batch or Batch(1, 0)
            config = _projecting(config, batch.queries or batch.b * problem.s_q, device)
        if groups is None:
            return config
        batch = problem.batch or Batch(1, 0)
        most = groups.most(batch.b, batch.queries or problem.s_q)
        return replace(config, groups=groups, max_groups=most)

    def in_pieces(self, config: DecodeConfig, pieces: Pieces, device: DeviceInfo) -> DecodeConfig:
        """Configuration of a batch-invariant call, in pieces."""
        config = replace(config, pieces=pieces, combine_blocks=combine.blocks(pieces.max_pieces, device))
        if not config.apart:
            return config
        # The order of a row's sums must not depend on the batch: the kernel in the combine's place has one of its own.
        return _projecting(config, 0, device)

    def workspace(self, config: DecodeConfig) -> Layout:
        """The schedule, then the partial results; what has to be zeros is last."""
        if config.in_clusters:
            splits = SplitGrid(config.row_blocks, config.num_splits)
            return Layout({**config.latents, **clusters.workspace(config.kernel, config.problem, splits)})
        rows = config.num_partials * config.s_q * config.problem.h_q
        nbytes = schedule_pieces.nbytes(config.pieces) if config.pieces else schedule.nbytes(config.num_splits)
        groups = {"groups": schedule_groups.GROUP_BYTES * config.max_groups} if config.groups else {}
        partials = {"schedule": nbytes, **groups, "partial_lse": 4 * rows, "partial_out": 4 * D_V * rows}
        return Layout({**partials, **config.latents})

    def steps(self, config: DecodeConfig, call: Call) -> list[Step]:
        """The schedule, unless a plan has it, the attention and the merge; nothing for an empty batch."""
        b, s_q = _batch(call)
        if b == 0 or s_q == 0:
            return []
        max_tokens = call.view("block_table").shape[1] * call.view("kv_cache").shape[1]
        splits = config.splits(b)
        grid = (config.row_blocks, splits, 1)
        if config.in_clusters:
            splits = clusters.clusters(config.kernel, config.num_splits, b, max_tokens)
            grid = (splits * config.kernel.cluster_blocks, config.row_blocks, 1)
        args = self._args(config, call, splits)
        attend = Launch(config.kernel, config.kernel.variant(config.problem), grid, args)
        steps: list[Step] = [attend]
        if not call.planned:
            shard, stride = (call.options.cp_world, call.options.cp_rank), call.view("seqlens").strides[0]
            if config.groups:
                step = schedule_groups.Step(b, s_q, max_tokens, stride, call.stride("cu_seqlens_q"))
                steps[:0] = self.schedule_groups(config, step)
            else:
                steps[:0] = self.schedule(config, stride, max_tokens, b, shard)
        if config.projection and not config.apart:
            params, has_pieces = self._params(config, call, splits), config.pieces is not None
            return [*steps, combine_project.combine(config.projection, call, params, has_pieces=has_pieces)]
        if config.combine_blocks and config.merged:
            steps.append(self._combine(config, _requests(config, call), args))
        if config.projection:
            steps.append(results.project(config.projection, call))
        return steps

    def _combine(self, config: DecodeConfig, b: int, args: LaunchArgs) -> Launch:
        """The merge, of the `b` requests or groups of the schedule."""
        rows, dtype = config.s_q * config.problem.h_q, config.problem.half
        bf16_partials = combine.reads_bf16(args)
        if isinstance(args.params, (DecodeFormParams, DecodeFp8Params)) and config.groups is None:
            args = LaunchArgs(args.params.decode_params)
        if config.pieces:
            return combine_pieces.launch(dtype, config.combine_blocks, b * rows, config.pieces.max_pieces, args)
        blocks = combine.needed_blocks(config.combine_blocks, b, rows, config.num_splits)
        if config.groups:
            return combine_forms.launch(dtype, blocks, args)
        return combine.launch(dtype, blocks, args, config.problem.d_v, bf16_partials=bf16_partials)

    def builds(self, config: DecodeConfig) -> list[tuple[KernelSpec[Any], Variant]]:
        """Every kernel that a call of this configuration may launch."""
        problem = config.problem
        cut, merge = schedule.KERNEL, combine.KERNEL
        if config.pieces:
            cut, merge = schedule_pieces.KERNEL, combine_pieces.KERNEL
        if config.groups:
            cut, merge = schedule_groups.KERNEL, combine_forms.KERNEL
        found: list[tuple[KernelSpec[Any], Variant]] = [(config.kernel, config.kernel.variant(problem))]
        if not config.in_clusters:
            found.insert(0, (cut, PLAIN[0]))
        if config.combine_blocks and (config.apart or not config.projection):
            found.append((merge, combine.build(problem.half, problem.d_v)))
            if config.bf16_partials:
                found.append((combine.BF16_PARTIALS, combine.BF16_PARTIALS.variants[0]))
        return [*found, config.projection[:2]] if config.projection else found

    def schedule(
        self, config: DecodeConfig, stride: int, max_tokens: int, b: int, shard: tuple[int, int] = (1, 0)
    ) -> list[Step]:
        """The steps that cut a batch of `b` sequences, whose lengths are `stride` elements apart.

        `shard` is (cp_world, cp_rank). Clusters cut it themselves; where they share requests, their tickets are zeroed.
        """
        if config.in_clusters:
            launched = clusters.clusters(config.kernel, config.num_splits, b, max_tokens)
            return [ZeroFill("tickets")] if launched > b else []
        if config.pieces:
            return [schedule_pieces.launch("seqlens", stride, max_tokens, b, config.pieces, shard)]
        problem, kernel = config.problem, config.kernel
        merge_cost = heuristics.merge_cost(min(problem.rows, kernel.block_rows))
        piece_cost = heuristics.piece_cost(problem.s_q * problem.h_q) if kernel.counts_partials else 0
        return [schedule.launch("seqlens", stride, max_tokens, b, config.num_splits, merge_cost, shard, piece_cost)]

    def schedule_groups(self, config: DecodeConfig, step: schedule_groups.Step) -> list[Step]:
        """The step that divides the queries of a batch into groups, and cuts what they see."""
        assert config.groups is not None
        problem, kernel = config.problem, config.kernel
        rows = config.s_q * problem.h_q
        merge_cost = heuristics.merge_cost(min(rows, kernel.block_rows))
        piece_cost = heuristics.piece_cost(rows) if kernel.counts_partials else 0
        return [schedule_groups.launch(config.groups, step, config.num_splits, merge_cost, piece_cost)]

    def _args(self, config: DecodeConfig, call: Call, splits: int) -> LaunchArgs:
        kv_cache, params = call.view("kv_cache"), _with_forms(config, call, self._params(config, call, splits))
        maps = config.kernel.kv_maps(kv_cache)
        # A pool without pages may have no address, which a map needs; of 16-bit rows it has a kernel without maps.
        empty = maps and config.problem.record and kv_cache.shape[0] == 0
        return LaunchArgs(params, maps=tuple(("schedule" if empty else "kv_cache", spec) for spec in maps))

    def _params(self, config: DecodeConfig, call: Call, splits: int) -> DecodeParams:
        options: DecodeOptions = call.options
        kv_cache = call.view("kv_cache")
        num_pages, page_size, _ = kv_cache.shape
        projects = config.projection is not None
        return DecodeParams(
            q="q",
            kv="kv_cache",
            block_table="block_table",
            seqlens="seqlens",
            schedule=NULL if config.in_clusters else "schedule",
            out=combine_project.LATENTS if projects else "out",
            lse="lse",
            attn_sink=call.name("attn_sink"),
            partial_out="partial_out",
            partial_lse="partial_lse",
            tickets="tickets" if config.in_clusters else NULL,
            tree_mask=call.name("tree_mask"),
            q_stride_b_s_h_elems=_query_strides(call, "q"),
            kv_stride_page_token_h_elems=_cache_strides(config.problem.record, kv_cache),
            table_stride_b_page_elems=call.strides("block_table", 2),
            seqlens_stride_elems=call.stride("seqlens"),
            out_stride_b_s_h_elems=combine_project.latents_strides(config.s_q, config.problem.h_q)
            if projects
            else _query_strides(call, "out"),
            lse_stride_b_h_s_elems=_query_strides(call, "lse"),
            sink_stride_elems=call.stride("attn_sink"),
            tree_stride_b_s_elems=call.strides("tree_mask", 2),
            b=_requests(config, call),
            s_q=config.s_q,
            h_q=config.problem.h_q,
            num_pages=num_pages,
            page_size=page_size,
            max_pages=call.view("block_table").shape[1],
            num_splits=splits,
            causal=options.causal,
            out_is_fp32=not config.apart and (projects or call.view("out").dtype == "float32"),
            continued_index=0 if config.pieces else config.num_splits,
            unit_tiles=int(config.apart and not config.in_clusters),
            cp_world=options.cp_world,
            cp_rank=options.cp_rank,
            scale_log2=options.scale * options.kv_scale * options.q_scale * LOG2_E,
            lse_convention=LseOptions.of(options).convention,
            value_scale=options.kv_scale,
        )


def _groups(problem: DecodeProblem, kernel: AttentionKernel[DecodeProblem]) -> Groups | None:
    """Groups of as many queries as fill a block of the kernel, or as most sequences have; None if there are none."""
    wanted = problem.forms
    if not wanted.grouped:
        return None
    return Groups(max(1, min(problem.s_q, kernel.block_rows // problem.h_q)), wanted.packed, wanted.window)


def _projecting(config: DecodeConfig, tokens: int, device: DeviceInfo) -> DecodeConfig:
    """The configuration with a W_UV, for so many tokens."""
    problem, apart = config.problem, is_apart(config.problem.h_q, config.problem.d_head, tokens)
    chosen = results.build if apart else combine_project.PROJECTION.build
    build = chosen(problem.half, problem.h_q, problem.d_head, tokens, device)
    blocks = combine.blocks_beside_results(config.combine_blocks) if apart else config.combine_blocks
    return replace(config, projection=build, apart=apart, combine_blocks=blocks)


def _with_forms(
    config: DecodeConfig, call: Call, params: DecodeParams
) -> DecodeParams | DecodeFormParams | DecodeFp8Params:
    """The parameters as the kernel takes them."""
    if config.kernel.params is DecodeParams:
        return params
    if config.kernel.params is DecodeFp8Params:
        return DecodeFp8Params(
            fp8_scale_addresses=Fp8ScaleAddresses(q_scales=call.name("q_scales"), kv_scales=call.name("kv_scales")),
            decode_params=params,
            q_scales_stride_b_s_h_elems=call.strides("q_scales", 3),
            bf16_partials=config.bf16_partials and not params.out_is_fp32,
        )
    cos, positions = call.views["out_cos"], call.views["out_positions"]
    return DecodeFormParams(
        form_addresses=FormAddresses(
            q_rope=call.name("q_rope"),
            groups="groups" if config.groups else NULL,
            out_cos=call.name("out_cos"),
            out_sin=call.name("out_sin"),
            out_positions=call.name("out_positions"),
        ),
        decode_params=params,
        q_rope_stride_b_s_h_elems=_query_strides(call, "q_rope" if config.problem.forms.q_rope else "q"),
        out_cos_stride_elems=call.stride("out_cos"),
        out_sin_stride_elems=call.stride("out_sin"),
        out_positions_stride_b_s_bytes=_position_strides(call),
        window=config.problem.forms.window,
        out_max_position=cos.shape[0] if cos else 0,
        out_positions_are_64=positions is not None and positions.dtype == "int64",
    )


def _batch(call: Call) -> tuple[int, int]:
    """Sequences, and the query tokens of each; of packed queries all of them."""
    b, queries = call.view("seqlens").shape[0], call.view("q").shape
    return b, queries[0] if call.name("cu_seqlens_q") else queries[1]


def _requests(config: DecodeConfig, call: Call) -> int:
    """Number of what the schedule takes for requests: the sequences, or as many groups as there may be."""
    b, s_q = _batch(call)
    if config.groups is None:
        return b
    return config.groups.most(b, s_q)


def _query_strides(call: Call, name: str) -> tuple[int, int, int]:
    """The strides of an array of queries or results; packed ones have no axis of sequences."""
    if not call.name("cu_seqlens_q"):
        return call.strides(name, 3)
    return (0, *call.strides(name, 2))


def _position_strides(call: Call) -> tuple[int, int]:
    """The strides of the positions by which results are turned back, in bytes."""
    positions = call.views["out_positions"]
    if positions is None:
        return 0, 0
    strides = [TABLE[positions.dtype].nbytes * stride for stride in positions.strides]
    return (0, strides[0]) if len(strides) == 1 else (strides[0], strides[1])


def _cache_strides(record: str, kv_cache: View) -> tuple[int, int, int]:
    """Strides of pages, tokens and heads: in elements, or in bytes of a plane of records."""
    page, token = page_and_token_bytes(FORMATS[record], kv_cache) if record else kv_cache.strides[:2]
    return page, token, 0


DECODE = DecodePipeline()
