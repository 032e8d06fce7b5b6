"""`bench compare-trees`: the protocol, who is asked when, what fails; and all of it on the NumPy backend."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from pathlib import Path

import pytest

from bench.cli import build_parser, main
from bench.core.errors import BenchError
from bench.operations import DECODE, OPERATIONS, SPARSE_BACKWARD
from bench.trees import child, command, parent
from bench.trees.process import Process
from tests.bench import small

ROOT = Path(__file__).resolve().parents[2]
CASE = DECODE.parse(small.SMALL["decode"][0])
SMALL = {name: cases[0] for name, cases in small.SMALL.items()}
#: Program of the processes, in place of the GPU.
SERVE = f"""
import sys, time
import mla_cupy  # the tree's
sys.path.insert(0, {str(ROOT)!r})
from tests.bench.conftest import HostDevice
class Wall:
    def start(self): self.begin = time.perf_counter()
    def stop_us(self): return (time.perf_counter() - self.begin) * 1e6
def device():
    made = HostDevice()
    made.watch = Wall()
    return made
from bench.trees import child
child.main(device)
"""


class FakeChild:
    """A tree whose calls take `us`, more in every later sample by `drift`."""

    def __init__(self, name, us, log, drift=0.0, **errors):
        self.tree, self.us, self.log, self.drift, self.errors = Path("/", name), us, log, drift, errors
        self.replies = []

    def send(self, request):
        self.log.append((self.tree.name, request["do"], request.get("method", "")))
        self.replies.append(self.answer(request))

    def receive(self):
        return self.replies.pop(0)

    def answer(self, request):
        error = self.errors.get(request["do"])
        if error and request.get("method", "graph") == "graph":
            return {"error": error}
        if request["do"] == "sample":
            self.us += self.drift
            return {"us": [self.us] * request["replays"]}
        return {
            "prepare": {"kernel": "k", "digest": "d" if self.tree.name == "old" else "e", "sets": 2},
            "record": {},
            "host": {"us": 9.0, "empty_us": 4.0},
            "describe": {"package": str(self.tree / "mla_cupy" / "__init__.py"), "gpu": "G", "arch": "sm_0"},
        }[request["do"]]


def compared(old_us=100.0, new_us=100.0, rounds=3, **behaviour):
    log = []
    old = FakeChild("old", old_us, log, drift=behaviour.pop("drift", 0.0))
    new = FakeChild("new", new_us, log, **behaviour)
    row = parent.compare_case(DECODE, CASE, "mla_cupy", old, new, parent.Options(rounds=rounds, replays=4))
    return row, log


def test_trees_take_turns_and_the_first_one_changes():
    row, log = compared(100.0, 101.0)
    assert [name for name, do, _ in log if do == "sample"] == ["old", "new", "new", "old", "old", "new"]
    assert row.ratio == pytest.approx(1.01)
    assert row.round_ratios == pytest.approx([1.01] * 3)
    assert (row.old.replays, row.new.us_median, row.method) == (12, 101.0, "graph")
    assert (row.new.host_us, row.new.empty_launch_us, row.same_results) == (9.0, 4.0, False)
    json.dumps(row.record(), allow_nan=False)


@pytest.mark.parametrize(
    ("new_us", "drift", "fails"), [(101.9, 0, False), (102.1, 0, True), (90, 0, False), (110, 20, False)]
)
def test_slower_means_by_more_than_the_limit_and_the_spread(new_us, drift, fails):
    assert compared(new_us=new_us, drift=drift)[0].fails(2) == fails


def test_both_use_events_if_one_cannot_be_captured():
    row, log = compared(record="no capture")
    assert row.method == "events"
    assert [(name, how) for name, do, how in log if do == "record"] == [
        ("old", "graph"),
        ("new", "graph"),
        ("old", "events"),
        ("new", "events"),
    ]


@pytest.mark.parametrize("step", ["prepare", "sample", "host"])
def test_an_error_is_the_reason_and_leaves_no_reply_behind(step):
    log = []
    old, new = FakeChild("old", 1.0, log, **{step: "illegal address"}), FakeChild("new", 1.0, log)
    row = parent.compare_case(DECODE, CASE, "mla_cupy", old, new, parent.Options())
    assert row.reason == "old: illegal address"
    assert row.ratio is None
    assert row.fails(1000)
    assert not old.replies
    assert not new.replies


def test_every_case_and_our_deterministic_call():
    log, rows = [], []
    old, new = FakeChild("old", 1.0, log), FakeChild("new", 1.0, log)
    work = [(DECODE, CASE), (SPARSE_BACKWARD, SPARSE_BACKWARD.parse(SMALL["sparse-backward"]))]
    assert parent.compare_all(work, old, new, parent.Options(rounds=1), rows.append) == rows
    assert [(row.op, row.implementation) for row in rows] == [
        ("mla_decode", "mla_cupy"),
        ("sparse_mla_backward", "mla_cupy"),
        ("sparse_mla_backward", "deterministic"),
    ]


def test_a_process_with_another_package_is_refused():
    lost = FakeChild("old", 1.0, [])
    lost.answer = lambda request: {"package": "/elsewhere/mla_cupy/__init__.py"}
    with pytest.raises(BenchError, match="imports /elsewhere"):
        parent.describe([lost])


def test_the_child_answers_errors_and_goes_on(device):
    replies = io.StringIO()
    requests = ['{"do": "record", "method": "graph"}', '{"do": "describe"}', '{"do": "nothing"}']
    tree = child.Tree(device)
    with pytest.raises(AttributeError):
        child.serve(tree, io.StringIO("\n".join(requests)), replies)
    first, second = (json.loads(line) for line in replies.getvalue().splitlines())
    assert first["error"].startswith("AssertionError")
    assert second["gpu"] == "host"


def test_the_child_finds_results_that_are_not_finite(device, numpy_backend, monkeypatch):
    monkeypatch.setattr(device, "count_not_finite", lambda array: 3)
    with pytest.raises(ArithmeticError, match="3 results"):
        child.Tree(device).prepare("decode", CASE.name, "bfloat16", "mla_cupy")


@pytest.mark.parametrize("name", OPERATIONS)
def test_the_child_loads_an_operation_by_name(name):
    assert child.load(name) is OPERATIONS[name]


def test_the_child_loads_no_other_operation():
    """An older package may lack what a later operation imports."""
    loaded = "sorted(name for name in sys.modules if name.startswith('bench.ops.'))"
    script = f"""
