"""Race detection in global memory, for kernels whose blocks exchange data (``race_global=True``).

The scheme is that of :mod:`.hb` with one vector clock per block: warps of a block are not told apart. Atomics and
strong (volatile, relaxed, acquire, release) accesses order through their address and are not themselves checked; that
is generous to a kernel that forgets a fence beside a relaxed access.
"""

from __future__ import annotations

import numpy as np

from .errors import RaceError
from .hb import join


class GlobalRaces:
    """Shadow memory and clocks of one launch."""

    def __init__(self) -> None:
        self.agents: dict[int, int] = {}
        self.names: list[str] = []
        self.clocks: list[np.ndarray] = []
        self.shadow: dict[int, tuple[np.ndarray, np.ndarray, dict[int, np.ndarray]]] = {}
        self.places: dict[int, np.ndarray] = {}
        self.blocks: list[object] = []  # keeps identities alive

    def _agent(self, warp: object) -> int:
        block = warp.cta
        index = self.agents.get(id(block))
        if index is None:
            index = self.agents[id(block)] = len(self.names)
            self.names.append(f"block {block.ctaid}")
            self.blocks.append(block)
            self.clocks.append(np.zeros(index + 1, np.int64))
            self.clocks[index][index] = 1
        return index

    def _known(self, agent: int) -> np.ndarray:
        clock = self.clocks[agent]
        if len(clock) < len(self.names):
            clock = self.clocks[agent] = np.concatenate([clock, np.zeros(len(self.names) - len(clock), np.int64)])
        return clock

    def _words(self, buffer: object, offset: np.ndarray, size: int) -> tuple:
        key = id(buffer)
        if key not in self.shadow:
            count = buffer.size // 4 + 1
            self.shadow[key] = (np.zeros(count, np.intp), np.zeros(count, np.int64), {})
        words = offset.astype("i8")[:, None] // 4 + np.arange(max(1, size // 4))
        return (*self.shadow[key], words.reshape(-1))

    def read(self, warp: object, buffer: object, offset: np.ndarray, size: int, ins: object) -> None:
        """Check and record a plain read."""
        agent = self._agent(warp)
        known = self._known(agent)
        writer, clock, readers, words = self._words(buffer, offset, size)
        bad = clock[words] > known[writer[words]]
        if bad.any():
            self._report(warp, buffer, words, writer, bad, ins, "reads after a write of")
        readers.setdefault(agent, np.zeros(len(clock), np.int64))[words] = known[agent]

    def write(self, warp: object, buffer: object, offset: np.ndarray, size: int, ins: object) -> None:
        """Check and record a plain write."""
        agent = self._agent(warp)
        known = self._known(agent)
        writer, clock, readers, words = self._words(buffer, offset, size)
        # Sub-word stores of neighbours share a word; only whole-word writes are compared with other writers.
        if size >= 4:
            bad = clock[words] > known[writer[words]]
            if bad.any():
                self._report(warp, buffer, words, writer, bad, ins, "writes after a write of")
            for other, times in readers.items():
                if other != agent and (times[words] > known[other]).any():
                    where = np.full(len(writer), other)
                    self._report(warp, buffer, words, where, times[words] > known[other], ins, "writes after a read of")
        writer[words] = agent
        clock[words] = known[agent]

    def _report(
        self, warp: object, buffer: object, words: np.ndarray, who: np.ndarray, bad: np.ndarray, ins: object, verb: str
    ) -> None:
        word = int(words[np.flatnonzero(bad)[0]])
        warp.fail(
            RaceError,
            ins,
            f"race at byte {4 * word} of {buffer.name}: {verb} {self.names[who[word]]} without synchronisation",
        )

    def atomic(self, warp: object, address: np.ndarray) -> None:
        """Order through an atomic: it releases and acquires at its address."""
        self.release(warp, address)
        self.acquire(warp, address)

    def acquire(self, warp: object, address: np.ndarray) -> None:
        """Join what was released at the addresses."""
        agent = self._agent(warp)
        for place in {int(a) for a in address}:
            if place in self.places:
                self.clocks[agent] = join(self._known(agent), self.places[place])

    def release(self, warp: object, address: np.ndarray) -> None:
        """Publish the block's knowledge at the addresses."""
        agent = self._agent(warp)
        known = self._known(agent)
        for place in {int(a) for a in address}:
            self.places[place] = join(self.places.get(place), known)
        known[agent] += 1
