"""Calls that are known before their arrays have memory: the base of bindings to compiled programs.

A `Signature` is a call without addresses; it tells its results, and travels as text. A `Launcher` is such a call made
ready on the process's GPUs: enqueueing it loads, allocates and waits for nothing, so that it can be captured.
"""

from __future__ import annotations

import functools
import inspect
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from mla_cupy import ops
from mla_cupy.arrays import ARRAY_ALIGNMENT, HOST
from mla_cupy.errors import DeviceError, ShapeError, explain
from mla_cupy.kernels.pipeline import WORKSPACE_ALIGNMENT, Launch, Prepared
from mla_cupy.ops.call import examine
from mla_cupy.ops.checks import check_dtype
from mla_cupy.ops.entry import Request
from mla_cupy.ops.operation import Operation
from mla_cupy.ops.schema import contiguous_view
from mla_cupy.runtime import device as devices

_NOT_OPTIONS = ("workspace", "plan", "stream")
"""Arguments of the public functions that are no options: a compiled program has other means for them."""

Shaped = tuple[tuple[int, ...], str]
"""Shape and dtype of an array."""


@functools.cache
def parameters(name: str) -> dict[str, inspect.Parameter]:
    """The parameters of a public function that a binding has, too: the inputs and the options, in its order."""
    operation = ops.BOUND_OPERATIONS[name]
    outputs = [output.name for output in operation.outputs]
    left_out = {*outputs, *_NOT_OPTIONS, *operation.options._fields} - {*operation.bound_options}
    return {key: value for key, value in operation.parameters.items() if key not in left_out}


def options_of(operation: Operation, given: Mapping[str, Any]) -> Any:
    """The options of a call as the named tuple for `Operation.examine`; dtypes by their names.

    Raises
    ------
    TypeError
        If there is no such option, or one is missing that has no default.
    """
    dtypes = {output.dtype_option for output in operation.outputs} - {""}
    named = {name: check_dtype(name, value) if name in dtypes else value for name, value in given.items()}
    return operation.options_of(**named)


@dataclass(frozen=True)
class Signature:
    """A call with contiguous arrays that have no addresses yet.

    Attributes
    ----------
    operation : str
        Its name.
    arrays : tuple of ((int, ...), str) or None
        Shape and dtype of each array of the operation, inputs first; None for absent arrays.
    options : named tuple
        From `options_of`.
    """

    operation: str
    arrays: tuple[Shaped | None, ...]
    options: Any

    def to_text(self) -> str:
        """Text of it, in JSON."""
        return json.dumps([self.operation, self.arrays, self.options], default=lambda number: number.item())

    @staticmethod
    def from_text(text: str) -> Signature:
        """The inverse of `to_text`."""
        name, arrays, options = json.loads(text)
        shaped = tuple(None if array is None else (tuple(array[0]), array[1]) for array in arrays)
        return Signature(name, shaped, ops.BOUND_OPERATIONS[name].options(*options))

    @property
    def record(self) -> Operation:
        """The operation's."""
        return ops.BOUND_OPERATIONS[self.operation]

    @functools.cached_property
    def request(self) -> Request:
        """The call, checked.

        Raises
        ------
        ShapeError, DTypeError, ArgumentError
            As the public function would.
        """
        views = {
            name: None if array is None else contiguous_view(*array, HOST)
            for name, array in zip(self.record.names, self.arrays, strict=True)
        }
        return examine(self.record, views, self.options)

    @property
    def changed(self) -> tuple[str, ...]:
        """The inputs that it changes in place."""
        return self.record.written[len(self.record.outputs) :]

    @property
    def result_names(self) -> tuple[str, ...]:
        """The arrays that it returns: outputs, then changed inputs; these results reuse the inputs' memory."""
        return self.record.written

    @property
    def results(self) -> tuple[Shaped | None, ...]:
        """Results of the operation; None where there is no such result."""
        given = dict(zip(self.record.names, self.arrays, strict=True))
        views = [self.request.views[output.name] for output in self.record.outputs]
        made = tuple(None if view is None else (view.shape, view.dtype) for view in views)
        return (*made, *(given[name] for name in self.changed))

    @property
    def targets(self) -> tuple[tuple[int, int], ...]:
        """The arrays that results take over: index among the arrays of the call, index among its results."""
        given = [name for name, array in zip(self.record.names, self.arrays, strict=True) if array is not None]
        made = [name for name, result in zip(self.result_names, self.results, strict=True) if result is not None]
        return tuple((given.index(name), index) for index, name in enumerate(made) if name in given)

    def on_host(self, inputs: Sequence[Any], results: Sequence[Any]) -> None:
        """Run it on NumPy arrays: by the public function, hence on a GPU if there is one, else by the oracle.

        Parameters
        ----------
        inputs : sequence of array
            The arrays of the call. Its outputs are ignored; `results` replaces them.
        results : sequence of array
            Memory for the results. A changed input may share the memory of its result.
        """
        names = self.record.names
        begin = len(self.record.inputs)
        given = iter(inputs)
        named = {name: next(given) for name, array in zip(names, self.arrays, strict=True) if array is not None}
        kept: dict[str, Any] = {name: named.get(name) for name in names[:begin]}
        made = iter(results)
        targets: dict[str, Any] = {
            name: None if shaped is None else next(made)
            for name, shaped in zip(self.result_names, self.results, strict=True)
        }
        for name in self.changed:
            if kept[name] is not None:
                np.copyto(targets[name], kept[name])
        self.record.function(**self.record.grouped({**kept, **targets, **self.options._asdict()}))


