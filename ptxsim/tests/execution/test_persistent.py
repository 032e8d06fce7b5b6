"""A persistent scheduler on clusterlaunchcontrol: every block index is visited once, by whoever takes it."""

from __future__ import annotations

import numpy as np
import pytest

import ptxsim
from simtest import nvrtc


@pytest.mark.parametrize(("mode", "seed", "resident"), [("early", 0, 1), ("late", 0, 2), ("random", 3, 4)])
def test_every_block_is_visited_once(mode: str, seed: int, resident: int) -> None:
    visits, taken = np.zeros(11, "i4"), np.zeros(1, "i4")
    module = ptxsim.Module(nvrtc.kernel_ptx("persistent.cu", "sm_100a"))
    module.launch("persistent", 11, 64, [visits, taken], mode=mode, seed=seed, resident=resident)
    assert visits.tolist() == [1] * 11
    assert taken[0] == 11 - resident
