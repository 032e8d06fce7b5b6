"""Parameter structs of kernels on the host: the base of the classes in `params.py`, and the bytes that they become."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from functools import cache
from typing import TYPE_CHECKING, Annotated, Any, get_args, get_origin, get_type_hints

import numpy as np

if TYPE_CHECKING:
    from typing_extensions import dataclass_transform
else:

    def dataclass_transform(**_):  # of the standard library from Python 3.11 on
        return lambda cls: cls


_STRUCT_CODES = {"u8": "Q", "i8": "q", "i4": "i", "f4": "f"}

NULL = ""
"""The name of a null pointer among the addresses of a launch."""

Address = Annotated[str, "u8"]
"""The name of an array or of a part of the workspace; or NULL."""
I64 = Annotated[int, "i8"]
I32 = Annotated[int, "i4"]
F32 = Annotated[float, "f4"]


@dataclass_transform(kw_only_default=True, frozen_default=True)
class Params:
    """Base of the classes for parameter structs: each field is a member, passed by name.

    A tuple is an array, or the strides of several axes named together: `q_stride_b_s_elems` has the values of
    `q_stride_b_elems` and `q_stride_s_elems`. A base of the struct is a field, too. A member that the struct
    initialises may be left out.

    Type checkers see a keyword-only dataclass. It is not one, since making some thirty of them takes 25 ms at import.
    """

    def __init__(self, **fields: Any) -> None:
        struct: Any = type(self)
        self.__dict__.update(_defaults(struct), **fields)
        if self.__dict__.keys() != (wanted := _fields(struct).keys()):
            raise TypeError(
                f"{struct.__name__}: missing or unknown: {', '.join(sorted(self.__dict__.keys() ^ wanted))}"
            )


class ParamLayout:
    """Layout of a parameter struct in memory: addresses first, then the other 8-byte members, as in the `.cu`.

    Attributes
    ----------
    dtype : numpy.dtype
        Names, offsets and size, which tests compare with the facts of the cubin.
    num_addresses : int
        How many addresses lead it.
    """

    def __init__(self, **members: str) -> None:
        self.dtype = np.dtype([(name, "<" + kind) for name, kind in members.items()], align=True)
        kinds = list(members.values())
        self.num_addresses = next((i for i, kind in enumerate(kinds) if kind != "u8"), len(kinds))
        codes, end = "<", 0
        for kind, (_, at, *_) in zip(kinds, (self.dtype.fields or {}).values(), strict=True):
            codes += f"{at - end}x{_STRUCT_CODES[kind]}"
            end = at + int(kind[1])
        self._struct = struct.Struct(f"{codes}{self.dtype.itemsize - end}x")
        self.size = self.dtype.itemsize

    def pack_into(self, buffer: memoryview, *values: float) -> None:
        """Write all members in order."""
        self._struct.pack_into(buffer, 0, *values)

    def offsets(self) -> list[int]:
        """The offset of the first member of each further kind, then the size: the fact `params_layout`."""
        members = [(str(kind), at) for kind, at, *_ in (self.dtype.fields or {}).values()]
        firsts = [at for (kind, at), (before, _) in zip(members[1:], members, strict=False) if kind != before]
        return [*firsts, self.size]


def layout_of(params: type[Params]) -> ParamLayout:
    """The layout of a struct."""
    struct: Any = params  # hashable, though mypy thinks otherwise of classes
    return _layout(struct)


@cache
def _layout(params: Any) -> ParamLayout:
    return ParamLayout(**dict(_members(params)))


def values_of(params: Params) -> list[Any]:
    """The values of all members, in the order of the struct."""
    struct: Any = type(params)
    values: list[Any] = []
    for name in _fields(struct):
        value = params.__dict__[name]
        if isinstance(value, (tuple, Params)):
            values += _flat(value)
        else:
            values.append(value)
    return values


@cache
def _fields(params: Any) -> dict[str, Any]:
    """The fields of a class and their types."""
    return get_type_hints(params, include_extras=True)


@cache
def _defaults(params: Any) -> dict[str, Any]:
    """The values of the fields that may be left out."""
    return {name: vars(params)[name] for name in _fields(params) if name in vars(params)}


def _flat(value: Any) -> list[Any]:
    if isinstance(value, Params):
        return values_of(value)
    return [member for one in value for member in _flat(one)] if isinstance(value, tuple) else [value]


def _members(params: Any) -> Iterator[tuple[str, str]]:
    """(name, kind) of every member."""
    for name, hint in _fields(params).items():
        if get_origin(hint) is tuple:
            hints = get_args(hint)
            for member, one in zip(_names(name, len(hints)), hints, strict=True):
                yield from _member(member, one, f"{member}_")
        else:
            yield from _member(name, hint, "")


def _member(name: str, hint: Any, prefix: str) -> Iterator[tuple[str, str]]:
    if get_origin(hint) is Annotated:
        (kind,) = hint.__metadata__
        yield name, kind
    else:
        yield from ((prefix + member, kind) for member, kind in _members(hint))


def _names(field: str, count: int) -> list[str]:
    """The names of the members that a tuple represents."""
    array, separator, rest = field.partition("_stride_")
    *axes, unit = rest.split("_")
    return [f"{array}_stride_{axis}_{unit}" for axis in axes] if separator else [f"{field}{i}" for i in range(count)]
