"""The checks that follow from an operation's record: ranks, axes, dtypes, strides and devices of its arrays."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from mla_cupy.arrays.view import View
from mla_cupy.cache_formats import BYTE_DTYPES, head_axis
from mla_cupy.dtypes import TABLE
from mla_cupy.errors import ArgumentError, DeviceError, DTypeError, ShapeError, either, explain
from mla_cupy.ops.checks import absorbing, check_dtype, is_e4m3
from mla_cupy.ops.operation import Input, Operation, Output, Views, axes_of
from mla_cupy.shapes import MAX_INT32

_WIDE_BYTES = 16


def check_inputs(operation: Operation, given: Views) -> tuple[dict[str, View | None], dict[str, int]]:
    """Check the inputs against the record.

    Returns
    -------
    views : dict
        The inputs with exactly the axes of the record, but for "1?".
    sizes : dict
        The sizes of the axes, by name.

    Raises
    ------
    ShapeError, DTypeError, DeviceError
    """
    present = [(array, view) for array in operation.inputs if (view := given[array.name]) is not None]
    for array, view in present:
        _check_rank(operation, array, view, given)
    first = present[0][1]
    for array, view in present:
        _check_dtype(array, view, given)
    present = [(array, low_words(view) if _is_wide(array, view) else view) for array, view in present]
    views: dict[str, View | None] = dict.fromkeys(array.name for array in operation.inputs)
    sizes: dict[str, int] = {}
    owners: dict[str, str] = {}
    for array, view in present:
        views[array.name] = _bind(operation, array, view, sizes, owners, given)
        if array.contiguous and not contiguous_along_last(view):
            remedy = f"make {array.name} contiguous along it"
            raise ShapeError(explain(f"{array.name}.strides[-1]", view.strides[-1], "1 element", remedy))
        if array.even and len(view.shape) > 1:
            check_even(array.name, view)
        if array.wide:
            check_wide(array.name, view)
    for array, view in present:
        if view.device != first.device:
            like = operation.inputs[0].name
            raise DeviceError(explain(f"{array.name}'s device", view.device, f"{first.device}, like {like}", "move it"))
    return views, sizes


def check_outputs(
    operation: Operation, given: Views, sizes: Mapping[str, int], options: Any
) -> tuple[dict[str, View | None], dict[str, tuple[tuple[int, ...], str]]]:
    """Check the arrays for results against the record and the inputs' sizes.

    Returns
    -------
    views : dict
        The outputs; those that were not given as contiguous arrays at address 0; None where there is no such result.
    missing : dict
        Name -> (shape, dtype) of those that have to be allocated.

    Raises
    ------
    ShapeError, DTypeError, DeviceError, ArgumentError
    """
    first = given[operation.inputs[0].name]
    assert first is not None
    views: dict[str, View | None] = {}
    missing: dict[str, tuple[tuple[int, ...], str]] = {}
    for output in operation.outputs:
        view = given[output.name]
        is_set = functools.partial(_is_set, operation, options)
        if reason := lacking(output.needs, output.when, given, is_set):
            if view is not None:
                raise ArgumentError(explain(output.name, "an array", f"None: {reason}"))
            views[output.name] = None
            continue
        shape = _shape(operation, output, given, sizes)
        like = output.dtype_of or operation.inputs[0].name
        dtype = _output_dtype(operation, output, view, like, given[like], options)
        if view is None:
            missing[output.name] = shape, dtype
            view = contiguous_view(shape, dtype, first.device)
        else:
            _check_output(operation, output, view, shape, first)
            if output.wide_with and given[output.wide_with] is not None:
                check_wide(output.name, view)
        views[output.name] = view
    return views, missing


def _is_set(operation: Operation, options: Any, name: str) -> bool:
    """True if an option is true, or a dtype that needs scales."""
    value = getattr(options, name)
    return is_e4m3(value) if name in (output.dtype_option for output in operation.outputs) else bool(value)


def lacking(needs: str, when: str, given: Mapping[str, Any], is_set: Callable[[str], bool]) -> str:
    """Reason that there is no result that needs an input, or an option that is set; "" if there is."""
    if needs and given.get(needs) is None:
        return f"there is no {needs}"
    state = "is not e4m3" if when.endswith("dtype") else "is not set"
    return f"{when} {state}" if when and not is_set(when) else ""


def low_words(view: View) -> View:
    """View 64-bit integers as their lower halves, with which they begin: their values, if 32 bits hold them."""
    if view.dtype != "int64":
        return view
    return view._replace(dtype="int32", strides=tuple(2 * stride for stride in view.strides))


def narrowed(argument: str, x: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """An array of the host with 64-bit integers as one of 32 bits; other arrays stay as they are.

    Raises
    ------
    ArgumentError
        If 32 bits do not hold one of them.
    """
    if x.dtype != np.int64:
        return x
    narrow = x.astype(np.int32)
    bad = np.argwhere(narrow != x)
    if bad.size:
        where = ", ".join(map(str, bad[0]))
        raise ArgumentError(explain(f"{argument}[{where}]", int(x[tuple(bad[0])]), "an integer of 32 bits"))
    return narrow


def narrowed_inputs(operation: Operation, arrays: Mapping[str, Any]) -> dict[str, Any]:
    """`narrowed` for the inputs, by name, that an operation reads as 32-bit integers; None stays None."""
    wide = {array.name for array in operation.inputs if _takes_wide(array)}
    return {name: narrowed(name, x) if x is not None and name in wide else x for name, x in arrays.items()}


def contiguous_along_last(view: View) -> bool:
    """True if the last axis steps by 1 element. The strides of an array without elements mean nothing."""
    return view.strides[-1] == 1 or view.shape[-1] == 1 or 0 in view.shape


def steps_by_16_bytes(view: View) -> bool:
    """True if the array starts at, and every axis but the last steps by, a positive multiple of 16 bytes."""
    return not misstep(view)


def misstep(view: View) -> str:
    """Describe an address or stride (except the last) that is not a positive multiple of 16 bytes, or return ""."""
    if 0 in view.shape:
        return ""
    if past := view.ptr % _WIDE_BYTES:
        return f"the address {view.ptr:#x}, {past} bytes past a multiple of {_WIDE_BYTES}"
    nbytes = TABLE[view.dtype].nbytes
    for axis, (size, stride) in enumerate(zip(view.shape[:-1], view.strides, strict=False)):
        if size > 1 and (stride * nbytes % _WIDE_BYTES or stride <= 0):
            return f"strides[{axis}] = {stride} elements of {nbytes} bytes"
    return ""


def check_even(argument: str, view: View) -> None:
    """Check that the first two axes can be taken as one."""
    if 0 in view.shape or 1 in view.shape[:2]:
        return
    if view.strides[0] != view.shape[1] * view.strides[1]:
        remedy = f"make {argument} contiguous along its first two axes"
        expected = f"{view.shape[1]} times strides[1]"
        raise ShapeError(explain(f"{argument}.strides[0]", view.strides[0], expected, remedy))


def form(operation: Operation, array: Input | Output, given: Views) -> str:
    """The shape as a reader would write it: "(b, s_q, h_q, 576)"."""
    names, view = axes_of(array, given), given.get(array.name)
    dtype = view.dtype if view else ""
    kept = [_size_text(operation, name.removesuffix("?"), dtype) for name in names if name != "1?"]
    text = f"({', '.join(kept)}{',' if len(kept) == 1 else ''})"
    if "1?" in names:
        return f"{text}, or with a head axis of size 1: {_with_head_axis(names)}{_or_before(names)}"
    absent = [name.removesuffix("?") for name in names if name.endswith("?")]
    return f"{text}, or without {absent[0]}" if absent else text


def _with_head_axis(names: list[str]) -> str:
    return "(" + ", ".join("1" if name == "1?" else "..." for name in names) + ")"


def _or_before(names: list[str]) -> str:
    """The other layout of a paged cache with a head axis."""
    axis = names.index("1?")
    return f" or {_with_head_axis([names[0], '1?', *names[2:axis], '...', *names[axis + 1 :]])}" * (axis == 2)


def _size_text(operation: Operation, name: str, dtype: str) -> str:
    """The sizes of an axis. The rows of a cache are as wide as queries, or, in bytes, as the records after these."""
    sizes = operation.sizes.get(name, ())
    if sizes and name in ("d_kv", "width"):
        widths = len(operation.sizes["d_qk"])
        sizes = sizes[widths:] if dtype in BYTE_DTYPES else sizes[:widths]
    return " or ".join(dict.fromkeys(map(str, sizes))) or name


def _check_rank(operation: Operation, array: Input, view: View, given: Views) -> None:
    names = axes_of(array, given)
    fewest = sum(not name.endswith("?") for name in names)
    if not fewest <= len(view.shape) <= len(names):
        raise ShapeError(explain(f"{array.name}.shape", view.shape, form(operation, array, given)))


def _takes_wide(array: Input) -> bool:
    """True if kernels read 32-bit integers that callers may pass as 64-bit ones."""
    return "int32" in array.dtypes and "int64" not in array.dtypes


def _is_wide(array: Input, view: View) -> bool:
    return view.dtype == "int64" and _takes_wide(array)


def _check_dtype(array: Input, view: View, given: Views) -> None:
    if _is_wide(array, view):
        return
    wanted = []
    for name in array.dtypes:
        like = given[name[1:]] if name.startswith("=") else None
        wanted.append((like.dtype, f"{like.dtype}, like {name[1:]}") if like else (name, name))
    if view.dtype not in [dtype for dtype, _ in wanted]:
        remedy = "view 16-bit words as ml_dtypes.bfloat16" if view.dtype == "uint16" else f"convert {array.name}"
        expected = either([*(text for _, text in wanted), *["int64"] * _takes_wide(array)])
        raise DTypeError(explain(f"{array.name}.dtype", view.dtype, expected, remedy))


def _bind(
    operation: Operation, array: Input, view: View, sizes: dict[str, int], owners: dict[str, str], given: Views
) -> View:
    """Compare the axes with the earlier arrays' axes; returns the view with the axes of the description."""
    names, places = axes_of(array, given), list(range(len(view.shape)))
    if "1?" in names:
        if len(places) == len(names):
            places.remove(_head_axis(array.name, names, view.shape))
        names.remove("1?")
    shape, strides = [view.shape[at] for at in places], [view.strides[at] for at in places]
    for axis, name in enumerate(names):
        if name.endswith("?") and len(shape) < len(names):
            shape.insert(axis, 1)
            strides.insert(axis, strides[axis - 1])
            places.insert(axis, axis)
        where = f"{array.name}.shape[{-1 if axis == len(names) - 1 and axis else places[axis]}]"
        _bind_axis(operation, where, name.removesuffix("?"), shape[axis], view.dtype, sizes, owners, array.name)
    return view._replace(shape=tuple(shape), strides=tuple(strides))


