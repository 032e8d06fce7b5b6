"""W_UV after decode, in a separate launch: for merged results in 16 bits."""

from __future__ import annotations

from mla_cupy.arrays.view import View
from mla_cupy.dtypes import HALF
from mla_cupy.kernels.attention import projection
from mla_cupy.kernels.attention.combine_project import LATENTS
from mla_cupy.kernels.attention.projection import Build
from mla_cupy.kernels.lse import LseOptions
from mla_cupy.kernels.params import MergeProjectParams, ResultsParams, StatesAddresses
from mla_cupy.kernels.pipeline import Call, Launch, LaunchArgs
from mla_cupy.kernels.spec import HOPPER, KernelSpec, Variant, variants
from mla_cupy.runtime.device import DeviceInfo
from mla_cupy.runtime.tensormap import TensorMapSpec
from mla_cupy.shapes import D_V

TILE_TOKENS, COLUMNS = 64, 128
"""Tokens at a time, and columns, of a block of the kernel for Hopper."""
_PIECE = 64
_BYTES = 2

STATES = projection.kernel(
    "projection_states",
    "merges partial results over disjoint sets of keys, and multiplies them by W_UV",
    "projection/states.cu",
    MergeProjectParams,
    {"max_states": 256},
)
RESULTS: KernelSpec[object] = KernelSpec(
    "projection_sm90_results",
    "multiplies results of many tokens by W_UV, with WGMMA and TMA",
    "projection/sm90_results.cu",
    ResultsParams,
    HOPPER,
    variants(dtype=HALF),
    facts={"tile_tokens": TILE_TOKENS, "columns": COLUMNS},
)


def build(dtype: str, h_q: int, d_head: int, tokens: int, device: DeviceInfo) -> Build:
    """The kernel and the build for `h_q` heads of this width, and `tokens`."""
    if RESULTS.supports_arch(device.arch):
        return Build(RESULTS, Variant(dtype=dtype), device.sm_count)
    return STATES.build(dtype, h_q, d_head, tokens, device)


def project(build: Build, call: Call, *, by_query: bool = False) -> Launch:
    """Multiply decode's results in `LATENTS`; for `by_query` see `projection.sizes`."""
    if build.kernel is RESULTS:
        return _by_tiles(build, call, by_query)
    _, s_q, h_q, _ = call.view("out").shape
    params = MergeProjectParams(
        projection_addresses=projection.addresses(call),
        states_addresses=StatesAddresses(outs=LATENTS),
        projection_sizes=projection.sizes(call, build, by_query),
        outs_stride_n_b_s_h_elems=(0, (1 if by_query else s_q) * h_q * D_V, h_q * D_V, D_V),
        s_q=1 if by_query else s_q,
        lse_convention=LseOptions().convention,
    )
    return projection.launch(build, call, params)


def _by_tiles(build: Build, call: Call, by_query: bool) -> Launch:
    w_uv = call.view("w_uv")
    b, s_q, h_q, d_head = call.view("out").shape
    blocks, tiles = h_q * -(-d_head // COLUMNS), -(-b * s_q // TILE_TOKENS)
    share_tokens = TILE_TOKENS * -(-tiles // projection.token_shares(tiles, 1, blocks, build.resident))
    sizes = projection.sizes(call, build, by_query, share_tokens)
    params = ResultsParams(
        projection_addresses=projection.addresses(call),
        projection_sizes=sizes,
        s_q=1 if by_query else s_q,
    )
    maps = ((LATENTS, latents_map(w_uv.dtype, b * s_q, h_q)), ("w_uv", w_uv_map(w_uv)))
    grid = (blocks, -(-b * s_q // share_tokens), 1)
    return Launch(RESULTS, build.variant, grid, LaunchArgs(params, maps))


def w_uv_map(w_uv: View) -> TensorMapSpec:
    """W_UV as (heads, columns of a head, latents)."""
    h_q, d_head, _ = w_uv.shape
    head, column = (_BYTES * stride for stride in w_uv.strides[:2])
    return TensorMapSpec(
        w_uv.dtype,
        w_uv.ptr,
        dims=(D_V, d_head, h_q),
        strides_bytes=(column, head if h_q > 1 else column),
        box=(_PIECE, COLUMNS, 1),
    )


def latents_map(dtype: str, tokens: int, h_q: int) -> TensorMapSpec:
    """Contiguous results as (heads, tokens, latents); where they are is known at the launch."""
    return TensorMapSpec(
        dtype,
        _BYTES * D_V,
        dims=(D_V, tokens, h_q),
        strides_bytes=(_BYTES * D_V * h_q, _BYTES * D_V),
        box=(_PIECE, TILE_TOKENS, 1),
    )
