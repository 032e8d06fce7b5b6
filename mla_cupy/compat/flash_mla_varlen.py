"""FlashMLA's dense attention over packed sequences, with keys and values per head.

`mla_cupy.compat.flash_mla` has these functions, too, as FlashMLA's package does.
"""

from __future__ import annotations

import sys
from typing import Any

from mla_cupy.errors import ArgumentError, MlaError, ShapeError, explain, renamed
from mla_cupy.ops import Packed, mla_prefill
from mla_cupy.ops.checks import check_count, check_flag, is_number

__all__ = ["flash_attn_varlen_func", "flash_attn_varlen_kvpacked_func", "flash_attn_varlen_qkvpacked_func"]

_NAMES = {"scale": "softmax_scale", "packed.cu_seqlens_q": "cu_seqlens_qo", "packed.cu_seqlens_kv": "cu_seqlens_kv"}
"""FlashMLA's names of the arguments of `mla_prefill`."""


def flash_attn_varlen_func(
    q: Any,
    k: Any,
    v: Any,
    cu_seqlens_qo: Any,
    cu_seqlens_kv: Any,
    max_seqlen_qo: int,
    max_seqlen_kv: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    deterministic: bool = False,
    is_varlen: bool = True,
) -> tuple[Any, Any]:
    """Attend from the queries of each sequence to its keys.

    Parameters
    ----------
    q : array, (s_q, h_q, d_qk), bfloat16 or float16
        (d_qk, d_v) is (192, 128), (128, 128) or (256, 256). The last axes of q, k and v are contiguous.
    k : array, (s_kv, h_kv, d_qk), dtype of q
        Whole keys of each head. h_q is a multiple of h_kv.
    v : array, (s_kv, h_kv, d_v), dtype of q
    cu_seqlens_qo, cu_seqlens_kv : array, (b + 1,), int32
        Starts of the sequences, and the end of the last one.
    max_seqlen_qo, max_seqlen_kv : int
        Ignored: lengths are read on the device.
    dropout_p : float
        0.
    softmax_scale : float, optional
        Default: d_qk**-0.5.
    causal : bool
        Hide the keys after a query's own position, the queries being the last of their sequence.
    deterministic : bool
        Require the same bits in every run. The forward and the gradients of k and v always have them; for the gradient
        of q, True requires `torch.use_deterministic_algorithms(True)`, which autograd follows.
    is_varlen : bool
        Ignored: sequences of equal length need no special case.

    Returns
    -------
    out : array, (s_q, h_q, d_v), dtype of q
        0 for a query without a key.
    lse : array, (s_q, h_q), float32
        Natural; -inf for a query without a key. As in FlashMLA, PyTorch tensors have strides of (1, s_q).

    Raises
    ------
    ShapeError, DTypeError, DeviceError, ArgumentError
        If an argument does not fit; nothing has been launched.

    Notes
    -----
    Precision and limits: as for `mla_cupy.mla_prefill`, which also accepts keys in two arrays and needs no copies of
    keys that all heads share. PyTorch tensors use `mla_cupy.torch.mla_prefill`: `out` and `lse` are differentiable with
    respect to q, k and v, also where query heads share key heads.

    Examples
    --------
    >>> import numpy as np
    >>> from mla_cupy.compat.flash_mla import flash_attn_varlen_func
    >>> q, k, v = (np.ones((5, 4, d), np.float16) for d in (192, 192, 128))
    >>> starts = np.array([0, 2, 5], np.int32)
    >>> out, lse = flash_attn_varlen_func(q, k, v, starts, starts, 3, 3, causal=True)
    >>> out.shape, [round(float(x), 3) for x in lse[:, 0]]
    ((5, 4, 128), [13.856, 14.55, 13.856, 14.55, 14.955])
    """
    if not is_number(dropout_p) or dropout_p != 0:
        raise ArgumentError(explain("dropout_p", repr(dropout_p), "0", "pass 0: dropout is not supported"))
    check_flag("is_varlen", is_varlen)
    exactly = check_flag("deterministic", deterministic)
    packed = Packed(cu_seqlens_qo, cu_seqlens_kv)
    options: dict[str, Any] = {"packed": packed, "scale": softmax_scale, "causal": causal}
    torch = sys.modules.get("torch")
    try:
        if torch is None or not isinstance(q, torch.Tensor):
            return mla_prefill(q, k, v, **options)
        return _of_torch(torch, (q, k, v), options, exactly)
    except MlaError as error:
        raise renamed(error, _NAMES) from error


