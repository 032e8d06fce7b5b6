"""Host side of `sparse_forward/sm90_fp8.cu`."""

from __future__ import annotations

from mla_cupy.dtypes import HALF
from mla_cupy.kernels.attention.kernel import AttentionKernel
from mla_cupy.kernels.params import DecodeFp8Params
from mla_cupy.kernels.sparse_forward.problem import SparseForwardProblem
from mla_cupy.kernels.spec import HOPPER, Reason, Variant, needs_cc, variants
from mla_cupy.runtime.device import DeviceInfo
from mla_cupy.shapes import TILE_TOKENS

BLOCK_M = 64


def unsupported(problem: SparseForwardProblem, device: DeviceInfo) -> Reason | None:
    """Reason why the kernel does not support the problem; None if it does."""
    if problem.record != "fp8":
        return Reason('reads the record "fp8"')
    return None if device.arch in HOPPER else needs_cc(device, "9.0")


KERNEL: AttentionKernel[SparseForwardProblem] = AttentionKernel(
    "sparse_forward_sm90_fp8",
    'sparse forward from records "fp8" with both products in FP8 (math="fp8"), promoted to float32 tile by tile',
    "sparse_forward/sm90_fp8.cu",
    DecodeFp8Params,
    HOPPER,
    variants(dtype=HALF),
    facts={"block_m": BLOCK_M, "tile_tokens": TILE_TOKENS},
    unsupported=unsupported,
    variant=lambda problem, device: Variant(dtype=problem.dtype),
    block_rows=BLOCK_M,
    math="fp8",
    bf16_partials=True,
)