def _head_axis(argument: str, names: list[str], shape: tuple[int, ...]) -> int:
    """The axis of size 1 to leave out: in a paged cache on either side of the tokens, else where the record has it."""
    axis = names.index("1?")
    if names[axis - 1].endswith("page_size"):
        return head_axis(shape, argument)
    if shape[axis] != 1:
        remedy = "pass one head: all query heads share the rows and their selection"
        raise ShapeError(explain(f"{argument}.shape[{axis}]", shape[axis], "1 head", remedy))
    return axis


def _bind_axis(
    operation: Operation,
    where: str,
    name: str,
    size: int,
    dtype: str,
    sizes: dict[str, int],
    owners: dict[str, str],
    owner: str,
) -> None:
    if size > MAX_INT32:
        raise ShapeError(explain(where, size, f"at most {MAX_INT32}", "split the call: kernels count in int32"))
    if "*" in name:
        expected = _size(operation, name, sizes)
        if size != expected:
            raise ShapeError(explain(where, size, f"{name}={expected}"))
    elif name not in sizes:
        allowed = operation.sizes.get(name)
        if allowed is not None and size not in allowed:
            built = _size_text(operation, name, dtype) + (f" for {dtype}" if name in ("d_kv", "width") else "")
            remedy = absorbing(size) if name == "d_qk" else operation.widths
            raise ShapeError(explain(where, size, built, remedy))
        least = operation.min_sizes.get(name, 0)
        if size < least:
            raise ShapeError(explain(where, f"{name}={size}", f"at least {least}"))
        sizes[name], owners[name] = size, owner
    elif size != sizes[name]:
        remedy = _instead_of_rows(operation.name, where, size, sizes[name])
        raise ShapeError(explain(where, size, f"{name}={sizes[name]}, as in {owners[name]}", remedy))


