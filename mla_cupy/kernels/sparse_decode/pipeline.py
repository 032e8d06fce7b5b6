"""Sparse decode: attention over the splits of the lists, then a merge of the queries that were split.

To the schedule a query is a request whose tokens are the entries of its lists: see `attention/record_tokens.cuh`.
"""

from __future__ import annotations

from dataclasses import dataclass

from mla_cupy.arrays.view import View
from mla_cupy.cache_formats import FORMATS
from mla_cupy.kernels import choice
from mla_cupy.kernels.attention import combine, record_layout
from mla_cupy.kernels.attention import schedule as attention_schedule
from mla_cupy.kernels.attention.kernel import MAX_SPLITS, AttentionKernel
from mla_cupy.kernels.numbers import LOG2_E, from_log2
from mla_cupy.kernels.pipeline import NULL, Call, Launch, LaunchArgs, Layout, Pipeline, Step
from mla_cupy.kernels.sparse_decode import generic, schedule, sm90, sm90_small
from mla_cupy.kernels.sparse_decode.problem import SparseDecodeOptions, SparseDecodeProblem
from mla_cupy.kernels.sparse_decode.schedule import Cuts
from mla_cupy.kernels.spec import Variant
from mla_cupy.runtime.device import DeviceInfo
from mla_cupy.shapes import D_V


@dataclass(frozen=True)
class SparseDecodeConfig:
    """Everything about a call that does not depend on pointers or strides.

    `combine_blocks` is 0 where no query can be split. Of lists with lengths in memory, `cuts` say the splits alone.
    """

    problem: SparseDecodeProblem
    kernel: AttentionKernel[SparseDecodeProblem]
    variant: Variant
    block_rows: int
    cuts: Cuts
    combine_blocks: int

    @property
    def row_blocks(self) -> int:
        """Blocks side by side, for all heads."""
        return -(-self.problem.h_q // self.block_rows)


class SparseDecodePipeline(Pipeline[SparseDecodeConfig]):
    """The kernels of sparse decode."""

    kernels = (sm90.KERNEL, sm90_small.KERNEL, generic.KERNEL)

    def configure(
        self, problem: SparseDecodeProblem, device: DeviceInfo, kernel: str | None = None
    ) -> SparseDecodeConfig:
        """See `Pipeline.configure`."""
        chosen = choice.choose("sparse decode", self.kernels, problem, device, kernel)
        block_rows, variant = chosen.block_rows, chosen.variant(problem)
        if chosen is sm90_small.KERNEL:
            block_rows = sm90_small.block_rows(problem, device)
            variant = sm90_small.variant(problem, block_rows)
        resident = chosen.blocks_per_sm * device.sm_count
        most = min(MAX_SPLITS, max(1, resident // -(-problem.h_q // block_rows)))
        if problem.ragged:
            cuts, split = Cuts(most, 0, 0), most > 1
        else:
            cuts = schedule.even_cuts(problem, block_rows, most)
            split = cuts.request_units > 1 and cuts.num_splits > 1
        blocks = combine.blocks(cuts.num_splits, device) if split else 0
        return SparseDecodeConfig(problem, chosen, variant, block_rows, cuts, blocks)

    def workspace(self, config: SparseDecodeConfig) -> Layout:
        """The schedule, if it is in memory, then two partial results per split."""
        problem, splits = config.problem, config.cuts.num_splits
        partial_rows = 2 * splits * problem.h_q if config.combine_blocks else 0
        return Layout(
            {
                "schedule": attention_schedule.nbytes(splits) if problem.ragged else 0,
                "partial_lse": 4 * partial_rows,
                "partial_out": 4 * D_V * partial_rows,
            }
        )

    def steps(self, config: SparseDecodeConfig, call: Call) -> list[Step]:
        """Nothing without a query."""
        problem, splits = config.problem, config.cuts.num_splits
        if problem.queries == 0:
            return []
        common = self._record(config, call)
        steps: list[Step] = []
        if problem.ragged:
            merge_cost = attention_schedule.merge_cost(min(problem.h_q, config.block_rows))
            steps.append(schedule.launch(call, problem, splits, merge_cost))
        steps.append(
            Launch(config.kernel, config.variant, (config.row_blocks, splits, 1), _selection(problem, common, call))
        )
        if config.combine_blocks:
            blocks = combine.needed_blocks(config.combine_blocks, problem.queries, problem.h_q, splits)
            steps.append(combine.launch(problem.dtype, blocks, common))
        return steps

    def _record(self, config: SparseDecodeConfig, call: Call) -> LaunchArgs:
        problem, options = config.problem, call.options
        assert isinstance(options, SparseDecodeOptions)
        of_query = 1 if call.view("q").shape[1] > 1 else 0  # the axes b and s_q step evenly: they are one
        q, out, lse = (call.strides(name, 3) for name in ("q", "out", "lse"))
        indices, cache = call.view("indices"), call.view("kv_cache")
        addresses = (
            *("q", "kv_cache", "indices", call.name("topk_length"), "schedule" if problem.ragged else NULL),
            *("out", "lse", call.name("attn_sink"), NULL, "partial_out", "partial_lse", NULL, NULL, NULL),
        )
        values = (
            *(q[of_query], 0, q[2]),
            *(*_strides(problem.record, cache), 0),
            *(indices.strides[0], indices.strides[2], *call.strides("topk_length", 1)),
            *(out[of_query], 0, out[2]),
            *(lse[of_query], lse[2], 0),
            *(0, 0, 0),
            *(*call.strides("attn_sink", 1), 0, 0),
            *(problem.queries, 1, problem.h_q, 1),
            *(*cache.shape[:2], indices.shape[2], config.cuts.num_splits),
            *(False, call.view("out").dtype == "float32"),  # not causal
            *(config.cuts.num_splits, config.cuts.request_units, config.cuts.unit_tiles),  # continued_index first
            *(1, 0),  # one rank
            *(options.scale * LOG2_E, from_log2(options.lse_base), options.empty_lse, 1.0),
        )
        return LaunchArgs(combine.KERNEL, addresses, values)


def _selection(problem: SparseDecodeProblem, common: LaunchArgs, call: Call) -> LaunchArgs:
    """What the attention kernels take: the second cache and its lists, too."""
    indices, cache, extra = call.view("indices"), call.views["extra_kv_cache"], call.views["extra_indices"]
    names = ("extra_kv_cache", "extra_indices", "extra_topk_length")
    strides, shape = ((0, 0), (0, 1)) if cache is None else (_strides(problem.record, cache), cache.shape[:2])
    values = (
        indices.strides[1],
        *(*strides, *call.strides("extra_indices", 3), *call.strides("extra_topk_length", 1)),
        *(indices.shape[1], *shape, 0 if extra is None else extra.shape[2]),
    )
    addresses = (*(call.name(name) for name in names), *common.addresses)
    return LaunchArgs(sm90.KERNEL, addresses, (*common.values, *values))


def _strides(record: str, cache: View) -> tuple[int, int]:
    """From page to page and from token to token, in bytes."""
    return record_layout.page_and_token_bytes(FORMATS[record], cache)


SPARSE_DECODE = SparseDecodePipeline()
