"""What is said of an engine that stands still."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from mla_cupy.integrations import sglang as plugin
from tests.bindings import stand_in_sglang
from tests.engines.gpu import diagnose, sglang_check


class Event:
    """Of a GPU that is done after so many questions, or never."""

    questions: float = 0

    def record(self) -> None:
        self.left = Event.questions

    def query(self) -> bool:
        self.left -= 1
        return self.left < 0


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> type[Event]:
    monkeypatch.setattr(Event, "questions", 0)
    monkeypatch.setattr(diagnose, "PATIENCE", 0.05)
    return Event


LENGTHS = [70, 0, 64, 200]
WHOLE = [(0, 0), (1, 0), (3, 0), (3, 2), (4, 0), (4, 0)]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({}, 0),
        ({0: (1, 0)}, 1),  # does not begin at the beginning
        ({5: (3, 0)}, 2),  # nor end at the end, and goes back
        ({3: (3, 4)}, 1),  # a tile that the request has not
        ({2: (-5, 0)}, 1),
        ({1: (1 << 30, 7)}, 2),
    ],
)
def test_what_is_wrong_with_a_schedule(changes: dict[int, tuple[int, int]], said: int) -> None:
    points = [changes.get(at, point) for at, point in enumerate(WHOLE)]
    assert len(diagnose.of_schedule(points, LENGTHS)) == said
    assert diagnose.of_schedule([], LENGTHS) == []


def test_what_is_wrong_with_a_block_table() -> None:
    """Pages of tokens only: what lies behind them may be anything."""
    table = [[3, 1, 99], [-1, -1, -1], [0, 99, 99], [1, 2, 4]]
    assert diagnose.of_pages(table, [70, 0, 64, 192], 5, 64) == []
    assert diagnose.of_pages(table, [70, 0, 64, 193], 5, 64) == ["request 3 has 193 tokens, its row 3 pages of 64"]
    assert diagnose.of_pages(table, [129, 1, 64, 1], 5, 64) == [
        "request 0 has pages that are not there: [99]",
        "request 1 has pages that are not there: [-1]",
    ]
    assert diagnose.spread([5, 3, 4]) == "3 of 3 to 5"


def test_points_of_a_plan() -> None:
    words = np.arange(8, dtype=np.int32).view(np.uint8)
    workspace = SimpleNamespace(cpu=lambda: SimpleNamespace(numpy=lambda: words))
    config = SimpleNamespace(in_clusters=False, pieces=None, num_splits=3)

    class Bytes:
        def __getitem__(self, part: slice) -> Any:
            assert part == slice(None, 32)
            return workspace

    plan = SimpleNamespace(plan=SimpleNamespace(_config=config), workspace=Bytes())
    assert diagnose.schedule_of(plan) == [(0, 1), (2, 3), (4, 5), (6, 7)]
    plan.plan._config = None
    assert diagnose.schedule_of(plan) == []


def test_waiting_in_vain(gpu: type[Event], capfd: pytest.CaptureFixture[str]) -> None:
    """What it was is said, with stacks; the process ends."""
    ended: list[int] = []
    torch = SimpleNamespace(cuda=SimpleNamespace(Event=Event))
    steps = diagnose.Steps(torch, lambda: None, ended.append)
    gpu.questions = 3
    steps.wait("a quick one")
    steps.wait("a silent one", aloud=False)
    gpu.questions = float("inf")
    steps.replayed(lambda graph: None)("graph")
    assert ended == [diagnose.STANDS_STILL]
    told = capfd.readouterr().err
    assert "ms: a quick one" in told
    assert "silent" not in told
    assert "STANDS STILL: graph" in told
    assert "test_waiting_in_vain" in told  # its stack


def test_steps_are_taken_apart(gpu: type[Event], monkeypatch: pytest.MonkeyPatch, capfd: Any) -> None:
    """The first of each batch size that decode outside of a capture; preparing does what it does."""
    torch = pytest.importorskip("torch")
    from tests.bindings.test_sglang import batch, runner

    stand_in_sglang.install(monkeypatch)
    backend = plugin.create(runner(torch, drafts=3))
    module: Any = sys.modules["mla_cupy.integrations.sglang_backend"]
    faked = SimpleNamespace(cuda=SimpleNamespace(Event=Event), zeros=torch.zeros, isfinite=torch.isfinite)
    steps = diagnose.Steps(faked, module.mla_decode)
    kind = type(backend)
    for name in ("init_forward_metadata", "init_forward_metadata_out_graph"):
        monkeypatch.setattr(kind, name, steps.prepared(getattr(kind, name), name))
    backend.init_cuda_graph_state(3, 9)
    backend.init_forward_metadata_out_graph(batch(torch, [70, 20, 1]), in_capture=True)
    backend.init_forward_metadata(batch(torch, [70, 20], "extend"))
    assert capfd.readouterr().err == ""
    for mode in ("decode", "verify"):
        backend.init_forward_metadata_out_graph(batch(torch, [70, 20, 1], mode))
        told = capfd.readouterr().err
        longest = 70 if mode == "decode" else 73
        assert f"lengths 3 of {longest - 69} to {longest}, table (3, " in told
        assert "a layer's decode by itself" in told
        assert "WRONG" not in told
    backend.token_to_kv_pool.rows.fill_(float("nan"))
    backend.init_forward_metadata(batch(torch, [70, 20]))
    assert "WRONG: results that are not finite" in capfd.readouterr().err


def test_who_is_watched() -> None:
    """Every process of an engine that is asked about it, by its path; nobody else."""
    assert sglang_check.diagnosed(sglang_check.arguments([])) == {}
    asked, stacks = (
        sglang_check.diagnosed(sglang_check.arguments(["--diagnose", "30", *more])) for more in ([], ["--undisturbed"])
    )
    root = str(Path(__file__).parents[2])
    assert (asked[diagnose.SWITCH], stacks[diagnose.SWITCH]) == ("30.0", "30.0 stacks")
    code = "import sys; print(sum('diagnose' in type(x).__module__ for x in sys.meta_path))"
    for given, wanted in ((asked, "1"), (stacks, "0"), ({**asked, diagnose.SWITCH: ""}, "0")):
        path = os.pathsep.join([given["PYTHONPATH"].split(os.pathsep)[0], root])
        environment = {**os.environ, **given, "PYTHONPATH": path}
        done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
        assert done.stdout.strip() == wanted
