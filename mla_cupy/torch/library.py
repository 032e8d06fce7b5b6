"""Operations as operators of PyTorch: schemas, implementations and fakes, all from the operations' records.

Each operation becomes two operators: `mla_cupy::NAME` returns new tensors, `mla_cupy::NAME_out` writes to given ones.
Their arguments are the public function's, and both run what it runs.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from mla_cupy.arrays import View
from mla_cupy.errors import DeviceError, explain
from mla_cupy.ops.bind import options_of, parameters
from mla_cupy.ops.call import Invocation, examine
from mla_cupy.ops.call import run as run_call
from mla_cupy.ops.entry import Request
from mla_cupy.ops.operation import Operation

NAMESPACE = "mla_cupy"
LIBRARY = torch.library.Library(NAMESPACE, "DEF")
"""The operators live as long as it does."""
TAGS = (torch.Tag.pt2_compliant_tag, torch.Tag.needs_fixed_stride_order)
_PLACES = ("CPU", "CUDA")
_CHANGED = "klmnopqrstuvw"
"""Names of inputs that are changed in place, in a schema."""
_is_compiling = torch.compiler.is_compiling
_count_modes = torch._C._len_torch_dispatch_stack
_has_transforms = torch._C._are_functorch_transforms_active
_TYPES = {"int": "int", "bool": "bool", "str": "str", "float": "float"}
_TYPES |= {f"{name} | None": f"{written}?" for name, written in _TYPES.items()}


def is_plain_call(first: torch.Tensor) -> bool:
    """Whether nothing has to see an operator: no compiler, mode, transform or subclass is at work.

    The dispatcher costs several microseconds for operators of so many arguments.
    """
    return type(first) is torch.Tensor and not (_is_compiling() or _count_modes() or _has_transforms())


class Arguments:
    """The arguments of an operation's operators, in order, and what they are to the operation.

    Attributes
    ----------
    schema : str
        As PyTorch writes them.
    """

    def __init__(self, operation: Operation) -> None:
        self._operation = operation
        taken = parameters(operation.name)
        self.names = tuple(taken)
        self.defaults = tuple(value.default for value in taken.values())
        inputs = [array.name for array in operation.inputs]
        self._inputs = [self.names.index(name) for name in inputs]
        self._options = [at for at, name in enumerate(self.names) if name not in inputs]
        self._no_outputs = (None,) * len(operation.outputs)
        self._type = operation.options
        # A schema has no infinity: such a default is written as None.
        self._unwritten = [at for at, value in enumerate(self.defaults) if value == -math.inf]
        self.schema = ", ".join(self._written(name, taken[name]) for name in self.names)

    def _written(self, name: str, parameter: inspect.Parameter) -> str:
        arrays = {array.name: array for array in self._operation.inputs}
        if name in arrays:
            kind = (
                f"Tensor({_CHANGED[self._inputs.index(self.names.index(name))]}!)" if arrays[name].written else "Tensor"
            )
            optional = "?" if arrays[name].optional else ""
            default = "" if parameter.default is inspect.Parameter.empty else "=None"
            return f"{kind}{optional} {name}{default}"
        if name in {output.dtype_option for output in self._operation.outputs}:
            return f"ScalarType? {name}=None"
        if parameter.default == -math.inf:
            return f"float? {name}=None"
        if parameter.default is inspect.Parameter.empty:
            return f"{_TYPES[parameter.annotation]} {name}"
        default = f'"{parameter.default}"' if isinstance(parameter.default, str) else parameter.default
        return f"{_TYPES[parameter.annotation]} {name}={default}"

    def split(self, given: Sequence[Any], outputs: Sequence[Any] | None = None) -> tuple[tuple[Any, ...], Any]:
        """The arrays in the order of the record, and the options. PyTorch leaves out what ends in defaults."""
        values = [*given, *self.defaults[len(given) :]]
        for at in self._unwritten:
            if values[at] is None:
                values[at] = -math.inf
        options = self._type(*[values[at] for at in self._options])
        return (*[values[at] for at in self._inputs], *(self._no_outputs if outputs is None else outputs)), options

    def examine(self, given: Sequence[Any], outputs: Sequence[Any] | None = None) -> Request:
        """The call with tensors that may be fake, checked as the real one is."""
        arrays, options = self.split([_plain(value) for value in given], outputs)
        named = dict(zip(self._operation.names, arrays, strict=True))
        _check_places(named)
        views = {name: _view(x) for name, x in named.items()}
        resolved = options_of(self._operation, options._asdict())
        return examine(self._operation, views, resolved)


def _plain(value: Any) -> Any:
    """A symbolic number as a number, which specialises the program to it."""
    return float(value) if isinstance(value, torch.SymFloat) else value


def _check_places(named: Mapping[str, Any]) -> None:
    """Check that all tensors are of one kind of device: PyTorch asks for shapes alone if one is on "meta"."""
    first, *others = ((name, x.device.type) for name, x in named.items() if x is not None)
    for name, place in others:
        if place != first[1]:
            raise DeviceError(explain(name, f"a tensor on {place}", f"one on {first[1]}, like {first[0]}", "move it"))


def _view(x: Any) -> View | None:
    """A tensor without its memory; sizes may be symbols."""
    if x is None:
        return None
    return View(0, tuple(x.shape), tuple(x.stride()), str(x.dtype).removeprefix("torch."), x.get_device())


def new_results(operation: Operation, request: Request, like: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Tensors of the shapes and dtypes that a call returns."""
    made = []
    for output in operation.outputs:
        shape, dtype = request.missing.get(output.name, ((0,), "float32"))
        made.append(torch.empty(shape, dtype=getattr(torch, dtype), device=like.device))
    return tuple(made)


