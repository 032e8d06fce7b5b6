"""The lightning indexer: codes of its queries and keys, its logits, and the keys that it selects."""

from __future__ import annotations

from typing import Any

import torch

from mla_cupy import ops
from mla_cupy.ops.checks import check_flag
from mla_cupy.torch.library import is_plain_call
from mla_cupy.torch.operators import run, single, targets


def indexer_logits(
    q: torch.Tensor,
    k: torch.Tensor,
    weights: torch.Tensor,
    ks: torch.Tensor | None = None,
    ke: torch.Tensor | None = None,
    *,
    k_scale: torch.Tensor | None = None,
    logits: torch.Tensor | None = None,
    workspace: torch.Tensor | None = None,
    **options: Any,
) -> torch.Tensor:
    """Scores of the lightning indexer: see `mla_cupy.indexer_logits`.

    Parameters
    ----------
    q, k, weights : tensor
    ks, ke, k_scale : tensor, optional
    logits : tensor, optional
        Where the result goes.
    workspace : tensor, uint8, optional
        With `logits`.
    **options
        accumulate, clean, out_dtype, kernel.

    Returns
    -------
    tensor
    """
    given = targets(logits=logits)
    if is_plain_call(q):
        return ops.indexer_logits(q, k, weights, ks, ke, k_scale=k_scale, **options, **given, workspace=workspace)
    optional = {"ks": ks, "ke": ke, "k_scale": k_scale}
    return single(run("indexer_logits", (q, k, weights), {**optional, **options}, given, workspace))


def indexer_logits_paged(
    q: torch.Tensor,
    cache: torch.Tensor,
    weights: torch.Tensor,
    seqlens: torch.Tensor,
    block_table: torch.Tensor,
    *,
    logits: torch.Tensor | None = None,
    workspace: torch.Tensor | None = None,
    **options: Any,
) -> torch.Tensor:
    """Scores of cached index keys: see `mla_cupy.indexer_logits_paged`.

    Parameters
    ----------
    q, cache, weights, seqlens, block_table : tensor
    logits : tensor, optional
        Where the result goes.
    workspace : tensor, uint8, optional
        With `logits`.
    **options
        clean, out_dtype, kernel.

    Returns
    -------
    tensor
    """
    inputs, given = (q, cache, weights, seqlens, block_table), targets(logits=logits)
    if is_plain_call(q):
        return ops.indexer_logits_paged(
            q, cache, weights, seqlens, block_table, **options, **given, workspace=workspace
        )
    return single(run("indexer_logits_paged", inputs, options, given, workspace))


def indexer_prepare_q(
    q: torch.Tensor,
    weights: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    positions: torch.Tensor,
    *,
    codes: torch.Tensor | None = None,
    folded: torch.Tensor | None = None,
    **options: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes and folded weights of index queries: see `mla_cupy.indexer_prepare_q`.

    Parameters
    ----------
    q, weights, cos, sin, positions : tensor
    codes, folded : tensor, optional
        Where the results go: both or none.
    **options
        interleaved, hadamard, scales, reference_rounding, accumulate.

    Returns
    -------
    codes, folded : tensor
    """
    inputs, given = (q, weights, cos, sin, positions), targets(codes=codes, folded=folded)
    if is_plain_call(q):
        return ops.indexer_prepare_q(q, weights, cos, sin, positions, **options, **given)
    return run("indexer_prepare_q", inputs, options, given, None)


def indexer_prepare_k(
    k: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    positions: torch.Tensor,
    *,
    codes: torch.Tensor | None = None,
    k_scale: torch.Tensor | None = None,
    **options: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes and scales of index keys: see `mla_cupy.indexer_prepare_k`.

    Parameters
    ----------
    k, cos, sin, positions : tensor
    codes, k_scale : tensor, optional
        Where the results go: both or none.
    **options
        interleaved, hadamard, scales, reference_rounding.

    Returns
    -------
    codes, k_scale : tensor
    """
    inputs, given = (k, cos, sin, positions), targets(codes=codes, k_scale=k_scale)
    if is_plain_call(k):
        return ops.indexer_prepare_k(k, cos, sin, positions, **options, **given)
    return run("indexer_prepare_k", inputs, options, given, None)


def indexer_topk(
    logits: torch.Tensor,
    k: int = 2048,
    *,
    ks: torch.Tensor | None = None,
    ke: torch.Tensor | None = None,
    block_table: torch.Tensor | None = None,
    indices: torch.Tensor | None = None,
    counts: torch.Tensor | None = None,
    values: torch.Tensor | None = None,
    return_values: bool = True,
    **options: Any,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Exact top-k of the indexer's logits: see `mla_cupy.indexer_topk`.

    Parameters
    ----------
    logits : tensor
    k : int
    ks, ke, block_table : tensor, optional
    indices, counts, values : tensor, optional
        Where the results go: all or none.
    return_values : bool
    **options
        order, relative, page_size, keep_first, keep_last, kernel.

    Returns
    -------
    indices, counts : tensor
    values : tensor or None
        None without `return_values`.

    Notes
    -----
    It has no gradient.
    """
    chosen = {"return_values": check_flag("return_values", return_values), **options}
    given = targets(indices=indices, counts=counts, **({"values": values} if return_values else {}))
    if is_plain_call(logits):
        found = ops.indexer_topk(logits, k, ks=ks, ke=ke, block_table=block_table, **chosen, **given)
    else:
        found = run("indexer_topk", (logits, k, ks, ke, block_table), chosen, given, None)
    return found[0], found[1], found[2] if return_values else None
