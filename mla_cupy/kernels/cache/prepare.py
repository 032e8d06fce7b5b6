"""Pipeline of `mla_prepare`: one launch for queries and keys, with W_UK or without."""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

from mla_cupy.cache_formats import FORMATS
from mla_cupy.dtypes import TABLE
from mla_cupy.kernels.attention import record_layout
from mla_cupy.kernels.cache import absorb, table
from mla_cupy.kernels.cache.pipeline import CacheConfig, CachePipeline, rotation_members, token_members
from mla_cupy.kernels.params import CachePrepareParams
from mla_cupy.kernels.pipeline import Call, Launch, LaunchArgs, Step
from mla_cupy.kernels.spec import Variant
from mla_cupy.shapes import D_ROPE

LANE_COLUMNS = 64
"""Columns of queries for which a lane has eight."""


class MlaPrepareOptions(NamedTuple):
    """A call's arguments other than arrays: as passed, then as resolved by the checks."""

    theta: float | None
    interleaved: bool
    quantise: bool
    q_scale: float | None
    return_rope: bool
    kv_format: str | None
    scales: str | None
    kv_scale: float


@functools.lru_cache(maxsize=16)
def frequencies(theta: float | None) -> tuple[int, ...]:
    """Turns of each pair per token, in units of 2^-64; zeros without a base."""
    if theta is None:
        return (0,) * (D_ROPE // 2)
    return tuple(round(theta ** (-2 * i / D_ROPE) / (2 * math.pi) * 2.0**64) for i in range(D_ROPE // 2))


_no_frequencies: Any = frequencies(None)


class MlaPreparePipeline(CachePipeline):
    """The kernel of `mla_prepare`."""

    name = "preparation before decode"
    kernels = (table.PREPARE, absorb.ABSORB)

    def steps(self, config: CacheConfig, call: Call) -> list[Step]:
        """One launch, unless there is no token."""
        options: MlaPrepareOptions = call.options
        n, h, d = call.view("q").shape
        own_rope = call.views["q_rope"] is None
        w_uk = call.views["w_uk"]
        has_tokens = call.views["cache"] is not None or call.views["rope_out"] is not None
        token_blocks = -(-n // table.PREPARED_PER_BLOCK) if has_tokens else 0
        turns: Any = frequencies(options.theta)  # one per element of the struct's array
        params = CachePrepareParams(
            q="q",
            q_rope=call.name("q_rope"),
            out="out",
            q_scales=call.name("q_scales"),
            rope_out=call.name("rope_out"),
            latent=call.name("latent"),
            rope=call.name("rope"),
            cache=call.name("cache"),
            slots=call.name("slots"),
            frequencies=turns,
            q_stride_n_h_bytes=_row_bytes(call, "q"),
            q_rope_stride_n_h_bytes=_row_bytes(call, "q_rope"),
            out_stride_n_h_bytes=_row_bytes(call, "out"),
            q_scales_stride_n_h_elems=call.strides("q_scales", 2),
            rope_out_stride_bytes=_row_bytes(call, "rope_out")[0],
            h=h,
            pieces=d // LANE_COLUMNS - own_rope,
            token_blocks=token_blocks,
            own_scale=options.q_scale is None,
            q_scale=1.0 if options.q_scale is None else options.q_scale,
            **rotation_members(call, options.interleaved),
            **token_members(call, n, options.scales),
            **_record_members(call, options),
        )
        if w_uk is not None and n:
            build = absorb.build(w_uk.dtype, w_uk.shape[1], config.device)
            return [absorb.launch(build, call, "q", params)]
        blocks = token_blocks + -(-n * h // table.QUERY_ROWS_PER_BLOCK)
        variant = Variant(codes=int(options.quantise))
        return [Launch(table.PREPARE, variant, (blocks, 1, 1), LaunchArgs(params))] if blocks else []


def _row_bytes(call: Call, name: str) -> tuple[int, int]:
    view = call.views[name]
    nbytes = 0 if view is None else TABLE[view.dtype].nbytes
    return call.stride(name, 0) * nbytes, call.stride(name, 1) * nbytes


def queries_alone(call: Call) -> CachePrepareParams:
    """The members of a call without tokens or angles; `q_rope` is the queries' RoPE part, if there is one."""
    n, h, _ = call.view("out").shape
    return CachePrepareParams(
        q=call.name("q_rope"),
        q_rope=call.name("q_rope"),
        out="out",
        frequencies=_no_frequencies,
        q_stride_n_h_bytes=(0, 0),
        q_rope_stride_n_h_bytes=_row_bytes(call, "q_rope"),
        out_stride_n_h_bytes=_row_bytes(call, "out"),
        n=n,
        h=h,
    )


def _record_members(call: Call, options: MlaPrepareOptions) -> Any:
    """Members about the record; without a cache, of a RoPE part alone that stays as it is."""
    cache = call.views["cache"]
    if cache is not None:
        assert options.kv_format is not None
        kept = FORMATS[options.kv_format]
        page, token = record_layout.page_and_token_bytes(kept, cache)
        members = record_layout.members(kept, cache.shape[1], token, options.kv_scale)
        sizes = {"num_pages": cache.shape[0], "page_size": cache.shape[1]}
        return {**members, **sizes, "page_stride_bytes": page, "token_stride_bytes": token}
    kind = record_layout.KINDS[call.view("q").dtype]
    rope_chunks = 0 if call.views["rope"] is None else D_ROPE // record_layout.CHUNK
    return {"kind": kind, "rope_kind": kind, "rope_chunks": rope_chunks, "group_chunks": 1}


MLA_PREPARE = MlaPreparePipeline()
