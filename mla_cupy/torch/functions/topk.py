"""Functions of `mla_cupy.ops.indexer.topk` for PyTorch's tensors.

Written by `python -m tests.generate` from the records there.
"""

from __future__ import annotations

import torch

from mla_cupy.ops.call import Invocation, run
from mla_cupy.ops.indexer.topk import OPERATION
from mla_cupy.torch.call import call
from mla_cupy.torch.library import is_plain_call
from mla_cupy.torch.operators import INDEXER_TOPK


def indexer_topk(
    logits: torch.Tensor,
    k: int = 2048,
    *,
    ks: torch.Tensor | None = None,
    ke: torch.Tensor | None = None,
    block_table: torch.Tensor | None = None,
    order: str = "index",
    relative: bool = False,
    page_size: int = 64,
    keep_first: int = 0,
    keep_last: int = 0,
    return_values: bool = True,
    indices: torch.Tensor | None = None,
    counts: torch.Tensor | None = None,
    values: torch.Tensor | None = None,
    workspace: torch.Tensor | None = None,
    kernel: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Select the k largest logits of each row, exactly.

    Larger logits come first; of equal ones the lower index does. -0 equals +0, and NaN comes last, after -inf.

    For tensors of PyTorch: the notes of `mla_cupy.indexer_topk` hold here, too.

    Parameters
    ----------
    logits : tensor, (s_q, s_kv), float32 or bfloat16
        Scores of every key for every query. The last axis is contiguous.
    k : int
        Number of keys to select: 1 to 8192.
    ks, ke : tensor, (s_q,), int32, optional
        Row t selects among the keys ks[t] <= s < ke[t]; both are clamped to [0, s_kv]. Default: all. Logits outside are
        not read. ke may have one number for each of b sequences, b dividing s_q, as `indexer_logits_paged` takes
        `seqlens`: it is that of the last of the sequence's s_q / b consecutive rows, and each row before sees one key
        less than the next.
    block_table : tensor, (b, max_pages), int32, optional
        Return places in a paged cache: key s of a row becomes block_table[., s // page_size] * page_size + s %
        page_size, or -1 past the table's end and where the result is negative or exceeds int32. b divides s_q; each
        sequence has s_q / b consecutive rows.
    order : str
        "index": ascending, as sparse attention reads its rows fastest; "value": the largest logit first, behind the
        keys of `keep_first` and `keep_last`, which come in ascending order, whatever their logits.
    relative : bool
        Count indices from ks[t], as `sparse_mla_forward` does with `cu_seqlens_kv`. Not with `block_table`.
    page_size : int
        Tokens per page of `block_table`.
    keep_first, keep_last : int
        As many keys at the beginning and at the end of each range are selected before all others; where there are more
        than k of them, those with the lowest indices.
    return_values : bool
        Return the logits at the indices, too.
    indices : tensor, (s_q, k), int32, optional
        Where the result goes; the last axis is contiguous.
    counts : tensor, (s_q,), int32, optional
        Where the numbers of selected keys go.
    values : tensor, (s_q, k), float32, optional
        Where the logits go; the last axis is contiguous.
    workspace : tensor, (n,), uint8, optional
        As for the other operations; `workspace_bytes(indexer_topk, ...)` is 0.
    kernel : str, optional
        Name of the kernel to run, see `mla-cupy list`. Default: the fastest that fits.

    Returns
    -------
    indices : tensor, (s_q, k), int32
        -1 from counts[t] on.
    counts : tensor, (s_q,), int32
        min(k, keys in the range): what `sparse_mla_forward` calls `topk_length`.
    values : tensor, (s_q, k), float32, or None
        -inf from counts[t] on. None without `return_values`.

    Raises
    ------
    ShapeError, DTypeError, DeviceError, ArgumentError
        If an argument does not fit; nothing has been launched.

    Notes
    -----
    It has no gradient. Tensors for the results are given all or none. A `workspace` is for calls with tensors for the
    results.
    """
    arrays = (logits, ks, ke, block_table, indices, counts, values)
    options = (k, order, relative, page_size, keep_first, keep_last, return_values, kernel)
    if (
        is_plain_call(arrays)
        and (indices is None) is (counts is None)
        and (return_values is False or (indices is None) is (values is None))
    ):
        indices, counts, values = run(Invocation(OPERATION, arrays, options, workspace))
    else:
        indices, counts, values = call(INDEXER_TOPK, arrays, options, workspace)
    return indices, counts, values