def _instead_of_rows(operation: str, where: str, size: int, d: int) -> str:
    """Remedy for contiguous index keys in e2m1: half a byte per element, and four bytes of scales."""
    if operation != "indexer_logits" or where != "k.shape[-1]" or size != d // 2 + 4:
        return ""
    return "e2m1 keys must be paged: call indexer_cache_append, then indexer_logits_paged"


def _shape(operation: Operation, output: Output, given: Views, sizes: Mapping[str, int]) -> tuple[int, ...]:
    like = given[output.like] if output.like else None
    if like is not None:
        return like.shape
    found = ((name, _size(operation, name.removesuffix("?"), sizes)) for name in axes_of(output, given))
    return tuple(size for name, size in found if size or not name.endswith("?"))


def _size(operation: Operation, name: str, sizes: Mapping[str, int]) -> int:
    """The size of an output's axis, which may be the product of two."""
    if "*" in name:
        return math.prod(_size(operation, factor, sizes) for factor in name.split("*"))
    return sizes[name] if name in sizes else operation.sizes[name][0]


def _output_dtype(
    operation: Operation, output: Output, view: View | None, like: str, first: View | None, options: Any
) -> str:
    assert first is not None
    selects_codes = bool(output.coded) and output.coded == output.dtype_option
    coded = bool(output.coded) and _is_set(operation, options, output.coded)
    allowed = BYTE_DTYPES if coded else output.dtypes(first.dtype)
    chosen = getattr(options, output.dtype_option or "_", None)
    same = [f"{dtype}, like {like}" for dtype in allowed if dtype == first.dtype]
    expected = either([*(dtype for dtype in allowed if dtype != first.dtype), *same])
    chosen = check_dtype(output.dtype_option, chosen)
    if chosen is not None and chosen not in allowed:
        codes = f", or {' or '.join(BYTE_DTYPES)}" if selects_codes else ""
        raise DTypeError(explain(output.dtype_option, chosen, expected + codes))
    if view is None:
        return chosen or allowed[0]
    if view.dtype not in ((chosen,) if chosen else allowed):
        remedy = f"pass {output.dtype_option}={view.dtype!r}" if selects_codes and is_e4m3(view.dtype) else ""
        raise DTypeError(explain(f"{output.name}.dtype", view.dtype, chosen or expected, remedy))
    return view.dtype


