"""The process of one tree, as its parent sees it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from ..core.errors import BenchError

# `bench` is the new tree's in both processes; `mla_cupy` is found by PYTHONPATH, which is the tree under test.
BOOTSTRAP = "import sys; sys.path.insert(0, sys.argv[1]); import bench; del sys.path[0]; "
SERVE = "from bench.trees import child; child.main()"


class Child(Protocol):
    """A process that answers requests; `send` and `receive` are apart so that both trees can prepare at once."""

    tree: Path

    def send(self, request: Mapping[str, Any]) -> None: ...

    def receive(self) -> dict[str, Any]: ...


class Process:
    """`child` in a process of its own."""

    def __init__(self, tree: Path, serve: str = SERVE) -> None:
        self.tree = tree.resolve()
        if not (self.tree / "mla_cupy" / "__init__.py").is_file():
            raise BenchError(f"{tree}: no mla_cupy in it; expected the root of a checkout")
        bench_parent = Path(__file__).resolve().parents[2]
        # Another tree's sources and cubins must not be used, and nothing may be compiled during a measurement.
        environment = {
            key: value for key, value in os.environ.items() if key not in ("MLA_CUPY_CUDA_SRC", "MLA_CUPY_CUBIN_DIR")
        }
        self._process = subprocess.Popen(
            [sys.executable, "-c", BOOTSTRAP + serve, str(bench_parent)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=self.tree,
            env={**environment, "PYTHONPATH": str(self.tree), "MLA_CUPY_JIT": "lazy"},
        )

    def send(self, request: Mapping[str, Any]) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError as error:
            raise self._died() from error

    def receive(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise self._died()
        reply: dict[str, Any] = json.loads(line)
        return reply

    def _died(self) -> BenchError:
        return BenchError(f"the process of {self.tree} ended with status {self._process.wait()}; its errors are above")

    def close(self) -> None:
        """Ends the process."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.stdout.close()
        try:
            self._process.wait(timeout=30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def __enter__(self) -> Process:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()
