"""Compiling in child processes: they give the same result, and nothing that happens meanwhile ends badly."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tiny_kernels import ENDLESS_REQUEST, SLOW_REQUEST, TINY_REQUEST

from mla_cupy.errors import KernelCompileError
from mla_cupy.runtime import cache, loader, pulse, worker
from mla_cupy.runtime.build import BuildRequest, compile_kernel

Python = Callable[..., "subprocess.CompletedProcess[str]"]

EVENTUALLY = 120
"""Seconds after which something will not happen any more, on however busy a machine."""

PRELUDE = """
import os, sys, threading, time
from tiny_kernels import ENDLESS_REQUEST, SLOW_REQUEST, TINY_REQUEST
from mla_cupy.runtime import cache, loader, worker
"""


@pytest.fixture
def background(fresh: Path) -> Iterator[None]:
    """No worker outlives its test."""
    yield
    for child in list(worker._alive):
        child.close()
    worker._background.clear()


def alive(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def assert_gone(pid: int) -> None:
    end = time.monotonic() + EVENTUALLY
    while alive(pid) and time.monotonic() < end:
        time.sleep(0.02)
    assert not alive(pid)


def test_a_child_gives_what_this_process_would(fresh: Path) -> None:
    there = loader.obtain(TINY_REQUEST)
    here = compile_kernel(TINY_REQUEST)
    assert (there.cubin, there.ptx) == (here.cubin, here.ptx)
    assert {**there.info, "seconds": 0} == {**here.info, "seconds": 0}
    assert worker._alive == []


def test_errors_of_the_child_are_ours(fresh: Path, cuda_src: Path) -> None:
    (cuda_src / "common" / "scale.cuh").write_text("wrong\n")
    with pytest.raises(KernelCompileError, match=r"mla_tiny-3-sm_90a does not compile:\n.*scale\.cuh\(1\)"):
        loader.obtain(TINY_REQUEST)


def test_background_fills_the_cache(background: None) -> None:
    worker.start([TINY_REQUEST, SLOW_REQUEST])
    child = worker._background[-1]  # the import may have started one of its own
    assert loader.obtain(TINY_REQUEST).facts["threads"] == 128  # at once, whoever compiles it
    end = time.monotonic() + EVENTUALLY
    while not child.wait(SLOW_REQUEST, 0.1):
        assert time.monotonic() < end
    assert worker.cached(SLOW_REQUEST) is not None
    assert loader.obtain(SLOW_REQUEST).info["registers"] > 0


def test_a_call_joins_the_kernel_that_is_being_compiled(background: None, monkeypatch: pytest.MonkeyPatch) -> None:
    worker.start([SLOW_REQUEST])
    child = worker._background[-1]  # the import may have started one of its own
    while not child.started(SLOW_REQUEST):
        time.sleep(0.01)
    monkeypatch.setattr(loader, "_compile", lambda request: pytest.fail("compiled twice"))
    assert loader.obtain(SLOW_REQUEST).info["name"] == "mla_slow-plain-sm_90a"


def test_nothing_is_started_for_what_is_cached(background: None) -> None:
    loader.obtain(TINY_REQUEST)
    worker.start([TINY_REQUEST])
    assert worker._background == []


def test_start_never_raises(background: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLA_CUPY_NVRTC", "/nowhere/libnvrtc.so")
    worker.start([TINY_REQUEST])
    monkeypatch.delenv("MLA_CUPY_NVRTC")
    worker.start([BuildRequest("mla_none", "generic/none.cu", "sm_90a", (), "plain")])
    monkeypatch.setenv("MLA_CUPY_LINEINFO", "maybe")
    worker.start([TINY_REQUEST])
    monkeypatch.delenv("MLA_CUPY_LINEINFO")
    monkeypatch.setenv("MLA_CUPY_CUBIN_DIR", "/nowhere")  # warns, and here warnings are errors
    worker.start([TINY_REQUEST])
    assert worker._background == []
    with pytest.warns(RuntimeWarning, match="MLA_CUPY_CUBIN_DIR"):  # the first call says it
        loader.obtain(TINY_REQUEST)


def test_a_killed_background_costs_nothing_but_time(background: None) -> None:
    worker.start([TINY_REQUEST])
    child = worker._background[-1]  # the import may have started one of its own
    child._process.send_signal(signal.SIGKILL)
    assert loader.obtain(TINY_REQUEST).facts["threads"] == 128


def test_a_call_does_not_wait_for_a_stopped_background(background: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """It ends the compiler, which may hold a lock, and compiles for itself."""
    monkeypatch.setattr(pulse, "PATIENCE_SECONDS", 0.5)
    worker.start([SLOW_REQUEST])
    child = worker._background[-1]
    while not child.started(SLOW_REQUEST):
        time.sleep(0.01)
    child._process.send_signal(signal.SIGSTOP)
    assert loader.obtain(SLOW_REQUEST).info["registers"] > 0
    assert not alive(child._process.pid)


def test_a_stopped_compiler_is_an_error(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pulse, "PATIENCE_SECONDS", 0.5)
    child = worker.Worker([ENDLESS_REQUEST], inline=True)
    child._process.send_signal(signal.SIGSTOP)
    while not child.wait(ENDLESS_REQUEST, 0.1):
        pass
    with pytest.raises(KernelCompileError, match="the compiler process did nothing for 5 s and was ended"):
        child.result(ENDLESS_REQUEST)
    child.close()


def test_the_background_has_our_priority(background: None) -> None:
    """Else a call that joins it would wait longer, on a busy machine, than for a compiler of its own."""
    worker.start([ENDLESS_REQUEST])
    child = worker._background[-1]
    while not child.started(ENDLESS_REQUEST):
        time.sleep(0.01)
    time.sleep(0.1)
    assert os.getpriority(os.PRIO_PROCESS, child._process.pid) == os.nice(0)


def test_a_build_that_cannot_be_kept_is_said_once(fresh: Path, python: Python) -> None:
    """No file may have a byte, as on a full disk; the call computes all the same."""
    done = python(
        PRELUDE
        + """
