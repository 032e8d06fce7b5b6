"""Head sums, which the indexer's losses normalise to their target, of the heads that one rank has."""

from __future__ import annotations

from typing import Any

from mla_cupy.errors import ArgumentError, explain
from mla_cupy.kernels.indexer.loss import HEAD_SUMS
from mla_cupy.kernels.indexer.loss.problem import HeadSumsOptions, LossProblem
from mla_cupy.ops.call import call
from mla_cupy.ops.checks import STARTS, check_flag, check_scale, check_starts, explains_scale
from mla_cupy.ops.groups import Packed
from mla_cupy.ops.indexer.loss_inputs import (
    BUFFER_BYTES,
    KEYS,
    LAST_COLUMNS,
    QUERIES,
    are_aligned,
    check_buffer_bytes,
    check_main,
    check_sizes,
)
from mla_cupy.ops.operation import Examined, Input, Operation, Output, Views, present
from mla_cupy.shapes import D_ROPE, MAX_INT32, MAX_TOKENS


@explains_scale
def indexer_head_sums(
    q: Any,
    k: Any,
    *,
    scale: float,
    q_rope: Any = None,
    k_rope: Any = None,
    indices: Any = None,
    lse: Any = None,
    topk_length: Any = None,
    packed: Packed | None = None,
    causal: bool = True,
    relative: bool = True,
    buffer_bytes: int = BUFFER_BYTES,
    head_sums: Any = None,
    workspace: Any = None,
    kernel: str | None = None,
    stream: Any = None,
) -> Any:
    """Sum the main attention's probabilities over the heads of one rank, for the indexer's losses.

    head_sums[t, s] = sum_h exp(scale * q[t, h] . k[s] - lse[t, h])

    With tensor parallelism a rank has a share of the heads, but the target of `indexer_warmup_loss` and
    `indexer_sparse_loss` is normalised over all of them. Each rank calls this function for its heads, an all-reduce
    adds the results up over the ranks, and the loss accepts the sum as its `head_sums`.

    Parameters
    ----------
    q : array, (s_q, h, d), bfloat16
        Queries of the rank's heads; d is at most 576. The last axes of queries and keys are contiguous.
    k : array, (s_kv, d), or per KV head (s_kv, h_kv, d), bfloat16
        Keys, as for `indexer_warmup_loss`: shared by all heads, or of the rank's KV heads.
    scale : float
        Factor of the main attention's scores, as for the losses.
    q_rope, k_rope : array, optional
        The last 64 columns of queries and keys, as for `indexer_warmup_loss`.
    indices : array, (s_q, topk) or (s_q, 1, topk), int32, optional
        For the sparse stage: as for `indexer_sparse_loss`, and equal on all ranks. Default: all keys.
    lse : array, (s_q, h), float32, optional
        As for the losses, for these heads. Default: computed over the visible keys.
    topk_length : array, (s_q,), int32, optional
        With indices: as for `indexer_sparse_loss`.
    packed : Packed, optional
        As for the losses.
    causal : bool
        As for the losses.
    relative : bool
        With indices: as for `indexer_sparse_loss`.
    buffer_bytes : int
        Size of the buffer of sums. Tokens are processed in chunks that fit; a chunk has at least one token.
    head_sums : array, (s_q, s_kv) or (s_q, topk), float32, optional
        Memory for the result; the last axis is contiguous.
    workspace : array, (n,), uint8, optional
        Memory for the call, 256-byte aligned, of at least `workspace_bytes(indexer_head_sums, ...)` bytes.
    kernel : str, optional
        Name of the main kernel to run, see `mla-cupy list`. Default: the fastest that fits.
    stream : int or stream object, optional
        Where to run. Default: the caller's library's current stream.

    Returns
    -------
    array, (s_q, s_kv), float32
        0 for keys that a query does not see. With indices (s_q, topk): the n-th number of a row belongs to the n-th of
        its valid indices; 0 after the last.

    Raises
    ------
    ShapeError, DTypeError, DeviceError, ArgumentError
        If an argument does not fit; nothing has been launched, and the result is untouched.
    UnsupportedDeviceError
        If no kernel fits the GPU.

    Notes
    -----
    Over all keys the result has 4 * s_q * s_kv bytes. For long sequences process some queries at a time, [a, b) with
    the keys [0, b), in both this function and the loss: as the last of their sequence they see the same keys, and the
    pieces' gradients with respect to the index keys add up.

    Results are the same in every run. NumPy arrays are computed on the GPU if there is one, else by the NumPy oracle.
    On Hopper the function runs on tensor cores if arrays start at and step by multiples of 16 bytes; with indices also
    only for up to 128 heads that share whole keys, and d in multiples of 8. Without `lse` it computes the scores twice.

    Workspace: at most `buffer_bytes` (or one token's share: 4 bytes per key), 8 * s_q bytes, 4 * s_q * topk with
    indices, and 4 * s_q * h without `lse`.

    Examples
    --------
    >>> import ml_dtypes, numpy as np, mla_cupy
    >>> q, k = np.zeros((2, 4, 64), ml_dtypes.bfloat16), np.zeros((2, 64), ml_dtypes.bfloat16)
    >>> mla_cupy.indexer_head_sums(q, k, scale=64**-0.5)
    array([[4., 0.],
           [2., 2.]], dtype=float32)
    """
    return call(indexer_head_sums, locals())


def _examine(views: Views, given: HeadSumsOptions) -> Examined:
    q, k, indices = present(views, "q"), present(views, "k"), views["indices"]
    (s_q, heads, _), s_kv = q.shape, k.shape[0]
    topk = None if indices is None else indices.shape[1]
    check_sizes(s_q=(s_q, MAX_INT32), s_kv=(s_kv, MAX_INT32 - 256), topk=(topk or 0, MAX_TOKENS))
    main = check_main(views)
    check_starts(views)
    if indices is None and views["topk_length"] is not None:
        raise ArgumentError(explain("topk_length", "an array", "None without indices"))
    options = given._replace(
        scale=check_scale(given.scale),
        causal=check_flag("causal", given.causal),
        relative=check_flag("relative", given.relative),
        buffer_bytes=check_buffer_bytes(given.buffer_bytes),
    )
    problem = LossProblem(
        s_q=s_q,
        s_kv=s_kv,
        heads=heads,
        index_heads=0,
        index_dim=0,
        needs_lse=views["lse"] is None,
        gradients=False,
        buffer_bytes=options.buffer_bytes,
        aligned=are_aligned(views, "q", "k", "q_rope", "k_rope"),
        topk=topk,
        **main,
    )
    return Examined(problem, options, {"keys": problem.keys})


OPERATION = Operation(
    "indexer_head_sums",
    inputs=(
        QUERIES,
        KEYS,
        *LAST_COLUMNS,
        Input("indices", "s_q 1? topk", ("int32",), optional=True),
        Input("lse", "s_q h", ("float32",), optional=True),
        Input("topk_length", "s_q", ("int32",), optional=True),
        *STARTS,
    ),
    outputs=(Output("head_sums", "s_q keys", layout="rows"),),
    sizes={"d_rope": (D_ROPE,)},
    min_sizes={"h": 1, "h_kv": 1, "d": 1, "d_k": 1, "b+1": 1},
    options=HeadSumsOptions,
    examine=_examine,
    derivative="constant",
    groups={"packed": Packed},
    pipeline=HEAD_SUMS,
)
