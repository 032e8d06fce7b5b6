"""Functions of `mla_cupy.ops.prefill_backward` for PyTorch's tensors.

Written by `python -m tests.generate` from the records there.
"""

from __future__ import annotations

import torch

from mla_cupy.ops.call import Invocation, run
from mla_cupy.ops.prefill_backward import OPERATION
from mla_cupy.torch.call import call
from mla_cupy.torch.library import is_plain_call
from mla_cupy.torch.operators import MLA_PREFILL_BACKWARD


def mla_prefill_backward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    dout: torch.Tensor,
    lse: torch.Tensor,
    *,
    q_rope: torch.Tensor | None = None,
    k_rope: torch.Tensor | None = None,
    dlse: torch.Tensor | None = None,
    cu_seqlens_q: torch.Tensor | None = None,
    cu_seqlens_kv: torch.Tensor | None = None,
    causal: bool = True,
    scale: float | None = None,
    deterministic: bool = False,
    dq: torch.Tensor | None = None,
    dk: torch.Tensor | None = None,
    dv: torch.Tensor | None = None,
    dq_rope: torch.Tensor | None = None,
    dk_rope: torch.Tensor | None = None,
    workspace: torch.Tensor | None = None,
    kernel: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """Gradients of `mla_prefill` with respect to queries, keys and values.

    With P = exp(scale * q . k - lse), dP = dout . v, delta = sum(out * dout) - dlse and dS = scale * P * (dP - delta):

    dq = dS k,   dk = dS^T q,   dv = P^T dout

    summed over the query heads of a KV head, and the keys' last columns over the heads that share them.

    For tensors of PyTorch: the notes of `mla_cupy.mla_prefill_backward` hold here, too. Autograd calls it; call it
    yourself to say where the gradients go, such as dk and dv to one tensor.

    Parameters
    ----------
    q, k, v, q_rope, k_rope, cu_seqlens_q, cu_seqlens_kv, causal, scale
        As for the forward.
    out : tensor, (s_q, h_q, d_v), dtype of q or float32
        As the forward returned it. With `lse`, it may be that of attention to more keys than these, such as the merged
        result of all chunks: then these are the gradients of this chunk's keys and values, and its part of dq.
    dout : tensor, (s_q, h_q, d_v), dtype of q
        Gradient with respect to `out`. The last axes of both are contiguous.
    lse : tensor, (s_q, h_q), float32
        As the forward returned it, or merged. Both infinities mark a query without a key: it has no gradient, and
        contributes none. From 4.6e7 on, float32 does not tell how many keys share the largest score: each of these has
        a weight of 1.
    dlse : tensor, (s_q, h_q), float32, optional
        Gradient with respect to `lse`, as for a loss of its own or for a merge outside.
    deterministic : bool
        Make all results bitwise reproducible: see the notes.
    dq : tensor, shape and dtype of q, optional
        Where the gradient goes: a contiguous last axis, other steps of multiples of 16 bytes.
    dk, dv, dq_rope, dk_rope : tensor, shapes of k, v, q_rope and k_rope, dtype of q, optional
        The same for these. `dk` and `dv` may be views of one tensor, such as the gradient of a projection's (s_kv,
        h_kv, 128 + 128).
    workspace : tensor, (n,), uint8, optional
        Memory for the call, 256-byte aligned, of at least `workspace_bytes(mla_prefill_backward, ...)` bytes.
    kernel : str, optional
        Name of the kernel that makes the gradients of keys, see `mla-cupy list`. Default: the fastest that fits.

    Returns
    -------
    dq : tensor, shape and dtype of q
        Array of the caller's library; 0 for a query without a key.
    dk, dv : tensor, shapes of k and v
        0 for a key that no query sees.
    dq_rope, dk_rope : tensor, shapes of q_rope and k_rope, or None
        None where these are not given.

    Raises
    ------
    ShapeError, DTypeError, DeviceError, ArgumentError
        If an argument does not fit; nothing has been launched, and the results' memory is untouched.
    UnsupportedDeviceError
        If no kernel fits the GPU.

    Notes
    -----
    It has no gradient. Tensors for the results are given all or none. A `workspace` is for calls with tensors for the
    results.
    """
    arrays = (q, k, v, out, dout, lse, q_rope, k_rope, dlse, cu_seqlens_q, cu_seqlens_kv, dq, dk, dv, dq_rope, dk_rope)
    options = (causal, scale, deterministic, kernel)
    if (
        is_plain_call(q)
        and (dq is None) is (dk is None) is (dv is None)
        and (q_rope is None or (dq is None) is (dq_rope is None))
        and (k_rope is None or (dq is None) is (dk_rope is None))
    ):
        dq, dk, dv, dq_rope, dk_rope = run(Invocation(OPERATION, arrays, options, workspace))
    else:
        dq, dk, dv, dq_rope, dk_rope = call(MLA_PREFILL_BACKWARD, arrays, options, workspace)
    return dq, dk, dv, dq_rope, dk_rope
