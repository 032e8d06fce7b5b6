"""Dense attention, backward: the schedule, statistics, gradients of keys and queries, sums in 16 bits.

A call that need not be deterministic computes all gradients in one kernel, by tiles of keys: dq is
added up in float32. Else a second kernel computes dq, by tiles of queries.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import cast

from mla_cupy.kernels import choice
from mla_cupy.kernels.dense.backward_sm90 import SM90_KEYS
from mla_cupy.kernels.dense.backward_table import (
    DELTA,
    DK_ROPE,
    DK_ROPE_KEYS,
    DQ,
    GENERIC_KEYS,
    KeysKernel,
)
from mla_cupy.kernels.dense.pipeline import L2_SHARE, heads_at_once, last_columns, launch_schedule, schedule_sizes
from mla_cupy.kernels.dense.problem import (
    D_ROPE,
    SCHEDULE_BYTES,
    TILE_BYTES,
    DenseBackwardProblem,
    PrefillBackwardOptions,
)
from mla_cupy.kernels.numbers import LOG2_E
from mla_cupy.kernels.param_layout import NULL
from mla_cupy.kernels.params import DenseDeltaParams, PrefillBackwardParams
from mla_cupy.kernels.pipeline import Call, Launch, LaunchArgs, Layout, Pipeline, Step, ZeroFill
from mla_cupy.kernels.spec import Variant
from mla_cupy.runtime.device import DeviceInfo
from mla_cupy.runtime.launching import Dim3

_FLOAT, _BYTES_16_BITS = 4, 2


@dataclass(frozen=True)
class DenseBackwardConfig:
    """Everything about a call that does not depend on pointers or strides."""

    problem: DenseBackwardProblem
    kernel: KeysKernel
    sums_dq: bool
    grid: Dim3
    queries_grid: Dim3
    heads_at_once: int
    kv_heads_at_once: int


class DenseBackwardPipeline(Pipeline[DenseBackwardConfig]):
    """The kernels of the backward of dense attention."""

    kernels = (SM90_KEYS, GENERIC_KEYS)

    def configure(
        self, problem: DenseBackwardProblem, device: DeviceInfo, kernel: str | None = None
    ) -> DenseBackwardConfig:
        """See `Pipeline.configure`."""
        chosen = choice.choose("the backward of dense attention", self.kernels, problem, device, kernel)
        sums_dq = chosen.sums_dq(problem)
        return DenseBackwardConfig(
            problem,
            chosen,
            sums_dq,
            chosen.grid(problem, device),
            chosen.queries.grid(problem, device),
            heads_at_once(problem, device),
            kv_heads_at_once(problem, device, sums_dq),
        )

    def workspace(self, config: DenseBackwardConfig) -> Layout:
        """Workspace: the schedule, the statistics, and sums."""
        problem = config.problem
        of_each_row = _FLOAT * problem.h_q * problem.num_rows if problem.s_q else 0
        rope_heads = 0 if not problem.shared_rope else 1 if config.sums_dq else problem.h_kv
        return Layout(
            {
                **schedule_sizes(problem),
                "key_schedule": SCHEDULE_BYTES,
                "key_tiles": TILE_BYTES * problem.most_key_tiles,
                "lse2": of_each_row,
                "delta": of_each_row,
                "dk_rope_sums": _FLOAT * problem.s_kv * rope_heads * D_ROPE,
                "dq_sums": of_each_row * problem.d_qk if config.sums_dq else 0,
            }
        )

    def steps(self, config: DenseBackwardConfig, call: Call) -> list[Step]:
        """Without queries, the gradients of keys become zeros all the same, and the other way round."""
        problem, kernel = config.problem, config.kernel
        if problem.s_q == problem.s_kv == 0:
            return []
        # One block of arguments for all launches that have these parameters: kernels without maps do not look at them.
        args = LaunchArgs(_params(config, call), kernel.maps(problem, call))
        # The launch for statistics writes the schedule of one sequence, which then has no launch of its own.
        one_sequence = problem.sequences == 1 and problem.s_q > 0
        steps: list[Step] = [] if one_sequence else [launch_schedule(problem, call, of_keys=True)]
        if problem.s_q:
            statistics = LaunchArgs(_delta_params(config, call, one_sequence))
            steps.append(Launch(DELTA, problem.variant, (_tiles_of_heads(problem), 1, 1), statistics))
        elif config.sums_dq:
            steps.insert(0, ZeroFill("dk_rope_sums"))
        if problem.s_kv:
            steps.append(Launch(kernel, kernel.variant(problem), config.grid, args))
        return steps + _finish(config, call, args)


def _finish(config: DenseBackwardConfig, call: Call, args: LaunchArgs) -> list[Step]:
    """Launches that round sums to 16-bit gradients, or make the gradient of the queries without sums."""
    problem, queries = config.problem, config.kernel.queries
    key_blocks = -(-problem.s_kv // DK_ROPE_KEYS) if problem.shared_rope else 0
    if problem.s_q and config.sums_dq:
        variant = Variant(dtype=problem.dtype, head_dim_qk=problem.d_qk)
        return [Launch(DQ, variant, (key_blocks + _tiles_of_heads(problem), 1, 1), args)]
    steps: list[Step] = []
    if key_blocks:
        steps.append(Launch(DK_ROPE, Variant(dtype=problem.dtype), (key_blocks, 1, 1), args))
    if problem.s_q:
        maps = queries.maps(problem, call)
        own = args if maps == args.maps else replace(args, maps=maps)
        steps.append(Launch(queries, queries.variant(problem), config.queries_grid, own))
    return steps


def _delta_params(config: DenseBackwardConfig, call: Call, one_sequence: bool) -> DenseDeltaParams:
    problem = config.problem
    return DenseDeltaParams(
        out="out",
        dout="dout",
        lse="lse",
        dlse=call.name("dlse"),
        lse2="lse2",
        delta="delta",
        dq_sums="dq_sums" if config.sums_dq else NULL,
        dk_rope_sums="dk_rope_sums" if problem.shared_rope else NULL,
        schedule="schedule",
        key_schedule="key_schedule",
        tiles="tiles",
        key_tiles="key_tiles",
        cu_seqlens_q=call.name("cu_seqlens_q"),
        cu_seqlens_kv=call.name("cu_seqlens_kv"),
        out_stride_s_h_elems=call.strides("out", 2),
        dout_stride_s_h_elems=call.strides("dout", 2),
        lse_stride_s_h_elems=call.strides("lse", 2),
        dlse_stride_s_h_elems=call.strides("dlse", 2),
        dk_rope_sums_stride_h_elems=0 if config.sums_dq else D_ROPE,
        cu_seqlens_q_stride_elems=call.stride("cu_seqlens_q"),
        cu_seqlens_kv_stride_elems=call.stride("cu_seqlens_kv"),
        s_q=problem.s_q,
        s_kv=problem.s_kv,
        h_q=problem.h_q,
        num_rows=problem.num_rows,
        out_is_fp32=call.view("out").dtype == "float32",
        one_sequence=one_sequence,
        causal=call.options.causal,
    )


def _tiles_of_heads(problem: DenseBackwardProblem) -> int:
    """A block per tile of queries and head; the schedule may find fewer tiles."""
    return problem.most_tiles * problem.h_q


def kv_heads_at_once(problem: DenseBackwardProblem, device: DeviceInfo, sums_dq: bool) -> int:
    """Number of KV heads processed together: the most with queries, dout and sums that fit into L2."""
    query_bytes = _BYTES_16_BITS * (problem.d_qk + problem.d_v) + (_FLOAT * problem.d_qk if sums_dq else 0)
    kv_head_bytes = query_bytes * problem.s_q * (problem.h_q // problem.h_kv)
    return max(1, min(int(L2_SHARE * device.l2_bytes) // max(1, kv_head_bytes), problem.h_kv))


def _params(config: DenseBackwardConfig, call: Call) -> PrefillBackwardParams:
    problem, options = config.problem, cast(PrefillBackwardOptions, call.options)
    q_rope, k_rope = last_columns(call, "q", problem), last_columns(call, "k", problem)
    dq_rope, dk_rope = last_columns(call, "dq", problem), last_columns(call, "dk", problem)
    per_key = D_ROPE if config.sums_dq else D_ROPE * problem.h_kv
    return PrefillBackwardParams(
        q="q",
        q_rope=q_rope.name,
        k="k",
        k_rope=k_rope.name,
        v="v",
        out="out",
        dout="dout",
        lse="lse",
        dlse=call.name("dlse"),
        lse2="lse2",
        delta="delta",
        dq_sums="dq_sums" if config.sums_dq else NULL,
        dk_rope_sums="dk_rope_sums" if problem.shared_rope else NULL,
        dq="dq",
        dq_rope=dq_rope.name,
        dk="dk",
        dk_rope=dk_rope.name,
        dv="dv",
        schedule="schedule",
        key_schedule="key_schedule",
        tiles="tiles",
        key_tiles="key_tiles",
        q_stride_s_h_elems=call.strides("q", 2),
        q_rope_stride_s_h_elems=q_rope.strides,
        k_stride_s_h_elems=call.strides("k", 2),
        k_rope_stride_s_h_elems=k_rope.strides,
        v_stride_s_h_elems=call.strides("v", 2),
        out_stride_s_h_elems=call.strides("out", 2),
        dout_stride_s_h_elems=call.strides("dout", 2),
        lse_stride_s_h_elems=call.strides("lse", 2),
        dlse_stride_s_h_elems=call.strides("dlse", 2),
        dk_rope_sums_stride_s_h_elems=(per_key, 0 if config.sums_dq else D_ROPE),
        dq_stride_s_h_elems=call.strides("dq", 2),
        dq_rope_stride_s_h_elems=dq_rope.strides,
        dk_stride_s_h_elems=call.strides("dk", 2),
        dk_rope_stride_s_h_elems=dk_rope.strides,
        dv_stride_s_h_elems=call.strides("dv", 2),
        s_q=problem.s_q,
        s_kv=problem.s_kv,
        h_q=problem.h_q,
        h_kv=problem.h_kv,
        num_rows=problem.num_rows,
        q_rope_column=q_rope.column,
        k_rope_column=k_rope.column,
        k_rope_heads=k_rope.heads,
        heads_at_once=config.heads_at_once,
        kv_heads_at_once=config.kv_heads_at_once,
        out_is_fp32=call.view("out").dtype == "float32",
        scale=options.scale,
        scale_log2=options.scale * LOG2_E,
    )


DENSE_BACKWARD = DenseBackwardPipeline()
