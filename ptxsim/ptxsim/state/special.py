"""Values of the special registers: %tid, %ctaid, %clock and the others."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..errors import SimError
from ..memory.spaces import SHARED_RESERVED


def special_register(cta: Any, warp: Any, name: str) -> tuple[np.ndarray, bool]:
    """Return a special register's 32 values, and whether they never change."""
    launch = cta.launch
    lanes = np.arange(32, dtype="u4")
    thread = lanes + np.uint32(32 * warp.index)
    bx, by, _ = launch.block
    axis = "xyz".find(name[-1]) if name[-2:-1] == "." else -1
    if name.startswith("%tid"):
        values = (thread % bx, thread // bx % by, thread // (bx * by))
        return values[axis].astype("u4"), True
    if name.startswith(("%clock", "%globaltimer")):
        kind = "u8" if name in ("%clock64", "%globaltimer") else "u4"
        return np.full(32, launch.steps & (0xFFFFFFFFFFFFFFFF if kind == "u8" else 0xFFFFFFFF), kind), False
    if name.startswith("%lanemask_"):
        one = np.uint64(1)
        wide = lanes.astype("u8")
        masks = {
            "eq": one << wide,
            "lt": (one << wide) - one,
            "le": (one << (wide + one)) - one,
            "gt": ~((one << (wide + one)) - one),
            "ge": ~((one << wide) - one),
        }
        return (masks[name[-2:]] & np.uint64(0xFFFFFFFF)).astype("u4"), True
    if name == "%laneid":
        return lanes, True
    return np.full(32, _uniform(cta, warp, name, axis), "u8" if name == "%gridid" else "u4"), True


def _uniform(cta: Any, warp: Any, name: str, axis: int) -> int:
    """Return a special register that is the same in all lanes."""
    launch, cluster = cta.launch, cta.launch.cluster
    grid = launch.grid
    blocks = tuple(g // c for g, c in zip(grid, cluster, strict=False))
    inside = tuple(i % c for i, c in zip(cta.ctaid, cluster, strict=False))
    table = {
        "%ntid": launch.block,
        "%ctaid": cta.ctaid,
        "%nctaid": grid,
        "%clusterid": tuple(i // c for i, c in zip(cta.ctaid, cluster, strict=False)),
        "%nclusterid": blocks,
        "%cluster_ctaid": inside,
        "%cluster_nctaid": cluster,
    }
    if axis >= 0 and name[:-2] in table:
        return table[name[:-2]][axis]
    size = cta.program.dynamic_offset + launch.dynamic_shared
    plain = {
        "%warpid": warp.index,
        "%nwarpid": 64,
        "%cluster_ctarank": cta.rank,
        "%cluster_nctarank": int(np.prod(cluster)),
        "%is_explicit_cluster": int(np.prod(cluster) > 1),
        "%smid": cta.cluster.index % 148,
        "%nsmid": 148,
        "%gridid": 1,
        "%dynamic_smem_size": launch.dynamic_shared,
        "%total_smem_size": size,
        "%aggr_smem_size": size + SHARED_RESERVED,
        "%envreg1": launch.workspace >> 32,
        "%envreg2": launch.workspace & 0xFFFFFFFF,
    }
    if name not in plain:
        raise SimError(f"special register {name} is not modelled")
    return plain[name]
