"""Context-parallel prefill and training of PyTorch tensors, over the ranks of a `torch.distributed` group.

Each rank holds two pieces of every sequence, see `mla_cupy.parallel.Zigzag`. Ranks gather latents, 1,152 bytes per
token, and expand keys and values themselves. `torch.compile` leaves these functions out of its graphs.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

import mla_cupy.torch as mla
from mla_cupy.dtypes import name_of
from mla_cupy.ops.checks import check_count
from mla_cupy.ops.indexer.loss_inputs import weight_factor
from mla_cupy.ops.indexer.select import indexer_select
from mla_cupy.parallel.zigzag import CHUNK_TOKENS, Zigzag, check_tokens
from mla_cupy.shapes import MAX_TOKENS
from mla_cupy.torch.parallel.agreement import agree
from mla_cupy.torch.parallel.attention import Attention, Expand, Prefill, Tensors
from mla_cupy.torch.parallel.links import Gather, Links, bounds, schedule, whole

__all__ = ["SparsePrefill", "gather", "prefill", "select", "sparse_prefill", "warmup_objective"]


class SparsePrefill(NamedTuple):
    """Result of `sparse_prefill`.

    Attributes
    ----------
    out : tensor, (s, h, 512)
        Attention of this rank's queries.
    lse : tensor, (s, h), float32
        Log-sum-exps of the attention.
    indices : tensor, (s, topk), int32
        The rows of `latents` that each query selects, -1 where there are no more.
    latents : tensor, (tokens, 576)
        Latents of all ranks, in the sequences' order.
    index_k : tensor, (tokens, d_i)
        Index keys of all ranks, in the same order.
    k_scale : tensor, (tokens,), float32, or None
        Scales of the index keys, if these are codes.
    """

    out: torch.Tensor
    lse: torch.Tensor
    indices: torch.Tensor
    latents: torch.Tensor
    index_k: torch.Tensor
    k_scale: torch.Tensor | None


@torch.compiler.disable  # type: ignore[untyped-decorator]
def prefill(
    q: torch.Tensor,
    latents: torch.Tensor,
    expand: Expand,
    zigzag: Zigzag,
    *,
    q_rope: torch.Tensor | None = None,
    k_rope: torch.Tensor | None = None,
    parameters: Tensors = (),
    group: Any = None,
    scale: float | None = None,
    chunk_tokens: int = CHUNK_TOKENS,
    deterministic: bool | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Causal attention of this rank's queries to the keys of all ranks; differentiable.

    Latents are gathered while each piece attends to itself.

    Parameters
    ----------
    q : tensor, (s, h, d_qk), bfloat16 or float16
        Queries of this rank's tokens, `zigzag.rows(rank)`. With `q_rope`, all columns but the last 64.
    latents : tensor, (s, d_c), dtype of q
        Normalised latents of the same tokens.
    expand : callable
        `expand(latents, *parameters)` returns the keys, (n, h_kv, d_k), and the values, (n, h_kv, d_v), of any n
        latents, row by row: the product with W_UK and W_UV. It runs again in the backward.
    zigzag : Zigzag
        Lengths of the whole sequences; the same on every rank.
    q_rope : tensor, (s, h, 64), dtype of q, optional
        Last columns of the queries, turned by `zigzag.positions(rank)`.
    k_rope : tensor, (s, 64), dtype of q, optional
        Last columns of the keys, turned likewise; the same for all heads.
    parameters : sequence of tensor
        Tensors that `expand` reads and that need gradients.
    group : ProcessGroup, optional
        Default: the default group.
    scale : float, optional
        Factor of the scores, as for `mla_prefill`.
    chunk_tokens : int
        Approximate number of tokens with keys and values in memory at a time.
    deterministic : bool, optional
        Give all gradients the same bits in every run, as for `mla_prefill_backward`. Default: what
        `torch.are_deterministic_algorithms_enabled()` says.

    Returns
    -------
    out : tensor, (s, h, d_v), dtype of q
    lse : tensor, (s, h), float32
        Natural log-sum-exps.

    Raises
    ------
    ShapeError, DTypeError, DeviceError, ArgumentError
        If an argument does not fit. Other ranks then wait for this one until the group's timeout.
    ParallelError
        If another rank is gone, makes another call, or makes no call within the group's timeout.

    Notes
    -----
    Every rank, even one without tokens, must make the same calls in the same order. A group compares calls of new
    lengths, dtypes or options before it exchanges rows; the host waits for that comparison.

    The result is the same in every run. Gradients of latents travel in the dtype of the latents, so each rank's part is
    rounded once. The owner adds the parts in float32, in the order of the ranks, after an all-to-all, which moves as
    many bytes as a reduce-scatter. The gradients of `parameters` cover this rank's queries alone: add them up over the
    group, as for data parallelism.

    For each token, a rank sends and receives `2 * (d_c + 64)` bytes in the forward, and twice as many in the backward,
    which gathers the latents again. Merged results are float32 until the end. Derivatives of the gradients, forward
    mode and `torch.func` are not supported.
    """
    links = Links.of(zigzag, group)
    for name, x in (("q", q), ("latents", latents), ("q_rope", q_rope), ("k_rope", k_rope)):
        if x is not None:
            check_tokens(name, len(x), zigzag, links.rank)
    calls = schedule(zigzag, links.rank, check_count("chunk_tokens", chunk_tokens, 1, MAX_TOKENS), q.device)
    exactly = torch.are_deterministic_algorithms_enabled() if deterministic is None else deterministic
    attention = Attention(links, *calls, expand, latents.shape[-1], scale, exactly)
    rows = latents if k_rope is None else torch.cat([latents, k_rope], -1)
    needs_grad = any(x is not None and x.requires_grad for x in (q, q_rope, rows, *parameters))
    agree(links, "prefill", zigzag, rows, needs_grad)
    found: tuple[torch.Tensor, torch.Tensor] = Prefill.apply(attention, q, q_rope, rows, *parameters)
    return found


