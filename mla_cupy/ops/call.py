"""Calls of all operations: from the caller's arrays to launches, or to the oracle.

The first call of its kind in a thread checks everything, configures the kernels and packs their parameters. A call
with arrays and options that differ from an earlier call only in addresses reuses all of that.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import operator
import threading
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, TypeVar, cast

from mla_cupy import arrays as families
from mla_cupy.arrays import Family, Native, View
from mla_cupy.errors import ArgumentError, MlaError, PlanError, explain, renamed
from mla_cupy.kernels.choice import check_somewhere
from mla_cupy.kernels.pipeline import WORKSPACE_ALIGNMENT, Prepared
from mla_cupy.ops import backend, overlap, schema
from mla_cupy.ops.checks import check_memory
from mla_cupy.ops.entry import Entry, Plan, Request
from mla_cupy.ops.groups import taken
from mla_cupy.ops.operation import Operation, check_nothing, operation_of, with_scales
from mla_cupy.ops.value_checks import is_asked as checks_are_asked
from mla_cupy.ops.value_checks import is_on as values_are_checked
from mla_cupy.runtime import device as devices
from mla_cupy.runtime import driver

__all__ = ["workspace_bytes"]

_R = TypeVar("_R")
WORKSPACE = "workspace"
"""Its name among the arrays."""
MAX_ENTRIES = 256
"""Kinds of calls that a thread remembers."""
MAX_PLACES = 256
"""Addresses that it remembers of the arrays of each kind: a model has some for each layer."""


class _Recent:
    """Entries of a thread's earlier calls. Launches are packed per thread."""

    __slots__ = ("entries", "last", "natives")

    def __init__(self) -> None:
        self.natives: dict[type, Native] = {}
        self.entries: dict[Hashable, Entry] = {}
        self.last: dict[Operation, Entry] = {}  # of each


class _Thread(threading.local):
    """Looked up once in a call: each look-up costs several look-ups of ordinary attributes."""

    def __init__(self) -> None:
        self.recent = _Recent()


_thread = _Thread()


class Invocation:
    """One call of an operation, as its caller made it.

    Attributes
    ----------
    operation : Operation
    arrays : tuple
        The inputs and the outputs in the operation's order; None for absent arrays.
    options : tuple
        The other arguments of the operation, in the order of `operation.options`.
    workspace : array or None
    stream : int, stream object or None
    plan : Plan or None
        The plan that has scheduled the work and owns the workspace.
    """

    __slots__ = ("arrays", "operation", "options", "plan", "stream", "workspace")

    def __init__(
        self,
        operation: Operation,
        arrays: tuple[Any, ...],
        options: tuple[Any, ...] = (),
        workspace: Any = None,
        stream: Any = None,
        plan: Plan | None = None,
    ) -> None:
        self.operation = operation
        self.arrays = arrays
        self.options = options
        self.workspace = workspace
        self.stream = stream
        self.plan = plan

    @classmethod
    def of(cls, operation: Operation, **arguments: Any) -> Invocation:
        """The call of a public function with these arguments; the others have the function's defaults.

        Raises
        ------
        TypeError
            If the function has no such parameter, or one without a default is missing.
        """
        arguments = operation.with_defaults(arguments)
        arrays = tuple(arguments.pop(name) for name in operation.names)
        options = tuple(
            operation.keys[name](arguments.pop(name)) if name in operation.keys else arguments.pop(name)
            for name in operation.options._fields
        )
        return cls(operation, arrays, options, **arguments)

    @property
    def named(self) -> dict[str, Any]:
        """The arrays by name."""
        return dict(zip(self.operation.names, self.arrays, strict=True))

    @property
    def inputs(self) -> dict[str, Any]:
        """The inputs by name, without memory to work in."""
        named = zip(self.operation.inputs, self.arrays, strict=False)
        return {array.name: x for array, x in named if not array.scratch}

    @property
    def results(self) -> tuple[Any, ...]:
        """The outputs that the caller passed."""
        return self.arrays[len(self.operation.inputs) :]

    def adopted(self, family: Family) -> Invocation:
        """Invocation with arrays of the native family over the same memory."""
        arrays = tuple(None if x is None else family.adopt(x) for x in self.arrays)
        workspace = None if self.workspace is None else family.adopt(self.workspace)
        return Invocation(self.operation, arrays, self.options, workspace, self.stream, self.plan)