def flash_attn_varlen_qkvpacked_func(
    qkv: Any,
    cu_seqlens: Any,
    max_seqlen: int,
    head_dim_qk: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    deterministic: bool = False,
    is_varlen: bool = True,
) -> tuple[Any, Any]:
    """`flash_attn_varlen_func` of one array that holds queries, keys and values.

    Parameters
    ----------
    qkv : array, (s, h, 2 * d_qk + d_v), bfloat16 or float16
        Query, key and value of each head.
    cu_seqlens : array, (b + 1,), int32
    max_seqlen : int
        Ignored.
    head_dim_qk : int
        d_qk.
    dropout_p, softmax_scale, causal, deterministic, is_varlen
        As for `flash_attn_varlen_func`.

    Returns
    -------
    out : array, (s, h, d_v), dtype of qkv
    lse : array, (s, h), float32

    Raises
    ------
    ShapeError, DTypeError, DeviceError, ArgumentError
        If an argument does not fit; nothing has been launched.
    """
    d_qk = _width("qkv", qkv, head_dim_qk, 2)
    q, k, v = qkv[..., :d_qk], qkv[..., d_qk : 2 * d_qk], qkv[..., 2 * d_qk :]
    sequences = cu_seqlens, cu_seqlens, max_seqlen, max_seqlen
    return flash_attn_varlen_func(q, k, v, *sequences, dropout_p, softmax_scale, causal, deterministic, is_varlen)


def flash_attn_varlen_kvpacked_func(
    q: Any,
    kv: Any,
    cu_seqlens_qo: Any,
    cu_seqlens_kv: Any,
    max_seqlen_qo: int,
    max_seqlen_kv: int,
    head_dim_qk: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    deterministic: bool = False,
    is_varlen: bool = True,
) -> tuple[Any, Any]:
    """`flash_attn_varlen_func` of queries and one array that holds keys and values.

    Parameters
    ----------
    q : array, (s_q, h_q, d_qk), bfloat16 or float16
    kv : array, (s_kv, h_kv, d_qk + d_v), dtype of q
        Key and value of each head.
    cu_seqlens_qo, cu_seqlens_kv, max_seqlen_qo, max_seqlen_kv
        As for `flash_attn_varlen_func`.
    head_dim_qk : int
        d_qk.
    dropout_p, softmax_scale, causal, deterministic, is_varlen
        As for `flash_attn_varlen_func`.

    Returns
    -------
    out : array, (s_q, h_q, d_v), dtype of q
    lse : array, (s_q, h_q), float32

    Raises
    ------
    ShapeError, DTypeError, DeviceError, ArgumentError
        If an argument does not fit; nothing has been launched.
    """
    d_qk = _width("kv", kv, head_dim_qk, 1)
    sequences = cu_seqlens_qo, cu_seqlens_kv, max_seqlen_qo, max_seqlen_kv
    k, v = kv[..., :d_qk], kv[..., d_qk:]
    return flash_attn_varlen_func(q, k, v, *sequences, dropout_p, softmax_scale, causal, deterministic, is_varlen)


def _width(argument: str, packed: Any, head_dim_qk: Any, times: int) -> int:
    """Check and return the width of queries and keys; a slice would accept anything."""
    shape = tuple(getattr(packed, "shape", ()))
    if len(shape) != 3:
        raise ShapeError(explain(f"{argument}.shape", shape, "3 axes"))
    return check_count("head_dim_qk", head_dim_qk, 1, max(1, (shape[2] - 1) // times))


def _of_torch(torch: Any, arrays: tuple[Any, Any, Any], options: dict[str, Any], exactly: bool) -> tuple[Any, Any]:
    """The call with tensors; with gradients autograd makes the results, and lse is laid out afterwards."""
    from mla_cupy.torch import mla_prefill as differentiable
    from mla_cupy.torch.library import is_plain_call

    if torch.is_grad_enabled() and any(isinstance(x, torch.Tensor) and x.requires_grad for x in arrays):
        if exactly and not torch.are_deterministic_algorithms_enabled():
            remedy = "call torch.use_deterministic_algorithms(True), which backward passes follow"
            raise ArgumentError(explain("deterministic", True, "False, with gradients", remedy))
        out, lse = differentiable(*arrays, **options)
        return out, lse.T.contiguous().T
    q, _, v = arrays
    attend = mla_prefill if is_plain_call(arrays) else differentiable
    if q.ndim != 3 or getattr(v, "ndim", 0) != 3:
        return attend(*arrays, **options)  # which says what is wrong
    out = q.new_empty((*q.shape[:2], v.shape[2]))
    lse = q.new_empty((q.shape[1], q.shape[0]), dtype=torch.float32).T
    return attend(*arrays, **options, out=out, lse=lse)
