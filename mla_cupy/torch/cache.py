"""Paged caches of records: written, read, copied, and attended to."""

from __future__ import annotations

from typing import Any

import torch

from mla_cupy import ops
from mla_cupy.torch.library import is_plain_call
from mla_cupy.torch.operators import run, single, targets


def sparse_mla_decode(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    indices: torch.Tensor,
    *,
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
    workspace: torch.Tensor | None = None,
    **options: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sparse decode straight from the FP8 records of a paged cache: see `mla_cupy.sparse_mla_decode`.

    Parameters
    ----------
    q, kv_cache, indices : tensor
    out, lse : tensor, optional
        Where the results go: both or none.
    workspace : tensor, uint8, optional
        With these.
    **options
        topk_length, attn_sink, extra_kv_cache, extra_indices, extra_topk_length, scale, lse_base, empty_lse, out_dtype,
        kernel.

    Returns
    -------
    out, lse : tensor

    Notes
    -----
    It has no gradient: decode serves inference.

    Examples
    --------
    >>> import torch
    >>> import mla_cupy.torch as mla
    >>> cache = torch.zeros(4, 64, 656, dtype=torch.uint8)
    >>> mla.cache_append(torch.ones(2, 512).half(), torch.zeros(2, 64).half(), cache, torch.tensor([70, 5]))
    >>> q, indices = torch.ones(1, 1, 8, 576).half(), torch.tensor([[[5, -1, 70]]], dtype=torch.int32)
    >>> out, lse = mla.sparse_mla_decode(q, cache, indices)
    >>> float(out[0, 0, 0, 0]), round(float(lse[0, 0, 0]), 3)
    (1.0, 22.026)
    """
    given = targets(out=out, lse=lse)
    if is_plain_call(q):
        return ops.sparse_mla_decode(q, kv_cache, indices, **options, **given, workspace=workspace)
    return run("sparse_mla_decode", (q, kv_cache, indices), options, given, workspace)


def cache_append(
    latent: torch.Tensor, rope: torch.Tensor | None, cache: torch.Tensor, slots: torch.Tensor, **options: Any
) -> None:
    """Write tokens to a paged cache, in place: see `mla_cupy.cache_append`.

    Parameters
    ----------
    latent, rope, cache, slots : tensor
        No gradient flows through the cache.
    **options
        cos, sin, positions, record, scales, kv_scale, interleaved.
    """
    if is_plain_call(latent):
        ops.cache_append(latent, rope, cache, slots, **options)
    else:
        run("cache_append", (latent, rope, cache, slots), options, {}, None)


def cache_gather(
    cache: torch.Tensor, slots: torch.Tensor, *, out: torch.Tensor | None = None, **options: Any
) -> torch.Tensor:
    """Read tokens of a paged cache: see `mla_cupy.cache_gather`.

    Parameters
    ----------
    cache, slots : tensor
    out : tensor, optional
        Where the rows go.
    **options
        record, kv_scale, out_dtype.

    Returns
    -------
    tensor, (n, d_qk)
    """
    if is_plain_call(cache):
        found: torch.Tensor = ops.cache_gather(cache, slots, out=out, **options)
        return found
    return single(run("cache_gather", (cache, slots), options, targets(out=out), None))


def cache_copy_pages(pool: torch.Tensor, pairs: torch.Tensor) -> None:
    """Copy pages in all layers of a pool, in place: see `mla_cupy.cache_copy_pages`.

    Parameters
    ----------
    pool, pairs : tensor
    """
    if is_plain_call(pool):
        ops.cache_copy_pages(pool, pairs)
    else:
        run("cache_copy_pages", (pool, pairs), {}, {}, None)


def cache_slots(
    block_table: torch.Tensor,
    starts: torch.Tensor,
    lengths: torch.Tensor,
    *,
    slots: torch.Tensor | None = None,
    cu_seqlens: torch.Tensor | None = None,
    **options: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Find the slots of consecutive tokens of each sequence: see `mla_cupy.cache_slots`.

    Parameters
    ----------
    block_table, starts, lengths : tensor
    slots, cu_seqlens : tensor, optional
        Where the results go: both or none.
    **options
        page_size, max_tokens, num_pages.

    Returns
    -------
    slots, cu_seqlens : tensor
    """
    given = targets(slots=slots, cu_seqlens=cu_seqlens)
    if is_plain_call(block_table):
        return ops.cache_slots(block_table, starts, lengths, **options, **given)
    return run("cache_slots", (block_table, starts, lengths), options, given, None)


def indexer_cache_append(k: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor, **options: Any) -> None:
    """Write index keys to a paged cache, in place: see `mla_cupy.indexer_cache_append`.

    Parameters
    ----------
    k, cache, slots : tensor
    **options
        cos, sin, positions, interleaved, hadamard, scales, reference_rounding.
    """
    if is_plain_call(k):
        ops.indexer_cache_append(k, cache, slots, **options)
    else:
        run("indexer_cache_append", (k, cache, slots), options, {}, None)


def indexer_cache_gather(
    cache: torch.Tensor,
    slots: torch.Tensor,
    *,
    codes: torch.Tensor | None = None,
    k_scale: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Read index keys of a paged cache, as they are: see `mla_cupy.indexer_cache_gather`.

    Parameters
    ----------
    cache, slots : tensor
    codes, k_scale : tensor, optional
        Where the results go: both or none.

    Returns
    -------
    codes, k_scale : tensor
    """
    given = targets(codes=codes, k_scale=k_scale)
    if is_plain_call(cache):
        return ops.indexer_cache_gather(cache, slots, **given)
    return run("indexer_cache_gather", (cache, slots), {}, given, None)