@families.runs_as_it_is
def call(function: Callable[..., _R], arguments: Mapping[str, Any]) -> _R:
    """Run a call of a public function; `arguments` are its locals.

    Naming 40 arguments takes longer than the rest of a repeated call. The function is therefore replaced by code that
    lists them in the operation's order, which its next calls run.

    Returns
    -------
    array, tuple or None
        The output if there is one, all outputs if there are several.
    """
    operation = operation_of(function)
    assert operation is not None
    results = run(Invocation.of(operation, **operation.flattened(arguments)))
    _list_arguments(function, operation)
    several = results if operation.returns is None else operation.returns(*results)
    return cast("_R", several if len(operation.outputs) > 1 else results[0] if results else None)


def _list_arguments(function: Callable[..., Any], operation: Operation) -> None:
    """Replace the code of a public function by one that makes the `Invocation` from its arguments, without names."""
    function = inspect.unwrap(function)
    code, name = function.__code__, operation.name
    count = code.co_argcount
    parameters = code.co_varnames[: count + code.co_kwonlyargcount]
    kwonly = ("*", *parameters[count:]) if code.co_kwonlyargcount else ()
    known: dict[str, Any] = {"_run": run, "_Invocation": Invocation, f"_{name}": operation}
    lines = [f"def {name}({', '.join((*parameters[:count], *kwonly))}):"]
    for group, kind in operation.groups.items():
        members = operation.members(group)
        known |= {f"_take_{group}": taken, f"_kind_{group}": kind, f"_of_{group}_{name}": members}
        known[f"_no_{group}_{name}"] = taken(None, kind, group, members)
        take = f"_take_{group}({group}, _kind_{group}, {group!r}, _of_{group}_{name})"
        lines.append(f"    {_listed(members)} = _no_{group}_{name} if {group} is None else {take}")
    known |= {f"_key_{key}": make for key, make in operation.keys.items()}
    options = (f"_key_{x}({x})" if x in operation.keys else x for x in operation.options._fields)
    others = (x if x in parameters else "None" for x in ("workspace", "stream", "plan"))
    arguments = ", ".join((f"_{name}", _listed(operation.names), _listed(options), *others))
    several = "return _run(CALL)" if operation.returns is None else f"return _returned_{name}(*_run(CALL))"
    if operation.returns is with_scales:  # inline: a repeated call makes no further call
        lines.append("    results = _run(CALL)")
        several = "return results if results[-1] is not None else results[:-1]"
    known[f"_returned_{name}"] = operation.returns
    result = ("_run(CALL)", "return _run(CALL)[0]", several)[min(len(operation.outputs), 2)]
    lines.append("    " + result)
    made: dict[str, Any] = {}
    text = "\n".join(lines).replace("CALL", f"_Invocation({arguments})")
    exec(compile(text, f"<arguments of {name}>", "exec"), made)
    function.__globals__.update(known)
    function.__code__ = made[name].__code__
    families.runs_as_it_is(function)


def _listed(names: Iterable[str]) -> str:
    return f"({''.join(f'{name}, ' for name in names)})"


@families.runs_as_it_is
def run(call: Invocation, adopted_by: Native | None = None) -> tuple[Any, ...]:
    """Run a call like an earlier one of this thread, or else after all checks.

    `adopted_by` is the library that the arrays have been lent to for the call, if they have been.

    Returns
    -------
    tuple
        The outputs, of the caller's library, or of the one that has adopted the arrays.
    """
    found = _known(call)
    if found is None:
        if adopted_by is None:
            return _first(call)
        found = _prepare(call, adopted_by)
    entry, addresses = found
    native = entry.native
    handle = native.current_stream(entry.device) if call.stream is None else families.stream_handle(call.stream)
    results = call.arrays[entry.given]
    if entry.missing:
        results = _complete(entry, call, addresses, handle)
    memory, scratch = 0, None
    if call.workspace is not None:
        memory = addresses.pop()
    elif call.plan is not None:
        memory = call.plan.address
    elif entry.nbytes:
        scratch, memory = native.scratch(entry.nbytes, entry.device, handle)
    entry.prepared.enqueue(addresses, memory, handle)
    del scratch  # held until everything is enqueued: the stream orders its next use
    if entry.count_writes is not None:
        entry.count_writes(entry.changed(call.arrays if call.workspace is None else (*call.arrays, call.workspace)))
    return results


