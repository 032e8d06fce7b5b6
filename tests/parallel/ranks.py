"""Processes of a group on this machine, forked from one that has imported PyTorch already."""

from __future__ import annotations

import datetime
import multiprocessing as mp
import os
import pickle
import signal
import socket
import traceback
from collections.abc import Callable
from multiprocessing.connection import wait
from typing import Any

_TIMEOUT = datetime.timedelta(seconds=60)


def on_all_ranks(
    world: int, task: Callable[..., Any], *arguments: Any, without: tuple[int, ...] = (), backend: str = "gloo"
) -> list[Any]:
    """Run `task(rank, *arguments)` in `world` processes of a group; return each one's result, or its traceback as text.

    The result is None for a process that ended without either, or that nobody waited for. With NCCL each rank has a GPU
    of its own.
    """
    context = mp.get_context("forkserver")
    context.set_forkserver_preload([__name__, "mla_cupy.torch.parallel"])
    processes, ends = [], []
    port = _free_port()
    for rank in range(world):
        mine, theirs = context.Pipe(duplex=False)
        place = (theirs, rank, world, port, backend, task, arguments)
        processes.append(context.Process(target=_run, args=place, daemon=True))
        processes[-1].start()
        theirs.close()
        ends.append(mine)
    try:
        return [None if rank in without else _received(end) for rank, end in enumerate(ends)]
    finally:
        for process in processes:
            process.kill()
            process.join()


def _received(end: Any) -> Any:
    if not wait([end], 2 * _TIMEOUT.total_seconds()):
        return f"nothing in {2 * _TIMEOUT}"
    try:
        return pickle.loads(end.recv_bytes())
    except EOFError:
        return None


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _run(end: Any, rank: int, world: int, port: int, backend: str, task: Any, arguments: tuple[Any, ...]) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo"}
    try:
        if backend == "nccl":
            torch.cuda.set_device(rank)
        dist.init_process_group(backend, rank=rank, world_size=world, timeout=_TIMEOUT)
        result = task(rank, *arguments)
    except Exception:
        result = traceback.format_exc()
    end.send_bytes(pickle.dumps(result))  # `send` would share the memory of tensors, which ends with this process
    signal.pause()  # stay until all have answered: a rank that leaves closes connections that others may still read
