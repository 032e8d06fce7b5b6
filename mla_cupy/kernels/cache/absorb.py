"""Host side of `cache/absorb.cu`: W_UK before decode, with RoPE and tokens of the cache in the same launch."""

from __future__ import annotations

from typing import Any, NamedTuple

from mla_cupy.dtypes import HALF
from mla_cupy.kernels.attention.projection import token_shares
from mla_cupy.kernels.params import AbsorbAddresses, AbsorbParams, AbsorbSizes, CachePrepareParams
from mla_cupy.kernels.pipeline import Call, Launch, LaunchArgs
from mla_cupy.kernels.spec import KernelSpec, Variant, variants
from mla_cupy.runtime.device import DeviceInfo
from mla_cupy.shapes import D_HEADS, D_V

MAX_COLUMNS = {128: 128, 192: 128, max(D_HEADS): 64}
"""Rows of W_UK that the builds have room for, and the most columns of absorbed queries of a block."""
TILE_TOKENS = 16
"""Tokens of a product; shares of the tokens are multiples of it."""
LEAST_COLUMNS = 64
"""Columns of a block where there are few heads."""
_BLOCKS_PER_SM = {128: 4, 192: 2, max(D_HEADS): 2}
_SHARE_TOKENS = 32
"""Tokens of a block below which sharing them out does not pay for reading W_UK again."""

ABSORB: KernelSpec[Any] = KernelSpec(
    "cache_absorb",
    "multiplies queries by W_UK, beside the columns of RoPE, and writes tokens to a paged cache",
    "cache/absorb.cu",
    AbsorbParams,
    variants=variants(dtype=HALF, max_d_nope=tuple(MAX_COLUMNS)),
    facts={"min_columns": LEAST_COLUMNS, "tile_tokens": TILE_TOKENS},
    facts_of=lambda variant: {"max_columns": MAX_COLUMNS[variant.max_d_nope]},
)


class Build(NamedTuple):
    """The build of a call."""

    variant: Variant
    resident: int
    """Blocks that the GPU holds at once."""


def build(dtype: str, d_nope: int, device: DeviceInfo) -> Build:
    """The narrowest build that holds a head."""
    rows = next(rows for rows in MAX_COLUMNS if d_nope <= rows)
    return Build(Variant(dtype=dtype, max_d_nope=rows), _BLOCKS_PER_SM[rows] * device.sm_count)


def parts(build: Build, h_q: int) -> int:
    """Blocks for each head: as narrow as they may be while the GPU holds all at once. Bits do not depend on it."""
    most = D_V // LEAST_COLUMNS
    return most if h_q * most <= build.resident else D_V // MAX_COLUMNS[build.variant.max_d_nope]


def launch(build: Build, call: Call, q_nope: str, tokens: CachePrepareParams) -> Launch:
    """One launch for all heads of the named queries, and for `tokens`, which have the queries' RoPE part as well."""
    t, h_q, width = call.view("out").shape
    of_head = parts(build, h_q)
    shares = token_shares(t, _SHARE_TOKENS, h_q * of_head, build.resident)
    tiles = -(-t // TILE_TOKENS)
    share_tokens = TILE_TOKENS * -(-tiles // shares)
    params = AbsorbParams(
        absorb_addresses=AbsorbAddresses(q_nope=q_nope, w_uk="w_uk", absorbed="out"),
        cache_prepare_params=tokens,
        absorb_sizes=AbsorbSizes(
            q_nope_stride_t_h_elems=call.strides(q_nope, 2),
            w_uk_stride_h_d_elems=call.strides("w_uk", 2),
            absorbed_stride_t_h_elems=call.strides("out", 2),
            t=t,
            d_nope=call.view("w_uk").shape[1],
            parts_log2=of_head.bit_length() - 1,
            share_tokens=share_tokens,
        ),
        has_rope=width > D_V,
    )
    blocks: Any = tokens
    return Launch(
        ABSORB, build.variant, (blocks.token_blocks + h_q * of_head, -(-t // share_tokens), 1), LaunchArgs(params)
    )
