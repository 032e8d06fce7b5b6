"""Arrays of any library: borrowed views, results in the caller's library. The only file that knows frameworks.

A *family* is a library and a place: NumPy, CuPy, PyTorch on a GPU, PyTorch on the CPU, JAX, anything with DLPack.
Three families are native, that is, can be viewed and allocated directly: NumPy, CuPy and PyTorch on a GPU. The others
lend their arrays to a native one (`adopt`, no copy) and take results back from it (`release`).
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple, Protocol

import ml_dtypes
import numpy as np

from mla_cupy.errors import ArgumentError, DeviceError, DTypeError, explain

HOST = -1


class View(NamedTuple):
    """An array seen from outside. `strides` are in elements; `device` is a CUDA ordinal, or HOST."""

    ptr: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str
    device: int


class Native(Protocol):
    """A library whose arrays can be viewed and allocated directly."""

    def view(self, x: Any) -> View:
        """The array from outside."""

    def peek(self, x: Any) -> tuple[int, object]:
        """The address, and all else that `view` would tell, in whatever form is cheapest to compare."""

    def addresses_if_same(self, arrays: Sequence[Any], kind: Any, wanted: Sequence[object]) -> list[int] | None:
        """The addresses (0 for None), if all are of type `kind` and peek as `wanted` (None for None); else None."""

    def empty(self, shape: tuple[int, ...], dtype: str, device: int, stream: int) -> Any:
        """Memory that is used on `stream`."""

    def current_stream(self, device: int) -> int:
        """The raw handle of the caller's current stream."""

    def to_numpy(self, x: Any, stream: int) -> np.ndarray[Any, Any]:
        """A copy on the host, after what `stream` holds."""


class Family(Protocol):
    """A library and a place."""

    @property
    def name(self) -> str:
        """Of the library."""

    @property
    def on_gpu(self) -> bool:
        """Whether its arrays are in a GPU's memory."""

    @property
    def mutable(self) -> bool:
        """Whether results can be written to its arrays."""

    @property
    def takes_stream(self) -> bool:
        """Whether a call may name a stream; else its arrays are ordered by CuPy's current one, through DLPack."""

    @property
    def native(self) -> Native:
        """What its arrays become when they are lent."""

    def adopt(self, x: Any) -> Any:
        """The same memory as an array of `native`."""

    def release(self, x: Any) -> Any:
        """A result of `native` as an array of this family."""


class _NativeFamily:
    """A family that is native itself: nothing to lend."""

    mutable = takes_stream = True

    def peek(self, x: Any) -> tuple[int, object]:
        raise AssertionError("each native family has its own")

    def addresses_if_same(self, arrays: Sequence[Any], kind: Any, wanted: Sequence[object]) -> list[int] | None:
        addresses = []
        peek = self.peek
        for x, signature in zip(arrays, wanted):  # noqa: B905 (strict costs time, and both have six)
            if x is None:
                if signature is not None:
                    return None
                addresses.append(0)
                continue
            if type(x) is not kind:
                return None
            address, found = peek(x)
            if found != signature:
                return None
            addresses.append(address)
        return addresses

    def adopt(self, x: Any) -> Any:
        return x

    def release(self, x: Any) -> Any:
        return x


_NUMPY_NAMES: dict[Any, str] = {
    np.dtype(kind): np.dtype(kind).name
    for kind in (np.float16, np.float32, np.float64, np.int32, np.int64, np.uint8, ml_dtypes.bfloat16)
}
_NUMPY_DTYPES = {name: dtype for dtype, name in _NUMPY_NAMES.items()}


def _dtype_name(dtype: Any) -> str:
    name = _NUMPY_NAMES.get(dtype)
    return name if name is not None else str(dtype)