import resource, warnings
warnings.simplefilter("always")
cache.places()
resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
for _ in range(2):
    assert loader.obtain(TINY_REQUEST).facts["threads"] == 128
    loader.forget()
"""
    )
    assert done.returncode == 0, done.stderr
    (said,) = [line for line in done.stderr.splitlines() if "RuntimeWarning" in line]
    assert "expected room for the compiled kernels; set MLA_CUPY_CACHE_DIR" in said


def test_a_killed_compiler_is_an_error_with_its_code(fresh: Path) -> None:
    child = worker.Worker([ENDLESS_REQUEST], inline=True)
    child._process.send_signal(signal.SIGKILL)
    while not child.wait(ENDLESS_REQUEST, 1.0):
        pass
    with pytest.raises(KernelCompileError, match=r"mla_slow-plain-sm_90a: the compiler process ended with code -9"):
        child.result(ENDLESS_REQUEST)
    child.close()


def test_without_an_interpreter_to_start_it_is_compiled_here(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker.sys, "executable", "")
    monkeypatch.setattr(worker, "Worker", lambda *_, **__: pytest.fail("a child was started"))
    assert loader.obtain(TINY_REQUEST).facts["threads"] == 128
    assert cache.usage()[0] == 1


@pytest.mark.parametrize("delay", [0.1, 0.3, 0.6, 1.0])
def test_exit_while_the_background_compiles(fresh: Path, python: Python, delay: float) -> None:
    done = python(
        PRELUDE
        + f"""
worker.start([ENDLESS_REQUEST])
print(worker._background[0]._process.pid, flush=True)
time.sleep({delay})
"""
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert_gone(int(done.stdout))


@pytest.mark.parametrize("delay", [0.2, 0.7])
def test_exit_while_a_daemon_thread_compiles(fresh: Path, python: Python, delay: float) -> None:
    done = python(
        PRELUDE
        + f"""
threading.Thread(target=loader.obtain, args=(ENDLESS_REQUEST,), daemon=True).start()
while not worker._alive:
    time.sleep(0.01)
time.sleep({delay})
print(*[child._process.pid for child in worker._alive])
"""
    )
    assert done.returncode == 0, done.stderr
    assert "Fatal" not in done.stderr
    assert done.stdout.strip()
    assert_gone(int(done.stdout))


@pytest.mark.parametrize("end", ["os._exit(0)", "os.kill(os.getpid(), 9)"])
def test_the_child_ends_with_a_parent_that_says_nothing(fresh: Path, python: Python, end: str) -> None:
    done = python(
        PRELUDE
        + f"""
