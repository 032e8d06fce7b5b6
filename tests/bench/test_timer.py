from __future__ import annotations

import numpy as np
import pytest

from bench.core.timer import HOST_WARMUP, host_us, percentile, rotation, sample, set_count, summarise


class ScriptedClock:
    """Returns the given readings one after the other."""

    def __init__(self, readings):
        self.readings = iter(readings)
        self.started = 0

    def start(self):
        self.started += 1

    def stop_us(self):
        return next(self.readings)


@pytest.mark.parametrize("share", [0.0, 0.2, 0.5, 0.8, 1.0])
@pytest.mark.parametrize("count", [1, 2, 7, 20])
def test_percentile_is_numpys(share, count):
    values = sorted(np.random.default_rng(count).standard_normal(count).tolist())
    assert percentile(values, share) == pytest.approx(np.quantile(values, share))


def test_a_sample_is_the_replay_over_its_calls():
    clock, replays = ScriptedClock([80.0, 100.0, 120.0]), []
    samples = sample(clock, lambda: replays.append(1), calls=4, replays=3, warmup=2)
    assert samples == [20.0, 25.0, 30.0]
    assert (clock.started, len(replays)) == (3, 5)


def test_summary():
    timing = summarise([5.0, 1.0, 2.0, 4.0, 3.0, 100.0], calls=8)
    assert timing.us_median == 3.5
    assert (timing.us_p20, timing.us_p80) == (2.0, 5.0)
    assert timing.spread == pytest.approx(3 / 3.5)
    assert (timing.replays, timing.calls) == (6, 8)
    with pytest.raises(ValueError, match="at least one"):
        summarise([], calls=1)


@pytest.mark.parametrize("set_bytes", [1, 999, 1000, 1001, 2999, 3000, 3001, 10**9])
def test_sets_exceed_three_times_the_l2(set_bytes):
    count = set_count(set_bytes, l2_bytes=1000)
    assert count * set_bytes > 3000
    assert count == 2 or (count - 1) * set_bytes <= 3000


@pytest.mark.parametrize("sets", [2, 3, 4, 5, 100])
def test_rotation_visits_every_set_equally_and_never_twice_in_a_row(sets):
    order = rotation(sets)
    assert len(order) >= 4
    assert {order.count(index) for index in range(sets)} == {len(order) // sets}
    assert all(a != b for a, b in zip(order, order[1:] + order[:1], strict=True))


def test_host_time_is_the_queueing_alone():
    time, waits, calls = [0.0], [], []

    def call():
        calls.append(1)
        time[0] += 7e-6

    def synchronize():
        waits.append(1)
        time[0] += 1.0  # the GPU's time must not count

    us = host_us([call, call], synchronize, batches=3, per_batch=10, now=lambda: time[0])
    assert us == pytest.approx(7.0)
    assert len(calls) == HOST_WARMUP + 30
    assert len(waits) == 4


def test_a_single_call_is_warmed_up_before_its_host_time_is_taken():
    """The first repetitions may still fill a cache."""
    seconds, calls = [0.0], []

    def call():
        calls.append(1)
        seconds[0] += 1.0 if len(calls) <= HOST_WARMUP else 5e-6

    assert host_us([call], lambda: None, batches=3, per_batch=2, now=lambda: seconds[0]) == pytest.approx(5.0)
