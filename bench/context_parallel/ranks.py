"""One decode step of every rank, captured in a graph and replayed on all GPUs at once."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import mla_cupy
from mla_cupy.parallel import ContextParallel, LocalGroup, NcclTransport, PeerTransport

from ..core.timer import percentile

SCALE = 192**-0.5

PAGE = 64
D_QK, D_V = 576, 512
STEPS = 8
"""Steps in a graph, so that launching it is a small part."""
LOAD_US, MAX_LOAD_REPLAYS = 1e5, 100
"""Replays of a step before those that are timed: a GPU at work lowers its clock, and raises it when work was light."""
TURNS = 5
"""Turns in which the replays of all steps are made."""


@dataclass(frozen=True)
class Problem:
    """b sequences of s_k tokens each, one query token of 128 heads, or fewer."""

    b: int
    s_k: int
    h_q: int = 128

    @property
    def name(self) -> str:
        """Such as b1-sk131072-h128."""
        return f"b{self.b}-sk{self.s_k}-h{self.h_q}"


@dataclass
class Rank:
    """A rank's inputs on its GPU: `tokens` are its own, random and finite."""

    problem: Problem
    world: int
    rank: int

    def __post_init__(self) -> None:
        import cupy

        b, world = self.problem.b, self.world
        local = len(range(self.rank, self.problem.s_k, world))
        pages = -(-local // PAGE)
        rng = cupy.random.default_rng(self.rank)
        self.cache = _normal(rng, (b * pages, PAGE, D_QK))
        self.q = _normal(rng, (b, 1, self.problem.h_q, D_QK))
        self.table = cupy.arange(b * pages, dtype=cupy.int32).reshape(b, pages)
        self.seqlens = cupy.full(b, self.problem.s_k, cupy.int32)
        self.out = cupy.empty((b, 1, self.problem.h_q // world, D_V), self.q.dtype)
        self.lse = cupy.empty((b, self.problem.h_q // world, 1), cupy.float32)
        self.plan = mla_cupy.plan_decode(
            max_b=b,
            s_q=1,
            h_q=self.problem.h_q,
            max_pages=pages,
            page_size=PAGE,
            dtype="bfloat16",
            shard=mla_cupy.Shard(world, self.rank),
        )
        self.plan.update(self.seqlens)
        # Heads outermost, as ContextParallel keeps them: no transport has to copy.
        self.partial = (
            cupy.empty((self.problem.h_q, b, 1, D_V), cupy.float32).transpose(1, 2, 0, 3),
            cupy.empty((self.problem.h_q, b, 1), cupy.float32).transpose(1, 0, 2),
        )

    def local(self) -> None:
        """Attend to the rank's own tokens only."""
        out, lse = self.partial
        arguments = self.q, self.cache, self.table, self.seqlens
        shard = mla_cupy.Shard(self.world, self.rank)
        mla_cupy.mla_decode(*arguments, scale=SCALE, shard=shard, plan=self.plan, out=out, lse=lse)

    def whole(self, context: ContextParallel) -> None:
        """The step, exchange included."""
        arguments = self.q, self.cache, self.table, self.seqlens
        context.decode(*arguments, scale=SCALE, plan=self.plan, out=self.out, lse=self.lse)

    def exchange(self, context: ContextParallel) -> None:
        """The exchange and merge of partial results that are there."""
        out, lse = self.partial
        context.merge(out, lse, out=self.out, lse=self.lse)


def _normal(rng: Any, shape: tuple[int, ...]) -> Any:
    """Normal numbers in bfloat16, a page at a time: whole caches in float32 would not fit beside each other."""
    import cupy
    import ml_dtypes

    made = cupy.empty(shape, ml_dtypes.bfloat16)
    step = max(1, (1 << 26) // (made.size // shape[0]))
    for begin in range(0, shape[0], step):
        piece = made[begin : begin + step].view(cupy.uint16)
        piece[...] = rng.standard_normal(piece.shape, dtype=cupy.float32).view(cupy.uint32) >> 16
    return made


def contexts(kind: str, world: int) -> list[ContextParallel]:
    """One per GPU; `kind` is "peer" or "nccl"."""
    if kind == "peer":
        return [ContextParallel(x) for x in PeerTransport.for_devices(range(world))]
    group = LocalGroup(world)
    return on_each(range(world), lambda rank: ContextParallel(NcclTransport(group.member(rank), device=rank)))


def on_each(ranks: Sequence[int], task: Callable[[int], Any]) -> list[Any]:
    """`task(rank)` on these ranks at once, each with its GPU as the current one."""
    import cupy

    def run(rank: int) -> Any:
        with cupy.cuda.Device(rank):
            return task(rank)

    with ThreadPoolExecutor(len(ranks)) as threads:
        return [future.result() for future in [threads.submit(run, rank) for rank in ranks]]


@dataclass(frozen=True)
class Step:
    """Step that is timed: each rank's call; the ranks of a group run together, the groups in turn."""

    calls: Sequence[Callable[[], None]]
    groups: Sequence[Sequence[int]]


def times_us(steps: Mapping[str, Step], replays: int) -> dict[str, float]:
    """Median microseconds of each step on its slowest rank. All are captured first, then replayed in turns.

    A step's time on GPUs at work differs by some percent within minutes; turns give all steps the same conditions.
    """
    graphs = {name: _captured(step) for name, step in steps.items()}

    def replayed(name: str, load: int, count: int) -> list[float]:
        by_rank = [x for group in steps[name].groups for x in _replayed(graphs[name], group, load, count)]
        return list(map(max, zip(*by_rank, strict=True)))

    loads = {name: min(MAX_LOAD_REPLAYS, int(LOAD_US / STEPS / replayed(name, 2, 1)[0])) for name in steps}
    samples: dict[str, list[float]] = {name: [] for name in steps}
    for turn in range(TURNS):
        share = len(range(turn, replays, TURNS))
        for name in steps:
            samples[name] += replayed(name, loads[name], share)
    return {name: percentile(sorted(x), 0.5) for name, x in samples.items()}


def _captured(step: Step) -> dict[int, Any]:
    """Graphs of `STEPS` calls, one for each rank, and their streams."""
    import cupy

    def capture(rank: int) -> Any:
        call, stream = step.calls[rank], cupy.cuda.Stream(non_blocking=True)
        with stream:
            for _ in range(2):
                call()
            stream.synchronize()
            stream.begin_capture()
            for _ in range(STEPS):
                call()
            return stream.end_capture(), stream

    return {rank: made for group in step.groups for rank, made in zip(group, on_each(group, capture), strict=True)}


def _replayed(graphs: Mapping[int, Any], group: Sequence[int], load: int, replays: int) -> list[list[float]]:
    """Microseconds of a call, by rank and replay, after `load` replays.

    A replay that is not timed goes before each one that is: ranks that wait for each other end it together, so what
    is timed does not have the threads' delays in it.
    """
    import cupy

    start = threading.Barrier(len(group))

    def run(rank: int) -> list[float]:
        samples = []
        graph, stream = graphs[rank]
        with stream:
            for _ in range(load):
                graph.launch(stream)
            for _ in range(replays):
                start.wait()
                begin, end = cupy.cuda.Event(), cupy.cuda.Event()
                graph.launch(stream)
                begin.record()
                graph.launch(stream)
                end.record()
                end.synchronize()
                samples.append(cupy.cuda.get_elapsed_time(begin, end) * 1e3 / STEPS)
        return samples

    return on_each(group, run)