class Launcher:
    """A call of one signature, ready on some GPUs: every kernel is built and loaded when it is made.

    Several threads may enqueue at once.

    Parameters
    ----------
    signature : Signature
    ordinals : sequence of int
        The CUDA ordinals of the GPUs.

    Attributes
    ----------
    nbytes : int
        Size of the workspace: the largest that any of the GPUs needs.
    """

    def __init__(self, signature: Signature, ordinals: Sequence[int]) -> None:
        operation, request = signature.record, signature.request
        pipeline = operation.pipeline
        self._operation, self._request = operation, request
        self._configs = {
            ordinal: pipeline.configure(request.problem, devices.describe(ordinal), request.kernel)
            for ordinal in ordinals
        }
        self.nbytes = max(pipeline.workspace(config).nbytes for config in self._configs.values())
        # Unused by any thread. A list's pop and append are atomic.
        self._idle = {ordinal: [self._prepare(ordinal)] for ordinal in ordinals}
        given = [name for name, array in zip(operation.names, signature.arrays, strict=True) if array is not None]
        made = [name for name, x in zip(signature.result_names, signature.results, strict=True) if x is not None]
        places = {name: index for index, name in enumerate((*given, *made))}  # a result's own place is the later one
        self._places = [places.get(name, -1) for name in operation.names]
        self._count = len(given) + len(made)

    def enqueue(self, ordinal: int, addresses: Sequence[int], stream: int) -> None:
        """Enqueue everything; nothing is allocated or loaded on the GPU, and nothing waits.

        Parameters
        ----------
        ordinal : int
            CUDA ordinal.
        addresses : sequence of int
            Addresses of the call's arrays, of all results, and of the workspace unless `nbytes` is 0.
        stream : int
            Raw handle of the stream.

        Raises
        ------
        DeviceError, ShapeError
            If the GPU is not one of those that it was made for, or if an address is not aligned.
        """
        idle = self._idle.get(ordinal)
        if idle is None:
            expected = f"one of {sorted(self._idle)}, which the kernels are loaded on"
            raise DeviceError(explain("device", ordinal, expected))
        arrays, workspace = addresses[: self._count], sum(addresses[self._count : self._count + 1])
        if functools.reduce(int.__or__, arrays, 0) % ARRAY_ALIGNMENT or workspace % WORKSPACE_ALIGNMENT:
            got = f"arrays at {[hex(address) for address in arrays]}, a workspace at {workspace:#x}"
            expected = f"multiples of {ARRAY_ALIGNMENT}, and of {WORKSPACE_ALIGNMENT} for the workspace"
            raise ShapeError(explain("addresses", got, expected))
        try:
            prepared = idle.pop()
        except IndexError:  # all are in use by other threads
            prepared = self._prepare(ordinal)
        try:
            prepared.enqueue([0, *(0 if at < 0 else arrays[at] for at in self._places)], workspace, stream)
        finally:
            idle.append(prepared)

    def _prepare(self, ordinal: int) -> Prepared:
        """Programmatic dependents are left out: not every library can capture them into its graphs."""
        pipeline, config = self._operation.pipeline, self._configs[ordinal]
        steps = [
            replace(step, dependent=False) if isinstance(step, Launch) else step
            for step in pipeline.steps(config, self._request)
        ]
        info = devices.describe(ordinal)
        return Prepared(steps, self._operation.names, pipeline.workspace(config), info, stream=0)
