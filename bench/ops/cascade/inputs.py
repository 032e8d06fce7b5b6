"""The arrays of a case, which every implementation reads: one block table."""

from __future__ import annotations

import numpy as np

from ...core.device import Device
from ..decode.inputs import InputSet
from .cases import CascadeCase


def make_inputs(case: CascadeCase, dtype: str, seed: int, device: Device) -> InputSet:
    """Random queries and latents; the keys are in shuffled pages."""
    order = np.random.default_rng(seed).permutation(case.num_pages).astype(np.int32)
    table = np.empty((case.b, case.max_pages), np.int32)
    table[:, : case.prefix_pages] = order[: case.prefix_pages]
    table[:, case.prefix_pages :] = order[case.prefix_pages :].reshape(case.b, -1)
    seqlens = case.lengths()
    return InputSet(
        q=device.normal((case.b, case.s_q, case.h_q, case.d_qk), dtype, 2 * seed + 1),
        kv_cache=device.normal((case.num_pages, case.page_size, case.h_kv, case.d_qk), dtype, 2 * seed + 2),
        block_table=device.upload(table),
        seqlens=device.upload(seqlens),
        host_table=table,
        host_seqlens=seqlens,
    )
