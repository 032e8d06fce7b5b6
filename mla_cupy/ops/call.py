"""How every operation is called: from the caller's arrays to launches, or to the oracle.

The first call of its kind in a thread checks everything, configures the kernels and packs their parameters. A call
whose arrays and options are like those of an earlier one, in all but addresses, re-uses all of that.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mla_cupy import arrays as families
from mla_cupy.arrays import Family, Matcher, Native, Signature, View
from mla_cupy.errors import ArgumentError, DeviceError, explain
from mla_cupy.kernels.choice import check_kernel
from mla_cupy.kernels.pipeline import Call
from mla_cupy.ops import backend, overlap, schema
from mla_cupy.ops.entry import Entry, Outputs, Plan, Request
from mla_cupy.ops.operation import Examined, Operation
from mla_cupy.ops.workspace import check_workspace
from mla_cupy.runtime import device as devices
from mla_cupy.runtime import driver

__all__ = ["workspace_bytes"]

MAX_ENTRIES = 256
"""Kinds of calls that a thread remembers."""


@dataclass(frozen=True, slots=True)
class _Last:
    """The latest call of an operation in a thread."""

    options: tuple[Any, ...]
    kinds: list[type]
    state: Hashable
    entry: Entry


class _Recent:
    """What a thread's earlier calls have left. Launches are packed per thread."""

    __slots__ = ("entries", "last", "measured", "natives")

    def __init__(self) -> None:
        self.natives: dict[type, Native] = {}
        self.entries: dict[Hashable, Entry] = {}
        self.last: dict[str, _Last] = {}  # of each operation
        self.measured: list[int] | None = None


class _Thread(threading.local):
    """Looked up once in a call: each look-up takes as long as several of ordinary attributes."""

    def __init__(self) -> None:
        self.recent = _Recent()


_thread = _Thread()


def call(
    operation: Operation,
    arrays: tuple[Any, ...],
    options: tuple[Any, ...],
    plan: Plan | None,
    check: bool,
    stream: Any,
) -> tuple[Any, ...]:
    """Run an operation.

    Parameters
    ----------
    operation : Operation
    arrays : tuple
        The inputs and the outputs in the order of the record, then the workspace; None for those that are not given.
    options : tuple
        The caller's other arguments, in the order of `operation.options`.
    plan : Plan or None
        Has scheduled the work, and owns the workspace.
    check : bool
        Look at values on the device first.
    stream : int, stream object or None

    Returns
    -------
    tuple
        The outputs, of the caller's library.
    """
    recent = _thread.recent
    native = recent.natives.get(type(arrays[0]))
    if native is not None and check is False:
        results = _repeat(recent, operation, native, arrays, options, plan, stream)
        if results is not None:
            return results
    return _first(operation, arrays[:-1], options, arrays[-1], plan, check, stream)


def _repeat(
    recent: _Recent,
    operation: Operation,
    native: Native,
    arrays: tuple[Any, ...],
    options: tuple[Any, ...],
    plan: Plan | None,
    stream: Any,
) -> tuple[Any, ...] | None:
    """Run a call like an earlier one of this thread; None if there was none. The last of `arrays` is the workspace."""
    if recent.measured is not None:
        return None
    state = plan.state if plan else None
    last = recent.last.get(operation.name)
    try:
        kinds = [*map(type, options)]  # True, 1 and 1.0 are equal, and not equally good as options
        similar = last is not None and last.options == options and last.kinds == kinds and last.state == state
        if last is None or not similar or (addresses := last.entry.match(arrays)) is None:
            signed = native.signature(arrays)
            if signed is None:
                return None
            addresses, signature = signed
            entry = recent.entries[operation.name, signature, options, (*kinds,), state]
            last = recent.last[operation.name] = _Last(options, kinds, state, entry)
    except (KeyError, TypeError, ValueError):  # new, or with an option that is no number or name: the checks see to it
        return None
    entry = last.entry
    return entry.run(arrays, addresses, stream, plan) if entry.prepared.driver is driver.active else None


def fixed(
    operation: Operation, native: Native, arrays: Sequence[Any], options: tuple[Any, ...], stream: int
) -> Callable[[int], None]:
    """A call of these very arrays, checked and prepared once: what enqueues it on a stream, for one thread at a time.

    The operation allocates nothing. The kernels are built and loaded now; `stream` must not be being captured.
    """
    request = _examine(operation, native, dict(zip(operation.names, arrays, strict=True)), options)
    pipeline, examined, info = operation.pipeline, request.examined, devices.describe(request.device)
    config = pipeline.configure(examined.problem, info, examined.kernel)
    assert not request.missing
    assert not pipeline.workspace(config).nbytes
    prepared = pipeline.prepare(config, Call(request.views, examined.options), operation.names, info, stream)
    addresses = [0, *map(native.address, arrays)]
    return lambda stream: prepared.enqueue(addresses, 0, stream)


