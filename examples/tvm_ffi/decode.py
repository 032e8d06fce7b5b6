"""Decode through the functions of decode.cc, called by TVM-FFI with DLPack tensors; nothing else of Python is needed.

python examples/tvm_ffi/decode.py build/decode/libdecode.so

The result is compared with attention in NumPy. A program with PyTorch, JAX or CuPy passes its own arrays in place of
`GpuArray`.
"""

from __future__ import annotations

import argparse
import ctypes
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import tvm_ffi

HEADS, PAGE_SIZE, D_QK, D_V = 16, 64, 576, 512
CUDA = 2
"""The kind of device in DLPack."""
CODES = {"int32": (0, 32), "uint8": (1, 8), "float32": (2, 32), "bfloat16": (4, 16)}
"""The kinds of elements in DLPack, with their bits."""


class Tensor(ctypes.Structure):
    """DLManagedTensor, and the DLTensor in it."""

    _fields_ = (
        *(("data", ctypes.c_void_p), ("device", ctypes.c_int32), ("ordinal", ctypes.c_int32)),
        *(("ndim", ctypes.c_int32), ("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16)),
        *(("shape", ctypes.POINTER(ctypes.c_int64)), ("strides", ctypes.POINTER(ctypes.c_int64))),
        *(("offset", ctypes.c_uint64), ("owner", ctypes.c_void_p), ("deleter", ctypes.c_void_p)),
    )


_exported: dict[int, GpuArray] = {}
"""Arrays that others hold, by the address of their Tensor."""


@ctypes.CFUNCTYPE(None, ctypes.c_void_p)
def _release(address: int) -> None:
    del _exported[address]


class Driver:
    """The functions of the CUDA driver that are used, with the first GPU's context current."""

    def __init__(self) -> None:
        self._library = ctypes.CDLL("libcuda.so.1")
        context = ctypes.c_void_p()
        self.call("cuInit", 0)
        self.call("cuDevicePrimaryCtxRetain", ctypes.byref(context), 0)
        self.call("cuCtxSetCurrent", context)

    def call(self, name: str, *arguments: Any) -> None:
        """Call a function that returns a status."""
        status = getattr(self._library, name)(*arguments)
        if status != 0:
            raise RuntimeError(f"{name}: the CUDA driver reports error {status}")

    def stream(self) -> int:
        """Make a stream."""
        made = ctypes.c_void_p()
        self.call("cuStreamCreate", ctypes.byref(made), 1)
        return made.value or 0


class GpuArray:
    """A copy of a NumPy array on the GPU that exports itself by DLPack."""

    def __init__(self, driver: Driver, x: np.ndarray, dtype: str = "") -> None:
        self._driver, self._address, self._nbytes = driver, ctypes.c_uint64(), ctypes.c_size_t(x.nbytes)
        driver.call("cuMemAlloc_v2", ctypes.byref(self._address), ctypes.c_size_t(max(1, x.nbytes)))
        self.copy("cuMemcpyHtoD_v2", self._address, np.ascontiguousarray(x).ctypes.data_as(ctypes.c_void_p))
        sizes = ctypes.c_int64 * x.ndim
        self._shape, self._strides = sizes(*x.shape), sizes(*(step // x.itemsize for step in x.strides))
        shape, strides = (ctypes.cast(y, ctypes.POINTER(ctypes.c_int64)) for y in (self._shape, self._strides))
        code = CODES[dtype or str(x.dtype)]
        release = ctypes.cast(_release, ctypes.c_void_p)
        self._tensor = Tensor(self._address.value, CUDA, 0, x.ndim, *code, 1, shape, strides, 0, None, release)

    def copy(self, name: str, *pointers: Any) -> None:
        """Copy from or to the host."""
        self._driver.call(name, *pointers, self._nbytes)

    def to_host(self, out: np.ndarray) -> np.ndarray:
        """Fill an array of the host."""
        self.copy("cuMemcpyDtoH_v2", out.ctypes.data_as(ctypes.c_void_p), self._address)
        return out

    def __dlpack_device__(self) -> tuple[int, int]:
        return CUDA, 0

    def __dlpack__(self, **options: Any) -> Any:
        new = ctypes.pythonapi.PyCapsule_New
        new.restype, new.argtypes = ctypes.py_object, (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)
        _exported[ctypes.addressof(self._tensor)] = self
        return new(ctypes.addressof(self._tensor), b"dltensor", None)


def attention(q: np.ndarray, keys: np.ndarray, scale: float) -> tuple[np.ndarray, np.ndarray]:
    """One token's heads attend to rows, whose first 512 numbers are the values."""
    scores = q @ keys.T * scale
    lse = np.log(np.exp(scores).sum(-1))
    return np.exp(scores - lse[:, None]) @ keys[:, :D_V], lse


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("library", type=Path, help="decode.cc and the exported module, compiled")
    module = tvm_ffi.load_module(str(parser.parse_args().library))
    driver, rng, scale = Driver(), np.random.default_rng(0), 192**-0.5

    q, cache = (rng.integers(-8, 9, shape) / 8 for shape in ((2, 1, HEADS, D_QK), (4, PAGE_SIZE, D_QK)))
    table, seqlens = np.array([[3, 0], [2, 0]], np.int32), np.array([70, 5], np.int32)
    out, lse = np.zeros((2, 1, HEADS, D_V), np.uint16), np.zeros((2, HEADS, 1), np.float32)

    def bfloat16(x: np.ndarray) -> GpuArray:
        bits = x.astype(np.float32).view(np.uint32) >> 16  # exact for these numbers
        return GpuArray(driver, bits.astype(np.uint16), "bfloat16")

    given = [bfloat16(q), bfloat16(cache), GpuArray(driver, table), GpuArray(driver, seqlens)]
    results = [GpuArray(driver, out, "bfloat16"), GpuArray(driver, lse)]
    tensors = [tvm_ffi.from_dlpack(x) for x in (*given, *results)]
    workspace = tvm_ffi.from_dlpack(GpuArray(driver, np.zeros(module.workspace_bytes(*tensors), np.uint8)))

    with tvm_ffi.use_raw_stream(tensors[0].device, driver.stream()):
        module.decode(*tensors, workspace, scale, True)
    driver.call("cuCtxSynchronize")
    found = (results[0].to_host(out).astype(np.uint32) << 16).view(np.float32)
    results[1].to_host(lse)
    for i, length in enumerate(seqlens):
        exact, exact_lse = attention(q[i, 0], cache[table[i]].reshape(-1, D_QK)[:length], scale)
        error, error_lse = abs(found[i, 0] - exact).max(), abs(lse[i, :, 0] - exact_lse).max()
        print(f"{length:3} tokens: largest error of out {error:.1e}, of lse {error_lse:.1e}")
        if not (error < 0.01 and error_lse < 0.002):
            raise SystemExit("wrong")
    print(f"CRC-32 of out and lse: {zlib.crc32(lse.tobytes(), zlib.crc32(out.tobytes())):08x}")
    try:
        module.decode(*tensors[:2], tensors[2], tensors[2], *tensors[4:], workspace, scale, True)
    except ValueError as error:
        print(f"refused: {error}")
    print("all as expected")


if __name__ == "__main__":
    main()
