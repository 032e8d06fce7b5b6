"""Scores of the lightning indexer for the next tokens of sequences with paged index keys."""

from __future__ import annotations

from typing import Any

from mla_cupy.arrays.view import View
from mla_cupy.errors import ShapeError, explain
from mla_cupy.kernels.indexer.logits import LOGITS_PAGED
from mla_cupy.kernels.indexer.logits.problem import CODES, LogitsProblem, PagedLogitsOptions
from mla_cupy.ops.call import call
from mla_cupy.ops.checks import check_flag
from mla_cupy.ops.indexer.key_cache import CACHE, SIZES, check_pages, holds_e2m1
from mla_cupy.ops.indexer.logits import (
    MIN_SIZES,
    check_sizes,
    kernel_dtype,
    out_dtypes,
)
from mla_cupy.ops.operation import Examined, Input, Operation, Output, Views, present
from mla_cupy.ops.schema import steps_by_16_bytes


def indexer_logits_paged(
    q: Any,
    cache: Any,
    weights: Any,
    seqlens: Any,
    block_table: Any,
    *,
    clean: bool = True,
    logits: Any = None,
    workspace: Any = None,
    out_dtype: Any = None,
    kernel: str | None = None,
    stream: Any = None,
) -> Any:
    """Score the cached index keys of each sequence for its next tokens.

    logits[n, i, s] = scale[s] * sum_h weights[n, i, h] * max(q[n, i, h] . key[s], 0) for s < length(n, i)

    Parameters
    ----------
    q : array, (b, s_q, h, d), float8_e4m3fn or uint8
        e4m3 codes of 1 to 128 heads, d 32, 64 or 128, of up to 8 next tokens (more tokens use a slow kernel). Strides
        as for `indexer_logits`.
    cache : array, (num_pages, page_size, d + 4), uint8
        Pages of keys: each page has the codes of all its keys, then their float32 scales. A page is contiguous; pages
        are multiples of 16 bytes apart. An axis of size 1 may stand on either side of the keys, as for `mla_decode`.
        Pages of 64 keys of d = 128 are fast. Keys of 128 elements may use 68 bytes: 64 bytes of e2m1, the first of two
        elements in the lower half of a byte, then, after the codes of all keys, four exponents of scales (ue8m0), one
        per 32 elements.
    weights : array, (b, s_q, h), float32
        As for `indexer_logits`.
    seqlens : array, (b,) or (b, s_q), int32
        Number of keys that each token sees. With one number n per sequence, token i sees n - s_q + 1 + i keys. Each
        token's number is then clamped to [0, max_pages * page_size].
    block_table : array, (b, max_pages), int32
        The pages of each sequence. Entries that no token needs are not read; logits of pages outside the cache are 0.
    clean : bool
        Write -inf for keys that a token does not see. Otherwise the memory of these logits is left unchanged.
    logits : array, (b, s_q, max_pages * page_size), float32 or bfloat16, optional
        Memory for the result; the last axis is contiguous.
    workspace, out_dtype, kernel, stream : optional
        As for `indexer_logits`.

    Returns
    -------
    array, (b, s_q, max_pages * page_size)
        Array of the caller's library.

    Raises
    ------
    ShapeError, DTypeError, DeviceError, ArgumentError
        If an argument does not fit; nothing has been launched, and `logits` is untouched.
    UnsupportedDeviceError
        If no kernel fits the GPU.

    Notes
    -----
    NaN, determinism, the precision of e4m3 sums, and the NumPy backend: as for `indexer_logits`. Source: DeepGEMM's
    fp8_paged_mqa_logits. DeepSeek-V3.2-Exp and vLLM use the same page format; the format with 68 bytes is DeepGEMM's
    for its FP4 logits, for DeepSeek-V4.

    Keys in e2m1 become e4m3 with one scale, which is exact where the scales of a key are at most 2**14 apart; elements
    with a smaller scale become zeros (the CUDA-core fallback has no such limit). They run on the mma.sync kernel, also
    on Hopper, or on the fallback.

    Examples
    --------
    >>> import numpy as np, mla_cupy
    >>> one = 0x38  # 1.0 in e4m3
    >>> page = np.concatenate([np.full(2 * 32, one, np.uint8), np.full(2, 0.5, np.float32).view(np.uint8)])
    >>> q, weights = np.full((1, 1, 1, 32), one, np.uint8), np.ones((1, 1, 1), np.float32)
    >>> seqlens, table = np.array([3], np.int32), np.zeros((1, 2), np.int32)
    >>> mla_cupy.indexer_logits_paged(q, page.reshape(1, 2, 36), weights, seqlens, table)
    array([[[ 16.,  16.,  16., -inf]]], dtype=float32)
    """
    return call(indexer_logits_paged, locals())


def _examine(views: Views, given: PagedLogitsOptions) -> Examined:
    q, cache, table = (present(views, name) for name in ("q", "cache", "block_table"))
    b, s_q, heads, d = q.shape
    page_size, keys = cache.shape[1], table.shape[1] * cache.shape[1]
    check_sizes(heads=heads, num_pages=cache.shape[0], keys_per_sequence=keys, tokens=b * s_q)
    check_pages(cache, d)
    in_e2m1 = holds_e2m1(cache, d)
    _check_lengths(present(views, "seqlens"), s_q)
    problem = LogitsProblem(
        b * s_q,
        keys,
        heads,
        d,
        kernel_dtype(q.dtype),
        block_tokens=max(1, s_q),
        page_size=page_size,
        num_pages=cache.shape[0],
        aligned=steps_by_16_bytes(q),
        e2m1=in_e2m1,
    )
    return Examined(problem, given._replace(clean=check_flag("clean", given.clean)))


def _check_lengths(seqlens: View, s_q: int) -> None:
    if seqlens.shape[1] not in (1, s_q):
        raise ShapeError(explain("seqlens.shape[-1]", seqlens.shape[1], f"s_q={s_q}, as in q, or one per sequence"))


OPERATION = Operation(
    "indexer_logits_paged",
    inputs=(
        Input("q", "b s_q h d", CODES, contiguous=True),
        Input("cache", CACHE, ("uint8",), contiguous=True),
        Input("weights", "b s_q h", ("float32",)),
        Input("seqlens", "b lengths?", ("int32",)),
        Input("block_table", "b max_pages", ("int32",)),
    ),
    outputs=(Output("logits", "b s_q max_pages*page_size", out_dtypes, "out_dtype", "rows"),),
    sizes=SIZES,
    min_sizes={**MIN_SIZES, "page_size": 1},
    options=PagedLogitsOptions,
    parallel={"b": ()},
    examine=_examine,
    pipeline=LOGITS_PAGED,
)
