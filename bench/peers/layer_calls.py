"""A layer of separate calls: RoPE and LayerNorm by kernels of their own, `cache_append`, both products by cuBLAS."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np

import mla_cupy

from ..core.cost import D_V
from ..core.device import Device
from ..core.implementation import Prepared
from ..core.recorders import Call
from ..ops.layer import SEPARATE, Buffers, Steps, attention, columns_of_rope, prepared_layer, selection, tables
from ..ops.layer_cases import D_INDEX, D_ROPE, IndexInputs, LayerCase, LayerInputs
from .cublas import Cublas, why_missing

_SOURCE = r"""
template <typename T> __device__ float wide(unsigned short x);
template <typename T> __device__ unsigned short narrow(float x);
struct bf16 {};
struct fp16 {};
template <> __device__ float wide<bf16>(unsigned short x) { return __uint_as_float((unsigned)x << 16); }
template <> __device__ unsigned short narrow<bf16>(float x) {
    unsigned bits = __float_as_uint(x);
    return (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
}
template <> __device__ float wide<fp16>(unsigned short x) {
    float y; asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x)); return y;
}
template <> __device__ unsigned short narrow<fp16>(float x) {
    unsigned short y; asm("cvt.rn.f16.f32 %0, %1;" : "=h"(y) : "f"(x)); return y;
}
extern "C" __global__ void bench_rope(const unsigned short* q, unsigned short* out, const float* cos, const float* sin,
                                      const int* positions, int rows, int heads, int from_row, int to_row) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x, row = i / 32, pair = i % 32;
    if (row >= rows) return;
    const long long at = (long long)positions[row / heads] * 32 + pair;
    const unsigned two = *(const unsigned*)(q + (long long)row * from_row + 2 * pair);
    const float x = wide<KIND>(two & 0xffff), y = wide<KIND>(two >> 16), c = cos[at], s = sin[at];
    *(unsigned*)(out + (long long)row * to_row + 2 * pair) =
        narrow<KIND>(x * c - y * s) | (unsigned)narrow<KIND>(x * s + y * c) << 16;
}
extern "C" __global__ void bench_norm(const unsigned short* k, unsigned short* out, const float* weight,
                                      const float* bias) {
    __shared__ float sums[8];
    const int at = blockIdx.x * 128 + threadIdx.x, warp = threadIdx.x / 32;
    const float x = wide<KIND>(k[at]);
    float sum = x, square = x * x;
    for (int step = 16; step > 0; step /= 2) {
        sum += __shfl_xor_sync(~0u, sum, step);
        square += __shfl_xor_sync(~0u, square, step);
    }
    sums[warp] = sum, sums[4 + warp] = square;
    __syncthreads();
    const float mean = (sums[0] + sums[1] + sums[2] + sums[3]) / 128;
    const float mean_square = (sums[4] + sums[5] + sums[6] + sums[7]) / 128;
    const float scale = rsqrtf(mean_square - mean * mean + 1e-6f);
    out[at] = narrow<KIND>((x - mean) * scale * weight[threadIdx.x] + bias[threadIdx.x]);
}
extern "C" __global__ void bench_gate(unsigned short* out, const unsigned short* gate, int count) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < count) out[i] = narrow<KIND>(wide<KIND>(out[i]) / (1 + __expf(-wide<KIND>(gate[i]))));
}
"""
_THREADS = 256


class SeparateCalls:
    """A layer without `mla_prepare`, `absorb` and `w_uv`."""

    name = SEPARATE

    def unsupported(self, case: LayerCase, dtype: str) -> str | None:
        if case.model.index_heads and dtype != "bfloat16":
            return "index queries are bfloat16"
        return why_missing()

    def prepare(self, case: LayerCase, dtype: str, sets: Sequence[LayerInputs], device: Device) -> Prepared:
        import cupy

        library = Cublas(device.stream)
        source = _SOURCE.replace("KIND", "bf16" if dtype == "bfloat16" else "fp16")
        kernels = {name: cupy.RawKernel(source, f"bench_{name}", ("-std=c++17",)) for name in ("rope", "norm", "gate")}

        def make(inputs: LayerInputs, buffers: Buffers) -> Steps:
            return _steps(
                case, self.attend(case, dtype, inputs, buffers, device), inputs, buffers, device, library, kernels
            )

        return prepared_layer(make, case, dtype, sets, device)

    def attend(
        self, case: LayerCase, dtype: str, inputs: LayerInputs, buffers: Buffers, device: Device
    ) -> tuple[Call, Call]:
        """The attention, and a function that returns its results where they are projected."""
        return attention(case, dtype, inputs, buffers, device), lambda: buffers.latents[:, 0]


def _steps(
    case: LayerCase,
    attend: tuple[Call, Call],
    inputs: LayerInputs,
    buffers: Buffers,
    device: Device,
    library: Cublas,
    kernels: Any,
) -> Steps:
    model, rows = case.model, case.b * case.h_q
    turns = tables(inputs)
    steps: dict[str, Any] = {}
    if model.has_rope:
        steps["RoPE of q"] = _rope(case, inputs, buffers, kernels["rope"])
    rope, turned = (inputs.rope, turns) if model.has_rope else (None, {})
    steps["append"] = partial(mla_cupy.cache_append, inputs.latent, rope, inputs.cache, inputs.slots, **turned)
    if not model.absorbs:
        return {**steps, "attention": attend[0]}
    w_uk, w_uv = inputs.kv_b_proj[:, : model.d_nope], inputs.kv_b_proj[:, model.d_nope :]
    q_nope, out = inputs.q[..., : model.d_nope], buffers.out[:, 0]
    steps["W_UK"] = partial(library.by_heads, q_nope, w_uk, buffers.queries[..., :D_V], transposed=False)
    if inputs.index is not None:
        steps |= _indexer(case, inputs, inputs.index, buffers, device, kernels["norm"])
    steps["attention"] = attend[0]
    steps["W_UV"] = lambda: library.by_heads(attend[1](), w_uv, out, transposed=True)
    if model.has_gate:
        count = rows * model.d_head
        steps["gate"] = partial(
            kernels["gate"], (-(-count // _THREADS),), (_THREADS,), (out, inputs.gate, np.int32(count))
        )
    return steps


def _indexer(
    case: LayerCase, inputs: LayerInputs, index: IndexInputs, buffers: Buffers, device: Device, norm: Any
) -> Steps:
    normed, turns = device.empty((case.b, D_INDEX), "bfloat16"), tables(inputs)
    prepared = {"codes": buffers.codes, "folded": buffers.folded}
    arguments = (index.k, normed, index.norm_weight, index.norm_bias)
    return {
        "LayerNorm": partial(norm, (case.b,), (D_INDEX,), arguments),
        "index q": partial(mla_cupy.indexer_prepare_q, index.q, index.weights, **turns, **prepared),
        "index k": partial(mla_cupy.indexer_cache_append, normed, index.cache, inputs.slots, **turns),
        "select": selection(case, inputs, index, buffers, device),
    }


def _rope(case: LayerCase, inputs: LayerInputs, buffers: Buffers, kernel: Any) -> Any:
    """RoPE of the queries; of those that hold it inside, the other columns are copied before."""
    source, target = columns_of_rope(case, inputs, buffers)
    if not case.model.absorbs:
        buffers.queries[...] = inputs.q  # once: a layer would turn them in place
    steps = (x.strides[1] // 2 for x in (source, target))
    sizes = [np.int32(x) for x in (case.b * case.h_q, case.h_q, *steps)]
    arguments = (source, target, inputs.cos, inputs.sin, inputs.positions, *sizes)
    blocks = -(-case.b * case.h_q * (D_ROPE // 2) // _THREADS)
    return partial(kernel, (blocks,), (_THREADS,), arguments)
