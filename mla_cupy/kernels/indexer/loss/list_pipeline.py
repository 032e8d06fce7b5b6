"""The indexer's loss of the sparse stage: lists of keys, then the steps of the warm-up loss over the places of the
lists.

Only the gradients by keys differ: each token adds to the keys of its list. A deterministic call adds to bins, as the
sparse backward does; its kernels make the bins and add them up: `tile/binned_sum.cuh`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import cast

from mla_cupy.errors import ArgumentError, explain
from mla_cupy.kernels import choice
from mla_cupy.kernels.attention import row_lists
from mla_cupy.kernels.exact_sums.launches import NUM_BINS, launch_bins
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
from mla_cupy.kernels.indexer.loss.problem import LossKernel, LossProblem, SparseLossOptions
from mla_cupy.kernels.indexer.loss.sm90_maps import DECODED_QUERIES, FINITE_KEYS
from mla_cupy.kernels.param_layout import NULL
from mla_cupy.kernels.params import DkvParams
from mla_cupy.kernels.pipeline import Call, Launch, LaunchArgs, Layout, Pipeline, Step, ZeroFill
from mla_cupy.kernels.sparse_backward.passes import DKV, DKV_ROWS_PER_BLOCK
from mla_cupy.kernels.sparse_backward.problem import DkvOrder
from mla_cupy.kernels.spec import Variant
from mla_cupy.runtime.device import DeviceInfo

_FIRST_ZEROED = "selected"
"""The part of the workspace from which on it starts as zeros."""


@dataclass(frozen=True)
class SparseLossConfig(LossConfig):
    """Configuration of the sparse loss: the warm-up loss's, with sums of bins."""

    @property
    def on_tensor_cores(self) -> bool:
        """True if the kernel for Hopper makes the gradients; it has those by the scores in float32."""
        return self.problem.gradients and self.kernel is sm90.LIST_SCORES

    @property
    def gradient_kernels(self) -> tuple[LossKernel, ...]:
        """Kernels that run after the rows of a chunk."""
        if not self.problem.gradients:
            return ()
        if self.on_tensor_cores:
            copies = (generic.DECODED_QUERIES,) if self.decodes_queries else ()
            return (*copies, sm90.LIST_GRADIENTS)
        return generic.QUERIES, generic.SCATTER

    @property
    def binned(self) -> bool:
        """True if gradients by keys are added to bins."""
        return self.problem.gradients and self.problem.deterministic

    @property
    def num_bins(self) -> int:
        """Number of sums per element of the gradient by keys."""
        return NUM_BINS if self.binned else 1

    @property
    def parts(self) -> Parts:
        """See `LossConfig.parts`."""
        found: Parts = {"scores": "score_rows", "rows": "rows", "counts": "counts"}
        if self.on_tensor_cores:
            found["finite_keys"] = FINITE_KEYS
        if self.decodes_queries:
            found["decoded_queries"] = DECODED_QUERIES
        if self.problem.gradients:
            found["key_sums"] = "key_sums"
        if self.binned:
            found |= {"extractors": "extractors", "largest": "largest"}
        return found


