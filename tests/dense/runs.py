"""Calls of `mla_prefill` in the simulator, judged by the oracle."""

from __future__ import annotations

from typing import Any

import numpy as np

import mla_cupy
from tests.support.dense_cases import DenseInputs
from tests.support.sim_driver import simulated
from tests.support.tolerance import check

HOPPER = "dense_sm90"
GENERIC = "dense_generic"
KERNELS = (HOPPER, GENERIC)


def run(
    inputs: DenseInputs,
    kernel: str = HOPPER,
    sm_count: int = 1,
    mode: tuple[str, int] = ("early", 0),
    cc: tuple[int, int] = (9, 0),
    **options: Any,
) -> tuple[np.ndarray, np.ndarray]:
    """The results of the public call, which pass the tolerance rule."""
    with simulated(sm_count, cc, *mode) as target:
        got = mla_cupy.mla_prefill(*inputs.arguments, **inputs.options, kernel=kernel, **options)
    assert target.launched == ["mla_dense_schedule", f"mla_{kernel}"]
    check(got, inputs.exact, inputs.rounded, str(got[0].dtype))
    return got