def _known(call: Invocation) -> tuple[Entry, list[int]] | None:
    """The kind of an earlier call of this thread, and the addresses of the arrays and the workspace; None if it is new.

    Their memory does not overlap.
    """
    recent = _thread.recent
    operation, options, workspace = call.operation, call.options, call.workspace
    entry: Any = recent.last.get(operation)
    addresses: Any = None
    arrays = call.arrays if workspace is None else (*call.arrays, workspace)
    try:
        kinds, state = [*map(type, options)], workspace is not None if call.plan is None else call.plan.state
        similar = entry is not None and entry.options == options and entry.kinds == kinds and entry.state == state
        if similar and entry.match is not None:
            addresses = entry.match(arrays)
        if addresses is None:
            signed: Any = recent.natives[type(arrays[0])].signature(arrays)
            addresses, signature = signed
            if not similar or entry.signature != signature:
                entry = recent.last[operation] = recent.entries[operation, signature, options, (*kinds,), state]
    # Cache miss or invalid argument: fall through to the full checks.
    except (AttributeError, KeyError, OverflowError, TypeError, ValueError):
        return None
    if checks_are_asked() or entry.prepared.driver is not driver.active:
        return None
    if addresses != entry.apart:
        places = (*addresses,)
        if places not in entry.known:  # looking them up takes a tenth of comparing them
            if workspace is not None and (call.plan is not None or addresses[-1] % WORKSPACE_ALIGNMENT):
                return None
            if not overlap.clearly_apart(addresses, entry.reach, entry.written, entry.beside):
                return None
            if len(entry.known) >= MAX_PLACES:
                entry.known.clear()
            entry.known.add(places)
        entry.apart = addresses.copy()
    return entry, addresses


def _complete(entry: Entry, call: Invocation, addresses: list[int], stream: int) -> tuple[Any, ...]:
    """Allocate the missing outputs, and record their addresses."""
    native, arrays = entry.native, list(call.arrays)
    for index, shape, dtype in entry.missing:
        arrays[index] = made = native.empty(shape, dtype, entry.device, stream)
        addresses[index + 1] = native.address(made)
    return tuple(arrays[entry.given])


def _first(call: Invocation) -> tuple[Any, ...]:
    """Check everything, run, and remember."""
    try:
        return _checked(call)
    except MlaError as error:
        raise renamed(error, call.operation.paths).with_traceback(error.__traceback__) from None


def _checked(call: Invocation) -> tuple[Any, ...]:
    operation, family = call.operation, _check_arguments(call)
    adopted = call.adopted(family)
    if family.on_gpu:
        made = run(adopted, family.native)
        family.settle((*adopted.arrays, adopted.workspace))
    else:
        adopted.arrays = tuple(schema.narrowed_inputs(operation, adopted.named).values())
        made = _on_host(adopted, family)
        if family.count_writes is not None:
            named = call.named
            family.count_writes([named[name] for name in operation.written if named[name] is not None])
    return tuple(
        kept if kept is not None else None if x is None else family.release(x)
        for kept, x in zip(call.results, made, strict=True)
    )


def _check_arguments(call: Invocation) -> Family:
    """Check the kinds of the arguments, without sizes; returns the family of the arrays."""
    operation, named = call.operation, {**call.named, WORKSPACE: call.workspace}
    family = families.common_family(named, (*operation.optional, WORKSPACE))
    written = {name: named[name] for name in (*operation.written, WORKSPACE)}
    families.check_writable(family, written, operation.name if operation.bound else "", call.inputs)
    families.check_stream(family, call.stream)
    if call.plan is not None and not (isinstance(call.plan, Plan) and call.plan.operation == operation.name):
        expected = f"a plan of {operation.name}, or None"
        raise PlanError(explain("plan", repr(call.plan), expected, "make it with plan_decode or plan_cascade"))
    if call.workspace is not None and call.plan is not None:
        raise ArgumentError(explain(WORKSPACE, "an array, with a plan", "None: the plan has its own"))
    return family


