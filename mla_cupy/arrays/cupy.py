"""CuPy arrays, and the memory of our own that comes from CuPy."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np

from mla_cupy.arrays.numpy import DTYPES, name_of
from mla_cupy.arrays.view import ARRAY_ALIGNMENT, Native, NativeFamily, Signature, View, view_of
from mla_cupy.errors import UnsupportedDeviceError, explain

#: CuPy has no 8-bit floats: results in them are bytes.
_MADE = {**DTYPES, **dict.fromkeys(("float8_e4m3fn", "float8_e8m0fnu"), DTYPES["uint8"])}


class CupyFamily(NativeFamily):
    """CuPy arrays. Temporaries come from CuPy's pool, which keeps an arena for each stream."""

    name, on_gpu = "cupy", True

    def __init__(self) -> None:
        import cupy

        self._cupy = cupy
        self.kind = cupy.ndarray
        self._current = cupy.cuda.get_current_stream
        self._current_device = cupy.cuda.runtime.getDevice
        self._alloc = cupy.cuda.alloc

    @property
    def native(self) -> Native:
        return self

    def view(self, x: Any, argument: str = "an array") -> View:
        dtype, data = x.dtype, x.data
        return view_of(argument, data.ptr, x.shape, x.strides, dtype.itemsize, name_of(dtype), data.device_id)

    def signature(self, arrays: Sequence[Any]) -> tuple[list[int], Signature] | None:
        # The hot path of a repeated call: it calls no function per array. Most arrays are None.
        kind = self.kind
        addresses = [0] * (len(arrays) + 1)
        key: list[Any] = []
        for index, x in enumerate(arrays, 1):
            if x is None:
                continue
            if type(x) is not kind:
                return None
            data = x.data
            addresses[index] = address = data.ptr
            # Strides that follow from the shape need not be fetched, which takes longer than to ask.
            strides = x._c_contiguous or x.strides
            key.append((index, x.shape, strides, x.dtype, data.device_id, address % ARRAY_ALIGNMENT))
        return addresses, tuple(key)

    def address(self, x: Any) -> int:
        return int(x.data.ptr)

    def empty(self, shape: tuple[int, ...], dtype: str, device: int, stream: int) -> Any:
        if self._current_device() == device and self._current().ptr == stream:
            return self._cupy.empty(shape, _MADE[dtype])
        with self._device(device), self._stream(stream):
            return self._cupy.empty(shape, _MADE[dtype])

    def transposed(self, x: Any, axes: tuple[int, ...]) -> Any:
        return x.transpose(axes)

    def contiguous(self, x: Any, stream: int) -> Any:
        with self._device(x.device.id), self._stream(stream):
            return self._cupy.ascontiguousarray(x)

    def scratch(self, nbytes: int, device: int, stream: int) -> tuple[object, int]:
        if self._current_device() == device and self._current().ptr == stream:
            memory = self._alloc(nbytes)
        else:
            with self._device(device), self._stream(stream):
                memory = self._alloc(nbytes)
        return memory, memory.ptr

    def current_stream(self, device: int) -> int:
        return int(self._current(device).ptr)

    def to_numpy(self, x: Any, stream: int) -> np.ndarray[Any, Any]:
        with self._device(x.device.id), self._stream(stream):
            copy: np.ndarray[Any, Any] = self._cupy.asnumpy(x)
            return copy

    def current_device(self) -> int:
        """The CUDA ordinal that is current in this thread."""
        return int(self._current_device())

    def own_memory(self, nbytes: int, device: int) -> Any:
        """Memory outside every pool, `.ptr` its address: nothing can hand it out again while work is in flight."""
        with self._device(device):
            return self._cupy.cuda.Memory(nbytes)

    def from_numpy(self, x: np.ndarray[Any, Any], device: int, stream: int) -> Any:
        """A copy on the GPU, made on `stream`."""
        with self._device(device), self._stream(stream):
            return self._cupy.asarray(x)

    def open_peers(self, device: int, others: Iterable[int]) -> None:
        """Let kernels on `device` reach the memory of other devices.

        Raises
        ------
        UnsupportedDeviceError
            If they cannot.
        """
        runtime = self._cupy.cuda.runtime
        with self._device(device):
            for other in sorted(set(others) - {device}):
                if not runtime.deviceCanAccessPeer(device, other):
                    expected = "GPUs of one host with NVLink or peer-to-peer PCIe"
                    raise UnsupportedDeviceError(explain("devices", f"{device} and {other}", expected))
                try:
                    runtime.deviceEnablePeerAccess(other)
                except runtime.CUDARuntimeError as error:
                    if "AlreadyEnabled" not in str(error):
                        raise

    def share(self, memory: Any) -> bytes:
        """A handle with which another process of this host can `open_shared` memory from `own_memory`."""
        return bytes(self._cupy.cuda.runtime.ipcGetMemHandle(memory.ptr))

    def open_shared(self, handle: bytes, device: int) -> int:
        """The address on `device` of another process's memory; it is mapped until this process ends."""
        with self._device(device):
            return int(self._cupy.cuda.runtime.ipcOpenMemHandle(handle))

    def host_memory(self, nbytes: int) -> tuple[np.ndarray[Any, Any], int]:
        """Zeroed bytes of the host that kernels reach too, and their address."""
        memory = self._cupy.cuda.alloc_pinned_memory(nbytes)
        made = np.frombuffer(memory, np.uint8, nbytes)
        made[:] = 0
        return made, memory.ptr

    def write(self, address: int, data: np.ndarray[Any, Any], device: int) -> None:
        """Copy contiguous numbers to an address on the GPU, and wait for it."""
        with self._device(device):
            self._cupy.cuda.runtime.memcpy(address, data.ctypes.data, data.nbytes, 1)  # host to device

    def synchronize(self, device: int) -> None:
        """Wait for all work on a device."""
        with self._device(device):
            self._cupy.cuda.runtime.deviceSynchronize()

    def assign(self, out: View, source: View, minus: int, stream: int) -> None:
        """Write an array, minus a whole number, to one of the same shape."""
        cupy = self._cupy
        with self._device(out.device), self._stream(stream):
            if minus:
                cupy.subtract(self._seen(source), DTYPES[source.dtype].type(minus), out=self._seen(out))
            else:
                cupy.copyto(self._seen(out), self._seen(source))

    def _seen(self, view: View) -> Any:
        """The array under a view."""
        cuda, dtype = self._cupy.cuda, DTYPES[view.dtype]
        memory = cuda.UnownedMemory(
            view.ptr, 0, None, view.device
        )  # CuPy looks at the size of memory of its pools only
        strides = tuple(dtype.itemsize * stride for stride in view.strides)
        return self._cupy.ndarray(view.shape, dtype, cuda.MemoryPointer(memory, 0), strides)

    def nccl(self) -> Any:
        """CuPy's binding of NCCL, or None."""
        try:
            from cupy.cuda import nccl
        except ImportError:
            return None
        return nccl if getattr(nccl, "available", False) else None

    def on_device(self, device: int) -> AbstractContextManager[object]:
        """Within a with statement, `device` is the current one."""
        return self._device(device)

    def view_as(self, x: Any, shape: tuple[int, ...], dtype: str, strides_bytes: tuple[int, ...]) -> Any:
        """The memory of an array, from its first element on, as another array."""
        return self._cupy.ndarray(shape, DTYPES[dtype], x.data, strides_bytes)

    def from_dlpack(self, x: Any) -> Any:
        """CuPy array over the memory of an array of another library, ordered with CuPy's current stream.

        Raises
        ------
        UnsupportedDeviceError
            If CuPy cannot use the GPU.
        """
        try:
            return self._cupy.from_dlpack(x)
        except self._cupy.cuda.runtime.CUDARuntimeError as error:
            number = x.__dlpack_device__()[1]
            remedy = "`mla-cupy info` says what is missing"
            raise UnsupportedDeviceError(f"device {number}: CuPy cannot use it: {error}; {remedy}") from error

    def event(self, device: int) -> Any:
        """The end of the present work on `device`'s current stream; None while it is captured, when nothing runs."""
        with self._device(device):
            stream = self._current()
            if stream.is_capturing():
                return None
            event = self._cupy.cuda.Event(disable_timing=True)
            event.record(stream)
        return event

    def _device(self, device: int) -> AbstractContextManager[object]:
        if self._current_device() == device:
            return nullcontext()
        guard: AbstractContextManager[object] = self._cupy.cuda.Device(device)
        return guard

    def _stream(self, stream: int) -> AbstractContextManager[object]:
        if self._current().ptr == stream:
            return nullcontext()
        external: AbstractContextManager[object] = self._cupy.cuda.Stream.from_external(_RawStream(stream))
        return external


class _RawStream:
    """A stream handle in the form of the CUDA stream protocol."""

    def __init__(self, handle: int) -> None:
        self._handle = handle

    def __cuda_stream__(self) -> tuple[int, int]:
        return (0, self._handle)


cupy_family = functools.cache(CupyFamily)
