"""The logits: a schedule where the kernel wants one, then the kernel."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, cast

from mla_cupy.arrays.view import View
from mla_cupy.dtypes import TABLE
from mla_cupy.kernels import choice
from mla_cupy.kernels.indexer.logits import generic, schedule, sm90, sm90_half, sm90_paged
from mla_cupy.kernels.indexer.logits.problem import BLOCK_TOKENS, PARAMS, LogitsKernel, LogitsOptions, LogitsProblem
from mla_cupy.kernels.indexer.logits.schedule import ScheduleVariant
from mla_cupy.kernels.pipeline import Call, Launch, LaunchArgs, Layout, Pipeline, Step
from mla_cupy.runtime.device import DeviceInfo

_STORED_AT_ONCE = 4
"""Logits."""
_NUMBERS = tuple(PARAMS.dtype.names or ())[PARAMS.num_addresses :]


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
    """Whether the kernel wants a schedule."""
    return bool(kernel.tile_keys) and problem.num_blocks > kernel.short_line


class LogitsPipeline(Pipeline[LogitsConfig]):
    """What both forms of the logits have in common."""

    kernels: ClassVar[tuple[LogitsKernel, ...]]

    def configure(self, problem: LogitsProblem, device: DeviceInfo, kernel: str | None = None) -> LogitsConfig:
        """See `Pipeline.configure`."""
        chosen = choice.choose("the indexer logits", self.kernels, problem, device, kernel)
        x, y, z = chosen.grid(problem, device)
        if not chosen.tile_keys:
            return LogitsConfig(problem, chosen, (x, y, z), 0)
        splits = min(x, schedule.MAX_SPLITS)
        return LogitsConfig(problem, chosen, (splits, y, z), splits if scheduled(chosen, problem) else 0)

    def workspace(self, config: LogitsConfig) -> Layout:
        """The cuts of the schedule."""
        return Layout({"cuts": schedule.nbytes(config.num_splits) if config.num_splits else 0})

    def steps(self, config: LogitsConfig, call: Call) -> list[Step]:
        """Nothing without a logit."""
        problem, kernel = config.problem, config.kernel
        if problem.num_tokens == 0 or problem.num_keys == 0:
            return []
        numbers = self._numbers(config, call)
        launch = Launch(kernel, kernel.variant(problem), config.grid, self._record(config, call, numbers))
        return [self._schedule(config, call, numbers), launch] if config.num_splits else [launch]

    @abstractmethod
    def _addresses(self, call: Call) -> dict[str, str]:
        """Member of the record -> name of an array, where they differ and both forms do not agree."""

    @abstractmethod
    def _strides(self, call: Call) -> dict[str, int]:
        """The members that differ between the forms."""

    def _numbers(self, config: LogitsConfig, call: Call) -> dict[str, int]:
        problem, options = config.problem, cast(LogitsOptions, call.options)
        logits = call.view("logits")
        return {
            **dict.fromkeys(_NUMBERS, 0),
            **self._strides(call),
            "num_tokens": problem.num_tokens,
            "block_tokens": problem.block_tokens,
            "num_keys": problem.num_keys,
            "heads": problem.heads,
            "head_dim": problem.head_dim,
            "page_size": problem.page_size,
            "clean": options.clean,
            "bf16_out": logits.dtype == "bfloat16",
            "wide_rows": _is_wide(logits),
            "num_blocks": problem.num_blocks,
        }

    def _record(self, config: LogitsConfig, call: Call, numbers: Mapping[str, int]) -> LaunchArgs:
        cuts = "cuts" if config.num_splits else ""
        names = {"q": "q", "weights": "weights", "logits": "logits", "cuts": cuts, **self._addresses(call)}
        members = (PARAMS.dtype.names or ())[: PARAMS.num_addresses]
        addresses = tuple(names.get(member, "") for member in members)
        return LaunchArgs(config.kernel, addresses, tuple(numbers.values()), config.kernel.maps(call))

    def _schedule(self, config: LogitsConfig, call: Call, numbers: Mapping[str, int]) -> Launch:
        names = self._addresses(call)
        members = (schedule.PARAMS.dtype.names or ())[schedule.PARAMS.num_addresses : -1]
        record = LaunchArgs(
            schedule.KERNEL,
            (names.get("begins", ""), names.get("ends", ""), "cuts"),
            (*(numbers[member] for member in members), config.num_splits),
        )
        return Launch(schedule.KERNEL, ScheduleVariant(config.kernel.tile_keys), (1, 1, 1), record)


class PrefillPipeline(LogitsPipeline):
    """Queries of any tokens, contiguous keys."""

    kernels = (sm90_half.KERNEL, sm90.KERNEL, generic.KERNEL)

    def _addresses(self, call: Call) -> dict[str, str]:
        given = {"k_scale": "k_scale", "begins": "ks", "ends": "ke"}
        return {"k": "k", **{member: call.name(name) for member, name in given.items()}}

    def _strides(self, call: Call) -> dict[str, int]:
        q, weights = call.strides("q", 2), call.strides("weights", 2)
        (begins,), (ends,), (logits,) = (call.strides(name, 1) for name in ("ks", "ke", "logits"))
        return {
            "q_stride_block_elems": BLOCK_TOKENS * q[0],
            "q_stride_token_elems": q[0],
            "q_stride_head_elems": q[1],
            "k_stride_elems": call.strides("k", 1)[0],
            "weights_stride_block_elems": BLOCK_TOKENS * weights[0],
            "weights_stride_token_elems": weights[0],
            "weights_stride_head_elems": weights[1],
            "k_scale_stride_elems": call.strides("k_scale", 1)[0],
            "begins_stride_elems": begins,
            "ends_stride_block_elems": BLOCK_TOKENS * ends,
            "ends_stride_token_elems": ends,
            "logits_stride_block_elems": BLOCK_TOKENS * logits,
            "logits_stride_token_elems": logits,
        }


class PagedPipeline(LogitsPipeline):
    """The next tokens of sequences, keys in pages."""

    kernels = (sm90_paged.KERNEL, generic.KERNEL)

    def _addresses(self, call: Call) -> dict[str, str]:
        return {"k": "cache", "ends": "seqlens", "block_table": "block_table"}

    def _strides(self, call: Call) -> dict[str, int]:
        q, weights, logits = call.strides("q", 3), call.strides("weights", 3), call.strides("logits", 2)
        lengths, table = call.view("seqlens"), call.strides("block_table", 2)
        of_last = lengths.shape[1] == 1
        cache = call.view("cache")
        return {
            "q_stride_block_elems": q[0],
            "q_stride_token_elems": q[1],
            "q_stride_head_elems": q[2],
            "weights_stride_block_elems": weights[0],
            "weights_stride_token_elems": weights[1],
            "weights_stride_head_elems": weights[2],
            "ends_stride_block_elems": lengths.strides[0],
            "ends_stride_token_elems": 0 if of_last else lengths.strides[1],
            "table_stride_block_elems": table[0],
            "table_stride_page_elems": table[1],
            "page_stride_bytes": cache.strides[0],
            "logits_stride_block_elems": logits[0],
            "logits_stride_token_elems": logits[1],
            "end_of_last": of_last,
            "num_pages": cache.shape[0],
        }


def _is_wide(logits: View) -> bool:
    """Whether every row starts at a multiple of four logits."""
    at_once = _STORED_AT_ONCE * TABLE[logits.dtype].nbytes
    strides = [stride for stride, size in zip(logits.strides[:-1], logits.shape, strict=False) if size > 1]
    return logits.ptr % at_once == 0 and not any(stride % _STORED_AT_ONCE for stride in strides)


LOGITS = PrefillPipeline()
LOGITS_PAGED = PagedPipeline()