def _check_output(operation: Operation, output: Output, view: View, shape: tuple[int, ...], first: View) -> None:
    if view.shape != shape:
        raise ShapeError(explain(f"{output.name}.shape", view.shape, str(shape)))
    if view.device != first.device:
        like = operation.inputs[0].name
        raise DeviceError(explain(f"{output.name}'s device", view.device, f"{first.device}, like {like}", "move it"))
    if output.layout == "wide":
        check_wide(output.name, view)
    if output.even:
        check_even(output.name, view)
    if output.layout == "rows" and not contiguous_along_last(view):
        remedy = f"make {output.name} contiguous along it"
        raise ShapeError(explain(f"{output.name}.strides[-1]", view.strides[-1], "1 element", remedy))


def check_wide(argument: str, view: View) -> None:
    """Check that the last axis is contiguous, and that start and other strides are multiples of 16 bytes."""
    if not (contiguous_along_last(view) and steps_by_16_bytes(view)):
        expected = "a contiguous last axis, and a start and other strides that are positive multiples of 16 bytes"
        raise ShapeError(explain(f"{argument}.strides", view.strides, expected, "pass a contiguous array"))


def contiguous_view(shape: tuple[int, ...], dtype: str, device: int) -> View:
    """An array without memory, in C order."""
    strides = []
    step = 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(1, size)
    return View(0, shape, tuple(reversed(strides)), dtype, device)
