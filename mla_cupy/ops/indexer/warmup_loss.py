"""The loss that warms the lightning indexer up: from the main attention's softmax over all keys."""

from __future__ import annotations

from typing import Any

from mla_cupy.errors import ArgumentError, ShapeError, explain
from mla_cupy.kernels.indexer.loss import LOSS
from mla_cupy.kernels.indexer.loss.problem import MAX_VALUE_DIM, TARGETS, LossProblem, WarmupLossOptions
from mla_cupy.kernels.indexer.topk.problem import HEAD_DIMS
from mla_cupy.ops.call import call
from mla_cupy.ops.checks import STARTS, check_factor, check_flag, check_scale, check_starts, explains_scale
from mla_cupy.ops.groups import LossResults, Packed
from mla_cupy.ops.indexer.loss_inputs import (
    BUFFER_BYTES,
    GRADIENTS,
    INDEX_INPUTS,
    KEYS,
    LAST_COLUMNS,
    QUERIES,
    SCALES,
    WarmupLoss,
    are_aligned,
    check_buffer_bytes,
    check_main,
    check_scored,
    check_sizes,
)
from mla_cupy.ops.operation import Examined, Input, Operation, Output, Views, present
from mla_cupy.shapes import D_ROPE, MAX_INT32


@explains_scale
def indexer_warmup_loss(
    q: Any,
    k: Any,
    index_q: Any,
    index_k: Any,
    weights: Any,
    *,
    scale: float,
    q_rope: Any = None,
    k_rope: Any = None,
    k_scale: Any = None,
    q_scale: Any = None,
    v: Any = None,
    lse: Any = None,
    head_sums: Any = None,
    row_weights: Any = None,
    packed: Packed | None = None,
    target: str = "head_sum",
    target_scale: float = 1.0,
    causal: bool = True,
    gradients: bool = True,
    buffer_bytes: int = BUFFER_BYTES,
    results: LossResults | None = None,
    workspace: Any = None,
    kernel: str | None = None,
    stream: Any = None,
) -> WarmupLoss:
    """Compute the divergence of the indexer's softmax from the main attention over all keys, with gradients.

    With I[t, s] = sum_j W[t, j] * max(index_q[t, j] . index_k[s], 0), W = weights * h_i**-0.5 * d_i**-0.5, and
    p[t, s] = sum_h exp(scale * q[t, h] . k[s] - lse[t, h]) / mass[t], which sums to 1 over s:

    kl[t] = sum_s p[t, s] * (log p[t, s] - I[t, s]) + index_lse[t],   index_lse[t] = log(sum_s exp(I[t, s]))

    Parameters
    ----------
    q : array, (s_q, h, d), bfloat16
        Queries of the main attention, absorbed or not; d is at most 576. With `q_rope`, all columns except the last 64.
        The last axes of all arrays except `weights` and the scales are contiguous.
    k : array, (s_kv, d), or per KV head (s_kv, h_kv, d), bfloat16
        Keys of the main attention: shared by all heads, (s_kv, 576) for absorbed queries; or un-absorbed, (s_kv, h,
        192), with h / h_kv heads per KV head. With `k_rope`, all columns except the last 64.
    index_q : array, (s_q, h_i, d_i), bfloat16, float8_e4m3fn or uint8
        Queries of the indexer, d_i 32, 64 or 128. uint8 holds e4m3 codes: see the notes.
    index_k : array, (s_kv, d_i), dtype of index_q
        Keys of the indexer.
    weights : array, (s_q, h_i), float32 or bfloat16
        Weights of the indexer's heads, of any sign, without the factors of W; for codes, with all factors.
    scale : float
        Factor of the main attention's scores: 192**-0.5 for DeepSeek-V3.2, also for absorbed queries, times YaRN's
        mscale**2.
    q_rope : array, (s_q, h, 64), bfloat16, optional
        The queries' last columns, as for `mla_prefill`.
    k_rope : array, (s_kv, 64), (s_kv, 1, 64) or (s_kv, h_kv, 64), bfloat16, optional
        Last 64 columns of the keys: shared by all heads, or per KV head.
    k_scale : array, (s_kv,), float32, optional
        Scales of `index_k`, such as the scales of its codes, above 0: factors of the scores. Default: 1.
    q_scale : array, (s_q, h_i), float32, optional
        Scales of `index_q` that `weights` include, above 0: `d_index_q` is then the gradient with respect to q_scale *
        index_q. Default: 1, the gradient with respect to index_q. They affect nothing else.
    v : array, (s_kv, d_v), or per KV head (s_kv, h_kv, d_v), bfloat16, optional
        Values of the main attention, d_v at most 512, for `out` and `attention_lse`; with the same number of heads as
        `k`. They may be part of `k`.
    lse : array, (s_q, h), float32, optional
        The attention's log-sum-exps, natural. They may cover keys that are not in `k`: p is normalised again. Heads
        with an lse that is infinite, or 1.2e7 or more in magnitude, do not contribute to p: float32 no longer resolves
        their weights. Default: computed over the visible keys.
    head_sums : array, (s_q, s_kv), float32, optional
        Source of p in place of `q`, `k` and `lse`: `indexer_head_sums` summed over all ranks that share the attention's
        heads. The last axis is contiguous.
    row_weights : array, (s_q,), float32, optional
        Factors of the losses in the gradients. Default: 1.
    packed : Packed, optional
        Starts of several sequences in the queries and in the keys. Default: one sequence.
    target : str
        "head_sum", as above; or "per_head", with equally many index and attention heads: each index head has its own
        target softmax(target_scale * q[t, h] . k) and I[t, h, s] = weights[t, h] * max(index_q[t, h] . index_k[s], 0).
    target_scale : float
        Factor of the scores in the targets of "per_head"; `scale` is the factor for `out` and `attention_lse`.
    causal : bool
        Hide the keys after a query's own position, the queries being the last of their sequence.
    gradients : bool
        Compute the gradients.
    buffer_bytes : int
        Size of the buffer of targets and scores. Tokens are processed in chunks that fit; a chunk has at least one
        token.
    results : LossResults, optional
        Arrays that the results are written to. Gradients for codes are bfloat16 or float32 as well.
    workspace : array, (n,), uint8, optional
        Memory for the call, 256-byte aligned, of at least `workspace_bytes(indexer_warmup_loss, ...)` bytes.
    kernel : str, optional
        Name of the main kernel to run, see `mla-cupy list`. Default: the fastest that fits.
    stream : int or stream object, optional
        Where to run. Default: the caller's library's current stream.

    Returns
    -------
    kl : array, (s_q,) or per head (s_q, h), float32
        0 for a row without a target: it sees no key, or its target has no mass. Per head, also for a row with a `mass`
        or `index_lse` of 1.2e7 or more in magnitude. Such rows have no gradients either.
    mass : array, shape of kl, float32
        Divisor of the target. Per head: the log-sum-exp of its scores.
    index_lse : array, shape of kl, float32
        -inf for a row that sees no key.
    d_index_q, d_index_k : array, shapes of index_q and index_k, bfloat16; or None
        Gradients of sum(row_weights * kl). None without `gradients`.
    d_weights : array, (s_q, h_i), float32, or None
        float32 for weights of either dtype.
    out : array, (s_q, h, d_v), bfloat16, or None
        softmax(scale * q . k) v, 0 for a row that sees no key. None without `v`.
    attention_lse : array, (s_q, h), float32, or None
        log(sum_s exp(scale * q . k)), natural, -inf for a row that sees no key. None without `v`.

    Raises
    ------
    ShapeError, DTypeError, DeviceError, ArgumentError
        If an argument does not fit; nothing has been launched, and no result is touched.
    UnsupportedDeviceError
        If no kernel fits the GPU.

    Notes
    -----
    The results are a named tuple, `mla_cupy.WarmupLoss`. One call computes loss and gradients because a separate
    backward would repeat the larger part, the scores of the main attention. For a differentiable scalar use
    `mla_cupy.torch.indexer_warmup_objective` or `mla_cupy.jax.indexer_warmup_objective`. No gradient flows to q, k or
    v. The derivative of max(x, 0) at x = 0 is 0: a product index_q . index_k of exactly 0 passes no gradient.

    Un-absorbed keys give the same loss at a lower cost where they are at hand, as after a prefill: with DeepSeek's 128
    heads, 2 * 192 FLOPs per pair and head instead of 2 * 576. `scale` is the model's, 192**-0.5, in both cases. Queries
    and keys may be pairs of arrays, and views of a projection's output; nothing is concatenated.

    Training in FP8: pass the codes of `indexer_prepare_q` and `indexer_prepare_k` as index queries and keys, their
    `k_scale`, and the folded weights. Then I[t, s] = k_scale[s] * sum_j weights[t, j] * max(index_q[t, j] . index_k[s],
    0), the score of `indexer_logits` (the same products, bit for bit on Hopper; the sum over heads has another order),
    and W is `weights`, without further factors, also for "per_head". Gradients are straight-through: they refer to the
    numbers that the codes represent, k_scale * index_k and q_scale * index_q, and apply to the vectors before rounding.
    `d_weights` is the gradient with respect to `weights`; multiply it by h_i**-0.5 * d_i**-0.5 and the queries' scales
    for the gradient with respect to the unfolded weights.

    All results are the same in every run, and `kl`, `d_index_q` and `d_weights` for any `buffer_bytes`. NumPy arrays
    are computed on the GPU if there is one, else by the NumPy oracle. On Hopper, with arrays that start at and step by
    multiples of 16 bytes, everything that is summed over heads runs on tensor cores, for all kinds of keys (pairs of
    arrays require first columns in multiples of 64). "per_head" and the attention's output run on tensor cores if d and
    d_v are at most 128 and keys are whole and shared by all heads; "per_head" also requires a bfloat16 indexer.
    Gradients with respect to the scores are rounded to bfloat16. For the output with un-absorbed keys call
    `mla_prefill`, and pass its `lse` here.

    Without `lse` the scores of the attention are computed twice: pass it if `sparse_mla_forward`, or `mla_decode` of
    all queries over the keys as pages, has already computed it. With `v` it is computed with the output; the CUDA-core
    fallback computes a wide output, which takes longer than the rest of the call.

    Workspace: at most `buffer_bytes` (or one token's share: 10 * s_kv bytes, per head 8 * h * s_kv; per head on Hopper
    nothing), 8 * s_q bytes, for gradients up to 2 * s_kv * d_i and either 64 MB or 4 * s_kv * d_i, 4 * s_q * h without
    `lse` and `v`, and 2 * s_kv * d_v with `v` on Hopper. It grows with the keys, not with their square. Each query and
    visible key cost 2 * h * d FLOPs for the target and 10 * h_i * d_i for the scores and the gradients.

    Source: the report of DeepSeek-V3.2-Exp, dense warm-up stage; "per_head" is the loss of lemyx/tilelang-dsa.

    Examples
    --------
    >>> import ml_dtypes, numpy as np, mla_cupy
    >>> q, k = np.zeros((2, 4, 64), ml_dtypes.bfloat16), np.zeros((2, 64), ml_dtypes.bfloat16)
    >>> index_q, index_k = np.ones((2, 2, 32), ml_dtypes.bfloat16), np.ones((2, 32), ml_dtypes.bfloat16)
    >>> weights = np.full((2, 2), 0.125, np.float32)
    >>> loss = mla_cupy.indexer_warmup_loss(q, k, index_q, index_k, weights, scale=192**-0.5)
    >>> loss.kl.tolist(), loss.mass.tolist(), loss.index_lse.tolist()[0]
    ([0.0, 0.0], [4.0, 4.0], 1.0)
    """
    return call(indexer_warmup_loss, locals())


