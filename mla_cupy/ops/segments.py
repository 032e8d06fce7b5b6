"""The starts of packed sequences, for `mla_prefill`, by the ids of their tokens."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np

from mla_cupy.errors import ArgumentError, explain
from mla_cupy.kernels.dense import SEGMENTS
from mla_cupy.kernels.dense.segments import PARTS, SegmentsOptions, SegmentsProblem
from mla_cupy.ops.call import call
from mla_cupy.ops.checks import check_count, name_first
from mla_cupy.ops.operation import Arrays, Examined, Input, Operation, Output, Views, only_int32, present

MAX_SEGMENTS = 1 << 14
"""Most segments: each of the queries' is compared with the keys'."""


def prefill_segments(
    segment_ids_q: Any,
    max_segments: int,
    *,
    segment_ids_kv: Any = None,
    cu_seqlens_q: Any = None,
    cu_seqlens_kv: Any = None,
    workspace: Any = None,
    stream: Any = None,
) -> tuple[Any, Any]:
    """Compute the sequence starts with which `mla_prefill` attends within packed segments, from an id per token.

    Each query then attends to the keys with its id, and padding queries attend to none. The starts also serve
    `mla_prefill_backward` and `prefill_mask`.

    Parameters
    ----------
    segment_ids_q : array, (s_q,), int32
        The queries' ids; 0 and below is padding. Tokens of one id are contiguous. Any stride.
    max_segments : int
        Largest number of ids, without padding, on either side. Tokens of further ids count as padding.
    segment_ids_kv : array, (s_kv,), int32, optional
        The keys' ids, in the order of the queries' ids; either side may lack ids of the other one. Default: the
        queries' ids.
    cu_seqlens_q, cu_seqlens_kv : array, (3 * max_segments + 1,), int32, optional
        Memory for the results. Not for JAX, whose arrays cannot be written.
    workspace : array, (n,), uint8, optional
        Memory for the call, 256-byte aligned, of at least `workspace_bytes(prefill_segments, ...)` bytes.
    stream : int or stream object, optional
        Where to run. Default: the caller's library's current stream.

    Returns
    -------
    cu_seqlens_q, cu_seqlens_kv : array, (3 * max_segments + 1,), int32
        Arrays of the caller's library. Each segment of the queries gives three sequences: padding before its queries,
        without keys; keys before its keys, without queries; and the segment itself. Unused entries up to `max_segments`
        are empty sequences.

    Raises
    ------
    ShapeError, DTypeError, DeviceError, ArgumentError
        If an argument does not fit; nothing has been launched.

    Notes
    -----
    Exact, and the same from run to run. The host does not read the ids without `checking`, so the call can be captured
    in a CUDA graph. Starts never decrease, whatever the ids are. Workspace: 12 bytes per segment of `max_segments`, 36
    with `segment_ids_kv`.

    Examples
    --------
    >>> import numpy as np, mla_cupy
    >>> ids = np.array([1, 1, 1, 0, 2, 2], np.int32)
    >>> starts, _ = mla_cupy.prefill_segments(ids, 2)
    >>> starts.tolist()  # nothing, nothing, three tokens; one of padding, nothing, two tokens
    [0, 0, 0, 3, 4, 4, 6]
    """
    return call(prefill_segments, locals())


def _examine(views: Views, given: SegmentsOptions) -> Examined:
    most = check_count("max_segments", given.max_segments, 1, MAX_SEGMENTS)
    queries, keys = present(views, "segment_ids_q"), views["segment_ids_kv"]
    problem = SegmentsProblem(
        queries.shape[0], queries.shape[0] if keys is None else keys.shape[0], most, keys is not None
    )
    return Examined(problem, SegmentsOptions(most), {"starts": PARTS * most + 1})


def _check_values(arrays: Arrays, options: SegmentsOptions) -> None:
    places: list[dict[int, int]] = []
    for name in ("segment_ids_q", "segment_ids_kv"):
        ids = arrays[name]
        if ids is None:
            return
        begins = np.flatnonzero((ids > 0) & (ids != np.concatenate([[0], ids[:-1]])))
        found: dict[int, int] = {}
        for at in begins.tolist():
            if int(ids[at]) in found:
                earlier = f"an id that does not come again: it has begun at {found[int(ids[at])]}"
                raise ArgumentError(explain(f"{name}[{at}]", int(ids[at]), earlier, "give each segment its own id"))
            found[int(ids[at])] = at
        further = np.zeros(len(ids), bool)
        further[begins[options.max_segments :]] = True
        name_first(name, ids, further, f"one of max_segments={options.max_segments} ids")
        places.append(found)
    queries, keys = places
    common = [name for name in queries if name in keys]
    for before, later in itertools.pairwise(common):
        if keys[later] < keys[before]:
            expected = f"an id behind {before}, as in segment_ids_q"
            raise ArgumentError(explain(f"segment_ids_kv[{keys[later]}]", later, expected, "sort the segments"))


OPERATION = Operation(
    "prefill_segments",
    inputs=(Input("segment_ids_q", "s_q", ("int32",)), Input("segment_ids_kv", "s_kv", ("int32",), optional=True)),
    outputs=(Output("cu_seqlens_q", "starts", only_int32), Output("cu_seqlens_kv", "starts", only_int32)),
    options=SegmentsOptions,
    examine=_examine,
    check_values=_check_values,
    pipeline=SEGMENTS,
)
