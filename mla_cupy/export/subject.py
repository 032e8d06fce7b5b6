"""Subject of an export: an operation with some sizes, dtypes and options fixed, and the rest as recorded numbers."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

from mla_cupy.arrays.view import View, view_of
from mla_cupy.dtypes import TABLE
from mla_cupy.export import expressions as ex
from mla_cupy.export.expressions import Expression
from mla_cupy.export.numbers import Integer, Real
from mla_cupy.ops.operation import Input, Operation, Output, axes_of
from mla_cupy.runtime.device import DeviceInfo, number_of, smem_per_block
from mla_cupy.shapes import MAX_INT32

DEVICE = 0
"""The one device of a recorded call."""
MAX_STRIDE = 1 << 48
"""Elements: more than any address space has, and few enough that bytes of a stride fit 64 bits."""
MAX_ADDRESS = (1 << 63) - 1
MAX_BYTES = 1 << 62
_INT32 = -MAX_INT32 - 1, MAX_INT32
_MAX_SMS, _MAX_MEMORY = 1 << 12, 1 << 50

Kind = Literal["size", "stride", "address", "integer", "real", "device", "plan"]


@dataclass(frozen=True)
class Argument:
    """A number that a C caller gives, or that the module reads from the device.

    Attributes
    ----------
    name : str
        As expressions have it: "b", "q", "q_strides[1]", "scale", "device.sm_count".
    kind : str
    low, high : int
        Of an integer: what the expressions rely on.
    """

    name: str
    kind: Kind
    low: int = 0
    high: int = 0

    @property
    def expression(self) -> Expression:
        """The variable."""
        return ex.real_variable(self.name) if self.kind == "real" else ex.variable(self.name, self.low, self.high)

    @property
    def is_bounded(self) -> bool:
        """True if the span says more than the type in C."""
        return self.kind != "real" and (self.low, self.high) != _INT32

    @property
    def number(self) -> Any:
        """The variable as a recorded number."""
        return Real(self.expression) if self.kind == "real" else Integer(self.expression)


def size_argument(name: str, low: int = 0) -> Argument:
    """A size of an axis."""
    return Argument(name, "size", low, MAX_INT32)


@dataclass(frozen=True)
class Array:
    """An array of the call: its address and the strides of its first axes are arguments.

    Attributes
    ----------
    axes : tuple of str
        Of the record; one of fixed size 1 that may be missing is.
    num_strides : int
        The last axis has none where it must be contiguous.
    written : bool
    """

    name: str
    axes: tuple[str, ...]
    dtype: str
    num_strides: int
    written: bool

    @property
    def address(self) -> Argument:
        """Address of its first element."""
        return Argument(self.name, "address", 0, MAX_ADDRESS)

    @property
    def strides(self) -> list[Argument]:
        """Strides of its first axes, in elements."""
        names = (f"{self.name}_strides[{axis}]" for axis in range(self.num_strides))
        return [Argument(name, "stride", -MAX_STRIDE, MAX_STRIDE) for name in names]


@dataclass(frozen=True)
class Subject:
    """An operation with what is fixed.

    Attributes
    ----------
    operation : Operation
    sizes : mapping
        Axis -> size, of those that are fixed.
    dtypes : mapping
        Array -> dtype; an array without one is not given.
    fixed : mapping
        Option -> value. An option that is neither fixed nor free has the public function's default.
    free : mapping
        Option -> "integer" or "real".
    defaults : mapping
        Free option -> the value that the C module starts from, where that is not the public function's default. An
        option that the public function requires starts from 0.
    derived : mapping
        Axis of outputs alone -> its size: a number, or the name of an option.
    notes : mapping
        What else is fixed, for the manifest.
    """

    operation: Operation
    sizes: Mapping[str, int]
    dtypes: Mapping[str, str]
    fixed: Mapping[str, Any] = field(default_factory=dict)
    free: Mapping[str, Literal["integer", "real"]] = field(default_factory=dict)
    defaults: Mapping[str, float] = field(default_factory=dict)
    derived: Mapping[str, int | str] = field(default_factory=dict)
    notes: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        known = {name: self.operation.defaults[name] for name in self.operation.options._fields}
        fixed = {name: value for name, value in known.items() if name not in self.free}
        object.__setattr__(self, "fixed", fixed | dict(self.fixed))
        optional = {name: kind for name, kind in self.free.items() if known[name] is not inspect.Parameter.empty}
        numbers = {name: known[name] if kind == "real" else int(known[name]) for name, kind in optional.items()}
        object.__setattr__(self, "defaults", numbers | dict(self.defaults))

    @cached_property
    def arrays(self) -> list[Array]:
        """The arrays of a call, the inputs first."""
        records: tuple[Input | Output, ...] = (*self.operation.inputs, *self.operation.outputs)
        return [self._array(record) for record in records if record.name in self.dtypes]

    def _array(self, record: Input | Output) -> Array:
        axes = tuple(axis for axis in axes_of(record, self.dtypes) if not self._missing(axis))
        if isinstance(record, Input):
            dense, written = record.contiguous or record.wide, record.written or record.scratch
        else:
            dense, written = record.layout in ("wide", "rows"), True
        return Array(record.name, axes, self.dtypes[record.name], len(axes) - dense, written)

    def _missing(self, axis: str) -> bool:
        return axis == "1?" or (axis.endswith("?") and self.sizes.get(axis.removesuffix("?")) == 1)

    @cached_property
    def free_sizes(self) -> list[Argument]:
        """The sizes that a caller gives, in the order in which the arrays have them."""
        names = [name for array in self.arrays for axis in array.axes for name in self._factors(axis)]
        wanted = dict.fromkeys(name for name in names if name not in self.sizes and name not in self.derived)
        return [size_argument(name) for name in wanted]

    @cached_property
    def free_options(self) -> list[Argument]:
        """The options that a caller gives."""
        return [Argument(name, kind, *_INT32) for name, kind in self.free.items()]

    def size(self, axis: str) -> Any:
        """The size of an axis: a number, or a recorded one."""
        product: Any = 1
        for name in self._factors(axis):
            product = product * self._size(name)
        return product + self._added(axis)

    def _size(self, name: str) -> Any:
        if name in self.sizes:
            return self.sizes[name]
        found = self.derived.get(name)
        if isinstance(found, str):
            return next(option.number for option in self.free_options if option.name == found)
        return size_argument(name).number if found is None else found

    def _factors(self, axis: str) -> list[str]:
        """The axes that an axis is the product of; of "b+1" the first term."""
        name = axis.removesuffix("?")
        return [name] if name in self.sizes else name.partition("+")[0].split("*")

    def _added(self, axis: str) -> int:
        return 0 if axis in self.sizes else int(axis.partition("+")[2] or 0)

    def shape(self, array: Array) -> tuple[Any, ...]:
        """The shape of an array."""
        return tuple(map(self.size, array.axes))

    def contiguous_strides(self, array: Array) -> list[Any]:
        """The strides that an array has if nothing lies between its elements."""
        strides: list[Any] = [1]
        for size in self.shape(array)[:0:-1]:
            strides.insert(0, strides[0] * size)
        return strides[: array.num_strides]

    def views(self) -> dict[str, View | None]:
        """The arrays as the package sees them; None for those that are not given. For a recording."""
        return dict.fromkeys(self.operation.names) | {array.name: self.view(array) for array in self.arrays}

    def view(self, array: Array) -> View:
        """One array as the package sees it."""
        return View(array.address.number, self.shape(array), self._strides(array), array.dtype, DEVICE)

    def check_items(self, array: Array) -> None:
        """Check that an array starts at whole elements, as the package does when it looks at one.

        Raises
        ------
        ShapeError
        """
        shape, nbytes = self.shape(array), TABLE[array.dtype].nbytes
        in_bytes = [stride * nbytes for stride in self._strides(array)]
        view_of(array.name, array.address.number, shape, in_bytes, nbytes, array.dtype, DEVICE)

    def _strides(self, array: Array) -> tuple[Any, ...]:
        return tuple(stride.number for stride in array.strides) + (1,) * (len(array.axes) - array.num_strides)

    def options(self) -> tuple[Any, ...]:
        """The options as a caller of the package would give them."""
        given = {option.name: option.number for option in self.free_options} | dict(self.fixed)
        return tuple(given[name] for name in self.operation.options._fields)

    def arguments(self) -> Iterator[Argument]:
        """Everything that a caller gives, in the order of the struct, but for the workspace."""
        yield from self.free_sizes
        for array in self.arrays:
            yield array.address
            yield from array.strides
        yield from self.free_options


WORKSPACE = Argument("workspace", "address", 0, MAX_ADDRESS)
WORKSPACE_BYTES = Argument("workspace_bytes", "integer", 0, MAX_BYTES)
SM_COUNT = Argument("device.sm_count", "device", 1, _MAX_SMS)
L2_BYTES = Argument("device.l2_bytes", "device", 0, _MAX_MEMORY)
TOTAL_MEMORY = Argument("device.total_memory", "device", 0, _MAX_MEMORY)
DEVICE_ARGUMENTS = (SM_COUNT, L2_BYTES, TOTAL_MEMORY)
"""Numbers that a module reads from its device when it is opened; targets fix the rest."""

PLAN_ARGUMENTS = (
    Argument("plan.max_b", "size", 1, MAX_INT32),
    Argument("plan.max_pages", "size", 1, MAX_INT32),
    Argument("plan.cp_world", "integer", *_INT32),
    Argument("plan.cp_rank", "integer", *_INT32),
    Argument("plan.scheduled_b", "plan", -1, MAX_INT32),
)
"""Members of a plan of dense decode, beside its workspace."""


def recorded_device(arch: str) -> DeviceInfo:
    """Any GPU of a target."""
    cc = divmod(number_of(arch), 10)
    sms, l2, memory = (argument.number for argument in DEVICE_ARGUMENTS)
    return DeviceInfo(DEVICE, f"a GPU for {arch}", cc, sms, smem_per_block(cc), l2, memory)