def complete(results: Sequence[torch.Tensor | None], like: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """An operator returns tensors only: an empty one where there is no such result."""
    return tuple(like.new_empty((0,), dtype=torch.float32) if x is None else x for x in results)


def define(name: str, schema: str, run: Callable[..., Any], fake: Callable[..., Any]) -> Any:
    """Register an operator; returns its only overload."""
    LIBRARY.define(f"{name}{schema}", tags=TAGS)
    for place in _PLACES:
        LIBRARY.impl(name, run, place)
    torch.library.register_fake(f"{NAMESPACE}::{name}", fake, lib=LIBRARY)
    return getattr(getattr(torch.ops, NAMESPACE), name).default


def bind(operation: Operation) -> tuple[Any, Any]:
    """Make the two operators of an operation; an operation that returns nothing has one, which is both."""
    arguments = Arguments(operation)

    names = [output.name for output in operation.outputs]

    def returned(results: tuple[torch.Tensor, ...]) -> Any:  # a schema of one tensor has no tuple, and one of none None
        return results if len(names) > 1 else results[0] if names else None

    def run(*given: Any) -> Any:
        arrays, options = arguments.split(given)
        return returned(complete(run_call(Invocation(operation, arrays, options)), arrays[0]))

    def fake(*given: Any) -> Any:
        return returned(new_results(operation, arguments.examine(given), given[0]))

    def run_out(*given: Any, workspace: Any = None, **targets: Any) -> None:
        arrays, options = arguments.split(given, [targets.get(name) for name in names])
        run_call(Invocation(operation, arrays, options, workspace))

    def fake_out(*given: Any, workspace: Any = None, **targets: Any) -> None:
        arguments.examine(given, [targets.get(name) for name in names])

    returns = ", ".join("Tensor" for _ in names)
    made = define(operation.name, f"({arguments.schema}) -> ({returns})", run, fake)
    if not names:
        return made, made
    written = [
        f"Tensor({letter}!)? {o.name}=None" if o.needs or o.when else f"Tensor({letter}!) {o.name}"
        for letter, o in zip("abcdefgh", operation.outputs, strict=False)
    ]
    targets = ", ".join([*written, "Tensor(z!)? workspace=None"])
    return made, define(f"{operation.name}_out", f"({arguments.schema}, *, {targets}) -> ()", run_out, fake_out)
