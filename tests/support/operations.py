"""Calls of every operation, and mistakes in them, made from the operations' own records.

An operation that is added to `OPERATIONS` or `COMPOSITE_OPERATIONS` gets these tests without a line of its own.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

import mla_cupy
from mla_cupy import DeviceError, DTypeError, ShapeError, dtypes
from mla_cupy.arrays.view import View
from mla_cupy.ops import COMPOSITE_OPERATIONS, OPERATIONS
from mla_cupy.ops.operation import Input, Operation, Output
from tests.support.flat import flat
from tests.support.mistakes import Bad, Call, Foreign, gapped, shifted, swap

#: Sizes of the axes, by name; others have 3.
SIZES = {
    "b": 2,
    "b+1": 3,
    "h": 4,
    "h_q": 4,
    "h_kv": 2,
    "h_rope": 2,
    "h_v": 2,
    "num_pages": 8,
    "page_size": 16,
    "max_pages": 4,
    "s_kv": 20,
    "page_tokens": 1,
    "topk": 5,
    "keys": 5,
    "mask_bytes": 16,
    "starts": 13,
}
SIZES |= {"k": 2048, "rope_pairs": 4}  # the default of `indexer_topk`; a lane of `indexer_prepare_q`
#: Values of whole numbers, where any others would say little.
VALUES = {"seqlens": [20, 33], "topk_length": [4, 5, 5], "cu_seqlens_q": [0, 2, 3], "cu_seqlens_kv": [0, 12, 20]}
SCALE = 192**-0.5
#: Options that a good call has.
CHOSEN: dict[str, dict[str, Any]] = {
    "cascade_decode": {"groups": ((0, 2, 1),), "scale": SCALE},
    "indexer_head_sums": {"scale": 0.5},
    "indexer_select": {"topk": 5},
    "indexer_select_paged": {"topk": 5},
    "indexer_sparse_loss": {"scale": 0.5},
    "indexer_warmup_loss": {"scale": 0.5},
    "mla_decode": {"scale": SCALE},
    "prefill_mask": {"max_keys": 20},
    "prefill_segments": {"max_segments": 4},
    "sparse_mla_backward": {"scale": SCALE},
    "sparse_mla_forward": {"scale": SCALE},
}
#: Arrays that a good call does without: with them others have other axes or dtypes, or none.
LEFT_OUT: dict[str, tuple[str, ...]] = {
    "mla_decode": (
        *("q_rope", "cu_seqlens_q", "out_cos", "out_sin", "out_positions", "q_scales", "kv_scales"),
        "out_scales",
    ),
    "mla_prefill": ("q_scales", "k_scales", "v_scales"),
    "sparse_mla_decode": ("out_cos", "out_sin", "out_positions", "out_scales"),
}
#: Hardly an array of any operation has them.
FOREIGN_DTYPES = ("float64", "int64")

Array = np.ndarray[Any, Any]


def function_of(operation: Operation) -> Callable[..., Any]:
    """The public function of flat arguments; what it returns is a tuple, also of a single result."""
    found = flat(getattr(mla_cupy, operation.name))
    if operation.name in CHOSEN:
        found = functools.partial(found, **CHOSEN[operation.name])
    if len(operation.outputs) > 1:
        return found

    @functools.wraps(getattr(mla_cupy, operation.name))
    def function(**call: Any) -> tuple[Any, ...]:
        return (found(**call),)

    function.__signature__ = inspect.signature(found)  # type: ignore[attr-defined]
    return function


def size_of(operation: Operation, axis: str) -> int:
    """Size of an axis in `good_call`."""
    if "*" in axis:
        return math.prod(size_of(operation, factor) for factor in axis.split("*"))
    return operation.sizes[axis][0] if axis in operation.sizes else SIZES.get(axis, 3)


def axes_of(array: Input | Output) -> list[str]:
    """The axes of the array in `good_call`, without axes of a single head, and without axes that a result may lack."""
    if isinstance(array, Output):
        return [axis for axis in array.axes.split() if not axis.endswith("?")]
    return [axis.removesuffix("?") for axis in array.axes.split() if axis != "1?"]


def good_call(operation: Operation, seed: int = 0) -> Call:
    """All arrays of a call, outputs included, which are full of sevens. Every array is contiguous, and the caller's."""
    return {name: array.copy() for name, array in _good_call(operation.name, seed).items()}


@functools.cache
def _good_call(name: str, seed: int) -> Call:
    """The arrays for all tests, which nobody changes."""
    operation = {**OPERATIONS, **COMPOSITE_OPERATIONS}[name]
    rng = np.random.default_rng(seed)
    call: Call = {}
    for array in inputs_of(operation):
        shape = tuple(size_of(operation, axis) for axis in axes_of(array))
        dtype = _dtype_of(operation, array)
        if dtype == "uint64":
            call[array.name] = rng.integers(0, 8, shape).astype(np.uint64)
        elif dtype == "int32":
            values = np.resize(VALUES[array.name], shape) if array.name in VALUES else rng.integers(0, 8, shape)
            call[array.name] = values.astype(np.int32)
        else:
            call[array.name] = rng.standard_normal(shape, np.float32).astype(dtypes.numpy_dtype(dtype))
    for output in outputs_of(operation):
        shape = tuple(size_of(operation, axis) for axis in axes_of(output))
        call[output.name] = np.full(shape, 7, dtypes.numpy_dtype(_dtype_of(operation, output)))
    return call


