"""Dense attention, forward: the schedule, where one is needed, then the attention kernel."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, cast

from mla_cupy.dtypes import TABLE
from mla_cupy.kernels import choice
from mla_cupy.kernels.dense.fp8 import GENERIC_FP8, SM90_FP8, fp8_params
from mla_cupy.kernels.dense.problem import (
    D_ROPE,
    SCHEDULE_BYTES,
    SEQUENCE_BYTES,
    TILE_BYTES,
    DenseProblem,
    PrefillOptions,
)
from mla_cupy.kernels.dense.table import GENERIC, MMA, SCHEDULE, SM90, DenseKernel
from mla_cupy.kernels.numbers import LOG2_E
from mla_cupy.kernels.param_layout import NULL
from mla_cupy.kernels.params import DenseScheduleParams, PrefillParams
from mla_cupy.kernels.pipeline import Call, Launch, LaunchArgs, Layout, Pipeline, Step
from mla_cupy.kernels.spec import Variant
from mla_cupy.runtime.device import DeviceInfo
from mla_cupy.runtime.launching import Dim3

L2_SHARE = 0.6
"""Share of L2 for keys and values of the heads processed together."""

SELF_SCHEDULED = 4
"""Items per block up to which one sequence needs no schedule: its tiles follow from its ends, and turns are short."""


@dataclass(frozen=True)
class DenseConfig:
    """Everything about a call that does not depend on pointers or strides."""

    problem: DenseProblem
    kernel: DenseKernel
    variant: Variant
    grid: Dim3
    heads_at_once: int
    scheduled: bool


class DensePipeline(Pipeline[DenseConfig]):
    """The kernels of dense attention."""

    kernels = (SM90, MMA, GENERIC, SM90_FP8, GENERIC_FP8)

    def configure(self, problem: DenseProblem, device: DeviceInfo, kernel: str | None = None) -> DenseConfig:
        """See `Pipeline.configure`."""
        chosen = choice.choose("dense attention", self.kernels, problem, device, kernel)
        variant, grid = chosen.variant(problem, device), chosen.grid(problem, device)
        scheduled = not (chosen is SM90 and schedules_itself(problem, device))
        return DenseConfig(problem, chosen, variant, grid, heads_at_once(problem, device), scheduled)

    def workspace(self, config: DenseConfig) -> Layout:
        """Workspace: the schedule, if there is one."""
        return Layout(schedule_sizes(config.problem) if config.scheduled else {})

    def steps(self, config: DenseConfig, call: Call) -> list[Step]:
        """No launch if there is no query."""
        problem, kernel = config.problem, config.kernel
        if problem.s_q == 0:
            return []
        params = _params(config, call)
        args = LaunchArgs(fp8_params(params, problem, call) if problem.coded else params, kernel.maps(problem, call))
        attend = Launch(kernel, config.variant, config.grid, args)
        return [launch_schedule(problem, call), attend] if config.scheduled else [attend]


def schedules_itself(problem: DenseProblem, device: DeviceInfo) -> bool:
    """True if a kernel that can find the tiles of one sequence by itself does so."""
    return problem.sequences == 1 and problem.most_tiles * problem.h_q <= SELF_SCHEDULED * device.sm_count


def schedule_sizes(problem: DenseProblem) -> dict[str, int]:
    """The parts of a workspace that the schedule of the forward writes, and their bytes."""
    return {
        "schedule": SCHEDULE_BYTES,
        "sequences": SEQUENCE_BYTES * (problem.sequences + 2),
        "tiles": TILE_BYTES * problem.most_tiles,
    }


def launch_schedule(problem: DenseProblem, call: Call, *, of_keys: bool = False) -> Launch:
    """List the tiles of queries, and the tiles of keys `of_keys`."""
    params = DenseScheduleParams(
        cu_seqlens_q=call.name("cu_seqlens_q"),
        cu_seqlens_kv=call.name("cu_seqlens_kv"),
        schedule="schedule",
        key_schedule="key_schedule" if of_keys else NULL,
        sequences="sequences",
        tiles="tiles",
        key_tiles="key_tiles" if of_keys else NULL,
        cu_seqlens_q_stride_elems=call.stride("cu_seqlens_q"),
        cu_seqlens_kv_stride_elems=call.stride("cu_seqlens_kv"),
        s_q=problem.s_q,
        s_kv=problem.s_kv,
        b=problem.sequences,
        causal=call.options.causal,
    )
    return Launch(SCHEDULE, Variant(), (1, 1, 1), LaunchArgs(params))


def heads_at_once(problem: DenseProblem, device: DeviceInfo) -> int:
    """Number of query heads processed together: whole groups, the most with keys and values that fit into L2."""
    head_bytes = TABLE[problem.dtype].nbytes * problem.s_kv * (problem.d_qk + problem.d_v)
    kv_heads = int(L2_SHARE * device.l2_bytes) // max(1, head_bytes)
    return problem.h_q // problem.h_kv * max(1, min(kv_heads, problem.h_kv))


class LastColumns(NamedTuple):
    """Addresses and strides of the last columns of queries or keys, or of their gradients.

    Attributes
    ----------
    name : str
        Name of the array, or of the array of the first columns.
    column : int
        Where they begin in it.
    heads : int
        1 if all heads share them; then the stride of heads is 0.
    strides : tuple
        Of tokens and heads, in elements.
    """

    name: str
    column: int
    heads: int
    strides: tuple[int, int]


def last_columns(call: Call, whole: str, problem: DenseProblem) -> LastColumns:
    """The last columns of an array, by its name."""
    name = call.name(f"{whole}_rope") or whole
    shape, (token, head) = call.view(name).shape, call.strides(name, 2)
    heads = shape[1] if len(shape) == 3 else 1
    return LastColumns(name, problem.d_qk - D_ROPE if name == whole else 0, heads, (token, head if heads > 1 else 0))


def _params(config: DenseConfig, call: Call) -> PrefillParams:
    problem, options = config.problem, cast(PrefillOptions, call.options)
    q_rope, k_rope = last_columns(call, "q", problem), last_columns(call, "k", problem)
    state_out, mask = call.views.get("state_out"), call.views.get("mask")
    return PrefillParams(
        q="q",
        q_rope=q_rope.name,
        k="k",
        k_rope=k_rope.name,
        v="v",
        state_out=call.name("state_out"),
        state_lse=call.name("state_lse"),
        out="out",
        lse="lse",
        schedule="schedule" if config.scheduled else NULL,
        tiles="tiles" if config.scheduled else NULL,
        mask=call.name("mask"),
        cu_seqlens_q=call.name("cu_seqlens_q"),
        cu_seqlens_kv=call.name("cu_seqlens_kv"),
        mask_stride_bytes=call.stride("mask"),
        q_stride_s_h_elems=call.strides("q", 2),
        q_rope_stride_s_h_elems=q_rope.strides,
        k_stride_s_h_elems=call.strides("k", 2),
        k_rope_stride_s_h_elems=k_rope.strides,
        v_stride_s_h_elems=call.strides("v", 2),
        state_out_stride_s_h_elems=call.strides("state_out", 2),
        state_lse_stride_s_h_elems=call.strides("state_lse", 2),
        out_stride_s_h_elems=call.strides("out", 2),
        lse_stride_s_h_elems=call.strides("lse", 2),
        cu_seqlens_q_stride_elems=call.stride("cu_seqlens_q"),
        cu_seqlens_kv_stride_elems=call.stride("cu_seqlens_kv"),
        s_q=problem.s_q,
        s_kv=problem.s_kv,
        h_q=problem.h_q,
        h_kv=problem.h_kv,
        q_rope_column=q_rope.column,
        k_rope_column=k_rope.column,
        k_rope_heads=k_rope.heads,
        heads_at_once=config.heads_at_once,
        state_is_fp32=state_out is not None and state_out.dtype == "float32",
        out_is_fp32=call.view("out").dtype == "float32",
        mask_bytes=0 if mask is None else mask.shape[1],
        causal=options.causal,
        scale_log2=options.scale * LOG2_E,
    )


DENSE = DensePipeline()
