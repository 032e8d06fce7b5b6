"""Logits and top-k of many tokens without storing the logits: each row lists the logits that reach its limit.

The limit comes from a sample of every 2^shift-th key, and is likely to be below the k-th largest logit. Whatever the
limit is, a list with at least k logits, and room for all, has the k largest. Rows without such a list are named, for
kernels that compute all of their logits.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import isqrt
from typing import Any, NamedTuple

from mla_cupy.arrays.view import View
from mla_cupy.kernels import choice
from mla_cupy.kernels.indexer.logits import sm90
from mla_cupy.kernels.indexer.logits.problem import BLOCK_TOKENS, LogitsProblem
from mla_cupy.kernels.indexer.topk import select
from mla_cupy.kernels.param_layout import NULL
from mla_cupy.kernels.params import LogitsParams, TopkParams
from mla_cupy.kernels.pipeline import Call, Launch, LaunchArgs, Layout, Pipeline, Step, ZeroFill
from mla_cupy.kernels.spec import Reason
from mla_cupy.runtime.device import DeviceInfo

CANDIDATE_BYTES = 8
MAX_TOKENS = BLOCK_TOKENS * sm90.KERNEL.short_line
"""Tokens of a call: their tiles need no schedule."""
_MIN_SHIFT = 6
"""The sample costs 1/64 of the logits."""
_RANK_DEVIATIONS = 5
"""Standard deviations, and then some, between the expected and the chosen rank in the sample."""
_MORE_RANKS = 3
_ROOM_DEVIATIONS = 7
"""Standard deviations, and then some, between the chosen rank and a full list; reserved places may stay empty."""
_MORE_ROOM = 8
_MIN_TOKENS = 9
_MIN_KEYS = 16384
_MIN_KEYS_OF_K = 8


class Sampling(NamedTuple):
    """Every 2^shift-th key is sampled, the limit is the `rank`-th largest of them, and a list has `capacity` logits."""

    shift: int
    rank: int
    capacity: int

    def keys(self, num_keys: int) -> int:
        """Keys of the sample."""
        return -(-num_keys >> self.shift)


@dataclass(frozen=True)
class CandidateProblem:
    """A call's logits, and what decides besides."""

    logits: LogitsProblem
    k: int
    order: str = "index"
    keeps: bool = False


class CandidateOptions(NamedTuple):
    """The arguments beside the arrays. `fills`: zero the counts first; a call leaves them zero for the next one."""

    topk: int
    relative: bool
    fills: bool
    kernel: str | None


@dataclass(frozen=True)
class CandidateConfig:
    """The problem, its sample, and blocks of the grid."""

    problem: CandidateProblem
    sampling: Sampling
    blocks: int


def sampling_of(k: int, num_keys: int) -> Sampling:
    """Find the sample of a row: the densest that fits into its list.

    The k largest are expected to have k / 2^shift of the samples; a limit of twice that rank or so is below them all.
    """
    shift = _MIN_SHIFT
    while True:
        expected = max(1, k >> shift)
        rank = expected + isqrt(_RANK_DEVIATIONS**2 * expected) + _MORE_RANKS
        room = rank + isqrt(_ROOM_DEVIATIONS**2 * rank) + _MORE_ROOM
        found = Sampling(shift, rank, room << shift)
        if found.keys(num_keys) <= found.capacity:
            return found
        shift += 1