class SparseLossPipeline(Pipeline[SparseLossConfig]):
    """The kernels of the sparse stage's loss."""

    kernels = (sm90.LIST_SCORES, generic.SCORES)

    def configure(self, problem: LossProblem, device: DeviceInfo, kernel: str | None = None) -> SparseLossConfig:
        """See `Pipeline.configure`; a deterministic call of too many additions is an ArgumentError, too."""
        chosen = choice.choose("the indexer's sparse loss", self.kernels, problem, device, kernel)
        total = problem.s_q * problem.keys
        if problem.deterministic and total >= 2**32:
            got = f"True, with s_q * topk = {total}"
            raise ArgumentError(explain("deterministic", got, "less than 2^32", "split the queries"))
        on_hopper = chosen is sm90.LIST_SCORES
        chunk = chunk_tokens(problem, (1 if problem.given_sums else 2) * FLOAT, tensor_cores=on_hopper)
        return SparseLossConfig(problem, chosen, chunk, attention_kernel(problem, device, on_hopper))

    def workspace(self, config: SparseLossConfig) -> Layout:
        """The lists, the attention's log-sum-exps unless they are passed, the rows of a chunk, and the sums."""
        problem = config.problem
        elements = config.chunk * problem.row_stride
        per_row, one = (FLOAT * problem.s_kv, FLOAT) if config.binned else (0, 0)
        sums = FLOAT * problem.s_kv * problem.index_dim * config.num_bins
        return Layout(
            {
                **row_lists.list_sizes(problem.s_q, problem.keys),
                "ranges": RANGE_BYTES * problem.s_q,
                "own_lse": FLOAT * problem.s_q * problem.heads if problem.needs_lse else 0,
                "target_rows": 0 if problem.given_sums else FLOAT * elements,
                "score_rows": FLOAT * elements,
                FINITE_KEYS: 2 * problem.s_kv * problem.index_dim if config.on_tensor_cores else 0,
                DECODED_QUERIES: 2 * config.decoded_elements,
                "extractors": per_row + one,
                _FIRST_ZEROED: per_row,
                "largest": one,
                "key_sums": sums if problem.gradients else 0,
            }
        )

    def steps(self, config: SparseLossConfig, call: Call) -> list[Step]:
        """Without a query, the gradients by keys become zeros all the same."""
        problem = config.problem
        options = cast(SparseLossOptions, call.options)
        steps: list[Step] = [ZeroFill(_FIRST_ZEROED)] if problem.gradients else []
        if problem.s_q > 0:
            selected = _FIRST_ZEROED if config.binned else NULL
            lists = row_lists.launch(call, options.causal, options.relative, ordered=False, selected=selected, keys="k")
            steps.append(replace(lists, dependent=not problem.gradients))
            steps += self._tokens(config, call)
        if problem.gradients and problem.s_kv > 0:
            steps.append(_finish(config, call))
        return steps

    def _tokens(self, config: SparseLossConfig, call: Call) -> list[Step]:
        problem = config.problem
        whole = loss_args(config, call, 0, problem.s_q)
        steps = loss_launch(generic.RANGES, problem, problem.s_q, whole, call)
        if config.attention is not None:
            steps += loss_launch(config.attention, problem, problem.s_q, whole, call)
        if config.binned:
            steps += loss_launch(generic.BOUNDS, problem, problem.s_q, whole, call)
            steps.append(launch_bins(problem.s_kv, 1, dependent=True))
        if config.on_tensor_cores:
            steps += loss_launch(generic.FINITE_KEYS, problem, problem.s_q, whole, call)
        for first in range(0, problem.s_q, config.chunk):
            tokens = min(config.chunk, problem.s_q - first)
            args = loss_args(config, call, first, tokens, problem.target_heads)
            for kernel in (config.kernel, generic.ROWS, *config.gradient_kernels):
                steps += loss_launch(kernel, problem, tokens, args, call)
        return steps


def _finish(config: SparseLossConfig, call: Call) -> Launch:
    """The sums of all bins, in the gradient's dtype."""
    problem, to = config.problem, call.view("d_index_k")
    params = DkvParams(
        sums="key_sums",
        dkv="d_index_k",
        dkv_stride_s_elems=to.strides[0],
        s_kv=problem.s_kv,
        d_qk=problem.index_dim,
        num_bins=config.num_bins,
        order=DkvOrder.PLAIN,
        dkv_is_fp32=to.dtype == "float32",
    )
    blocks = -(-problem.s_kv // DKV_ROWS_PER_BLOCK)
    return Launch(DKV, Variant(dtype="bfloat16"), (blocks, 1, 1), LaunchArgs(params))


SPARSE_LOSS = SparseLossPipeline()
