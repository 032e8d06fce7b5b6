"""Arguments of a kernel from words of a command line: arrays, scalars, structs and tensor maps."""

from __future__ import annotations

from collections.abc import Sequence

import ml_dtypes
import numpy as np

from .errors import SimError
from .module import Module
from .tensormap import TensorMapError, encode_tiled

HELP = """arguments of the kernel, in order:
  zeros:DTYPE:SHAPE   randn:DTYPE:SHAPE   arange:DTYPE:SHAPE     an array (f4, i4, bf16, ...; SHAPE as 64x128)
  file.npy                an array from a file
  int:N   float:X         a scalar
  struct:TYPE=VALUE,...   a struct by value, each member aligned to its size (u8=@N: the address of array N)
  data:KIND:DTYPE:SHAPE   an array that only tensor maps refer to (not passed itself)
  map:INDEX:BOX:SWIZZLE   a tensor map over array number INDEX, as map:0:64x64:128B (the box innermost first)
"""
"""What each word means."""

_DTYPES = {"bf16": ml_dtypes.bfloat16, "e4m3": ml_dtypes.float8_e4m3fn, "e5m2": ml_dtypes.float8_e5m2}


def make_array(kind: str, dtype: str, shape: str, rng: np.random.Generator) -> np.ndarray:
    """Make an array from its command-line description."""
    dims = tuple(int(v) for v in shape.split("x"))
    element = np.dtype(_DTYPES.get(dtype, dtype))
    if kind == "zeros":
        return np.zeros(dims, element)
    if kind == "arange":
        return np.arange(np.prod(dims)).reshape(dims).astype(element)
    if kind == "randn":
        return rng.standard_normal(dims).astype(element)
    raise SimError(f"unknown array kind {kind!r}")


_MAP_TYPES = ("bfloat16", "float16", "float32", "float64", "int32", "int64")


def build_arguments(module: Module, texts: Sequence[str], seed: int) -> tuple[list, list[np.ndarray]]:
    """Turn command-line arguments into kernel arguments; also return all arrays in order."""
    rng = np.random.default_rng(seed)
    arrays: list[np.ndarray] = []
    args: list = []
    for text in texts:
        try:
            _add(module, text, args, arrays, rng)
        except (ValueError, IndexError, KeyError, TypeError, OSError, TensorMapError) as error:
            raise SimError(f"argument {text!r}: {error} (see --help)") from error
    return args, arrays


def _add(module: Module, text: str, args: list, arrays: list[np.ndarray], rng: np.random.Generator) -> None:
    """Append what one word denotes."""
    kind, *rest = text.split(":")
    if kind == "int":
        args.append(int(rest[0], 0))
    elif kind == "float":
        args.append(float(rest[0]))
    elif kind == "struct":
        args.append(struct_bytes(module, rest[0], arrays))
    elif kind == "map":
        array = arrays[int(rest[0])]
        box = [int(v) for v in rest[1].split("x")]
        name = array.dtype.name if array.dtype.name in _MAP_TYPES else f"uint{8 * array.itemsize}"
        strides = [array.strides[-1 - i] for i in range(1, array.ndim)]
        dims = list(reversed(array.shape))
        args.append(encode_tiled(name, module.memory.map(array), dims, strides, box, swizzle=rest[2]))
    elif kind == "data":
        arrays.append(make_array(*rest, rng))
    else:
        arrays.append(np.load(text) if text.endswith(".npy") else make_array(kind, *rest, rng))
        args.append(arrays[-1])


def struct_bytes(module: Module, text: str, arrays: Sequence[np.ndarray]) -> bytes:
    """Return a struct's bytes: members as C lays them out, its size a multiple of the largest."""
    data, largest = b"", 1
    for member in text.split(","):
        code, value = member.split("=")
        dtype = np.dtype(_DTYPES.get(code, code))
        if value.startswith("@"):
            number = module.memory.map(arrays[int(value[1:])])
        else:
            number = int(value, 0) if dtype.kind in "iu" else float(value)
        data += bytes(-len(data) % dtype.itemsize) + np.array([number]).astype(dtype).tobytes()
        largest = max(largest, dtype.itemsize)
    return data + bytes(-len(data) % largest)
