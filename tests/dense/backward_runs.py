"""Calls of `mla_prefill_backward` in the simulator, judged by the oracle."""

from __future__ import annotations

from typing import Any

import mla_cupy
from tests.support.dense_gradients import GradientInputs, check_gradients
from tests.support.flat import flat
from tests.support.sim_driver import simulated

HOPPER = "dense_sm90_backward_keys"
GENERIC = "dense_generic_backward_keys"
KERNELS = (HOPPER, GENERIC)


def run(
    inputs: GradientInputs,
    kernel: str = HOPPER,
    sm_count: int = 1,
    mode: tuple[str, int] = ("early", 0),
    cc: tuple[int, int] = (9, 0),
    **options: Any,
) -> tuple[Any, ...]:
    """The results of the public call, which pass the tolerance rule."""
    with simulated(sm_count, cc, *mode) as target:
        got = flat(mla_cupy.mla_prefill_backward)(*inputs.arguments, **inputs.options, kernel=kernel, **options)
    assert f"mla_{kernel}" in target.launched
    check_gradients(got, inputs)
    return got
