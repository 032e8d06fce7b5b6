"""The logits: a schedule if the kernel needs one, then the kernel."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import ClassVar, cast

from mla_cupy.arrays.view import View
from mla_cupy.dtypes import TABLE
from mla_cupy.kernels import choice
from mla_cupy.kernels.indexer.logits import generic, mma, schedule, sm90, sm90_paged, sm100
from mla_cupy.kernels.indexer.logits.problem import BLOCK_TOKENS, LogitsKernel, LogitsOptions, LogitsProblem
from mla_cupy.kernels.param_layout import NULL
from mla_cupy.kernels.params import LogitsParams, LogitsScheduleParams
from mla_cupy.kernels.pipeline import Call, Launch, LaunchArgs, Layout, Pipeline, Step
from mla_cupy.kernels.spec import Variant
from mla_cupy.runtime.device import DeviceInfo

_STORED_AT_ONCE = 4
"""Logits."""


@dataclass(frozen=True)
class LogitsConfig:
    """Everything about a call that does not depend on pointers or strides.

    `num_splits` is the number of equal shares of a schedule, 0 without one: the kernel needs none, for so few blocks.
    """

    problem: LogitsProblem
    kernel: LogitsKernel
    grid: tuple[int, int, int]
    num_splits: int


def scheduled(kernel: LogitsKernel, problem: LogitsProblem) -> bool:
    """True if the kernel needs a schedule."""
    return bool(kernel.tile_keys(problem)) and problem.num_blocks > kernel.short_line


class LogitsPipeline(Pipeline[LogitsConfig]):
    """Pipeline that both forms of the logits share."""

    kernels: ClassVar[tuple[LogitsKernel, ...]]

    def configure(self, problem: LogitsProblem, device: DeviceInfo, kernel: str | None = None) -> LogitsConfig:
        """See `Pipeline.configure`."""
        chosen = choice.choose("the indexer logits", self.kernels, problem, device, kernel)
        x, y, z = chosen.grid(problem, device)
        if not chosen.tile_keys(problem):
            return LogitsConfig(problem, chosen, (x, y, z), 0)
        splits = min(x, schedule.MAX_SHARES)
        return LogitsConfig(problem, chosen, (splits, y, z), splits if scheduled(chosen, problem) else 0)

    def workspace(self, config: LogitsConfig) -> Layout:
        """The cuts of the schedule."""
        return Layout({"cuts": schedule.nbytes(config.num_splits) if config.num_splits else 0})

    def steps(self, config: LogitsConfig, call: Call) -> list[Step]:
        """No launch if there is no logit."""
        problem, kernel = config.problem, config.kernel
        if problem.num_tokens == 0 or problem.num_keys == 0:
            return []
        params = self._params(config, call)
        launch = Launch(kernel, kernel.variant(problem), config.grid, LaunchArgs(params, kernel.maps(call)))
        return [_schedule(config, params), launch] if config.num_splits else [launch]

    @abstractmethod
    def _params(self, config: LogitsConfig, call: Call) -> LogitsParams:
        """The parameters of the kernel."""


def _schedule(config: LogitsConfig, params: LogitsParams) -> Launch:
    """Cut the tiles of the tokens of `params`."""
    args = LaunchArgs(
        LogitsScheduleParams(
            begins=params.begins,
            ends=params.ends,
            cuts=params.cuts,
            begins_stride_elems=params.begins_stride_elems,
            ends_stride_block_token_elems=params.ends_stride_block_token_elems,
            num_tokens=params.num_tokens,
            num_blocks=params.num_blocks,
            block_tokens=params.block_tokens,
            num_keys=params.num_keys,
            end_of_last=params.end_of_last,
            num_splits=config.num_splits,
        )
    )
    return Launch(schedule.KERNEL, Variant(tile_keys=config.kernel.tile_keys(config.problem)), (1, 1, 1), args)


class PrefillPipeline(LogitsPipeline):
    """Queries of any tokens, contiguous keys."""

    kernels = (sm100.KERNEL, sm90.KERNEL, mma.KERNEL, generic.KERNEL)

    def _params(self, config: LogitsConfig, call: Call) -> LogitsParams:
        problem, options = config.problem, cast(LogitsOptions, call.options)
        q, weights = call.strides("q", 2), call.strides("weights", 2)
        ends, logits = call.stride("ke"), call.stride("logits")
        return LogitsParams(
            q="q",
            k="k",
            weights="weights",
            k_scale=call.name("k_scale"),
            begins=call.name("ks"),
            ends=call.name("ke"),
            cuts="cuts" if config.num_splits else NULL,
            logits="logits",
            q_stride_block_token_head_elems=(BLOCK_TOKENS * q[0], *q),
            k_stride_elems=call.stride("k"),
            weights_stride_block_token_head_elems=(BLOCK_TOKENS * weights[0], *weights),
            k_scale_stride_elems=call.stride("k_scale"),
            begins_stride_elems=call.stride("ks"),
            ends_stride_block_token_elems=(BLOCK_TOKENS * ends, ends),
            logits_stride_block_token_elems=(BLOCK_TOKENS * logits, logits),
            num_tokens=problem.num_tokens,
            block_tokens=problem.block_tokens,
            num_keys=problem.num_keys,
            heads=problem.heads,
            head_dim=problem.head_dim,
            clean=options.clean,
            bf16_out=call.view("logits").dtype == "bfloat16",
            wide_rows=_is_wide(call.view("logits")),
            num_blocks=problem.num_blocks,
        )


class PagedPipeline(LogitsPipeline):
    """The next tokens of sequences, keys in pages."""

    kernels = (sm100.KERNEL, sm90_paged.KERNEL, mma.KERNEL, generic.KERNEL)

    def _params(self, config: LogitsConfig, call: Call) -> LogitsParams:
        problem, options = config.problem, cast(LogitsOptions, call.options)
        of_last = call.view("seqlens").shape[1] == 1
        return LogitsParams(
            q="q",
            k="cache",
            weights="weights",
            ends="seqlens",
            block_table="block_table",
            cuts="cuts" if config.num_splits else NULL,
            logits="logits",
            q_stride_block_token_head_elems=call.strides("q", 3),
            k_stride_elems=problem.head_dim // 2 if problem.e2m1 else problem.head_dim,
            weights_stride_block_token_head_elems=call.strides("weights", 3),
            ends_stride_block_token_elems=(call.stride("seqlens"), 0 if of_last else call.stride("seqlens", 1)),
            table_stride_block_page_elems=call.strides("block_table", 2),
            page_stride_bytes=call.stride("cache"),
            logits_stride_block_token_elems=call.strides("logits", 2),
            num_tokens=problem.num_tokens,
            block_tokens=problem.block_tokens,
            num_keys=problem.num_keys,
            end_of_last=of_last,
            heads=problem.heads,
            head_dim=problem.head_dim,
            page_size=problem.page_size,
            num_pages=call.view("cache").shape[0],
            clean=options.clean,
            bf16_out=call.view("logits").dtype == "bfloat16",
            wide_rows=_is_wide(call.view("logits")),
            num_blocks=problem.num_blocks,
        )


def _is_wide(logits: View) -> bool:
    """True if every row starts at a multiple of four logits."""
    at_once = _STORED_AT_ONCE * TABLE[logits.dtype].nbytes
    strides = [stride for stride, size in zip(logits.strides[:-1], logits.shape, strict=False) if size > 1]
    return logits.ptr % at_once == 0 and not any(stride % _STORED_AT_ONCE for stride in strides)


LOGITS = PrefillPipeline()
LOGITS_PAGED = PagedPipeline()
