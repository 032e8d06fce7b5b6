"""The selection in one launch."""

from __future__ import annotations

from dataclasses import dataclass

from mla_cupy.kernels import choice
from mla_cupy.kernels.indexer.logits.sm90_paged import cache_maps, q_map
from mla_cupy.kernels.indexer.select import sm90_paged
from mla_cupy.kernels.indexer.select.problem import SelectProblem
from mla_cupy.kernels.params import SelectParams
from mla_cupy.kernels.pipeline import Call, Launch, LaunchArgs, Layout, Pipeline, Step
from mla_cupy.kernels.spec import KernelSpec, Variant
from mla_cupy.runtime.device import DeviceInfo


@dataclass(frozen=True)
class SelectConfig:
    """The kernel and its problem."""

    kernel: KernelSpec[SelectProblem]
    problem: SelectProblem


class SelectPipeline(Pipeline[SelectConfig]):
    """Logits and top-k of the next tokens of sequences."""

    kernels = (sm90_paged.KERNEL,)

    def configure(self, problem: SelectProblem, device: DeviceInfo, kernel: str | None = None) -> SelectConfig:
        """See `Pipeline.configure`."""
        return SelectConfig(choice.choose("indexer_select_paged", self.kernels, problem, device, kernel), problem)

    def prefers(self, problem: SelectProblem, device: DeviceInfo) -> bool:
        """True where one launch is faster than the logits and a top-k."""
        return any(one.objection(problem, device) is None and one.preferred(problem, device) for one in self.kernels)

    def workspace(self, config: SelectConfig) -> Layout:
        """See `Pipeline.workspace`: a call needs none."""
        return Layout({})

    def steps(self, config: SelectConfig, call: Call) -> list[Step]:
        """One launch."""
        codes, scales = cache_maps(call.view("cache"))
        maps = ("q", q_map(call.view("q"), sm90_paged.BLOCK_HEADS)), ("cache", codes), ("cache", scales)
        grid = (sm90_paged.BLOCKS * config.problem.logits.num_tokens, 1, 1)
        return [Launch(config.kernel, Variant(), grid, LaunchArgs(_params(config, call), maps))]


def _params(config: SelectConfig, call: Call) -> SelectParams:
    problem, options = config.problem.logits, call.options
    of_last = call.view("seqlens").shape[1] == 1
    return SelectParams(
        weights="weights",
        ends="seqlens",
        block_table="block_table",
        cache="cache",
        indices="indices",
        counts="counts",
        weights_stride_block_token_head_elems=call.strides("weights", 3),
        ends_stride_block_token_elems=(call.stride("seqlens"), 0 if of_last else call.stride("seqlens", 1)),
        table_stride_block_page_elems=call.strides("block_table", 2),
        page_stride_bytes=call.stride("cache"),
        indices_stride_q_elems=call.stride("indices"),
        counts_stride_elems=call.stride("counts"),
        block_tokens=problem.block_tokens,
        num_keys=problem.num_keys,
        end_of_last=of_last,
        heads=problem.heads,
        num_pages=problem.num_pages,
        k=options.topk,
        in_cache=options.slots,
        keep_first=options.keep_first,
        keep_last=options.keep_last,
    )


SELECT = SelectPipeline()