def _matcher(native: Native, signature: Signature) -> Matcher:
    def match(arrays: Sequence[Any]) -> list[int] | None:
        signed = native.signature(arrays)
        return signed[0] if signed is not None and signed[1] == signature else None

    return match


def forget() -> None:
    """Drop what this thread's calls have left, as after a change of the driver."""
    recent = _thread.recent
    recent.natives.clear()
    recent.entries.clear()
    recent.last.clear()


@contextlib.contextmanager
def measuring() -> Iterator[list[int]]:
    """Within a with statement, this thread's calls only report the bytes of workspace that they would need."""
    found: list[int] = []
    recent = _thread.recent
    recent.measured = found
    try:
        yield found
    finally:
        recent.measured = None


def _first(
    operation: Operation,
    arrays: tuple[Any, ...],
    options: tuple[Any, ...],
    workspace: Any,
    plan: Plan | None,
    check: bool,
    stream: Any,
) -> tuple[Any, ...]:
    """Check everything, run, and remember."""
    named = dict(zip(operation.names, arrays, strict=True))
    family = families.common_family({**named, "workspace": workspace}, (*operation.optional, "workspace"))
    given = {output.name: named[output.name] for output in operation.outputs}
    families.check_writable(family, {**{name: named[name] for name in operation.written}, "workspace": workspace})
    families.check_stream(family, stream)
    if not isinstance(check, bool):
        raise ArgumentError(explain("check", repr(check), "True or False"))
    lent = {name: None if x is None else family.adopt(x) for name, x in named.items()}
    if family.on_gpu:
        lent_workspace = None if workspace is None else family.adopt(workspace)
        made = _on_gpu(operation, family.native, lent, options, lent_workspace, plan, check, stream)
        if _thread.recent.measured is None:
            family.settle((*lent.values(), lent_workspace))
    else:
        made = _on_host(operation, family, lent, options, workspace, plan, check, stream)
    return tuple(
        kept if kept is not None else None if x is None else family.release(x)
        for kept, x in zip(given.values(), made, strict=True)
    )


def examine(operation: Operation, given: Mapping[str, View | None], given_options: tuple[Any, ...]) -> Request:
    """Every check that needs neither a device nor true addresses."""
    options = operation.options(*given_options)
    inputs, sizes = schema.check_inputs(operation, given)
    examined = operation.examine(inputs, options)
    check_kernel(operation.pipeline.kernels, examined.kernel)
    sizes |= examined.sizes
    outputs, missing = schema.check_outputs(operation, given, sizes, options)
    first = inputs[operation.inputs[0].name]
    assert first is not None
    return Request({**inputs, **outputs}, sizes, missing, first.device, examined)


def _examine(operation: Operation, native: Native, lent: Mapping[str, Any], options: Any) -> Request:
    """Every check that needs no device."""
    given = {name: None if x is None else native.view(x, name) for name, x in lent.items()}
    request = examine(operation, given, options)
    present = {name: view for name, view in given.items() if view is not None}
    overlap.check_apart(present, operation.written)
    return request


def _on_gpu(
    operation: Operation,
    native: Native,
    lent: Mapping[str, Any],
    options: Any,
    workspace: Any,
    plan: Plan | None,
    check: bool,
    stream: Any,
) -> tuple[Any, ...]:
    """Check, prepare, allocate what is missing, enqueue. What can fail does so before anything is allocated."""
    arrays = (*lent.values(), workspace)
    recent = _thread.recent
    if not check and (results := _repeat(recent, operation, native, arrays, options, plan, stream)) is not None:
        return results
    request = _examine(operation, native, lent, options)
    pipeline, examined, info = operation.pipeline, request.examined, devices.describe(request.device)
    config = (
        pipeline.configure(examined.problem, info, examined.kernel) if plan is None else plan.configuration(request)
    )
    nbytes = pipeline.workspace(config).nbytes
    begin, names = len(operation.inputs), operation.names
    if recent.measured is not None:
        recent.measured.append(nbytes)
        return arrays[begin:-1]
    if workspace is not None:
        check_workspace(native, lent, request.device, workspace, plan, nbytes)
    handle = native.current_stream(request.device) if stream is None else families.stream_handle(stream)
    if check:
        _check_values(operation, {name: _copy(native, lent[name], handle) for name in _inputs(operation)}, examined)
    call = Call(request.views, examined.options, planned=plan is not None)
    prepared = pipeline.prepare(config, call, names, info, handle)
    missing = tuple((names.index(name), shape, dtype) for name, (shape, dtype) in request.missing.items())
    lent_bytes = 0 if workspace is None else native.view(workspace).shape[0]
    changed = tuple(names.index(array.name) for array in operation.inputs if array.written)
    entry = Entry(native, request, prepared, (nbytes, lent_bytes), Outputs(begin, len(names), missing, changed))
    signed = native.signature(arrays)
    if signed is None:  # of a subclass, say: it is as good as any, but not remembered
        addresses = [0, *(0 if x is None else native.address(x) for x in arrays)]
    else:
        addresses, signature = signed
        entry.match = native.matcher(arrays) or _matcher(native, signature)
        last = _Last(options, [*map(type, options)], plan.state if plan else None, entry)
        _remember(operation, native, type(arrays[0]), signature, last)
    entry.trust(addresses)
    results = entry.run(arrays, addresses, handle, plan)
    assert results is not None
    return results


