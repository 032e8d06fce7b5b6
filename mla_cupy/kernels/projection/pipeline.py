"""W_UK before attention, and W_UV after it: one launch each."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from mla_cupy.dtypes import HALF
from mla_cupy.kernels import choice
from mla_cupy.kernels.attention import projection
from mla_cupy.kernels.attention.projection import Projection
from mla_cupy.kernels.numbers import from_log2, to_log2
from mla_cupy.kernels.params import AbsorbParams, MergeProjectParams, StatesAddresses
from mla_cupy.kernels.pipeline import Call, Launch, LaunchArgs, Layout, Pipeline, Step
from mla_cupy.kernels.spec import KernelSpec, Variant, variants
from mla_cupy.runtime.device import DeviceInfo
from mla_cupy.shapes import D_HEADS, D_V

MAX_STATES = 256
"""Partial results that one call merges."""
MAX_COLUMNS = {128: 128, max(D_HEADS): 64}
"""Rows of W_UK that the builds of `absorb` have room for, and the most columns of absorbed queries of a block."""
TILE_TOKENS = 16
"""Tokens of a product of `absorb`; shares of the tokens are multiples of it."""
LEAST_COLUMNS = 64
"""Columns of a block where there are few heads."""
_ABSORBING_BLOCKS_PER_SM = {128: 4, max(D_HEADS): 2}
_SHARE_TOKENS = 32
"""Tokens of a block below which sharing them out does not pay for reading W_UK again."""

STATES = Projection(
    ("projection_states", "projection_states_clusters"),
    "merges partial results over disjoint sets of keys, and multiplies them by W_UV",
    "projection/states.cu",
    MergeProjectParams,
    {"max_states": MAX_STATES},
)

ABSORB: KernelSpec[object] = KernelSpec(
    "projection_absorb",
    "multiplies queries by W_UK, beside the columns of RoPE",
    "projection/absorb.cu",
    AbsorbParams,
    variants=variants(dtype=HALF, max_d_nope=tuple(MAX_COLUMNS)),
    facts={"min_columns": LEAST_COLUMNS, "tile_tokens": TILE_TOKENS},
    facts_of=lambda variant: {"max_columns": MAX_COLUMNS[variant.max_d_nope]},
)
KERNELS = (*STATES.kernels, ABSORB)


class MergeProjectOptions(NamedTuple):
    """The arguments of `merge_project` beside its arrays: the caller's, then what the checks make of them."""

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
    """The build that a call takes."""

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

    kernels = STATES.kernels

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
            lse_factor=from_log2(options.lse_base),
            empty_lse=options.empty_lse,
        )
        return [projection.launch(build, call, params)]


def absorbing_parts(variant: Variant, h_q: int, resident: int) -> int:
    """Blocks for each head: as narrow as they may be while the GPU holds all at once. Bits do not depend on it."""
    parts = D_V // LEAST_COLUMNS
    return parts if h_q * parts <= resident else D_V // MAX_COLUMNS[variant.max_d_nope]


class AbsorbPipeline(_OneLaunch):
    """The kernel of `absorb`."""

    kernels = (ABSORB,)

    def configure(self, problem: ProjectProblem, device: DeviceInfo, kernel: str | None = None) -> ProjectConfig:
        """See `Pipeline.configure`; the narrowest build that holds a head."""
        chosen: KernelSpec[Any] = choice.choose("absorption", self.kernels, problem, device, kernel)
        rows = next(rows for rows in MAX_COLUMNS if problem.d_head <= rows)
        resident = _ABSORBING_BLOCKS_PER_SM[rows] * device.sm_count
        return ProjectConfig(chosen, Variant(dtype=problem.dtype, max_d_nope=rows), resident)

    def steps(self, config: ProjectConfig, call: Call) -> list[Step]:
        """One launch, unless there is no token."""
        t, h_q, d_nope = call.view("q_nope").shape
        if t == 0:
            return []
        parts = absorbing_parts(config.variant, h_q, config.resident)
        shares = projection.token_shares(t, _SHARE_TOKENS, h_q * parts, config.resident)
        tiles = -(-t // TILE_TOKENS)
        share_tokens = TILE_TOKENS * -(-tiles // shares)
        shares = -(-t // share_tokens)
        params = AbsorbParams(
            q_nope="q_nope",
            w_uk="w_uk",
            q_rope=call.name("q_rope"),
            out="out",
            q_nope_stride_t_h_elems=call.strides("q_nope", 2),
            w_uk_stride_h_d_elems=call.strides("w_uk", 2),
            q_rope_stride_t_h_elems=call.strides("q_rope", 2),
            out_stride_t_h_elems=call.strides("out", 2),
            t=t,
            d_nope=d_nope,
            parts_log2=parts.bit_length() - 1,
            share_tokens=share_tokens,
        )
        return [Launch(config.kernel, config.variant, (h_q * parts, shares, 1), LaunchArgs(params))]


MERGE_PROJECT = MergeProjectPipeline()
ABSORBING = AbsorbPipeline()
