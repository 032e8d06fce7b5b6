"""The sparse backward with the signature of cudnn-frontend's `DSA` namespace::

    from mla_cupy.compat.cudnn_dsa import sparse_attention_backward_wrapper

It has fewer limits than cuDNN: any number of heads and any `topk`, queries that select nothing, and -1 for unused slots
anywhere. Nothing waits for the GPU.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from mla_cupy.errors import MlaError, renamed
from mla_cupy.ops import sparse_mla_backward
from mla_cupy.torch.call import check_kind

_NAMES = {"indices": "topk_idxs", "scale": "softmax_scale"}
"""cuDNN's names of the arguments of `sparse_mla_backward`."""

__all__ = ["sparse_attention_backward_wrapper"]


def sparse_attention_backward_wrapper(
    q: torch.Tensor,
    kv: torch.Tensor,
    out: torch.Tensor,
    dout: torch.Tensor,
    lse: torch.Tensor,
    attn_sink: torch.Tensor | None,
    topk_idxs: torch.Tensor,
    softmax_scale: float | None = None,
    topk_length: torch.Tensor | None = None,
    dq: torch.Tensor | None = None,
    dkv: torch.Tensor | None = None,
    block_tile: int = 64,
    stream: Any = None,
) -> dict[str, torch.Tensor | None]:
    """Compute the gradients of sparse attention with `mla_cupy.sparse_mla_backward`.

    Parameters
    ----------
    q : tensor, (s_q, h_q, d_qk), bfloat16 or float16
        d_qk is 576 or 512.
    kv : tensor, (s_kv, d_qk), dtype of q
    out : tensor, (s_q, h_q, 512), dtype of q
    dout : tensor, (s_q, h_q, 512), dtype of q
    lse : tensor, (s_q, h_q), float32
        Natural, without the sink; an infinity for a query that selects nothing.
    attn_sink : tensor, (h_q,), float32, or None
        None is -inf: no sink.
    topk_idxs : tensor, (s_q, topk), int32
        Rows of kv, counted over the whole batch; -1 for an unused slot.
    softmax_scale : float, optional
        Default: d_qk**-0.5.
    topk_length : tensor, (s_q,), int32, optional
        Number of slots of each query that count.
    dq, dkv : tensor, optional
        Memory for the gradients.
    block_tile : int
        Ignored: it tunes cuDNN's kernels.
    stream : optional
        A CUstream. Default: PyTorch's current stream.

    Returns
    -------
    dict
        "dq", shape and dtype of q; "dkv", shape and dtype of kv, or the dtype of `dkv`; "d_sink", (h_q,), float32, or
        None without a sink.
    """
    dout = check_kind("Tensor", "dout", dout).contiguous()
    options: dict[str, Any] = {
        "scale": _width(q) ** -0.5 if softmax_scale is None else softmax_scale,
        "topk_length": topk_length,
        "attn_sink": attn_sink,
        "dq": dq,
        "dkv": dkv,
    }
    try:
        with torch.no_grad():
            dq, dkv, d_sink = sparse_mla_backward(q, kv, out, dout, lse, topk_idxs, **options, stream=_handle(stream))
    except MlaError as error:
        raise renamed(error, _NAMES) from error
    return {"dq": dq, "dkv": dkv, "d_sink": d_sink}


def _width(q: torch.Tensor) -> int:
    """The width of the queries, 1 if they have none: `sparse_mla_backward` then raises the error."""
    return int(math.prod(check_kind("Tensor", "q", q).shape[-1:])) or 1


def _handle(stream: Any) -> Any:
    """The handle of a CUstream; for anything else `sparse_mla_backward` raises the error."""
    try:
        return None if stream is None else int(stream)
    except (OverflowError, TypeError, ValueError):
        return stream


def __dir__() -> list[str]:
    return __all__
