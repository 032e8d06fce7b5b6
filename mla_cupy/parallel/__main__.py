"""Start a script in one process per GPU: `python -m mla_cupy.parallel --gpus 2 script.py`."""

from __future__ import annotations

import argparse
import os
import socket
import subprocess
import sys
import time
from collections.abc import Sequence

_POLL_SECONDS = 0.05
_GRACE_SECONDS = 5.0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m mla_cupy.parallel",
        description="Run a script in one process per rank. Each finds RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR and "
        "MASTER_PORT in its environment, as Rendezvous.from_environment() reads them; torchrun sets the same ones. "
        "When one process fails, the others are stopped.",
    )
    parser.add_argument("--gpus", type=int, required=True, metavar="N", help="processes, rank r for GPU r")
    parser.add_argument("--port", type=int, default=0, help="TCP port of the rendezvous (default: a free one)")
    parser.add_argument("script", help="Python file to run")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="its arguments")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run, and return the exit status of the first process that failed, else 0."""
    parser = _parser()
    given = parser.parse_args(argv)
    if given.gpus < 1:
        parser.error(f"argument --gpus: got {given.gpus}, expected at least 1")
    if not os.path.isfile(given.script):
        parser.error(f"argument script: no file {given.script!r}")
    port = given.port or _free_port()
    processes = [_start(given, rank, port) for rank in range(given.gpus)]
    try:
        return _wait(processes)
    except KeyboardInterrupt:
        return 130
    finally:
        _stop(processes)


def _start(given: argparse.Namespace, rank: int, port: int) -> subprocess.Popen[bytes]:
    place = {
        "RANK": rank,
        "LOCAL_RANK": rank,
        "WORLD_SIZE": given.gpus,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
    }
    environment = {**os.environ, **{name: str(value) for name, value in place.items()}}
    return subprocess.Popen([sys.executable, given.script, *given.arguments], env=environment)


def _wait(processes: list[subprocess.Popen[bytes]]) -> int:
    """Wait until all processes have succeeded, or one has failed."""
    while True:
        codes = [process.poll() for process in processes]
        failed = [code for code in codes if code]
        if failed:
            rank = codes.index(failed[0])
            print(f"rank {rank} ended with status {failed[0]}: the others are stopped", file=sys.stderr)
            return failed[0] if failed[0] > 0 else 128 - failed[0]
        if None not in codes:
            return 0
        time.sleep(_POLL_SECONDS)


def _stop(processes: list[subprocess.Popen[bytes]]) -> None:
    for process in processes:
        if process.poll() is None:
            process.terminate()
    deadline = time.monotonic() + _GRACE_SECONDS
    for process in processes:
        try:
            process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


if __name__ == "__main__":
    sys.exit(main())