def output_names(operation: Operation) -> tuple[str, ...]:
    return tuple(output.name for output in outputs_of(operation))


def inputs_of(operation: Operation) -> list[Input]:
    """Inputs of `good_call`."""
    left_out = LEFT_OUT.get(operation.name, ())
    return [array for array in operation.inputs if array.name not in left_out]


def outputs_of(operation: Operation) -> list[Output]:
    """Outputs of `good_call`."""
    left_out = LEFT_OUT.get(operation.name, ())
    return [array for array in operation.outputs if array.name not in left_out]


def arrays_of(operation: Operation) -> Iterator[Input | Output]:
    yield from inputs_of(operation)
    yield from outputs_of(operation)


# ---- Mistakes ---------------------------------------------------------------------------------------------------


def mistakes(operation: Operation) -> list[Bad]:
    """Wrong ranks, sizes, dtypes, strides, addresses, libraries: of each array."""
    found: list[Bad] = []
    for array in arrays_of(operation):
        found += [*_ranks(array), *_sizes(operation, array), *_dtypes(operation, array), *_strides(operation, array)]
        found += _libraries(operation, array)
    return found


def _ranks(array: Input | Output) -> Iterator[Bad]:
    names = array.axes.split()
    too_many = 1 + sum(name == "1?" for name in names)
    yield Bad(
        f"{array.name} of more axes",
        swap(array.name, lambda x: x[(None,) * too_many]),
        ShapeError,
        (f"{array.name}.shape", "(1, "),
    )
    fewest = sum(not name.endswith("?") for name in names)
    drop = len(axes_of(array)) - fewest + 1
    yield Bad(
        f"{array.name} of fewer axes",
        swap(array.name, lambda x: np.ascontiguousarray(x[(0,) * drop] if x.ndim > drop else x.reshape(-1)[0]).reshape(
            x.shape[drop:]
        )),
        ShapeError,
        (f"{array.name}.shape",),
    )  # fmt: skip


def _sizes(operation: Operation, array: Input | Output) -> Iterator[Bad]:
    for at, axis in enumerate(axes_of(array)):
        tied = isinstance(array, Output) or axis in operation.sizes or _is_shared(operation, array, axis)
        if tied:
            words = (f"{array.name}.shape",) if isinstance(array, Output) else ()
            yield Bad(f"{array.name} {axis}+1", swap(array.name, _resized(at, 1)), ShapeError, words)
        if operation.min_sizes.get(axis, 0) > 0 and isinstance(array, Input):
            yield Bad(f"{array.name} {axis}=0", swap(array.name, _resized(at, None)), ShapeError, ())
        if isinstance(array, Input) and axis != "1?" and array.name not in operation.written:
            limit = f"{array.name}.shape[", "at most 2147483647"
            yield Bad(f"{array.name} {axis} endless", swap(array.name, _endless(at)), ShapeError, limit)


def _is_shared(operation: Operation, array: Input, axis: str) -> bool:
    return any(axis in axes_of(other) for other in operation.inputs if other is not array)


def _resized(at: int, more: int | None) -> Callable[[Array], Array]:
    """The arrays with `more` elements along an axis; None: with no elements."""

    def change(x: Array) -> Array:
        shape = list(x.shape)
        shape[at] = 0 if more is None else shape[at] + more
        return np.resize(x, shape) if 0 not in shape else np.zeros(shape, x.dtype)

    return change


def _endless(at: int) -> Callable[[Array], Array]:
    """The arrays with more elements along an axis than 32 bits count, all in the memory of the first."""

    def change(x: Array) -> Array:
        shape = list(x.shape)
        shape[at] = 2**31
        return np.broadcast_to(x.take([0], at), shape)

    return change


def _dtypes(operation: Operation, array: Input | Output) -> Iterator[Bad]:
    first = operation.inputs[0].dtypes[0]
    other = "float16" if first != "float16" else "bfloat16"
    allowed = array.dtypes if isinstance(array, Input) else array.dtypes(_giving(operation, array))
    if isinstance(array, Input) and "int32" in allowed:
        allowed = (*allowed, "int64")
    wrong = [dtype for dtype in FOREIGN_DTYPES if dtype not in allowed]
    if isinstance(array, Output):
        wrong += [other] if other not in allowed else []
    elif array is not operation.inputs[0]:
        wrong += [other] if "=q" in array.dtypes or other not in array.dtypes else []
    for dtype in wrong:
        changed = swap(array.name, lambda x, dtype=dtype: x.astype(dtypes.numpy_dtype(dtype)))  # type: ignore[misc]
        yield Bad(f"{array.name} {dtype}", changed, DTypeError, (f"{array.name}.dtype", dtype))


