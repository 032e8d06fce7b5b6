"""Times of replayed graphs that an engine's own process writes down."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest

from tests.engines.gpu import replays, sglang_check
from tests.engines.gpu.timing import Kernel


class Event:
    """An event of a GPU with a clock that advances one millisecond per event, some events behind the host."""

    clock = 0
    behind = 0

    def __init__(self, *, enable_timing: bool) -> None:
        assert enable_timing

    def record(self) -> None:
        Event.clock += 1
        self.at = Event.clock

    def query(self) -> bool:
        return self.at <= Event.clock - Event.behind

    def elapsed_time(self, other: Event) -> float:
        assert other.query()
        return float(other.at - self.at)


@pytest.fixture
def event(monkeypatch: pytest.MonkeyPatch) -> type[Event]:
    monkeypatch.setattr(Event, "clock", 0)
    monkeypatch.setattr(Event, "behind", 0)
    return Event


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replays, "SETTLED", 0.0)


def graph(*lengths: int) -> Any:
    """Replays of graphs that take the events' number of milliseconds, less one."""
    left = [*lengths]

    def replay(graph: Any) -> None:
        assert graph == "graph"
        Event.clock += left.pop(0)

    return replay, left


def test_graphs_are_timed_while_asked(event: type[Event], tmp_path: Path) -> None:
    """Median and least of whole groups, those that are done; before and after only the graph runs."""
    switch, lengths = tmp_path / "a.timed", [4, 4, *range(10, 10 + replays.AT_ONCE), 30, 9]
    replay, left = graph(*lengths)
    replaying = replays.timed(replay, event, switch)
    event.behind = 7
    for _ in range(2):
        replaying("graph")
    assert Event.clock == 8
    times = replays.graph_times(switch, lambda: [replaying("graph") for _ in range(replays.AT_ONCE + 1)])
    assert times == {"replays": replays.AT_ONCE, "graph_ms": 11.0 + (replays.AT_ONCE - 1) / 2, "least_graph_ms": 11.0}
    before = Event.clock
    replaying("graph")
    assert (Event.clock, left) == (before + 9, [])


