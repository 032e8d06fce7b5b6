"""Functions of `mla_cupy.ops.prefill` for PyTorch's tensors.

Written by `python -m tests.generate` from the records there.
"""

from __future__ import annotations

from typing import Any

import torch

from mla_cupy.ops.call import Invocation, run
from mla_cupy.ops.prefill import OPERATION
from mla_cupy.torch.call import call
from mla_cupy.torch.gradients.prefill import transformed
from mla_cupy.torch.library import is_plain_call
from mla_cupy.torch.operators import MLA_PREFILL


def mla_prefill(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    q_rope: torch.Tensor | None = None,
    k_rope: torch.Tensor | None = None,
    cu_seqlens_q: torch.Tensor | None = None,
    cu_seqlens_kv: torch.Tensor | None = None,
    state_out: torch.Tensor | None = None,
    state_lse: torch.Tensor | None = None,
    mask: torch.Tensor | None = None,
    q_scales: torch.Tensor | None = None,
    k_scales: torch.Tensor | None = None,
    v_scales: torch.Tensor | None = None,
    causal: bool = True,
    scale: float | None = None,
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
    workspace: torch.Tensor | None = None,
    out_dtype: Any = None,
    kernel: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend from the queries of each sequence to its keys, with keys and values per head (un-absorbed MLA).

    out[i, h] = sum_j softmax_j(scale * q[i, h] . k[j, g]) * v[j, g], where g = h * h_kv // h_q is the KV head of h, and
    j runs over the keys of query i's sequence that it sees.

    For tensors of PyTorch: the notes of `mla_cupy.mla_prefill` hold here, too.

    Parameters
    ----------
    q : tensor, (s_q, h_q, d_qk), bfloat16 or float16; or float8_e4m3fn or uint8
        Queries. With `q_rope`, all columns but the last 64. (d_qk, d_v) is (192, 128), (256, 256) or (128, 128). The
        last axis is contiguous; other strides are free (multiples of 16 bytes are fast, on Hopper). The same holds for
        `q_rope`, `k`, `k_rope` and `v`. With queries in e4m3 everything is, `q_rope` and `k_rope` too; (d_qk, d_v) is
        (192, 128), and there is neither state nor mask. uint8 holds e4m3 codes, for libraries without that type.
    k : tensor, (s_kv, h_kv, d_qk), dtype of q
        Keys. With `k_rope`, all columns but the last 64. h_q is a multiple of h_kv.
    v : tensor, (s_kv, h_kv, d_v), dtype of q
        Values. Keys and values may be views of one tensor, such as a projection's (s_kv, h_kv, 128 + 128).
    q_rope : tensor, (s_q, h_q, 64), dtype of q, optional
        Last 64 columns of the queries.
    k_rope : tensor, (s_kv, 64), (s_kv, 1, 64) or (s_kv, h_kv, 64), dtype of q, optional
        Last 64 columns of the keys: the same for all heads, or those of each head.
    cu_seqlens_q, cu_seqlens_kv : tensor, (b + 1,), int32, optional
        Sequence n has the queries from cu_seqlens_q[n] to cu_seqlens_q[n + 1] and the keys from cu_seqlens_kv[n] to
        cu_seqlens_kv[n + 1]. They are read on the device: clamped to [0, s_q] and [0, s_kv], and one below its
        predecessor is raised to it. A query of no sequence sees no key. Both or none; default: one sequence.
    state_out : tensor, (s_q, h_q, d_v), dtype of q or float32, optional
        The attention of the same queries to other keys, such as those of an earlier chunk. The result is the attention
        to all keys. It may be `out` itself.
    state_lse : tensor, (s_q, h_q), float32, optional
        Its log-sum-exps. Both infinities mean that the query saw no key; its `state_out` is then not read. It may be
        `lse` itself.
    mask : tensor, (s_q, mask_bytes), uint8, optional
        Keys of its sequence that each query sees, in all heads, in addition to the limit of `causal`: bit j % 8 (0 is
        the lowest) of byte j // 8 is 1 for key j, counted from the sequence's first key. `prefill_mask` makes one from
        indices; so does `numpy.packbits(seen, axis=1, bitorder="little")`, for a multiple of 128 keys. Rows start at,
        step by, and have multiples of 16 bytes. Keys beyond 8 * mask_bytes are hidden; without `cu_seqlens_kv` the mask
        must have all keys.
    q_scales, k_scales, v_scales : tensor, (b, h_kv), float32, optional
        Of e4m3: what the numbers of a sequence and KV head are multiplied by, finite, at least 0; q_scales[n, g] is for
        all query heads of KV head g. Any strides, so a broadcast number will do. b is 1 without `cu_seqlens_q`.
        Default: 1.
    causal : bool
        Hide the keys after a query's own position, the queries being the last of their sequence: query i of n sees the
        first s - n + i + 1 of its s keys.
    scale : float, optional
        Factor of the scores: finite, above 0. Default: d_qk**-0.5.
    out : tensor, (s_q, h_q, d_v), dtype of q (of e4m3: bfloat16 or float16) or float32, optional
        Where the result goes.
    lse : tensor, (s_q, h_q), float32, optional
        Where its log-sum-exp goes; any strides.
    workspace : tensor, (n,), uint8, optional
        Memory for the call, 256-byte aligned, of at least `workspace_bytes(mla_prefill, ...)` bytes.
    out_dtype : str or dtype, optional
        "float32" for results to be merged; of e4m3 any of the three. Default: the dtype of `out`, or of q, or bfloat16
        where that is e4m3.
    kernel : str, optional
        Name of the attention kernel to run, see `mla-cupy list`. Default: the fastest that fits.

    Returns
    -------
    out : tensor, (s_q, h_q, d_v)
        Array of the caller's library; 0 for a query without a key.
    lse : tensor, (s_q, h_q), float32
        log(sum_j exp(scale * q . k[j])), natural; -inf for a query without a key.

    Raises
    ------
    ShapeError, DTypeError, DeviceError, ArgumentError
        If an argument does not fit; nothing has been launched, and `out` and `lse` are untouched.
    UnsupportedDeviceError
        If no kernel fits the GPU.

    Notes
    -----
    `out` and `lse` are differentiable with respect to queries, keys, values and the state, without a mask and unless
    tensors for them are given. The gradients are deterministic under `torch.use_deterministic_algorithms(True)`.
    Tensors for the results are given all or none. A `workspace` is for calls with tensors for the results.

    Examples
    --------
    >>> import torch
    >>> import mla_cupy.torch as mla
    >>> q, v = torch.ones(3, 4, 192).bfloat16(), torch.ones(3, 4, 128).bfloat16().requires_grad_()
    >>> out, lse = mla.mla_prefill(q, torch.ones_like(q), v)
    >>> out.sum().backward()
    >>> [round(float(x), 2) for x in v.grad[:, 0, 0]]  # of the queries: one, a half, a third
    [1.84, 0.83, 0.33]
    """
    arrays = (
        q,
        k,
        v,
        q_rope,
        k_rope,
        cu_seqlens_q,
        cu_seqlens_kv,
        state_out,
        state_lse,
        mask,
        q_scales,
        k_scales,
        v_scales,
        out,
        lse,
    )
    options = (causal, scale, out_dtype, kernel)
    if is_plain_call(arrays) and not torch.is_grad_enabled() and (out is None) is (lse is None):
        out, lse = run(Invocation(OPERATION, arrays, options, workspace))
    else:
        out, lse = call(MLA_PREFILL, arrays, options, workspace, gradient=transformed)
    return out, lse
