"""Calls of `mla_prefill` in the simulator, judged by the oracle."""

from __future__ import annotations

from typing import Any

import numpy as np

import mla_cupy
from mla_cupy.kernels.dense import DENSE
from tests.support.dense_cases import DenseInputs
from tests.support.flat import flat
from tests.support.sim_driver import simulated
from tests.support.tolerance import check

HOPPER = "dense_sm90"
MMA = "dense_mma"
GENERIC = "dense_generic"
KERNELS = (HOPPER, MMA, GENERIC)
#: Kernels for e4m3 codes.
HOPPER_FP8, GENERIC_FP8 = "dense_sm90_fp8", "dense_generic_fp8"
#: The kind of GPU that a kernel's tests simulate. Those for the builds in 163 KB and in 99 KB are in `MMA_ON`.
GPUS = {HOPPER: (9, 0), MMA: (8, 9), GENERIC: (9, 0), HOPPER_FP8: (9, 0), GENERIC_FP8: (9, 0)}
MMA_ON = ((8, 0), (8, 9), (12, 0))
BY_NAME = {spec.name: spec for spec in DENSE.kernels}


def schedules_itself(inputs: DenseInputs, sm_count: int) -> bool:
    """True if Hopper's kernel finds the tiles of this call's sequence without an earlier launch."""
    given = [x for name in ("cu_seqlens_q", "cu_seqlens_kv") if (x := inputs.options.get(name)) is not None]
    queries, heads = inputs.q.shape[:2]
    most_tiles = min(queries, queries // 128 + 3)  # with those before the sequence and after it
    return all(len(x) == 2 for x in given) and most_tiles * heads <= 4 * sm_count


def run(
    inputs: DenseInputs,
    kernel: str = HOPPER,
    sm_count: int = 1,
    mode: tuple[str, int] = ("early", 0),
    cc: tuple[int, int] | None = None,
    **options: Any,
) -> tuple[np.ndarray, np.ndarray]:
    """The results of the public call, which pass the tolerance rule."""
    with simulated(sm_count, cc or GPUS[kernel], *mode) as target:
        got = flat(mla_cupy.mla_prefill)(*inputs.arguments, **inputs.options, kernel=kernel, **options)
    one = kernel == HOPPER and schedules_itself(inputs, sm_count)
    assert target.launched == ["mla_dense_schedule"] * (not one) + [BY_NAME[kernel].entry]
    check(got, inputs.exact, inputs.rounded, str(got[0].dtype))
    return got
