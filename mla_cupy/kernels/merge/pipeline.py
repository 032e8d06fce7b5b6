"""Merging partial results: one launch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from mla_cupy.dtypes import HALF
from mla_cupy.kernels import choice
from mla_cupy.kernels.merge import states
from mla_cupy.kernels.numbers import from_log2, to_log2
from mla_cupy.kernels.pipeline import Call, Launch, LaunchArgs, Layout, Pipeline, Step
from mla_cupy.kernels.spec import DtypeVariant
from mla_cupy.runtime.device import DeviceInfo


class MergeOptions(NamedTuple):
    """The numbers of a call."""

    lse_base: str
    empty_lse: float


@dataclass(frozen=True)
class MergeProblem:
    """The dtype of the partial outputs."""

    outs_dtype: str


class MergePipeline(Pipeline[MergeProblem]):
    """The one kernel of `merge_states`."""

    kernels = (states.KERNEL,)

    def configure(self, problem: MergeProblem, device: DeviceInfo, kernel: str | None = None) -> MergeProblem:
        """See `Pipeline.configure`. There is nothing to choose."""
        choice.choose("merge", self.kernels, problem, device, kernel)
        return problem

    def workspace(self, config: MergeProblem) -> Layout:
        """None is needed."""
        return Layout({})

    def steps(self, config: MergeProblem, call: Call) -> list[Step]:
        """One launch, unless there is no row."""
        options: MergeOptions = call.options
        n, b, s_q, h_q, d = call.view("outs").shape
        if b * s_q * h_q == 0:
            return []
        kinds = (config.outs_dtype, call.view("out").dtype)
        values = (
            *call.strides("outs", 4),
            *call.strides("lses", 4),
            *call.strides("out", 3),
            *call.strides("lse", 3),
            *(n, b, s_q, h_q, d),
            *(kind == "float32" for kind in kinds),
            *(to_log2(options.lse_base), from_log2(options.lse_base), options.empty_lse),
        )
        record = LaunchArgs(states.KERNEL, ("outs", "lses", "out", "lse"), values)
        half = next((kind for kind in kinds if kind in HALF), HALF[0])  # where all is float32, any will do
        return [Launch(states.KERNEL, DtypeVariant(half), (b * s_q * h_q, 1, 1), record)]


MERGE = MergePipeline()
