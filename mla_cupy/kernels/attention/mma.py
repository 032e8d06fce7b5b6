"""Host side of `attention/mma.cu`, `attention/mma_small.cu` and `attention/mma/records.cuh`: attention since Ampere.

Each kernel has builds for two sizes of shared memory.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from mla_cupy.dtypes import HALF
from mla_cupy.kernels.attention.kernel import (
    NARROW_WIDTHS,
    READS_RECORDS,
    READS_ROWS,
    READS_V41,
    SINK,
    AttentionKernel,
    identifier,
    identifiers,
    narrowest,
)
from mla_cupy.kernels.param_layout import Params
from mla_cupy.kernels.params import DecodeParams
from mla_cupy.kernels.spec import HOPPER, SINCE_AMPERE, Reason, Variant, needs_alignment, needs_ampere, variants
from mla_cupy.runtime.device import DeviceInfo, smem_on
from mla_cupy.shapes import D_QK, D_V, TILE_TOKENS, VALUE_WIDTHS

SMALL_ROWS = (16, 32)
WIDE_ROWS = 64
WIDE_SPILL_BYTES = 64
"""Spills allowed: 200 of 255 registers hold output and queries, and a spilled word is read once a step."""
SMEM_KB = LEAST_KB, MORE_KB = 99, 163
"""Shared memory of a block, in KB: available on all of these GPUs; available on data-centre GPUs from the A100 on."""


def _fitting(smem_bytes: int) -> int:
    """The KB of the builds for GPUs with this much shared memory per block."""
    return MORE_KB if smem_bytes >= MORE_KB * 1024 else LEAST_KB


def smem_kb(device: DeviceInfo) -> int:
    """Shared memory of the builds for a GPU, in KB."""
    return _fitting(device.smem_optin)


def runs_on(variant: Variant, arch: str) -> bool:
    """True if a block of a target's GPUs may have the shared memory of a build."""
    return bool(variant.smem_kb <= _fitting(smem_on(arch)))


def is_default(variant: Variant, arch: str) -> bool:
    """True if that is the build's for a target's GPUs, and they have no faster kernel."""
    return arch not in HOPPER and bool(variant.smem_kb == _fitting(smem_on(arch)))


def unsupported(problem: Any, device: DeviceInfo) -> Reason | None:
    """Reason why a kernel does not support the problem; None if it does."""
    if reason := needs_ampere(device):
        return reason
    if problem.record:
        return READS_ROWS
    return None if problem.aligned else needs_alignment("q and the keys")


def unsupported_records(problem: Any, device: DeviceInfo, records: tuple[str, ...]) -> Reason | None:
    """Reason why a kernel for such FP8 tokens does not support the problem; None if it does."""
    if not problem.record:
        return READS_RECORDS
    return needs_ampere(device) if problem.record in records else READS_V41


def _with_width(variant: Variant, problem: Any) -> Variant:
    return variant if problem.d_qk == D_QK else variant.extended(head_dim_qk=problem.d_qk)


def small_variant(problem: Any, device: DeviceInfo) -> Variant:
    """The build for few rows; more rows are divided among blocks."""
    kb, block_rows = smem_kb(device), narrowest(SMALL_ROWS, problem.rows)
    if problem.d_qk in NARROW_WIDTHS:
        kb, block_rows = LEAST_KB, SMALL_ROWS[-1]
    return _with_width(Variant(dtype=problem.dtype, smem_kb=kb, block_rows=block_rows), problem)


def wide_variant(problem: Any, device: DeviceInfo) -> Variant:
    """The build for many rows."""
    return _with_width(Variant(dtype=problem.dtype, smem_kb=smem_kb(device)), problem)


def _widths(builds: tuple[Variant, ...]) -> tuple[Variant, ...]:
    return (*builds, *(build.extended(head_dim_qk=D_V) for build in builds))


NARROW = variants(dtype=HALF, smem_kb=(LEAST_KB,), block_rows=SMALL_ROWS[-1:], head_dim_qk=NARROW_WIDTHS)
"""Builds for values narrower than DeepSeek's. Their rows of 640 bytes need no more shared memory anywhere. Models with
such latents have up to 40 heads: a block of 32 rows, or two. Hopper runs them for trees, which its own kernel lacks.
"""

SMALL: AttentionKernel[Any] = AttentionKernel(
    "attention_mma_small",
    "dense decode and sparse forward with mma.sync for up to 32 rows per KV head",
    "attention/mma_small.cu",
    DecodeParams,
    SINCE_AMPERE,
    variants=(*_widths(variants(dtype=HALF, smem_kb=SMEM_KB, block_rows=SMALL_ROWS)), *NARROW),
    core=variants(dtype=HALF, smem_kb=SMEM_KB, block_rows=SMALL_ROWS[:1]),
    runs_on=runs_on,
    is_default=lambda variant, arch: variant in NARROW or is_default(variant, arch),
    facts={"tile_tokens": TILE_TOKENS},
    unsupported=unsupported,
    variant=small_variant,
    preferred=lambda problem, device: problem.rows <= SMALL_ROWS[-1] or problem.d_qk in NARROW_WIDTHS,
    block_rows=SMALL_ROWS[-1],
    value_widths=tuple(dict.fromkeys(VALUE_WIDTHS.values())),
    forms=SINK,
)

WIDE: AttentionKernel[Any] = AttentionKernel(
    "attention_mma",
    "dense decode and sparse forward with mma.sync",
    "attention/mma.cu",
    DecodeParams,
    SINCE_AMPERE,
    variants=_widths(variants(dtype=HALF, smem_kb=SMEM_KB)),
    core=variants(dtype=HALF, smem_kb=SMEM_KB),
    runs_on=runs_on,
    is_default=is_default,
    facts={"tile_tokens": TILE_TOKENS, "block_rows": WIDE_ROWS},
    unsupported=unsupported,
    variant=wide_variant,
    block_rows=WIDE_ROWS,
    spill_bytes=WIDE_SPILL_BYTES,
    forms=SINK,
)


def from_records(
    name: str, about: str, source: str, params: type[Params], records: tuple[str, ...], rows: Callable[[Any], int]
) -> AttentionKernel[Any]:
    """A family's kernel that reads FP8 records, of the form for few rows.

    `rows` says how many query rows of a problem share keys.
    """

    def variant(problem: Any, device: DeviceInfo) -> Variant:
        block_rows = narrowest(SMALL_ROWS, rows(problem))
        record = identifier(problem.record)
        return Variant(dtype=problem.dtype, record=record, smem_kb=smem_kb(device), block_rows=block_rows)

    return AttentionKernel(
        name,
        f"{about} with mma.sync",
        source,
        params,
        SINCE_AMPERE,
        variants=variants(dtype=HALF, record=identifiers(records), smem_kb=SMEM_KB, block_rows=SMALL_ROWS),
        runs_on=runs_on,
        is_default=is_default,
        facts={"tile_tokens": TILE_TOKENS},
        unsupported=partial(unsupported_records, records=records),
        variant=variant,
        block_rows=SMALL_ROWS[-1],
        forms=SINK,
    )


KERNELS = (SMALL, WIDE)
