"""Kernels of dense attention: the schedule and the kernels for CUDA cores, mma.sync and Hopper."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from mla_cupy.arrays.view import View
from mla_cupy.dtypes import TABLE
from mla_cupy.kernels.attention.mma import MORE_KB, SMEM_KB, is_default, runs_on, smem_kb
from mla_cupy.kernels.dense.problem import (
    ROW_GROUP,
    SCHEDULE_BYTES,
    SEQUENCE_BYTES,
    TILE_BYTES,
    TILE_KEYS,
    TILE_QUERIES,
    VARIANTS,
    DenseProblem,
)
from mla_cupy.kernels.params import DenseScheduleParams, PrefillParams
from mla_cupy.kernels.pipeline import Call
from mla_cupy.kernels.spec import (
    HOPPER,
    SINCE_AMPERE,
    KernelSpec,
    Reason,
    Variant,
    needs_alignment,
    needs_ampere,
    needs_cc,
)
from mla_cupy.runtime.device import DeviceInfo
from mla_cupy.runtime.launching import Dim3
from mla_cupy.runtime.tensormap import TensorMapSpec

Maps = tuple[tuple[str, TensorMapSpec], ...]

QUERIES_AT_ONCE = 64
"""Queries of a warpgroup, which fetches them on its own."""
PANEL_COLUMNS = 64
"""Width of a TMA copy: the span of the swizzle."""
READS_HALF = Reason("reads queries, keys and values in 16 bits")
MMA_MOST_D_V = 128
"""Columns of values that a warp of the mma.sync kernel can add up for its 32 queries."""
MMA_SPILL_BYTES = 96
"""Spills of a build: output, scores and queries take 192 or 208 of 255 registers; a spill is read once a tile."""


@dataclass(frozen=True)
class DenseKernel(KernelSpec[DenseProblem]):
    """A kernel that attends, after the schedule.

    Attributes
    ----------
    grid : callable
        `grid(problem, device)`.
    maps : callable
        `maps(problem, call)`: its tensor maps and their arrays.
    variant : callable
        `variant(problem, device)`: the build for a problem.
    """

    grid: Callable[[DenseProblem, DeviceInfo], Dim3] = lambda problem, device: (1, 1, 1)
    maps: Callable[[DenseProblem, Call], Maps] = lambda problem, call: ()
    variant: Callable[[DenseProblem, DeviceInfo], Variant] = lambda problem, device: problem.variant


# ---- Hopper -----------------------------------------------------------------------------------------------------


def tile_keys(d_v: int) -> int:
    """Keys of a tile: the most that fit into shared memory twice."""
    return 80 if d_v > 128 else 128


def with_tile(variant: Variant) -> Variant:
    """The build with its tile of keys."""
    return variant.extended(tile_keys=tile_keys(variant.head_dim_v))


def with_mask(variant: Variant) -> Variant:
    """The build that reads a mask, too."""
    return variant.extended(has_mask=1)


def hopper_variant(problem: DenseProblem, device: DeviceInfo) -> Variant:
    """The build for Hopper."""
    variant = with_tile(problem.variant)
    return with_mask(variant) if problem.masked else variant


def needs_hopper(problem: DenseProblem, device: DeviceInfo) -> Reason | None:
    """Reason why Hopper's kernel does not support the problem; None if it does."""
    if problem.coded:
        return READS_HALF
    if device.arch not in HOPPER:
        return needs_cc(device, "9.0")
    return None if problem.aligned else needs_alignment("queries, keys, values and state_out")


def persistent_grid(problem: DenseProblem, device: DeviceInfo) -> Dim3:
    """A block per SM, unless there are fewer work items."""
    return min(device.sm_count, problem.most_tiles * problem.h_q), 1, 1


def row_maps(problem: DenseProblem, call: Call) -> Maps:
    """Queries, their last columns, keys, their last columns, values.

    Without keys these have the queries' map, which no thread uses.
    """
    keys, values = ("k", "v") if problem.s_kv else ("q", "q")
    q_rope, k_rope = call.name("q_rope") or "q", call.name("k_rope") if problem.s_kv else ""
    names = ("q", q_rope, keys, k_rope or keys, values)
    rows = (QUERIES_AT_ONCE, QUERIES_AT_ONCE, *[tile_keys(problem.d_v)] * 3)
    return tuple((name, row_map(call.view(name), count)) for name, count in zip(names, rows, strict=True))


