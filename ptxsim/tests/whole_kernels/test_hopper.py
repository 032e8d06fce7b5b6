"""Whole Hopper kernels against NumPy, in every completion mode, from both compilers."""

from __future__ import annotations

import pytest

from simtest import nvrtc
from simtest.runners import MODES, RUNNERS


@pytest.mark.parametrize("major", [12, 13])
@pytest.mark.parametrize(("mode", "seed"), MODES)
@pytest.mark.parametrize("name", ["hopper_gemm", "cluster_exchange", "cp_async_ring", "global_exchange"])
def test_kernel(name: str, mode: str, seed: int, major: int) -> None:
    report = RUNNERS[name](nvrtc.kernel_ptx(name + ".cu", "sm_90a", major), mode, seed)
    assert report.total > 0
