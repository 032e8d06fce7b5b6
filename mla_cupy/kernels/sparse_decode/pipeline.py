"""Sparse decode: attention over the splits of the lists, then a merge of the queries that were split.

To the schedule a query is a request with the entries of its lists as tokens: see `attention/record_tokens.cuh`. With
FP8 matmuls an earlier launch makes lists of the valid slots, and the rest is the sparse forward's.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import cast

from mla_cupy.arrays.view import View
from mla_cupy.cache_formats import FORMATS, format_of
from mla_cupy.kernels import choice
from mla_cupy.kernels.attention import combine, combine_project, quantize_output, record_layout, row_lists
from mla_cupy.kernels.attention import schedule as attention_schedule
from mla_cupy.kernels.attention.heuristics import merge_cost
from mla_cupy.kernels.attention.kernel import AttentionKernel
from mla_cupy.kernels.attention.projection import Build, is_apart
from mla_cupy.kernels.attention.records import COMPACT
from mla_cupy.kernels.attention.split_schedule import MAX_SPLITS
from mla_cupy.kernels.decode import combine_pieces, schedule_pieces
from mla_cupy.kernels.decode.schedule_pieces import Pieces
from mla_cupy.kernels.lse import LseOptions
from mla_cupy.kernels.numbers import LOG2_E
from mla_cupy.kernels.param_layout import NULL
from mla_cupy.kernels.params import DecodeFp8Params, DecodeParams, ExtraAddresses, Fp8ScaleAddresses, SparseDecodeParams
from mla_cupy.kernels.pipeline import Call, Launch, LaunchArgs, Layout, Pipeline, Step
from mla_cupy.kernels.projection import results
from mla_cupy.kernels.sparse_decode import records, schedule, turn_results
from mla_cupy.kernels.sparse_decode.problem import SparseDecodeOptions, SparseDecodeProblem
from mla_cupy.kernels.sparse_decode.schedule import Cuts
from mla_cupy.kernels.spec import Variant
from mla_cupy.runtime.device import DeviceInfo
from mla_cupy.shapes import D_V


@dataclass(frozen=True)
class SparseDecodeConfig:
    """Everything about a call that does not depend on pointers or strides.

    `combine_blocks` is 0 if no query can be split. With list lengths in memory, only `cuts` has the splits.
    `projection` is the kernel that replaces the combine if there is a W_UV, or with `apart` the one after it. A
    batch-invariant call has `pieces`, one for each split.
    """

    problem: SparseDecodeProblem
    kernel: AttentionKernel[SparseDecodeProblem]
    variant: Variant
    block_rows: int
    cuts: Cuts
    combine_blocks: int
    projection: Build | None = None
    apart: bool = False
    pieces: Pieces | None = None

    @property
    def has_schedule(self) -> bool:
        """True if splits are in memory."""
        return self.problem.ragged or self.listed or self.pieces is not None

    @property
    def listed(self) -> bool:
        """True if the kernel reads lists of tokens, and not the caller's indices."""
        return self.kernel is records.FP8

    @property
    def row_blocks(self) -> int:
        """Blocks side by side, for all heads."""
        return -(-self.problem.h_q // self.block_rows)


class SparseDecodePipeline(Pipeline[SparseDecodeConfig]):
    """The kernels of sparse decode."""

    kernels = records.KERNELS

    def configure(
        self, problem: SparseDecodeProblem, device: DeviceInfo, kernel: str | None = None
    ) -> SparseDecodeConfig:
        """See `Pipeline.configure`."""
        computing = choice.of_math(self.kernels, problem.math, kernel)
        chosen = choice.choose("sparse decode", computing, problem, device, kernel)
        variant = chosen.variant(problem, device)
        block_rows = int(variant.block_rows) if chosen is records.SMALL else chosen.block_rows
        resident = chosen.blocks_per_sm * device.sm_count
        most = min(MAX_SPLITS, max(1, resident // -(-problem.h_q // block_rows)))
        pieces = problem.pieces
        if pieces:
            cuts, split = Cuts(pieces.num_splits, 0, 0), pieces.max_pieces > 1
        elif problem.ragged or chosen is records.FP8:
            cuts, split = Cuts(most, 0, 0), most > 1
        else:
            cuts = schedule.even_cuts(problem, block_rows, most)
            split = cuts.request_units > 1 and cuts.num_splits > 1
        blocks = combine.blocks(cuts.num_splits, device) if split else 0
        config = SparseDecodeConfig(problem, chosen, variant, block_rows, cuts, blocks, pieces=pieces)
        if not problem.d_head:
            return config
        apart = pieces is None and is_apart(problem.h_q, problem.d_head, problem.queries)
        chosen_build = results.build if apart else combine_project.KERNEL.build
        build = chosen_build(problem.dtype, problem.h_q, problem.d_head, problem.queries, device)
        return replace(config, projection=build, apart=apart)

    def workspace(self, config: SparseDecodeConfig) -> Layout:
        """Lists and schedule, if they are in memory, two partial results per split, and results to be projected."""
        problem, splits = config.problem, config.cuts.num_splits
        partial_rows = (1 if config.pieces else 2) * splits * problem.h_q if config.combine_blocks else 0
        rows = problem.queries * problem.h_q
        latents = rows if config.projection else 0
        return Layout(
            {
                **(quantize_output.workspace(rows, problem.d_head or D_V) if problem.fp8_out else {}),
                **(row_lists.list_sizes(problem.queries, problem.topk) if config.listed else {}),
                "schedule": _schedule_nbytes(config),
                "partial_lse": 4 * partial_rows,
                "partial_out": 4 * D_V * partial_rows,
                **({combine_project.LATENTS: combine_project.latents_nbytes(latents, config.apart)} if latents else {}),
            }
        )

    def steps(self, config: SparseDecodeConfig, call: Call) -> list[Step]:
        """The launches up to results in 16 bits or float32, and the conversion to FP8 for such a result."""
        return quantize_output.steps(call, config.problem.dtype, lambda call: self._attend(config, call))

    def _attend(self, config: SparseDecodeConfig, call: Call) -> list[Step]:
        """No launch if there is no query."""
        problem, splits = config.problem, config.cuts.num_splits
        if problem.queries == 0:
            return []
        params = self._params(config, call)
        args = LaunchArgs(_with_scales(params, config) if config.listed else _with_extra(params, call, problem.record))
        cost = merge_cost(min(problem.h_q, config.block_rows))
        steps: list[Step] = []
        if config.listed:
            slots = params.num_pages * params.page_size
            steps.append(row_lists.launch(call, causal=False, ordered=False, s_kv=slots))
            longest = row_lists.rows_stride(problem.topk)
            if config.pieces:
                steps.append(schedule_pieces.launch("counts", 1, longest, problem.queries, config.pieces))
            else:
                steps.append(attention_schedule.launch("counts", 1, longest, problem.queries, splits, cost))
        elif config.has_schedule:
            steps.append(schedule.launch(call, problem, splits, cost))
        steps.append(Launch(config.kernel, config.variant, (config.row_blocks, splits, 1), args))
        if config.projection and not config.apart:
            has_pieces = config.pieces is not None
            steps.append(combine_project.combine(config.projection, call, params, has_pieces=has_pieces, by_query=True))
        elif config.combine_blocks and config.pieces:
            rows = problem.queries * problem.h_q
            steps.append(
                combine_pieces.launch(
                    problem.dtype, config.combine_blocks, rows, config.pieces.max_pieces, LaunchArgs(params)
                )
            )
        elif config.combine_blocks:
            blocks = combine.needed_blocks(config.combine_blocks, problem.queries, problem.h_q, splits)
            merged = LaunchArgs(params)
            steps.append(combine.launch(problem.dtype, blocks, merged, bf16_partials=combine.reads_bf16(args)))
        if config.projection and config.apart:
            steps.append(results.project(config.projection, call, by_query=True))
        if call.name("out_cos"):
            steps.append(turn_results.launch(call, 1 if call.view("q").shape[1] > 1 else 0))
        return steps

    def _params(self, config: SparseDecodeConfig, call: Call) -> DecodeParams:
        problem, options, cuts = config.problem, cast(SparseDecodeOptions, call.options), config.cuts
        of_query = 1 if call.view("q").shape[1] > 1 else 0  # the axes b and s_q step evenly: they are one
        indices, cache = call.view("indices"), call.view("kv_cache")
        projects = config.projection is not None
        of_latents = combine_project.latents_strides(1, problem.h_q)
        longest = row_lists.rows_stride(problem.topk) if config.listed else indices.shape[2]
        lengths, num_pages = call.name("topk_length"), cache.shape[0]
        if _is_compact(cache):  # the first list is empty
            longest, lengths, num_pages = 0, NULL, 0
        return DecodeParams(
            q="q",
            kv="kv_cache",
            block_table="rows" if config.listed else "indices",
            seqlens="counts" if config.listed else lengths,
            schedule="schedule" if config.has_schedule else NULL,
            out=combine_project.LATENTS if projects else call.name("out"),
            lse="lse",
            attn_sink=call.name("attn_sink"),
            partial_out="partial_out",
            partial_lse="partial_lse",
            q_stride_b_s_h_elems=(call.stride("q", of_query), 0, call.stride("q", 2)),
            kv_stride_page_token_h_elems=(*_strides(cache, problem.record), 0),
            table_stride_b_page_elems=(longest, 1) if config.listed else (indices.strides[0], indices.strides[2]),
            seqlens_stride_elems=1 if config.listed else call.stride("topk_length"),
            out_stride_b_s_h_elems=of_latents if projects else (call.stride("out", of_query), 0, call.stride("out", 2)),
            lse_stride_b_h_s_elems=(call.stride("lse", of_query), call.stride("lse", 2), 0),
            sink_stride_elems=call.stride("attn_sink"),
            b=problem.queries,
            h_q=problem.h_q,
            num_pages=num_pages,
            page_size=cache.shape[1],
            max_pages=longest,
            num_splits=cuts.num_splits,
            out_is_fp32=not config.apart and (projects or call.view("out").dtype == "float32"),
            continued_index=0 if config.pieces else cuts.num_splits,
            request_units=cuts.request_units,
            unit_tiles=cuts.unit_tiles,
            scale_log2=options.scale * options.kv_scale * LOG2_E,
            lse_convention=LseOptions.of(options).convention,
            value_scale=options.kv_scale,
        )


def _schedule_nbytes(config: SparseDecodeConfig) -> int:
    """Size of the schedule, if it is in memory."""
    if config.pieces:
        return schedule_pieces.nbytes(config.pieces)
    return attention_schedule.nbytes(config.cuts.num_splits) if config.has_schedule else 0


def _with_scales(params: DecodeParams, config: SparseDecodeConfig) -> DecodeFp8Params:
    """Parameters of the kernel with products in FP8, which could have scales on the device."""
    wide = config.problem.dtype != "bfloat16" or params.out_is_fp32 or config.pieces is not None
    return DecodeFp8Params(
        fp8_scale_addresses=Fp8ScaleAddresses(),
        decode_params=params,
        bf16_partials=not wide,
    )


def _with_extra(params: DecodeParams, call: Call, record: str) -> SparseDecodeParams:
    """Parameters of the attention kernels: the second cache and its lists, too; a compact one is always the second."""
    indices = call.view("indices")
    names = _OF_FIRST if _is_compact(call.view("kv_cache")) else tuple(f"extra_{name}" for name in _OF_FIRST)
    cache, extra = call.views[names[0]], call.views[names[1]]
    page_bytes, token_bytes = (0, 0) if cache is None else _strides(cache, record)
    return SparseDecodeParams(
        extra_addresses=ExtraAddresses(
            extra_cache=call.name(names[0]), extra_indices=call.name(names[1]), extra_topk_length=call.name(names[2])
        ),
        decode_params=params,
        indices_stride_s_elems=indices.strides[1],
        extra_page_stride_bytes=page_bytes,
        extra_token_stride_bytes=token_bytes,
        extra_stride_b_s_k_elems=call.strides(names[1], 3),
        extra_length_stride_elems=call.stride(names[2]),
        queries_of_length=indices.shape[1],
        extra_num_pages=0 if cache is None else cache.shape[0],
        extra_page_size=1 if cache is None else cache.shape[1],
        extra_topk=0 if extra is None else extra.shape[2],
    )


_OF_FIRST = ("kv_cache", "indices", "topk_length")


def _is_compact(cache: View) -> bool:
    """True if a cache has the format that the kernels read as the second list's."""
    return format_of(cache.dtype, cache.shape[2]).name in COMPACT.values()


def _strides(cache: View, record: str) -> tuple[int, int]:
    """Strides of pages and tokens of this record, or of its compact one, in bytes."""
    name = COMPACT[record] if _is_compact(cache) else record
    return record_layout.page_and_token_bytes(FORMATS[name], cache)


SPARSE_DECODE = SparseDecodePipeline()
