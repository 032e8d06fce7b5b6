"""Separation of the times of an engine's steps."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest

from tests.bindings.stand_in import install_modules
from tests.engines.gpu import timing
from tests.engines.gpu.timing import Kernel, per_step, replaced, totals


def test_what_a_kernel_adds() -> None:
    """Its time after the end of all before it: one that overlaps adds the rest, one within another adds nothing."""
    kernels = [Kernel("a", 0, 10), Kernel("b", 4, 15), Kernel("c", 5, 12), Kernel("a", 20, 23)]
    assert totals(kernels) == {"a": (2, 13, 13), "b": (1, 11, 5), "c": (1, 7, 0)}


def test_kernels_of_a_step() -> None:
    """Kernels of the longer trace without the shorter one's, per step between; the largest come first."""
    prompt = [Kernel("prefill", 0, 100)]

    def steps(count: int) -> list[Kernel]:
        runs = (Kernel(name, 200 + 10 * n + at, 200 + 10 * n + at + 2) for n in range(count) for name, at in places)
        return prompt + list(runs)

    places = (("small", 0), ("main", 3), ("main", 6))
    wanted = [
        {"kernel": "main", "runs": 2.0, "us": 4.0, "added_us": 4.0},
        {"kernel": "small", "runs": 1.0, "us": 2.0, "added_us": 2.0},
    ]
    assert per_step(steps(2), steps(6), 4) == wanted


def test_a_method_comes_back() -> None:
    """Also an inherited one, and after an error."""

    class Base:
        def build(self) -> int:
            return 1

    class Derived(Base):
        pass

    with replaced(Derived, "build", lambda build: lambda self: build(self) + 1):
        assert (Derived().build(), Base().build()) == (2, 1)
    with pytest.raises(ZeroDivisionError), replaced(Derived, "build", lambda build: lambda self: 3):
        raise ZeroDivisionError
    assert Derived().build() == 1
    assert "build" not in Derived.__dict__
    with replaced(Base, "build", lambda build: lambda self: 5):
        assert Derived().build() == 5
    assert Base().build() == 1


def test_replays_and_builds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Median and least; nothing is told of what did not happen."""

    class Event:
        now = 0.0

        def __init__(self, *, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            self.at = Event.now

        def elapsed_time(self, later: Any) -> float:
            return float(later.at - self.at)

    class Graph:
        def __init__(self, ms: float) -> None:
            self.ms = ms

        def replay(self) -> None:
            Event.now += self.ms

    class Builder:
        def build(self, value: int) -> int:
            return value

    cuda = SimpleNamespace(CUDAGraph=Graph, Event=Event, synchronize=lambda: None)
    install_modules(monkeypatch, {"torch": {"cuda": cuda}})

    def run() -> None:
        for ms in (3.0, 1.0, 2.0, 5.0, 4.0):
            assert Builder().build(7) == 7
            Graph(ms).replay()

    told = timing.watched(run, [Builder])
    assert (told["replays"], told["builds"], told["graph_ms"], told["least_graph_ms"]) == (5, 5, 3.0, 1.0)
    assert 0 <= told["least_build_us"] <= told["build_us"]
    assert timing.watched(lambda: None, [Builder]) == {"replays": 0, "builds": 0}


def test_builders_in_turn() -> None:
    """All build the last step of the run, as often; the update of its plan is told apart."""
    built: list[Any] = []

    class Base:
        def __init__(self, *given: Any) -> None:
            self.kv_cache_spec, self.layers, self.vllm_config, self.device = given

        def build(self, prefix: int, common: str) -> Any:
            built.append((type(self).__name__, prefix, common))
            return SimpleNamespace(decode=SimpleNamespace(plan=plan, seq_lens="lengths"))

    class Own(Base):
        pass

    class Other(Base):
        pass

    updates: list[str] = []
    plan = SimpleNamespace(update=updates.append)
    config = SimpleNamespace(compilation_config=SimpleNamespace(static_forward_context={"layer": None}))
    own = Own("spec", ["layer"], config, "device")

    def run() -> None:
        own.build(0, "first")
        own.build(0, "last")

    told = timing.builders_in_turn(run, Base, [Other], nullcontext)
    assert list(told) == ["Own", "Other", "update of the plan"]
    assert all(x >= 0 for x in told.values())
    assert built[:2] == [("Own", 0, "first"), ("Own", 0, "last")]
    assert built.count(("Other", 0, "last")) == timing.BUILDS == len(updates)
    assert len(built) == 3 + 2 * timing.BUILDS


def test_runs_follow_one_another_in_every_order() -> None:
    """Each as often, and none always after the same one."""
    ran: list[str] = []
    runs = {name: lambda name=name: ran.append(name) for name in "abc"}
    told = timing.on_a_clock(runs, 40)
    assert list(told) == ["a", "b", "c"]
    assert {name: ran.count(name) for name in "abc"} == dict.fromkeys("abc", 40)
    rounds = [tuple(ran[at : at + 3]) for at in range(0, 120, 3)]
    assert all(sorted(one) == ["a", "b", "c"] for one in rounds)
    assert len(set(rounds)) == 6
