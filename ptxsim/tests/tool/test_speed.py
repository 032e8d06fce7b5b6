"""How much work a warp-instruction takes. Calls are counted, since a busy machine changes times: those are ``perf``."""

from __future__ import annotations

import sys
import time
from unittest import mock

import pytest

import ptxsim
from simtest import nvrtc
from simtest.runners import RUNNERS

#: Python and NumPy calls for each warp-instruction, with races and poison looked for; they are 11.3 and 12.3 today.
CALLS = {"hopper_gemm": 13, "cluster_exchange": 14}


@pytest.mark.parametrize("kernel", CALLS)
def test_calls_for_each_instruction(kernel: str) -> None:
    ptx = nvrtc.kernel_ptx(f"{kernel}.cu")
    RUNNERS[kernel](ptx, "late", 0)  # loading, and what is cached by address
    calls = 0

    def count(frame: object, event: str, argument: object) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    before = sys.getprofile()
    sys.setprofile(count)
    try:
        report = RUNNERS[kernel](ptx, "late", 0)
    finally:
        sys.setprofile(before)
    assert report.total > 1000
    assert calls / report.total <= CALLS[kernel]


@pytest.mark.perf
def test_a_decode_block_takes_at_most_half_a_second() -> None:
    """A 384-thread block over four 64-token tiles, 26,000 warp-instructions: the best of three."""
    mla_cupy = pytest.importorskip("mla_cupy")
    cases = pytest.importorskip("tests.support.cases", reason="needs a checkout of mla_cupy")
    driver = pytest.importorskip("tests.support.sim_driver")
    inputs = cases.make(cases.DecodeCase(b=1, seqlens=256, h_q=64))
    took: list[float] = []
    real = ptxsim.Module.launch

    def timed(self: ptxsim.Module, name: str, *args: object, **options: object) -> ptxsim.Report:
        start = time.perf_counter()
        report = real(self, name, *args, **options)
        if "decode_sm90" in name:
            took.append(time.perf_counter() - start)
            assert report.total > 10_000
        return report

    with mock.patch.object(ptxsim.Module, "launch", timed):
        for _ in range(3):
            with driver.simulated(1):
                mla_cupy.mla_decode(*inputs.arguments, scale=0.1, kernel="decode_sm90_seesaw")
    assert len(took) == 3
    assert min(took) <= 0.5
