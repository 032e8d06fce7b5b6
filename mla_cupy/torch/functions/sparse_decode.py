"""Functions of `mla_cupy.ops.sparse_decode` for PyTorch's tensors.

Written by `python -m tests.generate` from the records there.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from mla_cupy.ops.call import Invocation, run
from mla_cupy.ops.sparse_decode import OPERATION
from mla_cupy.torch.call import call
from mla_cupy.torch.library import is_plain_call
from mla_cupy.torch.operators import SPARSE_MLA_DECODE


def sparse_mla_decode(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    indices: torch.Tensor,
    *,
    topk_length: torch.Tensor | None = None,
    attn_sink: torch.Tensor | None = None,
    extra_kv_cache: torch.Tensor | None = None,
    extra_indices: torch.Tensor | None = None,
    extra_topk_length: torch.Tensor | None = None,
    out_cos: torch.Tensor | None = None,
    out_sin: torch.Tensor | None = None,
    out_positions: torch.Tensor | None = None,
    w_uv: torch.Tensor | None = None,
    gate: torch.Tensor | None = None,
    scale: float | None = None,
    kv_scale: float = 1,
    math: str = "exact",
    lse_base: str = "e",
    empty_lse: float = -math.inf,
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
    workspace: torch.Tensor | None = None,
    out_dtype: Any = None,
    kernel: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend from each query to the tokens of a paged FP8 cache that its indices select (absorbed MLA).

    For tensors of PyTorch: the notes of `mla_cupy.sparse_mla_decode` hold here, too.

    Parameters
    ----------
    q : tensor, (b, s_q, h_q, d_qk), bfloat16 or float16
        Absorbed queries: d_qk is 576 for the records "v32" and "fp8", 512 for "v4" and "v41". The last axis is
        contiguous, and the first two step evenly.
    kv_cache : tensor, (num_pages, page_size, 656, 584, 528 or 576), uint8
        An axis of size 1 may stand on either side of the tokens, as for `mla_decode`. Pages of "v32", "v4", "v41" or,
        with math="fp8" only, "fp8": see `cache_append`. The values are the first 512 elements of the keys; with "v4"
        and "v41" these include the RoPE part. Pages start at, and step by, multiples of 16 bytes: pages of "v4" with an
        odd number of tokens need a gap of 8 bytes between them.
    indices : tensor, (b, s_q, topk), int32
        Slots, page * page_size + token, in any order. Any topk, any strides. Slots outside of the cache are skipped, -1
        being the usual mark; duplicates are counted as often as they occur.
    topk_length : tensor, (b,), int32, optional
        Only the first topk_length[i] entries of the lists of sequence i are read; clamped to [0, topk].
    attn_sink : tensor, (h_q,), float32, optional
        Logits of a key without a value, which only lowers `out`. -inf has no effect, +inf makes `out` 0.
    extra_kv_cache, extra_indices, extra_topk_length : tensor, optional
        A second cache of the same record, or of "v41-fp4" beside "v41", with pages of any size, and lists of more keys
        in it under the same softmax. Cache and indices are given together. Not with "fp8".
    out_cos, out_sin : tensor, (max_position, 32), float32, optional
        Turn the last 64 columns of `out` back, as for `mla_decode`, where the values include the key's RoPE part: "v4"
        and "v41". Not with a `w_uv`. In 16 bits these columns are rounded once more: they are turned in place, by a
        launch of its own.
    out_positions : tensor, (b, s_q), int32 or int64, optional
        The queries' rows of these, clamped to them. Given with these, or not at all.
    w_uv, gate : tensor, optional
        W_UV and a gate, as for `mla_decode`: results are multiplied by them where they would be merged, or after that.
        The first two axes of a gate step evenly.
    scale : float, optional
        Factor of the scores: finite, above 0. Default: d_qk**-0.5.
    kv_scale : float
        Scale of the record "fp8": keys and values are its codes times this. Finite, above 0; 1 for all others.
    math : str
        Arithmetic of both products: "exact", of 16-bit elements, or "fp8" for the record "fp8", on the FP8 tensor cores
        of Hopper: queries and weights are rounded to e4m3, see the notes of `mla_decode`.
    lse_base : str
        "e" or "2": base of the logarithm in `lse`.
    empty_lse : float
        `lse` of a query without a token; its `out` is 0.
    out : tensor, (b, s_q, h_q, 512), dtype of q or float32, optional
        Memory for the result, (b, s_q, h_q, d_head) with a `w_uv`: a contiguous last axis, a start and other strides
        that are multiples of 16 bytes, and first two axes that step evenly.
    lse : tensor, (b, s_q, h_q), float32, optional
        Memory for the log-sum-exp; the first two axes step evenly.
    workspace : tensor, (n,), uint8, optional
        Memory for the call, 256-byte aligned, of at least `workspace_bytes(sparse_mla_decode, ...)` bytes.
    out_dtype : str or dtype, optional
        "float32" for results to be merged; default: the dtype of `out`, or of q.
    kernel : str, optional
        Name of the attention kernel to run, see `mla-cupy list`. Default: the fastest that fits.

    Returns
    -------
    out : tensor, (b, s_q, h_q, 512), or (b, s_q, h_q, d_head) with a `w_uv`
    lse : tensor, (b, s_q, h_q), float32
        log(sum_j exp(scale * q . k[j])), in base `lse_base`, without the sink.

    Raises
    ------
    ShapeError, DTypeError, DeviceError, ArgumentError
        If an argument does not fit; nothing has been launched.
    UnsupportedDeviceError
        If no kernel fits the GPU.

    Notes
    -----
    It has no gradient: decode serves inference. Tensors for the results are given all or none. A `workspace` is for
    calls with tensors for the results.

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
    arrays = (
        q,
        kv_cache,
        indices,
        topk_length,
        attn_sink,
        extra_kv_cache,
        extra_indices,
        extra_topk_length,
        out_cos,
        out_sin,
        out_positions,
        w_uv,
        gate,
        out,
        lse,
    )
    options = (scale, kv_scale, math, lse_base, empty_lse, out_dtype, kernel)
    if is_plain_call(arrays) and (out is None) is (lse is None):
        out, lse = run(Invocation(OPERATION, arrays, options, workspace))
    else:
        out, lse = call(SPARSE_MLA_DECODE, arrays, options, workspace)
    return out, lse
