"""Order, skipping, and the child processes that may hang or die."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import pytest

from mla_cupy.errors import UnsupportedDeviceError
from mla_cupy.runtime import device
from mla_cupy.runtime.build import BuildRequest
from mla_cupy.runtime.device import VisibleGpu
from mla_cupy.selftest import calls, catalog, place, runner, trial
from mla_cupy.selftest.children import Children
from mla_cupy.selftest.place import Place
from mla_cupy.selftest.probe import Array, Finding, Machine, UnfitError, first_difference
from mla_cupy.selftest.trial import DIED, FAILED, HUNG, PASSED, SKIPPED, UNFIT

HERE = Machine("sm_100a", 0, True)
SIMULATED = Place("sm_100a", "", "none", "a test", "early")
GPU = Place("sm_100a", "a GPU", "580.1", "")


@dataclass(frozen=True)
class Fake:
    """A probe that does what it is told."""

    name: str
    needs: tuple[str, ...] = ()
    outcome: str = PASSED
    about: str = "nothing"
    archs: tuple[str, ...] = ("sm_100a",)
    seconds: float = 120.0

    def requests(self, arch: str) -> list[BuildRequest]:
        return []

    def run(self, machine: Machine) -> Finding:
        if self.outcome == DIED:
            raise RuntimeError("illegal instruction")
        if self.outcome == UNFIT:
            raise UnfitError("needs 128 heads")
        return Finding("x[0]: got 1, expected 2" if self.outcome == FAILED else "", "1 value")


def statuses(probes: list[Fake], keep_going: bool = False) -> list[str]:
    return [result.status for result in runner.run(probes, SIMULATED, keep_going)]


@pytest.mark.parametrize("bad", [FAILED, DIED])
def test_what_needs_a_failed_probe_is_skipped(bad: str) -> None:
    probes = [
        Fake("tmem/a", outcome=bad),
        Fake("copy/b"),
        Fake("mma/c", needs=("tmem/*",)),
        Fake("block/d", needs=("mma/*",)),  # by way of a skipped one
        Fake("reduce/e", needs=("copy/*",)),
    ]
    assert statuses(probes) == [bad, PASSED, SKIPPED, SKIPPED, PASSED]
    assert statuses(probes, keep_going=True) == [bad, *[PASSED] * 4]
    results = runner.run(probes, SIMULATED)
    assert results[2].message == f"tmem/a {bad}"
    assert results[3].message == "mma/c was skipped"


def test_what_does_not_apply_blocks_nothing() -> None:
    probes = [Fake("block/a", outcome=UNFIT), Fake("kernel/a", needs=("block/a",))]
    assert statuses(probes) == [UNFIT, PASSED]


def test_a_stage_that_hangs_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "Children", lambda place: children())
    hanging = [replace(Fake(f"mma/{i}"), seconds=0.2) for i in range(5)]
    monkeypatch.setattr(Children, "_send", hang_for_mma(Children._send))
    results = runner.run([*hanging, Fake("copy/a")], GPU)
    assert [result.status for result in results] == [*[HUNG] * 3, SKIPPED, SKIPPED, PASSED]
    assert results[3].message == "3 probes of mma hung"
    assert [result.status for result in runner.run(hanging[:4], GPU, keep_going=True)] == [HUNG] * 4


def hang_for_mma(send: Callable[[Children, str], None]) -> Callable[[Children, str], None]:
    return lambda self, line: send(self, "hangs" if line.startswith("mma/") else line)


def test_results_and_progress() -> None:
    told = []
    probes = [Fake("tmem/a"), Fake("tmem/b", outcome=DIED)]
    results = runner.run(probes, SIMULATED, tell=lambda name, result: told.append((name, result)))
    assert told == [("tmem/a", None), ("tmem/a", results[0]), ("tmem/b", None), ("tmem/b", results[1])]
    assert results[1].message == "RuntimeError: illegal instruction"
    assert trial.attempt(Fake("x", outcome=FAILED), HERE).message == "x[0]: got 1, expected 2"


def test_first_difference() -> None:
    wanted = np.arange(12, dtype=np.float32).reshape(3, 4)
    got = wanted.copy()
    assert first_difference("d", got, wanted) == ""
    got[1, 2], got[2, 0] = -1, np.nan
    assert first_difference("dump", got, wanted).startswith("dump[lane 1, column 2]: got -1.0, expected 6.0")
    assert first_difference("d", got, wanted) == "d[1, 2]: got -1.0, expected 6.0 (2 of 12 values differ)"
    assert first_difference("d", got, got) == ""
    assert "shape (12,), expected (3, 4)" in first_difference("d", got.reshape(-1), wanted)


EXACT = np.random.default_rng(0).standard_normal((50, 40))
EXACT[3, 3] = 100
AT_7 = np.arange(EXACT.size).reshape(EXACT.shape) == 7


@pytest.mark.parametrize(
    ("got", "said"),
    [
        (EXACT, ""),
        (EXACT * 1.001, ""),
        (EXACT + 2 * AT_7, "dq[0, 7]: got "),
        (np.where(AT_7, np.nan, EXACT), "dq[0, 7]: got nan"),
        (EXACT + 1.2, "dq: cosine distance"),  # no value is far off, but all of them are
        (EXACT * 0, "dq[3, 3]: got 0.0, expected 100 within 1.6"),
    ],
    ids=["same", "near", "one", "nan", "all", "zero"],
)
def test_calls_are_compared_by_value_and_direction(got: Array, said: str) -> None:
    error, found = calls.compare("dq", got, EXACT)
    assert said in found
    assert bool(found) == bool(said)
    assert error >= 0


# -- places ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def b200(monkeypatch: pytest.MonkeyPatch) -> None:
    """NVML shows one."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(device, "nvml_gpus", lambda: [VisibleGpu("NVIDIA B200", (10, 0), 1 << 37, "580.1")])


