"""What a planned call costs the host."""

from __future__ import annotations

import gc
import statistics
import time

import pytest

import mla_cupy
from mla_cupy.runtime.device import DeviceInfo
from tests.support.calls import plan_of
from tests.support.cases import DecodeCase, make
from tests.support.gpu import uploaded

pytestmark = [pytest.mark.gpu, pytest.mark.perf]

LIMIT_MICROSECONDS = 15.0
CALLS = 300


def test_planned_call_takes_at_most_15_microseconds(gpu: DeviceInfo, capsys: pytest.CaptureFixture[str]) -> None:
    import cupy

    inputs = make(DecodeCase(b=2, h_q=16, seqlens=64))
    arguments = uploaded(inputs)
    plan = plan_of(inputs)
    plan.update(arguments[3])
    out, lse = mla_cupy.mla_decode(*arguments, plan=plan)
    stream = cupy.cuda.get_current_stream()
    q, kv_cache, table, seqlens = arguments
    nanoseconds = []
    gc.disable()
    try:
        for _ in range(CALLS):
            stream.synchronize()  # an idle queue: a full one makes the driver wait
            start = time.perf_counter_ns()
            mla_cupy.mla_decode(q, kv_cache, table, seqlens, plan=plan, out=out, lse=lse)
            nanoseconds.append(time.perf_counter_ns() - start)
    finally:
        gc.enable()
    median = statistics.median(nanoseconds) / 1e3
    with capsys.disabled():
        print(f"\nplanned call on the host: median {median:.1f} us, least {min(nanoseconds) / 1e3:.1f} us")
    assert median <= LIMIT_MICROSECONDS
