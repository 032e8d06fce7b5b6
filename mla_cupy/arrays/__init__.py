"""Arrays of any library: borrowed views, results in the caller's library. The only package that handles frameworks.

A *family* is a library and a place: NumPy, CuPy, PyTorch on a GPU, PyTorch on the CPU, JAX, anything with DLPack. Three
families are native, that is, can be viewed and allocated directly: NumPy, CuPy and PyTorch on a GPU. The others lend
their arrays to a native one (`adopt`, no copy) and get results back from it (`release`).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import numpy as np

from mla_cupy.arrays.cupy import CupyFamily, cupy_family
from mla_cupy.arrays.dlpack import CUDA_DEVICE_TYPE, DLPACK, JAX
from mla_cupy.arrays.dynamo import breaks_graphs, leave_alone, runs_as_it_is
from mla_cupy.arrays.numpy import NUMPY, NumpyFamily
from mla_cupy.arrays.torch import TORCH_CPU, check_tensor, torch_family
from mla_cupy.arrays.view import ARRAY_ALIGNMENT, HOST, Counter, Family, Matcher, Native, Signature, View
from mla_cupy.errors import ArgumentError, DeviceError, DTypeError, explain, kind_of

__all__ = [
    "ARRAY_ALIGNMENT",
    "HOST",
    "NUMPY",
    "Counter",
    "CupyFamily",
    "Family",
    "Matcher",
    "Native",
    "NumpyFamily",
    "Signature",
    "View",
    "breaks_graphs",
    "check_stream",
    "check_writable",
    "common_family",
    "cupy_family",
    "family_of",
    "runs_as_it_is",
    "stream_handle",
]

_KNOWN = "an array of NumPy, CuPy, PyTorch, JAX or any library with DLPack"
_LIBRARIES = {"numpy": "numpy", "cupy": "cupy", "torch": "torch", "jaxlib": "jax", "jax": "jax"}
_KINDS: dict[type, str] = {}


def _kind(kind: type) -> str:
    """Library that a type belongs to, by the modules of its bases: no library is imported to find out.

    The module of a type that C code makes, such as an array type of ctypes, may be None.
    """
    roots = [str(base.__module__).partition(".")[0] for base in kind.__mro__]
    for root, library in _LIBRARIES.items():
        if root in roots:
            return library
    return "dlpack" if hasattr(kind, "__dlpack__") and hasattr(kind, "__dlpack_device__") else ""


def family_of(x: Any, argument: str) -> Family:
    """The family of one array.

    Raises
    ------
    DTypeError
        If it is not an array of any known kind.
    """
    kind = _KINDS.get(type(x))
    if kind is None:
        kind = _KINDS[type(x)] = _kind(type(x))
    if kind == "cupy":
        return cupy_family()
    if kind == "torch" and hasattr(x, "is_cuda"):
        leave_alone()
        check_tensor(x, argument)
        return torch_family() if x.is_cuda else TORCH_CPU
    if kind == "numpy" and isinstance(x, np.ndarray):
        if isinstance(x, np.ma.MaskedArray):
            remedy = "fill it, and mask by indices, lengths or pages outside the cache"
            raise DTypeError(explain(argument, "a masked array", "an array without a mask", remedy))
        return NUMPY
    if kind == "jax":
        return JAX[_is_on_gpu(x, argument)]
    if kind == "dlpack":
        if _is_on_gpu(x, argument):
            return DLPACK
        remedy = "convert it with numpy.from_dlpack"
        raise DTypeError(explain(argument, f"{kind_of(x)} on the CPU", "one on a GPU, or an array of NumPy", remedy))
    raise DTypeError(explain(argument, kind_of(x), _KNOWN))


def _is_on_gpu(x: Any, argument: str) -> bool:
    try:
        return bool(x.__dlpack_device__()[0] == CUDA_DEVICE_TYPE)
    except Exception as error:
        remedy = "under jit, grad, vmap or shard_map call mla_cupy.jax's function of this name"
        raise DTypeError(explain(argument, f"{kind_of(x)} without memory", _KNOWN, remedy)) from error


def common_family(arrays: Mapping[str, Any], optional: Collection[str] = ()) -> Family:
    """The one family of all arrays. The `optional` ones may be None, which is passed over.

    Raises
    ------
    DTypeError
        If one is no array.
    DeviceError
        If there are several families.
    """
    first = ""
    family: Family | None = None
    for argument, x in arrays.items():
        if x is None and argument in optional:
            continue
        other = family_of(x, argument)
        if family is None:
            first, family = argument, other
        elif other is not family:
            raise DeviceError(
                explain(argument, _where(other), f"{_where(family)}, like {first}", "convert one of them")
            )
    assert family is not None
    return family


def _where(family: Family) -> str:
    return f"an array of {family.name} on the {'GPU' if family.on_gpu else 'CPU'}"


def check_writable(
    family: Family, results: Mapping[str, Any], function: str = "", changed: Collection[str] = ()
) -> None:
    """Check that arrays for results, or None, can be written to.

    Parameters
    ----------
    family : Family
    results : mapping
    function : str
        The function of the bindings that does the same, if they have one.
    changed : collection of str
        The inputs that are changed in place.

    Raises
    ------
    DTypeError
        If their library's arrays never can.
    ArgumentError
        If one of them is read-only.
    """
    for argument, x in results.items():
        if x is None:
            continue
        if not family.mutable:
            expected = "a writable array" if argument in changed else "None"
            remedy = "its arrays are immutable"
            if function:
                remedy += f"; call mla_cupy.{family.name}.{function}, which returns it"
            raise DTypeError(explain(argument, f"an array of {family.name}", expected, remedy))
        if isinstance(x, np.ndarray) and not x.flags.writeable:
            raise ArgumentError(explain(argument, "a read-only array", "a writable one"))


def stream_handle(stream: Any) -> int:
    """The raw handle of a stream: an int, or an object of CuPy, PyTorch or the CUDA stream protocol."""
    handle = stream if isinstance(stream, int) and not isinstance(stream, bool) else _handle_of(stream)
    if handle is None or not 0 <= handle < 1 << 64:
        raise ArgumentError(explain("stream", repr(stream), "a raw handle or a stream of CuPy, PyTorch or cuda.core"))
    return handle


def _handle_of(stream: Any) -> int | None:
    try:
        if hasattr(stream, "__cuda_stream__"):
            return int(stream.__cuda_stream__()[1])
        for attribute in ("ptr", "cuda_stream"):
            if hasattr(stream, attribute):
                return int(getattr(stream, attribute))
    except (TypeError, ValueError):  # of a mock, or of a class in place of its object
        pass
    return None


def check_stream(family: Family, stream: Any) -> None:
    """Raise ArgumentError if a stream is named that the arrays would not be ordered with."""
    if stream is not None and not family.takes_stream:
        remedy = "make it CuPy's current stream: DLPack orders arrays on that stream"
        raise ArgumentError(explain("stream", repr(stream), f"None for {family.name} arrays", remedy))
