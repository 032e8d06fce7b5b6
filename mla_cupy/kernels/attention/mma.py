"""Host side of `attention/mma.cu`, `attention/mma_small.cu` and `attention/mma/records.cuh`: attention since Ampere."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from mla_cupy.dtypes import HALF
from mla_cupy.kernels.attention.kernel import READS_RECORDS, READS_ROWS, READS_V41, SINK, AttentionKernel, narrowest
from mla_cupy.kernels.param_layout import Params
from mla_cupy.kernels.params import DecodeParams
from mla_cupy.kernels.spec import HOPPER, Reason, Variant, needs_alignment, variants
from mla_cupy.runtime.device import TARGETS, DeviceInfo, number_of, smem_per_block
from mla_cupy.shapes import D_QK, D_V, TILE_TOKENS

SMALL_ROWS = (16, 32)
WIDE_ROWS = 64
WIDE_SPILL_BYTES = 64
"""Spills allowed: 200 of 255 registers hold output and queries, and what is spilled is read once a step."""
LEAST_KB, MORE_KB = 99, 163
"""Shared memory of a block, in KB: what all of these GPUs have; what data centre GPUs from the A100 on have."""
_KB = 1024


def archs(smem_kb: int) -> tuple[str, ...]:
    """The targets with cp.async, with mma.sync of bfloat16, and with so much shared memory."""
    numbers = {target: number_of(target) for target in TARGETS}
    return tuple(
        target
        for target, number in numbers.items()
        if number >= 80 and smem_per_block(divmod(number, 10)) >= smem_kb * _KB
    )


def chosen_archs(smem_kb: int) -> tuple[str, ...]:
    """Targets for which a kernel with so much shared memory is chosen: those without a faster one."""
    faster = {*HOPPER, *(archs(MORE_KB) if smem_kb < MORE_KB else ())}
    return tuple(target for target in archs(smem_kb) if target not in faster)


def lacks(device: DeviceInfo, smem_kb: int) -> Reason | None:
    """Reason that a GPU has no mma.sync and cp.async, or less shared memory; None if it has all."""
    if device.cc < (8, 0):
        major, minor = device.cc
        return Reason(f"needs compute capability 8.0 or newer, {device.name} has {major}.{minor}")
    if device.smem_optin < smem_kb * _KB:
        return Reason(f"needs {smem_kb} KB of shared memory per block, {device.name} has {device.smem_optin // _KB}")
    return None


def unsupported(problem: Any, device: DeviceInfo, smem_kb: int) -> Reason | None:
    """Reason that a kernel cannot take the problem; None if it can."""
    if reason := lacks(device, smem_kb):
        return reason
    if problem.record:
        return READS_ROWS
    return None if problem.aligned else needs_alignment("q and the keys")


def unsupported_records(problem: Any, device: DeviceInfo, smem_kb: int, records: tuple[str, ...]) -> Reason | None:
    """Reason that a kernel that reads such FP8 records cannot take the problem; None if it can."""
    if not problem.record:
        return READS_RECORDS
    return lacks(device, smem_kb) if problem.record in records else READS_V41


def _with_width(variant: Variant, problem: Any) -> Variant:
    return variant if problem.d_qk == D_QK else variant.extended(head_dim_qk=problem.d_qk)


def small_variant(problem: Any, device: DeviceInfo, smem_kb: int) -> Variant:
    """The build for few rows that it takes; more rows than it has are divided among blocks."""
    block_rows = narrowest(SMALL_ROWS, problem.rows)
    return _with_width(Variant(dtype=problem.dtype, smem_kb=smem_kb, block_rows=block_rows), problem)


def wide_variant(problem: Any, device: DeviceInfo, smem_kb: int) -> Variant:
    """The build for many rows that it takes."""
    return _with_width(Variant(dtype=problem.dtype, smem_kb=smem_kb), problem)


def _widths(builds: tuple[Variant, ...]) -> tuple[Variant, ...]:
    return (*builds, *(build.extended(head_dim_qk=D_V) for build in builds))


def _small(name: str, smem_kb: int) -> AttentionKernel[Any]:
    return AttentionKernel(
        name,
        f"dense decode and sparse forward with mma.sync for up to 32 rows per KV head, in {smem_kb} KB per block",
        "attention/mma_small.cu",
        DecodeParams,
        archs(smem_kb),
        variants=_widths(variants(dtype=HALF, smem_kb=(smem_kb,), block_rows=SMALL_ROWS)),
        core=variants(dtype=HALF, smem_kb=(smem_kb,), block_rows=SMALL_ROWS[:1]),
        core_archs=chosen_archs(smem_kb),
        facts={"tile_tokens": TILE_TOKENS},
        unsupported=partial(unsupported, smem_kb=smem_kb),
        variant=partial(small_variant, smem_kb=smem_kb),
        preferred=lambda problem, device: problem.rows <= SMALL_ROWS[-1],
        block_rows=SMALL_ROWS[-1],
        forms=SINK,
        base="attention_mma_small",
    )


def _wide(name: str, smem_kb: int) -> AttentionKernel[Any]:
    return AttentionKernel(
        name,
        f"dense decode and sparse forward with mma.sync, in {smem_kb} KB per block",
        "attention/mma.cu",
        DecodeParams,
        archs(smem_kb),
        variants=_widths(variants(dtype=HALF, smem_kb=(smem_kb,))),
        core=variants(dtype=HALF, smem_kb=(smem_kb,)),
        core_archs=chosen_archs(smem_kb),
        facts={"tile_tokens": TILE_TOKENS, "block_rows": WIDE_ROWS},
        unsupported=partial(unsupported, smem_kb=smem_kb),
        variant=partial(wide_variant, smem_kb=smem_kb),
        block_rows=WIDE_ROWS,
        spill_bytes=WIDE_SPILL_BYTES,
        forms=SINK,
        base="attention_mma",
    )


def from_records(
    names: tuple[str, str],
    about: str,
    source: str,
    params: type[Params],
    records: tuple[str, ...],
    rows: Callable[[Any], int],
) -> tuple[AttentionKernel[Any], AttentionKernel[Any]]:
    """Kernels of a family that read FP8 records, of the form for few rows, the faster one first.

    `rows` says how many query rows of a problem share keys.
    """

    def variant(problem: Any, device: DeviceInfo, smem_kb: int) -> Variant:
        block_rows = narrowest(SMALL_ROWS, rows(problem))
        return Variant(dtype=problem.dtype, record=problem.record, smem_kb=smem_kb, block_rows=block_rows)

    def kernel(name: str, smem_kb: int) -> AttentionKernel[Any]:
        return AttentionKernel(
            name,
            f"{about} with mma.sync, in {smem_kb} KB per block",
            source,
            params,
            archs(smem_kb),
            variants=variants(dtype=HALF, record=records, smem_kb=(smem_kb,), block_rows=SMALL_ROWS),
            facts={"tile_tokens": TILE_TOKENS},
            unsupported=partial(unsupported_records, smem_kb=smem_kb, records=records),
            variant=partial(variant, smem_kb=smem_kb),
            block_rows=SMALL_ROWS[-1],
            forms=SINK,
            base=names[1],
        )

    return kernel(names[0], MORE_KB), kernel(names[1], LEAST_KB)


SMALL_163KB = _small("attention_mma_small_163kb", MORE_KB)
SMALL = _small("attention_mma_small", LEAST_KB)
WIDE_163KB = _wide("attention_mma_163kb", MORE_KB)
WIDE = _wide("attention_mma", LEAST_KB)
KERNELS = (SMALL_163KB, SMALL, WIDE_163KB, WIDE)
"""The fastest that a GPU has the shared memory for comes first, of those that prefer the problem."""
