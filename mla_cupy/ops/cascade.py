"""Decode of sequences that share a prefix: the tokens of the prefix are read once for all of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from math import inf
from typing import Any, NamedTuple

from mla_cupy.cache_formats import without_heads
from mla_cupy.errors import ArgumentError, ShapeError, explain
from mla_cupy.ops import decode as decode_operation
from mla_cupy.ops import merge as merge_operation
from mla_cupy.ops.call import call
from mla_cupy.ops.cascade_plan import CascadePlan, divide
from mla_cupy.ops.checks import explains_scale
from mla_cupy.ops.composite import Composite, CompositePipeline, check_kernels, hashable
from mla_cupy.ops.groups import Fp8
from mla_cupy.ops.operation import Arrays, Examined, Views, present
from mla_cupy.ops.prefix_groups import PrefixGroup, check_groups
from mla_cupy.shapes import D_QK, D_V


@explains_scale
def cascade_decode(
    q: Any,
    kv_cache: Any,
    block_table: Any,
    seqlens: Any,
    groups: Sequence[PrefixGroup],
    *,
    scale: float,
    causal: bool = True,
    fp8: Fp8 | None = None,
    lse_base: str = "e",
    empty_lse: float = -inf,
    out: Any = None,
    lse: Any = None,
    out_dtype: Any = None,
    plan: CascadePlan | None = None,
    workspace: Any = None,
    kernel: Any = None,
    stream: Any = None,
) -> tuple[Any, Any]:
    """Decode like `mla_decode`, but read the shared prefix of each group once.

    Parameters
    ----------
    q, kv_cache, block_table, seqlens, scale, causal, fp8, lse_base, empty_lse, out, lse, out_dtype, stream
        As for `mla_decode`, but the scales in `fp8` are numbers. The page tables of a group's sequences begin with the
        same pages, and every query token sees all of these; `shared_prefixes` finds such groups on the host. Queries
        are copied if the first two axes of a group do not step evenly.
    groups : sequence of PrefixGroup
        Disjoint, in the order of the batch. Without groups this is `mla_decode`.
    plan : CascadePlan, optional
        From `plan_cascade`, after `update`, which sets the lengths. A plan saves making the schedules, computing the
        lengths after the prefixes, and allocating. `stream` is then the stream of the update.
    workspace : array, (n,), uint8, optional
        Memory for the call, 256-byte aligned, of at least `workspace_bytes(cascade_decode, ...)` bytes. Excludes
        `plan`, which has its own.
    kernel : str or mapping, optional
        Name of a kernel to run, see `mla-cupy list`; or a name for each of the stages "prefix", "rest", "merge" and,
        for sequences outside groups, "alone".

    Returns
    -------
    out : array, (b, s_q, h_q, 512)
    lse : array, (b, h_q, s_q), float32

    Raises
    ------
    ShapeError, DTypeError, DeviceError, ArgumentError, PlanError
        If an argument does not fit; nothing has been launched, and `out` and `lse` are untouched.

    Notes
    -----
    Each group runs one `mla_decode` over the pages of its prefix, with the queries of all its sequences as if of one
    sequence; one over the rest of each sequence; and one `merge_states`. With `out`, `lse`, and a plan or a
    `workspace`, a call can be captured in a CUDA graph. Replays are right as long as the prefixes stay; lengths may
    change. Workspace: 4 KB per query row of the largest group, for partial results in float32, and the workspaces of
    `mla_decode`.

    Examples
    --------
    >>> import numpy as np, mla_cupy
    >>> q, cache = np.ones((2, 1, 16, 576), np.float16), np.ones((4, 64, 576), np.float16)
    >>> table, seqlens = np.array([[2, 0], [2, 1]], np.int32), np.array([100, 70], np.int32)
    >>> groups = mla_cupy.shared_prefixes(table, seqlens, page_size=64, h_q=16, always=True)
    >>> out, lse = mla_cupy.cascade_decode(q, cache, table, seqlens, groups, scale=192**-0.5)
    >>> [round(float(x), 3) for x in lse[:, 0, 0]]
    [46.174, 45.818]
    """
    return call(cascade_decode, locals())


class CascadeOptions(NamedTuple):
    """The arguments other than arrays."""

    groups: Any
    scale: Any
    causal: Any
    math: Any
    q_scale: Any
    lse_base: Any
    empty_lse: Any
    out_dtype: Any
    kernel: Any


def _hashable(groups: Any) -> Any:
    """The groups in a form by which calls are known again, if they are groups at all."""
    return tuple(map(tuple, groups)) if isinstance(groups, (list, tuple)) and all(map(_is_row, groups)) else groups


def _is_row(group: Any) -> bool:
    return isinstance(group, (list, tuple))


_OF_DECODE = "scale", "causal", "q_scale", "math", "lse_base", "empty_lse"
"""Options that are examined like decode's."""


