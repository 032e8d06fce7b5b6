"""Operations that are made of others: calls on parts of the arrays, checked and prepared together.

A composite is described like any operation. A call's division into stages depends on its views alone, so everything
about the stages is done once per kind of call. Each call then only finds the addresses of their arrays.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from mla_cupy import arrays as families
from mla_cupy.arrays.view import ARRAY_ALIGNMENT, View
from mla_cupy.dtypes import TABLE
from mla_cupy.errors import ArgumentError, explain, nearest
from mla_cupy.kernels.pipeline import Call, Layout, Pipeline, Prepared, Step
from mla_cupy.ops.call import examine
from mla_cupy.ops.entry import Plan, Request
from mla_cupy.ops.operation import Operation
from mla_cupy.ops.schema import contiguous_view
from mla_cupy.runtime import driver
from mla_cupy.runtime.device import DeviceInfo

_WORKSPACE = "stage"
"""The part of the workspace that is each stage's own, one after the other."""
Kernels = Mapping[str, str]
"""The name of a kernel for some of the stages."""


class Part(NamedTuple):
    """A part of an array of the composite, or of its workspace.

    Attributes
    ----------
    name : str
        Name of the array, or of the part of the workspace; "" for memory of a plan, at a known address.
    view : View
        Its pointer is as far from the array's own as the part is; parts of the workspace begin at 0.
    """

    name: str
    view: View

    def cut(self, axis: int, begin: int, end: int) -> Part:
        """The elements [begin, end) along an axis."""
        view = self.view
        shape = (*view.shape[:axis], end - begin, *view.shape[axis + 1 :])
        return self._moved(begin * view.strides[axis], shape, view.strides)

    def flat(self) -> Part:
        """View with the first two axes, which step evenly, as one."""
        (first, second, *rest), (outer, inner, *strides) = self.view.shape, self.view.strides
        return self._moved(0, (first * second, *rest), (outer if second == 1 else inner, *strides))

    def split(self, size: int) -> Part:
        """View with the first axis split in two; the second has this size."""
        (first, *rest), (step, *strides) = self.view.shape, self.view.strides
        return self._moved(0, (first // size, size, *rest), (size * step, step, *strides))

    def at(self, index: int) -> Part:
        """The element at an index of the first axis."""
        one = self.cut(0, index, index + 1)
        return one._moved(0, one.view.shape[1:], one.view.strides[1:])

    @property
    def is_even(self) -> bool:
        """True if the first two axes can be taken as one."""
        (first, second, *_), (outer, inner, *_) = self.view.shape, self.view.strides
        return 0 in self.view.shape or 1 in (first, second) or outer == second * inner

    def as_words(self) -> Part:
        """View an array of an 8-bit or 16-bit type as bytes or words, which every library can copy."""
        seen = "uint8" if TABLE[self.view.dtype].nbytes == 1 else "float16"
        return self._replace(view=self.view._replace(dtype=seen))

    def with_axis(self) -> Part:
        """View with a first axis of size 1."""
        shape, strides = self.view.shape, self.view.strides
        return self._moved(0, (1, *shape), (shape[0] * strides[0], *strides))

    def transposed(self, *axes: int) -> Part:
        """View with the axes in another order."""
        shape, strides = self.view.shape, self.view.strides
        return self._moved(0, tuple(shape[axis] for axis in axes), tuple(strides[axis] for axis in axes))

    def _moved(self, elements: int, shape: tuple[int, ...], strides: tuple[int, ...]) -> Part:
        ptr = self.view.ptr + elements * TABLE[self.view.dtype].nbytes
        return self._replace(view=self.view._replace(ptr=ptr, shape=shape, strides=strides))


def workspace_part(name: str, shape: tuple[int, ...], dtype: str, device: int) -> Part:
    """A contiguous array in the workspace."""
    return Part(name, contiguous_view(shape, dtype, device))


class Stage(NamedTuple):
    """A call of another operation.

    Attributes
    ----------
    name : str
        Name for `kernel=`.
    operation : Operation
    arrays : mapping
        Its arrays by name, all outputs included; absent arrays may be left out.
    options : tuple
        Options as a caller passes them.
    plan : Plan or None
    """

    name: str
    operation: Operation
    arrays: Mapping[str, Part | None]
    options: tuple[Any, ...]
    plan: Plan | None = None


class Assignment(NamedTuple):
    """`out` = `source` - `minus`, of one shape: a copy, or the lengths behind a prefix."""

    source: Part
    out: Part
    minus: int = 0


class Division(NamedTuple):
    """Plan of a composite's call: the sizes of the parts of its workspace, in bytes, and its steps in order."""

    sizes: Mapping[str, int]
    steps: Sequence[Stage | Assignment]


class _Configured(NamedTuple):
    """A stage that has been checked. Stages of one kind share it."""

    request: Request
    config: Any
    nbytes: int = 0


@dataclass(frozen=True)
class CompositeConfig:
    """The steps of a call; stages of one kind share their configuration."""

    layout: Layout
    steps: tuple[tuple[Stage, _Configured] | Assignment, ...]


class CompositePipeline(Pipeline[CompositeConfig]):
    """The stages of a composite, one after the other.

    Attributes
    ----------
    stages : mapping
        Their operations, by the names that `kernel=` has for them.
    """

    kernels = ()

    def __init__(self, **stages: Operation) -> None:
        self.stages = stages

    def configure(self, problem: Division, device: DeviceInfo, kernel: Any = None) -> CompositeConfig:
        """See `Pipeline.configure`; `kernel` has names for some of the stages."""
        return configure(problem, device, kernel or {})

    def workspace(self, config: CompositeConfig) -> Layout:
        """Workspace: the arrays between stages, and the largest of their workspaces."""
        return config.layout

    def steps(self, config: CompositeConfig, call: Call) -> list[Step]:
        """The launches of all stages, each with its own arrays."""
        return [
            launch
            for step in config.steps
            if not isinstance(step, Assignment)
            for launch in step[0].operation.pipeline.steps(step[1].config, step[1].request)
        ]

    def prepare(
        self, config: CompositeConfig, call: Call, names: Sequence[str], device: DeviceInfo, stream: int
    ) -> Any:
        """See `Pipeline.prepare`."""
        places = {name: at for at, name in enumerate(("", *names, *config.layout.offsets))}
        bases = {name: call.view(name).ptr for name in names if call.views[name] is not None}
        known: dict[int, Prepared] = {}

        def place(part: Part | None) -> tuple[int, int]:
            return (0, 0) if part is None else (places[part.name], part.view.ptr - bases.get(part.name, 0))

        actions: list[_Launches | _Assignment] = []
        for step in config.steps:
            if isinstance(step, Assignment):
                source, out = (places[part.name] for part in (step.source, step.out))
                actions.append(_Assignment(_relative(step, bases), source, out))
                continue
            stage, configured = step
            prepared = known.get(id(configured))
            if prepared is None:
                pipeline, taken = stage.operation.pipeline, stage.operation.names
                prepared = pipeline.prepare(configured.config, configured.request, taken, device, stream)
                known[id(configured)] = prepared
            moves = [(0, 0), *(place(stage.arrays.get(name)) for name in stage.operation.names)]
            memory = (places[_WORKSPACE], 0) if stage.plan is None else (0, stage.plan.address)
            actions.append(_Launches(prepared, moves, memory))
        return PreparedStages(actions, config.layout)


def configure(division: Division, device: DeviceInfo | None, kernels: Kernels) -> CompositeConfig:
    """Check and configure the stages of a call on a device, each kind once.

    Without a device only plans are checked.
    """
    known: dict[Any, _Configured] = {}
    steps: list[tuple[Stage, _Configured] | Assignment] = []
    for step in division.steps:
        if isinstance(step, Assignment):
            steps.append(step)
            continue
        kind = _kind(step)
        if kind not in known:
            known[kind] = _configure(step, device, kernels.get(step.name))
        steps.append((step, known[kind]))
    used = max((configured.nbytes for configured in known.values()), default=0)
    return CompositeConfig(Layout({**division.sizes, _WORKSPACE: used}), tuple(steps))


def _kind(stage: Stage) -> Any:
    """Equal for stages that differ only in addresses of equal alignment."""
    parts = (
        (name, part and part.view._replace(ptr=part.view.ptr % ARRAY_ALIGNMENT)) for name, part in stage.arrays.items()
    )
    return stage.name, stage.options, id(stage.plan), tuple(parts)


def _configure(stage: Stage, device: DeviceInfo | None, kernel: str | None) -> _Configured:
    operation = stage.operation
    views = {name: part.view if (part := stage.arrays.get(name)) else None for name in operation.names}
    request = replace(examine(operation, views, stage.options), kernel=kernel, planned=stage.plan is not None)
    assert not request.missing
    if stage.plan is not None:
        return _Configured(request, stage.plan.configuration(request))
    if device is None:
        return _Configured(request, None)
    config = operation.configure(request, request.problem, kernel, device)
    return _Configured(request, config, operation.pipeline.workspace(config).nbytes)


def _relative(step: Assignment, bases: Mapping[str, int]) -> Assignment:
    """Assignment with pointers relative to the arrays' pointers."""
    source, out = (
        part._replace(view=part.view._replace(ptr=part.view.ptr - bases.get(part.name, 0)))
        for part in (step.source, step.out)
    )
    return step._replace(source=source, out=out)


class PreparedStages:
    """Launches of all stages, ready to be enqueued with any addresses: the counterpart of `Prepared`."""

    def __init__(self, actions: Sequence[_Launches | _Assignment], layout: Layout) -> None:
        self.driver = driver.current()
        self._actions = actions
        self._offsets = tuple(layout.offsets.values())

    def enqueue(self, addresses: list[int], workspace: int, stream: int) -> None:
        """See `Prepared.enqueue`."""
        places = [*addresses, *[workspace + offset for offset in self._offsets]]
        for action in self._actions:
            action.enqueue(places, stream)


class _Launches:
    """The launches of a stage, with addresses as offsets from a list of places."""

    __slots__ = ("_memory", "_moves", "_prepared")

    def __init__(self, prepared: Prepared, moves: list[tuple[int, int]], memory: tuple[int, int]) -> None:
        self._prepared, self._moves, self._memory = prepared, moves, memory

    def enqueue(self, places: list[int], stream: int) -> None:
        at, offset = self._memory
        self._prepared.enqueue([places[at] + by for at, by in self._moves], places[at] + offset, stream)


class _Assignment:
    """An `Assignment`; its arrays are so far from places of a list."""

    __slots__ = ("_minus", "_out", "_source")

    def __init__(self, step: Assignment, source: int, out: int) -> None:
        self._source, self._out, self._minus = (step.source.view, source), (step.out.view, out), step.minus

    def enqueue(self, places: list[int], stream: int) -> None:
        (source, at), (out, there) = self._source, self._out
        moved = out._replace(ptr=out.ptr + places[there]), source._replace(ptr=source.ptr + places[at])
        families.cupy_family().assign(*moved, self._minus, stream)


@dataclass(frozen=True, eq=False)
class Composite(Operation):
    """An operation that is made of others.

    Attributes
    ----------
    divide : callable
        `divide(call)`: the stages of a call that has passed all checks.
    joined : callable
        `joined(call, device)`: the stages where a kernel of the device does the work of several; None where none does.
    """

    divide: Callable[[Call], Division] = lambda call: Division({}, ())
    joined: Callable[[Call, DeviceInfo], Division | None] = lambda call, device: None

    @property
    def bound(self) -> bool:
        """See `Operation.bound`: their parts are."""
        return False

    def check_kernel(self, kernel: Any) -> None:
        """`examine` has checked the names of all stages."""

    def configure(self, call: Call, problem: Any, kernel: str | None, device: DeviceInfo) -> CompositeConfig:
        """See `Operation.configure`."""
        division = self.joined(call, device) or self.divide(call)
        configured: CompositeConfig = self.pipeline.configure(division, device, call.options.kernel)
        return configured


def hashable(kernel: Any) -> Any:
    """A mapping of names as a tuple, by which calls are known again."""
    return tuple(kernel.items()) if isinstance(kernel, Mapping) else kernel


def check_kernels(pipeline: CompositePipeline, kernel: Any) -> Kernels:
    """Check the caller's choice: the name of a kernel, for every stage that has it, or a mapping of names by stages.

    Raises
    ------
    ArgumentError
    """
    if kernel is None:
        return {}
    known = {stage: [one.name for one in made.pipeline.kernels] for stage, made in pipeline.stages.items()}
    if isinstance(kernel, str):
        found = {stage: kernel for stage, names in known.items() if kernel in names}
        if not found:
            every = list(dict.fromkeys(name for names in known.values() for name in names))
            expected = f"None, one of {', '.join(every)}, or a mapping from stages to names"
            raise ArgumentError(explain("kernel", repr(kernel), expected, nearest(kernel, every, "")))
        return found
    if not isinstance(kernel, (Mapping, tuple)) or not all(
        isinstance(x, tuple) and len(x) == 2 for x in _items(kernel)
    ):
        expected = f"None, a name, or a mapping from {', '.join(known)} to names"
        raise ArgumentError(explain("kernel", repr(kernel), expected, "see `mla-cupy list`"))
    for stage, name in _items(kernel):
        if not (isinstance(stage, str) and stage in known):
            raise ArgumentError(explain("kernel", f"a stage {stage!r}", "one of " + ", ".join(known)))
        if name is not None and not (isinstance(name, str) and name in known[stage]):
            expected = "None, or one of " + ", ".join(known[stage])
            raise ArgumentError(
                explain(f"kernel[{stage!r}]", repr(name), expected, nearest(str(name), known[stage], ""))
            )
    return {stage: name for stage, name in _items(kernel) if name is not None}


def _items(kernel: Any) -> tuple[Any, ...]:
    return tuple(kernel.items()) if isinstance(kernel, Mapping) else kernel