def rows_of_lists(rows: int, capacity: int, buffer_bytes: int) -> int:
    """Rows of a chunk: whole blocks of tokens, and chunks of about equal size. 0 if the buffer has no room for one."""
    most = min(MAX_TOKENS, buffer_bytes // (CANDIDATE_BYTES * capacity)) // BLOCK_TOKENS
    if rows == 0 or most == 0:
        return 0
    blocks = -(-rows // BLOCK_TOKENS)
    return min(rows, -(-blocks // -(-blocks // most)) * BLOCK_TOKENS)


def unsupported(problem: CandidateProblem, device: DeviceInfo) -> Reason | None:
    """Reason that no lists can be used for the problem; None if they can."""
    of = problem.logits
    if problem.order != "index" or problem.keeps:
        return Reason('selects with order="index", and keeps no keys')
    if (of.dtype, of.head_dim, of.accumulate) != (sm90.CANDIDATES.dtype, sm90.CANDIDATES.head_dim, "float32"):
        return Reason(f"lists logits of {sm90.CANDIDATES.dtype} and {sm90.CANDIDATES.head_dim} elements, in float32")
    if sampling_of(problem.k, of.num_keys).capacity > select.MAX_CANDIDATES:
        return Reason(f"lists at most {select.MAX_CANDIDATES} logits, too few for k={problem.k}")
    return sm90.unsupported(of, device)


def preferred(problem: CandidateProblem) -> bool:
    """Prefer lists for rows that are much longer."""
    of = problem.logits
    return of.num_tokens >= _MIN_TOKENS and of.num_keys >= max(_MIN_KEYS, _MIN_KEYS_OF_K * problem.k)


class CandidatePipeline(Pipeline[CandidateConfig]):
    """Sample, limits, lists, selection: two launches of the logits' kernel and two of the top-k's, in turn."""

    kernels = (sm90.KERNEL,)

    def configure(self, problem: CandidateProblem, device: DeviceInfo, kernel: str | None = None) -> CandidateConfig:
        """See `Pipeline.configure`."""
        choice.choose("indexer_select", self.kernels, problem.logits, device, kernel)
        return CandidateConfig(problem, sampling_of(problem.k, problem.logits.num_keys), device.sm_count)

    def workspace(self, config: CandidateConfig) -> Layout:
        """See `Pipeline.workspace`: two numbers per row."""
        nbytes = 4 * config.problem.logits.num_tokens
        return Layout({"found": nbytes, "limits": nbytes})

    def steps(self, config: CandidateConfig, call: Call) -> list[Step]:
        """Four launches."""
        rows, sampling = config.problem.logits.num_tokens, config.sampling
        sample, shift = call.view("k"), sampling.shift
        sample = _every(sample, 1 << shift)
        scales = call.stride("k_scale")

        def logits(k: View, scale_stride: int, shift: int, limits: str) -> Launch:
            params = _logits_params(config, call, k.shape[0], scale_stride, shift, limits)
            maps = ("q", sm90.q_map(call.view("q"))), ("k", sm90.k_map(k))
            return Launch(sm90.KERNEL, sm90.CANDIDATES, (config.blocks, 1, 1), LaunchArgs(params, maps))

        def topk(k: int, **results: Any) -> Launch:
            params = _topk_params(config, call, k, **results)
            return Launch(select.KERNEL, select.CANDIDATES, (rows, 1, 1), LaunchArgs(params))

        again = {"again_begins": "again_begins", "again_ends": "again_ends"}
        return [
            *([ZeroFill("found")] if call.options.fills else []),
            logits(sample, scales << shift, shift, NULL),
            topk(sampling.rank, limits="limits"),
            logits(call.view("k"), scales, 0, "limits"),
            topk(config.problem.k, **again),
        ]


def _every(k: View, step: int) -> View:
    """Every `step`-th key."""
    return k._replace(shape=(-(-k.shape[0] // step), k.shape[1]), strides=(step * k.strides[0], k.strides[1]))


def _logits_params(
    config: CandidateConfig, call: Call, num_keys: int, scale_stride: int, shift: int, limits: str
) -> LogitsParams:
    problem = config.problem.logits
    q, weights = call.strides("q", 2), call.strides("weights", 2)
    ends, row = call.stride("ke"), call.stride("candidates")
    return LogitsParams(
        q="q",
        k="k",
        weights="weights",
        k_scale=call.name("k_scale"),
        begins=call.name("ks"),
        ends=call.name("ke"),
        cuts=NULL,
        logits="candidates",
        limits=limits,
        found="found",
        q_stride_block_token_head_elems=(BLOCK_TOKENS * q[0], *q),
        k_stride_elems=call.stride("k"),
        weights_stride_block_token_head_elems=(BLOCK_TOKENS * weights[0], *weights),
        k_scale_stride_elems=scale_stride,
        begins_stride_elems=call.stride("ks"),
        ends_stride_block_token_elems=(BLOCK_TOKENS * ends, ends),
        logits_stride_block_token_elems=(BLOCK_TOKENS * row, row),
        num_tokens=problem.num_tokens,
        block_tokens=problem.block_tokens,
        num_keys=num_keys,
        heads=problem.heads,
        head_dim=problem.head_dim,
        clean=False,
        bf16_out=False,
        wide_rows=False,
        num_blocks=problem.num_blocks,
        key_shift=shift,
        capacity=config.sampling.capacity,
    )


def _topk_params(config: CandidateConfig, call: Call, k: int, **results: Any) -> TopkParams:
    problem = config.problem.logits
    return TopkParams(
        logits="candidates",
        ks=call.name("ks"),
        ke=call.name("ke"),
        block_table=NULL,
        indices="indices",
        counts="counts",
        values=NULL,
        found="found",
        **results,
        logits_stride_q_elems=call.stride("candidates") // 2,
        ks_stride_elems=call.stride("ks"),
        ke_stride_elems=call.stride("ke"),
        table_stride_b_page_elems=(0, 0),
        indices_stride_q_elems=call.stride("indices"),
        counts_stride_elems=call.stride("counts"),
        values_stride_q_elems=0,
        s_q=problem.num_tokens,
        s_kv=problem.num_keys,
        k=k,
        rows_per_table=1,
        max_pages=0,
        page_size=1,
        rows_per_ke=1,
        keep_first=0,
        keep_last=0,
        by_value=False,
        relative=call.options.relative,
        logits_are_bf16=False,
        capacity=config.sampling.capacity,
    )


SELECT_CANDIDATES = CandidatePipeline()
