"""Recording of a call: the package's own checks, choices and launches, run over recorded numbers on every path."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import combinations
from typing import Any

from mla_cupy.arrays.view import View
from mla_cupy.dtypes import TABLE
from mla_cupy.errors import ArgumentError, MlaError, ShapeError, explain
from mla_cupy.export.apart import Apart
from mla_cupy.export.explore import NEVER, Diagram, Leaf, Reducer, explore
from mla_cupy.export.expressions import Expression
from mla_cupy.export.numbers import expression_of, number_of, pieces
from mla_cupy.export.patching import patched_builtins
from mla_cupy.export.subject import DEVICE, WORKSPACE, WORKSPACE_BYTES, Argument, Subject, recorded_device
from mla_cupy.kernels.param_layout import NULL, layout_of, values_of
from mla_cupy.kernels.pipeline import Launch, LaunchArgs, Layout, Step, has_programmatic_launch
from mla_cupy.kernels.spec import KernelSpec, Variant
from mla_cupy.ops import overlap
from mla_cupy.ops.call import examine
from mla_cupy.ops.checks import check_memory
from mla_cupy.shapes import MAX_INT32

_WORKSPACE_VIEW = View(WORKSPACE.number, (WORKSPACE_BYTES.number,), (1,), "uint8", DEVICE)
_MAX_GRID = (MAX_INT32, 65535, 65535)


@dataclass(frozen=True)
class Refusal:
    """An error of the package: the name of its class, and its text, cut at the numbers in it."""

    kind: str
    text: tuple[Any, ...]


@dataclass(frozen=True)
class RecordedMap:
    """A tensor map, as `TensorMapSpec` has it."""

    dtype: str
    base: Expression
    dims: tuple[Expression, ...]
    strides_bytes: tuple[Expression, ...]
    box: tuple[Expression, ...]
    swizzle: str
    l2: str


@dataclass(frozen=True)
class RecordedArgs:
    """The parameters of launches: the struct, the value of each member, and the maps behind it."""

    struct: str
    values: tuple[Expression, ...]
    maps: tuple[RecordedMap, ...]


@dataclass(frozen=True)
class RecordedLaunch:
    """A launch; `build` is what it launches."""

    build: tuple[str, Variant]
    grid: tuple[Expression, Expression, Expression]
    args: RecordedArgs
    dependent: bool


@dataclass(frozen=True)
class RecordedFill:
    """Zeros, from an address on."""

    address: Expression
    nbytes: Expression


RecordedStep = RecordedLaunch | RecordedFill


@dataclass(frozen=True)
class Found:
    """The end of a path on which nothing is wrong."""

    steps: tuple[RecordedStep, ...]
    nbytes: Expression


@dataclass(frozen=True)
class Procedure:
    """A function of the module on one target.

    Attributes
    ----------
    name : str
    bounds : tuple of Argument
        The caller's numbers. Their spans are checked before everything else: the whole recording relies on them.
    rules : list of Diagram
        What each must come to is None; a Refusal says what is wrong.
    steps : Diagram
        Comes to the steps, for arguments that break no rule.
    workspace : Diagram
        Comes to the bytes of the workspace, likewise.
    """

    name: str
    bounds: tuple[Argument, ...]
    rules: list[Diagram]
    steps: Diagram
    workspace: Diagram


@dataclass(frozen=True)
class Memory:
    """An array of a call: its view, its own rule, and the array that it may overwrite."""

    name: str
    written: bool
    view: Callable[[], View]
    check: Callable[[], None] = lambda: None
    may_be: str = ""


@dataclass
class Target:
    """Everything recorded for one target.

    Attributes
    ----------
    kernels : dict
        Name -> kernel, of those that are launched.
    """

    arch: str
    procedures: dict[str, Procedure] = field(default_factory=dict)
    kernels: dict[str, KernelSpec[Any]] = field(default_factory=dict)


class Recorder:
    """Records procedures for one target."""

    def __init__(self, arch: str) -> None:
        self.target = Target(arch)
        self.device = recorded_device(arch)
        self._reducer = Reducer()

    def record(
        self,
        name: str,
        arguments: Iterable[Argument],
        run: Callable[[], Found],
        memory: Sequence[Memory] = (),
        checks: Sequence[Callable[[], object]] = (),
    ) -> None:
        """Record a procedure.

        Parameters
        ----------
        name : str
        arguments : iterable of Argument
            Arguments that the caller passes. They are checked against their spans first.
        run : callable
            Does what the package does, with `self.device`; raises its errors.
        memory : sequence of Memory, optional
            The arrays: they are checked to be there, and to be apart.
        checks : sequence of callable, optional
            Parts of `run` that may raise. They are explored before it, each by itself, so that `run` is explored on
            paths without their errors alone: few, where errors of one part would be met on every path of another.
        """
        apart = Apart(_refusal)

        def outcome() -> Found | Refusal:
            apart.begin()
            try:
                found = run()
            except (MlaError, ZeroDivisionError) as error:
                return _refusal(error)
            apart.end()
            return found

        with patched_builtins(apart):
            given: list[Diagram] = []
            for check in checks:
                given.append(self._reducer.diagram(explore(_ruled(check), given)))
            paths = explore(outcome, given)
            single = [*apart.rules, *(explore(_ruled(rule)) for rule in _rules(memory))]
        _check_possible([outcome for _, outcome in paths])
        rules = [*(self._reducer.diagram(each) for each in single), *given]
        refused = self._reducer.diagram(paths, lambda found: found if isinstance(found, Refusal) else None)
        self.target.procedures[name] = Procedure(
            name,
            tuple(argument for argument in arguments if argument.is_bounded),
            [rule for rule in (*rules, refused) if rule != _FINE],
            self._reducer.diagram(paths, lambda found: found.steps if isinstance(found, Found) else NEVER.outcome),
            self._reducer.diagram(paths, lambda found: found.nbytes if isinstance(found, Found) else NEVER.outcome),
        )

    def found(self, layout: Layout, steps: Iterable[Step], addresses: Mapping[str, Any]) -> Found:
        """The end of a path: steps over arrays and a workspace by their addresses.

        Raises
        ------
        ArgumentError
            If a grid or a member would not hold its number.
        """
        places = {NULL: 0, **addresses}
        for part, offset in layout.offsets.items():
            places[part] = WORKSPACE.number + offset
        seen: dict[int, RecordedArgs] = {}
        recorded: list[RecordedStep] = []
        for step in steps:
            if not isinstance(step, Launch):
                nbytes = layout.nbytes - layout.offsets[step.first]
                recorded.append(RecordedFill(expression_of(places[step.first]), expression_of(nbytes)))
                continue
            if id(step.args) not in seen:
                seen[id(step.args)] = _args(step.args, places)
            recorded.append(self._launch(step, seen[id(step.args)]))
        return Found(tuple(recorded), expression_of(layout.nbytes))

    def _launch(self, step: Launch, args: RecordedArgs) -> RecordedLaunch:
        kernel = step.kernel
        for axis, size, most in zip("xyz", step.grid, _MAX_GRID, strict=True):
            if not 0 < size <= most:
                raise ArgumentError(explain(f"grid.{axis} of {kernel.name}", size, f"1 to {most} blocks", "less work"))
        self.target.kernels[kernel.name] = kernel
        x, y, z = map(expression_of, step.grid)
        dependent = step.dependent and has_programmatic_launch(self.target.arch)
        return RecordedLaunch((kernel.name, step.variant), (x, y, z), args, dependent)


def call_of(subject: Subject, recorder: Recorder) -> Found:
    """A call without a plan: the checks, the choice of the kernel, the workspace, the launches."""
    views, operation = subject.views(), subject.operation
    request = examine(operation, views, subject.options())
    config = operation.configure(request, request.problem, request.kernel, recorder.device)
    layout = operation.pipeline.workspace(config)
    check_workspace(layout)
    steps = operation.pipeline.steps(config, request)
    return recorder.found(layout, steps, addresses_of(subject))


def record_call(subject: Subject, arch: str) -> Recorder:
    """Record the procedure `call` of an operation."""
    recorder = Recorder(arch)
    checks = [lambda: examine(subject.operation, subject.views(), subject.options())]
    run = partial(call_of, subject, recorder)
    recorder.record("call", call_arguments(subject), run, memory_of(subject), checks)
    return recorder


def call_arguments(subject: Subject) -> list[Argument]:
    """Arguments of `call`."""
    return [*subject.arguments(), WORKSPACE, WORKSPACE_BYTES]


def addresses_of(subject: Subject) -> dict[str, Any]:
    """The addresses of all arrays by name; 0 of those that are not given."""
    given = {array.name: array.address.number for array in subject.arrays}
    return dict.fromkeys(subject.operation.names, 0) | given


def check_workspace(layout: Layout) -> None:
    """Check the caller's workspace, if one is needed, as the package does."""
    if layout.nbytes > 0:
        check_memory(_WORKSPACE_VIEW, layout.nbytes, DEVICE)
        check_present(WORKSPACE.name, _WORKSPACE_VIEW)


