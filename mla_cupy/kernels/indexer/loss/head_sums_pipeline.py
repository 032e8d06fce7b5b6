"""Head sums, which the indexer's losses normalise to their target, of one rank: the first half of a loss.

The losses' kernels compute the targets of a chunk of tokens, without scores; these are then copied to the caller's
array, with zeros for keys that a token does not see.
"""

from __future__ import annotations

from mla_cupy.kernels import choice
from mla_cupy.kernels.attention import row_lists
from mla_cupy.kernels.indexer.loss import generic, sm90
from mla_cupy.kernels.indexer.loss.arguments import Parts
from mla_cupy.kernels.indexer.loss.pipeline import (
    FLOAT,
    RANGE_BYTES,
    LossConfig,
    attention_kernel,
    chunk_tokens,
    loss_args,
    loss_launch,
)
from mla_cupy.kernels.indexer.loss.problem import TILE_TOKENS, LossProblem
from mla_cupy.kernels.pipeline import Call, Layout, Pipeline, Step
from mla_cupy.runtime.device import DeviceInfo


class HeadSumsConfig(LossConfig):
    """Configuration of the head sums: a loss without scores."""

    @property
    def parts(self) -> Parts:
        """See `LossConfig.parts`."""
        return {} if self.problem.topk is None else {"rows": "rows", "counts": "counts"}


class HeadSumsPipeline(Pipeline[HeadSumsConfig]):
    """The kernels of the losses that make targets."""

    kernels = (sm90.SCORES, sm90.LIST_SCORES, generic.SCORES)

    def configure(self, problem: LossProblem, device: DeviceInfo, kernel: str | None = None) -> HeadSumsConfig:
        """See `Pipeline.configure`."""
        chosen = choice.choose("the sums over heads", self.kernels, problem, device, kernel)
        chunk = chunk_tokens(problem, FLOAT, TILE_TOKENS if chosen is sm90.SCORES else 1)
        on_hopper = chosen is not generic.SCORES
        return HeadSumsConfig(problem, chosen, chunk, attention_kernel(problem, device, on_hopper))

    def workspace(self, config: HeadSumsConfig) -> Layout:
        """The lists if there are any, the tokens' keys, the log-sum-exps unless they are passed, rows of a chunk."""
        problem = config.problem
        lists = {} if problem.topk is None else row_lists.list_sizes(problem.s_q, problem.keys)
        return Layout(
            {
                **lists,
                "ranges": RANGE_BYTES * problem.s_q,
                "own_lse": FLOAT * problem.s_q * problem.heads if problem.needs_lse else 0,
                "target_rows": FLOAT * config.chunk * problem.row_stride,
            }
        )

    def steps(self, config: HeadSumsConfig, call: Call) -> list[Step]:
        """Nothing is launched for no token or no key."""
        problem = config.problem
        if 0 in (problem.s_q, problem.keys):
            return []
        steps: list[Step] = []
        if problem.topk is not None:
            steps.append(row_lists.launch(call, call.options.causal, call.options.relative, ordered=False, keys="k"))
        whole = loss_args(config, call, 0, problem.s_q)
        steps += loss_launch(generic.RANGES, problem, problem.s_q, whole, call)
        if config.attention is not None:
            steps += loss_launch(config.attention, problem, problem.s_q, whole, call)
        for first in range(0, problem.s_q, config.chunk):
            tokens = min(config.chunk, problem.s_q - first)
            args = loss_args(config, call, first, tokens)
            for kernel in (config.kernel, generic.HEAD_SUMS):
                steps += loss_launch(kernel, problem, tokens, args, call)
        return steps


HEAD_SUMS = HeadSumsPipeline()