class NumpyFamily(_NativeFamily):
    """NumPy arrays, bfloat16 as `ml_dtypes.bfloat16`."""

    name, on_gpu = "numpy", False

    @property
    def native(self) -> Native:
        return self

    def view(self, x: Any) -> View:
        size = x.dtype.itemsize
        return View(x.ctypes.data, x.shape, tuple(s // size for s in x.strides), _dtype_name(x.dtype), HOST)

    def peek(self, x: Any) -> tuple[int, object]:
        return x.ctypes.data, (x.shape, x.strides, x.dtype)

    def empty(self, shape: tuple[int, ...], dtype: str, device: int, stream: int) -> Any:
        return np.empty(shape, _NUMPY_DTYPES[dtype])

    def current_stream(self, device: int) -> int:
        return 0

    def to_numpy(self, x: Any, stream: int) -> np.ndarray[Any, Any]:
        return np.asarray(x)


class CupyFamily(_NativeFamily):
    """CuPy arrays. Temporaries come from CuPy's pool, which keeps an arena for each stream."""

    name, on_gpu = "cupy", True

    def __init__(self) -> None:
        import cupy

        self._cupy = cupy
        self._current = cupy.cuda.get_current_stream

    @property
    def native(self) -> Native:
        return self

    def view(self, x: Any) -> View:
        dtype = x.dtype
        size = dtype.itemsize
        strides = tuple([s // size for s in x.strides])
        return View(x.data.ptr, x.shape, strides, _dtype_name(dtype), x.data.device_id)

    def peek(self, x: Any) -> tuple[int, object]:
        data = x.data
        return data.ptr, (x.shape, x.strides, x.dtype, data.device_id)

    def addresses_if_same(self, arrays: Sequence[Any], kind: Any, wanted: Sequence[object]) -> list[int] | None:
        # `peek` inlined: this is most of what a planned call does in Python.
        addresses = []
        for x, signature in zip(arrays, wanted):  # noqa: B905
            if type(x) is kind:
                data = x.data
                if (x.shape, x.strides, x.dtype, data.device_id) != signature:
                    return None
                addresses.append(data.ptr)
            elif x is None and signature is None:
                addresses.append(0)
            else:
                return None
        return addresses

    def empty(self, shape: tuple[int, ...], dtype: str, device: int, stream: int) -> Any:
        with self._device(device), self._stream(stream):
            return self._cupy.empty(shape, _NUMPY_DTYPES[dtype])

    def current_stream(self, device: int) -> int:
        return int(self._current(device).ptr)

    def to_numpy(self, x: Any, stream: int) -> np.ndarray[Any, Any]:
        with self._device(x.device.id), self._stream(stream):
            copy: np.ndarray[Any, Any] = self._cupy.asnumpy(x)
            return copy

    def current_device(self) -> int:
        return int(self._cupy.cuda.runtime.getDevice())

    def own_memory(self, nbytes: int, device: int) -> Any:
        """Memory outside every pool, `.ptr` its address: nothing can hand it out again while work is in flight."""
        with self._device(device):
            return self._cupy.cuda.Memory(nbytes)

    def from_numpy(self, x: np.ndarray[Any, Any], device: int, stream: int) -> Any:
        """A copy on the GPU, made on `stream`."""
        with self._device(device), self._stream(stream):
            return self._cupy.asarray(x)

    def _device(self, device: int) -> AbstractContextManager[object]:
        if self._cupy.cuda.runtime.getDevice() == device:
            return nullcontext()
        guard: AbstractContextManager[object] = self._cupy.cuda.Device(device)
        return guard

    def _stream(self, stream: int) -> AbstractContextManager[object]:
        if self._current().ptr == stream:
            return nullcontext()
        external: AbstractContextManager[object] = self._cupy.cuda.Stream.from_external(_RawStream(stream))
        return external


class TorchFamily(_NativeFamily):
    """PyTorch tensors on a GPU."""

    name, on_gpu = "torch", True

    def __init__(self) -> None:
        torch = self._torch = sys.modules["torch"]
        kinds = ("bfloat16", "float16", "float32", "float64", "int32", "int64", "uint8")
        self._dtypes = {name: getattr(torch, name) for name in kinds}
        self._names = {dtype: name for name, dtype in self._dtypes.items()}
        # The handle alone is much cheaper than a Stream object; the function is private, so it may be missing.
        self._raw_stream = getattr(torch._C, "_cuda_getCurrentRawStream", None)

    @property
    def native(self) -> Native:
        return self

    def view(self, x: Any) -> View:
        _refuse_gradients(self._torch, x)
        dtype = x.dtype
        name = self._names.get(dtype) or str(dtype)
        return View(x.data_ptr(), tuple(x.shape), x.stride(), name, x.get_device())

    def peek(self, x: Any) -> tuple[int, object]:
        needs_grad = x.requires_grad and self._torch.is_grad_enabled()
        return x.data_ptr(), (x.shape, x.stride(), x.dtype, x.get_device(), needs_grad)

    def empty(self, shape: tuple[int, ...], dtype: str, device: int, stream: int) -> Any:
        torch = self._torch
        if stream == self.current_stream(device):
            return torch.empty(shape, dtype=self._dtypes[dtype], device=device)
        with torch.cuda.stream(torch.cuda.ExternalStream(stream, device=device)):
            return torch.empty(shape, dtype=self._dtypes[dtype], device=device)

    def current_stream(self, device: int) -> int:
        if self._raw_stream is not None:
            return int(self._raw_stream(device))
        return int(self._torch.cuda.current_stream(device).cuda_stream)

    def to_numpy(self, x: Any, stream: int) -> np.ndarray[Any, Any]:
        torch = self._torch
        with torch.cuda.stream(torch.cuda.ExternalStream(stream, device=x.device)):
            return _torch_to_numpy(torch, x.cpu())


class TorchCpuFamily:
    """PyTorch tensors on the CPU: the same memory as NumPy arrays."""

    name, on_gpu, mutable, takes_stream = "torch", False, True, True

    @property
    def native(self) -> Native:
        return NUMPY

    def adopt(self, x: Any) -> Any:
        torch = sys.modules["torch"]
        _refuse_gradients(torch, x)
        return _torch_to_numpy(torch, x.detach())

    def release(self, x: Any) -> Any:
        torch: Any = sys.modules["torch"]
        if x.dtype == ml_dtypes.bfloat16:
            return torch.from_numpy(x.view(np.int16)).view(torch.bfloat16)
        return torch.from_numpy(x)


class JaxFamily:
    """JAX arrays, through DLPack, which also orders the streams. They cannot be written to."""

    name, mutable, takes_stream = "jax", False, False

    def __init__(self, on_gpu: bool) -> None:
        self.on_gpu = on_gpu

    @property
    def native(self) -> Native:
        return _cupy_family() if self.on_gpu else NUMPY

    def adopt(self, x: Any) -> Any:
        return _cupy_from_dlpack(x) if self.on_gpu else np.asarray(x)

    def release(self, x: Any) -> Any:
        import jax

        return jax.dlpack.from_dlpack(x) if self.on_gpu else jax.device_put(x, jax.devices("cpu")[0])


class DlpackFamily:
    """GPU arrays of any other library with DLPack: results are CuPy arrays."""

    name, on_gpu, mutable, takes_stream = "dlpack", True, True, False

    @property
    def native(self) -> Native:
        return _cupy_family()

    def adopt(self, x: Any) -> Any:
        return _cupy_from_dlpack(x)

    def release(self, x: Any) -> Any:
        return x


class _RawStream:
    """A stream handle in the form of the CUDA stream protocol."""

    def __init__(self, handle: int) -> None:
        self._handle = handle

    def __cuda_stream__(self) -> tuple[int, int]:
        return (0, self._handle)


def _refuse_gradients(torch: Any, x: Any) -> None:
    if x.requires_grad and torch.is_grad_enabled():
        raise DTypeError(
            explain(
                "a tensor",
                "one that requires grad, in grad mode",
                "no gradient to be recorded",
                "call it under torch.no_grad(), or detach its inputs; for gradients of sparse attention use a "
                "torch.autograd.Function, as examples/torch_sparse_attention.py does",
            )
        )


def _torch_to_numpy(torch: Any, x: Any) -> np.ndarray[Any, Any]:
    if x.dtype == torch.bfloat16:
        return np.asarray(x.view(torch.int16).numpy()).view(ml_dtypes.bfloat16)
    return np.asarray(x.numpy())


def _cupy_from_dlpack(x: Any) -> Any:
    import cupy

    return cupy.from_dlpack(x)


NUMPY = NumpyFamily()
_cupy_family = functools.cache(CupyFamily)
_torch_family = functools.cache(TorchFamily)
_TORCH_CPU: Family = TorchCpuFamily()
_JAX: dict[bool, Family] = {on_gpu: JaxFamily(on_gpu) for on_gpu in (False, True)}
_DLPACK: Family = DlpackFamily()
_KINDS: dict[type, str] = {}
_CUDA_DEVICE_TYPE = 2  # of DLPack


def _kind(kind: type) -> str:
    """Which library a type belongs to, by the modules of its bases: no library is imported to find out."""
    roots = [base.__module__.partition(".")[0] for base in kind.__mro__]
    for library, root in (("numpy", "numpy"), ("cupy", "cupy"), ("torch", "torch"), ("jax", "jaxlib"), ("jax", "jax")):
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
        return _cupy_family()
    if kind == "torch":
        return _torch_family() if x.is_cuda else _TORCH_CPU
    if kind == "numpy" and isinstance(x, np.ndarray):
        return NUMPY
    if kind == "jax" and hasattr(x, "__dlpack_device__"):
        return _JAX[x.__dlpack_device__()[0] == _CUDA_DEVICE_TYPE]
    if kind == "dlpack" and x.__dlpack_device__()[0] == _CUDA_DEVICE_TYPE:
        return _DLPACK
    raise DTypeError(
        explain(argument, f"a {type(x).__name__}", "an array of NumPy, CuPy, PyTorch, JAX or any library with DLPack")
    )


def common_family(arrays: Mapping[str, Any], optional: Collection[str] = ("out", "lse")) -> Family:
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


def stream_handle(stream: Any) -> int:
    """The raw handle of a stream: an int, or an object of CuPy, PyTorch or the CUDA stream protocol."""
    if isinstance(stream, int) and not isinstance(stream, bool):
        return stream
    if hasattr(stream, "__cuda_stream__"):
        return int(stream.__cuda_stream__()[1])
    for attribute in ("ptr", "cuda_stream"):
        if hasattr(stream, attribute):
            return int(getattr(stream, attribute))
    raise ArgumentError(explain("stream", repr(stream), "a raw handle or a stream of CuPy, PyTorch or cuda.core"))


def check_stream(family: Family, stream: Any) -> None:
    """Raise ArgumentError if a stream is named that the arrays would not be ordered with."""
    if stream is not None and not family.takes_stream:
        remedy = "make it CuPy's current stream instead: DLPack orders the arrays with that one"
        raise ArgumentError(explain("stream", repr(stream), f"None for {family.name} arrays", remedy))


def cupy_family() -> CupyFamily:
    """CuPy's family, for memory of our own."""
    return _cupy_family()