@torch.compiler.disable  # type: ignore[untyped-decorator]
def gather(x: torch.Tensor, zigzag: Zigzag, *, group: Any = None) -> torch.Tensor:
    """Rows of all ranks in the sequences' order; differentiable.

    Parameters
    ----------
    x : tensor, (s, ...)
        Rows of this rank's tokens, `zigzag.rows(rank)`.
    zigzag : Zigzag
        The same on every rank.
    group : ProcessGroup, optional
        Default: the default group.

    Returns
    -------
    tensor, (tokens, ...)

    Raises
    ------
    ShapeError, ArgumentError, ParallelError
        As for `prefill`.

    Notes
    -----
    The gradient of a row is the sum of all ranks' gradients, added in float32 in the order of the ranks.
    """
    links = Links.of(zigzag, group)
    check_tokens("x", len(x), zigzag, links.rank)
    agree(links, "gather", zigzag, x, x.requires_grad)
    found: torch.Tensor = Gather.apply(links, whole(zigzag, links.rank, x.device), x)
    return found


@torch.compiler.disable  # type: ignore[untyped-decorator]
def select(
    index_q: torch.Tensor,
    index_k: torch.Tensor,
    weights: torch.Tensor,
    zigzag: Zigzag,
    *,
    k_scale: torch.Tensor | None = None,
    topk: int = 2048,
    group: Any = None,
) -> torch.Tensor:
    """The keys of all ranks that the indexer selects for this rank's queries; it passes no gradient.

    Parameters
    ----------
    index_q, weights : tensor
        Arguments for this rank's tokens, as for `sparse_prefill`.
    index_k : tensor, (tokens, d_i)
        Index keys of all tokens, as `gather` returns them.
    zigzag : Zigzag
        Lengths of the whole sequences; the same on every rank.
    k_scale : tensor, (tokens,), float32, optional
        Scales of all tokens' index keys, as for `indexer_select`.
    topk : int
        Keys that a query selects.
    group : ProcessGroup, optional
        Default: the default group.

    Returns
    -------
    tensor, (s, topk), int32
        Rows of `index_k`, -1 where there are no more; fewer columns where there are fewer tokens.

    Raises
    ------
    ShapeError, DTypeError, DeviceError, ArgumentError
        As for `indexer_select`.
    """
    rank = Links.of(zigzag, group).rank
    check_tokens("index_q", len(index_q), zigzag, rank)
    first, last = bounds(zigzag, rank, index_q.device)
    folded = weights.detach() * weight_factor(name_of(index_q.dtype), *index_q.shape[-2:])
    given, count = (index_q.detach(), index_k.detach(), folded, first, last), max(1, min(topk, zigzag.tokens))
    found: torch.Tensor = indexer_select(*given, k_scale=k_scale, topk=count, relative=False)[0]
    return found


