"""Functions of `mla_cupy.ops.indexer.logits` for PyTorch's tensors.

Written by `python -m tests.generate` from the records there.
"""

from __future__ import annotations

from typing import Any

import torch

from mla_cupy.ops.call import Invocation, run
from mla_cupy.ops.indexer.logits import OPERATION
from mla_cupy.torch.call import call
from mla_cupy.torch.library import is_plain_call
from mla_cupy.torch.operators import INDEXER_LOGITS


def indexer_logits(
    q: torch.Tensor,
    k: torch.Tensor,
    weights: torch.Tensor,
    ks: torch.Tensor | None = None,
    ke: torch.Tensor | None = None,
    *,
    k_scale: torch.Tensor | None = None,
    accumulate: str = "float32",
    clean: bool = True,
    logits: torch.Tensor | None = None,
    workspace: torch.Tensor | None = None,
    out_dtype: Any = None,
    kernel: str | None = None,
) -> torch.Tensor:
    """Score each key in a query's range (the lightning indexer of DeepSeek sparse attention).

    logits[t, s] = k_scale[s] * sum_h weights[t, h] * max(q[t, h] . k[s], 0) for ks[t] <= s < ke[t]

    For tensors of PyTorch: the notes of `mla_cupy.indexer_logits` hold here, too.

    Parameters
    ----------
    q : tensor, (s_q, h, d), float8_e4m3fn, uint8 or bfloat16
        Indexer queries of 1 to 128 heads, d 32, 64 or 128. uint8 holds e4m3 codes, for libraries without that dtype.
        The last axis is contiguous; other strides are free (multiples of 16 bytes are fastest).
    k : tensor, (s_kv, d), dtype of q
        Index keys. Strides as for q. Keys in e2m1 lie in pages: see `indexer_cache_append` and `indexer_logits_paged`.
    weights : tensor, (s_q, h), float32
        Weights of the heads, of any sign. The scales of q's codes and any other factors belong in here.
    ks, ke : tensor, (s_q,), int32, optional
        Query t sees the keys from ks[t] up to ke[t], both clamped to [0, s_kv]. Default: from the first, to the last.
    k_scale : tensor, (s_kv,), float32, optional
        Scales of the keys' codes. Default: 1.
    accumulate : str
        The type in which products of codes are added up: "float32" or, faster, "float16", for queries of
        `indexer_prepare_q(..., accumulate="float16")`. For other queries the caller must know that no product, nor a
        part of one, exceeds 65,504: with ``448 * sum_d abs(q[t, h, d]) <= 65504`` none does, whatever the keys.
    clean : bool
        Write -inf where a query does not see a key. Otherwise these logits keep what the memory held.
    logits : tensor, (s_q, s_kv), float32 or bfloat16, optional
        Where the result goes; the last axis is contiguous (rows that start at multiples of 4 elements are fastest).
    workspace : tensor, (n,), uint8, optional
        Memory for the call, 256-byte aligned, of at least `workspace_bytes(indexer_logits, ...)` bytes.
    out_dtype : str or dtype, optional
        "float32" or "bfloat16". Default: the dtype of `logits`, or float32.
    kernel : str, optional
        Name of the kernel to run, see `mla-cupy list`. Default: the fastest that fits.

    Returns
    -------
    tensor, (s_q, s_kv)
        Array of the caller's library.

    Raises
    ------
    ShapeError, DTypeError, DeviceError, ArgumentError
        If an argument does not fit; nothing has been launched, and `logits` is untouched.
    UnsupportedDeviceError
        If no kernel fits the GPU.

    Notes
    -----
    It has no gradient. A `workspace` is for calls with tensors for the results.
    """
    arrays = (q, k, weights, ks, ke, k_scale, logits)
    options = (accumulate, clean, out_dtype, kernel)
    if is_plain_call(arrays):
        (logits,) = run(Invocation(OPERATION, arrays, options, workspace))
    else:
        (logits,) = call(INDEXER_LOGITS, arrays, options, workspace)
    return logits
