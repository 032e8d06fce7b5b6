"""Where SGLang stands still: its steps through our backend one by one, each waited for, in the process that runs them.

`sglang_check --diagnose SECONDS` puts the folder `watch` on the path of all of SGLang's processes, so that each of them
calls `watch` when it starts. Stacks of all threads are written every so many seconds, whatever happens; with
`--undisturbed` that is all. In the process that imports our backend, the first steps are taken apart: what the
schedule, the lengths and the pages say is held against one another, a layer's decode runs by itself, and each replay of
a graph is waited for. What is not done in `PATIENCE` seconds is named, and the process ends. Times mean nothing then.
"""

from __future__ import annotations

import faulthandler
import functools
import importlib.abc
import importlib.util
import itertools
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

SWITCH = "MLA_CUPY_DIAGNOSE_ENGINE"
"""Environment variable: seconds between stacks, and `ONLY` behind them where nothing is to be waited for."""
ONLY = "stacks"
MARK = "diagnosis:"
"""What every line begins with."""
PATIENCE = 8.0
EXAMINED = 6
"""Steps of each batch size that are taken apart, and said."""
STANDS_STILL = 86
"""Exit status of a process that waited in vain."""
_BACKEND = "mla_cupy.integrations.sglang_backend"


def watch() -> None:
    """Begin, in a process that has just started, if the environment says so."""
    asked = os.environ.get(SWITCH, "").split()
    if asked:
        faulthandler.dump_traceback_later(float(asked[0]), repeat=True, exit=False)
    if asked and ONLY not in asked:
        sys.meta_path.insert(0, _Finder())


def say(text: str) -> None:
    """Write a line at once: the process may be killed."""
    print(f"{MARK} {time.strftime('%H:%M:%S')} {os.getpid()} {text}", file=sys.stderr, flush=True)


class _Finder(importlib.abc.MetaPathFinder):
    """Has our backend's module changed when it has been imported."""

    def find_spec(self, name: str, path: Any, target: ModuleType | None = None) -> ModuleSpec | None:
        if name != _BACKEND:
            return None
        sys.meta_path.remove(self)
        found = importlib.util.find_spec(name)
        if found is not None and found.loader is not None:
            loader: Any = found.loader
            run = loader.exec_module

            def run_and_install(module: ModuleType) -> None:
                run(module)
                install(module)

            loader.exec_module = run_and_install
        return found


def install(module: Any) -> None:
    """Take steps apart that the backend of this module prepares, and wait for every graph."""
    import torch

    say("the backend is here")
    steps = Steps(torch, module.mla_decode)
    kind = module.MlaCupyBackend
    for name in ("init_forward_metadata", "init_forward_metadata_out_graph"):
        setattr(kind, name, steps.prepared(getattr(kind, name), name))
    torch.cuda.CUDAGraph.replay = steps.replayed(torch.cuda.CUDAGraph.replay)  # type: ignore[method-assign]