def _examine(views: Views, options: CascadeOptions) -> Examined:
    absent = dict.fromkeys(array.name for array in decode_operation.OPERATION.inputs if array.optional)
    if (d_qk := present(views, "q").shape[-1]) not in (D_QK, D_V):
        raise ShapeError(explain("q.shape[-1]", d_qk, f"{D_QK} or {D_V}", "decode narrower keys with mla_decode"))
    of_decode = decode_operation.OPERATION.examine({**absent, **views}, _of_decode(options))
    q, table = present(views, "q"), present(views, "block_table")
    groups = check_groups(options.groups, q.shape[0], table.shape[1])
    resolved = options._replace(
        **{name: getattr(of_decode.options, name) for name in _OF_DECODE},
        groups=groups,
        kernel=check_kernels(_PIPELINE, options.kernel),
    )
    return Examined(None, resolved)


def _of_decode(options: CascadeOptions) -> Any:
    numbers = {name: value for name, value in options._asdict().items() if name not in ("groups", "kernel")}
    return decode_operation.OPERATION.options_of(**numbers)


def _check_values(arrays: Arrays, options: CascadeOptions) -> None:
    """Check lengths and pages, and that each group's prefix is shared and seen."""
    decode_operation.check_values(arrays, 1, 0)
    table, seqlens = present(arrays, "block_table"), present(arrays, "seqlens")
    page_size, s_q = without_heads(present(arrays, "kv_cache")).shape[1], present(arrays, "q").shape[1]
    for number, (first, count, pages) in enumerate(options.groups):
        for sequence in range(first, first + count):
            least = pages * page_size + (s_q - 1 if options.causal else 0)
            if seqlens[sequence] < least:
                expected = f"at least {least}, so that every query of groups[{number}] sees its prefix"
                raise ArgumentError(explain(f"seqlens[{sequence}]", int(seqlens[sequence]), expected))
            differs = (table[sequence, :pages] != table[first, :pages]).nonzero()[0]
            if differs.size:
                where = f"block_table[{sequence}, {differs[0]}]"
                expected = f"{table[first, differs[0]]}, the page of groups[{number}]"
                raise ArgumentError(explain(where, int(table[sequence, differs[0]]), expected))


_PIPELINE = CompositePipeline(
    prefix=decode_operation.OPERATION,
    rest=decode_operation.OPERATION,
    alone=decode_operation.OPERATION,
    merge=merge_operation.OPERATION,
)

OPERATION = Composite(
    "cascade_decode",
    inputs=tuple(array for array in decode_operation.OPERATION.inputs if not array.optional),
    outputs=tuple(
        dataclasses.replace(output, axes=output.axes.replace("d_head", "d_v"), coded="")
        for output in decode_operation.OPERATION.outputs
        if not output.when
    ),
    sizes=decode_operation.OPERATION.sizes,
    min_sizes=decode_operation.OPERATION.min_sizes,
    options=CascadeOptions,
    examine=_examine,
    check_values=_check_values,
    pipeline=_PIPELINE,
    divide=divide,
    keys={"groups": _hashable, "kernel": hashable},
    groups={"fp8": Fp8},
)
