"""Description of an operation: its arrays by the names of their axes, its own checks, its oracle and its pipeline.

The record drives the public call, the tests of bad input, `mla-cupy list` and the bindings.
"""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal, NamedTuple, TypeVar

import numpy as np

from mla_cupy.arrays.view import View
from mla_cupy.cache_formats import BYTE_DTYPES
from mla_cupy.dtypes import FLOATS
from mla_cupy.kernels.choice import check_kernel
from mla_cupy.kernels.pipeline import Call, Pipeline
from mla_cupy.ops.groups import Group, taken
from mla_cupy.runtime.device import DeviceInfo

Views = Mapping[str, View | None]
Arrays = Mapping[str, np.ndarray[Any, Any] | None]
_T = TypeVar("_T")
_PACKAGE = __name__.rpartition(".")[0]


def present(arrays: Mapping[str, _T | None], name: str) -> _T:
    """An array that is not optional."""
    array = arrays[name]
    assert array is not None
    return array


@dataclass(frozen=True)
class Input:
    """An array that an operation reads, or changes in place.

    Attributes
    ----------
    name : str
    axes : str
        Names of the axes, separated by spaces: equal names are equal sizes. A name that ends in "?" may be missing, and
        then has size 1; "1?" may be present, after a "page_size" or before it, and is left out of the view. "x*y" is
        the product of two axes of earlier arrays.
    dtypes : tuple of str
        The allowed dtypes; "=q" means the dtype of q.
    optional : bool
        Whether it may be None.
    contiguous : bool
        Whether its last axis must be contiguous.
    written : bool
        Whether the operation writes to parts of it, like a cache. The oracle then writes to its argument.
    scratch : bool
        Whether it is scratch memory, neither read nor a result.
    even : bool
        Whether the first two axes must step evenly, so that they can be treated as one.
    wide : bool
        Whether it must start at, and step by, multiples of 16 bytes, with a contiguous last axis.
    packed : str
        Its axes with the input `cu_seqlens_q`, if they differ.
    """

    name: str
    axes: str
    dtypes: tuple[str, ...]
    optional: bool = False
    contiguous: bool = False
    written: bool = False
    scratch: bool = False
    even: bool = False
    wide: bool = False
    packed: str = ""


def like_first_or_float32(first: str) -> tuple[str, ...]:
    """Dtypes of most results: the first input's, or float32."""
    return (first, "float32") if first != "float32" else (first,)


def like_queries_or_float32(first: str) -> tuple[str, ...]:
    """The dtypes of results of queries that may be e4m3 codes: their results are bfloat16, or float32."""
    return like_first_or_float32("bfloat16" if first in BYTE_DTYPES else first)


def like_first_or_wider(first: str) -> tuple[str, ...]:
    """Dtypes of results: the first input's, or float32; for e4m3 codes bfloat16, float16 or float32."""
    return FLOATS if first in BYTE_DTYPES else like_first_or_float32(first)


def only_like_first(first: str) -> tuple[str, ...]:
    """Dtype of results that always have the first input's dtype."""
    return (first,)


def only_float32(first: str) -> tuple[str, ...]:
    """The dtype of logarithms and of other numbers that are not stored at length."""
    return ("float32",)


def only_int32(first: str) -> tuple[str, ...]:
    """The dtype of places and counts."""
    return ("int32",)


@dataclass(frozen=True)
class Output:
    """An array that an operation writes. The caller may pass it; else it is allocated.

    Attributes
    ----------
    name : str
    axes : str
        As for an input, with the inputs' sizes. "x*y" is the product of two of them. A name that ends in "?" is left
        out if its size is 0.
    dtypes : callable
        `dtypes(first)`: the allowed dtypes, the default first, if the first input, or `dtype_of`, has dtype `first`.
    dtype_option : str
        The option that selects the dtype, if any.
    layout : str
        "wide" starts at, and steps by, multiples of 16 bytes; "rows" has a contiguous last axis; "any" is free.
    wide_with : str
        An optional input that makes its layout "wide".
    like : str
        An input with the same shape, optional axes included.
    needs : str
        An optional input that this result requires.
    even : bool
        Whether the first two axes must step evenly, so that they can be treated as one.
    when : str
        An option that must be true for this result, or the option for a dtype that must be e4m3.
    may_be : str
        An input that it may overwrite: the same memory and layout.
    dtype_of : str
        The input that determines its dtype, where that is not the first one.
    coded : str
        An option that makes its elements e4m3 codes, in bytes by default; or the option for a dtype that may be e4m3.
    packed : str
        As for an input.
    """

    name: str
    axes: str
    dtypes: Callable[[str], tuple[str, ...]] = only_float32
    dtype_option: str = ""
    layout: Literal["wide", "rows", "any"] = "any"
    wide_with: str = ""
    like: str = ""
    needs: str = ""
    even: bool = False
    when: str = ""
    may_be: str = ""
    dtype_of: str = ""
    coded: str = ""
    packed: str = ""


