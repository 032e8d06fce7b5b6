"""Batched products by cuBLAS, called directly: CuPy refuses it in a capture, which cuBLAS itself does not mind."""

from __future__ import annotations

import ctypes
from typing import Any

from ..core.errors import BenchError

OP_N, OP_T = 0, 1
_COMPUTE_32F, _GEMM_DEFAULT = 68, -1
_TYPES = {"bfloat16": 14, "float16": 2}
_WORKSPACE_BYTES = 32 << 20  # what cuBLAS asks for on Hopper


class Cublas:
    """A handle on one stream, with a workspace of its own."""

    def __init__(self, stream: Any) -> None:
        import cupy

        self._library = ctypes.CDLL(_path())
        self._handle = ctypes.c_void_p()
        self._call("cublasCreate_v2", ctypes.byref(self._handle))
        self._workspace: Any = cupy.empty(_WORKSPACE_BYTES, "uint8")
        self._call("cublasSetStream_v2", self._handle, ctypes.c_void_p(stream.ptr))
        where = ctypes.c_void_p(self._workspace.data.ptr)
        self._call("cublasSetWorkspace_v2", self._handle, where, ctypes.c_size_t(_WORKSPACE_BYTES))

    def _call(self, name: str, *arguments: Any) -> None:
        status = getattr(self._library, name)(*arguments)
        if status:
            raise BenchError(f"{name} failed with status {status}")

    def by_heads(self, x: Any, w: Any, out: Any, *, transposed: bool) -> None:
        """out[:, h] = x[:, h] w[h], or x[:, h] w[h]^T if `transposed`.

        x is (t, heads, k) and out (t, heads, n), with any strides of the first two axes; w is (heads, k, n), or
        (heads, n, k) if `transposed`.
        """
        (t, heads, k), n, kind = x.shape, out.shape[2], _TYPES[str(x.dtype)]
        # Column-major: out^T = w^T x^T, where a row-major w is w^T.
        one, zero = ctypes.c_float(1), ctypes.c_float(0)

        def operand(array: Any, leading: int, batch: int) -> tuple[Any, ...]:
            steps = [ctypes.c_int(array.strides[leading] // 2), ctypes.c_longlong(array.strides[batch] // 2)]
            return (ctypes.c_void_p(array.data.ptr), ctypes.c_int(kind), *steps)

        self._call(
            "cublasGemmStridedBatchedEx",
            *(self._handle, ctypes.c_int(OP_T if transposed else OP_N), ctypes.c_int(OP_N)),
            *(ctypes.c_int(n), ctypes.c_int(t), ctypes.c_int(k), ctypes.byref(one)),
            *operand(w, 1, 0),
            *operand(x, 0, 1),
            ctypes.byref(zero),
            *operand(out, 0, 1),
            *(ctypes.c_int(heads), ctypes.c_int(_COMPUTE_32F), ctypes.c_int(_GEMM_DEFAULT)),
        )


def why_missing() -> str | None:
    """Reason that cuBLAS cannot be called; None if it can."""
    try:
        _path()
    except (ImportError, BenchError) as error:
        return f"cuBLAS is missing ({str(error).splitlines()[0]})"
    return None


def _path() -> str:
    """The library that CuPy has loaded."""
    from cupy.cuda import cublas  # noqa: F401  (loads it)

    with open("/proc/self/maps") as maps:
        found = {line.split()[-1] for line in maps if "libcublas.so" in line}
    if not found:
        raise BenchError("CuPy has loaded none")
    return min(found)
