"""Arguments of a kernel from words of a command line: arrays, scalars, structs and tensor maps."""

from __future__ import annotations

import math
from collections.abc import Sequence

import ml_dtypes
import numpy as np

from ..errors import SimError
from ..memory.tensormap import SWIZZLES, TensorMap, TensorMapError, encode_tiled
from ..module import Module

HELP = """arguments of the kernel, in order:
  zeros:DTYPE:SHAPE       an array (f4, i4, bf16, ...; SHAPE as 64x128)
  randn:DTYPE:SHAPE       the same of normally distributed numbers
  arange:DTYPE:SHAPE      the same of 0, 1, 2, ...
  file.npy                an array from a file
  int:N   float:X         a scalar
  struct:TYPE=VALUE,...   a struct by value, each member aligned to its size
                          (u8=@N: the address of array N)
  data:KIND:DTYPE:SHAPE   an array that only tensor maps refer to (not passed)
  map:INDEX:BOX:SWIZZLE   a tensor map over array number INDEX, as
                          map:0:64x64:128B (the box innermost first)
"""
"""Meaning of each word."""

_DTYPES = {"bf16": ml_dtypes.bfloat16, "e4m3": ml_dtypes.float8_e4m3fn, "e5m2": ml_dtypes.float8_e5m2}
_MAKERS = {
    "zeros": lambda sizes, dtype, rng: np.zeros(sizes, dtype),
    "arange": lambda sizes, dtype, rng: np.arange(math.prod(sizes)).reshape(sizes).astype(dtype),
    "randn": lambda sizes, dtype, rng: rng.standard_normal(sizes).astype(dtype),
}
_FORMS = {
    **{kind: f"{kind}:DTYPE:SHAPE" for kind in _MAKERS},
    "int": "int:N",
    "float": "float:X",
    "struct": "struct:TYPE=VALUE,...",
    "data": "data:KIND:DTYPE:SHAPE",
    "map": "map:INDEX:BOX:SWIZZLE",
}
"""Spelling of the words of each kind."""


def make_array(kind: str, dtype: str, shape: str, rng: np.random.Generator) -> np.ndarray:
    """Make an array from its command-line description."""
    if kind not in _MAKERS:
        raise SimError(f"unknown kind of array {kind!r}, expected one of {', '.join(_MAKERS)}")
    return _MAKERS[kind](_sizes(shape), _dtype(dtype), rng)


def _sizes(text: str) -> tuple[int, ...]:
    parts = text.split("x")
    if not all(part.isascii() and part.isdigit() for part in parts):
        raise SimError(f"got the sizes {text!r}, expected whole numbers as 64x128")
    return tuple(map(int, parts))


def _dtype(name: str) -> np.dtype:
    """Return the dtype of a number."""
    try:
        found = np.dtype(_DTYPES.get(name, name))
    except TypeError:
        found = None
    if found is None or not (found.kind in "biuf" or name in _DTYPES):
        raise SimError(f"got the dtype {name!r}, expected a number's: i4, u1, f2, f4, ..., {', '.join(_DTYPES)}")
    return found


def _number(text: str, whole: bool) -> int | float:
    try:
        return int(text, 0) if whole else float(text)
    except ValueError:
        raise SimError(f"got {text!r}, expected {'a whole number' if whole else 'a number'}") from None


def _numbered(text: str, arrays: Sequence[np.ndarray]) -> np.ndarray:
    """Return the array of a number, counted from 0 in the order of the words."""
    if not (text.isascii() and text.isdigit()) or int(text) >= len(arrays):
        raise SimError(f"got array number {text!r}, expected one of the {len(arrays)} before this word, from 0 on")
    return arrays[int(text)]


_MAP_TYPES = ("bfloat16", "float16", "float32", "float64", "int32", "int64")


def build_arguments(module: Module, texts: Sequence[str], seed: int) -> tuple[list, list[np.ndarray]]:
    """Turn command-line arguments into kernel arguments; also return all arrays in order."""
    rng = np.random.default_rng(seed)
    arrays: list[np.ndarray] = []
    args: list = []
    for text in texts:
        try:
            _add(module, text, args, arrays, rng)
        except (ValueError, TypeError, OverflowError, OSError, MemoryError, TensorMapError, SimError) as error:
            raise SimError(f"argument {text!r}: {error} (see --help)") from error
    return args, arrays


def _add(module: Module, text: str, args: list, arrays: list[np.ndarray], rng: np.random.Generator) -> None:
    """Append what one word denotes."""
    if text.endswith(".npy"):
        arrays.append(_loaded(text))
        args.append(arrays[-1])
        return
    kind, *rest = text.split(":")
    if kind not in _FORMS:
        raise SimError(f"unknown kind {kind!r}, expected one of {', '.join(_FORMS)}, or a .npy file")
    if len(rest) != _FORMS[kind].count(":"):
        raise SimError(f"expected {_FORMS[kind]}")
    if kind == "int":
        args.append(_number(rest[0], whole=True))
    elif kind == "float":
        args.append(_number(rest[0], whole=False))
    elif kind == "struct":
        args.append(struct_bytes(module, rest[0], arrays))
    elif kind == "map":
        index, box, swizzle = rest
        args.append(_map(module, index, box, swizzle, arrays))
    elif kind == "data":
        arrays.append(make_array(rest[0], rest[1], rest[2], rng))
    else:
        arrays.append(make_array(kind, rest[0], rest[1], rng))
        args.append(arrays[-1])


def _loaded(path: str) -> np.ndarray:
    try:
        array = np.load(path)
    except OSError as error:
        raise SimError(error.strerror or str(error)) from error
    except ValueError as error:  # NumPy speaks of pickles whatever the file holds
        raise SimError("this is no .npy file of numbers") from error
    return array


def _map(module: Module, index: str, box: str, swizzle: str, arrays: Sequence[np.ndarray]) -> TensorMap:
    """Return a tensor map over a numbered array, its box innermost first."""
    array = _numbered(index, arrays)
    if swizzle not in SWIZZLES:
        raise SimError(f"got the swizzle {swizzle!r}, expected one of {', '.join(SWIZZLES)}")
    if not array.size:
        raise SimError(f"array number {index} has no element")
    name = array.dtype.name if array.dtype.name in _MAP_TYPES else f"uint{8 * array.itemsize}"
    strides = [array.strides[-1 - i] for i in range(1, array.ndim)]
    dims = list(reversed(array.shape))
    return encode_tiled(name, module.memory.map(array), dims, strides, list(_sizes(box)), swizzle=swizzle)


def struct_bytes(module: Module, text: str, arrays: Sequence[np.ndarray]) -> bytes:
    """Return a struct's bytes: members as C lays them out, its size a multiple of the largest."""
    data, largest = b"", 1
    for member in text.split(","):
        code, equals, value = member.partition("=")
        if not equals:
            raise SimError(f"got the member {member!r}, expected TYPE=VALUE")
        dtype = _dtype(code)
        if value.startswith("@"):
            number: float = module.memory.map(_numbered(value[1:], arrays))
        else:
            number = _number(value, whole=dtype.kind in "biu")
        data += bytes(-len(data) % dtype.itemsize) + np.array([number]).astype(dtype).tobytes()
        largest = max(largest, dtype.itemsize)
    return data + bytes(-len(data) % largest)
