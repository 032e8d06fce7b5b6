"""FlashMLA's own tests, run against `mla_cupy.compat.flash_mla`.

    python -m tests.support.flash_mla_suite FLASHMLA/tests dense sparse-decode sparse-prefill fmha --log cases.jsonl

Takes the folder `tests` of a checkout of FlashMLA. Its scripts run as they are, but each case goes through here: cases
of other shards are skipped, nothing is timed, and the log gets a line of JSON per case: what came of it, and the case.
Cases have the random seeds that they have in FlashMLA's own runs.

On a GPU; `--processes N` shares the cases out to N processes, `--gpus 0,1` these to GPUs. A case that runs out of
memory beside others runs once more alone. `--cpu` computes with the NumPy oracle instead, to try a few cases. Needs
PyTorch.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import dataclasses
import importlib
import inspect
import io
import json
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from multiprocessing import get_context
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import torch

from mla_cupy.compat import flash_mla

SCRIPTS = {
    "dense": ("test_flash_mla_dense_decoding.py", "test_flash_mla"),
    "sparse-decode": ("test_flash_mla_sparse_decoding.py", "test_flash_mla"),
    "sparse-prefill": ("test_flash_mla_sparse_prefill.py", "run_test"),
    "fmha": ("test_fmha_sm100.py", "test_flash_attention"),
}
"""The script, and its function that runs one case."""
OUT_OF_MEMORY = "out of memory"
_MOCKED = ("triton", "triton.language")
"""Modules that the scripts import for timing only."""
_COUNT = "count"
_THREADS = 2
"""PyTorch's host threads in each process."""

Row = dict[str, Any]


class Cases:
    """Runs the cases of a suite whose numbers, from 1 on, `claims` gives, in ascending order."""

    def __init__(self, suite: str, claims: Iterator[int], report: Callable[[Row], None]) -> None:
        self._suite, self._claims, self._report = suite, claims, report
        self._claimed = next(claims, 0)
        self.seen = 0

    def through(self, run: Callable[..., Any]) -> Callable[..., Any]:
        """The function that the script calls in place of `run`. It never fails, so that every case has its turn.

        A case is one record, or the arguments of `run`.
        """
        for name in _MOCKED:  # PyTorch must not take it for the real one
            if isinstance(sys.modules.get(name), MagicMock):
                del sys.modules[name]

        def run_case(*case: Any) -> Any:
            self.seen += 1
            if self.seen == self._claimed:
                self._run_one(run, case)
                self._claimed = next(self._claims, 0)
            return _Passed()

        return run_case

    def _run_one(self, run: Callable[..., Any], case: tuple[Any, ...]) -> None:
        record = case[0]
        for name in ("test_performance", "num_runs"):
            if hasattr(record, name):
                setattr(record, name, 0)
        if getattr(record, "seed", None) == -1:
            record.seed = self.seen - 1
        begin = time.perf_counter()
        outcome, said = _outcome(run, case)
        row = {"suite": self._suite, "case": self.seen, "outcome": outcome, "said": said}
        row |= {"seconds": round(time.perf_counter() - begin, 3), "parameters": _parameters(run, case)}
        self._report(row)
        torch.cuda.synchronize()  # after an error that the GPU does not recover from, the process ends


class _Passed:
    """A script's result of a case that was not timed."""

    is_correct = True

    def __getattr__(self, name: str) -> float:
        return 0.0


def _parameters(run: Callable[..., Any], case: tuple[Any, ...]) -> dict[str, Any]:
    """A case as plain data."""
    if dataclasses.is_dataclass(case[0]) and not isinstance(case[0], type):
        return dataclasses.asdict(case[0])
    return dict(inspect.signature(run).bind(*case).arguments)


def _outcome(run: Callable[..., Any], case: tuple[Any, ...]) -> tuple[str, str]:
    said = io.StringIO()
    try:
        with contextlib.redirect_stdout(said):
            passed = run(*case)
    except torch.OutOfMemoryError as error:
        return OUT_OF_MEMORY, str(error).splitlines()[0]
    except Exception as error:
        return "failed", f"{type(error).__name__} {error}\n{said.getvalue()}"
    return ("passed", "") if getattr(passed, "is_correct", passed) is not False else ("failed", said.getvalue())


def run_script(path: Path, function: str, cases: Cases) -> None:
    """Run a script as the main program, with its function for one case replaced as soon as it is defined."""
    tree = ast.parse(path.read_text(), str(path))
    (at,) = (i for i, node in enumerate(tree.body) if isinstance(node, ast.FunctionDef) and node.name == function)
    tree.body[at + 1 : at + 1] = ast.parse(f"{function} = through({function})").body
    names = {"__name__": "__main__", "__file__": str(path), "through": cases.through}
    sys.path.insert(0, str(path.parent))
    sys.argv = [str(path)]
    with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(SystemExit):
        exec(compile(tree, str(path), "exec"), names)


def pretend_cpu_is_gpu() -> None:
    """Let scripts for a GPU run without one."""
    made: Any = torch
    for name in _MOCKED:
        sys.modules.setdefault(name, MagicMock())
    torch.set_default_device("cpu")
    made.set_default_device = lambda device: None
    for name in ("set_device", "synchronize", "empty_cache", "manual_seed"):
        setattr(made.cuda, name, _nothing())  # each another function: PyTorch tells them apart
    made.cuda.get_device_capability = lambda: (9, 0)
    made.Tensor.cuda = lambda self: self


