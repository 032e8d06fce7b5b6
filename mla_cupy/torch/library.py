"""Operators of PyTorch: their registration and implementation.

Each operation has two: `mla_cupy::NAME` returns new tensors, `mla_cupy::NAME_out` writes to passed ones. Both run the
public function's code; their fakes run the same checks.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from mla_cupy.arrays import View, runs_as_it_is
from mla_cupy.errors import DeviceError, explain
from mla_cupy.ops.bind import options_of
from mla_cupy.ops.call import Invocation, examine
from mla_cupy.ops.call import run as run_call
from mla_cupy.ops.entry import Request
from mla_cupy.ops.operation import Operation

NAMESPACE = "mla_cupy"
LIBRARY = torch.library.Library(NAMESPACE, "DEF")
"""The operators live as long as it does."""
TAGS = (torch.Tag.pt2_compliant_tag, torch.Tag.needs_fixed_stride_order)
_PLACES = ("CPU", "CUDA")
_PLAIN = frozenset((torch.Tensor, torch.nn.Parameter, type(None)))
_is_compiling = torch.compiler.is_compiling
_count_modes = torch._C._len_torch_dispatch_stack
_has_transforms = torch._C._are_functorch_transforms_active


def is_plain_call(arrays: Sequence[Any]) -> bool:
    """Tell whether nothing has to see an operator: no compiler, mode, transform or subclass is at work, nor "meta".

    The dispatcher costs several microseconds for operators with this number of arguments.
    """
    if _is_compiling() or _count_modes() or _has_transforms():
        return False
    return _PLAIN.issuperset(map(type, arrays)) and arrays[0] is not None and not arrays[0].is_meta


def define(name: str, schema: str, run: Callable[..., Any], fake: Callable[..., Any]) -> Any:
    """Register an operator; returns its only overload."""
    LIBRARY.define(f"{name}{schema}", tags=TAGS)
    for place in _PLACES:
        LIBRARY.impl(name, run, place)
    torch.library.register_fake(f"{NAMESPACE}::{name}", fake, lib=LIBRARY)
    return getattr(getattr(torch.ops, NAMESPACE), name).default


class Operators:
    """The operators of an operation.

    Parameters
    ----------
    operation : Operation
    describe : callable
        Makes an Invocation of the operators' arguments: PyTorch leaves out trailing defaults.
    arguments, results, returns : str
        Parts of their schemas: the inputs and options; the tensors to write to; the first operator's results.
    unwritten : tuple of str
        Options whose default, -inf, no schema can hold: they may be None there.

    Attributes
    ----------
    make, write : operator
        The operator that returns new tensors, and the one that writes to passed ones; equal for an operation without
        results.
    results, returns : str
        As passed.
    kinds, defaults : dict
        Type of each argument in the schema; default of each optional one.
    """

    def __init__(
        self,
        operation: Operation,
        describe: Callable[..., Invocation],
        *,
        arguments: str,
        results: str = "",
        returns: str = "()",
        unwritten: tuple[str, ...] = (),
    ) -> None:
        name = operation.name
        self.operation, self.describe, self.arguments = operation, describe, arguments
        self.kinds = _kinds(arguments, unwritten)
        taken = inspect.signature(describe).parameters
        self.defaults = {key: taken[key].default for key in self.kinds if taken[key].default is not taken[key].empty}
        self.defaults |= dict.fromkeys(unwritten, -math.inf)
        self.inputs = tuple(array.name for array in operation.inputs)
        self.options = operation.bound_options
        self.outputs = tuple((output.name, output.needs, output.when) for output in operation.outputs)
        self.results, self.returns = results, returns
        self.dtypes = frozenset(output.dtype_option for output in operation.outputs)
        self.make = self.write = define(
            name, f"({arguments}) -> {returns}", partial(make, describe), partial(fake, describe)
        )
        if results:
            schema = f"({arguments}, *, {results}, Tensor(z!)? workspace=None) -> ()"
            self.write = define(f"{name}_out", schema, partial(write, describe), partial(fake_write, describe))


def _kinds(arguments: str, unwritten: tuple[str, ...]) -> dict[str, str]:
    """The types of arguments by their names, without marks of mutation."""
    found = {}
    for argument in arguments.split(", "):
        kind, name = argument.partition("=")[0].split()
        kind = f"Tensor{'?' * kind.endswith('?')}" if kind.startswith("Tensor") else kind
        found[name] = kind.rstrip("?") if name in unwritten else kind
    return found


# ---- What operators do: `describe` makes the call of their arguments ------------------------------------------------


@runs_as_it_is
def make(describe: Callable[..., Invocation], *given: Any) -> Any:
    """Return new tensors."""
    call = describe(*given)
    return _returned(_complete(run_call(call), call.arrays[0]))


def fake(describe: Callable[..., Invocation], *given: Any) -> Any:
    """Return tensors without values, of the shapes and dtypes of those that `make` returns."""
    call = describe(*given)
    return _returned(_new_results(call.operation, check(call), call.arrays[0]))


@runs_as_it_is
def write(describe: Callable[..., Invocation], *given: Any, **results: Any) -> None:
    """Write to the passed tensors."""
    run_call(describe(*given, **results))


def fake_write(describe: Callable[..., Invocation], *given: Any, **results: Any) -> None:
    """Run the checks of `write`."""
    check(describe(*given, **results))


def check(call: Invocation) -> Request:
    """Check a call with tensors that may be fake, as a real one is."""
    _check_places(call.named)
    options = call.operation.options(*map(_plain, call.options))
    resolved = options_of(call.operation, options._asdict())
    return examine(call.operation, {name: _view(x) for name, x in call.named.items()}, resolved)


def _returned(results: tuple[torch.Tensor, ...]) -> Any:
    """A schema of one tensor has no tuple, and one of none None."""
    return results if len(results) > 1 else results[0] if results else None


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


def _new_results(operation: Operation, request: Request, like: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Tensors of the shapes and dtypes that a call returns."""
    made = []
    for output in operation.outputs:
        shape, dtype = request.missing.get(output.name, ((0,), "float32"))
        made.append(torch.empty(shape, dtype=getattr(torch, dtype), device=like.device))
    return tuple(made)


def _complete(results: Sequence[torch.Tensor | None], like: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """An operator returns tensors only: an empty one where there is no such result."""
    return tuple(like.new_empty((0,), dtype=torch.float32) if x is None else x for x in results)