def _check_target(target: Any, views: Views, heads: int, index_heads: int) -> str:
    if not (isinstance(target, str) and target in TARGETS):
        raise ArgumentError(explain("target", repr(target), " or ".join(map(repr, TARGETS))))
    if target == "per_head":
        if index_heads != heads:
            remedy = "pass one index head per attention head"
            raise ShapeError(explain("index_q.shape[1]", f"h_i={index_heads}", f"h={heads}, per head", remedy))
        for name in ("lse", "head_sums"):
            if views[name] is not None:
                raise ArgumentError(explain(name, "an array", "None: targets per head are normalised per head"))
    return target


def _examine(views: Views, given: WarmupLossOptions) -> Examined:
    q, k, index_q = (present(views, name) for name in ("q", "k", "index_q"))
    (s_q, heads, _), (_, index_heads, index_dim) = q.shape, index_q.shape
    check_sizes(s_q=(s_q, MAX_INT32), s_kv=(k.shape[0], MAX_INT32 - 256))
    main = check_main(views)
    value_dim = _check_values(views, k.shape[1])
    check_starts(views)
    target = _check_target(given.target, views, heads, index_heads)
    options = given._replace(
        target=target,
        scale=check_scale(given.scale),
        target_scale=check_factor("target_scale", given.target_scale),
        causal=check_flag("causal", given.causal),
        gradients=check_flag("gradients", given.gradients),
        buffer_bytes=check_buffer_bytes(given.buffer_bytes),
    )
    problem = LossProblem(
        s_q=s_q,
        s_kv=k.shape[0],
        heads=heads,
        index_heads=index_heads,
        index_dim=index_dim,
        value_dim=value_dim,
        per_head=target == "per_head",
        needs_lse=target == "head_sum" and views["lse"] is None and views["head_sums"] is None,
        given_sums=views["head_sums"] is not None,
        gradients=options.gradients,
        buffer_bytes=options.buffer_bytes,
        aligned=are_aligned(views, "q", "k", "q_rope", "k_rope", "index_q", "index_k"),
        **main,
        **check_scored(views),
    )
    return Examined(problem, options, {"targets": heads if target == "per_head" else 0})