def examine(operation: Operation, given: Mapping[str, View | None], given_options: tuple[Any, ...]) -> Request:
    """Every check that needs neither a device nor true addresses."""
    options = operation.options(*given_options)
    inputs, sizes = schema.check_inputs(operation, given)
    examined = operation.examine(inputs, options)
    kernel = getattr(examined.options, "kernel", None)
    operation.check_kernel(kernel)
    sizes |= examined.sizes
    outputs, missing = schema.check_outputs(operation, given, sizes, options)
    if missing and getattr(examined.options, "independent", False):  # new memory may be what the previous call reads
        remedy = "allocate it before the previous call"
        raise ArgumentError(explain(next(iter(missing)), None, "an array with independent", remedy))
    first = inputs[operation.inputs[0].name]
    assert first is not None
    return Request(
        {**inputs, **outputs},
        examined.options,
        problem=examined.problem,
        kernel=kernel,
        device=first.device,
        sizes=sizes,
        missing=missing,
    )


def _examine(call: Invocation, native: Native) -> Request:
    """Every check that needs no device."""
    views = _views(call, native)
    request = examine(call.operation, views, call.options)
    present = {name: view for name, view in views.items() if view is not None}
    overlap.check_apart(present, call.operation.written, call.operation.in_place)
    return request


def _views(call: Invocation, native: Native) -> dict[str, View | None]:
    return {name: None if x is None else native.view(x, name) for name, x in call.named.items()}


def _check_workspace(call: Invocation, native: Native, nbytes: int, device: int) -> None:
    """Check the workspace of a call that needs `nbytes`; it must not overlap the arrays."""
    view = native.view(call.workspace, WORKSPACE)
    check_memory(view, nbytes, device)
    present = {name: other for name, other in _views(call, native).items() if other is not None}
    overlap.check_apart({WORKSPACE: view, **present}, [WORKSPACE])


class _Configured(NamedTuple):
    """A call that has been checked, its configuration, and the bytes of workspace that it needs."""

    request: Request
    config: Any
    nbytes: int


def _configure(call: Invocation, native: Native) -> _Configured:
    """Check a call on a GPU; nothing is allocated or launched."""
    request = _examine(call, native)
    if call.plan is not None:
        config = call.plan.configuration(request)
    else:
        config = call.operation.configure(request, request.problem, request.kernel, devices.describe(request.device))
    nbytes = call.operation.pipeline.workspace(config).nbytes
    if call.workspace is not None:
        _check_workspace(call, native, nbytes, request.device)
    return _Configured(request, config, nbytes)


@families.runs_as_it_is
def _prepare(call: Invocation, native: Native) -> tuple[Entry, list[int]]:
    """Check and prepare a call of a new kind, and cache it. Everything that can fail runs before any allocation."""
    operation = call.operation
    configured = _configure(call, native)
    request = configured.request
    handle = native.current_stream(request.device) if call.stream is None else families.stream_handle(call.stream)
    if _checks_values(operation) and not driver.current().is_capturing(handle):
        _check_values(call, request, lambda x: native.to_numpy(x, handle))
    told = request if call.plan is None else replace(request, planned=True)
    info = devices.describe(request.device)
    prepared = operation.pipeline.prepare(configured.config, told, operation.names, info, handle)
    arrays = call.arrays if call.workspace is None else (*call.arrays, call.workspace)
    signed = native.signature(arrays)
    addresses = signed[0] if signed else [0, *(0 if x is None else native.address(x) for x in arrays)]
    entry = _entry(call, native, configured, prepared, addresses)
    # An array of a subclass, or a list among the options, is valid, but not cached.
    with contextlib.suppress(TypeError):
        if signed and not _checks_values(operation):
            entry.signature, entry.match = signed[1], native.matcher(arrays)
            _remember(call, entry)
    return entry, addresses


