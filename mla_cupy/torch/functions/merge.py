"""Functions of `mla_cupy.ops.merge` for PyTorch's tensors.

Written by `python -m tests.generate` from the records there.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from mla_cupy.ops.call import Invocation, run
from mla_cupy.ops.merge import OPERATION
from mla_cupy.torch.call import call
from mla_cupy.torch.library import is_plain_call
from mla_cupy.torch.operators import MERGE_STATES


def merge_states(
    outs: torch.Tensor,
    lses: torch.Tensor,
    *,
    lse_base: str = "e",
    empty_lse: float = -math.inf,
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
    workspace: torch.Tensor | None = None,
    out_dtype: Any = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Merge n partial results of the same queries, over disjoint sets of keys, into the attention over all of them.

    lse = log(sum_n exp(lses[n])),  out = sum_n exp(lses[n] - lse) * outs[n]

    For tensors of PyTorch: the notes of `mla_cupy.merge_states` hold here, too.

    Parameters
    ----------
    outs : tensor, (n, b, s_q, h_q, d), bfloat16, float16 or float32
        Partial outputs, each normalised over its own keys; the last axis is contiguous.
    lses : tensor, (n, b, h_q, s_q), float32
        Their log-sum-exps. Both infinities mean that the row saw no key; its `outs` is then not read.
    lse_base : str
        "e" or "2": base of `lses` and of the result.
    empty_lse : float
        `lse` of a row that is empty in all states; its `out` is 0.
    out : tensor, (b, s_q, h_q, d), optional
        Memory for the result; the last axis is contiguous.
    lse : tensor, (b, h_q, s_q), float32, optional
        Memory for its log-sum-exp; any strides.
    workspace : tensor, (n,), uint8, optional
        As for the other operations; `workspace_bytes(merge_states, ...)` is 0.
    out_dtype : str or dtype, optional
        A 16-bit dtype or "float32". Default: the dtype of `out`, or of `outs`.

    Returns
    -------
    out : tensor, (b, s_q, h_q, d)
    lse : tensor, (b, h_q, s_q), float32

    Raises
    ------
    ShapeError, DTypeError, DeviceError, ArgumentError
        If an argument does not fit; nothing has been launched.

    Notes
    -----
    It has no gradient. Tensors for the results are given all or none. A `workspace` is for calls with tensors for the
    results.
    """
    arrays = (outs, lses, out, lse)
    options = (lse_base, empty_lse, out_dtype)
    if is_plain_call(arrays) and (out is None) is (lse is None):
        out, lse = run(Invocation(OPERATION, arrays, options, workspace))
    else:
        out, lse = call(MERGE_STATES, arrays, options, workspace)
    return out, lse
