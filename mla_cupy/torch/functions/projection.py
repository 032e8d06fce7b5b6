"""Functions of `mla_cupy.ops.projection` for PyTorch's tensors.

Written by `python -m tests.generate` from the records there.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from mla_cupy.ops.call import Invocation, run
from mla_cupy.ops.projection import ABSORB_OPERATION, MERGE_OPERATION
from mla_cupy.torch.call import call
from mla_cupy.torch.library import is_plain_call
from mla_cupy.torch.operators import ABSORB, MERGE_PROJECT


def absorb(
    q_nope: torch.Tensor,
    w_uk: torch.Tensor,
    *,
    q_rope: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    workspace: torch.Tensor | None = None,
) -> torch.Tensor:
    """Multiply queries by W_UK, to the absorbed queries that decode takes: q[t, h] = q_nope[t, h] w_uk[h].

    For tensors of PyTorch: the notes of `mla_cupy.absorb` hold here, too.

    Parameters
    ----------
    q_nope : tensor, (t, h_q, d_nope), bfloat16 or float16
        The part of the queries without RoPE; d_nope is 64, 128, 192 or 256. A contiguous last axis, a start and other
        strides that are multiples of 16 bytes: columns of whole queries are such a tensor.
    w_uk : tensor, (h_q, d_nope, 512), dtype of q_nope
        The keys' half of kv_b_proj, as it lies in the weights: `kv_b_proj.reshape(h_q, -1, 512)[:, :d_nope]`. Strides
        as for q_nope.
    q_rope : tensor, (t, h_q, 64), dtype of q_nope, optional
        The part with RoPE, which becomes the last columns of the result. Strides as for q_nope.
    out : tensor, (t, h_q, 512), or (t, h_q, 576) with a `q_rope`, dtype of q_nope, optional
        Memory for the result, strides as for q_nope; such as the first 512 columns of queries whose other columns RoPE
        has been applied to in place.
    workspace : tensor, (n,), uint8, optional
        None is needed.

    Returns
    -------
    tensor, (t, h_q, 512), or (t, h_q, 576) with a `q_rope`
        Reshape it to (b, s_q, h_q, ...) for decode.

    Raises
    ------
    ShapeError, DTypeError, DeviceError, ArgumentError
        If an argument does not fit; nothing has been launched.

    Notes
    -----
    It has no gradient. A `workspace` is for calls with tensors for the results.
    """
    arrays = (q_nope, w_uk, q_rope, out)
    options = ()
    if is_plain_call(arrays):
        (out,) = run(Invocation(ABSORB_OPERATION, arrays, options, workspace))
    else:
        (out,) = call(ABSORB, arrays, options, workspace)
    return out


def merge_project(
    outs: torch.Tensor,
    w_uv: torch.Tensor,
    *,
    lses: torch.Tensor | None = None,
    gate: torch.Tensor | None = None,
    lse_base: str = "e",
    empty_lse: float = -math.inf,
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
    workspace: torch.Tensor | None = None,
    out_dtype: Any = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Merge n partial results of the same queries, and multiply them by W_UV and by the sigmoid of a gate.

    merged, lse = merge_states(outs, lses)
    out[b, s, h, d] = sum_c merged[b, s, h, c] * w_uv[h, d, c] * sigmoid(gate[b, s, h, d])

    For tensors of PyTorch: the notes of `mla_cupy.merge_project` hold here, too.

    Parameters
    ----------
    outs : tensor, (n, b, s_q, h_q, 512), bfloat16, float16 or float32
        Partial results as for `merge_states`, n up to 256: a contiguous last axis, a start and other strides that are
        multiples of 16 bytes.
    w_uv : tensor, (h_q, d_head, 512), bfloat16 or float16
        The values' half of kv_b_proj, as it lies in the weights: `kv_b_proj.reshape(h_q, -1, 512)[:, d_nope:]`; d_head
        is 64, 128, 192 or 256. Strides as for outs.
    lses : tensor, (n, b, h_q, s_q), float32, optional
        Their log-sum-exps, as for `merge_states`. May be left out where n is 1.
    gate : tensor, (b, s_q, h_q, d_head), dtype of w_uv, optional
        What the sigmoid is applied to. Strides as for outs.
    lse_base : str
        "e" or "2": base of `lses` and of the result.
    empty_lse : float
        `lse` of a row that is empty in all states; its `out` is 0.
    out : tensor, (b, s_q, h_q, d_head), optional
        Memory for the result; strides as for outs.
    lse : tensor, (b, h_q, s_q), float32, optional
        Memory for its log-sum-exp; any strides.
    workspace : tensor, (n,), uint8, optional
        None is needed.
    out_dtype : str or dtype, optional
        The dtype of w_uv or "float32". Default: the dtype of `out`, or of w_uv.

    Returns
    -------
    out : tensor, (b, s_q, h_q, d_head)
    lse : tensor, (b, h_q, s_q), float32
        None without `lses`.

    Raises
    ------
    ShapeError, DTypeError, DeviceError, ArgumentError
        If an argument does not fit; nothing has been launched.

    Notes
    -----
    It has no gradient. Tensors for the results are given all or none. A `workspace` is for calls with tensors for the
    results.
    """
    arrays = (outs, w_uv, lses, gate, out, lse)
    options = (lse_base, empty_lse, out_dtype)
    if is_plain_call(arrays) and (lses is None or (out is None) is (lse is None)):
        out, lse = run(Invocation(MERGE_OPERATION, arrays, options, workspace))
    else:
        out, lse = call(MERGE_PROJECT, arrays, options, workspace)
    return out, lse
