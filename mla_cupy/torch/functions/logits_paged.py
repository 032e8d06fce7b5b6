"""Functions of `mla_cupy.ops.indexer.logits_paged` for PyTorch's tensors.

Written by `python -m tests.generate` from the records there.
"""

from __future__ import annotations

from typing import Any

import torch

from mla_cupy.ops.call import Invocation, run
from mla_cupy.ops.indexer.logits_paged import OPERATION
from mla_cupy.torch.call import call
from mla_cupy.torch.library import is_plain_call
from mla_cupy.torch.operators import INDEXER_LOGITS_PAGED


def indexer_logits_paged(
    q: torch.Tensor,
    cache: torch.Tensor,
    weights: torch.Tensor,
    seqlens: torch.Tensor,
    block_table: torch.Tensor,
    *,
    clean: bool = True,
    logits: torch.Tensor | None = None,
    workspace: torch.Tensor | None = None,
    out_dtype: Any = None,
    kernel: str | None = None,
) -> torch.Tensor:
    """Score the cached index keys of each sequence for its next tokens.

    logits[n, i, s] = scale[s] * sum_h weights[n, i, h] * max(q[n, i, h] . key[s], 0) for s < length(n, i)

    For tensors of PyTorch: the notes of `mla_cupy.indexer_logits_paged` hold here, too.

    Parameters
    ----------
    q : tensor, (b, s_q, h, d), float8_e4m3fn or uint8
        e4m3 codes of 1 to 128 heads, d 32, 64 or 128, of up to 8 next tokens (more: the slow kernel). Strides as for
        `indexer_logits`.
    cache : tensor, (num_pages, page_size, d + 4), uint8
        Pages of records: in each page, the codes of all its keys, then their float32 scales. A page is contiguous;
        pages lie multiples of 16 bytes apart. An axis of size 1 may stand on either side of the keys, as for
        `mla_decode`. Pages of 64 keys of d = 128 are fast. Keys of 128 elements may have 68 bytes: 64 of e2m1, the
        first of two elements in the lower half of a byte, then, after the codes of all keys, the exponents of four
        scales, of 32 elements each (ue8m0).
    weights : tensor, (b, s_q, h), float32
        As for `indexer_logits`.
    seqlens : tensor, (b,) or (b, s_q), int32
        Number of keys that each token sees. With one number n per sequence, token i sees n - s_q + 1 + i keys. Each
        token's number is clamped to [0, max_pages * page_size], after that subtraction.
    block_table : tensor, (b, max_pages), int32
        The pages of each sequence. Entries that no token needs are not read; a page that does not exist has logits of
        0.
    clean : bool
        Write -inf for keys that a token does not see. Otherwise these logits keep what the memory held.
    logits : tensor, (b, s_q, max_pages * page_size), float32 or bfloat16, optional
        Where the result goes; the last axis is contiguous.
    workspace, out_dtype, kernel : optional
        As for `indexer_logits`.

    Returns
    -------
    tensor, (b, s_q, max_pages * page_size)
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
    arrays = (q, cache, weights, seqlens, block_table, logits)
    options = (clean, out_dtype, kernel)
    if is_plain_call(arrays):
        (logits,) = run(Invocation(OPERATION, arrays, options, workspace))
    else:
        (logits,) = call(INDEXER_LOGITS_PAGED, arrays, options, workspace)
    return logits