def _nothing() -> Callable[..., None]:
    return lambda *arguments: None


def time_nothing() -> None:
    """Scripts that time a case whether or not they are asked to are told a second."""
    try:
        timers: Any = importlib.import_module("triton.testing")
    except ImportError:
        timers = sys.modules.setdefault("triton", MagicMock()).testing
    timers.do_bench = lambda *arguments, **options: 1e3


def forget_defaults() -> None:
    """Undo a script's process-wide settings."""
    torch.set_default_dtype(torch.float32)
    torch.set_float32_matmul_precision("highest")


# ---- Processes ---------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Work:
    """Work that the processes of a run share. `only`: numbers of the cases by suite, unless it is a shard."""

    folder: Path
    suites: tuple[str, ...]
    shard: tuple[int, int]
    max_cases: int | None
    cpu: bool
    only: dict[str, list[int]] | None = None

    def number(self, suite: str, turn: int) -> int | None:
        """The case that comes in turn, from 0 on; None after the last one."""
        if self.only is not None:
            return self.only[suite][turn] if turn < len(self.only.get(suite, [])) else None
        if self.max_cases is not None and turn >= self.max_cases:
            return None
        shard, shards = self.shard
        return (shard - 1) % shards + 1 + turn * shards


def claims(work: Work, suite: str, taken: Any) -> Iterator[int]:
    """Numbers of cases, each to one process. `taken` counts them."""
    while True:
        with taken.get_lock():
            number = work.number(suite, taken.value)
            taken.value += number is not None
        if number is None:
            return
        yield number


def run_process(work: Work, gpu: str | None, taken: dict[str, Any], rows: Any) -> None:
    """One process's share of all suites; reports rows, and of each suite how many cases there are."""
    if gpu is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = gpu
    sys.modules["flash_mla"] = flash_mla
    made: Any = torch
    torch.set_num_threads(_THREADS)
    made.set_num_threads = _nothing()
    if work.cpu:
        pretend_cpu_is_gpu()
    for suite in work.suites:
        script, function = SCRIPTS[suite]
        cases = Cases(suite, claims(work, suite, taken[suite]), rows.put)
        time_nothing()
        run_script(work.folder / script, function, cases)
        forget_defaults()
        rows.put({"suite": suite, _COUNT: cases.seen})


def run_all(work: Work, gpus: Sequence[str | None], keep: Callable[[Row], None]) -> dict[str, int]:
    """Run in one process per entry of `gpus`; returns the number of cases of each suite."""
    context = get_context("spawn")
    rows: Any = context.Queue()
    taken = {suite: context.Value("q", 0) for suite in work.suites}
    processes = [context.Process(target=run_process, args=(work, gpu, taken, rows)) for gpu in gpus]
    for process in processes:
        process.start()
    counts: dict[str, int] = {}
    while any(process.is_alive() for process in processes) or not rows.empty():
        try:
            row = rows.get(timeout=1)
        except Exception:  # nothing came
            continue
        if _COUNT in row:
            counts[row["suite"]] = row[_COUNT]
        else:
            keep(row)
    return counts


def main() -> int:
    """Parse the arguments, run, and print the counts."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path, help="`tests` of a checkout of FlashMLA")
    parser.add_argument("suites", nargs="+", choices=SCRIPTS)
    parser.add_argument("--shard", default="1/1", help="which part of the cases, such as 2/4")
    parser.add_argument("--max-cases", type=int, help="largest number of cases per suite")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--gpus", help="ordinals, such as 0,1; default: what PyTorch takes")
    parser.add_argument("--log", default="/dev/stderr")
    parser.add_argument("--cpu", action="store_true")
    given = parser.parse_args()
    shard, shards = map(int, given.shard.split("/"))
    work = Work(given.folder, tuple(given.suites), (shard, shards), given.max_cases, given.cpu)
    ordinals = given.gpus.split(",") if given.gpus else [None]
    gpus = [ordinals[i % len(ordinals)] for i in range(given.processes)]
    found: dict[tuple[str, int], str] = {}
    with open(given.log, "w") as log:

        def keep(row: Row) -> None:
            found[row["suite"], row["case"]] = row["outcome"]
            log.write(json.dumps(row) + "\n")
            log.flush()

        counts = run_all(work, gpus, keep)
        again = {
            suite: sorted(n for (s, n), o in found.items() if s == suite and o == OUT_OF_MEMORY) for suite in counts
        }
        if given.processes > 1 and any(again.values()):
            run_all(dataclasses.replace(work, only=again), gpus[:1], keep)
    for suite in work.suites:
        totals = Counter(outcome for (of, _), outcome in found.items() if of == suite)
        said = ", ".join(f"{n} {what}" for what, n in sorted(totals.items())) or "none run"
        print(f"{suite}, shard {given.shard} of {counts.get(suite, 'unknown')} cases: {said}")
    return int(set(found.values()) != {"passed"})


if __name__ == "__main__":
    sys.exit(main())
