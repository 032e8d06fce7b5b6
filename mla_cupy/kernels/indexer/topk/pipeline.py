"""The top-k: one launch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from mla_cupy.kernels import choice
from mla_cupy.kernels.indexer.topk import select
from mla_cupy.kernels.indexer.topk.problem import TopkOptions, TopkProblem
from mla_cupy.kernels.params import TopkParams
from mla_cupy.kernels.pipeline import Call, Launch, LaunchArgs, Layout, Pipeline, Step
from mla_cupy.kernels.spec import KernelSpec, Variant
from mla_cupy.runtime.device import DeviceInfo


@dataclass(frozen=True)
class TopkConfig:
    """The kernel and its build."""

    kernel: KernelSpec[Any]
    variant: Variant


class TopkPipeline(Pipeline[TopkConfig]):
    """The kernels of `indexer_topk`."""

    kernels = (select.KERNEL,)

    def configure(self, problem: TopkProblem, device: DeviceInfo, kernel: str | None = None) -> TopkConfig:
        """See `Pipeline.configure`."""
        chosen = choice.choose("indexer_topk", self.kernels, problem, device, kernel)
        return TopkConfig(chosen, select.variant(problem, device))

    def workspace(self, config: TopkConfig) -> Layout:
        """See `Pipeline.workspace`: a call needs none."""
        return Layout({})

    def steps(self, config: TopkConfig, call: Call) -> list[Step]:
        """One launch, unless there is no row."""
        logits, options = call.view("logits"), call.options
        s_q, s_kv = logits.shape
        if s_q == 0:
            return []
        args = LaunchArgs(_params(call, options, s_q, s_kv))
        return [Launch(config.kernel, config.variant, (s_q * config.variant.cluster_blocks, 1, 1), args)]


def _params(call: Call, options: TopkOptions, s_q: int, s_kv: int) -> TopkParams:
    table, ke = call.views["block_table"], call.views["ke"]
    tables, max_pages = (1, 0) if table is None else table.shape
    return TopkParams(
        logits="logits",
        ks=call.name("ks"),
        ke=call.name("ke"),
        block_table=call.name("block_table"),
        indices="indices",
        counts=call.name("counts"),
        values=call.name("values"),
        logits_stride_q_elems=call.stride("logits"),
        ks_stride_elems=call.stride("ks"),
        ke_stride_elems=call.stride("ke"),
        table_stride_b_page_elems=call.strides("block_table", 2),
        indices_stride_q_elems=call.stride("indices"),
        counts_stride_elems=call.stride("counts"),
        values_stride_q_elems=call.stride("values"),
        s_q=s_q,
        s_kv=s_kv,
        k=options.k,
        rows_per_table=s_q // tables,
        max_pages=max_pages,
        page_size=options.page_size,
        rows_per_ke=1 if ke is None else s_q // ke.shape[0],
        keep_first=options.keep_first,
        keep_last=options.keep_last,
        by_value=options.order == "value",
        relative=options.relative,
        logits_are_bf16=call.view("logits").dtype == "bfloat16",
    )


TOPK = TopkPipeline()
