"""Plans of decode over shared prefixes: the schedules of all calls of a step, and the memory between them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from mla_cupy import arrays as families
from mla_cupy.errors import PlanError, ShapeError, explain
from mla_cupy.ops.checks import check_count
from mla_cupy.ops.decode_plan import DecodePlan, plan_decode
from mla_cupy.ops.prefix_groups import PrefixGroup, check_groups
from mla_cupy.shapes import D_QK, D_V, MAX_INT32

__all__ = ["CascadePlan", "plan_cascade"]


class GroupMemory(NamedTuple):
    """What lies between the calls of a group. Of both arrays of states the first is the prefix's.

    Attributes
    ----------
    outs : array, (2, n, s_q, h_q, 512), float32
    lses : array, (2, h_q, n, s_q), float32
        The axes of heads come before those of sequences, as the prefix's call has the queries of all of them in one.
    prefix_seqlens : array, (1,), int32
    seqlens : array, (n,), int32
        Behind the prefix.
    """

    outs: Any
    lses: Any
    prefix_seqlens: Any
    seqlens: Any

    @classmethod
    def allocate(cls, native: Any, group: PrefixGroup, sizes: tuple[int, int, int], seqlens: Any) -> GroupMemory:
        """For the sequences of a group, whose lengths are these. `sizes` are page_size, s_q and h_q."""
        page_size, s_q, h_q = sizes
        n, tokens = group.sequences, group.pages * page_size
        device = native.view(seqlens, "seqlens").device
        stream = 0 if device == families.HOST else native.current_stream(device)
        outs = native.empty((2, n, s_q, h_q, D_V), "float32", device, stream)
        lses = native.empty((2, h_q, n, s_q), "float32", device, stream)
        return cls(outs, lses, seqlens[:1] * 0 + tokens, seqlens - tokens)


class Section(NamedTuple):
    """Sequences of a batch that one call serves, or a group: then `plan` is that of its prefix."""

    part: slice
    group: PrefixGroup | None
    plan: DecodePlan | None = None
    behind: DecodePlan | None = None


def sections(groups: Sequence[PrefixGroup], b: int) -> Iterator[Section]:
    """The batch in order. An empty one has a section, too: so its arguments are checked."""
    begin = 0
    for group in groups:
        if begin < group.first:
            yield Section(slice(begin, group.first), None)
        begin = group.first + group.sequences
        yield Section(slice(group.first, begin), group)
    if begin < b or not b:
        yield Section(slice(begin, b), None)


class CascadePlan:
    """Schedules and memory for `cascade_decode`. Made by `plan_cascade`.

    It is in flight on one stream at a time, like a `DecodePlan`.

    Attributes
    ----------
    groups : tuple of PrefixGroup
        Those of the calls.
    """

    def __init__(
        self, groups: tuple[PrefixGroup, ...], b: int, sizes: tuple[int, int, int], planned: list[Section]
    ) -> None:
        self.groups = groups
        self._b, self._sizes, self._sections = b, sizes, planned
        self._memory: dict[int, GroupMemory] = {}  # by the first sequence
        self._place: tuple[Any, int] | None = None

    def update(self, seqlens: Any) -> None:
        """Enqueue the schedules for the lengths of this step, on the caller's library's current stream.

        No synchronisation; can be captured in a CUDA graph, after an earlier call outside of the capture.

        Parameters
        ----------
        seqlens : array, (b,), int32
            Of all sequences, prefixes included.

        Raises
        ------
        ShapeError, DTypeError, DeviceError, PlanError
            If `seqlens` does not fit the plan.
        """
        family = families.family_of(seqlens, "seqlens")
        lent = family.adopt(seqlens)
        view = family.native.view(lent, "seqlens")
        if view.shape != (self._b,):
            raise ShapeError(explain("seqlens.shape", view.shape, f"({self._b},), the plan's b"))
        place = type(family.native), view.device
        if place != self._place:
            self._memory.clear()
        for section in self._sections:
            assert section.plan is not None
            if section.group is None:
                section.plan.update(lent[section.part])
                continue
            memory = self._written(family.native, section.group, lent[section.part])
            section.plan.update(memory.prefix_seqlens)
            if section.behind is not None:
                section.behind.update(memory.seqlens)
        family.settle((lent,))
        self._place = place

    def _written(self, native: Any, group: PrefixGroup, seqlens: Any) -> GroupMemory:
        """The memory of a group, with these lengths."""
        memory = self._memory.get(group.first)
        if memory is None:
            memory = self._memory[group.first] = GroupMemory.allocate(native, group, self._sizes, seqlens)
        else:
            memory.seqlens[...] = seqlens - group.pages * self._sizes[0]
        return memory

    def parts(self, groups: Sequence[PrefixGroup], b: int, native: Any, device: int) -> Iterator[tuple[Section, Any]]:
        """The sections of a call, with the memory of groups.

        Raises
        ------
        PlanError
            If the plan does not serve the call.
        """
        if tuple(groups) != self.groups or b != self._b:
            got = f"one for b={self._b} and {self.groups}"
            raise PlanError(explain("plan", got, f"one for b={b} and {tuple(groups)}", "make a plan for these groups"))
        if self._place != (type(native), device):
            got = "no update yet" if self._place is None else "an update with arrays of another library or device"
            raise PlanError(explain("plan", got, "one with arrays like these", "call plan.update(seqlens)"))
        for section in self._sections:
            yield section, None if section.group is None else self._memory[section.group.first]


def plan_cascade(
    groups: Sequence[PrefixGroup],
    *,
    b: int,
    s_q: int = 1,
    h_q: int,
    d_qk: int = D_QK,
    record: str | None = None,
    max_pages: int,
    page_size: int,
    dtype: Any,
    device: int | None = None,
) -> CascadePlan:
    """Prepare calls of `cascade_decode` over these groups: for the layers of a step, and the steps that follow.

    Parameters
    ----------
    groups : sequence of PrefixGroup
        As of the calls; another batch, or other prefixes, need another plan.
    b : int
        Sequences of the batch.
    s_q, h_q, d_qk, record, max_pages, page_size, dtype, device
        As for `plan_decode`.

    Returns
    -------
    CascadePlan

    Raises
    ------
    ArgumentError, DTypeError, PlanError
        If an argument does not fit.
    UnsupportedDeviceError
        If no kernel fits the GPU.

    Notes
    -----
    Workspace: 4 KB per query row of a group, and that of two plans for each group and one for what lies between.

    Examples
    --------
    >>> import numpy as np, mla_cupy
    >>> q, cache = np.ones((2, 1, 16, 576), np.float16), np.ones((4, 64, 576), np.float16)
    >>> table, seqlens = np.array([[2, 0], [2, 1]], np.int32), np.array([100, 70], np.int32)
    >>> groups = (mla_cupy.PrefixGroup(0, 2, 1),)
    >>> plan = mla_cupy.plan_cascade(groups, b=2, h_q=16, max_pages=2, page_size=64, dtype="float16")
    >>> plan.update(seqlens)
    >>> out, lse = mla_cupy.cascade_decode(q, cache, table, seqlens, groups, plan=plan)
    """
    for argument, value in (("b", b), ("s_q", s_q), ("max_pages", max_pages)):
        check_count(argument, value, 1, MAX_INT32)
    check_groups(groups, b, max_pages)
    shape: dict[str, Any] = {"h_q": h_q, "d_qk": d_qk, "record": record, "page_size": page_size, "dtype": dtype}
    shape["device"] = device

    def planned(section: Section) -> Section:
        n, group = section.part.stop - section.part.start, section.group
        if group is None:
            return section._replace(plan=plan_decode(max_b=n, s_q=s_q, max_pages=max_pages, **shape))
        prefix = plan_decode(max_b=1, s_q=n * s_q, max_pages=group.pages, **shape)
        if group.pages == max_pages:
            return section._replace(plan=prefix)
        behind = plan_decode(max_b=n, s_q=s_q, max_pages=max_pages - group.pages, **shape)
        return section._replace(plan=prefix, behind=behind)

    made = [planned(section) for section in sections(groups, b)]
    return CascadePlan(tuple(groups), b, (page_size, s_q, h_q), made)
