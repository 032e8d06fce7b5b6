"""Decode of sequences that share a prefix: the tokens of the prefix are read once for all of them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from mla_cupy import arrays as families
from mla_cupy.arrays.view import HOST
from mla_cupy.errors import ShapeError, explain
from mla_cupy.ops.cascade_plan import CascadePlan, GroupMemory, Section, sections
from mla_cupy.ops.checks import check_dtype
from mla_cupy.ops.decode import mla_decode
from mla_cupy.ops.merge import merge_states
from mla_cupy.ops.prefix_groups import PrefixGroup, check_groups
from mla_cupy.shapes import D_V

__all__ = ["cascade_decode"]


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
    plan: CascadePlan | None = None,
) -> tuple[Any, Any]:
    """Do what `mla_decode` does, with the shared prefix of each group read once.

    Parameters
    ----------
    q, kv_cache, block_table, seqlens, scale, causal, lse_base, empty_lse, out, lse, out_dtype
        As for `mla_decode`. The page tables of a group's sequences begin with the same pages, and every query token
        sees all of these: what `shared_prefixes` says of them on the host.
    groups : sequence of PrefixGroup
        Disjoint, in the order of the batch. Without any it is a call of `mla_decode`.
    plan : CascadePlan, optional
        From `plan_cascade`, after its `update`, whose lengths count: it saves the schedules, the lengths behind the
        prefixes and the allocations.

    Returns
    -------
    out : array, (b, s_q, h_q, 512)
    lse : array, (b, h_q, s_q), float32

    Raises
    ------
    ShapeError, DTypeError, DeviceError, ArgumentError, PlanError
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
    check_groups(groups, b, native.view(block_table, "block_table").shape[-1])
    dtype = check_dtype("out_dtype", out_dtype) or view.dtype
    shapes = {"out": ((b, s_q, h_q, D_V), dtype), "lse": ((b, h_q, s_q), "float32")}
    out, lse = _results(family, given, shapes, view.device)
    batch = _Batch(native, q, kv_cache, block_table, seqlens, {"scale": scale, "lse_base": lse_base}, causal)
    unplanned = ((section, None) for section in sections(groups, b))
    for section, memory in unplanned if plan is None else plan.parts(groups, b, native, view.device):
        part = section.part
        if section.group is None:
            mla_decode(
                *batch.of(part),
                **batch.options,
                causal=causal,
                empty_lse=empty_lse,
                out=out[part],
                lse=lse[part],
                plan=section.plan,
            )
        else:
            outs, lses = batch.partials(section, pages.shape[1], memory)
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

    def of(self, part: slice) -> tuple[Any, Any, Any, Any]:
        """Those of some sequences."""
        return self.q[part], self.kv_cache, self.block_table[part], self.seqlens[part]

    def partials(self, section: Section, page_size: int, memory: GroupMemory | None) -> tuple[Any, Any]:
        """The states of a group's sequences over their prefix, and over what they have behind it: for `merge_states`.

        The queries of all of them are those of one sequence.
        """
        assert section.group is not None
        q, cache, table, seqlens = self.of(section.part)
        n, s_q, h_q, d_qk = self.native.view(q, "q").shape
        if memory is None:
            memory = GroupMemory.allocate(self.native, section.group, (page_size, s_q, h_q), seqlens)
        outs, lses, prefix_seqlens, behind = memory
        pages = section.group.pages
        mla_decode(
            q.reshape(1, n * s_q, h_q, d_qk),
            cache,
            table[:1, :pages],
            prefix_seqlens,
            **self.options,
            causal=False,
            out=outs[0].reshape(1, n * s_q, h_q, D_V),
            lse=lses[0].reshape(1, h_q, n * s_q),
            plan=section.plan,
        )
        mla_decode(
            q,
            cache,
            table[:, pages:],
            behind,
            **self.options,
            causal=self.causal,
            out=outs[1],
            lse=self.native.transposed(lses[1], (1, 0, 2)),
            plan=section.behind,
        )
        return outs, self.native.transposed(lses, (0, 2, 1, 3))


def _results(
    family: families.Family, given: dict[str, Any], shapes: dict[str, tuple[tuple[int, ...], str]], device: int
) -> list[Any]:
    """Where the results go: to arrays that were given, of these shapes, or to new ones."""
    native, made = family.native, []
    handle = 0 if device == HOST else native.current_stream(device)
    for name, (shape, dtype) in shapes.items():
        x = family.adopt(given[name]) if name in given else native.empty(shape, dtype, device, handle)
        if (got := native.view(x, name).shape) != shape:
            raise ShapeError(explain(f"{name}.shape", got, str(shape)))
        made.append(x)
    return made
