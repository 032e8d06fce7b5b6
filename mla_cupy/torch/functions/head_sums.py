"""Functions of `mla_cupy.ops.indexer.head_sums` for PyTorch's tensors.

Written by `python -m tests.generate` from the records there.
"""

from __future__ import annotations

import torch

from mla_cupy.ops.call import Invocation, run
from mla_cupy.ops.indexer.head_sums import OPERATION
from mla_cupy.torch.call import call
from mla_cupy.torch.library import is_plain_call
from mla_cupy.torch.operators import INDEXER_HEAD_SUMS


def indexer_head_sums(
    q: torch.Tensor,
    k: torch.Tensor,
    *,
    q_rope: torch.Tensor | None = None,
    k_rope: torch.Tensor | None = None,
    indices: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
    topk_length: torch.Tensor | None = None,
    cu_seqlens_q: torch.Tensor | None = None,
    cu_seqlens_kv: torch.Tensor | None = None,
    scale: float | None = None,
    causal: bool | None = None,
    relative: bool = True,
    buffer_bytes: int = 536870912,
    head_sums: torch.Tensor | None = None,
    workspace: torch.Tensor | None = None,
    kernel: str | None = None,
) -> torch.Tensor:
    """Sum the main attention's probabilities over the heads of one rank, for the indexer's losses.

    head_sums[t, s] = sum_h exp(scale * q[t, h] . k[s] - lse[t, h])

    With tensor parallelism a rank has a share of the heads, but the target of `indexer_warmup_loss` and
    `indexer_sparse_loss` is normalised over all of them: each rank calls this for its heads, the results are added up
    over the ranks (an all-reduce), and the loss takes the sum as its `head_sums`.

    For tensors of PyTorch: the notes of `mla_cupy.indexer_head_sums` hold here, too.

    Parameters
    ----------
    q : tensor, (s_q, h, d), bfloat16
        Queries of the rank's heads; d is at most 576. The last axes of queries and keys are contiguous.
    k : tensor, (s_kv, d), or per KV head (s_kv, h_kv, d), bfloat16
        Keys, as for `indexer_warmup_loss`: of all heads, or of the rank's KV heads.
    q_rope, k_rope : tensor, optional
        The last 64 columns of queries and keys, as for `indexer_warmup_loss`.
    indices : tensor, (s_q, topk) or (s_q, 1, topk), int32, optional
        For the sparse stage: as for `indexer_sparse_loss`, and the same on all ranks. Default: all keys.
    lse : tensor, (s_q, h), float32, optional
        As for the losses, of these heads. Default: computed, over the keys that are seen.
    topk_length : tensor, (s_q,), int32, optional
        With indices: as for `indexer_sparse_loss`.
    cu_seqlens_q, cu_seqlens_kv : tensor, (b + 1,), int32, optional
        As for the losses.
    scale : float, optional
        Factor of the scores; default: d**-0.5.
    causal : bool, optional
        As for the losses, whose defaults are those here: True for all keys, False with indices.
    relative : bool
        With indices: as for `indexer_sparse_loss`.
    buffer_bytes : int
        The tokens are processed in chunks whose sums fit; a chunk has at least one token.
    head_sums : tensor, (s_q, s_kv) or (s_q, topk), float32, optional
        Where the result goes; the last axis is contiguous.
    workspace : tensor, (n,), uint8, optional
        Memory for the call, 256-byte aligned, of at least `workspace_bytes(indexer_head_sums, ...)` bytes.
    kernel : str, optional
        Name of the main kernel to run, see `mla-cupy list`. Default: the fastest that fits.

    Returns
    -------
    tensor, (s_q, s_kv), float32
        0 for keys that a query does not see. With indices (s_q, topk): the n-th number of a row belongs to the n-th of
        its indices that count; 0 after the last.

    Raises
    ------
    ShapeError, DTypeError, DeviceError, ArgumentError
        If an argument does not fit; nothing has been launched, and the result is untouched.
    UnsupportedDeviceError
        If no kernel fits the GPU.

    Notes
    -----
    It has no gradient: nothing flows to the main attention. A `workspace` is for calls with tensors for the results.
    """
    arrays = (q, k, q_rope, k_rope, indices, lse, topk_length, cu_seqlens_q, cu_seqlens_kv, head_sums)
    options = (scale, causal, relative, buffer_bytes, kernel)
    if is_plain_call(arrays) and not torch.is_grad_enabled():
        (head_sums,) = run(Invocation(OPERATION, arrays, options, workspace))
    else:
        (head_sums,) = call(INDEXER_HEAD_SUMS, arrays, options, workspace)
    return head_sums