worker.start([ENDLESS_REQUEST])
(child,) = worker._background
while not child.started(ENDLESS_REQUEST):
    time.sleep(0.01)
time.sleep(0.2)
print(child._process.pid, flush=True)
{end}
"""
    )
    assert done.returncode in (0, -9)
    assert_gone(int(done.stdout))


def test_fork_while_a_thread_compiles(fresh: Path, python: Python) -> None:
    """The child compiles the same kernel and another one; the parent's compilation goes on."""
    done = python(
        PRELUDE
        + """
import warnings; warnings.simplefilter("ignore", DeprecationWarning)  # Python's own, about threads and fork
thread = threading.Thread(target=loader.obtain, args=(SLOW_REQUEST,))
thread.start()
while not worker._alive:
    time.sleep(0.01)
time.sleep(0.5)
pid = os.fork()
if pid == 0:
    loader.obtain(TINY_REQUEST)
    loader.obtain(SLOW_REQUEST)
    sys.exit(7)
assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
thread.join()
print(loader.obtain(SLOW_REQUEST).info["registers"] > 0)
"""
    )
    assert (done.returncode, done.stdout.strip(), done.stderr) == (0, "True", "")


def test_fork_after_import(fresh: Path, python: Python) -> None:
    """A forked child leaves the parent's worker alone, and compiles for itself."""
    done = python(
        PRELUDE
        + """
worker.start([SLOW_REQUEST])
pid = os.fork()
if pid == 0:
    loader.obtain(TINY_REQUEST)
    assert worker._background == []
    sys.exit(7)
assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
(child,) = worker._background
assert child._process.poll() is None, "the child's exit ended the parent's worker"
print(loader.obtain(SLOW_REQUEST).info["registers"] > 0)
"""
    )
    assert (done.returncode, done.stdout.strip(), done.stderr) == (0, "True", "")


def test_interrupt_ends_a_compilation_at_once(fresh: Path, python: Python) -> None:
    """Not after it: its kernel is not in the cache. A shell may have us started with SIGINT ignored."""
    done = python(
        PRELUDE
        + """
import signal
signal.signal(signal.SIGINT, signal.default_int_handler)
threading.Timer(0.6, os.kill, (os.getpid(), signal.SIGINT)).start()
try:
    loader.obtain(ENDLESS_REQUEST)
except KeyboardInterrupt:
    print(worker.cached(ENDLESS_REQUEST), worker._alive)
"""
    )
    assert (done.returncode, done.stdout.strip()) == (0, "None []"), done.stderr


def test_two_threads_share_one_compilation(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started = []
    real = loader._compile
    monkeypatch.setattr(loader, "_compile", lambda request: (started.append(request), real(request))[1])
    builds = []
    threads = [threading.Thread(target=lambda: builds.append(loader.obtain(TINY_REQUEST))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(started) == 1
    assert all(build is builds[0] for build in builds)


def test_build_all_reports_in_order_and_goes_on_after_an_error(fresh: Path, cuda_src: Path) -> None:
    (cuda_src / "generic" / "bad.cu").write_text("wrong\n")
    bad = BuildRequest("mla_bad", "generic/bad.cu", "sm_90a", (), "plain")
    seen: list[tuple[str, str]] = []
    outcomes = loader.build_all(
        [bad, TINY_REQUEST, TINY_REQUEST],
        2,
        lambda request, outcome: seen.append((request.entry, "start" if outcome is None else outcome.error[:7])),
    )
    assert [outcome.build is not None for outcome in outcomes] == [False, True, True]
    assert "does not compile" in outcomes[0].error
    assert sorted(seen) == [("mla_bad", "mla_bad"), ("mla_bad", "start"), ("mla_tiny", ""), ("mla_tiny", "start")]
    assert loader.build_all([TINY_REQUEST], 1)[0].was_cached
    assert worker._alive == []


def test_the_child_does_not_see_modules_of_the_working_directory(
    fresh: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "signal.py").write_text("raise SystemExit('shadowed')\n")
    (tmp_path / "json.py").write_text("raise SystemExit('shadowed')\n")
    monkeypatch.chdir(tmp_path)
    assert os.path.exists("json.py")
    assert loader.obtain(TINY_REQUEST).facts["threads"] == 128