@torch.compiler.disable  # type: ignore[untyped-decorator]
def sparse_prefill(
    q: torch.Tensor,
    latents: torch.Tensor,
    index_q: torch.Tensor,
    index_k: torch.Tensor,
    weights: torch.Tensor,
    zigzag: Zigzag,
    *,
    scale: float,
    k_scale: torch.Tensor | None = None,
    topk: int = 2048,
    attn_sink: torch.Tensor | None = None,
    group: Any = None,
) -> SparsePrefill:
    """DeepSeek sparse attention of this rank's queries to the tokens of all ranks that the indexer selects.

    Parameters
    ----------
    q : tensor, (s, h, 576), bfloat16
        Absorbed queries of this rank's tokens, `zigzag.rows(rank)`.
    latents : tensor, (s, 576), bfloat16
        Latents and RoPE columns of the same tokens.
    index_q : tensor, (s, h_i, d_i), bfloat16, float8_e4m3fn or uint8
        Queries of the indexer; uint8 holds e4m3 codes.
    index_k : tensor, (s, d_i), dtype of index_q
        Keys of the indexer.
    weights : tensor, (s, h_i), float32
        Weights of the indexer's heads, without the factor (h_i * d_i)**-0.5; for codes, with all factors.
    zigzag : Zigzag
        Lengths of the whole sequences; the same on every rank.
    scale : float
        Factor of the attention's scores.
    k_scale : tensor, (s,), float32, optional
        Scales of index keys that are codes.
    topk : int
        Keys that a query selects.
    attn_sink : tensor, (h,), float32, optional
        As for `sparse_mla_forward`.
    group : ProcessGroup, optional
        Default: the default group.

    Returns
    -------
    SparsePrefill

    Raises
    ------
    ShapeError, DTypeError, DeviceError, ArgumentError, ParallelError
        As for `prefill`.

    Notes
    -----
    `out` and `lse` are differentiable by q, latents and attn_sink. The selection passes no gradient: the indexer learns
    from `mla_cupy.torch.indexer_sparse_objective(q, found.latents, index_q, found.index_k, weights, found.indices,
    lse=found.lse, causal=False, ...)`, the sum over this rank's tokens, whose gradient reaches the index keys of all
    ranks. Add the losses up over the group. Gradients are bitwise reproducible with
    `torch.use_deterministic_algorithms(True)`.
    """
    every, rows = (gather(x, zigzag, group=group) for x in (index_k, latents))
    scales = None if k_scale is None else gather(k_scale, zigzag, group=group)
    check_tokens("q", len(q), zigzag, Links.of(zigzag, group).rank)
    indices = select(index_q, every, weights, zigzag, k_scale=scales, topk=topk, group=group)
    out, lse, _ = mla.sparse_mla_forward(q, rows, indices, scale=scale, attn_sink=attn_sink)
    return SparsePrefill(out, lse, indices, rows, every, scales)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def warmup_objective(
    q: torch.Tensor,
    k: torch.Tensor,
    index_q: torch.Tensor,
    index_k: torch.Tensor,
    weights: torch.Tensor,
    zigzag: Zigzag,
    *,
    scale: float,
    q_rope: torch.Tensor | None = None,
    k_rope: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
    row_weights: torch.Tensor | None = None,
    group: Any = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The loss that warms the indexer up, `indexer_warmup_objective`, over this rank's queries and all keys.

    Parameters
    ----------
    q, q_rope, index_q, weights, lse, row_weights : tensor
        Arguments for this rank's tokens, as for `indexer_warmup_objective`.
    k, k_rope, index_k : tensor
        Keys of all tokens, as `gather` returns them.
    zigzag : Zigzag
        Lengths of the whole sequences; the same on every rank.
    scale : float
        Factor of the attention's scores.
    group : ProcessGroup, optional
        Default: the default group.

    Returns
    -------
    objective : tensor, ()
        Sum of row_weights * kl over this rank's tokens, differentiable by index_q, index_k and weights.
    kl : tensor, (s,), float32

    Raises
    ------
    ShapeError, DTypeError, DeviceError, ArgumentError
        As for `indexer_warmup_objective`.
    """
    links = Links.of(zigzag, group)
    check_tokens("q", len(q), zigzag, links.rank)
    kl = torch.zeros(len(q), device=q.device)
    objective = 0 * weights.float().sum()  # a rank without tokens has a loss with a gradient, too
    for call in whole(zigzag, links.rank, q.device).calls:
        of_q, of_index, of_weights, *others = call.of(q, index_q, weights, q_rope, lse, row_weights)
        of = dict(zip(("q_rope", "lse", "row_weights"), others, strict=True))
        of |= {"k_rope": k_rope, "packed": call.packed, "scale": scale}
        value, each = mla.indexer_warmup_objective(of_q, k, of_index, index_k, of_weights, **of)
        objective = objective + value
        kl[call.begin : call.end] += each.detach()
    return objective, kl
