"""Runs golden cases on a GPU, with nothing but NumPy and the driver library."""

from __future__ import annotations

import ctypes
import os
import pickle
import sys
import time
from pathlib import Path

import numpy as np

from simtest.golden.case import FILE, Case

_NOT_READY = 600


class _Config(ctypes.Structure):
    _fields_ = [
        ("dims", ctypes.c_uint * 7), ("pad", ctypes.c_uint), ("stream", ctypes.c_void_p), ("attrs", ctypes.c_void_p),
        ("count", ctypes.c_uint),
    ]  # fmt: skip


class _Attribute(ctypes.Structure):
    _fields_ = [("id", ctypes.c_uint), ("pad", ctypes.c_uint), ("value", ctypes.c_uint * 16)]


class Hang(RuntimeError):  # noqa: N818
    """A kernel did not end; nothing can run after it."""


class Gpu:
    """Launches cases through the driver."""

    def __init__(self) -> None:
        self.lib = ctypes.CDLL("libcuda.so.1")
        self.call("cuInit", 0)
        self.device = ctypes.c_int()
        self.call("cuDeviceGet", ctypes.byref(self.device), 0)
        self.open()

    def open(self) -> None:
        """Take the device's primary context."""
        context = ctypes.c_void_p()
        self.call("cuDevicePrimaryCtxRetain", ctypes.byref(context), self.device)
        self.call("cuCtxSetCurrent", context)

    def finish(self, seconds: float = 5.0) -> None:
        """Wait for the launch."""
        deadline = time.monotonic() + seconds
        while status := self.lib.cuStreamQuery(None):
            if status != _NOT_READY:
                raise RuntimeError(f"the kernel failed with {status}")
            if time.monotonic() > deadline:
                raise Hang(f"the kernel still runs after {seconds} s")

    def call(self, name: str, *args: object) -> None:
        """Call a driver function and raise on failure."""
        status = getattr(self.lib, name)(*args)
        if status:
            raise RuntimeError(f"{name} failed with {status}")

    def run(self, case: Case) -> list[np.ndarray]:
        """Run a case and return its outputs."""
        module, function = ctypes.c_void_p(), ctypes.c_void_p()
        self.call("cuModuleLoadData", ctypes.byref(module), ctypes.c_char_p(case.text().encode()))
        self.call("cuModuleGetFunction", ctypes.byref(function), module, case.kernel.encode())
        if case.smem > 48 * 1024:
            self.call("cuFuncSetAttribute", function, 8, case.smem)
        pointers = []
        for array in case.data:
            pointer = ctypes.c_uint64()
            self.call("cuMemAlloc_v2", ctypes.byref(pointer), ctypes.c_size_t(max(array.nbytes, 16)))
            self.call("cuMemcpyHtoD_v2", pointer, array.ctypes.data_as(ctypes.c_void_p), ctypes.c_size_t(array.nbytes))
            pointers.append(pointer)
        values = [self._argument(arg, pointers) for arg in case.args]
        array = (ctypes.c_void_p * len(values))(*(ctypes.addressof(v) for v in values))
        attribute = _Attribute(4, 0, (ctypes.c_uint * 16)(case.cluster, 1, 1))
        config = _Config((ctypes.c_uint * 7)(case.grid, 1, 1, case.block, 1, 1, case.smem), 0, None, None, 0)
        if case.cluster > 1:
            config.attrs, config.count = ctypes.addressof(attribute), 1
        self.call("cuLaunchKernelEx", ctypes.byref(config), function, array, None)
        self.finish()
        result = []
        for index in case.outputs:
            out = np.empty_like(case.data[index])
            self.call(
                "cuMemcpyDtoH_v2", out.ctypes.data_as(ctypes.c_void_p), pointers[index], ctypes.c_size_t(out.nbytes)
            )
            result.append(out)
        for pointer in pointers:
            self.call("cuMemFree_v2", pointer)
        self.call("cuModuleUnload", module)
        return result

    def _argument(self, arg: object, pointers: list) -> object:
        if isinstance(arg, tuple):
            return ctypes.c_uint64(pointers[arg[1]].value)
        if isinstance(arg, int):
            return ctypes.c_int(arg)
        rank = len(arg.dims)
        raw = (ctypes.c_uint8 * 256)()
        tmap = (ctypes.c_uint8 * 128).from_buffer(raw, -ctypes.addressof(raw) % 128)
        self.call(
            "cuTensorMapEncodeTiled", tmap, arg.dtype, rank, ctypes.c_void_p(pointers[arg.index].value),
            (ctypes.c_uint64 * rank)(*arg.dims), (ctypes.c_uint64 * (rank - 1))(*arg.strides),
            (ctypes.c_uint32 * rank)(*arg.box), (ctypes.c_uint32 * rank)(*(arg.steps or [1] * rank)), 0, arg.swizzle, 0,
            arg.fill,
        )  # fmt: skip
        return tmap


def record(folder: Path) -> None:
    """Run every case; one that fails is named and left out, and a fresh process goes on after it."""
    target, log = folder / FILE.name, folder / "failed.txt"
    results = dict(np.load(target)) if log.exists() and target.exists() else {}
    failed = log.read_text().splitlines() if log.exists() else []
    gpu = Gpu()
    for case in pickle.loads((folder / "cases.pickle").read_bytes()):
        if f"{case.name} #0" in results or any(line.startswith(f"{case.name}: ") for line in failed):
            continue
        try:
            for index, out in enumerate(gpu.run(case)):
                results[f"{case.name} #{index}"] = out
        except RuntimeError as error:
            results[f"{case.name} failed"] = np.array(str(error))
            np.savez_compressed(target, **results)
            log.write_text("\n".join([*failed, f"{case.name}: {error}"]))
            os.execv(sys.executable, [sys.executable, "-m", "simtest.golden", *sys.argv[1:]])
    np.savez_compressed(target, **results)
    log.unlink(missing_ok=True)
    print(f"{len(results)} outputs recorded")
    print("\n".join(["failed:", *failed]) if failed else "no case failed")
