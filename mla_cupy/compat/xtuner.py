"""A backend for xtuner's sparse MLA: a function of its `SparseMLAProtocol`.

`xtuner.v1.ops.sparse_mla.get_sparse_mla` can return it for a backend called "mla_cupy".
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from mla_cupy.errors import ArgumentError, MlaError, explain, renamed
from mla_cupy.ops.checks import is_integer
from mla_cupy.shapes import D_QK, D_V
from mla_cupy.torch import sparse_mla_forward

__all__ = ["SparseMLAOutputs", "sparse_mla"]


class SparseMLAOutputs(NamedTuple):
    """The fields of xtuner's class of this name.

    Attributes
    ----------
    raw_output : tensor, (s_q, h_q, 512), dtype of q
    softmax_lse : tensor, (s_q, h_q), float32
        Natural; -inf for a query that selects nothing.
    """

    raw_output: torch.Tensor
    softmax_lse: torch.Tensor


def sparse_mla(
    q: torch.Tensor,
    kv: torch.Tensor,
    indices: torch.Tensor,
    scaling: float | None,
    value_dim: int | None = None,
) -> SparseMLAOutputs:
    """Sparse attention, differentiable by `raw_output` with respect to `q` and `kv`.

    Parameters
    ----------
    q : tensor, (s_q, h_q, 576), bfloat16 or float16
    kv : tensor, (s_kv, 1, 576), dtype of q
    indices : tensor, (s_q, 1, topk), int32 or int64
        Rows of kv; -1 for an unused slot.
    scaling : float or None
        Default: 576**-0.5.
    value_dim : int, optional
        512.

    Returns
    -------
    SparseMLAOutputs
    """
    if value_dim is not None and not (is_integer(value_dim) and value_dim == D_V):
        raise ArgumentError(explain("value_dim", repr(value_dim), f"{D_V} or None"))
    try:
        scale = D_QK**-0.5 if scaling is None else scaling
        out, lse, _ = sparse_mla_forward(q, kv, indices, scale=scale)
    except MlaError as error:
        raise renamed(error, {"scale": "scaling"}) from error
    return SparseMLAOutputs(out, lse)


def __dir__() -> list[str]:
    return __all__
