"""The driver Protocol on CUDA: CuPy loads and holds kernels, `cuLaunchKernelEx` launches them through ctypes.

A hot launch is one prebuilt configuration, its stream, and one call.
It never changes the current device of the caller: where a kernel's context is not current, as on another device or
in a thread that has not used CUDA yet, it is pushed for the call.
"""

from __future__ import annotations

import ctypes
import functools
import os
import tempfile
import threading
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

from mla_cupy.errors import UnsupportedDeviceError
from mla_cupy.runtime import tensormap
from mla_cupy.runtime.build import Build, BuildRequest
from mla_cupy.runtime.launching import ArgumentBlock, Dim3, LoadedKernel, PreparedLaunch, one_by_one
from mla_cupy.runtime.remedies import INSTALL_CUPY

_REMEDIES = {
    3: "the process was forked after CUDA was used: start workers with the spawn method, or fork before the first call",
    100: "no GPU is visible: check nvidia-smi and CUDA_VISIBLE_DEVICES",
    209: "the kernel was compiled for another GPU: delete it with `mla-cupy clear-cache`",
    701: "the launch asks for more registers or shared memory than the GPU has: please report it",
    900: "call once before the capture, or make a plan",
    906: "call once before the capture, or make a plan",
}
_SINGLE = (1, 1, 1)
_CLUSTER_DIMENSION, _PROGRAMMATIC_STREAM_SERIALIZATION = 4, 6
"""Values of `CUlaunchAttributeID`."""
_PORTABLE_CLUSTER = 8
"""The most blocks of a cluster that need no permission."""
_NO_GUARD: AbstractContextManager[object] = nullcontext()


class _PerThread(threading.local):
    """The cell that receives the current context."""

    def __init__(self) -> None:
        self.context = ctypes.c_void_p()
        self.context_cell = ctypes.byref(self.context)


class _AttributeValue(ctypes.Union):
    _fields_ = (("cluster", ctypes.c_uint * 3), ("flag", ctypes.c_int), ("bytes", ctypes.c_char * 64))


class _Attribute(ctypes.Structure):
    """`CUlaunchAttribute`."""

    _fields_ = (("id", ctypes.c_int), ("padding", ctypes.c_char * 4), ("value", _AttributeValue))


class _Config(ctypes.Structure):
    """`CUlaunchConfig`, with its attributes. ctypes sets a stream and launches in half the time of cuda.bindings."""

    _fields_ = (
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("smem", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_Attribute)),
        ("num_attributes", ctypes.c_uint),
    )

    def __init__(self, grid: Dim3, block: Dim3, cluster: Dim3, smem: int, pdl: bool) -> None:
        attributes = []
        if cluster != _SINGLE:
            attributes.append(_Attribute(_CLUSTER_DIMENSION, value=_AttributeValue(cluster=cluster)))
        if pdl:
            attributes.append(_Attribute(_PROGRAMMATIC_STREAM_SERIALIZATION, value=_AttributeValue(flag=1)))
        count = len(attributes)
        self._array = (_Attribute * max(1, count))(*attributes)  # kept alive with the configuration
        super().__init__(grid, block, smem, None, self._array, count)


class _Launch:
    """A prepared launch: a configuration, a function, and the parameters' addresses, as ctypes passes them."""

    __slots__ = (
        "_alone",
        "_args",
        "_driver",
        "config",
        "context",
        "function",
        "parameters",
        "reference",
        "stream",
        "what",
    )

    def __init__(
        self, target: CudaDriver, kernel: LoadedKernel, grid: Dim3, config: _Config, args: ArgumentBlock
    ) -> None:
        self._driver, self._args, self._alone = target, (kernel, args), (self,)  # the kernel and its block stay alive
        self.config, self.reference = config, ctypes.byref(config)
        self.function, self.parameters = ctypes.c_void_p(kernel.handle), ctypes.c_void_p(args.pointers)
        self.context, self.what = kernel.context, f"launching {kernel.entry}, grid {grid}"
        self.stream = 0  # the configuration's

    def __call__(self, stream: int) -> None:
        self._driver.launch(self._alone, stream)


