"""Dense attention: the schedule, then the attention kernel."""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

from mla_cupy.kernels import choice
from mla_cupy.kernels.dense.problem import (
    D_ROPE,
    SCHEDULE_BYTES,
    SEQUENCE_BYTES,
    TILE_BYTES,
    DenseProblem,
    PrefillOptions,
)
from mla_cupy.kernels.dense.table import GENERIC, SCHEDULE, SM90, DenseKernel
from mla_cupy.kernels.numbers import LOG2_E
from mla_cupy.kernels.params import PrefillParams
from mla_cupy.kernels.pipeline import Call, Launch, LaunchArgs, Layout, Pipeline, Step
from mla_cupy.kernels.spec import Variant
from mla_cupy.runtime.device import DeviceInfo
from mla_cupy.runtime.launching import Dim3

L2_SHARE = 0.6
"""Of the L2, which keys and values of the heads that are walked together may take."""
_BYTES_16_BITS = 2


@dataclass(frozen=True)
class DenseConfig:
    """Everything about a call that does not depend on pointers or strides."""

    problem: DenseProblem
    kernel: DenseKernel
    grid: Dim3
    heads_at_once: int


class DensePipeline(Pipeline[DenseConfig]):
    """The kernels of dense attention."""

    kernels = (SM90, GENERIC)

    def configure(self, problem: DenseProblem, device: DeviceInfo, kernel: str | None = None) -> DenseConfig:
        """See `Pipeline.configure`."""
        chosen = choice.choose("dense attention", self.kernels, problem, device, kernel)
        return DenseConfig(problem, chosen, chosen.grid(problem, device), heads_at_once(problem, device))

    def workspace(self, config: DenseConfig) -> Layout:
        """What the schedule writes."""
        problem = config.problem
        return Layout(
            {
                "schedule": SCHEDULE_BYTES,
                "sequences": SEQUENCE_BYTES * (problem.sequences + 2),
                "tiles": TILE_BYTES * problem.most_tiles,
            }
        )

    def steps(self, config: DenseConfig, call: Call) -> list[Step]:
        """Nothing without a query."""
        problem, kernel = config.problem, config.kernel
        if problem.s_q == 0:
            return []
        params = _params(config, call)
        return [
            Launch(SCHEDULE, Variant(), (1, 1, 1), LaunchArgs(params)),
            Launch(kernel, kernel.variant(problem), config.grid, LaunchArgs(params, kernel.maps(problem, call))),
        ]


def heads_at_once(problem: DenseProblem, device: DeviceInfo) -> int:
    """Query heads whose keys and values are walked together: whole groups, as many as the L2 holds."""
    head_bytes = _BYTES_16_BITS * problem.s_kv * (problem.d_qk + problem.d_v)
    kv_heads = int(L2_SHARE * device.l2_bytes) // max(1, head_bytes)
    return problem.h_q // problem.h_kv * max(1, min(kv_heads, problem.h_kv))


def _params(config: DenseConfig, call: Call) -> PrefillParams:
    problem, options = config.problem, cast(PrefillOptions, call.options)
    q_rope, k_rope = call.name("q_rope") or "q", call.name("k_rope") or "k"
    state_out, within = call.views.get("state_out"), problem.d_qk - D_ROPE
    k_rope_heads = call.view(k_rope).shape[1]
    token, head = call.strides(k_rope, 2)
    return PrefillParams(
        q="q",
        q_rope=q_rope,
        k="k",
        k_rope=k_rope,
        v="v",
        cu_seqlens_q=call.name("cu_seqlens_q"),
        cu_seqlens_kv=call.name("cu_seqlens_kv"),
        state_out=call.name("state_out"),
        state_lse=call.name("state_lse"),
        out="out",
        lse="lse",
        schedule="schedule",
        sequences="sequences",
        tiles="tiles",
        q_stride_s_h_elems=call.strides("q", 2),
        q_rope_stride_s_h_elems=call.strides(q_rope, 2),
        k_stride_s_h_elems=call.strides("k", 2),
        k_rope_stride_s_h_elems=(token, head if k_rope_heads > 1 else 0),
        v_stride_s_h_elems=call.strides("v", 2),
        cu_seqlens_q_stride_elems=call.stride("cu_seqlens_q"),
        cu_seqlens_kv_stride_elems=call.stride("cu_seqlens_kv"),
        state_out_stride_s_h_elems=call.strides("state_out", 2),
        state_lse_stride_s_h_elems=call.strides("state_lse", 2),
        out_stride_s_h_elems=call.strides("out", 2),
        lse_stride_s_h_elems=call.strides("lse", 2),
        s_q=problem.s_q,
        s_kv=problem.s_kv,
        h_q=problem.h_q,
        h_kv=problem.h_kv,
        b=problem.sequences,
        q_rope_column=within if q_rope == "q" else 0,
        k_rope_column=within if k_rope == "k" else 0,
        k_rope_heads=k_rope_heads,
        heads_at_once=config.heads_at_once,
        causal=options.causal,
        state_is_fp32=state_out is not None and state_out.dtype == "float32",
        out_is_fp32=call.view("out").dtype == "float32",
        scale_log2=options.scale * LOG2_E,
    )


DENSE = DensePipeline()
