"""Synchronisation objects: mbarriers, named barriers and the cluster barrier."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..arithmetic.numeric import LaneSet
from ..errors import SyncError

_MAX_COUNT = (1 << 20) - 1
_KEPT = 64
"""Generations of a named barrier whose publications are kept."""


class MBarrier:
    """A 64-bit mbarrier object in shared memory.

    ``phase`` counts completed phases; ``pending`` arrivals and ``tx`` bytes are outstanding in the current one.
    """

    def __init__(self, cta: Any, offset: int, count: int) -> None:
        if not 1 <= count <= _MAX_COUNT:
            raise SyncError(f"mbarrier count {count} is outside 1..2^20-1")
        self.cta, self.offset = cta, offset
        self.count = self.pending = count
        self.tx = 0
        self.phase = 0
        self.fenced = False
        self.gathered: list = []
        self.snapshot: list = []
        self.waits = 0
        self.created = (0, 0)
        self.seen: set[int] = set()
        detector = cta.cluster.detector
        self.agent = detector.new_agent(f"mbarrier {self.name}", False) if detector else 0
        self.stores: int | None = None

    def store_agent(self) -> int:
        """Return the agent of writes by st.async and red.async: the generic proxy, on behalf of the barrier."""
        detector = self.cta.cluster.detector
        if self.stores is None and detector:
            self.stores = detector.new_agent(f"asynchronous stores of mbarrier {self.name}", True, soft=True)
        return self.stores or 0

    @property
    def name(self) -> str:
        """Place of the barrier."""
        return f"at shared byte {self.offset} of block {self.cta.ctaid}"

    def state(self) -> str:
        """Describe the barrier for a deadlock report."""
        return (
            f"mbarrier {self.name}: {self.phase} phases completed, {self.pending} of {self.count} arrivals pending,"
            f" tx-count {self.tx}"
        )

    def expect(self, size: int) -> None:
        """Add to the tx-count."""
        self.tx += size
        if abs(self.tx) > _MAX_COUNT:
            raise SyncError(f"mbarrier {self.name}: tx-count {self.tx} is out of range")

    def arrive(self, count: int = 1, drop: bool = False) -> None:
        """Count arrivals; the phase completes when none is pending and the tx-count is zero."""
        if count < 1 or count > self.pending:
            raise SyncError(
                f"mbarrier {self.name}: {count} arrivals with {self.pending} of {self.count} pending"
                f" (phase {self.phase}, tx-count {self.tx})"
            )
        self.pending -= count
        if drop:
            self.count -= count
        self._advance()

    def complete_tx(self, size: int) -> None:
        """Subtract transferred bytes from the tx-count."""
        self.tx -= size
        if abs(self.tx) > _MAX_COUNT:
            raise SyncError(f"mbarrier {self.name}: tx-count {self.tx} is out of range")
        self._advance()

    def _advance(self) -> None:
        if self.pending == 0 and self.tx == 0:
            self.phase += 1
            self.pending = self.count
            detector = self.cta.cluster.detector
            if detector:
                self.snapshot = list(self.gathered)
                for agent in (self.agent, *([] if self.stores is None else [self.stores])):
                    detector.merge(self.snapshot, detector.clock_of(agent, self.phase))
            self.cta.launch.note_phase(self)

    def passed(self, parity: int) -> bool:
        """Tell whether the phase of a parity has completed (the one before the current phase)."""
        return (self.phase & 1) != parity

    def gather(self, agent: int) -> None:
        """Join an arriving agent's knowledge into what waiters will acquire."""
        detector = self.cta.cluster.detector
        if detector:
            detector.publish(agent, self.gathered)

    def gather_known(self, known: list | None) -> None:
        """Let waiters acquire what the issuer of an asynchronous operation had acquired before it issued."""
        if known:
            self.cta.cluster.detector.merge(self.gathered, known)

    def gather_clock(self, agent: int, clock: int) -> None:
        """Let waiters acquire that an asynchronous agent reached a clock."""
        detector = self.cta.cluster.detector
        if detector:
            detector.merge(self.gathered, detector.clock_of(agent, clock))

    def acquire(self, agent: int, at_once: bool = True) -> None:
        """Give a waiter what was published in the completed phase, at once or from its next fence on."""
        detector = self.cta.cluster.detector
        if detector and at_once:
            detector.acquire(agent, self.snapshot)
        elif detector and self.snapshot:
            detector.flags.found(agent, self.cta, self.snapshot)