def _check_values(views: Views, kv_heads: int) -> int:
    """The width of the values; 0 without."""
    if (v := views["v"]) is None:
        return 0
    if v.shape[1] != kv_heads:
        remedy = "pass values with the keys' head axis"
        raise ShapeError(explain("v.shape[1]", v.shape[1], f"h_kv={kv_heads}, like k", remedy))
    check_sizes(d_v=(v.shape[2], MAX_VALUE_DIM))
    return v.shape[2]


OPERATION = Operation(
    "indexer_warmup_loss",
    inputs=(
        QUERIES,
        KEYS,
        *INDEX_INPUTS,
        *LAST_COLUMNS,
        *SCALES,
        Input("v", "s_kv h_v? d_v", ("=q",), optional=True, contiguous=True),
        Input("lse", "s_q h", ("float32",), optional=True),
        Input("head_sums", "s_q s_kv", ("float32",), optional=True, contiguous=True),
        Input("row_weights", "s_q", ("float32",), optional=True),
        *STARTS,
    ),
    outputs=(
        Output("kl", "s_q targets?"),
        Output("mass", "s_q targets?"),
        Output("index_lse", "s_q targets?"),
        *GRADIENTS,
        Output("out", "s_q h d_v", lambda first: (first,), layout="rows", needs="v"),
        Output("attention_lse", "s_q h", needs="v"),
    ),
    sizes={"d_i": (*HEAD_DIMS[::-1],), "d_rope": (D_ROPE,)},
    min_sizes={"h": 1, "h_kv": 1, "h_i": 1, "d": 1, "d_k": 1, "d_v": 1, "b+1": 1},
    options=WarmupLossOptions,
    examine=_examine,
    derivative="constant",
    groups={"packed": Packed, "results": LossResults},
    returns=WarmupLoss,
    pipeline=LOSS,
)
