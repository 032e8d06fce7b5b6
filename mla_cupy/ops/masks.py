"""The mask of `mla_prefill` that leaves each query the keys that its indices select."""

from __future__ import annotations

from typing import Any

from mla_cupy.errors import ShapeError, explain
from mla_cupy.kernels.dense import MASK
from mla_cupy.kernels.dense.mask import MaskOptions, MaskProblem
from mla_cupy.kernels.dense.problem import MASK_ROW_BYTES
from mla_cupy.ops.call import call
from mla_cupy.ops.checks import STARTS, check_count, check_flag, check_starts
from mla_cupy.ops.groups import Packed
from mla_cupy.ops.operation import Examined, Operation, Output, Views, present
from mla_cupy.ops.schema import contiguous_along_last, steps_by_16_bytes
from mla_cupy.ops.sparse_inputs import INDICES
from mla_cupy.shapes import MAX_INT32

MAX_KEYS = 1 << 26
"""Most keys of a mask: 8 MiB for each query."""


def prefill_mask(
    indices: Any,
    max_keys: int,
    *,
    packed: Packed | None = None,
    relative: bool = False,
    mask: Any = None,
    workspace: Any = None,
    stream: Any = None,
) -> Any:
    """Build the mask with which `mla_prefill` attends to selected keys, such as the indexer's selection.

    Bit j % 8 of mask[i, j // 8] is 1 if indices[i] has key j of query i's sequence, and 0 otherwise.

    Parameters
    ----------
    indices : array, (s_q, topk) or (s_q, 1, topk), int32
        The keys of each query, in any order, as `indexer_select` and `indexer_topk` return them. Any topk, any strides.
        Entries that are not keys of the query's sequence, usually -1, are skipped; a key may occur more than once.
    max_keys : int
        Largest number of keys of a sequence; s_kv for one sequence. Keys beyond the mask are skipped.
    packed : Packed, optional
        Starts of several sequences, as for `mla_prefill`. A query outside all sequences gets no key. Default: one
        sequence.
    relative : bool
        True if indices count from the first key of the query's sequence, False if from the first of all keys. Pass the
        same value to `indexer_select` or `indexer_topk`.
    mask : array, (s_q, mask_bytes), uint8, optional
        Memory for the result; rows start at, and step by, multiples of 16 bytes.
    workspace : array, (n,), uint8, optional
        Unused: `workspace_bytes(prefill_mask, ...)` is 0.
    stream : int or stream object, optional
        Where to run. Default: the caller's library's current stream.

    Returns
    -------
    array, (s_q, mask_bytes), uint8
        Array of the caller's library; mask_bytes is 16 for every 128 keys of `max_keys`, rounded up.

    Raises
    ------
    ShapeError, DTypeError, DeviceError, ArgumentError
        If an argument does not fit; nothing has been launched.

    Notes
    -----
    Exact, and the same from run to run. Without `packed`, indices up to 8 * mask_bytes count as keys; `mla_prefill`
    ignores mask bits beyond its keys.

    Examples
    --------
    >>> import numpy as np, mla_cupy
    >>> indices = np.array([[0, -1, -1], [1, 0, -1], [2, 9, 0]], np.int32)
    >>> mask = mla_cupy.prefill_mask(indices, 10)
    >>> mask.shape, mask[:, :2].tolist()
    ((3, 16), [[1, 0], [3, 0], [5, 2]])
    """
    return call(prefill_mask, locals())


def _examine(views: Views, given: MaskOptions) -> Examined:
    indices = present(views, "indices")
    s_q, topk = indices.shape
    for argument, size in (("indices.shape[0]", s_q), ("topk", topk)):
        if size > MAX_INT32 // 8:
            raise ShapeError(explain(argument, size, f"at most {MAX_INT32 // 8}", "split the call"))
    check_starts(views)
    options = MaskOptions(
        max_keys=check_count("max_keys", given.max_keys, 1, MAX_KEYS),
        relative=check_flag("relative", given.relative),
    )
    mask_bytes = MASK_ROW_BYTES * -(-options.max_keys // (8 * MASK_ROW_BYTES))
    aligned = contiguous_along_last(indices) and steps_by_16_bytes(indices)
    return Examined(MaskProblem(s_q, topk, mask_bytes, aligned), options, {"mask_bytes": mask_bytes})


def _uint8(first: str) -> tuple[str, ...]:
    return ("uint8",)


OPERATION = Operation(
    "prefill_mask",
    inputs=(INDICES, *STARTS),
    outputs=(Output("mask", "s_q mask_bytes", _uint8, layout="wide"),),
    min_sizes={"b+1": 1},
    options=MaskOptions,
    examine=_examine,
    pipeline=MASK,
    groups={"packed": Packed},
)
