"""The indexer's warm-up loss: the keys of each token, the attention's log-sum-exps, then chunk by chunk of tokens the
targets and scores, the divergence of each row, and the gradients.

The caller's limit bounds a chunk's data for all keys, so that the workspace grows with the keys, not with their square.
Gradients by keys are carried from chunk to chunk.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from mla_cupy.kernels import choice
from mla_cupy.kernels.indexer.loss import generic, heuristics, sm90
from mla_cupy.kernels.indexer.loss.arguments import Chunk, Parts, loss_params
from mla_cupy.kernels.indexer.loss.problem import TILE_KEYS, TILE_TOKENS, LossKernel, LossProblem
from mla_cupy.kernels.indexer.loss.sm90_maps import (
    DECODED_QUERIES,
    FINITE_KEYS,
    FINITE_VALUES,
    NONFINITE_TILES,
    finite_value_stride,
)
from mla_cupy.kernels.pipeline import Call, Launch, LaunchArgs, Layout, Pipeline, Step
from mla_cupy.runtime.device import DeviceInfo

FLOAT = 4
RANGE_BYTES = 8
_HALF = 2


@dataclass(frozen=True)
class LossConfig:
    """Everything about a call that does not depend on pointers or strides. A chunk is `chunk` tokens. `attention` makes
    the attention's output and log-sum-exps, or the latter alone, where the main kernel does not.
    """

    problem: LossProblem
    kernel: LossKernel
    chunk: int
    attention: LossKernel | None = None

    @property
    def num_chunks(self) -> int:
        """Number of chunks, 1 at least: without a token the gradient by keys becomes zeros all the same."""
        return max(1, -(-self.problem.s_q // self.chunk))

    @property
    def on_tensor_cores(self) -> bool:
        """True if the kernels for Hopper make the gradients, which they have in bfloat16."""
        return self.problem.gradients and self.kernel is not generic.SCORES

    @property
    def without_rows(self) -> bool:
        """True if nothing of a query and a key is stored: divergences per head, at once for all tokens."""
        return self.kernel is sm90.HEADS

    @property
    def copies_values(self) -> bool:
        """True if an attention on tensor cores has values."""
        return self.problem.value_dim > 0 and sm90.HEADS in (self.kernel, self.attention)

    @property
    def decodes_queries(self) -> bool:
        """True if the gradients on tensor cores need a copy of the index queries."""
        return self.on_tensor_cores and self.problem.codes

    @property
    def decoded_elements(self) -> int:
        """Elements of a chunk's copy of the index queries."""
        return self.chunk * self.problem.index_heads * self.problem.index_dim if self.decodes_queries else 0

    @property
    def key_splits(self) -> int:
        """Number of sums of each key's gradient."""
        return heuristics.key_splits(self.problem) if self.on_tensor_cores else 1

    @property
    def carries_sums(self) -> bool:
        """True if gradients by keys are carried from chunk to chunk, or from one kernel to the next."""
        return self.problem.gradients and (self.num_chunks > 1 or self.on_tensor_cores)

    @property
    def parts(self) -> Parts:
        """Parts of the workspace, by the parameter that points to them: those that not every loss has."""
        found: Parts = {"scores": "score_rows"}
        if self.on_tensor_cores:
            found |= {"gradient": "gradient_rows", "finite_keys": FINITE_KEYS}
        if self.decodes_queries:
            found["decoded_queries"] = DECODED_QUERIES
        if self.copies_values:
            found |= {"finite_values": FINITE_VALUES, "nonfinite_tiles": NONFINITE_TILES}
        if self.carries_sums:
            found["key_sums"] = "key_sums"
        return found


