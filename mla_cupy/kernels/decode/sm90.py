"""What the launchers of Hopper's decode kernels share: one block layout, `attention/decode_block_sm90.cuh`."""

from __future__ import annotations

from mla_cupy.launchers import decode_problem
from mla_cupy.launchers.decode_problem import DecodeGeometry, DecodeProblem
from mla_cupy.runtime.device import DeviceInfo
from mla_cupy.runtime.tensormap import TensorMapSpec

BLOCK_M = 64
PANEL_COLUMNS = 64
TILE_TOKENS = 64


def unsupported(problem: DecodeProblem, device: DeviceInfo) -> str:
    """Why the kernel cannot take the problem; empty if it can."""
    if device.arch != "sm_90a":
        return f"needs compute capability 9.0, {device.name} has {device.cc[0]}.{device.cc[1]}"
    if not problem.aligned:
        return "needs q and kv_cache to start at, and step by, multiples of 16 bytes"
    return ""


def geometry(problem: DecodeProblem, device: DeviceInfo) -> DecodeGeometry:
    """A block fills an SM."""
    return decode_problem.cut(problem.rows, BLOCK_M, device.sm_count, problem.h_kv)


def kv_map(
    dtype: str, base: int, page_size: int, h_kv: int, num_pages: int, page: int, token: int, head: int
) -> TensorMapSpec:
    """The cache as (pages, heads, tokens, 576), fetched in boxes of 64 columns and gcd(page_size, 64) tokens.

    `page`, `token` and `head` are strides in elements. Those of dimensions of size 1 mean nothing, and may be what
    the driver refuses: they are replaced.
    """
    row_bytes = 2 * decode_problem.HEAD_DIM_QK
    token_bytes = 2 * token if page_size > 1 else row_bytes
    head_bytes = 2 * head if h_kv > 1 else row_bytes
    page_bytes = 2 * page if num_pages > 1 else row_bytes
    box_tokens = min(TILE_TOKENS, page_size & -page_size)
    return TensorMapSpec(
        dtype,
        base,
        dims=(decode_problem.HEAD_DIM_QK, page_size, h_kv, num_pages),
        strides_bytes=(token_bytes, head_bytes, page_bytes),
        box=(PANEL_COLUMNS, box_tokens, 1, 1),
    )
