"""Blocks and clusters in execution, the queue of asynchronous work, and one launch."""

from __future__ import annotations

import itertools
import warnings
from collections import Counter, deque
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NoReturn

import numpy as np

from ..arithmetic.numeric import constant
from ..errors import DeadlockError, SimError, StepLimitError, StrictWarning, SyncError
from ..memory.spaces import RANK_SHIFT, Buffer, Shared
from ..synchronisation.barriers import ClusterBarrier, MBarrier, NamedBarrier
from ..synchronisation.detector import Detector
from ..synchronisation.global_races import GlobalShadows
from ..synchronisation.lanes import Lanes
from ..synchronisation.shadow import Shadow
from .findings import Finding, brief, short_name
from .warp import Warp

_PATIENCE = 4
"""Rounds of the scheduler after which asynchronous work goes on although some warps can run."""


_REGISTERS = 65536
"""32-bit registers of an SM."""

_QUIET = frozenset(("cp", "bulk", "wgmma"))
"""Queues (by the first part of their keys) whose work signals nothing: a thread finishes it by waiting for it."""


class AsyncOp:
    """A piece of asynchronous work, which ``finish`` performs."""

    __slots__ = ("finish", "name", "start")

    def __init__(self, name: str, finish: Callable[[], None]) -> None:
        self.name, self.finish = name, finish
        self.start = 0