import sys
from bench.core.implementation import Choices
from bench.trees import child
child.load("decode").implementations(Choices())
print({loaded})
"""
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "['bench.ops.decode', 'bench.ops.decode_cases']"


# Processes and replies are the same for all operations; that each one runs, and is loaded, is tested without processes.
@pytest.mark.parametrize(
    "operation", [pytest.param(name, marks=[pytest.mark.slow] if i else []) for i, name in enumerate(OPERATIONS)]
)
def test_two_trees_on_the_numpy_backend(tmp_path, monkeypatch, capsys, operation):
    """Real processes; the trees are this one under two names."""
    from rich.console import Console

    monkeypatch.setenv("MLA_CUPY_BACKEND", "numpy")
    for name in ("old", "new"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "mla_cupy").symlink_to(ROOT / "mla_cupy")
    file = tmp_path / "trees.jsonl"
    trees = [str(tmp_path / name) for name in ("old", "new")]
    options = ["--operations", operation, "--case", SMALL[operation], "--rounds", "2", "--replays", "2"]
    args = build_parser().parse_args(["compare-trees", *trees, *options, "--json", str(file)])
    assert command.run(args, Console(width=200), SERVE) == 0
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    assert [row["implementation"] for row in rows] == parent.implementations(OPERATIONS[operation])
    for row in rows:
        assert (row["case"], row["same_results"], row["reason"]) == (SMALL[operation], True, "")
        assert row["ratio"] == pytest.approx(row["new"]["us_median"] / row["old"]["us_median"])
        assert row["trees"]["old"]["gpu"] == "host"
        assert str(tmp_path) not in json.dumps(row), "rows can be kept: they name no directories"
        assert row["old"]["replays"] == 4
        assert min(row["old"]["host_us"], row["old"]["empty_launch_us"]) > 0
    text = capsys.readouterr().out
    assert "equal" in text
    assert SMALL[operation] in text


def test_a_process_that_ends_is_said(tmp_path):
    (tmp_path / "mla_cupy").mkdir()
    (tmp_path / "mla_cupy" / "__init__.py").touch()
    with Process(tmp_path, "sys.exit(3)") as process, pytest.raises(BenchError, match="ended with status 3"):
        process.receive()


def test_what_cannot_run(tmp_path, capsys):
    assert main(["compare-trees", str(tmp_path), str(ROOT)]) == 2
    assert "no mla_cupy in it" in capsys.readouterr().err
    assert main(["compare-trees", str(ROOT), str(ROOT), "--case", CASE.name]) == 2
    assert "--operations with one name" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["compare-trees", str(ROOT), str(ROOT), "--operations", "merge"])
    assert "merge" in capsys.readouterr().err


@pytest.mark.parametrize(("limit", "status"), [(None, 0), ("2", 1), ("20", 0)])
def test_a_slower_row_fails_the_command(monkeypatch, capsys, limit, status):
    from rich.console import Console

    log = []

    class Fake(FakeChild):
        def __init__(self, tree, serve):
            super().__init__(tree.name, 100.0 if tree.name == "old" else 110.0, log)

        def __enter__(self):
            return self

        def __exit__(self, *exception):
            pass

    monkeypatch.setattr(command, "Process", Fake)
    limits = [] if limit is None else ["--fail-if-slower", limit]
    args = build_parser().parse_args(["compare-trees", "old", "new", "--operations", "decode", "--quick", *limits])
    assert command.run(args, Console(width=200)) == status
    assert ("FAIL" in capsys.readouterr().out) == bool(status)
