"""The arrays of a case, which every implementation reads: one block table."""

from __future__ import annotations

import numpy as np

from ...core.device import Device
from ..decode.inputs import InputSet, inputs_of
from .cases import CascadeCase


def make_inputs(case: CascadeCase, dtype: str, seed: int, device: Device) -> InputSet:
    """Random queries and latents; the keys are in shuffled pages."""
    order = np.random.default_rng(seed).permutation(case.num_pages).astype(np.int32)
    table = np.empty((case.b, case.max_pages), np.int32)
    table[:, : case.prefix_pages] = order[: case.prefix_pages]
    table[:, case.prefix_pages :] = order[case.prefix_pages :].reshape(case.b, -1)
    return inputs_of(case, dtype, seed, device, table)
