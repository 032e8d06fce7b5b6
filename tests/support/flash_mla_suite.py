"""FlashMLA's own tests, run against `mla_cupy.compat.flash_mla`.

    python -m tests.support.flash_mla_suite FLASHMLA/tests dense --shard 1/4 --log dense.txt

Takes the folder `tests` of a checkout of FlashMLA. Its scripts run as they are, but each case goes through here: cases
of other shards are skipped, nothing is timed, and the log gets one line per case: what came of it, and the case.
On a GPU; `--cpu` computes with the NumPy oracle instead, to try a few cases. Needs PyTorch.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import io
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TextIO
from unittest.mock import MagicMock

import torch

from mla_cupy.compat import flash_mla

SCRIPTS = {
    "dense": ("test_flash_mla_dense_decoding.py", "test_flash_mla"),
    "sparse-decode": ("test_flash_mla_sparse_decoding.py", "test_flash_mla"),
    "sparse-prefill": ("test_flash_mla_sparse_prefill.py", "run_test"),
}
"""The script, and its function that runs one case."""
_PASSED = SimpleNamespace(
    is_correct=True, compute_memory_ratio=0.0, achieved_tflops=0.0, achieved_gBps=0.0, time_usage_per_us=0.0
)
"""What the scripts are told of every case: true, and with the figures that one of them prints."""
_MOCKED = ("triton", "triton.language")
"""What the scripts import for timing only."""


class Cases:
    """Runs the cases of one shard, and counts what comes of them."""

    def __init__(self, shard: int, shards: int, max_cases: int | None, log: TextIO) -> None:
        self._shard, self._shards, self._max_cases, self._log = shard, shards, max_cases, log
        self.seen = 0
        self.counts: Counter[str] = Counter()

    def through(self, run: Callable[[Any], Any]) -> Callable[[Any], SimpleNamespace]:
        """The function that the script calls in place of `run`. It never fails, so that every case has its turn."""
        for name in _MOCKED:  # PyTorch must not take it for the real one
            if isinstance(sys.modules.get(name), MagicMock):
                del sys.modules[name]

        def run_case(case: Any) -> SimpleNamespace:
            self.seen += 1
            if self.seen % self._shards != self._shard % self._shards:
                return _PASSED
            if self._max_cases is not None and self.counts.total() >= self._max_cases:
                return _PASSED
            for name in ("test_performance", "num_runs"):
                if hasattr(case, name):
                    setattr(case, name, 0)
            outcome, said = self._outcome(run, case)
            self.counts[outcome.partition(":")[0]] += 1
            self._log.write(f"{outcome} | {case}\n{said if outcome != 'passed' else ''}")
            self._log.flush()
            return _PASSED

        return run_case

    @staticmethod
    def _outcome(run: Callable[[Any], Any], case: Any) -> tuple[str, str]:
        said = io.StringIO()
        try:
            with contextlib.redirect_stdout(said):
                passed = run(case)
        except torch.OutOfMemoryError as error:
            return f"out of memory: {str(error).splitlines()[0]}", said.getvalue()
        except Exception as error:
            return f"failed: {type(error).__name__} {error}", said.getvalue()
        correct = getattr(passed, "is_correct", passed)
        return ("failed: wrong result" if correct is False else "passed"), said.getvalue()


def run_script(path: Path, function: str, cases: Cases) -> None:
    """Run a script as the main program, with its function for one case replaced as soon as it is defined."""
    tree = ast.parse(path.read_text(), str(path))
    (at,) = (i for i, node in enumerate(tree.body) if isinstance(node, ast.FunctionDef) and node.name == function)
    tree.body[at + 1 : at + 1] = ast.parse(f"{function} = through({function})").body
    sys.path.insert(0, str(path.parent))
    sys.argv = [str(path)]
    with contextlib.redirect_stdout(io.StringIO()):
        exec(
            compile(tree, str(path), "exec"), {"__name__": "__main__", "__file__": str(path), "through": cases.through}
        )


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


def main() -> int:
    """Parse the arguments, run, and print the counts."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path, help="`tests` of a checkout of FlashMLA")
    parser.add_argument("suite", choices=SCRIPTS)
    parser.add_argument("--shard", default="1/1", help="which part of the cases, such as 2/4")
    parser.add_argument("--max-cases", type=int, help="stop after so many")
    parser.add_argument("--log", default="/dev/stderr")
    parser.add_argument("--cpu", action="store_true")
    given = parser.parse_args()
    shard, shards = map(int, given.shard.split("/"))
    sys.modules["flash_mla"] = flash_mla
    if given.cpu:
        pretend_cpu_is_gpu()
    script, function = SCRIPTS[given.suite]
    with open(given.log, "w") as log:
        cases = Cases(shard, shards, given.max_cases, log)
        run_script(given.folder / script, function, cases)
    found = ", ".join(f"{n} {what}" for what, n in sorted(cases.counts.items())) or "none run"
    print(f"{given.suite}, shard {given.shard} of {cases.seen} cases: {found}")
    return int(set(cases.counts) != {"passed"})


if __name__ == "__main__":
    sys.exit(main())
