"""Decode of sequences that share a prefix: the tokens of the prefix are read once for all of them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from mla_cupy import arrays as families
from mla_cupy.arrays.view import HOST
from mla_cupy.errors import ArgumentError, ShapeError, explain
from mla_cupy.ops.checks import check_count, check_dtype, check_flag
from mla_cupy.ops.decode import mla_decode
from mla_cupy.ops.merge import merge_states
from mla_cupy.runtime import device as devices
from mla_cupy.shapes import D_V, TILE_TOKENS

Array = npt.NDArray[np.integer[Any]]

_MAX_INT32 = 2**31 - 1
_THRESHOLDS = 16
"""How many lengths of shared prefixes are tried as the shortest of a group."""

# What the model counts with, in microseconds of an H200. See docs/guides/paged-cache.md for where they are from.
_TILE_US = 2.0
"""A tile of 64 tokens for 64 query rows."""
_SMALL_TILE_US = 1.2
"""The same for up to 32 rows, where many sequences read it: from the L2."""
_SMALL_ROWS = 32
_GROUP_US = 14.0
"""Two more launches of attention, the merge, and the lengths."""
_ASSUMED_SMS = 132


class PrefixGroup(NamedTuple):
    """Sequences [first, first + sequences) of a batch, whose first `pages` pages are the same."""

    first: int
    sequences: int
    pages: int


def shared_prefixes(
    block_table: Array,
    seqlens: Array,
    *,
    page_size: int,
    h_q: int,
    s_q: int = 1,
    always: bool = False,
    device: int | None = None,
) -> tuple[PrefixGroup, ...]:
    """Find the neighbours in a batch whose prefixes are worth a call of their own.

    Parameters
    ----------
    block_table : numpy.ndarray, (b, max_pages), integers
        The pages of each sequence, on the host. Sequences that share a prefix must be neighbours.
    seqlens : numpy.ndarray, (b,), integers
        Tokens of each sequence, the query tokens included; on the host.
    page_size, h_q, s_q : int
        As of the calls of `cascade_decode`.
    always : bool
        Every prefix of a page or more that two neighbours share; by default those with which a model of the GPU says
        that the call gets faster.
    device : int, optional
        CUDA ordinal of the GPU that the model is asked about. Default: a GPU with 132 multiprocessors.

    Returns
    -------
    tuple of PrefixGroup
        Disjoint, in the order of the batch; empty if nothing is to be gained.

    Raises
    ------
    ShapeError, ArgumentError

    Notes
    -----
    Only whole pages count which every query token sees. Where a few neighbours share more than all do, the groups are
    those that save the most, each with one prefix.

    Examples
    --------
    >>> import numpy as np, mla_cupy
    >>> table = np.array([[7, 3, 1, 0], [7, 3, 2, 0], [7, 3, 4, 5], [6, 0, 0, 0]])
    >>> mla_cupy.shared_prefixes(table, np.array([40, 33, 64, 9]), page_size=16, h_q=16, always=True)
    (PrefixGroup(first=0, sequences=3, pages=2),)
    """
    table, lengths = np.asarray(block_table), np.asarray(seqlens)
    if table.ndim != 2 or lengths.shape != table.shape[:1]:
        got = f"{table.shape} and {lengths.shape}"
        raise ShapeError(explain("block_table.shape and seqlens.shape", got, "(b, max_pages) and (b,)"))
    for argument, value in (("page_size", page_size), ("h_q", h_q), ("s_q", s_q)):
        check_count(argument, value, 1, _MAX_INT32)
    always = check_flag("always", always)
    if len(table) < 2:
        return ()
    common = _common_pages(table, np.clip((lengths - s_q + 1) // page_size, 0, table.shape[1]))
    sms = _ASSUMED_SMS if device is None else devices.describe(device).sm_count
    rows = s_q * h_q
    found: tuple[float, tuple[PrefixGroup, ...]] = (0.0, ())
    candidates = np.unique(common[common > 0])
    for least in candidates[np.linspace(0, len(candidates) - 1, min(len(candidates), _THRESHOLDS)).astype(int)]:
        groups, saved = [], 0.0
        for group in _runs(common, int(least)):
            gain = _saved_us(group, rows, page_size, sms)
            if always or gain > 0:
                groups.append(group)
                saved += group.pages * (group.sequences - 1) if always else gain
        found = max(found, (saved, tuple(groups)))
    return found[1]


def cascade_decode(
    q: Any,
    kv_cache: Any,
    block_table: Any,
    seqlens: Any,
    groups: Sequence[PrefixGroup],
    *,
    scale: float | None = None,
    causal: bool = True,
    lse_base: str = "e",
    empty_lse: float = -math.inf,
    out: Any = None,
    lse: Any = None,
    out_dtype: Any = None,
) -> tuple[Any, Any]:
    """Do what `mla_decode` does, with the shared prefix of each group read once.

    Parameters
    ----------
    q, kv_cache, block_table, seqlens, scale, causal, lse_base, empty_lse, out, lse, out_dtype
        As for `mla_decode`. The page tables of a group's sequences begin with the same pages, and every query token
        sees all of these: what `shared_prefixes` says of them on the host.
    groups : sequence of PrefixGroup
        Disjoint, in the order of the batch. Without any it is a call of `mla_decode`.

    Returns
    -------
    out : array, (b, s_q, h_q, 512)
    lse : array, (b, h_q, s_q), float32

    Raises
    ------
    ShapeError, DTypeError, DeviceError, ArgumentError
        If an argument does not fit. What comes before a bad group may have been launched.

    Notes
    -----
    Of each group: one call of `mla_decode` in which the queries of all its sequences are those of one, over the pages
    of the first sequence's prefix; one over what each has behind it; and `merge_states`. Runs on the caller's library's
    current stream. With `out` and `lse` it can be captured in a CUDA graph, whose replays are right as long as the
    prefixes stay; lengths may change. Workspace: 4 KB per query row of a group, for partial results in float32.

    Examples
    --------
    >>> import numpy as np, mla_cupy
    >>> q, cache = np.ones((2, 1, 16, 576), np.float16), np.ones((4, 64, 576), np.float16)
    >>> table, seqlens = np.array([[2, 0], [2, 1]], np.int32), np.array([100, 70], np.int32)
    >>> groups = mla_cupy.shared_prefixes(table, seqlens, page_size=64, h_q=16, always=True)
    >>> out, lse = mla_cupy.cascade_decode(q, cache, table, seqlens, groups)
    >>> [round(float(x), 3) for x in lse[:, 0, 0]]
    [28.605, 28.248]
    """
    family = families.common_family({"q": q, "kv_cache": kv_cache, "block_table": block_table, "seqlens": seqlens})
    given = {name: x for name, x in (("out", out), ("lse", lse)) if x is not None}
    families.check_writable(family, given)
    native = family.native
    q, kv_cache, block_table, seqlens = (family.adopt(x) for x in (q, kv_cache, block_table, seqlens))
    view, pages = native.view(q, "q"), native.view(kv_cache, "kv_cache")
    if len(view.shape) != 4 or len(pages.shape) not in (3, 4):
        raise ShapeError(explain("q.shape and kv_cache.shape", (view.shape, pages.shape), "those of mla_decode"))
    b, s_q, h_q, _ = view.shape
    _check_groups(groups, b, native.view(block_table, "block_table").shape[-1])
    handle = 0 if view.device == HOST else native.current_stream(view.device)
    dtype = check_dtype("out_dtype", out_dtype) or view.dtype
    shapes = {"out": ((b, s_q, h_q, D_V), dtype), "lse": ((b, h_q, s_q), "float32")}
    out, lse = (
        family.adopt(given[name]) if name in given else native.empty(*shapes[name], view.device, handle)
        for name in shapes
    )
    _check_results(native, out, lse, {name: shape for name, (shape, _) in shapes.items()})
    batch = _Batch(native, q, kv_cache, block_table, seqlens, {"scale": scale, "lse_base": lse_base}, causal, handle)
    begin = 0
    for group in (*groups, PrefixGroup(b, 0, 0)):
        if begin < group.first or not b:  # also of an empty batch, whose arguments are checked
            part = slice(begin, group.first)
            mla_decode(
                *batch.of(part),
                **batch.options,
                causal=causal,
                empty_lse=empty_lse,
                out=out[part],
                lse=lse[part],
            )
        begin = group.first + group.sequences
        if group.sequences:
            part = slice(group.first, begin)
            outs, lses = batch.partials(group, pages.shape[1])
            merge_states(outs, lses, lse_base=lse_base, empty_lse=empty_lse, out=out[part], lse=lse[part])
    family.settle((q, kv_cache, block_table, seqlens, out, lse))
    return (
        given["out"] if "out" in given else family.release(out),
        given["lse"] if "lse" in given else family.release(lse),
    )


class _Batch(NamedTuple):
    """The arguments of a call, as arrays of a native family."""

    native: Any
    q: Any
    kv_cache: Any
    block_table: Any
    seqlens: Any
    options: dict[str, Any]
    causal: bool
    stream: int

    def of(self, part: slice) -> tuple[Any, Any, Any, Any]:
        """Those of some sequences."""
        return self.q[part], self.kv_cache, self.block_table[part], self.seqlens[part]

    def partials(self, group: PrefixGroup, page_size: int) -> tuple[Any, Any]:
        """The states of a group's sequences over their prefix, and over what they have behind it: for `merge_states`.

        The queries of all of them are those of one sequence. Its lse is (1, h_q, n * s_q): so the axes of heads come
        before those of sequences in memory.
        """
        first, n, pages = group
        q, cache, table, seqlens = self.of(slice(first, first + n))
        _, s_q, h_q, d_qk = self.native.view(q, "q").shape
        device, tokens = self.native.view(q, "q").device, pages * page_size
        outs = self.native.empty((2, n, s_q, h_q, D_V), "float32", device, self.stream)
        lses = self.native.empty((2, h_q, n, s_q), "float32", device, self.stream)
        mla_decode(
            q.reshape(1, n * s_q, h_q, d_qk),
            cache,
            table[:1, :pages],
            seqlens[:1] * 0 + tokens,
            **self.options,
            causal=False,
            out=outs[0].reshape(1, n * s_q, h_q, D_V),
            lse=lses[0].reshape(1, h_q, n * s_q),
        )
        mla_decode(
            q,
            cache,
            table[:, pages:],
            seqlens - tokens,
            **self.options,
            causal=self.causal,
            out=outs[1],
            lse=self.native.transposed(lses[1], (1, 0, 2)),
        )
        return outs, self.native.transposed(lses, (0, 2, 1, 3))


def _common_pages(table: Array, limits: Array) -> Array:
    """How many of its first pages each sequence shares with the next one, as far as both are full and seen."""
    width = table.shape[1]
    differs = np.concatenate([table[:-1] != table[1:], np.ones((len(table) - 1, 1), bool)], axis=1)
    common: Array = np.minimum(np.minimum(differs.argmax(axis=1), width), np.minimum(limits[:-1], limits[1:]))
    return common


def _runs(common: Array, least: int) -> list[PrefixGroup]:
    """The longest runs of neighbours that share at least so many pages, and what all of a run share."""
    edges = np.flatnonzero(np.diff(np.concatenate([[0], (common >= least).astype(int), [0]])))
    return [
        PrefixGroup(int(first), int(end - first) + 1, int(common[first:end].min()))
        for first, end in zip(edges[::2], edges[1::2], strict=True)
    ]


def _saved_us(group: PrefixGroup, rows: int, page_size: int, sms: int) -> float:
    """By the model: what a call gains if the group's prefix has one of its own."""
    tiles = group.pages * page_size / TILE_TOKENS / sms
    blocks = -(-rows // TILE_TOKENS)
    alone = _SMALL_TILE_US if rows <= _SMALL_ROWS else _TILE_US * blocks
    together = _TILE_US * -(-group.sequences * rows // TILE_TOKENS)
    return tiles * (group.sequences * alone - together) - _GROUP_US


def _check_groups(groups: Sequence[PrefixGroup], b: int, max_pages: int) -> None:
    end = 0
    for number, (first, count, pages) in enumerate(groups):
        argument = f"groups[{number}]"
        if not (end <= first and count >= 1 and first + count <= b):
            got = f"sequences [{first}, {first + count})"
            raise ArgumentError(explain(argument, got, f"some of [{end}, {b}), behind those of the group before"))
        if not 1 <= pages <= max_pages:
            raise ArgumentError(explain(f"{argument}.pages", pages, f"1 to max_pages = {max_pages}"))
        end = first + count


def _check_results(native: Any, out: Any, lse: Any, shapes: dict[str, tuple[int, ...]]) -> None:
    for name, x in (("out", out), ("lse", lse)):
        got = native.view(x, name).shape
        if got != shapes[name]:
            raise ShapeError(explain(f"{name}.shape", got, str(shapes[name])))