def _entry(
    call: Invocation, native: Native, configured: _Configured, prepared: Prepared, addresses: list[int]
) -> Entry:
    """The kind of a call that has been checked."""
    request, names = configured.request, call.operation.names
    missing = {names.index(name): form for name, form in request.missing.items()}
    spans = overlap.spans([request.views[name] for name in names])
    reach = [None, *(None if at in missing else span for at, span in enumerate(spans))]
    written = [1 + names.index(name) for name in call.operation.written]
    if call.workspace is not None:
        nbytes = native.view(call.workspace).shape[0]
        written.append(len(reach))
        reach.append((0, nbytes) if nbytes else None)
    written = [at for at in written if reach[at] is not None]
    in_place = {
        (1 + names.index(result), 1 + names.index(array), 0)
        for result, array in call.operation.in_place.items()
        if overlap.are_alike(request.views[result], request.views[array])
    }
    return Entry(
        options=call.options,
        kinds=[*map(type, call.options)],
        state=call.workspace is not None if call.plan is None else call.plan.state,
        native=native,
        device=request.device,
        prepared=prepared,
        nbytes=configured.nbytes,
        missing=tuple((index, *form) for index, form in missing.items()),
        given=slice(len(call.operation.inputs), None),
        reach=tuple(reach),
        written=tuple(written),
        beside=frozenset(in_place | overlap.found_beside(addresses, reach, written)),
        apart=addresses.copy(),
        changed=_picker([at - 1 for at in written]),
        count_writes=native.count_writes if written else None,
    )


def _picker(indices: Sequence[int]) -> Callable[[Sequence[Any]], tuple[Any, ...]]:
    """Pick elements quickly. Of one, itemgetter makes no tuple."""
    return operator.itemgetter(*indices) if len(indices) > 1 else lambda arrays: (arrays[indices[0]],)


def _remember(call: Invocation, entry: Entry) -> None:
    recent, operation = _thread.recent, call.operation
    while len(recent.entries) >= MAX_ENTRIES:
        del recent.entries[next(iter(recent.entries))]
    recent.entries[operation, entry.signature, entry.options, (*entry.kinds,), entry.state] = entry
    recent.last[operation] = entry
    recent.natives[type(call.arrays[0])] = entry.native


def forget() -> None:
    """Drop this thread's cached calls, as after a change of the driver."""
    recent = _thread.recent
    recent.natives.clear()
    recent.entries.clear()
    recent.last.clear()


def fixed(call: Invocation, native: Native) -> Callable[[int], None]:
    """Check and prepare a call of these very arrays once; return what enqueues it on a stream, for one thread at a
    time.

    The operation allocates nothing. The kernels are built and loaded now; the call's stream, a raw handle, must not be
    being captured.
    """
    request, config, nbytes = _configure(call, native)
    assert not request.missing
    assert not nbytes
    info, names = devices.describe(request.device), call.operation.names
    prepared = call.operation.pipeline.prepare(config, request, names, info, call.stream)
    addresses = [0, *map(native.address, call.arrays)]
    return lambda stream: prepared.enqueue(addresses, 0, stream)


# ---- Arrays in the host's memory --------------------------------------------------------------------------------


@families.runs_as_it_is
def _on_host(call: Invocation, family: Family) -> tuple[Any, ...]:
    """Compute on the GPU and copy back, or by the oracle."""
    operation, plan = call.operation, call.plan
    request = _examine(call, family.native)
    if call.workspace is not None:  # neither used nor needed: where it begins does not matter
        check_memory(family.native.view(call.workspace, WORKSPACE)._replace(ptr=0), 0, families.HOST)
    if call.stream is not None:
        families.stream_handle(call.stream)  # refuses what is no stream, whether or not one is needed
    if backend.use_gpu():
        return _on_gpu_and_back(call, request)
    if plan is not None:
        plan.configuration(request)
    if _checks_values(operation):
        _check_values(call, request, lambda x: x)
    if plan is None:
        configure = functools.partial(operation.configure, request, request.problem, request.kernel)
        check_somewhere(operation.name, request.kernel, configure)
    answer = backend.oracle(operation.name, request.options._asdict())(**call.inputs)
    names = _dtypes(operation, request).values()
    absent = [None] * (len(names) - len(answer))  # of the scales of results that have none
    return backend.deliver(backend.rounded([*answer, *absent], names), call.results)


