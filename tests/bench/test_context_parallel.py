"""`run context-parallel` as far as it needs no GPU: predictions, options, the order of the measurements, the table."""

from __future__ import annotations

import contextlib
import sys
import threading
from functools import partial
from types import SimpleNamespace

import pytest

from bench import cli
from bench.context_parallel import command, prediction, ranks
from bench.context_parallel.ranks import Problem


def test_efficiency():
    assert prediction.efficiency(100.0, 2, 50.0) == 1.0
    assert prediction.efficiency(100.0, 4, 50.0) == 0.5


def test_predicted_exchange_grows_with_the_bytes():
    measured = prediction.Exchange(world=2, us=6.0, row_bytes=2064, rows=128)
    assert measured.sent_bytes(2) == 64 * 2064
    assert measured.predicted_us(2) == 6.0
    expected = 6.0 + (120 - 64) * 2064 / 372e3
    assert measured.predicted_us(16) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--gpus", "1"], "--gpus: got 1, expected at least 2"),
        (["--gpus", "2", "--case", "b2"], "--case: got 'b2', expected one of b1-sk131072-h128"),
        (["--gpus", "2", "--transports", "peer,mpi"], "--transports: got 'mpi'"),
        (["--gpus", "2", "--replays", "0"], "--replays: got 0"),
    ],
)
def test_bad_options(arguments, text, capsys):
    assert cli.main(["run", "context-parallel", *arguments]) == 2
    assert text in capsys.readouterr().err


class Clock:
    """CUDA's streams, graphs and events, with graphs that take their rank's number of microseconds per call."""

    def __init__(self, us):
        self.us, self.now, self.current = us, {0: 0.0, 1: 0.0}, threading.local()

    def device(self, rank):
        self.current.rank = rank
        return contextlib.nullcontext()

    def launch(self, stream):
        self.now[self.current.rank] += ranks.STEPS * self.us[self.current.rank]

    def record(self, event):
        event.at = self.now[self.current.rank]

    def module(self):
        """The module in CuPy's form."""
        nothing = lambda *_: None  # noqa: E731
        graph = SimpleNamespace(launch=self.launch)
        stream = {"synchronize": nothing, "begin_capture": nothing, "end_capture": lambda _: graph}
        stream |= {"__enter__": lambda x: x, "__exit__": nothing, "__init__": lambda self, non_blocking: None}
        event = {"record": lambda x: self.record(x), "synchronize": nothing}
        elapsed = lambda begin, end: (end.at - begin.at) / 1e3  # noqa: E731
        kinds = {"Stream": type("Stream", (), stream), "Event": type("Event", (), event)}
        return SimpleNamespace(cuda=SimpleNamespace(Device=self.device, get_elapsed_time=elapsed, **kinds))


def test_the_slowest_rank_of_a_step_counts(monkeypatch):
    monkeypatch.setitem(sys.modules, "cupy", Clock({0: 10.0, 1: 30.0}).module())
    calls = []
    both = [partial(calls.append, 0), partial(calls.append, 1)]
    apart, together, alone = (ranks.Step(both, groups) for groups in ([[0], [1]], [[0, 1]], [[0]]))
    found = ranks.times_us({"apart": apart, "together": together, "alone": alone}, replays=7)
    assert found == {name: pytest.approx(us) for name, us in (("apart", 30.0), ("together", 30.0), ("alone", 10.0))}
    assert calls.count(0) == 3 * (2 + ranks.STEPS)
    assert calls.count(1) == 2 * (2 + ranks.STEPS)


def test_rows_of_a_case(monkeypatch):
    """Local decode takes 1 us per 1,000 tokens, an exchange 5 us."""

    class Fake:
        def __init__(self, problem, world, rank):
            self.us = problem.s_k / world / 1000
            self.calls = []

        def local(self):
            return self.us

        def whole(self, context):
            return self.us + context.exchange_us

        def exchange(self, context):
            return context.exchange_us

    class Context:
        exchange_us = 5.0
        checked = 0

        @property
        def transport(self):
            return self

        def check(self):
            Context.checked += 1

    def times_us(steps, replays):
        groups.update({name: [list(group) for group in step.groups] for name, step in steps.items()})
        return {
            name: max(step.calls[rank]() for group in step.groups for rank in group) for name, step in steps.items()
        }

    groups = {}
    monkeypatch.setattr(ranks, "Rank", Fake)
    monkeypatch.setattr(ranks, "contexts", lambda kind, world: [Context() for _ in range(world)])
    monkeypatch.setattr(ranks, "on_each", lambda ranks, task: [task(rank) for rank in ranks])
    monkeypatch.setattr(ranks, "times_us", times_us)
    rows = list(command.measure(Problem(1, 100_000), 2, ["peer"], 3))
    assert [(row["gpus"], row.get("predicted", False)) for row in rows] == [
        *((1, False), (2, False), (4, True), (8, True), (16, True))
    ]
    assert groups["single"] == [[0], [1]]
    assert groups["peer"] == groups["local"] == [[0, 1]]
    assert groups["1/4"] == [[0]]
    assert rows[1] == {
        "gpus": 2,
        "transport": "peer",
        "us": 55.0,
        "local_us": 50.0,
        "exchange_us": 5.0,
        "efficiency": pytest.approx(100 / 110),
    }
    assert rows[2]["local_us"] == 25.0
    assert rows[2]["exchange_us"] == pytest.approx(5.0 + 32 * command.ROW_BYTES / 372e3)
    assert Context.checked == 2
    lines = []
    console = type("Console", (), {"print": lambda self, table: lines.append(table)})()
    command._show(console, Problem(1, 100_000), rows)
    assert len(lines[0].rows) == 5
