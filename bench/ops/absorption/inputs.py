"""The arrays of a case: absorbed queries over a cache, and what an un-absorbed call has in their place."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ...core.cost import D_V
from ...core.device import Device
from ..decode import inputs as decode
from .cases import D_EXPANDED, D_NOPE, D_ROPE, AbsorptionCase


@dataclass(frozen=True)
class AbsorptionInputs(decode.InputSet):
    """One set of inputs. `q` is drawn for attention alone; the whole forms absorb `queries`."""

    queries: Any  # (s_q, h_q, 192)
    weights: Any  # (512, h_q, 128 + 128): kv_b_proj


@dataclass(frozen=True)
class Outputs:
    """Results of a call: `out` (1, s_q, h_q, 512) of attention alone, else (s_q, h_q, 128)."""

    out: Any


def make_inputs(case: AbsorptionCase, dtype: str, seed: int, device: Device) -> AbsorptionInputs:
    """Random queries, latents and weights; the keys are in shuffled pages."""
    table = decode.shuffled_table(case, seed)
    common = decode.inputs_of(case, dtype, seed, device, table)
    queries = device.normal((case.s_q, case.h_q, D_NOPE + D_ROPE), dtype, 4 * seed + 3)
    weights = device.normal((D_V, case.h_q, D_EXPANDED), dtype, 4 * seed + 4, scale=D_V**-0.5)
    return AbsorptionInputs(**vars(common), queries=queries, weights=weights)
