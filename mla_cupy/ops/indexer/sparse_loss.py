"""The loss that trains the lightning indexer in the sparse stage, over its selected keys."""

from __future__ import annotations

from typing import Any

from mla_cupy.kernels.indexer.loss import SPARSE_LOSS
from mla_cupy.kernels.indexer.loss.problem import MAX_HEAD_DIM, LossProblem, SparseLossOptions
from mla_cupy.kernels.indexer.topk.problem import HEAD_DIMS
from mla_cupy.ops.call import call
from mla_cupy.ops.checks import STARTS, check_flag, check_scale, check_starts, explains_scale
from mla_cupy.ops.groups import LossResults, Packed
from mla_cupy.ops.indexer.loss_inputs import (
    BUFFER_BYTES,
    GRADIENTS,
    INDEX_INPUTS,
    QUERIES,
    SCALES,
    SHARED_KEYS,
    SparseLoss,
    are_aligned,
    check_buffer_bytes,
    check_scored,
    check_sizes,
)
from mla_cupy.ops.operation import Examined, Input, Operation, Output, Views, present
from mla_cupy.ops.sparse_inputs import INDICES
from mla_cupy.shapes import MAX_INT32, MAX_TOKENS


@explains_scale
def indexer_sparse_loss(
    q: Any,
    k: Any,
    index_q: Any,
    index_k: Any,
    weights: Any,
    indices: Any,
    *,
    scale: float,
    k_scale: Any = None,
    q_scale: Any = None,
    lse: Any = None,
    head_sums: Any = None,
    topk_length: Any = None,
    row_weights: Any = None,
    packed: Packed | None = None,
    causal: bool = True,
    relative: bool = True,
    gradients: bool = True,
    deterministic: bool = False,
    buffer_bytes: int = BUFFER_BYTES,
    results: LossResults | None = None,
    workspace: Any = None,
    kernel: str | None = None,
    stream: Any = None,
) -> SparseLoss:
    """Compute the divergence of the indexer's softmax from the main attention over selected keys, with gradients.

    kl[t] = sum_s p[t, s] * (log p[t, s] - I[t, s]) + index_lse[t], as in `indexer_warmup_loss`, but every sum over s
    is over the keys that `indices` select for token t.

    Parameters
    ----------
    q : array, (s_q, h, d), bfloat16
        Absorbed queries of the main attention; d is at most 576. All last axes are contiguous, except in `weights`,
        `indices` and the scales.
    k : array, (s_kv, d), bfloat16
        Keys of the main attention, shared by all heads.
    index_q : array, (s_q, h_i, d_i), bfloat16, float8_e4m3fn or uint8
        Queries of the indexer, d_i 32, 64 or 128. uint8 holds e4m3 codes.
    index_k : array, (s_kv, d_i), dtype of index_q
        Keys of the indexer.
    weights : array, (s_q, h_i), float32 or bfloat16
        Weights of the indexer's heads, of any sign; the loss multiplies them by h_i**-0.5 * d_i**-0.5. For codes,
        weights that include all factors.
    indices : array, (s_q, topk) or (s_q, 1, topk), int32
        As for `sparse_mla_forward`: rows of the sequence's keys; -1 and other entries outside are skipped. A key that
        is selected twice counts twice.
    scale : float
        Factor of the main attention's scores, as for `indexer_warmup_loss`.
    k_scale, q_scale : array, (s_kv,) and (s_q, h_i), float32, optional
        Scales of `index_k` and `index_q`, as for `indexer_warmup_loss`; its notes define the gradients.
    lse : array, (s_q, h), float32, optional
        The attention's log-sum-exps, natural, such as the `lse` of `sparse_mla_forward`; p is normalised again. Heads
        with an lse that is infinite, or 1.2e7 or more in magnitude, do not contribute to p. Default: computed over the
        selected keys.
    head_sums : array, (s_q, topk), float32, optional
        Source of p in place of `q`, `k` and `lse`: `indexer_head_sums` summed over all ranks that share the attention's
        heads. The last axis is contiguous.
    topk_length : array, (s_q,), int32, optional
        Only the first topk_length[t] entries of a list count; clamped to [0, topk].
    row_weights : array, (s_q,), float32, optional
        Factors of the losses in the gradients. Default: 1.
    packed : Packed, optional
        As for `sparse_mla_forward`.
    causal : bool
        Hide keys after a token's own position.
    relative : bool
        As for `sparse_mla_forward`: True if indices count from the first key of the token's sequence, False if from the
        first of all keys.
    gradients : bool
        Compute the gradients.
    deterministic : bool
        Give `d_index_k` the same bits in every run. All other results always have the same bits.
    buffer_bytes : int
        Size of the buffer of targets and scores. Tokens are processed in chunks that fit; a chunk has at least one
        token.
    results : LossResults, optional
        Arrays that the results are written to.
    workspace : array, (n,), uint8, optional
        Memory for the call, 256-byte aligned, of at least `workspace_bytes(indexer_sparse_loss, ...)` bytes.
    kernel : str, optional
        Name of the main kernel to run, see `mla-cupy list`. Default: the fastest that fits.
    stream : int or stream object, optional
        Where to run. Default: the caller's library's current stream.

    Returns
    -------
    kl : array, (s_q,), float32
        0 for a token without a target: it selects no key, or its target has no mass.
    mass : array, (s_q,), float32
        Divisor of the target.
    index_lse : array, (s_q,), float32
        log(sum_s exp(I[t, s])); -inf for a token that selects no key.
    d_index_q, d_index_k : array, shapes of index_q and index_k, bfloat16; or None
        Gradients of sum(row_weights * kl). None without `gradients`.
    d_weights : array, (s_q, h_i), float32, or None

    Raises
    ------
    ShapeError, DTypeError, DeviceError, ArgumentError
        If an argument does not fit; nothing has been launched, and no result is touched.
    UnsupportedDeviceError
        If no kernel fits the GPU.

    Notes
    -----
    The results are a named tuple, `mla_cupy.SparseLoss`. No gradient flows to q and k. The derivative of max(x, 0) at x
    = 0 is 0: a product index_q . index_k of exactly 0 passes no gradient. For a differentiable scalar use
    `indexer_sparse_objective` of `mla_cupy.torch` or `mla_cupy.jax`. NumPy arrays are computed on the GPU if there is
    one, else by the NumPy oracle. On Hopper everything runs on tensor cores if both kinds have at most 128 heads, d is
    a multiple of 8, and arrays start at and step by multiples of 16 bytes; the operands of the gradients are rounded to
    bfloat16.

    Without `lse` the scores of the attention are computed twice. `sparse_mla_forward` over the same `indices` returns
    it.

    The contributions of different tokens to a key are summed by float32 atomics. If deterministic, they are summed in
    six bins, in which every partial sum is exact: `cuda_src/tile/binned_sum.cuh`. A number keeps 23 - ceil(log2(n))
    bits below the top of its bin; n counts the additions to a key, one per selection and 64 index heads. On Hopper four
    neighbouring columns share the bin of the largest: at 2,400 additions that is 11 bits, and a column far smaller than
    a neighbour is off by about 1 %.

    Workspace: at most `buffer_bytes` (or one token's share: 8 * topk bytes), 4 * s_q * topk and 12 * s_q for the lists,
    4 * s_kv * d_i for sums of gradients by keys, six times that and 8 * s_kv if deterministic, 2 * s_kv * d_i on
    Hopper, and 4 * s_q * h without `lse`. No array has s_q * s_kv elements.

    Source: the report of DeepSeek-V3.2-Exp, sparse training stage.

    Examples
    --------
    >>> import ml_dtypes, numpy as np, mla_cupy
    >>> q, k = np.zeros((2, 4, 64), ml_dtypes.bfloat16), np.zeros((5, 64), ml_dtypes.bfloat16)
    >>> index_q, index_k = np.ones((2, 2, 32), ml_dtypes.bfloat16), np.ones((5, 32), ml_dtypes.bfloat16)
    >>> weights, indices = np.full((2, 2), 0.125, np.float32), np.array([[0, -1], [4, 2]], np.int32)
    >>> loss = mla_cupy.indexer_sparse_loss(q, k, index_q, index_k, weights, indices, scale=192**-0.5)
    >>> loss.kl.tolist(), loss.mass.tolist(), loss.index_lse.tolist()[0]
    ([0.0, 0.0], [4.0, 4.0], 1.0)
    """
    return call(indexer_sparse_loss, locals())


