"""The sparse forward: lists of rows, schedule, attention over the splits, merge of the queries that were split.

Before them FP8 records may be converted to rows: see `convert.py`.

To the attention kernels a query is a request of one token with pages of one token: see `attention/decode_params.cuh`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import cast

from mla_cupy.cache_formats import FORMATS
from mla_cupy.dtypes import TABLE
from mla_cupy.kernels import choice
from mla_cupy.kernels.attention import combine, generic, row_lists, schedule
from mla_cupy.kernels.attention.kernel import AttentionKernel
from mla_cupy.kernels.attention.record_layout import page_and_token_bytes
from mla_cupy.kernels.numbers import LOG2_E, from_log2
from mla_cupy.kernels.pipeline import NULL, Call, Launch, LaunchArgs, Layout, Pipeline, Step
from mla_cupy.kernels.sparse_forward import convert, generic_records, sm90, sm90_records, sm90_small
from mla_cupy.kernels.sparse_forward.problem import SparseForwardOptions, SparseForwardProblem
from mla_cupy.runtime.device import DeviceInfo
from mla_cupy.shapes import D_V

ORDERED_FROM = 0.25
"""From this share of the L2 on, kv is walked in order, so that queries that run side by side share its lines."""

#: Dense decode's, over pages of one token.
GENERIC = cast("AttentionKernel[SparseForwardProblem]", generic.KERNEL)


@dataclass(frozen=True)
class SparseForwardConfig:
    """Everything about a forward that does not depend on pointers or strides.

    `combine_blocks` is 0 where nothing is split; `ordered` says that the lists of rows are sorted. `converted` is the
    record of kv, where it is converted to the rows that `problem` speaks of; else "".
    """

    problem: SparseForwardProblem
    kernel: AttentionKernel[SparseForwardProblem]
    row_blocks: int
    num_splits: int
    combine_blocks: int
    ordered: bool
    converted: str = ""


class SparseForwardPipeline(Pipeline[SparseForwardConfig]):
    """The kernels of the sparse forward."""

    kernels = (
        sm90_small.KERNEL,
        sm90.KERNEL,
        GENERIC,
        sm90_records.KERNEL,
        generic_records.KERNEL,
    )

    def configure(
        self, problem: SparseForwardProblem, device: DeviceInfo, kernel: str | None = None
    ) -> SparseForwardConfig:
        """See `Pipeline.configure`."""
        converted = ""
        if kernel is None and convert.is_faster(problem, device):
            problem, converted = replace(problem, record=""), problem.record
        chosen = choice.choose("the sparse forward", self.kernels, problem, device, kernel)
        splits = chosen.splits(problem.h_q, device)
        row_bytes = TABLE[problem.dtype].nbytes * problem.d_qk
        if problem.record:
            row_bytes = FORMATS[problem.record].token_bytes
        return SparseForwardConfig(
            problem,
            chosen,
            splits.row_blocks,
            splits.num_splits,
            combine.blocks(splits.num_splits, device),
            row_bytes * problem.s_kv >= int(ORDERED_FROM * device.l2_bytes),
            converted,
        )

    def workspace(self, config: SparseForwardConfig) -> Layout:
        """The lists, the schedule, two partial results per split, then the rows that records are converted to."""
        problem = config.problem
        partial_rows = 2 * config.num_splits * problem.h_q if config.num_splits > 1 else 0
        return Layout(
            {
                **row_lists.list_sizes(problem.s_q, problem.topk),
                "schedule": schedule.nbytes(config.num_splits),
                "partial_lse": 4 * partial_rows,
                "partial_max": 4 * partial_rows,
                "partial_out": 4 * D_V * partial_rows,
                **({convert.ROWS: convert.nbytes(problem)} if config.converted else {}),
            }
        )

    def steps(self, config: SparseForwardConfig, call: Call) -> list[Step]:
        """Nothing without a query."""
        problem, options = config.problem, call.options
        if problem.s_q == 0:
            return []
        record = self._record(config, call)
        list_stride = row_lists.rows_stride(problem.topk)
        merge_cost = schedule.merge_cost(min(problem.h_q, config.kernel.block_rows))
        steps: list[Step] = [
            *(convert.launches(problem, config.converted, call) if config.converted else ()),
            row_lists.launch(call, options.causal, ordered=config.ordered, s_kv=problem.s_kv),
            schedule.launch("counts", 1, list_stride, problem.s_q, config.num_splits, merge_cost),
            Launch(config.kernel, config.kernel.variant(problem), (config.row_blocks, config.num_splits, 1), record),
        ]
        if config.combine_blocks:
            blocks = combine.needed_blocks(config.combine_blocks, problem.s_q, problem.h_q, config.num_splits)
            steps.append(combine.launch(problem.dtype, blocks, record))
        return steps

    def _record(self, config: SparseForwardConfig, call: Call) -> LaunchArgs:
        problem, options = config.problem, cast(SparseForwardOptions, call.options)
        q, out, lse, maxima = (call.strides(name, 2) for name in ("q", "out", "lse", "max_logits"))
        kv, list_stride = call.view("kv"), row_lists.rows_stride(problem.topk)
        cache, pages = (kv.strides[0], 0, 0), kv.shape[:2]
        if problem.record:
            cache = (*page_and_token_bytes(FORMATS[problem.record], kv), 0)
        elif config.converted:
            cache, pages = (problem.d_qk, 0, 0), (problem.s_kv, 1)
        addresses = (
            *("q", convert.ROWS if config.converted else "kv", "rows", "counts", "schedule", "out", "lse"),
            *(call.name("attn_sink"), "max_logits", "partial_out", "partial_lse", "partial_max", NULL, NULL),
        )
        values = (
            *(q[0], 0, q[1]),
            *cache,
            *(list_stride, 1, 1),  # of the lists, and of their lengths
            *(out[0], 0, out[1]),
            *(lse[0], lse[1], 0),
            *(maxima[0], maxima[1], 0),
            *(*call.strides("attn_sink", 1), 0, 0),
            *(problem.s_q, 1, problem.h_q, 1),
            *(*pages, list_stride, config.num_splits),
            False,  # causal: the lists are
            call.view("out").dtype == "float32",
            *(config.num_splits, 0, 0),  # continued_index; a schedule in memory
            *(1, 0),  # every row of kv is here
            *(options.scale * LOG2_E, from_log2(options.lse_base), options.empty_lse, 1.0),
        )
        return LaunchArgs(config.kernel, addresses, values)


SPARSE_FORWARD = SparseForwardPipeline()
