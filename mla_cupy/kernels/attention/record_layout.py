"""A record as the kernels take it: the members that `MLA_RECORD_LAYOUT` of `attention/record.cuh` reads."""

from __future__ import annotations

from mla_cupy.arrays.view import View
from mla_cupy.cache_formats import CacheFormat
from mla_cupy.dtypes import TABLE

CHUNK = 16
"""Elements that a lane holds."""
KINDS = {"bfloat16": 0, "float16": 1, "float32": 2, "float8_e4m3fn": 3}
"""`ElementKind`."""
_NO_SCALE, _SCALE_OF_TENSOR, _SCALE_FLOAT32, _SCALE_E8M0 = range(4)

MEMBERS = {
    "kind": "i4",
    "rope_kind": "i4",
    "latent_chunks": "i4",
    "rope_chunks": "i4",
    "group_chunks": "i4",
    "scale_kind": "i4",
    "rope_offset": "i4",
    "scales_offset": "i4",
    "scales_stride": "i4",
    "kv_scale": "f4",
}
"""The fields of a layout in a parameter record."""


def page_and_token_bytes(record: CacheFormat, cache: View) -> tuple[int, int]:
    """From one page to the next, and from one token to the next within a plane."""
    itemsize = TABLE[cache.dtype].nbytes
    token = record.planes[0] if len(record.planes) > 1 else cache.strides[1] * itemsize
    return cache.strides[0] * itemsize, token


def values(record: CacheFormat, page_size: int, token_bytes: int, kv_scale: float) -> tuple[float, ...]:
    """The values of MEMBERS."""
    latent = record.field("latent")
    scale_kind, scales_offset, scales_stride = _NO_SCALE, 0, 0
    if record.group:
        scales = record.field("scales")
        scale_kind = _SCALE_FLOAT32 if scales.kind == "float32" else _SCALE_E8M0
        scales_offset = record.offset(scales, page_size, 0)
        scales_stride = record.planes[scales.plane] if len(record.planes) > 1 else token_bytes
    elif latent.kind == "float8_e4m3fn":
        scale_kind = _SCALE_OF_TENSOR
    rope = record.field("rope") if record.d_rope else latent
    return (
        *(KINDS[latent.kind], KINDS[rope.kind]),
        *(record.d_latent // CHUNK, record.d_rope // CHUNK, max(1, record.group // CHUNK)),
        *(scale_kind, rope.offset, scales_offset, scales_stride, kv_scale),
    )
