"""Functions of `mla_cupy.ops.masks` for PyTorch's tensors.

Written by `python -m tests.generate` from the records there.
"""

from __future__ import annotations

import torch

from mla_cupy.ops.call import Invocation, run
from mla_cupy.ops.masks import OPERATION
from mla_cupy.torch.call import call
from mla_cupy.torch.library import is_plain_call
from mla_cupy.torch.operators import PREFILL_MASK


def prefill_mask(
    indices: torch.Tensor,
    max_keys: int,
    *,
    cu_seqlens_q: torch.Tensor | None = None,
    cu_seqlens_kv: torch.Tensor | None = None,
    relative: bool = False,
    mask: torch.Tensor | None = None,
    workspace: torch.Tensor | None = None,
) -> torch.Tensor:
    """Make the mask with which `mla_prefill` attends to the keys that indices select, such as those of the indexer.

    Bit j % 8 of mask[i, j // 8] is 1 if indices[i] has key j of query i's sequence, and 0 otherwise.

    For tensors of PyTorch: the notes of `mla_cupy.prefill_mask` hold here, too.

    Parameters
    ----------
    indices : tensor, (s_q, topk) or (s_q, 1, topk), int32
        The keys of each query, in any order, as `indexer_select` and `indexer_topk` return them. Any topk, any strides.
        Entries that are no key of the query's sequence are skipped, -1 being the usual mark; a key may occur more than
        once.
    max_keys : int
        The most keys that a sequence has; one sequence: s_kv. Keys that have no bit are skipped as well.
    cu_seqlens_q, cu_seqlens_kv : tensor, (b + 1,), int32, optional
        Where the sequences begin, as for `mla_prefill`. A query of no sequence gets no key. Both or none; default: one
        sequence.
    relative : bool
        True if indices count from the first key of the query's sequence, False if from the first of all keys. Pass the
        same as to `indexer_select` or `indexer_topk`.
    mask : tensor, (s_q, mask_bytes), uint8, optional
        Where the result goes; rows start at, and step by, multiples of 16 bytes.
    workspace : tensor, (n,), uint8, optional
        As for the other operations; `workspace_bytes(prefill_mask, ...)` is 0.

    Returns
    -------
    tensor, (s_q, mask_bytes), uint8
        Array of the caller's library; mask_bytes is 16 for every 128 keys of `max_keys`, rounded up.

    Raises
    ------
    ShapeError, DTypeError, DeviceError, ArgumentError
        If an argument does not fit; nothing has been launched.

    Notes
    -----
    It has no gradient. A `workspace` is for calls with tensors for the results.
    """
    arrays = (indices, cu_seqlens_q, cu_seqlens_kv, mask)
    options = (max_keys, relative)
    if is_plain_call(arrays):
        (mask,) = run(Invocation(OPERATION, arrays, options, workspace))
    else:
        (mask,) = call(PREFILL_MASK, arrays, options, workspace)
    return mask
