"""The sparse forward: lists of rows, schedule, attention over the splits, merge of the queries that were split.

Before them FP8 records may be converted to rows: see `convert.py`.

To the attention kernels a query is a request of one token with pages of one token: see `attention/decode_params.cuh`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import cast

from mla_cupy.arrays.view import View
from mla_cupy.cache_formats import FORMATS
from mla_cupy.dtypes import TABLE
from mla_cupy.kernels import choice
from mla_cupy.kernels.attention import combine, generic, heuristics, mma, row_lists, schedule
from mla_cupy.kernels.attention.kernel import AttentionKernel
from mla_cupy.kernels.attention.record_layout import page_and_token_bytes
from mla_cupy.kernels.decode import combine_pieces, schedule_pieces
from mla_cupy.kernels.decode.schedule_pieces import Pieces
from mla_cupy.kernels.lse import LseOptions
from mla_cupy.kernels.numbers import LOG2_E
from mla_cupy.kernels.params import DecodeFp8Params, DecodeParams, Fp8ScaleAddresses
from mla_cupy.kernels.pipeline import Call, Launch, LaunchArgs, Layout, Pipeline, Step
from mla_cupy.kernels.sparse_forward import convert, records, sm90, sm90_fp8, sm100
from mla_cupy.kernels.sparse_forward.heuristics import ORDERED_BY_WIDE_MMA_FROM, ORDERED_FROM
from mla_cupy.kernels.sparse_forward.problem import MappedKernel, SparseForwardOptions, SparseForwardProblem
from mla_cupy.kernels.spec import Variant
from mla_cupy.runtime.device import DeviceInfo
from mla_cupy.shapes import D_V

#: Dense decode's, over pages of one token.
GENERIC = cast("AttentionKernel[SparseForwardProblem]", generic.KERNEL)


@dataclass(frozen=True)
class SparseForwardConfig:
    """Everything about a forward that does not depend on pointers or strides.

    `combine_blocks` is 0 if nothing is split; `ordered`: the lists of rows are sorted. `converted` is the format of kv,
    if it is converted to the rows that `problem` describes; else "". A batch-invariant call has `pieces`, one for each
    split.
    """

    problem: SparseForwardProblem
    kernel: AttentionKernel[SparseForwardProblem]
    variant: Variant
    row_blocks: int
    num_splits: int
    combine_blocks: int
    ordered: bool
    converted: str = ""
    pieces: Pieces | None = None


class SparseForwardPipeline(Pipeline[SparseForwardConfig]):
    """The kernels of the sparse forward."""

    kernels = (
        sm90.SMALL,
        sm90.SEESAW,
        *sm100.KERNELS,
        *mma.KERNELS,
        GENERIC,
        records.SMALL,
        records.GENERIC,
        sm90_fp8.KERNEL,
    )

    def configure(
        self, problem: SparseForwardProblem, device: DeviceInfo, kernel: str | None = None
    ) -> SparseForwardConfig:
        """See `Pipeline.configure`."""
        converted = ""
        pieces = problem.pieces
        if kernel is None and pieces is None and convert.is_faster(problem, device):
            problem, converted = replace(problem, record=""), problem.record
        computing = choice.of_math(self.kernels, problem.math, kernel)
        chosen = choice.choose("the sparse forward", computing, problem, device, kernel)
        splits = chosen.splits(problem.h_q, device)
        row_bytes = TABLE[problem.dtype].nbytes * problem.d_qk
        if problem.record:
            row_bytes = FORMATS[problem.record].token_bytes
        ordered_from = ORDERED_BY_WIDE_MMA_FROM if chosen is mma.WIDE else ORDERED_FROM
        num_splits = pieces.num_splits if pieces else splits.num_splits
        return SparseForwardConfig(
            problem,
            chosen,
            chosen.variant(problem, device),
            splits.row_blocks,
            num_splits,
            combine.blocks(pieces.max_pieces if pieces else num_splits, device),
            pieces is None and row_bytes * problem.s_kv >= int(ordered_from * device.l2_bytes),
            converted,
            pieces,
        )

    def workspace(self, config: SparseForwardConfig) -> Layout:
        """The lists, the schedule, two partial results per split, then the rows that records are converted to."""
        problem = config.problem
        pieces, splits = config.pieces, config.num_splits
        partial_rows = (1 if pieces else 2) * splits * problem.h_q if config.combine_blocks else 0
        return Layout(
            {
                **row_lists.list_sizes(problem.s_q, problem.topk),
                "schedule": schedule_pieces.nbytes(pieces) if pieces else schedule.nbytes(splits),
                "partial_lse": 4 * partial_rows,
                "partial_max": 4 * partial_rows,
                "partial_out": 4 * D_V * partial_rows,
                **({convert.ROWS: convert.nbytes(problem)} if config.converted else {}),
            }
        )

    def steps(self, config: SparseForwardConfig, call: Call) -> list[Step]:
        """No launch if there is no query."""
        problem, options = config.problem, call.options
        if problem.s_q == 0:
            return []
        merged = self._args(config, call)
        args = _with_scales(config, merged)
        steps: list[Step] = [
            *(convert.launches(problem, config.converted, call) if config.converted else ()),
            row_lists.launch(call, options.causal, options.relative, ordered=config.ordered, s_kv=problem.s_kv),
            _schedule(config),
            Launch(config.kernel, config.variant, (config.row_blocks, config.num_splits, 1), args),
        ]
        if config.combine_blocks:
            steps.append(_merge(config, args, merged))
        return steps

    def _args(self, config: SparseForwardConfig, call: Call) -> LaunchArgs:
        problem, options = config.problem, cast(SparseForwardOptions, call.options)
        q, out, lse, maxima = (call.strides(name, 2) for name in ("q", "out", "lse", "max_logits"))
        row_strides, (num_pages, page_size) = _rows(config, call.view("kv"))
        list_stride = row_lists.rows_stride(problem.topk)
        params = DecodeParams(
            q="q",
            kv=convert.ROWS if config.converted else "kv",
            block_table="rows",
            seqlens="counts",
            schedule="schedule",
            out="out",
            lse="lse",
            attn_sink=call.name("attn_sink"),
            max_logits="max_logits",
            partial_out="partial_out",
            partial_lse="partial_lse",
            partial_max="partial_max",
            q_stride_b_s_h_elems=(q[0], 0, q[1]),
            kv_stride_page_token_h_elems=row_strides,
            table_stride_b_page_elems=(list_stride, 1),
            seqlens_stride_elems=1,
            out_stride_b_s_h_elems=(out[0], 0, out[1]),
            lse_stride_b_h_s_elems=(lse[0], lse[1], 0),
            max_stride_b_h_s_elems=(maxima[0], maxima[1], 0),
            sink_stride_elems=call.stride("attn_sink"),
            b=problem.s_q,
            h_q=problem.h_q,
            num_pages=num_pages,
            page_size=page_size,
            max_pages=list_stride,
            num_splits=config.num_splits,
            out_is_fp32=call.view("out").dtype == "float32",
            continued_index=0 if config.pieces else config.num_splits,
            scale_log2=options.scale * options.kv_scale * LOG2_E,
            lse_convention=LseOptions.of(options).convention,
            value_scale=options.kv_scale,
        )
        kernel = config.kernel
        return LaunchArgs(params, kernel.maps(problem, params.kv, call) if isinstance(kernel, MappedKernel) else ())


def _schedule(config: SparseForwardConfig) -> Launch:
    """Cut the lists of all queries."""
    problem, longest = config.problem, row_lists.rows_stride(config.problem.topk)
    if config.pieces:
        return schedule_pieces.launch("counts", 1, longest, problem.s_q, config.pieces)
    merge_cost = heuristics.merge_cost(min(problem.h_q, config.kernel.block_rows))
    return schedule.launch("counts", 1, longest, problem.s_q, config.num_splits, merge_cost)


def _merge(config: SparseForwardConfig, args: LaunchArgs, merged: LaunchArgs) -> Launch:
    """Merge the partial results that the attention kernel leaves with `args`."""
    problem, resident = config.problem, config.combine_blocks
    if config.pieces:
        rows = problem.s_q * problem.h_q
        return combine_pieces.launch(problem.dtype, resident, rows, config.pieces.max_pieces, merged)
    blocks = combine.needed_blocks(resident, problem.s_q, problem.h_q, config.num_splits)
    return combine.launch(problem.dtype, blocks, merged, bf16_partials=combine.reads_bf16(args))


def _with_scales(config: SparseForwardConfig, args: LaunchArgs) -> LaunchArgs:
    """The attention kernel's arguments; FP8 matmuls use a struct with room for scales on the device."""
    if config.kernel.params is not DecodeFp8Params:
        return args
    assert isinstance(args.params, DecodeParams)
    wide = config.problem.dtype != "bfloat16" or args.params.out_is_fp32 or config.pieces is not None
    params = DecodeFp8Params(fp8_scale_addresses=Fp8ScaleAddresses(), decode_params=args.params, bf16_partials=not wide)
    return LaunchArgs(params)


def _rows(config: SparseForwardConfig, kv: View) -> tuple[tuple[int, int, int], tuple[int, ...]]:
    """The strides of pages, tokens and heads of the attended array, its number of pages, and the page size."""
    problem = config.problem
    if config.converted:
        return (problem.d_qk, 0, 0), (problem.s_kv, 1)
    if problem.record:
        return (*page_and_token_bytes(FORMATS[problem.record], kv), 0), kv.shape[:2]
    return (kv.strides[0], 0, 0), kv.shape[:2]


SPARSE_FORWARD = SparseForwardPipeline()