class Steps:
    """Steps of one process."""

    def __init__(self, torch: Any, decode: Callable[..., Any], give_up: Callable[[int], Any] = os._exit) -> None:
        self._torch, self._decode, self._give_up = torch, decode, give_up
        self._seen: dict[int, int] = {}
        self._said = ""  # of the step at hand, where it is one of the first

    def prepared(self, prepare: Callable[..., Any], name: str) -> Callable[..., Any]:
        """Prepare a step as `prepare` does, and take it apart if it decodes outside of a capture."""

        @functools.wraps(prepare)
        def preparing(backend: Any, forward_batch: Any, *given: Any, **named: Any) -> Any:
            made = prepare(backend, forward_batch, *given, **named)
            step, b = backend._step, forward_batch.batch_size
            mode = forward_batch.forward_mode
            captures = bool(named.get("in_capture") or (given and given[0]))
            self._said = ""
            if captures or not (mode.is_decode_or_idle() or mode.is_target_verify()) or step is None:
                return made
            self._seen[b] = self._seen.get(b, 0) + 1
            if self._seen[b] <= EXAMINED:
                self._said = f"{name}, b={b}, {step.plan!r}"
                self.wait(f"what comes before {self._said}")
                self.take_apart(backend, step)
            return made

        return preparing

    def replayed(self, replay: Callable[..., Any]) -> Callable[..., Any]:
        """Replay a graph, and wait for it."""

        @functools.wraps(replay)
        def replaying(graph: Any) -> None:
            replay(graph)
            self.wait(f"graph of {self._said}" if self._said else "graph", aloud=bool(self._said))

        return replaying

    def take_apart(self, backend: Any, step: Any) -> None:
        """Say what a step consists of, and run its decode of the first layer once, of zeros."""
        step.plan.update(step.seqlens)
        self.wait("the schedule")
        lengths, table = step.seqlens.tolist(), step.block_table
        points = schedule_of(step.plan)
        cache = backend.token_to_kv_pool.get_key_buffer(0).view(-1, backend._page_size, backend.kv_cache_dim)
        say(f"lengths {spread(lengths)}, table {tuple(table.shape)}, cache {tuple(cache.shape)}, {len(points)} points")
        for problem in (*of_schedule(points, lengths), *of_pages(table.tolist(), lengths, len(cache), cache.shape[1])):
            say(f"WRONG: {problem}")
        sizes = backend._plans.sizes
        s_q = step.plan.plan._problem.s_q
        shape = len(lengths), s_q, sizes["h_q"], sizes["d_qk"]
        q = self._torch.zeros(shape, dtype=backend.q_data_type, device=table.device)
        rope = q[..., 512:] if sizes.get("q_rope") else None
        query = q if rope is None else q[..., :512]
        out, _ = self._decode(query, cache, table, step.seqlens, q_rope=rope, plan=step.plan, math=sizes["math"])
        self.wait("a layer's decode by itself")
        if not bool(self._torch.isfinite(out).all()):
            say("WRONG: results that are not finite")

    def wait(self, what: str, *, aloud: bool = True) -> None:
        """Wait for all that the current stream has; after `PATIENCE` seconds say so and end the process."""
        end, begun = self._torch.cuda.Event(), time.monotonic()
        end.record()
        while not end.query():
            if time.monotonic() - begun > PATIENCE:
                say(f"STANDS STILL: {what}")
                say(_utilization())
                faulthandler.dump_traceback(all_threads=True)
                self._give_up(STANDS_STILL)
                return
            time.sleep(0.0005)
        if aloud:
            say(f"done in {(time.monotonic() - begun) * 1e3:.1f} ms: {what}")


def schedule_of(plan: Any) -> list[tuple[int, int]]:
    """Points of a plan's schedule, (request, tile); none where a kernel needs none."""
    config = plan.plan._config
    if config is None or config.in_clusters or config.pieces:
        return []
    words = plan.workspace[: 8 * (config.num_splits + 1)].cpu().numpy().view("int32").tolist()
    return [*zip(words[::2], words[1::2], strict=True)]


def of_schedule(points: Sequence[tuple[int, int]], lengths: Sequence[int]) -> list[str]:
    """What is wrong with a schedule: it runs from the first request to behind the last, and never back."""
    if not points:
        return []
    found = []
    if points[0] != (0, 0) or points[-1] != (len(lengths), 0):
        found.append(f"the schedule runs from {points[0]} to {points[-1]}, not from (0, 0) to {(len(lengths), 0)}")
    for at, (before, point) in enumerate(itertools.pairwise(points)):
        request, tile = point
        inside = 0 <= request < len(lengths) and 0 <= tile < max(1, -(-lengths[request] // 64))
        if point < before or not (inside or point == (len(lengths), 0)):
            found.append(f"point {at + 1} of the schedule is {point}, after {before}")
    return found[:8]


def of_pages(table: Sequence[Sequence[int]], lengths: Sequence[int], num_pages: int, page_size: int) -> list[str]:
    """What is wrong with a block table: the pages of tokens that are there exist, and fit in a row."""
    found = []
    for request, (row, length) in enumerate(zip(table, lengths, strict=True)):
        needed = -(-length // page_size)
        if needed > len(row):
            found.append(f"request {request} has {length} tokens, its row {len(row)} pages of {page_size}")
        absent = [page for page in row[:needed] if not 0 <= page < num_pages]
        if absent:
            found.append(f"request {request} has pages that are not there: {absent[:4]}")
    return found[:8]


def spread(values: Sequence[int]) -> str:
    """How many, the least and the largest."""
    return f"{len(values)} of {min(values)} to {max(values)}" if values else "none"


def _utilization() -> str:
    query = "--query-gpu=utilization.gpu,clocks.sm,memory.used"
    try:
        told = subprocess.run(
            ["nvidia-smi", query, "--format=csv,noheader"], capture_output=True, timeout=5, check=True
        )
    except (OSError, subprocess.SubprocessError) as error:
        return f"nvidia-smi: {error}"
    return f"nvidia-smi: {told.stdout.decode().strip()}"