def _examine(views: Views, given: SparseLossOptions) -> Examined:
    q, k, index_q, indices = (present(views, name) for name in ("q", "k", "index_q", "indices"))
    (s_q, heads, head_dim), (_, index_heads, index_dim) = q.shape, index_q.shape
    check_sizes(
        s_q=(s_q, MAX_INT32),
        s_kv=(k.shape[0], MAX_INT32),
        d=(head_dim, MAX_HEAD_DIM),
        topk=(indices.shape[1], MAX_TOKENS),
    )
    check_starts(views)
    options = given._replace(
        scale=check_scale(given.scale),
        causal=check_flag("causal", given.causal),
        relative=check_flag("relative", given.relative),
        gradients=check_flag("gradients", given.gradients),
        deterministic=check_flag("deterministic", given.deterministic),
        buffer_bytes=check_buffer_bytes(given.buffer_bytes),
    )
    problem = LossProblem(
        *(s_q, k.shape[0], heads, index_heads, head_dim, index_dim),
        needs_lse=views["lse"] is None and views["head_sums"] is None,
        given_sums=views["head_sums"] is not None,
        gradients=options.gradients,
        buffer_bytes=options.buffer_bytes,
        aligned=are_aligned(views, "q", "k", "index_q", "index_k"),
        topk=indices.shape[1],
        deterministic=options.deterministic,
        **check_scored(views),
    )
    return Examined(problem, options)


OPERATION = Operation(
    "indexer_sparse_loss",
    inputs=(
        QUERIES,
        SHARED_KEYS,
        *INDEX_INPUTS,
        INDICES,
        *SCALES,
        Input("lse", "s_q h", ("float32",), optional=True),
        Input("head_sums", "s_q topk", ("float32",), optional=True, contiguous=True),
        Input("topk_length", "s_q", ("int32",), optional=True),
        Input("row_weights", "s_q", ("float32",), optional=True),
        *STARTS,
    ),
    outputs=(
        Output("kl", "s_q"),
        Output("mass", "s_q"),
        Output("index_lse", "s_q"),
        *GRADIENTS,
    ),
    sizes={"d_i": (*HEAD_DIMS[::-1],)},
    min_sizes={"h": 1, "h_i": 1, "d": 1, "b+1": 1},
    options=SparseLossOptions,
    examine=_examine,
    derivative="constant",
    groups={"packed": Packed, "results": LossResults},
    returns=SparseLoss,
    pipeline=SPARSE_LOSS,
)
