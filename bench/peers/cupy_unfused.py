"""Unfused attention with CuPy and cuBLAS: gather the pages, matmul, softmax, matmul.

This is MLA without a custom kernel, in the absorbed form. The un-absorbed form is left out: it
materialises 128 heads of keys and values, 40 GB for one step of the first case.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ..core.cost import D_QK, D_V
from ..core.device import ROUND_TO_BFLOAT16, Device
from ..core.implementation import Prepared
from ..core.recorders import Call, Eager
from ..ops.decode import DecodeInputs, DecodeOutputs, make_outputs
from ..ops.decode_cases import DecodeCase

# Constants of cuBLAS.
OP_N, OP_T = 0, 1
COMPUTE_32F = 68
GEMM_DEFAULT = -1


class CupyUnfused:
    """cuBLAS on the 16-bit inputs with float32 scores; CuPy refuses cuBLAS in a capture, so the calls are eager."""

    name = "cupy"

    def unsupported(self, case: DecodeCase, dtype: str) -> str | None:
        if case.mix or case.d_qk != D_QK:
            return f"written for sequences of one length, keys of width {D_QK}"
        try:
            from cupy.cuda import cublas  # noqa: F401  (loads the library)
        except ImportError as error:
            return f"cuBLAS is missing ({str(error).splitlines()[0]})"
        return None

    def prepare(self, case: DecodeCase, dtype: str, sets: Sequence[DecodeInputs], device: Device) -> Prepared:
        results = [make_outputs(case, dtype, device) for _ in sets]
        buffers = _Buffers(case, dtype)

        def call(inputs: DecodeInputs, result: DecodeOutputs) -> Call:
            return lambda: _decode(case, inputs, result, buffers)

        return Prepared(
            calls=[call(inputs, result) for inputs, result in zip(sets, results, strict=True)],
            outputs=lambda index: results[index],
            recorder=Eager(),
            kernel="absorbed",
        )


class _Buffers:
    """The intermediate arrays of one call, shared by all sets, and the batched product."""

    def __init__(self, case: DecodeCase, dtype: str) -> None:
        import cupy

        rows = case.s_q * case.h_q
        self.keys: Any = cupy.empty((case.b, case.max_pages, case.page_size * D_QK // 4), dtype="uint64")
        self.scores: Any = cupy.empty((case.b, rows, case.s_kv), dtype="float32")
        self.weights: Any = cupy.empty((case.b, rows, case.s_kv), dtype="uint16" if dtype == "bfloat16" else "float16")
        is_bfloat = dtype == "bfloat16"
        self.element_type = cupy.cuda.runtime.CUDA_R_16BF if is_bfloat else cupy.cuda.runtime.CUDA_R_16F
        self.float_type = cupy.cuda.runtime.CUDA_R_32F
        self.divide: Any = cupy.ElementwiseKernel(
            "float32 weight, float32 total",
            "uint16 bits" if is_bfloat else "float16 value",
            "const float x = weight / total; " + (ROUND_TO_BFLOAT16 if is_bfloat else "value = x;"),
            f"bench_divide_{dtype}",
        )

    def product(
        self,
        ops: tuple[int, int],
        sizes: tuple[int, int, int],
        factor: float,
        operands: Sequence[tuple[Any, int, int, int]],
    ) -> None:
        """One strided-batched GEMM; an operand is (array, its CUDA type, leading dimension, stride of the batch)."""
        import cupy
        from cupy.cuda import cublas

        one, zero = np.array(factor, np.float32), np.array(0, np.float32)
        left, right, result = operands
        cublas.gemmStridedBatchedEx(
            cupy.cuda.get_cublas_handle(),
            *ops,
            *sizes,
            one.ctypes.data,
            *(left[0].data.ptr, *left[1:]),
            *(right[0].data.ptr, *right[1:]),
            zero.ctypes.data,
            *(result[0].data.ptr, *result[1:]),
            len(result[0]),
            COMPUTE_32F,
            GEMM_DEFAULT,
        )


def _decode(case: DecodeCase, inputs: DecodeInputs, result: DecodeOutputs, buffers: _Buffers) -> None:
    import cupy

    rows = case.s_q * case.h_q
    keys_per_batch = case.max_pages * case.page_size * D_QK
    element, single = buffers.element_type, buffers.float_type
    scores, weights = buffers.scores, buffers.weights

    # 8-byte words, because CuPy's take copies one element per thread.
    pool = inputs.kv_cache.view("uint64").reshape(case.num_pages, -1)
    cupy.take(pool, inputs.block_table, axis=0, out=buffers.keys)

    # cuBLAS is column-major: scores^T = K Q^T, then out^T = V^T weights^T, where V is the first 512 of K's 576.
    keys = (buffers.keys, element, D_QK, keys_per_batch)
    queries = (inputs.q, element, D_QK, rows * D_QK)
    buffers.product(
        (OP_T, OP_N),
        (case.s_kv, rows, D_QK),
        case.scale,
        (keys, queries, (scores, single, case.s_kv, rows * case.s_kv)),
    )
    by_token = scores.reshape(case.b, case.s_q, case.h_q, case.s_kv)
    for i in range(case.s_q - 1):
        by_token[:, i, :, max(0, case.s_kv - case.s_q + i + 1) :] = -np.inf
    top = scores.max(axis=-1, keepdims=True)
    cupy.subtract(scores, top, out=scores)
    cupy.exp(scores, out=scores)
    total = scores.sum(axis=-1, keepdims=True)
    buffers.divide(scores, total, weights)
    lse = (top + cupy.log(total)).reshape(case.b, case.s_q, case.h_q).transpose(0, 2, 1)
    cupy.copyto(result.lse, lse)
    buffers.product(
        (OP_N, OP_N),
        (D_V, rows, case.s_kv),
        1.0,
        (keys, (weights, element, case.s_kv, rows * case.s_kv), (result.out, element, D_V, rows * D_V)),
    )