def _remember(operation: Operation, native: Native, kind: type, signature: Signature, last: _Last) -> None:
    recent = _thread.recent
    while len(recent.entries) >= MAX_ENTRIES:
        del recent.entries[next(iter(recent.entries))]
    recent.entries[operation.name, signature, last.options, (*last.kinds,), last.state] = last.entry
    recent.last[operation.name] = last
    recent.natives[kind] = native


def _on_host(
    operation: Operation,
    family: Family,
    lent: Mapping[str, Any],
    options: Any,
    workspace: Any,
    plan: Plan | None,
    check: bool,
    stream: Any,
) -> tuple[Any, ...]:
    """Arrays in the host's memory: on the GPU and back, or by the oracle."""
    if workspace is not None:
        raise DeviceError(explain("workspace", f"an array of {family.name} on the CPU", "None for arrays on the CPU"))
    request = _examine(operation, family.native, lent, options)
    inputs = {name: lent[name] for name in _inputs(operation)}
    targets = [lent[output.name] for output in operation.outputs]
    recent = _thread.recent
    if recent.measured is not None:
        recent.measured.append(0)
        return tuple(targets)
    kinds = [view.dtype if (view := request.views[output.name]) else "" for output in operation.outputs]
    if backend.use_gpu():
        on_gpu = backend.sent(inputs, plan.device if plan else None, stream)
        chosen = {o.dtype_option: kind for o, kind in zip(operation.outputs, kinds, strict=True) if o.dtype_option}
        outputs = dict.fromkeys(output.name for output in operation.outputs)
        cupy = families.cupy_family()
        made = _on_gpu(
            operation, cupy, {**on_gpu, **outputs}, _with(operation, options, chosen), None, plan, check, stream
        )
        changed = [array.name for array in operation.inputs if array.written]
        fetched = backend.fetched([on_gpu[name] for name in changed], stream)
        backend.deliver(fetched, [lent[name] for name in changed])
        return backend.deliver(backend.fetched(made, stream), targets)
    if plan is not None:
        plan.configuration(request)
    if check:
        _check_values(operation, inputs, request.examined)
    numbers = {name: getattr(request.examined.options, name) for name in operation.reference_options}
    answer = backend.oracle(operation.name)(**inputs, **numbers)
    return backend.deliver(backend.rounded(answer, kinds), targets)


def _with(operation: Operation, options: tuple[Any, ...], changes: Mapping[str, Any]) -> tuple[Any, ...]:
    """The options with other values for some of them."""
    return tuple({**operation.options(*options)._asdict(), **changes}.values())


def _inputs(operation: Operation) -> list[str]:
    return [array.name for array in operation.inputs]


def _copy(native: Native, x: Any, stream: int) -> Any:
    return None if x is None else native.to_numpy(x, stream)


def _check_values(operation: Operation, arrays: Mapping[str, Any], examined: Examined) -> None:
    operation.check_values(arrays, examined.options)


def workspace_bytes(operation: Callable[..., Any], *args: Any, **kwargs: Any) -> int:
    """Size of the workspace that a call would need. Nothing is allocated or launched.

    Parameters
    ----------
    operation : function
        `mla_cupy.mla_decode`, `mla_cupy.sparse_mla_forward`, or another operation with `workspace=`.
    *args, **kwargs
        The call's own arguments.

    Returns
    -------
    int
        Bytes; 0 for arrays in the host's memory.

    Raises
    ------
    ArgumentError
        If it is no operation, or as the call itself would raise.

    Examples
    --------
    >>> import numpy as np, mla_cupy
    >>> outs, lses = np.ones((2, 1, 1, 1, 8), np.float32), np.zeros((2, 1, 1, 1), np.float32)
    >>> mla_cupy.workspace_bytes(mla_cupy.merge_states, outs, lses)
    0
    """
    with measuring() as found:
        if callable(operation):
            operation(*args, **kwargs)
    if len(found) != 1:
        raise ArgumentError(explain("operation", repr(operation), "an operation of mla_cupy that takes arrays"))
    return found[0]
