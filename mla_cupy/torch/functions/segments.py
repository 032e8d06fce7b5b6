"""Functions of `mla_cupy.ops.segments` for PyTorch's tensors.

Written by `python -m tests.generate` from the records there.
"""

from __future__ import annotations

import torch

from mla_cupy.ops.call import Invocation, run
from mla_cupy.ops.segments import OPERATION
from mla_cupy.torch.call import call
from mla_cupy.torch.library import is_plain_call
from mla_cupy.torch.operators import PREFILL_SEGMENTS


def prefill_segments(
    segment_ids_q: torch.Tensor,
    max_segments: int,
    *,
    segment_ids_kv: torch.Tensor | None = None,
    cu_seqlens_q: torch.Tensor | None = None,
    cu_seqlens_kv: torch.Tensor | None = None,
    workspace: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Find the starts with which `mla_prefill` attends within packed segments, by an id for each token.

    With them each query attends to the keys that have its id, and one that is padding to none. So they are for
    `mla_prefill_backward` and for `prefill_mask`.

    For tensors of PyTorch: the notes of `mla_cupy.prefill_segments` hold here, too.

    Parameters
    ----------
    segment_ids_q : tensor, (s_q,), int32
        The queries' ids; 0 and below is padding. Tokens of one id lie together. Any stride.
    max_segments : int
        The most ids, without padding, that either side has. Tokens of further ones count as padding.
    segment_ids_kv : tensor, (s_kv,), int32, optional
        The keys' ids, in the order of the queries' ids; either side may have some that the other one lacks. Default:
        those of the queries.
    cu_seqlens_q, cu_seqlens_kv : tensor, (3 * max_segments + 1,), int32, optional
        Where the results go.
    workspace : tensor, (n,), uint8, optional
        Memory for the call, 256-byte aligned, of at least `workspace_bytes(prefill_segments, ...)` bytes.

    Returns
    -------
    cu_seqlens_q, cu_seqlens_kv : tensor, (3 * max_segments + 1,), int32
        Arrays of the caller's library. There are three sequences for each segment of the queries: padding before its
        queries, which has no keys; keys before its keys, which have no queries; and itself. What is left of
        `max_segments` is empty.

    Raises
    ------
    ShapeError, DTypeError, DeviceError, ArgumentError
        If an argument does not fit; nothing has been launched.

    Notes
    -----
    It has no gradient. Tensors for the results are given all or none. A `workspace` is for calls with tensors for the
    results.
    """
    arrays = (segment_ids_q, segment_ids_kv, cu_seqlens_q, cu_seqlens_kv)
    options = (max_segments,)
    if is_plain_call(arrays) and (cu_seqlens_q is None) is (cu_seqlens_kv is None):
        cu_seqlens_q, cu_seqlens_kv = run(Invocation(OPERATION, arrays, options, workspace))
    else:
        cu_seqlens_q, cu_seqlens_kv = call(PREFILL_SEGMENTS, arrays, options, workspace)
    return cu_seqlens_q, cu_seqlens_kv
