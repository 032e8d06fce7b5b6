"""Host side of `decode/sm100_fp8.cu`."""

from __future__ import annotations

from mla_cupy.arrays.view import View
from mla_cupy.kernels.attention.kernel import NO_TREE, READS_RECORDS, SINK, AttentionKernel, narrowest
from mla_cupy.kernels.decode import sm90_fp8
from mla_cupy.kernels.decode.problem import DecodeProblem
from mla_cupy.kernels.params import DecodeFp8Params
from mla_cupy.kernels.spec import BLACKWELL, Reason, Variant, needs_cc, variants
from mla_cupy.runtime.device import DeviceInfo
from mla_cupy.runtime.tensormap import TensorMapSpec
from mla_cupy.shapes import TILE_TOKENS

BLOCK_ROWS = (32, 64)
"""Query rows of the builds."""


def unsupported(problem: DecodeProblem, device: DeviceInfo) -> Reason | None:
    """Reason why the kernel does not support the problem; None if it does."""
    if problem.record != "fp8":
        return Reason('reads the record "fp8"') if problem.record else READS_RECORDS
    if device.arch not in BLACKWELL:
        return needs_cc(device, "10.0", "10.3")
    return NO_TREE if problem.tree_mask else None


def kv_maps(kv_cache: View, variant: Variant) -> tuple[TensorMapSpec]:
    """Boxes of 128 columns, also for the RoPE columns: bytes past the record's end are zeros."""
    latent, _ = sm90_fp8.kv_maps(kv_cache, variant)
    return (latent,)


KERNEL: AttentionKernel[DecodeProblem] = AttentionKernel(
    "decode_sm100_fp8",
    'dense decode from records "fp8" with both products in FP8 by tcgen05; simulated, not yet run on hardware',
    "decode/sm100_fp8.cu",
    DecodeFp8Params,
    BLACKWELL,
    variants(dtype=sm90_fp8.QUERIES, block_rows=BLOCK_ROWS),
    facts={"tile_tokens": TILE_TOKENS},
    facts_of=lambda build: {"block_rows": build.block_rows},
    unsupported=unsupported,
    variant=lambda problem, device: Variant(dtype=problem.dtype, block_rows=narrowest(BLOCK_ROWS, problem.rows)),
    block_rows=BLOCK_ROWS[-1],
    kv_maps=kv_maps,
    math="fp8",
    unproven=True,
    forms=SINK,
)
