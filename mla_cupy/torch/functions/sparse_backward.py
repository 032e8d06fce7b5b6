"""Functions of `mla_cupy.ops.sparse_backward` for PyTorch's tensors.

Written by `python -m tests.generate` from the records there.
"""

from __future__ import annotations

from typing import Any

import torch

from mla_cupy.ops.call import Invocation, run
from mla_cupy.ops.sparse_backward import OPERATION
from mla_cupy.torch.call import call
from mla_cupy.torch.library import is_plain_call
from mla_cupy.torch.operators import SPARSE_MLA_BACKWARD


def sparse_mla_backward(
    q: torch.Tensor,
    kv: torch.Tensor,
    out: torch.Tensor,
    dout: torch.Tensor,
    lse: torch.Tensor,
    indices: torch.Tensor,
    *,
    dlse: torch.Tensor | None = None,
    d_v: int = 512,
    scale: float | None = None,
    topk_length: torch.Tensor | None = None,
    attn_sink: torch.Tensor | None = None,
    causal: bool = False,
    cu_seqlens_q: torch.Tensor | None = None,
    cu_seqlens_kv: torch.Tensor | None = None,
    lse_base: str = "e",
    deterministic: bool = False,
    dkv_dtype: Any = None,
    dq: torch.Tensor | None = None,
    dkv: torch.Tensor | None = None,
    d_sink: torch.Tensor | None = None,
    workspace: torch.Tensor | None = None,
    kernel: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Gradients of `sparse_mla_forward` with respect to `q`, `kv` and `attn_sink`.

    With P = exp(scale * q . kv[j] - lse_total), lse_total = log(exp(lse) + exp(attn_sink)), dP = dout . kv[j, :512],
    delta = sum(out * dout) and dS = scale * P * (dP - delta):

    dq = dS kv,   dkv = dS^T q + P^T dout (in the first 512 elements),   d_sink = -sum exp(attn_sink - lse_total) delta

    A gradient with respect to `lse` adds scale * exp(scale * q . kv[j] - lse) * dlse to dS.

    For tensors of PyTorch: the notes of `mla_cupy.sparse_mla_backward` hold here, too. Autograd calls it; call it
    yourself for options that autograd has no place for.

    Parameters
    ----------
    q, kv, indices : tensor
        As for the forward.
    out : tensor, (s_q, h_q, 512), dtype of q or float32
        As the forward returned it.
    dout : tensor, (s_q, h_q, 512), dtype of q
        Gradient with respect to `out`. The last axes of both are contiguous.
    lse : tensor, (s_q, h_q), float32
        As the forward returned it, without the sink. Both infinities mark a query and head without a row: it has no
        gradient. From 4.6e7 on, float32 does not tell how many rows share the largest score: each of these has a weight
        of 1.
    dlse : tensor, (s_q, h_q), float32, optional
        Gradient with respect to `lse` as it is given, so with lse_base="2" of the logarithm in base 2: as for a loss of
        its own or for a merge of partial results. It has no influence on `d_sink`.
    d_v, scale, topk_length, attn_sink, causal, cu_seqlens_q, cu_seqlens_kv, lse_base
        As for the forward.
    deterministic : bool
        Make the results bitwise reproducible: see the notes.
    dkv_dtype : str or dtype, optional
        "float32" for gradients to be added up; default: the dtype of `dkv`, or of kv.
    dq : tensor, shape and dtype of q, optional
        Where the gradient goes: a contiguous last axis, other steps of multiples of 16 bytes.
    dkv : tensor, shape of kv, dtype of kv or float32, optional
        The same for kv; any stride between its rows.
    d_sink : tensor, (h_q,), float32, optional
        The same for `attn_sink`; contiguous.
    workspace : tensor, (n,), uint8, optional
        Memory for the call, 256-byte aligned, of at least `workspace_bytes(sparse_mla_backward, ...)` bytes.
    kernel : str, optional
        Name of the main kernel to run, see `mla-cupy list`. Default: the fastest that fits.

    Returns
    -------
    dq : tensor, shape and dtype of q
        Array of the caller's library.
    dkv : tensor, shape of kv
        0 in rows that no query selects.
    d_sink : tensor, (h_q,), float32, or None
        None without `attn_sink`.

    Raises
    ------
    ShapeError, DTypeError, DeviceError, ArgumentError
        If an argument does not fit; nothing has been launched, and `dq` and `dkv` are untouched.
    UnsupportedDeviceError
        If no kernel fits the GPU.

    Notes
    -----
    It has no gradient. Tensors for the results are given all or none. A `workspace` is for calls with tensors for the
    results.
    """
    arrays = (
        q,
        kv,
        out,
        dout,
        lse,
        indices,
        topk_length,
        attn_sink,
        cu_seqlens_q,
        cu_seqlens_kv,
        dlse,
        dq,
        dkv,
        d_sink,
    )
    options = (d_v, scale, causal, lse_base, deterministic, dkv_dtype, kernel)
    if is_plain_call(q) and (dq is None) is (dkv is None) and (attn_sink is None or (dq is None) is (d_sink is None)):
        dq, dkv, d_sink = run(Invocation(OPERATION, arrays, options, workspace))
    else:
        dq, dkv, d_sink = call(SPARSE_MLA_BACKWARD, arrays, options, workspace)
    return dq, dkv, d_sink