def memory_of(subject: Subject) -> list[Memory]:
    """The arrays of a call, and its workspace."""
    found = [
        Memory(
            array.name,
            array.written,
            partial(subject.view, array),
            partial(subject.check_items, array),
            subject.operation.in_place.get(array.name, ""),
        )
        for array in subject.arrays
    ]
    return [*found, Memory(WORKSPACE.name, True, lambda: _WORKSPACE_VIEW)]


# ---- Rules ---------------------------------------------------------------------------------------------------------

_FINE = Leaf(None)


def _check_possible(outcomes: Iterable[Any]) -> None:
    """Check that some call would not be refused: else what is fixed is wrong, and some refusal says so.

    Raises
    ------
    ArgumentError
    """
    refusals: list[Refusal] = []
    for outcome in outcomes:
        if isinstance(outcome, Found):
            return
        refusals.append(outcome)
    fixed = next((refusal for refusal in refusals if len(refusal.text) == 1), refusals[-1])
    raise ArgumentError("".join(piece if isinstance(piece, str) else "..." for piece in fixed.text))


def _refusal(error: Exception) -> Refusal:
    """An error with the numbers in its text. A division by zero is one that Python finds by itself."""
    kind = type(error) if isinstance(error, MlaError) else ArgumentError
    return Refusal(kind.__name__, pieces(str(error)))


