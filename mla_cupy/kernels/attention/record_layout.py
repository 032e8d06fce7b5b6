"""A record in the kernels' form: the members that `MLA_RECORD_LAYOUT` of `attention/record.cuh` reads."""

from __future__ import annotations

from typing import TypedDict

from mla_cupy.arrays.view import View
from mla_cupy.cache_formats import CacheFormat
from mla_cupy.dtypes import TABLE

CHUNK = 16
"""Elements that a lane holds."""
KINDS = {"bfloat16": 0, "float16": 1, "float32": 2, "float8_e4m3fn": 3, "float4_e2m1fn": 4}
"""`ElementKind`."""
_NO_SCALE, _SCALE_OF_TENSOR = 0, 1
_SCALES = {"float32": 2, "float8_e8m0fnu": 3, "float8_e4m3fn": 4}


class RecordMembers(TypedDict):
    """The members of a parameter struct that describe a token's record."""

    kind: int
    rope_kind: int
    latent_chunks: int
    rope_chunks: int
    group_chunks: int
    scale_kind: int
    rope_offset: int
    scales_offset: int
    scales_stride: int
    kv_scale: float


def page_and_token_bytes(record: CacheFormat, cache: View) -> tuple[int, int]:
    """Bytes from one page to the next, and from one token to the next within a plane."""
    itemsize = TABLE[cache.dtype].nbytes
    token = record.planes[0] if len(record.planes) > 1 else cache.strides[1] * itemsize
    return cache.strides[0] * itemsize, token


def members(record: CacheFormat, page_size: int, token_bytes: int, kv_scale: float) -> RecordMembers:
    """Describe the record of a cache with pages of `page_size` tokens, `token_bytes` apart."""
    latent = record.field("latent")
    scale_kind, scales_offset, scales_stride = _NO_SCALE, 0, 0
    if record.group:
        scales = record.field("scales")
        scale_kind = _SCALES[scales.kind]
        scales_offset = record.offset(scales, page_size, 0)
        scales_stride = record.planes[scales.plane] if len(record.planes) > 1 else token_bytes
    elif latent.is_code:
        scale_kind = _SCALE_OF_TENSOR
    rope = record.field("rope") if record.d_rope else latent
    return {
        "kind": KINDS[latent.kind],
        "rope_kind": KINDS[rope.kind],
        "latent_chunks": record.d_latent // CHUNK,
        "rope_chunks": record.d_rope // CHUNK,
        "group_chunks": max(1, record.group // CHUNK),
        "scale_kind": scale_kind,
        "rope_offset": rope.offset,
        "scales_offset": scales_offset,
        "scales_stride": scales_stride,
        "kv_scale": kv_scale,
    }
