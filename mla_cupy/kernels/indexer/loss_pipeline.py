"""The indexer's warm-up loss: the keys of each token, the attention's log-sum-exps, then chunk by chunk of tokens the
targets and scores, the divergence of each row, and the gradients.

What a chunk holds of all keys is bounded by the caller's limit, so that the workspace grows with the keys, not with
their square. Gradients by keys are carried from chunk to chunk.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import cast

from mla_cupy.arrays.view import View
from mla_cupy.kernels import choice
from mla_cupy.kernels.indexer import (
    loss_attention_generic,
    loss_keys_generic,
    loss_queries_generic,
    loss_ranges,
    loss_rows,
    loss_scores_generic,
)
from mla_cupy.kernels.indexer.loss_problem import PARAMS, LossKernel, LossOptions, LossProblem
from mla_cupy.kernels.pipeline import NULL, Call, Launch, Layout, Pipeline, Record, Step
from mla_cupy.kernels.sparse import rows
from mla_cupy.runtime.device import DeviceInfo

FLOAT = 4
RANGE_BYTES = 8
_ADDRESSES = tuple(PARAMS.dtype.names or ())[: PARAMS.num_addresses]
_NUMBERS = tuple(PARAMS.dtype.names or ())[PARAMS.num_addresses :]


@dataclass(frozen=True)
class LossConfig:
    """Everything about a call that does not depend on pointers or strides. A chunk is `chunk` tokens."""

    problem: LossProblem
    kernel: LossKernel
    chunk: int

    @property
    def num_chunks(self) -> int:
        """One at least: without a token the gradient by keys becomes zeros all the same."""
        return max(1, -(-self.problem.s_q // self.chunk))

    @property
    def carries_sums(self) -> bool:
        """Whether gradients by keys are carried from chunk to chunk."""
        return self.problem.gradients and self.num_chunks > 1


class LossPipeline(Pipeline[LossConfig]):
    """The kernels of the warm-up loss."""

    kernels = (loss_scores_generic.KERNEL,)

    def configure(self, problem: LossProblem, device: DeviceInfo, kernel: str | None = None) -> LossConfig:
        """See `Pipeline.configure`."""
        chosen = choice.choose("the indexer's loss", self.kernels, problem, device, kernel)
        return LossConfig(problem, chosen, chunk_tokens(problem))

    def workspace(self, config: LossConfig) -> Layout:
        """The tokens' keys, the attention's log-sum-exps if nobody else has them, the rows of a chunk, the sums."""
        problem = config.problem
        elements = config.chunk * problem.rows_per_token * problem.row_stride
        own_lse = problem.needs_lse and not problem.value_dim
        return Layout(
            {
                "ranges": RANGE_BYTES * problem.s_q,
                "own_lse": FLOAT * problem.s_q * problem.heads if own_lse else 0,
                "target_rows": FLOAT * elements,
                "score_rows": FLOAT * elements,
                "key_sums": FLOAT * problem.s_kv * problem.index_dim if config.carries_sums else 0,
            }
        )

    def steps(self, config: LossConfig, call: Call) -> list[Step]:
        """Nothing is launched for no token, no key, or no result."""
        problem = config.problem
        steps: list[Step] = []
        whole = loss_record(config, call, 0, problem.s_q)
        steps += loss_launch(loss_ranges.KERNEL, problem, problem.s_q, whole)
        if problem.needs_lse or problem.value_dim:
            steps += loss_launch(loss_attention_generic.KERNEL, problem, problem.s_q, whole)
        for first in range(0, max(1, problem.s_q), config.chunk):
            tokens = min(config.chunk, problem.s_q - first)
            record = loss_record(config, call, first, tokens)
            for kernel in _kernels(config):
                steps += loss_launch(kernel, problem, tokens, record)
        return steps


def chunk_tokens(problem: LossProblem) -> int:
    """As many as have their targets and scores within the limit; one at least."""
    fitting = problem.buffer_bytes // (2 * FLOAT * problem.rows_per_token * problem.row_stride)
    return max(1, min(fitting, problem.s_q))


def _kernels(config: LossConfig) -> Iterator[LossKernel]:
    """Those that run for each chunk."""
    yield config.kernel
    yield loss_rows.KERNEL
    if config.problem.gradients:
        yield loss_queries_generic.KERNEL
        yield loss_keys_generic.KERNEL


def loss_launch(kernel: LossKernel, problem: LossProblem, tokens: int, record: Record) -> list[Step]:
    """One, or none if there is nothing to do."""
    grid = kernel.grid(problem, tokens)
    return [Launch(kernel, kernel.variant(problem), grid, record)] if 0 not in grid else []


def loss_record(
    config: LossConfig, call: Call, first: int, tokens: int, parts: Mapping[str, str] | None = None
) -> Record:
    """The parameters of all kernels, for some tokens; `parts` are further parts of the workspace, by member."""
    problem, options = config.problem, cast(LossOptions, call.options)
    numbers = {
        **_strides(config, call),
        "row_stride_elems": problem.row_stride,
        "rows_stride_elems": 0 if problem.topk is None else rows.rows_stride(problem.topk),
        "s_q": problem.s_q,
        "s_kv": problem.s_kv,
        "b": 0 if (starts := call.views["cu_seqlens_q"]) is None else starts.shape[0] - 1,
        "heads": problem.heads,
        "index_heads": problem.index_heads,
        "head_dim": problem.head_dim,
        "value_dim": problem.value_dim,
        "index_dim": problem.index_dim,
        "causal": options.causal,
        "per_head": problem.per_head,
        "first_token": first,
        "num_tokens": tokens,
        "first_chunk": first == 0,
        "last_chunk": first + tokens >= problem.s_q,
        "d_index_q_fp32": _is_float32(call.views["d_index_q"]),
        "d_index_k_fp32": _is_float32(call.views["d_index_k"]),
        "scale": options.scale,
        "target_scale": options.target_scale,
        "score_unit": 1.0 if problem.per_head else (problem.index_heads * problem.index_dim) ** -0.5,
    }
    addresses = {**{name: call.name(name) for name in _ADDRESSES}, **_parts(config, call), **(parts or {})}
    return Record(
        config.kernel,
        tuple(addresses[name] for name in _ADDRESSES),
        tuple(numbers[name] for name in _NUMBERS),
    )


def _parts(config: LossConfig, call: Call) -> dict[str, str]:
    """Members of the record that are parts of the workspace, or an array of another name."""
    problem = config.problem
    lse, own = call.name("lse"), call.name("attention_lse")
    if problem.needs_lse:
        lse = own = own or "own_lse"
    return {
        "ranges": "ranges",
        "target": "target_rows",
        "scores": "score_rows",
        "gradient": NULL,
        "key_sums": "key_sums" if config.carries_sums else NULL,
        "lse": lse,
        "attention_lse": own,
    }


def _strides(config: LossConfig, call: Call) -> dict[str, int]:
    """The strides of all arrays, by the names of the record's members."""
    problem = config.problem
    found: dict[str, int] = {}
    for member in _NUMBERS:
        name, separator, axis = member.partition("_stride_")
        if not separator or name in ("row", "rows"):
            continue
        strides = (*call.strides(name, 2), 0)
        if name == "lse" and problem.needs_lse:
            strides = call.strides("attention_lse", 2)
        if name in ("lse", "attention_lse") and problem.needs_lse and not problem.value_dim:
            strides = (problem.heads, 1)
        found[member] = strides[1] if axis == "head_elems" else strides[0]
    return found


def _is_float32(view: View | None) -> bool:
    return view is not None and view.dtype == "float32"


LOSS = LossPipeline()
