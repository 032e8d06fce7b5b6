"""The kernels that the tests of the runtime compile."""

from __future__ import annotations

import functools
from pathlib import Path

from mla_cupy.runtime.build import Build, BuildRequest, compile_kernel

REPOSITORY = Path(__file__).resolve().parents[2]

TINY = """#include "common/scale.cuh"
extern "C" __constant__ const int mla_fact_threads = 128;
extern "C" __constant__ const int mla_fact_smem_bytes = 2048;
extern "C" __constant__ const int mla_fact_offsets[3] = {0, -8, 16};
extern "C" __global__ void __launch_bounds__(128) mla_tiny(float* x) {
    __shared__ float s[128];
    s[threadIdx.x] = x[threadIdx.x];
    __syncthreads();
    x[threadIdx.x] = s[127 - threadIdx.x] * scale() * MLA_FACTOR;
}
"""
SCALE = "#pragma once\n__device__ float scale() { return 2.0f; }\n"


def slow_source(statements: int) -> str:
    """Straight-line code with data-dependent branches: 600 statements take seconds to compile, 2500 half a minute."""
    body = "".join(
        f"v = v * {2654435761 + 2 * i}u + (w >> {i % 31}); w ^= v * {7 * i + 3}u;"
        f"if (v % {2 * i + 3}u == {i}u) w += x[{i}];\n"
        for i in range(statements)
    )
    head = 'extern "C" __global__ void mla_slow(unsigned* x) {\nunsigned v = x[threadIdx.x], w = v;\n'
    return f"{head}{body}x[0] = v ^ w;\n}}\n"


TINY_REQUEST = BuildRequest("mla_tiny", "generic/tiny.cu", "sm_90a", (("MLA_FACTOR", "3.0f"),), "3")
ENDLESS_REQUEST = BuildRequest("mla_slow", "generic/endless.cu", "sm_90a", (), "plain")
SLOW_REQUEST = BuildRequest("mla_slow", "generic/slow.cu", "sm_90a", (), "plain")


@functools.cache
def tiny_build() -> Build:
    """The build of TINY_REQUEST, for tests that need some sound build; with the fixture `cuda_src`."""
    return compile_kernel(TINY_REQUEST)
