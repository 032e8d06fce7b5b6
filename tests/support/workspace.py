"""Layouts of workspaces, and memory for them."""

from __future__ import annotations

from typing import Any

import numpy as np

from mla_cupy.kernels.pipeline import Layout


def assert_laid_out(layout: Layout, sizes: dict[str, int]) -> None:
    """The parts that are named, in this order, each aligned, large enough, and before the next one."""
    assert list(layout.offsets) == list(sizes)
    ends = [*list(layout.offsets.values())[1:], layout.nbytes]
    for (begin, end), size in zip(zip(layout.offsets.values(), ends, strict=True), sizes.values(), strict=True):
        assert begin % 256 == 0
        assert end - begin >= size
    assert layout.nbytes < sum(sizes.values()) + 256 * len(sizes)
    assert next(iter(layout.offsets.values()), 0) == 0


def aligned_bytes(nbytes: int, shift: int = 0, fill: int = 0) -> Any:
    """`nbytes` of host memory, `shift` past a multiple of 256."""
    whole = np.full(nbytes + 512 + shift, fill, np.uint8)
    return whole[-whole.ctypes.data % 256 + shift :][:nbytes]
