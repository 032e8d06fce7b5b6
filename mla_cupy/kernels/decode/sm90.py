"""What Hopper's decode kernels share on the host: `attention/sm90/block.cuh`."""

from __future__ import annotations

from mla_cupy.arrays.view import View
from mla_cupy.dtypes import TABLE
from mla_cupy.kernels.attention.kernel import READS_ROWS
from mla_cupy.kernels.decode.problem import DecodeProblem
from mla_cupy.kernels.spec import HOPPER, Reason, needs_alignment, needs_cc
from mla_cupy.runtime.device import DeviceInfo
from mla_cupy.runtime.tensormap import TensorMapSpec
from mla_cupy.shapes import TILE_TOKENS

BLOCK_M = 64
BOX_COLUMNS = 64
"""Columns of one TMA box: 128 bytes, the span of the swizzle."""


def unsupported(problem: DecodeProblem, device: DeviceInfo) -> Reason | None:
    """Why the kernel cannot take the problem; None if it can."""
    if device.arch not in HOPPER:
        return needs_cc(device, "9.0")
    if problem.record:
        return READS_ROWS
    return None if problem.aligned else needs_alignment("q and kv_cache")


def kv_map(kv_cache: View, l2: str = "128B") -> TensorMapSpec:
    """The cache as (pages, heads, tokens, d_qk), fetched in boxes of 64 columns and gcd(page_size, 64) tokens.

    `l2` is the promotion of the fetches, which pays or costs with what binds the kernel.

    Strides of dimensions of size 1 mean nothing, and may be what the driver refuses: they are replaced.
    """
    num_pages, page_size, h_kv, d_qk = kv_cache.shape
    page, token, head, _ = kv_cache.strides
    nbytes = TABLE[kv_cache.dtype].nbytes
    row_bytes = nbytes * d_qk
    return TensorMapSpec(
        kv_cache.dtype,
        kv_cache.ptr,
        dims=(d_qk, page_size, h_kv, num_pages),
        strides_bytes=(
            nbytes * token if page_size > 1 else row_bytes,
            nbytes * head if h_kv > 1 else row_bytes,
            nbytes * page if num_pages > 1 else row_bytes,
        ),
        box=(BOX_COLUMNS, min(TILE_TOKENS, page_size & -page_size), 1, 1),
        l2=l2,
    )