class CudaDriver:
    """Loads through CuPy, launches through `cuLaunchKernelEx`."""

    def __init__(self) -> None:
        try:
            import cupy
            from cuda.bindings import driver as bindings
        except ImportError as error:
            raise UnsupportedDeviceError(
                f"launching kernels needs CuPy and cuda-bindings ({error}); {INSTALL_CUPY}"
            ) from error
        try:
            # PyDLL keeps the GIL, which is cheaper than giving it back for a call of a few nanoseconds. A launch may
            # take a lock of the driver: it must give it back.
            self._get_context = ctypes.PyDLL("libcuda.so.1").cuCtxGetCurrent
            self._launch = ctypes.CDLL("libcuda.so.1").cuLaunchKernelEx
        except OSError as error:
            raise UnsupportedDeviceError(f"no CUDA driver: {error}; install the driver of the GPU") from error
        self._cupy = cupy
        self._bindings = bindings
        self._thread = _PerThread()
        self._images: list[int] = []

    def wanted(self, request: BuildRequest) -> BuildRequest:
        """All of it."""
        return request

    def load(self, build: Build, device: int) -> LoadedKernel:
        """Load the kernel of `build` on `device`.

        CuPy caches loaded modules by path, so every image gets a unique path that is never reused: a file in memory
        with an open descriptor. That also works where no directory is writable.
        """
        entry, smem = build.entry, build.dynamic_smem
        with self.device_guard(device):
            try:
                raw = self._cupy.RawModule(path=self._path(build.cubin, entry)).get_function(entry)
                function = raw.kernel
                if smem > 0:
                    raw.max_dynamic_shared_size_bytes = smem
                if int(build.facts.get("cluster", 1)) > _PORTABLE_CLUSTER:
                    self._allow_large_clusters(function.ptr)
            except self._cupy.cuda.driver.CUDADriverError as error:
                raise RuntimeError(_message(f"loading {entry} on device {device}", error.status, str(error))) from error
            # The function keeps its module; the raw kernel keeps the function. A bare handle would keep nothing.
            return LoadedKernel(entry, device, function.ptr, self._context(), raw)

    def encode_tiled(self, spec: tensormap.TensorMapSpec) -> bytes:
        """See `tensormap.encode`."""
        self._have_context()
        return tensormap.encode(spec)

    def memset(self, ptr: int, value: int, nbytes: int, stream: int) -> None:
        """Enqueue a fill on `stream`; its device must be current."""
        status = self._bindings.cuMemsetD8Async(ptr, value, nbytes, stream)[0]
        if status:
            raise RuntimeError(_message("cuMemsetD8Async", int(status), status.name))

    def prepare(
        self, kernel: LoadedKernel, grid: Dim3, block: Dim3, cluster: Dim3, smem: int, args: ArgumentBlock, pdl: bool
    ) -> PreparedLaunch:
        """One configuration, one argument block; enqueueing sets the stream and makes one call.

        The caller's current device does not change: if the kernel's context is not current, it is pushed.
        """
        return _Launch(self, kernel, grid, _Config(grid, block, cluster, smem, pdl), args)

    def in_order(self, launches: Sequence[PreparedLaunch]) -> PreparedLaunch:
        """One look at the current context for all, if kernels are all that there is."""
        kernels = [launch for launch in launches if isinstance(launch, _Launch)]
        if len(kernels) < len(launches) or len({launch.context for launch in kernels}) != 1:
            return one_by_one(launches)
        return functools.partial(self.launch, kernels)

    def launch(self, launches: Sequence[_Launch], stream: int) -> None:
        """Launch kernels of one context, which is made current if it is not."""
        self._get_context(self._thread.context_cell)
        if self._thread.context.value != launches[0].context:
            self._launch_elsewhere(launches, stream)
            return
        launch = self._launch
        for each in launches:
            if each.stream != stream:
                each.config.stream = each.stream = stream
            status = launch(each.reference, each.function, each.parameters, None)
            if status:
                raise RuntimeError(_message(each.what, status, self._bindings.CUresult(status).name))

    def _launch_elsewhere(self, launches: Sequence[_Launch], stream: int) -> None:
        status = self._bindings.cuCtxPushCurrent(launches[0].context)[0]
        if status:
            raise RuntimeError(_message(launches[0].what, int(status), status.name))
        try:
            self.launch(launches, stream)
        finally:
            self._bindings.cuCtxPopCurrent()

    def is_capturing(self, stream: int) -> bool:
        """True if `stream` is being captured."""
        status, state = self._bindings.cuStreamIsCapturing(stream)
        return not status and int(state) != 0

    def device_guard(self, device: int) -> AbstractContextManager[object]:
        """CuPy's guard, or nothing where `device` is current."""
        if self._cupy.cuda.runtime.getDevice() == device:
            self._have_context()
            return _NO_GUARD
        guard: AbstractContextManager[object] = self._cupy.cuda.Device(device)
        return guard

    def _allow_large_clusters(self, function: int) -> None:
        attribute = self._bindings.CUfunction_attribute.CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED
        status = self._bindings.cuFuncSetAttribute(function, attribute, 1)[0]
        if status:
            raise RuntimeError(_message("cuFuncSetAttribute", int(status), status.name))

    def _have_context(self) -> None:
        """A new thread has a current device but no context until it calls the runtime, and the driver refuses it."""
        if not self._context():
            runtime = self._cupy.cuda.runtime
            runtime.setDevice(runtime.getDevice())

    def _context(self) -> int:
        self._get_context(self._thread.context_cell)
        return self._thread.context.value or 0

    def _path(self, cubin: bytes, entry: str) -> str:
        try:
            descriptor = os.memfd_create(entry)
        except OSError:  # a kernel or sandbox without it
            descriptor, path = tempfile.mkstemp(prefix=entry, suffix=".cubin")
        else:
            path = f"/proc/self/fd/{descriptor}"
        self._images.append(descriptor)
        with os.fdopen(descriptor, "wb", closefd=False) as file:
            file.write(cubin)
        return path


def _message(what: str, status: int, name: str) -> str:
    remedy = _REMEDIES.get(status)
    return f"{what}: the CUDA driver reports {name} ({status})" + (f"; {remedy}" if remedy else "")