def axes_of(array: Input | Output, given: Mapping[str, object]) -> list[str]:
    """The names of an array's axes in a call with these arrays, None among them."""
    packed = array.packed and given.get("cu_seqlens_q") is not None
    return (array.packed if packed else array.axes).split()


class Examined(NamedTuple):
    """Result of an operation's own checks.

    Attributes
    ----------
    problem : hashable
        For the pipeline's `configure`.
    options : named tuple
        The caller's options with every default resolved: for the pipeline's `steps`, and by their names for the oracle.
    sizes : mapping
        Sizes of axes that only outputs have, by name.
    """

    problem: Any
    options: Any
    sizes: Mapping[str, int] = MappingProxyType({})


def with_scales(*results: Any) -> tuple[Any, ...]:
    """The results of a call, the scales last; without them if there are none."""
    return results if results[-1] is not None else results[:-1]


class NoOptions(NamedTuple):
    """Options of an operation that has arrays alone."""


def check_nothing(arrays: Arrays, options: Any) -> None:
    """Placeholder for operations without a check of values."""


@dataclass(frozen=True, eq=False)
class Operation:
    """One public operation.

    Attributes
    ----------
    name : str
        Name of the public function, and of the oracle's.
    inputs, outputs : tuple
    sizes : mapping
        Allowed sizes of an axis, if limited.
    min_sizes : mapping
        Smallest size of an axis, if not 0.
    options : named tuple class
        The other arguments of the public function by name, in its order: as passed, then as resolved.
    examine : callable
        `examine(views, options)`: checks everything beyond axes and dtypes, on the caller's options.
    pipeline : Pipeline
    on_pages : bool
        Whether it works on a paged cache in an FP8 format.
    internal : bool
        Whether it is internal: neither public nor part of the bindings.
    derivative : str
        The bindings' reaction to derivatives of its results: they raise ("none"), compute gradients in reverse mode
        ("reverse"), or treat the results as constants ("constant").
    parallel : mapping of str to tuple of str
        Axes along which a call consists of independent calls, so that devices may divide it, each with the axes that
        are divided in proportion. Of these, a name that ends in "?" stays whole if its size is 1, and all parts read
        it. A result without the axis is the sum over the parts.
    widths : str
        Valid combinations of sizes, for errors, if `sizes` alone is not enough.
    check_values : callable
        `check_values(arrays, examined)`: checks copies of the inputs, in `checking`.
    keys : mapping of str to callable
        Options that are lists or mappings -> function that makes them hashable, so that a repeated call is recognised.
    groups : mapping of str to group class
        Parameters of the public function that are groups.
    returns : named tuple class, function or None
        Makes what the public function returns of several outputs; None for a tuple of all.
    """

    name: str
    inputs: tuple[Input, ...]
    outputs: tuple[Output, ...]
    options: type[Any]
    examine: Callable[[Views, Any], Examined]
    pipeline: Pipeline[Any]
    sizes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    min_sizes: Mapping[str, int] = field(default_factory=dict)
    on_pages: bool = False
    internal: bool = False
    derivative: Literal["none", "reverse", "constant"] = "none"
    parallel: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    widths: str = ""
    check_values: Callable[[Arrays, Any], None] = check_nothing
    keys: Mapping[str, Callable[[Any], Any]] = field(default_factory=dict)
    groups: Mapping[str, type[Group]] = field(default_factory=dict)
    returns: Callable[..., tuple[Any, ...]] | None = None

    def __post_init__(self) -> None:
        _OPERATIONS[self.name] = self

    @property
    def bound(self) -> bool:
        """True if the bindings to compiled programs have it."""
        return not self.internal

    @property
    def bound_options(self) -> tuple[str, ...]:
        """The options that the bindings have: a compiler orders calls, so nobody can promise what runs before one."""
        return tuple(name for name in self.options._fields if name != "independent")

    @property
    def names(self) -> tuple[str, ...]:
        """The names of all arrays, the inputs first."""
        return (*(array.name for array in self.inputs), *(array.name for array in self.outputs))

    @property
    def written(self) -> tuple[str, ...]:
        """The arrays that are changed: the outputs, then inputs that are changed in place, or worked in."""
        inputs = (array.name for array in self.inputs if array.written or array.scratch)
        return (*(array.name for array in self.outputs), *inputs)

    @property
    def in_place(self) -> dict[str, str]:
        """The outputs that may be in an input's place, and that input."""
        return {output.name: output.may_be for output in self.outputs if output.may_be}

    @property
    def optional(self) -> tuple[str, ...]:
        """The arrays that may be None."""
        inputs = (array.name for array in self.inputs if array.optional)
        return (*inputs, *(array.name for array in self.outputs))

    @functools.cached_property
    def function(self) -> Callable[..., Any]:
        """The public function."""
        found: Callable[..., Any] = getattr(importlib.import_module(_PACKAGE), self.name)
        return found

    @functools.cached_property
    def parameters(self) -> Mapping[str, inspect.Parameter]:
        """The public function's parameters; a group's members replace the group."""
        found: dict[str, inspect.Parameter] = {}
        for name, parameter in inspect.signature(self.function).parameters.items():
            for member in self.members(name):
                kind = self.options.__annotations__.get(member, "Any")
                kind = getattr(kind, "__forward_arg__", kind)
                default = self.groups[name].absent[member]
                found[member] = parameter.replace(name=member, default=default, annotation=kind)
            if name not in self.groups:
                found[name] = parameter
        return MappingProxyType(found)

    def members(self, group: str) -> tuple[str, ...]:
        """Members of a group that this operation has, by their names inside the package."""
        if group not in self.groups:
            return ()
        mine = (*self.names, *self.options._fields)
        return tuple(name for name in self.groups[group].absent if name in mine)

    @functools.cached_property
    def paths(self) -> Mapping[str, str]:
        """The callers' names of the members of groups, by their names inside the package."""
        found: dict[str, str] = {}
        for group, kind in self.groups.items():
            found |= {name: path for name, path in kind.paths(group).items() if name in self.members(group)}
        return MappingProxyType(found)

    @property
    def result_groups(self) -> tuple[str, ...]:
        """The groups of outputs alone."""
        outputs = {output.name for output in self.outputs}
        return tuple(group for group in self.groups if outputs.issuperset(self.members(group)))

    def flattened(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Arguments of the public function, with the members of groups instead of the groups."""
        flat = {name: value for name, value in arguments.items() if name not in self.groups}
        for name in self.groups.keys() & arguments.keys():
            members = self.members(name)
            flat |= zip(members, taken(arguments[name], self.groups[name], name, members), strict=True)
        return flat

    def grouped(self, flat: Mapping[str, Any]) -> dict[str, Any]:
        """Arguments for the public function: the inverse of `flattened`."""
        arguments = dict(flat)
        for name, kind in self.groups.items():
            members = {member: arguments.pop(member) for member in self.members(name) if member in arguments}
            if (group := kind.gathered(members)) is not None:
                arguments[name] = group
        return arguments

    @functools.cached_property
    def defaults(self) -> Mapping[str, Any]:
        """Defaults of `parameters`: the signature and the groups are the only places that have them."""
        return MappingProxyType({name: x.default for name, x in self.parameters.items()})

    def with_defaults(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """All arguments, groups in members: these, and the defaults of the others.

        Raises
        ------
        TypeError
            If the function has no such parameter, or one without a default is missing.
        """
        return self._completed(self.defaults, arguments)

    def options_of(self, **options: Any) -> Any:
        """Options of a call by name; those that are left out have the public function's defaults.

        Raises
        ------
        TypeError
            If there is no such option, or one without a default is missing.
        """
        return self.options(**self._completed({name: self.defaults[name] for name in self.options._fields}, options))

    def _completed(self, defaults: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
        """Arguments with defaults for missing ones; TypeError for an unknown or a required one."""
        if unknown := given.keys() - defaults.keys():
            raise TypeError(f"{self.name}() got an unexpected keyword argument {min(unknown)!r}")
        completed = {**defaults, **given}
        for name, value in completed.items():
            if value is inspect.Parameter.empty:
                raise TypeError(f"{self.name}() missing the argument {name!r}")
        return completed

    def check_kernel(self, kernel: Any) -> None:
        """Raise ArgumentError unless it names a kernel that the caller may choose, or is None."""
        check_kernel(self.pipeline.kernels, kernel)

    def configure(self, call: Call, problem: Any, kernel: str | None, device: DeviceInfo) -> Any:
        """The pipeline's configuration for a call of this problem."""
        return self.pipeline.configure(problem, device, kernel)


_OPERATIONS: dict[str, Operation] = {}


def operation_of(function: object) -> Operation | None:
    """The operation that a function of this package is the public one of, if it is one."""
    plain = inspect.unwrap(function) if callable(function) else None
    if not inspect.isfunction(plain) or not plain.__module__.startswith(_PACKAGE):
        return None
    return _OPERATIONS.get(plain.__name__)