class Cta:
    """One thread block."""

    def __init__(self, cluster: Cluster, rank: int, ctaid: tuple[int, int, int]) -> None:
        self.cluster, self.rank, self.ctaid = cluster, rank, ctaid
        self.launch = cluster.launch
        self.program = self.launch.program
        size = self.program.dynamic_offset + self.launch.dynamic_shared
        self.shared = Shared(size, rank)
        self.shared_base = constant(self.shared.base, "u4")
        self.shadow = Shadow(self.shared.size // 4, block=ctaid) if self.launch.check else None
        self.named: dict[int, NamedBarrier] = {}
        self.mbarriers: dict[int, MBarrier] = {}
        self.tmem: Any = None
        self.warps: list[Warp] = []
        threads = int(np.prod(self.launch.block))
        self.lanes = Lanes(self.shared.size) if self.launch.race_lanes else None
        for index in range(-(-threads // 32)):
            self.warps.append(Warp(self, index, min(32, threads - 32 * index)))
        self.state: dict = {}
        self.registers = Counter(dict.fromkeys(range(len(self.warps)), self.launch.registers))

    def symbol(self, name: str) -> int:
        """Return a variable's address."""
        kind, offset = self.launch.locate(name)
        return offset + self.shared.base if kind == "shared" else offset

    def barrier(self, index: int) -> NamedBarrier:
        """Return a named barrier."""
        if index not in self.named:
            if not 0 <= index < 16:
                raise SyncError(f"barrier {index} does not exist (0..15)")
            self.named[index] = NamedBarrier(self, index)
        return self.named[index]

    @property
    def alive(self) -> bool:
        """Tell whether any thread has not exited."""
        return any(w.live for w in self.warps)

    def warp_exited(self, warp: Warp) -> None:
        """Re-check barriers that wait for all live threads."""
        for barrier in self.named.values():
            if barrier.everyone:
                barrier.check()
        self.cluster.barrier.check()
        if not self.alive:
            self._check_exit()

    def free(self) -> None:
        """Let go of the memory of a block that has run: blocks and warps refer to one another, and Python's
        collector of such cycles does not count bytes."""
        self.shared = self.shadow = self.lanes = self.tmem = None
        for warp in self.warps:
            warp.local = None

    def _check_exit(self) -> None:
        if self.tmem is not None:
            self.tmem.check_exit()
        for warp in self.warps:
            for key, group in warp.state.items():
                if key[0] == "bulk" and group.waited < group.issued:
                    text = (
                        f"block {self.ctaid} exits while bulk stores of {warp.name} lane"
                        f" {key[1]} may still read its shared memory (no wait_group)"
                    )
                    self.launch.bend("bulk-exit", SyncError, warp, text)
        for named in self.named.values():
            if named.arrived:
                # Legal (the hardware drops it), but worth knowing.
                self.launch.notes.append(f"block {self.ctaid} exits with leftovers: {named.state()}")
        for barrier in self.mbarriers.values():
            if barrier.tx:
                raise SyncError(f"kernel {self.program.name}: block {self.ctaid} exits with {barrier.state()}")


class Cluster:
    """The blocks of a cluster, which run together and share a race detector."""

    def __init__(self, launch: Any, index: int, ctaids: list[tuple[int, int, int]]) -> None:
        self.launch, self.index = launch, index
        self.detector = launch.detector or (Detector(launch.allow) if launch.check else None)
        if self.detector:
            self.detector.watch = launch.watcher
        # Work that may wake a warp, and work that only the wait of its own thread finishes (see _QUIET).
        self.queues: dict[tuple, deque[AsyncOp]] = {}
        self.quiet: dict[tuple, deque[AsyncOp]] = {}
        self.ctas: list[Cta] = []
        self.barrier = ClusterBarrier(self)
        for rank, ctaid in enumerate(ctaids):
            self.ctas.append(Cta(self, rank, ctaid))
        self.warps = [w for cta in self.ctas for w in cta.warps]
        self.serial = itertools.count()

    def member(self, warp: Warp, ins: Any, rank: int) -> Cta:
        """Return the block of a rank; a missing or exited one is an error."""
        if rank >= len(self.ctas):
            warp.sync_error(ins, f"block rank {rank} does not exist in a cluster of {len(self.ctas)}")
        cta = self.ctas[rank]
        if not cta.alive:
            warp.sync_error(ins, f"block rank {rank} of the cluster has already exited")
        return cta

    def submit(self, key: tuple | None, op: AsyncOp) -> None:
        """Queue asynchronous work; work under one key finishes in order. Key None: unordered."""
        op.start = self.launch.steps
        key = key or ("unordered", next(self.serial))
        queues = self.quiet if key[0] in _QUIET else self.queues
        if self.launch.mode == "early" and key not in queues:
            op.finish()
            self.launch.note_async(op)
            return
        queues.setdefault(key, deque()).append(op)

    def progress(self, key: tuple) -> bool:
        """Finish the head of one queue; return whether there was one."""
        queues = self.quiet if key[0] in _QUIET else self.queues
        queue = queues.get(key)
        if queue is None:
            return False
        op = queue.popleft()
        if not queue:
            del queues[key]
        op.finish()
        self.launch.note_async(op)
        return True

    def drain(self, key: Any, until: Callable[[], bool]) -> None:
        """Finish work of one queue, in order, until a condition holds (or it is stuck)."""
        while not until() and self.progress(key):
            pass

    def progress_any(self) -> bool:
        """Finish a piece of work chosen by the seed: work that signals, else other work."""
        return self._progress_one(self.queues) or self._progress_one(self.quiet)

    def progress_maybe(self, chance: float) -> None:
        """Finish, with some chance, a piece of work of either kind."""
        rng = self.launch.rng
        if rng.random() < chance:
            share = rng.random() * (len(self.queues) + len(self.quiet))
            self._progress_one(self.queues if share < len(self.queues) else self.quiet)

    def _progress_one(self, queues: dict[tuple, deque[AsyncOp]]) -> bool:
        return bool(queues) and self.progress([*queues][int(self.launch.rng.integers(len(queues)))])

    def free(self) -> None:
        """Let go of the memory of its blocks."""
        for cta in self.ctas:
            cta.free()

    @property
    def alive(self) -> bool:
        """Tell whether any block still runs."""
        return any(cta.alive for cta in self.ctas)


class Launch:
    """One kernel launch: grid, memory, scheduling mode, statistics."""

    def __init__(self, module: Any, program: Any, memory: Any, params: Buffer, **options: Any) -> None:
        self.module, self.program, self.memory, self.params = module, program, memory, params
        self.constants: Buffer = module.constants
        self.grid, self.block, self.cluster = options["grid"], options["block"], options["cluster"]
        self.dynamic_shared: int = options["smem"]
        self.mode: str = options["mode"]
        self.allow: frozenset[str] = options["allow"]
        self.check: bool = options["check"]
        self.resident: int = options["resident"]
        self.workspace: int = options.get("workspace", 0)
        self.step_limit: int = options["max_steps"]
        self.rng = np.random.default_rng(options["seed"])
        self.random = self.mode == "random"
        self.registers: int = registers_of(program.function.directives, int(np.prod(self.block)))
        self.steps = self.stale = 0
        self.counts = [0] * len(program.blocks)
        self.runs = [0] * len(program.blocks)  # of superblocks, by the block that they begin with
        self.traffic = [0] * 8
        self.counters: Counter = Counter()
        self.waits: dict[str, list[int]] = {}
        self.parked: list = []
        self.banks = options.get("banks")
        self.timeline = options.get("timeline")
        self.race_lanes = bool(options.get("race_lanes"))
        self.tma_outside = bool(options.get("tma_outside"))
        self.epochs = itertools.count(1)
        race_global = options.get("race_global")
        self.detector = Detector(self.allow) if race_global else None
        self.shadows = GlobalShadows(memory) if race_global else None
        self.tmem_base: int = options.get("tmem_base", 0)
        self.watcher: Callable | None = None
        self.exclusive: AbstractContextManager = nullcontext()  # held while global memory is read, changed and written
        self.progress: Callable[[int, int, int], None] | None = options.get("progress")
        self.keep_going: bool = options["keep_going"]
        self.found: dict[tuple, Finding] = {}
        self.printed: list[str] = []
        self.elect: str = options["elect"]
        self.elected: dict[bytes, int] = {}
        self.maps: dict[int, int] = {}
        self.notes: list[str] = []
        self.waiting: deque[tuple[int, list[tuple[int, int, int]]]] = deque()
        self.clusters: list[Cluster] = []

    def locate(self, name: str) -> tuple[str, int]:
        """Return the kind of a variable and its offset or address."""
        found = self.program.offsets.get(name) or self.module.offsets.get(name)
        if found is None:
            raise SimError(f"kernel {self.program.name}: symbol {name!r} is not defined")
        return found

    def note(self, text: str) -> None:
        """Record a legal oddity, once."""
        if text not in self.notes:
            self.notes.append(text)

    def keep(self, finding: Finding) -> bool:
        """Record a finding, unless an equal one is recorded already; return whether it is new."""
        new = finding.key not in self.found
        self.found.setdefault(finding.key, finding)
        return new

    def warn(self, finding: Finding) -> None:
        """Record an allowed breach of a rule, and warn of it once."""
        if self.keep(finding):
            warnings.warn(str(finding), StrictWarning, stacklevel=2)

    def stop(self, finding: Finding, kind: type[SimError]) -> NoReturn:
        """Raise a finding."""
        error = kind(str(finding))
        error.finding, error.findings = finding, [*self.found.values(), finding]
        raise error

    def bend(self, rule: str, kind: type[SimError], warp: Warp, text: str) -> None:
        """Raise, or warn if the rule may be broken, where no instruction is to blame but that a warp exits."""
        last = warp.program.instructions[-1]
        warp.bend(rule, kind, last, text)

    # ---- hooks of the statistics and the timeline ----------------------------------------------------------------
    def note_park(self, park: Any) -> None:
        """A fragment starts to wait."""
        park.since = self.steps
        self.parked.append(park)

    def note_wake(self, warp: Warp, park: Any) -> None:
        """A fragment resumes."""
        entry = self.waits.setdefault(park.name, [0, 0])
        entry[0] += 1
        entry[1] += self.steps - park.since
        if self.timeline is not None:
            self.timeline.wait(warp, park, self.steps)

    def note_async(self, op: AsyncOp) -> None:
        """Asynchronous work finished."""
        self.counters["async " + op.name] += 1
        if self.timeline is not None:
            self.timeline.asynchronous(op, self.steps)

    def note_phase(self, barrier: MBarrier) -> None:
        """An mbarrier completed a phase."""
        if self.timeline is not None:
            self.timeline.phase(barrier, self.steps)

    # ---- running -----------------------------------------------------------------------------------------------
    def cluster_origins(self) -> list[list[tuple[int, int, int]]]:
        """Return, per cluster, the coordinates of its blocks in rank order."""
        counts = [g // c for g, c in zip(self.grid, self.cluster, strict=False)]
        result = []
        for z, y, x in itertools.product(*(range(n) for n in reversed(counts))):
            origin = [i * c for i, c in zip((x, y, z), self.cluster, strict=False)]
            offsets = itertools.product(*(range(c) for c in reversed(self.cluster)))
            result.append([(origin[0] + i, origin[1] + j, origin[2] + k) for k, j, i in offsets])
        return result

    def run(self, clusters: Iterable[tuple[int, list[tuple[int, int, int]]]] | None = None) -> None:
        """Run clusters, given with their index and origins, or all of the grid; ``resident`` of them at a time."""
        self.waiting.extend(enumerate(self.cluster_origins()) if clusters is None else clusters)
        try:
            with np.errstate(all="ignore"):
                self._run_all()
        finally:
            self._count_blocks()
            for cluster in self.clusters:
                cluster.free()

    def _count_blocks(self) -> None:
        """Count the blocks of the superblocks that have run."""
        for start, times in enumerate(self.runs):
            for index in self.program.full[start][1] if times else ():
                self.counts[index] += times
        self.runs = [0] * len(self.runs)

    def _run_all(self) -> None:
        waiting = self.waiting
        total = len(waiting)
        while waiting or self.clusters:
            while waiting and len(self.clusters) < self.resident:
                index, ctaids = waiting.popleft()
                self.clusters.append(Cluster(self, index, ctaids))
            self._round()
            if self.progress is not None:
                self.progress(total - len(waiting) - len(self.clusters), total, self.steps)
            for cluster in [c for c in self.clusters if not c.alive]:
                self._retire(cluster)

    def _retire(self, cluster: Cluster) -> None:
        """Finish the work that a cluster left in flight, and drop the cluster."""
        while cluster.progress_any():
            pass
        self.clusters.remove(cluster)
        cluster.free()

    def _round(self) -> None:
        """Give every warp a turn; when none can move, finish asynchronous work."""
        moved = 0
        warps = [w for cluster in self.clusters for w in cluster.warps if w.live]
        if self.random:
            warps = [warps[i] for i in self.rng.permutation(len(warps))]
        for warp in warps:
            ran = warp.run(int(self.rng.integers(1, 64)) if self.random else 200)
            moved += ran
            if self.timeline is not None and ran:
                self.timeline.turn(warp, self.steps, self.steps + ran)
            self.steps += ran
            for park in self.parked:
                park.since = self.steps
            self.parked.clear()
            if ran and self.random:
                self.clusters[int(self.rng.integers(len(self.clusters)))].progress_maybe(0.1)
        if self.steps > self.step_limit:
            left = len(self.waiting)
            hint = f"; {left} clusters have not begun: if these wait for them, launch with resident={left + 1}"
            name = short_name(self.program.name)
            raise StepLimitError(
                f"kernel {name} ran {self.steps} basic blocks: over the step limit{hint if left else ''}\n{self.dump()}"
            )
        self.stale = self.stale + 1 if moved else 0
        if moved:
            if self.stale >= _PATIENCE:
                self._relieve(warps)
            return
        if self.module.on_idle is not None and self.module.on_idle():
            return
        order = self.rng.permutation(len(self.clusters))
        if not any(self.clusters[i].progress_any() for i in order) and any(c.alive for c in self.clusters):
            raise DeadlockError(f"kernel {short_name(self.program.name)}: deadlock\n{self.dump()}")

    def _relieve(self, warps: list[Warp]) -> None:
        """Finish a piece of work of each cluster when some warps wait while others keep running.

        Those may be polling memory for what a waiting warp will write once its copy has arrived.
        """
        self.stale = 0
        for cluster in {id(w.cta.cluster): w.cta.cluster for w in warps if w.waits}.values():
            cluster.progress_any()

    def dump(self) -> str:
        """Describe the place of every warp and the state of every barrier."""
        lines = []
        for cluster in self.clusters:
            for warp in cluster.warps:
                for fragment in warp.fragments:
                    ins = self.program.blocks[fragment.block].instrs[0]
                    why = fragment.park.what if fragment.park else "missing lanes" if fragment.waiting else "running"
                    lanes = "all lanes" if fragment.lanes is None else f"lanes {list(map(int, fragment.lanes))}"
                    source = self.program.source_line(ins)
                    place = f"line {ins.line}{f' ({source})' if source else ''}"
                    lines.append(f"  {warp.name} {lanes}: {place}: {why} [{brief(ins.text)}]")
            if cluster.barrier.arrived:
                lines.append(f"  {cluster.barrier.state()}")
            for cta in cluster.ctas:
                lines += [f"  {b.state()}" for b in cta.mbarriers.values()]
                lines += [f"  {b.state()} (block {cta.ctaid})" for b in cta.named.values() if b.arrived]
            for queue in (*cluster.queues.values(), *cluster.quiet.values()):
                lines.append(f"  in flight: {', '.join(op.name for op in queue)}")
        return "\n".join(lines)


def registers_of(directives: dict, threads: int) -> int:
    """Return a thread's registers at the start: the kernel's declaration, or a thread's share of the SM's registers.

    The compiler gives a kernel that uses ``setmaxnreg`` the largest number that its launch bounds allow.
    """
    if "maxnreg" in directives:
        return int(directives["maxnreg"][0])
    blocks = int(directives.get("minnctapersm", (1,))[0])
    warps = -(-threads // 32)
    return min(_REGISTERS // (blocks * 32 * warps) // 8 * 8, 256)


__all__ = ["RANK_SHIFT", "AsyncOp", "Cluster", "Cta", "Launch"]