def _ruled(rule: Callable[[], object]) -> Callable[[], Refusal | None]:
    def outcome() -> Refusal | None:
        try:
            rule()
        except MlaError as error:
            return _refusal(error)
        return None

    return outcome


def _rules(memory: Sequence[Memory]) -> list[Callable[[], None]]:
    """The rules of each array, and of each pair with a written array: they must not overlap.

    Each is explored alone: together they would have one path per combination.
    """
    rules: list[Callable[[], None]] = []
    for each in memory:
        rules.append(each.check)
        if each.name != WORKSPACE.name:
            rules.append(partial(_check_view, check_present, each))
            rules.extend([partial(_check_view, _check_itself, each)] if each.written else ())
    pairs = ((a, b) if a.written else (b, a) for a, b in combinations(memory, 2) if a.written or b.written)
    return [*rules, *(partial(_check_spans, *pair) for pair in pairs)]


def _check_view(check: Callable[[str, View], None], memory: Memory) -> None:
    check(memory.name, memory.view())


def _check_itself(name: str, view: View) -> None:
    """Check that an array that is written has no element twice."""
    overlap.check_apart({name: view}, [name])


def check_present(name: str, view: View) -> None:
    """Check that an array with elements has an address: what is NULL in C would be None in Python."""
    if view.ptr == 0 and 0 not in view.shape:
        raise ArgumentError(explain(name, "NULL", "an address"))


def _check_spans(result: Memory, array: Memory) -> None:
    """Check that the bytes between first and last of two arrays do not meet.

    Stricter than the package, which lets rows lie between another array's rows: it has NumPy solve an equation.
    """
    view, other = result.view(), array.view()
    (low, high), (their_low, their_high) = (x.span(TABLE[x.dtype].nbytes) for x in (view, other))
    if low == high or their_low == their_high or (result.may_be == array.name and view == other):
        return
    if not (other.ptr + their_low >= view.ptr + high or view.ptr + low >= other.ptr + their_high):
        remedy = "pass separate memory for each result"
        raise ShapeError(explain(result.name, f"memory that may overlap {array.name}", "memory of its own", remedy))


# ---- Parameters ----------------------------------------------------------------------------------------------------


def _args(args: LaunchArgs, places: Mapping[str, Any]) -> RecordedArgs:
    struct = type(args.params)
    layout, values = layout_of(struct), values_of(args.params)
    count = layout.num_addresses
    kinds = [str(kind) for kind, *_ in (layout.dtype.fields or {}).values()]
    names = layout.dtype.names or ()
    for name, kind, given in list(zip(names, kinds, values, strict=True))[count:]:
        value = number_of(expression_of(given))  # a truth is 0 or 1
        if kind == "int32" and not -MAX_INT32 - 1 <= value <= MAX_INT32:
            raise ArgumentError(explain(f"{struct.__name__}.{name}", value, "what 32 bits hold", "less work"))
    maps = []
    for array, spec in args.maps:
        replace(spec, base=places[array], array=array).validate()
        maps.append(
            RecordedMap(
                spec.dtype,
                expression_of(places[array]),
                tuple(map(expression_of, spec.dims)),
                tuple(map(expression_of, spec.strides_bytes)),
                tuple(map(expression_of, spec.box)),
                spec.swizzle,
                spec.l2,
            )
        )
    members = [expression_of(places[value]) if at < count else expression_of(value) for at, value in enumerate(values)]
    return RecordedArgs(struct.__name__, tuple(members), tuple(maps))
