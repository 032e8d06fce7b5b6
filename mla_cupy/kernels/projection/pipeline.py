"""W_UK before attention, and W_UV after it: one launch each."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from mla_cupy.kernels import choice
from mla_cupy.kernels.attention import projection
from mla_cupy.kernels.cache import absorb, prepare
from mla_cupy.kernels.lse import LseOptions
from mla_cupy.kernels.numbers import to_log2
from mla_cupy.kernels.params import MergeProjectParams, StatesAddresses
from mla_cupy.kernels.pipeline import Call, Layout, Pipeline, Step
from mla_cupy.kernels.projection import results
from mla_cupy.kernels.projection.results import STATES
from mla_cupy.kernels.spec import KernelSpec, Variant
from mla_cupy.runtime.device import DeviceInfo

MAX_STATES = 256
"""Partial results that one call merges."""
KERNELS = (STATES, results.RESULTS)


class MergeProjectOptions(NamedTuple):
    """The arguments of `merge_project` other than arrays: as passed, then as resolved by the checks."""

    lse_base: str
    empty_lse: float
    out_dtype: str | None = None


class AbsorbOptions(NamedTuple):
    """`absorb` has arrays alone."""


@dataclass(frozen=True)
class ProjectProblem:
    """Sizes and dtype that choose a build: of heads, their width, 16-bit elements, and tokens."""

    h_q: int
    d_head: int
    dtype: str
    tokens: int


@dataclass(frozen=True)
class ProjectConfig:
    """The build for a call."""

    kernel: KernelSpec[object]
    variant: Variant
    resident: int
    """Blocks that the GPU holds at once."""


class _OneLaunch(Pipeline[ProjectConfig]):
    """Pipelines that need no memory."""

    def workspace(self, config: ProjectConfig) -> Layout:
        """See `Pipeline.workspace`: a call needs none."""
        return Layout({})


class MergeProjectPipeline(_OneLaunch):
    """The kernel of `merge_project`."""

    kernels = (STATES,)

    def configure(self, problem: ProjectProblem, device: DeviceInfo, kernel: str | None = None) -> ProjectConfig:
        """See `Pipeline.configure`."""
        choice.check_kernel(self.kernels, kernel)
        return ProjectConfig(*STATES.build(problem.dtype, problem.h_q, problem.d_head, problem.tokens, device))

    def steps(self, config: ProjectConfig, call: Call) -> list[Step]:
        """One launch, unless there is no row."""
        options: MergeProjectOptions = call.options
        outs = call.view("outs")
        n, b, s_q, _, _ = outs.shape
        if b * s_q == 0:
            return []
        build = projection.Build(config.kernel, config.variant, config.resident)
        params = MergeProjectParams(
            projection_addresses=projection.addresses(call),
            states_addresses=StatesAddresses(outs="outs", lses=call.name("lses"), lse=call.name("lse")),
            projection_sizes=projection.sizes(call, build),
            outs_stride_n_b_s_h_elems=call.strides("outs", 4),
            lses_stride_n_b_h_s_elems=call.strides("lses", 4),
            lse_stride_b_h_s_elems=call.strides("lse", 3),
            states=n,
            s_q=s_q,
            outs_are_fp32=outs.dtype == "float32",
            to_log2=to_log2(options.lse_base),
            lse_convention=LseOptions.of(options).convention,
        )
        return [projection.launch(build, call, params)]


class AbsorbPipeline(_OneLaunch):
    """The kernel of `absorb`."""

    kernels = (absorb.ABSORB,)

    def configure(self, problem: ProjectProblem, device: DeviceInfo, kernel: str | None = None) -> ProjectConfig:
        """See `Pipeline.configure`."""
        chosen: KernelSpec[Any] = choice.choose("absorption", self.kernels, problem, device, kernel)
        return ProjectConfig(chosen, *absorb.build(problem.dtype, problem.d_head, device))

    def steps(self, config: ProjectConfig, call: Call) -> list[Step]:
        """One launch, unless there is no token."""
        if call.view("q_nope").shape[0] == 0:
            return []
        rows = prepare.queries_alone(call)
        return [absorb.launch(absorb.Build(config.variant, config.resident), call, "q_nope", rows)]


MERGE_PROJECT = MergeProjectPipeline()
ABSORBING = AbsorbPipeline()