class LossPipeline(Pipeline[LossConfig]):
    """The kernels of the warm-up loss."""

    kernels = (sm90.SCORES, sm90.HEADS, generic.SCORES)

    def configure(self, problem: LossProblem, device: DeviceInfo, kernel: str | None = None) -> LossConfig:
        """See `Pipeline.configure`."""
        chosen = choice.choose("the indexer's loss", self.kernels, problem, device, kernel)
        if chosen is sm90.HEADS:
            return LossConfig(problem, chosen, problem.s_q)
        on_hopper = chosen is sm90.SCORES
        bytes_per_key = (1 if problem.given_sums else 2) * FLOAT + (_HALF if on_hopper else 0)
        chunk = chunk_tokens(problem, bytes_per_key, TILE_TOKENS if on_hopper else 1, on_hopper)
        return LossConfig(problem, chosen, chunk, attention_kernel(problem, device, on_hopper))

    def workspace(self, config: LossConfig) -> Layout:
        """The tokens' keys, the attention's log-sum-exps unless they are passed, the rows of a chunk, the sums."""
        problem = config.problem
        elements = 0 if config.without_rows else config.chunk * problem.rows_per_token * problem.row_stride
        keys = problem.s_kv * problem.index_dim
        values = problem.s_kv * finite_value_stride(problem.value_dim) if config.copies_values else 0
        own_lse = problem.needs_lse and not problem.value_dim
        return Layout(
            {
                "ranges": RANGE_BYTES * problem.s_q,
                "own_lse": FLOAT * problem.s_q * problem.heads if own_lse else 0,
                "target_rows": 0 if problem.given_sums else FLOAT * elements,
                "score_rows": FLOAT * elements,
                "gradient_rows": _HALF * elements if config.on_tensor_cores else 0,
                FINITE_KEYS: _HALF * keys if config.on_tensor_cores else 0,
                DECODED_QUERIES: _HALF * config.decoded_elements,
                FINITE_VALUES: _HALF * values,
                NONFINITE_TILES: FLOAT * -(-problem.s_kv // TILE_KEYS) if config.copies_values else 0,
                "key_sums": FLOAT * config.key_splits * keys if config.carries_sums else 0,
            }
        )

    def steps(self, config: LossConfig, call: Call) -> list[Step]:
        """Nothing is launched for no token, no key, or no result."""
        problem = config.problem
        steps: list[Step] = []
        whole = loss_args(config, call, 0, problem.s_q)
        steps += loss_launch(generic.RANGES, problem, problem.s_q, whole, call)
        if config.copies_values:
            steps += loss_launch(generic.FINITE_VALUES, problem, problem.s_q, whole, call)
        if config.attention is not None:
            steps += loss_launch(config.attention, problem, problem.s_q, whole, call)
        if config.on_tensor_cores:
            steps += loss_launch(generic.FINITE_KEYS, problem, problem.s_q, whole, call)
        for first in range(0, max(1, problem.s_q), config.chunk):
            tokens = min(config.chunk, problem.s_q - first)
            args = loss_args(config, call, first, tokens, problem.target_heads)
            for kernel in _kernels(config):
                steps += loss_launch(kernel, problem, tokens, args, call)
        if config.on_tensor_cores:
            steps += loss_launch(generic.KEYS_SUM, problem, problem.s_q, whole, call)
        return steps


def chunk_tokens(
    problem: LossProblem, bytes_per_key: int = 2 * FLOAT, unit: int = 1, tensor_cores: bool = False
) -> int:
    """Tokens of a chunk: the most whose rows fit into the limit (targets, scores and, on tensor cores, copies of
    codes), and at least one. More than `unit` tokens are a multiple of it; chunks are about equal.
    """
    copies = tensor_cores and problem.codes and problem.gradients
    copied = _HALF * problem.index_heads * problem.index_dim if copies else 0
    fitting = problem.buffer_bytes // (bytes_per_key * problem.rows_per_token * problem.row_stride + copied)
    whole = max(1, fitting if fitting < unit else fitting // unit * unit)
    if whole < unit or whole >= problem.s_q:
        return max(1, min(whole, problem.s_q))
    even = -(-problem.s_q // -(-problem.s_q // whole))
    return -(-even // unit) * unit


def _kernels(config: LossConfig) -> Iterator[LossKernel]:
    """Kernels that run for each chunk."""
    yield config.kernel
    if not config.without_rows:
        yield generic.ROWS
    if config.decodes_queries:
        yield generic.DECODED_QUERIES
    if config.problem.gradients:
        yield from _gradient_kernels(config)


def _gradient_kernels(config: LossConfig) -> tuple[LossKernel, LossKernel]:
    if config.without_rows:
        return sm90.HEAD_QUERIES, sm90.HEAD_KEYS
    if config.on_tensor_cores:
        return sm90.QUERIES, sm90.KEYS
    return generic.QUERIES, generic.KEYS


def attention_kernel(problem: LossProblem, device: DeviceInfo, on_hopper: bool) -> LossKernel | None:
    """Kernel that computes the attention's outputs the caller did not pass, or None."""
    if problem.value_dim:
        on_rows = on_hopper and sm90.attends(problem, device)
        return sm90.HEADS if on_rows else generic.ATTENTION
    if problem.needs_lse:
        on_all_keys = problem.topk is None
        of_hopper = sm90.LSE if on_all_keys else sm90.LIST_LSE
        return of_hopper if on_hopper else generic.ATTENTION
    return None


def loss_launch(kernel: LossKernel, problem: LossProblem, tokens: int, args: LaunchArgs, call: Call) -> list[Step]:
    """One, or none if there is nothing to do."""
    grid = kernel.grid(problem, tokens)
    if 0 in grid:
        return []
    maps = kernel.maps(call, tokens)
    return [Launch(kernel, kernel.variant(problem), grid, replace(args, maps=maps) if maps else args)]


def loss_args(config: LossConfig, call: Call, first: int, tokens: int, heads: int | None = None) -> LaunchArgs:
    """The arguments of all kernels, for some tokens. `heads` are those that the target is summed over, by default all
    of them.
    """
    chunk = Chunk(first, tokens, config.decodes_queries)
    return LaunchArgs(loss_params(config.problem, call, chunk, config.key_splits, config.parts, heads))


LOSS = LossPipeline()