def _on_gpu_and_back(call: Invocation, request: Request) -> tuple[Any, ...]:
    operation, plan = call.operation, call.plan
    there = backend.sent(call.inputs, plan.device if plan else None, call.stream)
    arrays = tuple(there.get(name) for name in operation.names)
    kinds = _dtypes(operation, request)
    chosen: dict[str, Any] = {o.dtype_option: kinds[o.name] for o in operation.outputs if o.dtype_option}
    if "independent" in operation.options._fields:
        chosen["independent"] = False  # the copies to the GPU come right before
    options = tuple({**operation.options(*call.options)._asdict(), **chosen}.values())
    sent = Invocation(operation, arrays, options, None, call.stream, plan)
    made = run(sent, families.cupy_family())
    changed = [at for at, array in enumerate(operation.inputs) if array.written]
    fetched = backend.fetched([arrays[at] for at in changed], call.stream)
    backend.deliver(fetched, [call.arrays[at] for at in changed])
    results = backend.with_codes(backend.fetched(made, call.stream), kinds.values())
    return backend.deliver(results, call.results)


def _dtypes(operation: Operation, request: Request) -> dict[str, str]:
    """Dtypes of the outputs; "" where there is no such result."""
    views = {output.name: request.views[output.name] for output in operation.outputs}
    return {name: "" if view is None else view.dtype for name, view in views.items()}


def _checks_values(operation: Operation) -> bool:
    """True if an operation has value checks and they are switched on."""
    return operation.check_values is not check_nothing and values_are_checked()


def _check_values(call: Invocation, request: Request, to_numpy: Callable[[Any], Any]) -> None:
    copies = {name: None if x is None else to_numpy(x) for name, x in call.inputs.items()}
    call.operation.check_values(schema.narrowed_inputs(call.operation, copies), request.options)


# ---- The size of workspaces -------------------------------------------------------------------------------------


def workspace_bytes(operation: Callable[..., Any], *args: Any, **kwargs: Any) -> int:
    """Return the size of the workspace that a call needs. Nothing is allocated or launched.

    Parameters
    ----------
    operation : function
        `mla_cupy.mla_decode`, `mla_cupy.sparse_mla_forward`, or another operation; or a `functools.partial` of one.
    *args, **kwargs
        The call's own arguments.

    Returns
    -------
    int
        Bytes; 0 for arrays in host memory.

    Raises
    ------
    ArgumentError
        If `operation` is not one, or for any reason that the call itself would raise it.

    Examples
    --------
    >>> import numpy as np, mla_cupy
    >>> outs, lses = np.ones((2, 1, 1, 1, 8), np.float32), np.zeros((2, 1, 1, 1), np.float32)
    >>> mla_cupy.workspace_bytes(mla_cupy.merge_states, outs, lses)
    0
    """
    found, call = invocation_of(operation, args, kwargs)
    with callers_names(found):
        family = _check_arguments(call)
        if family.on_gpu:
            return _configure(call.adopted(family), family.native).nbytes
        _examine(call.adopted(family), family.native)
        return 0


def requested(
    operation: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[Operation, Request]:
    """The operation of a public function, and a call of it after every check that needs no device."""
    found, call = invocation_of(operation, args, kwargs)
    with callers_names(found):
        family = _check_arguments(call)
        return found, _examine(call.adopted(family), family.native)


def invocation_of(
    operation: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[Operation, Invocation]:
    """The operation of a public function, or of a partial of one, and the call with these arguments.

    Raises
    ------
    ArgumentError
        If it is no operation.
    """
    while isinstance(operation, functools.partial):
        args, kwargs, operation = (*operation.args, *args), {**operation.keywords, **kwargs}, operation.func
    found = operation_of(operation)
    if found is None:
        raise ArgumentError(explain("operation", repr(operation), "an operation of mla_cupy that takes arrays"))
    defaults = getattr(operation, "__kwdefaults__", None) or {}  # with `scale`, which the signature requires
    bound = inspect.signature(operation).bind(*args, **{**defaults, **kwargs})
    bound.apply_defaults()
    return found, Invocation.of(found, **found.flattened(bound.arguments))


@contextlib.contextmanager
def callers_names(operation: Operation) -> Iterator[None]:
    """Errors of the package name arguments as the caller does."""
    try:
        yield
    except MlaError as error:
        raise renamed(error, operation.paths).with_traceback(error.__traceback__) from None