def _strides(operation: Operation, array: Input | Output) -> Iterator[Bad]:
    name = array.name
    if nbytes_of((), _dtype_of(operation, array)) > 1:
        yield Bad(f"{name} between items", swap(name, off_by_a_byte), ShapeError, (f"{name}'s address", "multiple of"))
        yield Bad(f"{name} odd strides", swap(name, stepped_by_bytes), ShapeError, (f"{name}.strides", "multiples of"))
    needs_rows = (array.contiguous or array.wide) if isinstance(array, Input) else array.layout != "any"
    if needs_rows:
        yield Bad(f"{name} gaps", swap(name, gapped), ShapeError, (f"{name}.strides",))
        yield Bad(f"{name} reversed", swap(name, lambda x: x[..., ::-1]), ShapeError, (f"{name}.strides",))
    if isinstance(array, Output):
        yield Bad(f"{name} repeated", swap(name, repeated), ShapeError, (f"{name}.strides",))
    if array.wide if isinstance(array, Input) else array.layout == "wide":
        yield Bad(f"{name} shifted", swap(name, shifted), ShapeError, (f"{name}.strides", "16 bytes"))
        yield Bad(f"{name} backwards", swap(name, lambda x: x[::-1]), ShapeError, (f"{name}.strides", "16 bytes"))


def _dtype_of(operation: Operation, array: Input | Output) -> str:
    """Dtype in `good_call`."""
    if isinstance(array, Output):
        return array.dtypes(_giving(operation, array))[0]
    first = operation.inputs[0].dtypes[0]
    return first if array.dtypes[0].startswith("=") else array.dtypes[0]


def _giving(operation: Operation, output: Output) -> str:
    """The dtype that decides about a result's, in `good_call`."""
    return next(x.dtypes[0] for x in operation.inputs if x.name == (output.dtype_of or operation.inputs[0].name))


def _libraries(operation: Operation, array: Input | Output) -> Iterator[Bad]:
    name, first = array.name, operation.inputs[0].name
    if isinstance(array, Input) and not array.optional:
        yield Bad(f"{name} None", swap(name, lambda x: None), DTypeError, (name, "an array"))
    yield Bad(f"{name} list", swap(name, lambda x: [1.0]), DTypeError, (name, "a list", "an array"))
    ctypes_array = np.ctypeslib.as_ctypes(np.zeros(3))  # its type says of no module where it is from
    yield Bad(
        f"{name} ctypes", swap(name, lambda x: ctypes_array), DTypeError, (name, "a c_double_Array_3", "an array")
    )
    yield Bad(f"{name} scalar", swap(name, lambda x: x.reshape(-1)[0]), DTypeError, (name, "an array"))
    yield Bad(f"{name} masked", swap(name, np.ma.masked_array), DTypeError, (name, "masked"))
    if name != first:
        words = (name, "dlpack on the GPU", f"like {first}")
        yield Bad(f"{name} foreign", swap(name, lambda x: Foreign()), DeviceError, words)


def off_by_a_byte(x: Array) -> Array:
    """Equal values, one byte past a multiple of their size."""
    whole = np.zeros(x.nbytes + 17, np.uint8)
    begin = 1 + -whole.ctypes.data % 16
    made: Array = whole[begin : begin + x.nbytes].view(x.dtype).reshape(x.shape)
    made[...] = x
    return made


def stepped_by_bytes(x: Array) -> Array:
    """Equal values, in steps of one byte too many along the first axis with steps."""
    axis = next(at for at, size in enumerate(x.shape) if size > 1)
    strides = list(np.ascontiguousarray(x).strides)
    strides[axis] += 1
    whole = np.zeros(x.nbytes + x.shape[axis] + 16, np.uint8)
    begin = -whole.ctypes.data % 16
    memory = whole[begin : begin + x.itemsize].view(x.dtype)
    made = np.lib.stride_tricks.as_strided(memory, x.shape, strides)
    made[...] = x
    return made


def repeated(x: Array) -> Array:
    """An array of the same shape whose elements along an axis are one and the same."""
    axis = next(at for at, size in enumerate(x.shape) if size > 1)
    strides = list(x.strides)
    strides[axis] = 0
    return np.lib.stride_tricks.as_strided(x.copy(), x.shape, strides)


def at(x: Array, memory: Array, begin: int) -> Array:
    """Equal values in the passed bytes."""
    made: Array = memory[begin : begin + x.nbytes].view(x.dtype).reshape(x.shape)
    made[...] = x
    return made


def contiguous_view(x: Array, device: int) -> View:
    """View of a contiguous array, as an operation sees it."""
    strides = tuple(stride // x.itemsize for stride in x.strides)
    return View(x.ctypes.data, x.shape, strides, dtypes.dtype_name(x.dtype), device)


def each() -> list[Operation]:
    """Every operation of the package."""
    return [*OPERATIONS.values(), *COMPOSITE_OPERATIONS.values()]


def nbytes_of(shape: tuple[int, ...], dtype: str) -> int:
    return math.prod(shape) * dtypes.TABLE[dtype].nbytes