def test_readings_of_one_run_are_not_those_of_another(event: type[Event], tmp_path: Path) -> None:
    """Nor are replays of a run with too few; a failure leaves no file behind."""
    switch = tmp_path / "a.timed"
    replay, _ = graph(*[5] * (replays.AT_ONCE + 1), *[9] * 30)
    replaying = replays.timed(replay, event, switch)
    event.behind = 7  # one reading of the first is under way when the second begins
    for expected in (6.0, 10.0):  # no replay between the two
        times = replays.graph_times(switch, lambda: [replaying("graph") for _ in range(replays.AT_ONCE + 1)])
        assert times == {"replays": replays.AT_ONCE, "graph_ms": expected, "least_graph_ms": expected}
    assert replays.graph_times(switch, lambda: replaying("graph")) == {}
    with pytest.raises(ZeroDivisionError):
        replays.graph_times(switch, lambda: 1 // 0)
    assert not switch.exists()


class Profile:
    """A profile of PyTorch that sees replays between its start and its end."""

    seen: list[Any]
    running: ClassVar[list[Profile]] = []

    def __init__(self, activities: list[str]) -> None:
        assert activities == ["cuda"]

    def start(self) -> None:
        Profile.seen = []
        Profile.running.append(self)

    def stop(self) -> None:
        self.kernels = Profile.seen
        Profile.running.remove(self)


def test_kernels_of_replays(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The first replays of one run and of the next are profiled; others are replayed as usual."""
    Profile.seen, waited = [], []
    profiler = SimpleNamespace(profile=Profile, ProfilerActivity=SimpleNamespace(CUDA="cuda"))
    torch = SimpleNamespace(profiler=profiler, cuda=SimpleNamespace(synchronize=lambda: waited.append(1)))
    monkeypatch.setattr(replays, "kernels_of", lambda profile: profile.kernels)
    replay = replays.traced(lambda name: Profile.seen.append(Kernel(name, 0.0, 32.0)), torch, tmp_path / "a")
    replay("before")
    for name in ("one", "two"):
        found = replays.readings_while(
            tmp_path / "a", lambda name=name: [replay(name) for _ in range(replays.TRACED + 3)]
        )
        assert found == [{"kernel": name, "runs": 1.0, "us": 32.0, "added_us": 2.0}]
    assert replays.readings_while(tmp_path / "a", lambda: replay("few")) is None
    assert (len(waited), len(Profile.running)) == (5, 1)
    replay("after")
    assert not Profile.running


ENGINE = f"""
import pathlib, sys, torch
before = torch.cuda.CUDAGraph.replay
import {replays.REPLAYER} as replayer
print(torch.cuda.CUDAGraph.replay is before, replayer.ready)
"""


def test_which_processes_time_their_graphs(tmp_path: Path) -> None:
    """Every process of an engine that is asked for it, by its path, when the module that replays is there."""
    assert sglang_check.watched(sglang_check.arguments(["--graphs"]), tmp_path / "a.json") == {}
    assert sglang_check.watched(sglang_check.arguments(["--speed"]), tmp_path / "a.json") == {}
    asked = sglang_check.watched(sglang_check.arguments(["--speed", "--graphs"]), tmp_path / "a.json")
    assert asked[replays.SWITCH] == str(tmp_path / "a.timed")
    module = tmp_path.joinpath(*replays.REPLAYER.split(".")).with_suffix(".py")
    module.parent.mkdir(parents=True)
    module.write_text("ready = True\n")
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("from torch import cuda\n")
    (tmp_path / "torch" / "cuda.py").write_text("class Event: pass\nclass CUDAGraph:\n    def replay(self): pass\n")
    path = [asked["PYTHONPATH"].split(os.pathsep)[0], str(Path(__file__).parents[2]), str(tmp_path)]
    for switch, own in ((asked[replays.SWITCH], "False"), ("", "True")):
        environment = {**os.environ, replays.SWITCH: switch, "PYTHONPATH": os.pathsep.join(path)}
        command = [sys.executable, "-c", ENGINE]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
        assert done.stdout.split() == [own, "True"]


class Engine:
    """Notes what it is asked for."""

    def __init__(self) -> None:
        self.asked: list[tuple[int, int]] = []

    def generate(self, input_ids: list[list[int]], sampling_params: dict[str, Any]) -> None:
        assert all(len(x) == 24 for x in input_ids)
        self.asked.append((len(input_ids), sampling_params["max_new_tokens"]))


def test_times_on_a_clock_come_first(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """They are kept before graphs are timed, which may fail; few where each prefills for long."""
    options = sglang_check.arguments(["--speed", "--batch", "64,1", "--context", "24"])
    engine, kept = Engine(), list[str]()
    monkeypatch.delenv(replays.SWITCH, raising=False)
    sglang_check.speed(options, engine, lambda found: kept.append(json.dumps(found)))
    steps = json.loads(kept[0])["steps"]
    counts = {name: len(step["all_ms"]) for name, step in steps.items()}
    assert (len(kept), counts) == (1, {"b64 24": sglang_check.FEW, "b1 24": sglang_check.MORE})
    assert engine.asked[0] == (64, 1)
    monkeypatch.setenv(replays.SWITCH, str(tmp_path / "a.timed"))
    made = {"replays": 8, "graph_ms": 2.0, "least_graph_ms": 1.0}
    monkeypatch.setattr(replays, "graph_times", lambda switch, run: (run(), made)[1])
    sglang_check.speed(options, engine, lambda found: kept.append(json.dumps(found)))
    times = [{name: step.get("apart") for name, step in json.loads(x)["steps"].items()} for x in kept[1:4]]
    assert times == [{"b64 24": None, "b1 24": None}, {"b64 24": made, "b1 24": None}, {"b64 24": made, "b1 24": made}]
    assert engine.asked[-4:] == [(64, sglang_check.LONG), (1, sglang_check.LONG)] * 2
    assert [x["kernels"] for x in json.loads(kept[-1])["steps"].values()] == [None, None]  # nobody replays here
