"""Sparse decode: lists of tokens and their schedule, attention over the splits, merge of the queries that were split.

To the schedule a query is a request whose tokens are its list: see `attention/decode_params.cuh`.
"""

from __future__ import annotations

from dataclasses import dataclass

from mla_cupy.kernels import choice
from mla_cupy.kernels.decode import combine, schedule
from mla_cupy.kernels.decode.problem import AttentionKernel
from mla_cupy.kernels.numbers import LOG2_E, from_log2
from mla_cupy.kernels.pipeline import NULL, Call, Launch, Layout, Pipeline, Record, Step
from mla_cupy.kernels.sparse_decode import generic, lists, sm90, sm90_small
from mla_cupy.kernels.sparse_decode.problem import SparseDecodeOptions, SparseDecodeProblem
from mla_cupy.runtime.device import DeviceInfo
from mla_cupy.shapes import D_V


@dataclass(frozen=True)
class SparseDecodeConfig:
    """Everything about a call that does not depend on pointers or strides. `combine_blocks` is 0 without splits."""

    problem: SparseDecodeProblem
    kernel: AttentionKernel[SparseDecodeProblem]
    row_blocks: int
    num_splits: int
    combine_blocks: int


class SparseDecodePipeline(Pipeline[SparseDecodeConfig]):
    """The kernels of sparse decode."""

    kernels = (sm90.KERNEL, sm90_small.KERNEL, generic.KERNEL)

    def configure(
        self, problem: SparseDecodeProblem, device: DeviceInfo, kernel: str | None = None
    ) -> SparseDecodeConfig:
        """See `Pipeline.configure`."""
        chosen = choice.choose("sparse decode", self.kernels, problem, device, kernel)
        splits = chosen.splits(problem.h_q, device)
        blocks = combine.blocks(splits.num_splits, device)
        return SparseDecodeConfig(problem, chosen, splits.row_blocks, splits.num_splits, blocks)

    def workspace(self, config: SparseDecodeConfig) -> Layout:
        """The lists, the schedule, then two partial results per split."""
        problem = config.problem
        partial_rows = 2 * config.num_splits * problem.h_q if config.num_splits > 1 else 0
        return Layout(
            {
                "lists": lists.ENTRY_BYTES * problem.queries * lists.list_stride(problem.topk),
                "counts": 4 * problem.queries,
                "schedule": schedule.nbytes(config.num_splits),
                "partial_lse": 4 * partial_rows,
                "partial_out": 4 * D_V * partial_rows,
            }
        )

    def steps(self, config: SparseDecodeConfig, call: Call) -> list[Step]:
        """Nothing without a query."""
        problem = config.problem
        if problem.queries == 0:
            return []
        record = self._record(config, call)
        merge_cost = schedule.merge_cost(min(problem.h_q, config.kernel.block_rows))
        steps: list[Step] = [
            lists.launch(call, problem, config.num_splits, merge_cost),
            Launch(config.kernel, config.kernel.variant(problem), (config.row_blocks, config.num_splits, 1), record),
        ]
        if config.combine_blocks:
            blocks = combine.needed_blocks(config.combine_blocks, problem.queries, problem.h_q, config.num_splits)
            steps.append(combine.launch(problem.dtype, blocks, record))
        return steps

    def _record(self, config: SparseDecodeConfig, call: Call) -> Record:
        problem, options = config.problem, call.options
        assert isinstance(options, SparseDecodeOptions)
        stride = lists.list_stride(problem.topk)
        of_query = 1 if call.view("q").shape[1] > 1 else 0  # the axes b and s_q step evenly: they are one
        q, out, lse = (call.strides(name, 3) for name in ("q", "out", "lse"))
        addresses = (
            *("q", NULL, "lists", "counts", "schedule", "out", "lse"),
            *(call.name("attn_sink"), NULL, "partial_out", "partial_lse", NULL, NULL, NULL),
        )
        values = (
            *(q[of_query], 0, q[2]),
            *(0, 0, 0),
            *(stride, 1, 1),  # of the lists, in entries, and of their lengths
            *(out[of_query], 0, out[2]),
            *(lse[of_query], lse[2], 0),
            *(0, 0, 0),
            *(*call.strides("attn_sink", 1), 0, 0),
            *(problem.queries, 1, problem.h_q, 1),
            *(0, 1, stride, config.num_splits),
            *(False, call.view("out").dtype == "float32"),  # not causal
            *(config.num_splits, 1, 0),  # continued_index; one rank
            *(options.scale * LOG2_E, from_log2(options.lse_base), options.empty_lse, 1.0),
        )
        return Record(config.kernel, addresses, values)


SPARSE_DECODE = SparseDecodePipeline()
