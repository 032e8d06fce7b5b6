"""The stages of decode over shared prefixes, and plans of them: the schedules of a step, and the memory between."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from mla_cupy import arrays as families
from mla_cupy.arrays.view import HOST
from mla_cupy.dtypes import TABLE
from mla_cupy.errors import PlanError, ShapeError, explain
from mla_cupy.kernels.lse import LseOptions
from mla_cupy.kernels.pipeline import Call
from mla_cupy.ops import backend
from mla_cupy.ops import decode as decode_operation
from mla_cupy.ops import merge as merge_operation
from mla_cupy.ops.checks import check_count
from mla_cupy.ops.composite import Assignment, Division, Part, Stage, configure, workspace_part
from mla_cupy.ops.decode_plan import DecodePlan, plan_decode
from mla_cupy.ops.entry import Plan, Request
from mla_cupy.ops.groups import Fp8
from mla_cupy.ops.prefix_groups import PrefixGroup, check_groups
from mla_cupy.ops.schema import narrowed
from mla_cupy.runtime import device as devices
from mla_cupy.shapes import D_QK, D_V, MAX_INT32

__all__ = ["CascadePlan", "plan_cascade"]


class Section(NamedTuple):
    """Sequences of a batch that one call serves, or a group with the `plan` of its prefix."""

    part: slice
    group: PrefixGroup | None
    plan: DecodePlan | None = None
    behind: DecodePlan | None = None
    lengths: Part | None = None


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


def divide(call: Call) -> Division:
    """The stages of a call without a plan."""
    return divided(call, list(sections(call.options.groups, call.view("q").shape[0])))


def divided(call: Call, planned: Sequence[Section]) -> Division:
    """The stages of a call, by its sections."""
    batch = _Batch(call)
    steps: list[Stage | Assignment] = []
    rows = 0
    for section in planned:
        if section.group is None:
            steps.append(batch.alone(section))
        else:
            steps += batch.of_group(section)
            rows = max(rows, section.group.sequences * batch.rows)
    if not rows:
        return Division({}, steps)
    b = max(section.group.sequences for section in planned if section.group)
    copied = any(isinstance(step, Assignment) and step.out.name == "queries" for step in steps)
    q = rows * call.view("q").shape[-1] * TABLE[call.view("q").dtype].nbytes if copied else 0
    return Division({"outs": 8 * rows * D_V, "lses": 8 * rows, "lengths": 4 * b, "queries": q}, steps)


class _Batch:
    """The arrays of a call; stages use parts of them."""

    def __init__(self, call: Call) -> None:
        names = ("q", "kv_cache", "block_table", "seqlens", "out", "lse")
        self._parts = {name: Part(name, call.view(name)) for name in names}
        self._options = call.options
        _, self._s_q, self._h_q, _ = call.view("q").shape
        self._page_size = call.view("kv_cache").shape[1]
        self._device = call.view("q").device

    @property
    def rows(self) -> int:
        """Query rows of a sequence."""
        return self._s_q * self._h_q

    def alone(self, section: Section) -> Stage:
        """A call of plain decode."""
        arrays = self._of(section.part)
        return Stage("alone", decode_operation.OPERATION, arrays, self._decode_options(alone=True), section.plan)

    def of_group(self, section: Section) -> list[Stage | Assignment]:
        """The states of a group's sequences over their prefix and over the rest, and their merge.

        The queries of all sequences form one sequence. The first of the state arrays is the prefix's; the axis of heads
        comes before the axis of sequences, as the prefix's call has the queries of all of them in one.
        """
        group, device = section.group, self._device
        assert group is not None
        n, pages, s_q, h_q = group.sequences, group.pages, self._s_q, self._h_q
        arrays = self._of(section.part)
        table, out, lse = arrays["block_table"], arrays.pop("out"), arrays.pop("lse")
        outs = workspace_part("outs", (2, n, s_q, h_q, D_V), "float32", device)
        lses = workspace_part("lses", (2, h_q, n, s_q), "float32", device)
        behind = section.lengths or workspace_part("lengths", (n,), "int32", device)
        options, decode = self._options, decode_operation.OPERATION
        steps: list[Stage | Assignment] = []
        q = arrays["q"]
        if not q.is_even:
            q = workspace_part("queries", q.view.shape, q.view.dtype, device)
            steps.append(Assignment(arrays["q"].as_words(), q.as_words()))
        prefix: dict[str, Part | None] = {
            "q": q.flat().with_axis(),
            "kv_cache": arrays["kv_cache"],
            "block_table": table.cut(0, 0, 1).cut(1, 0, pages),
            "seqlens": arrays["seqlens"].cut(0, 0, 1),  # which is at least as long, and counts no further
            "out": outs.at(0).flat().with_axis(),
            "lse": lses.at(0).transposed(1, 2, 0).flat().transposed(1, 0).with_axis(),
        }
        rest: dict[str, Part | None] = {
            **arrays,
            "block_table": table.cut(1, pages, table.view.shape[1]),
            "seqlens": behind,
            "out": outs.at(1),
            "lse": lses.at(1).transposed(1, 0, 2),
        }
        states: dict[str, Part | None] = {"outs": outs, "lses": lses.transposed(0, 2, 1, 3), "out": out, "lse": lse}
        if section.lengths is None:
            steps.append(Assignment(arrays["seqlens"], behind, pages * self._page_size))
        steps.append(Stage("prefix", decode, prefix, self._decode_options(causal=False), section.plan))
        steps.append(Stage("rest", decode, rest, self._decode_options(causal=options.causal), section.behind))
        chosen = merge_operation.OPERATION.options_of(**LseOptions.of(options)._asdict())
        return [*steps, Stage("merge", merge_operation.OPERATION, states, chosen)]

    def _of(self, part: slice) -> dict[str, Part]:
        cut = {name: self._parts[name].cut(0, part.start, part.stop) for name in self._parts if name != "kv_cache"}
        return {**cut, "kv_cache": self._parts["kv_cache"]}

    def _decode_options(self, *, alone: bool = False, causal: bool = True) -> Any:
        options = self._options
        return decode_operation.OPERATION.options_of(
            scale=options.scale,
            causal=options.causal if alone else causal,
            q_scale=options.q_scale,
            math=options.math,
            **(LseOptions.of(options) if alone else LseOptions(options.lse_base))._asdict(),
        )


class CascadePlan(Plan):
    """Schedules and memory for `cascade_decode`. Made by `plan_cascade`.

    Use it on one stream at a time, like a `DecodePlan`.

    Attributes
    ----------
    groups : tuple of PrefixGroup
        Groups of the calls.
    device : int
        CUDA ordinal; -1 for a plan of the NumPy backend.
    """

    operation = "cascade_decode"

    def __init__(self, groups: tuple[PrefixGroup, ...], b: int, page_size: int, planned: list[Section]) -> None:
        self.groups = groups
        self._b, self._page_size, self._sections = b, page_size, planned
        self._native: Any = None  # of the lengths
        self._lengths: dict[int, Any] = {}  # behind the prefix of each group, by its first sequence
        self._memory: list[Any] = []
        self._identity = object()
        self.device = next((section.plan.device for section in planned if section.plan), HOST)
        self.address, self._nbytes = 0, 0
        self.state = (self._identity, None)

    def __repr__(self) -> str:
        place = "numpy" if self.device == HOST else f"device {self.device}"
        return f"CascadePlan(b={self._b}, page_size={self._page_size}, {self.groups}, {place})"

    def update(self, seqlens: Any) -> None:
        """Enqueue the schedules for the lengths of this step, on the caller's library's current stream.

        Does not synchronise. Can be captured in a CUDA graph, after an earlier call outside the capture.

        Parameters
        ----------
        seqlens : array, (b,), int32
            Lengths of all sequences, prefixes included.

        Raises
        ------
        ShapeError, DTypeError, DeviceError, PlanError
            If `seqlens` does not fit the plan.
        """
        family = families.family_of(seqlens, "seqlens")
        native, lent = family.native, family.adopt(seqlens)
        if not family.on_gpu:
            lent = narrowed("seqlens", lent)
        view = native.view(lent, "seqlens")
        if view.shape != (self._b,):
            raise ShapeError(explain("seqlens.shape", view.shape, f"({self._b},), the plan's b"))
        if self.device != HOST and not family.on_gpu:
            native, lent = families.cupy_family(), backend.sent({"seqlens": lent}, self.device, None)["seqlens"]
        for section in self._sections:
            assert section.plan is not None
            if section.group is None:
                section.plan.update(lent[section.part])
                continue
            section.plan.update(lent[section.part][:1])
            lengths = self._behind(native, section.group, lent[section.part])
            if section.behind is not None:
                section.behind.update(lengths)
        family.settle((lent,))
        self._native = native
        self.state = (self._identity, tuple(native.address(lengths) for lengths in self._lengths.values()))

    def _behind(self, native: Any, group: PrefixGroup, seqlens: Any) -> Any:
        """The lengths behind the prefix of a group, always in the same memory."""
        if self._native is not None and type(native) is not type(self._native):
            self._native, self._lengths = None, {}
        tokens = group.pages * self._page_size
        if group.first in self._lengths:
            self._lengths[group.first][...] = seqlens - tokens
        else:
            self._lengths[group.first] = seqlens - tokens
        return self._lengths[group.first]

    def configuration(self, request: Request) -> Any:
        """See `Plan.configuration`.

        Raises
        ------
        PlanError
            If the plan does not serve the call.
        """
        groups, b = request.options.groups, request.sizes["b"]
        if groups != self.groups or b != self._b:
            got = f"one for b={self._b} and {self.groups}"
            raise PlanError(explain("plan", got, f"one for b={b} and {groups}", "make a plan for these groups"))
        if self._native is None:
            raise PlanError(
                explain("plan", "no update yet", f"one for b={b}", "call plan.update(seqlens) for this step")
            )
        planned = [
            section._replace(lengths=Part("", self._native.view(self._lengths[section.group.first])))
            if section.group
            else section
            for section in self._sections
        ]
        device = None if request.device == HOST else devices.describe(request.device)
        config = configure(divided(request, planned), device, request.options.kernel)
        if self.device != HOST and config.layout.nbytes > self._nbytes:
            self._nbytes = config.layout.nbytes
            self._memory.append(families.cupy_family().own_memory(self._nbytes, self.device))
            self.address = self._memory[-1].ptr
        return config


def plan_cascade(
    groups: Sequence[PrefixGroup],
    *,
    b: int,
    s_q: int = 1,
    h_q: int,
    d_qk: int = D_QK,
    kv_format: str | None = None,
    fp8: Fp8 | None = None,
    max_pages: int,
    page_size: int,
    dtype: Any,
    device: int | str | None = None,
) -> CascadePlan:
    """Prepare calls of `cascade_decode` over these groups: for the layers of a step, and the steps that follow.

    Parameters
    ----------
    groups : sequence of PrefixGroup
        Groups of the calls. Another batch, or other prefixes, need another plan.
    b : int
        Sequences of the batch.
    s_q, h_q, d_qk, kv_format, fp8, max_pages, page_size, dtype, device
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
    Workspace: 4 KB per query row of the largest group, the workspaces of two plans per group, and the workspace of one
    plan for the sequences between groups.

    Examples
    --------
    >>> import numpy as np, mla_cupy
    >>> q, cache = np.ones((2, 1, 16, 576), np.float16), np.ones((4, 64, 576), np.float16)
    >>> table, seqlens = np.array([[2, 0], [2, 1]], np.int32), np.array([100, 70], np.int32)
    >>> groups = (mla_cupy.PrefixGroup(0, 2, 1),)
    >>> plan = mla_cupy.plan_cascade(groups, b=2, h_q=16, max_pages=2, page_size=64, dtype="float16")
    >>> plan.update(seqlens)
    >>> out, lse = mla_cupy.cascade_decode(q, cache, table, seqlens, groups, scale=192**-0.5, plan=plan)
    """
    given = (("b", b), ("s_q", s_q), ("max_pages", max_pages), ("page_size", page_size))
    b, s_q, max_pages, page_size = (check_count(argument, value, 1, MAX_INT32) for argument, value in given)
    groups = check_groups(groups, b, max_pages)
    shape: dict[str, Any] = {"h_q": h_q, "d_qk": d_qk, "kv_format": kv_format, "fp8": fp8}
    shape |= {"page_size": page_size, "dtype": dtype, "device": device}

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
    return CascadePlan(groups, b, page_size, made)
