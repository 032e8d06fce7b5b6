"""The top-k: one launch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from mla_cupy.kernels import choice
from mla_cupy.kernels.indexer.topk import select, select_cluster
from mla_cupy.kernels.indexer.topk.problem import TopkOptions, TopkProblem
from mla_cupy.kernels.indexer.topk.select import TopkVariant
from mla_cupy.kernels.pipeline import NULL, Call, Launch, LaunchArgs, Layout, Pipeline, Step
from mla_cupy.kernels.spec import KernelSpec
from mla_cupy.runtime.device import DeviceInfo


@dataclass(frozen=True)
class TopkConfig:
    """The kernel and its build."""

    kernel: KernelSpec[Any]
    variant: TopkVariant


class TopkPipeline(Pipeline[TopkConfig]):
    """The kernels of `indexer_topk`."""

    kernels = (select_cluster.KERNEL, select.KERNEL)

    def configure(self, problem: TopkProblem, device: DeviceInfo, kernel: str | None = None) -> TopkConfig:
        """See `Pipeline.configure`."""
        chosen = choice.choose("indexer_topk", self.kernels, problem, device, kernel)
        return TopkConfig(chosen, select.variant(chosen, problem))

    def workspace(self, config: TopkConfig) -> Layout:
        """None is needed."""
        return Layout({})

    def steps(self, config: TopkConfig, call: Call) -> list[Step]:
        """One launch, unless there is no row."""
        logits, options = call.view("logits"), call.options
        s_q, s_kv = logits.shape
        if s_q == 0:
            return []
        record = _record(config, call, options, s_q, s_kv)
        return [Launch(config.kernel, config.variant, (s_q * config.variant.cluster_blocks, 1, 1), record)]


def _record(config: TopkConfig, call: Call, options: TopkOptions, s_q: int, s_kv: int) -> LaunchArgs:
    table, ke = call.views["block_table"], call.views["ke"]
    names = ("logits", "ks", "ke", "block_table", "indices", "counts", "values")
    tables, max_pages = (1, 0) if table is None else table.shape
    values = (
        *call.strides("logits", 1),
        *call.strides("ks", 1),
        *call.strides("ke", 1),
        *call.strides("block_table", 2),
        *call.strides("indices", 1),
        *call.strides("counts", 1),
        *call.strides("values", 1),
        *(s_q, s_kv, options.k),
        *(s_q // tables, max_pages, options.page_size, 1 if ke is None else s_q // ke.shape[0]),
        *(options.keep_first, options.keep_last),
        *(options.order == "value", options.relative, call.view("logits").dtype == "bfloat16"),
    )
    addresses = tuple(call.name(name) for name in names)
    assert NULL not in (addresses[0], addresses[4])
    return LaunchArgs(config.kernel, addresses, values)


TOPK = TopkPipeline()