class NamedBarrier:
    """One of the 16 barriers of a block. ``arrived`` holds the lanes of each warp that have come, as bit masks.

    The lanes of a warp may come one after another (``barrier`` without ``.aligned``); a warp all of whose live lanes
    have come counts 32 threads. Hardware counts arrivals, not who makes them: a warp that arrives without waiting may
    come again, and ``again`` holds the threads of its earlier arrivals.
    """

    def __init__(self, cta: Any, index: int) -> None:
        self.cta, self.index = cta, index
        self.generation = 0
        self.expected: int | None = None
        self.everyone = False
        self.arrived: dict[int, int] = {}
        self.again = 0
        self.gathered: list = []
        self.snapshots: dict[int, list] = {}
        self.values: list[int] = []
        self.results: dict[int, tuple[int, bool, bool]] = {}

    def state(self) -> str:
        """Describe the barrier for a deadlock report."""
        need = "all live warps" if self.everyone else f"{self.expected} threads"
        return f"barrier {self.index}: warps {sorted(self.arrived)} arrived, needs {need}"

    def threads(self) -> int:
        """Return how many threads have arrived."""
        return self.again + sum(32 if self.whole(self.cta.warps[w]) else n.bit_count() for w, n in self.arrived.items())

    def whole(self, warp: Any) -> bool:
        """Tell whether all live lanes of a warp have arrived."""
        bits = self.arrived.get(warp.index, 0)
        return bits == 0xFFFFFFFF or (bits != 0 and warp.live_bits() & ~bits == 0)

    def arrive(self, warp: Any, threads: int | None, lanes: LaneSet, fail: Callable) -> int:
        """Count the arrival of lanes of a warp and return its generation.

        Parameters
        ----------
        warp : Warp
            Who arrives.
        threads : int or None
            The instruction's thread count; None means every live thread of the block.
        lanes : numpy.ndarray or None
            Which of its lanes arrive; None means all.
        fail : callable
            Called with a message when the barrier is misused.
        """
        if threads is not None and (threads % 32 or threads <= 0):
            fail(f"barrier thread count {threads} is not a positive multiple of 32")
        if self.arrived and (self.everyone != (threads is None) or (threads is not None and threads != self.expected)):
            fail(f"barrier {self.index} is used with different thread counts: {self.expected} and {threads}")
        bits, before = warp.lane_bits(lanes), self.arrived.get(warp.index, 0)
        if bits & before:
            if threads is None or not self.whole(warp):
                fail(f"lanes of warp {warp.index} arrive twice at barrier {self.index} before its other lanes")
            self.again, before = self.again + 32, 0
        self.expected, self.everyone = threads, threads is None
        self.arrived[warp.index] = before | bits
        detector = self.cta.cluster.detector
        if detector:
            detector.publish(warp.agent, self.gathered)
        generation = self.generation
        self.check()
        return generation

    def check(self) -> None:
        """Complete the generation when everybody has arrived."""
        if not self.arrived:
            return
        if self.everyone:
            done = all(self.whole(w) for w in self.cta.warps if w.live)
        else:
            total = self.threads()
            if total > self.expected:
                raise SyncError(f"barrier {self.index}: {total} threads arrived, expected {self.expected}")
            done = total == self.expected
        if done:
            # A waiting warp may go on after others have used the barrier again.
            self.snapshots[self.generation] = self.gathered
            self.snapshots.pop(self.generation - _KEPT, None)
            self.generation += 1
            self.arrived, self.again, self.gathered = {}, 0, []

    def completed(self, generation: int) -> bool:
        """Tell whether a generation is over."""
        return self.generation > generation

    def acquire(self, warp: Any, generation: int) -> None:
        """Give a waiter what the arrivals published."""
        detector = self.cta.cluster.detector
        if detector and generation in self.snapshots:
            detector.acquire(warp.agent, self.snapshots[generation])


class ClusterBarrier:
    """``barrier.cluster``: every live thread of the cluster arrives, then waits."""

    def __init__(self, cluster: Any) -> None:
        self.cluster = cluster
        self.generation = 0
        self.arrived: set[tuple[int, int]] = set()
        self.gathered: list = []
        self.snapshot: list = []

    def state(self) -> str:
        """Describe the barrier for a deadlock report."""
        missing = sorted({(c.rank, w.index) for c in self.cluster.ctas for w in c.warps if w.live} - self.arrived)
        names = ", ".join(f"block rank {rank} warp {index}" for rank, index in missing[:8])
        return f"cluster barrier: {len(self.arrived)} warps arrived, {len(missing)} missing ({names})"

    def arrive(self, warp: Any, release: bool, fail: Callable) -> int:
        """Count a warp's arrival and return its generation."""
        key = (warp.cta.rank, warp.index)
        if key in self.arrived:
            fail("a warp arrives twice at the cluster barrier")
        self.arrived.add(key)
        detector = self.cluster.detector
        if detector and release:
            detector.publish(warp.agent, self.gathered)
        elif detector:
            # A relaxed arrive orders nothing by the letter; production kernels rely on it for their own block.
            loosely = detector.loose_snapshot(warp.agent) if "relaxed-order" in detector.bent else []
            for known in (detector.flags.fenced(warp.agent, "cluster"), loosely):
                if known:
                    detector.merge(self.gathered, known)
        generation = self.generation
        self.check()
        return generation

    def check(self) -> None:
        """Complete the generation when every live warp has arrived."""
        live = {(c.rank, w.index) for c in self.cluster.ctas for w in c.warps if w.live}
        if self.arrived and live <= self.arrived:
            self.snapshot, self.gathered = self.gathered, []
            self.generation += 1
            self.arrived = set()