def row_map(array: View, rows: int) -> TensorMapSpec:
    """An array of (tokens, heads, width), fetched by `rows` tokens of a head."""
    (tokens, heads, width), nbytes = array.shape, TABLE[array.dtype].nbytes
    token, head = (nbytes * stride for stride in array.strides[:2])
    row = nbytes * width
    return TensorMapSpec(
        array.dtype,
        array.ptr,
        dims=(width, tokens, heads),
        strides_bytes=(token if tokens > 1 else row, head if heads > 1 else row),
        box=(PANEL_COLUMNS, rows, 1),
    )


# ---- Since Ampere ------------------------------------------------------------------------------------------------


def _with_smem(variant: Variant, kb: int) -> Variant:
    """The build in so much shared memory: with 99 KB, tiles have fewer keys, and registers some of the queries."""
    short = kb < MORE_KB and variant.head_dim_qk > variant.head_dim_v
    return variant.extended(smem_kb=kb, tile_keys=48 if short else 64, held_panels=int(short))


def mma_variant(problem: DenseProblem, device: DeviceInfo) -> Variant:
    """The build with mma.sync."""
    variant = _with_smem(problem.variant, smem_kb(device))
    return with_mask(variant) if problem.masked else variant


def mma_unsupported(problem: DenseProblem, device: DeviceInfo) -> Reason | None:
    """Reason why the mma.sync kernel does not support the problem; None if it does."""
    if problem.coded:
        return READS_HALF
    if reason := needs_ampere(device):
        return reason
    if problem.d_v > MMA_MOST_D_V:
        return Reason(f"takes values of up to {MMA_MOST_D_V} columns: wider ones leave no registers")
    return None if problem.aligned else needs_alignment("queries, keys, values and state_out")


_MMA_BUILDS = tuple(
    _with_smem(variant, kb) for kb in SMEM_KB for variant in VARIANTS if variant.head_dim_v <= MMA_MOST_D_V
)

# ---- Any GPU ----------------------------------------------------------------------------------------------------


def plain_unsupported(problem: DenseProblem, device: DeviceInfo) -> Reason | None:
    """Reason why the fallback does not support the problem; None if it does."""
    return READS_HALF if problem.coded else None


def plain_grid(problem: DenseProblem, device: DeviceInfo) -> Dim3:
    """A block per tile of queries and head; the schedule may find fewer tiles."""
    return problem.most_tiles, problem.h_q, 1


SCHEDULE: KernelSpec[DenseProblem] = KernelSpec(
    "dense_schedule",
    "lists the tiles of queries, and of keys, of dense attention, those with most work first",
    "dense/schedule.cu",
    DenseScheduleParams,
    facts={
        "tile_queries": TILE_QUERIES,
        "tile_keys": TILE_KEYS,
        "row_group": ROW_GROUP,
        "schedule_bytes": SCHEDULE_BYTES,
        "sequence_bytes": SEQUENCE_BYTES,
        "tile_bytes": TILE_BYTES,
    },
)
SM90 = DenseKernel(
    "dense_sm90",
    "dense attention with WGMMA and TMA",
    "dense/sm90.cu",
    PrefillParams,
    HOPPER,
    variants=(*map(with_tile, VARIANTS), *(with_mask(with_tile(variant)) for variant in VARIANTS)),
    unsupported=needs_hopper,
    grid=persistent_grid,
    maps=row_maps,
    variant=hopper_variant,
)
MMA = DenseKernel(
    "dense_mma",
    "dense attention with mma.sync",
    "dense/mma.cu",
    PrefillParams,
    SINCE_AMPERE,
    variants=(*_MMA_BUILDS, *map(with_mask, _MMA_BUILDS)),
    runs_on=runs_on,
    is_default=is_default,
    unsupported=mma_unsupported,
    grid=persistent_grid,
    variant=mma_variant,
    spill_bytes=MMA_SPILL_BYTES,
)
GENERIC = DenseKernel(
    "dense_generic",
    "dense attention on CUDA cores, any strides",
    "dense/generic.cu",
    PrefillParams,
    variants=VARIANTS,
    unsupported=plain_unsupported,
    fallback=True,
    grid=plain_grid,
)
KERNELS = (GENERIC, MMA, SCHEDULE, SM90)
