"""Waiting for another process that builds the same kernel: not for one that is stopped, or slower than we would be."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from tiny_kernels import REPOSITORY

from mla_cupy.runtime import lock, pulse
from mla_cupy.runtime.pulse import Pulse

HOLDER = """
import sys, time
from pathlib import Path
from mla_cupy.runtime import lock
with lock.building(Path(sys.argv[1])):
    print("held", flush=True)
    while True:
        time.sleep(0.01)
"""


@pytest.fixture
def entry(tmp_path: Path) -> Path:
    return tmp_path / "entry"


@pytest.fixture
def holder(entry: Path) -> Iterator[subprocess.Popen[str]]:
    """A process that holds the lock of the entry, and is at work."""
    command = [sys.executable, "-c", HOLDER, str(entry)]
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    yield process
    process.kill()
    process.wait()
    process.stdout.close()


def enter(entry: Path) -> threading.Thread:
    """A thread that ends once it has entered."""

    def body() -> None:
        with lock.building(entry):
            pass

    thread = threading.Thread(target=body, daemon=True)
    thread.start()
    return thread


def test_one_that_is_at_work_is_waited_for(
    entry: Path, holder: subprocess.Popen[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pulse, "PATIENCE_SECONDS", 0.5)
    waiting = enter(entry)
    waiting.join(3)
    assert waiting.is_alive()
    holder.kill()
    waiting.join(60)
    assert not waiting.is_alive()


def test_one_that_is_stopped_is_not_waited_for(
    entry: Path, holder: subprocess.Popen[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pulse, "PATIENCE_SECONDS", 0.5)
    holder.send_signal(signal.SIGSTOP)
    waiting = enter(entry)
    waiting.join(60)
    assert not waiting.is_alive()


def test_one_of_a_lower_priority_is_not_waited_for(entry: Path, holder: subprocess.Popen[str]) -> None:
    os.setpriority(os.PRIO_PROCESS, holder.pid, os.nice(0) + 5)
    waiting = enter(entry)
    waiting.join(60)
    assert not waiting.is_alive()


@pytest.mark.parametrize("text", ["", "x", "-1", "999999999999999999999", "4194305", "\x00"])
def test_a_holder_that_cannot_be_told_counts_as_one_at_work(
    entry: Path, holder: subprocess.Popen[str], text: str
) -> None:
    (entry.parent / ".locks" / "entry").write_text(text)
    waiting = enter(entry)
    waiting.join(0.3)
    assert waiting.is_alive()
    holder.kill()
    waiting.join(60)
    assert not waiting.is_alive()


def test_the_time_that_we_were_stopped_ourselves_does_not_count(holder: subprocess.Popen[str]) -> None:
    holder.send_signal(signal.SIGSTOP)
    watched = Pulse(holder.pid)
    watched.is_still(0.0)  # what it was at
    end = pulse.PATIENCE_SECONDS
    assert not watched.is_still(end / 2)
    assert watched.is_still(end / 2)
    holder.send_signal(signal.SIGCONT)


def test_nothing_is_known_of_a_process_that_is_not_there() -> None:
    assert not Pulse(0).is_still(1e9)
    assert not Pulse(0).is_still(1e9)
    assert not Pulse(0).yields_to_us()
