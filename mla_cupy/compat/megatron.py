"""A kernel backend for Megatron-LM's sparse attention (DSA).

Call `register()` before the model runs, and set `dsa_kernel_backend` of its TransformerConfig to "mla_cupy". Megatron
then asks this module for its fused hooks. The module serves attention over given indices; the indexer stays Megatron's
own.
"""

from __future__ import annotations

import importlib
from typing import Any

import torch

from mla_cupy.errors import MlaError, UnsupportedDeviceError, renamed
from mla_cupy.ops.checks import is_integer
from mla_cupy.shapes import D_V
from mla_cupy.torch import sparse_mla_forward
from mla_cupy.torch.call import check_kind

__all__ = ["register", "run_fused_absorbed_sparse_attention"]

BACKEND = "mla_cupy"
_DISPATCHERS = (
    "megatron.core.ops.attention.dsa.dsa_kernels",
    "megatron.core.transformer.experimental_attention_variant.dsa_kernels",
)
_TABLE = "_BACKEND_MODULE_NAME_BY_BACKEND"
_WIDTHS = (512, 576)
_NAMES = {"q": "query", "kv": "key", "indices": "topk_indices", "scale": "softmax_scale"}
"""Megatron's names of the arguments of `sparse_mla_forward`."""


def register() -> None:
    """Register this module in Megatron's table of backends.

    Raises
    ------
    UnsupportedDeviceError
        If Megatron is not installed, or has no such table.
    """
    for name in _DISPATCHERS:
        try:
            table: Any = getattr(importlib.import_module(name), _TABLE, None)
        except ImportError:
            continue
        if isinstance(table, dict):
            table[BACKEND] = __name__
            return
    raise UnsupportedDeviceError(f"none of {', '.join(_DISPATCHERS)} has a {_TABLE}: this Megatron is not known")


def run_fused_absorbed_sparse_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    topk_indices: torch.Tensor,
    softmax_scale: float,
    v_channels: int,
    topk_length: torch.Tensor | None = None,
) -> torch.Tensor | None:
    """Megatron's hook: sparse attention over given indices, with gradients.

    Parameters
    ----------
    query : tensor, (s_q, b, h_q, d_qk), bfloat16 or float16
    key : tensor, (s_kv, b, 1, d_qk), dtype of query
    topk_indices : tensor, (b, s_q, topk), int32 or int64
        Rows of the sequence's own keys; -1 for an unused slot.
    softmax_scale : float
    v_channels : int
    topk_length : tensor, (b, s_q), int32 or int64, optional
        Number of slots of each query that count.

    Returns
    -------
    tensor, (s_q, b, h_q, 512), or None
        None where Megatron must fall back to its own operations.

    Raises
    ------
    DTypeError, ArgumentError
        If an argument is not a tensor, or indices are not 32-bit integers.
    """
    named = {"query": query, "key": key, "topk_indices": topk_indices}
    for name, x in named.items():
        check_kind("Tensor", name, x)
    check_kind("Tensor?", "topk_length", topk_length)
    if query.ndim != 4 or key.ndim != 4 or topk_indices.ndim != 3:
        return None
    s_q, b, _, width = query.shape
    fits = key.shape[1:] == (b, 1, width) and topk_indices.shape[:2] == (b, s_q)
    fits = fits and is_integer(v_channels) and v_channels == D_V
    fits = fits and (topk_length is None or topk_length.shape == (b, s_q))
    if not fits or width not in _WIDTHS or query.dtype not in (torch.bfloat16, torch.float16):
        return None
    lengths = [None] * b if topk_length is None else topk_length
    try:
        per_sequence = [
            sparse_mla_forward(query[:, i], key[:, i], topk_indices[i], scale=softmax_scale, topk_length=lengths[i])[0]
            for i in range(b)
        ]
    except MlaError as error:
        raise renamed(error, _NAMES) from error
    if b == 0:
        return query[..., :v_channels]
    return per_sequence[0].unsqueeze(1) if b == 1 else torch.stack(per_sequence, dim=1)


def __dir__() -> list[str]:
    return __all__
