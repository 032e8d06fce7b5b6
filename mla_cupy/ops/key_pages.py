"""What the operations on pages of index keys have in common: the record, and where pages may lie."""

from __future__ import annotations

from mla_cupy.arrays.view import View
from mla_cupy.errors import ShapeError, explain
from mla_cupy.kernels.indexer.logits.problem import HEAD_DIMS
from mla_cupy.shapes import MAX_INT32

SCALE_BYTES = 4
"""Bytes of a record's scale: after the codes of a page come its scales, float32."""
CACHE = "num_pages page_size 1? d+4"
"""The axes of a cache of index keys."""
SIZES = {"d": HEAD_DIMS, "d+4": tuple(d + SCALE_BYTES for d in HEAD_DIMS)}
_PAGE_ALIGNMENT = 16


def check_pages(cache: View, d: int) -> None:
    """Check that the cache holds keys of d codes, in contiguous pages at multiples of 16 bytes.

    Raises
    ------
    ShapeError
    """
    record = d + SCALE_BYTES
    if cache.shape[2] != record:
        raise ShapeError(explain("cache.shape[-1]", cache.shape[2], f"{record} bytes: d = {d} codes and a float32"))
    num_pages, page_size = cache.shape[:2]
    if 0 in cache.shape:
        return
    if num_pages > MAX_INT32 or page_size > MAX_INT32:
        raise ShapeError(explain("cache.shape", cache.shape, f"at most {MAX_INT32} pages, and tokens of a page"))
    if cache.strides[2] != 1 or (page_size > 1 and cache.strides[1] != record):
        remedy = "only whole pages may lie apart"
        raise ShapeError(explain("cache.strides", cache.strides, f"contiguous pages: (any, {record}, 1)", remedy))
    if cache.ptr % _PAGE_ALIGNMENT or (num_pages > 1 and (cache.strides[0] % _PAGE_ALIGNMENT or cache.strides[0] < 0)):
        got = f"{cache.strides} from {cache.ptr:#x}"
        raise ShapeError(explain("cache.strides", got, f"pages at multiples of {_PAGE_ALIGNMENT} bytes"))
