"""Merging partial results: one launch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from mla_cupy.dtypes import HALF
from mla_cupy.kernels import choice
from mla_cupy.kernels.lse import LseOptions
from mla_cupy.kernels.numbers import to_log2
from mla_cupy.kernels.params import MergeStatesParams
from mla_cupy.kernels.pipeline import Call, Launch, LaunchArgs, Layout, Pipeline, Step
from mla_cupy.kernels.spec import DTYPE_VARIANTS, KernelSpec, Variant
from mla_cupy.runtime.device import DeviceInfo
from mla_cupy.shapes import MAX_INT32

THREADS, LANE_COLUMNS = 128, 8
"""Threads of a block, and columns of a row that one has."""

KERNEL: KernelSpec[object] = KernelSpec(
    "merge_states",
    "merges partial results over disjoint sets of keys",
    "merge/states.cu",
    MergeStatesParams,
    variants=DTYPE_VARIANTS,
    core=DTYPE_VARIANTS,
    facts={"threads": THREADS, "lane_columns": LANE_COLUMNS},
)


class MergeOptions(NamedTuple):
    """A call's arguments other than arrays: as passed, then as resolved by the checks."""

    lse_base: str
    empty_lse: float
    out_dtype: str | None = None


@dataclass(frozen=True)
class MergeProblem:
    """The dtype of the partial outputs."""

    outs_dtype: str


class MergePipeline(Pipeline[MergeProblem]):
    """The one kernel of `merge_states`."""

    kernels = (KERNEL,)

    def configure(self, problem: MergeProblem, device: DeviceInfo, kernel: str | None = None) -> MergeProblem:
        """See `Pipeline.configure`. There is nothing to choose."""
        choice.choose("merge", self.kernels, problem, device, kernel)
        return problem

    def workspace(self, config: MergeProblem) -> Layout:
        """See `Pipeline.workspace`: a call needs none."""
        return Layout({})

    def steps(self, config: MergeProblem, call: Call) -> list[Step]:
        """One launch, unless there is no row."""
        options: MergeOptions = call.options
        n, b, s_q, h_q, d = call.view("outs").shape
        if b * s_q * h_q == 0:
            return []
        kinds = (config.outs_dtype, call.view("out").dtype)
        rows, lanes = b * s_q * h_q, row_lanes(d)
        # More rows than a launch supports give too many blocks, so the launch is refused.
        blocks = rows if rows > MAX_INT32 else -(-min(rows, MAX_INT32) // (THREADS // lanes))
        params = MergeStatesParams(
            outs="outs",
            lses="lses",
            out="out",
            lse="lse",
            outs_stride_n_b_s_h_elems=call.strides("outs", 4),
            lses_stride_n_b_h_s_elems=call.strides("lses", 4),
            out_stride_b_s_h_elems=call.strides("out", 3),
            lse_stride_b_h_s_elems=call.strides("lse", 3),
            n=n,
            b=b,
            s_q=s_q,
            h_q=h_q,
            d=d,
            row_lanes=lanes,
            outs_are_fp32=config.outs_dtype == "float32",
            out_is_fp32=call.view("out").dtype == "float32",
            to_log2=to_log2(options.lse_base),
            lse_convention=LseOptions.of(options).convention,
        )
        half = next((kind for kind in kinds if kind in HALF), HALF[0])  # where all is float32, any will do
        return [Launch(KERNEL, Variant(dtype=half), (blocks, 1, 1), LaunchArgs(params))]


def row_lanes(d: int) -> int:
    """Threads of a row: a power of two, enough for all its columns unless they exceed a block."""
    lanes = 1
    while lanes < THREADS and lanes * LANE_COLUMNS < d:
        lanes *= 2
    return lanes


MERGE = MergePipeline()
