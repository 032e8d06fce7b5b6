"""Host side of `attention/projection.cuh`: W_UV after attention, in decode's combine or for the caller's results."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from mla_cupy.dtypes import HALF
from mla_cupy.kernels.attention.heuristics import (
    LEAST_ROWS_APART,
    LEAST_WIDE_ROWS_APART,
    PROJECTION_BLOCKS_PER_SM,
)
from mla_cupy.kernels.param_layout import Params
from mla_cupy.kernels.params import ProjectionAddresses, ProjectionSizes
from mla_cupy.kernels.pipeline import Call, Launch, LaunchArgs
from mla_cupy.kernels.spec import BLACKWELL, HOPPER, KernelSpec, Variant, variants
from mla_cupy.runtime.device import DeviceInfo

_CLUSTERS = (*HOPPER, *BLACKWELL)
"""Targets with clusters, and with room for two blocks per SM."""
_COLUMNS = {False: 32, True: 64}
"""The most columns of a block, alone or in a cluster."""
SHARES = 2, 4, 8
"""Blocks of a cluster, which share the merge of a head."""


LEAST_TOKENS = 8
"""Least tokens of a block, if there are enough: a warp merges one at a time."""


class Build(NamedTuple):
    """Kernel and variant of a call."""

    kernel: KernelSpec[object]
    variant: Variant
    resident: int
    """Blocks that the GPU holds at once."""


@dataclass(frozen=True)
class ProjectionKernel(KernelSpec[object]):
    """A kernel that projects: blocks alone, or in clusters on GPUs that have them."""

    def build(self, dtype: str, h_q: int, d_head: int, tokens: int, device: DeviceInfo) -> Build:
        """The build for `h_q` heads of this width, and `tokens`. Bits do not depend on it."""
        blocks = share(h_q, d_head, tokens, device) if device.arch in _CLUSTERS else 1
        return Build(self, Variant(dtype=dtype, share=blocks), PROJECTION_BLOCKS_PER_SM * device.sm_count)


def kernel(name: str, about: str, source: str, params: type[Params], facts: Mapping[str, int]) -> ProjectionKernel:
    """A kernel with a build for each number of blocks that share the merge of a head."""
    return ProjectionKernel(
        name,
        about,
        source,
        params,
        variants=variants(dtype=HALF, share=(1, *SHARES)),
        runs_on=lambda variant, arch: (variant.share > 1) == (arch in _CLUSTERS),
        facts=facts,
        facts_of=lambda variant: {"cluster": variant.share, "columns": _COLUMNS[variant.share > 1]},
    )


def share(h_q: int, d_head: int, tokens: int, device: DeviceInfo) -> int:
    """Blocks of a cluster: at least enough for a head's columns, and otherwise the most that the GPU holds at once for
    all heads and shares of the tokens. Clusters of eight may not fill the GPU: a group of multiprocessors may have no
    room for a last cluster, which would then run alone, after all others.
    """
    least = [blocks for blocks in SHARES if d_head <= blocks * _COLUMNS[True]]
    resident = PROJECTION_BLOCKS_PER_SM * device.sm_count
    shares = token_shares(tokens, LEAST_TOKENS, h_q * least[0], resident)
    fits = (blocks for blocks in least if h_q * shares * blocks <= resident * (0.8 if blocks == 8 else 1))
    return max(fits, default=least[0])


def is_apart(h_q: int, d_head: int, tokens: int) -> bool:
    """True if W_UV is faster in a separate launch, after the combine: see `LEAST_ROWS_APART`."""
    return h_q * tokens >= (LEAST_ROWS_APART if d_head <= 128 else LEAST_WIDE_ROWS_APART)


def token_shares(tokens: int, least: int, blocks: int, resident: int) -> int:
    """Shares of the tokens, each with its own blocks: all that are resident at once, of at least `least` tokens."""
    return max(1, min(-(-tokens // least), resident // blocks))


def parts(variant: Variant, d_head: int) -> int:
    """Blocks for each head."""
    return int(variant.share) if variant.share > 1 else -(-d_head // _COLUMNS[False])


def addresses(call: Call) -> ProjectionAddresses:
    """The weights, and the result."""
    return ProjectionAddresses(w_uv="w_uv", gate=call.name("gate"), projected=call.name("out"))


def share_tokens(call: Call, build: Build) -> int:
    """Tokens of a block, of the shares that `token_shares` finds."""
    h_q, d_head, _ = call.view("w_uv").shape
    b, s_q, _, _ = call.view("out").shape
    shares = token_shares(b * s_q, LEAST_TOKENS, h_q * parts(build.variant, d_head), build.resident)
    return -(-b * s_q // shares)


def sizes(call: Call, build: Build, by_query: bool = False, tokens_of_block: int = 0) -> ProjectionSizes:
    """Sizes and strides of the arrays at the addresses.

    With `by_query` the kernel treats the axes b and s_q, which step evenly, as one. `tokens_of_block` defaults to the
    result of `share_tokens`.
    """
    d_head, (b, s_q, _, _) = call.view("w_uv").shape[1], call.view("out").shape

    def strides(name: str) -> tuple[int, int, int]:
        if by_query:
            return call.stride(name, 1 if s_q > 1 else 0), 0, call.stride(name, 2)
        return call.strides(name, 3)

    return ProjectionSizes(
        w_uv_stride_h_d_elems=call.strides("w_uv", 2),
        gate_stride_b_s_h_elems=strides("gate"),
        projected_stride_b_s_h_elems=strides("out"),
        tokens=b * s_q,
        d_head=d_head,
        share_tokens=tokens_of_block or share_tokens(call, build),
        projected_is_fp32=call.view("out").dtype == "float32",
    )


def launch(build: Build, call: Call, params: Params) -> Launch:
    """One launch over all heads."""
    h_q, d_head, _ = call.view("w_uv").shape
    b, s_q, _, _ = call.view("out").shape
    blocks, shares = h_q * parts(build.variant, d_head), -(-b * s_q // share_tokens(call, build))
    return Launch(build.kernel, build.variant, (blocks, shares, 1), LaunchArgs(params))
