"""The arrays of a case."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ...core.device import Device
from .cases import MAX_POSITION, PrepareCase

Array = npt.NDArray[Any]
DTYPE = "bfloat16"


@dataclass(frozen=True)
class PrepareInputs:
    """One set of inputs: the queries, and the other arguments of the public call by name, on the device and off."""

    q: Any
    arguments: dict[str, Any]
    host: dict[str, Array]


@dataclass(frozen=True)
class PreparedQueries:
    """Results of a call."""

    codes: Any
    folded: Any
    k_codes: Any = None  # without keys
    k_scale: Any = None


def make_inputs(case: PrepareCase, dtype: str, seed: int, device: Device) -> PrepareInputs:
    """Normal queries and weights; the tokens' positions follow each other."""
    rng = np.random.default_rng(seed)
    angles = np.arange(MAX_POSITION)[:, None] * 10000.0 ** -(np.arange(case.rope_pairs) / case.rope_pairs)
    host: dict[str, Array] = {
        "weights": rng.standard_normal((case.s_q, case.h), np.float32),
        "cos": np.cos(angles).astype(np.float32),
        "sin": np.sin(angles).astype(np.float32),
        "positions": (np.arange(case.s_q) % MAX_POSITION).astype(np.int32),
    }
    if case.keys:
        host["norm_weight"], host["norm_bias"] = rng.standard_normal((2, case.d), np.float32)
    arguments = {name: device.upload(x) for name, x in host.items()}
    if case.keys:
        arguments["k"] = device.normal((case.s_q, case.d), DTYPE, seed + 1000)
    return PrepareInputs(device.normal((case.s_q, case.h, case.d), DTYPE, seed), arguments, host)