def test_place_on_a_gpu(b200: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(place.importlib.util, "find_spec", lambda name: object())
    assert place.default_arch() == "sm_100a"
    assert place.find("sm_100a") == Place("sm_100a", "NVIDIA B200", "580.1", "")
    assert place.find("sm_100a", simulate=True).reason == "asked for"
    other = place.find("sm_103a")
    assert other.simulated
    assert other.reason == "no sm_103a GPU here, only NVIDIA B200 (sm_100a)"
    monkeypatch.setattr(place.importlib.util, "find_spec", lambda name: None)
    assert "CuPy is not installed" in place.find("sm_100a").reason
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert place.find("sm_100a").reason == "no sm_100a GPU here"


def test_gpu_that_cuda_does_not_show(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "gpu_count", lambda: 0)
    with pytest.raises(UnsupportedDeviceError, match="CUDA shows no sm_100a GPU"), place.opened(GPU):
        pass


# -- children --------------------------------------------------------------------------------------------------------

CHILD = """
import json, os, sys, time
place = json.loads(sys.stdin.readline())
assert place["arch"] == "sm_100a", place
print("noise of a library")
{start}
print(json.dumps(dict(ready=True)), flush=True)
for line in sys.stdin:
    name = line.strip()
    if name == "hangs":
        time.sleep(60)
    if name == "crashes":
        print("Segmentation", flush=True)
        os.kill(os.getpid(), 11)
    if name == "ends":
        sys.exit(3)
    status = "died" if name == "dies" else "passed"
    message = "CUDARuntimeError: cudaErrorIllegalInstruction" if name == "dies" else str(os.getpid())
    print(json.dumps(dict(name=name, status=status, seconds=0.5, message=message)), flush=True)
"""


def children(start: str = "", **options: float) -> Children:
    return Children(GPU, [sys.executable, "-c", CHILD.format(start=start)], **options)


def test_bad_code_costs_one_probe_each() -> None:
    """A probe that hangs or dies is reported, and the next one gets a new child; good probes share theirs."""
    many = children()
    try:
        good = [many.run(Fake("one")), many.run(Fake("two"))]
        assert [result.status for result in good] == [PASSED, PASSED]
        assert good[0].message == good[1].message
        seen = {good[0].message}
        for name, status, said in (
            ("hangs", HUNG, "no answer after 0.3 s"),
            ("crashes", DIED, "the process ended: SIGSEGV; noise of a library; Segmentation"),
            ("ends", DIED, "the process ended: exit code 3"),
            ("dies", DIED, "cudaErrorIllegalInstruction"),
        ):
            bad = many.run(replace(Fake(name), seconds=0.3 if name == "hangs" else 120.0))
            assert (bad.name, bad.status) == (name, status)
            assert said in bad.message
            after = many.run(Fake("after"))
            assert after.status == PASSED
            assert after.message not in seen
            seen.add(after.message)
    finally:
        many.close()


@pytest.mark.parametrize(
    ("start", "status", "said"),
    [
        ("time.sleep(60)", HUNG, "before it began: no CUDA context after 0.3 s"),
        ("print(json.dumps(dict(error='no GPU')), flush=True); sys.exit()", DIED, "before it began: no GPU"),
        ("sys.exit(4)", DIED, "exit code 4"),
    ],
)
def test_child_that_does_not_begin(start: str, status: str, said: str) -> None:
    one = children(start, start_seconds=0.3 if status == HUNG else 120.0)
    result = one.run(Fake("x"))
    assert result.status == status
    assert said in result.message
    assert one.run(Fake("y")).status == status
    third = one.run(Fake("z"))
    assert third.status == DIED
    assert "not tried: 2 processes in a row could not begin" in third.message
    assert said.removeprefix("before it began: ") in third.message
    one.close()


def test_real_children() -> None:
    """The module's own child, with the simulator for a GPU: probes by their names, and it ends with its parent."""
    probes = {probe.name: probe for probe in catalog.probes("sm_100a")}
    real = Children(SIMULATED)
    try:
        for name in ("tmem/ld/16x256b.x1-lane16", "copy/gather4/4rows-none"):
            result = real.run(probes[name])
            assert result.status == PASSED, result.message
            assert result.compared
        process = real._process
        assert process is not None
        process.terminate()
        process.wait(120)
        killed, after = real.run(probes["reduce/s32-1groups"]), real.run(probes["reduce/s32-1groups"])
        assert (killed.status, killed.message) == (DIED, "the process ended: SIGTERM")
        assert after.status == PASSED
        process = real._process
        assert process is not None
        assert process.stdin is not None
        process.stdin.close()
        assert process.wait(120) == 0
    finally:
        real.close()


def test_runs_in_children_where_there_is_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "Children", lambda place: children())
    results = runner.run([Fake("one"), replace(Fake("hangs"), seconds=0.3), Fake("x", needs=("hangs",))], GPU)
    assert [result.status for result in results] == [PASSED, HUNG, SKIPPED]
    assert results[0].message != str(os.getpid())
    json.dumps([result.message for result in results])
