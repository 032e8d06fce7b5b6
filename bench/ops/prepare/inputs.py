"""The arrays of a case: queries, tokens and their slots, a pool with room for twice as many."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from mla_cupy.cache_formats import FORMATS

from ...core.device import Device
from ..cache.inputs import as_cache
from .cases import D_ROPE, MAX_POSITION, PAGE_SIZE, MlaPrepareCase

Array = npt.NDArray[Any]
BASE = 10000.0
KV_SCALE = 0.1


@dataclass(frozen=True)
class MlaPrepareInputs:
    """One set of inputs.

    Attributes
    ----------
    q : array
        That of the calls: with "inplace" it is changed.
    arguments : dict
        Further arguments of the public call, by name.
    pool : array or None
        The bytes of the pages.
    host : dict
        What the check needs, off the device; `q` are the first queries of chosen tokens.
    """

    q: Any
    arguments: dict[str, Any]
    pool: Any
    host: dict[str, Array]


@dataclass(frozen=True)
class MlaPrepareOutputs:
    """Results of a call; None where there is none, or where the queries' own place holds it."""

    queries: Any
    q_scales: Any
    pages: Any


def make_inputs(case: MlaPrepareCase, dtype: str, seed: int, device: Device) -> MlaPrepareInputs:
    """Normal numbers, positions one after another, slots all over the pages."""
    rng = np.random.default_rng(seed)
    angles = np.arange(MAX_POSITION)[:, None] * BASE ** -(np.arange(D_ROPE // 2) / (D_ROPE // 2))
    host: dict[str, Array] = {"positions": (np.arange(case.n) % MAX_POSITION).astype(np.int32)}
    if not case.theta:
        host |= {"cos": np.cos(angles).astype(np.float32), "sin": np.sin(angles).astype(np.float32)}
    arguments: dict[str, Any] = {"theta": BASE} if case.theta else {}
    pool = None
    if case.record:
        record = FORMATS[case.record]
        pages = 2 * -(-case.n // PAGE_SIZE)
        pool = device.empty((pages, record.page_bytes(PAGE_SIZE)), "uint8")
        host["slots"] = rng.permutation(pages * PAGE_SIZE)[: case.n].astype(np.int32)
        arguments |= {
            "latent": device.normal((case.n, record.d_latent), dtype, 3 * seed + 1),
            "rope": device.normal((case.n, record.d_rope), dtype, 3 * seed + 2),
            "cache": as_cache(record, pool),
            "kv_scale": KV_SCALE if case.record == "fp8" else 1.0,
        }
    arguments |= {name: device.upload(x) for name, x in host.items()}
    q = device.normal((case.n, case.h, case.d), dtype, 3 * seed)
    return MlaPrepareInputs(q, arguments, pool, host)
