"""Happens-before race and proxy detection with vector clocks.

An *agent* is anything that orders its own accesses: a warp, the share of a warp in asynchronous matrix operations, an
mbarrier (for the bytes that bulk copies write), a thread's bulk groups, a warp's tensor-core pipe. ``V[a, b]`` is how
far agent ``a`` has seen agent ``b``. ``P[a, b]`` is the same through a proxy fence: what generic accesses of ``b`` the
asynchronous proxy sees in shared memory when ``a`` issues an operation; ``G[a, b]`` is that of global memory. A word
remembers its last writer (agent and clock) and, per reading agent, the clock of its last read.
"""

from __future__ import annotations

import numpy as np

from .errors import RaceError
from .shadow import PENDING, Shadow
from .strong import SCOPES, Flags, includes


class Detector:
    """Vector clocks of one cluster (or of a launch), and the checks of accesses against them."""

    def __init__(self, strict: bool = True) -> None:
        self.strict = strict
        self.names: list[str] = []
        self.homes: list[object] = []
        self.generic = np.zeros(64, bool)
        self.V, self.P, self.G, self.T = (np.zeros((64, 64), np.uint32) for _ in range(4))
        self.flags = Flags(self)
        self.new_agent("initial state", False)

    def new_agent(self, name: str, generic: bool, home: object = None) -> int:
        """Add an agent (of a block, where that matters) and return its number."""
        index = len(self.names)
        if index >= len(self.V):
            for key in ("V", "P", "G", "T"):
                old = getattr(self, key)
                grown = np.zeros((2 * len(old), 2 * len(old)), np.uint32)
                grown[: len(old), : len(old)] = old
                setattr(self, key, grown)
            self.generic = np.concatenate([self.generic, np.zeros(len(self.generic), bool)])
        self.names.append(name)
        self.homes.append(home)
        self.generic[index] = generic
        self.V[index, index] = 1
        return index

    # ---- ordering ----------------------------------------------------------------------------------------------
    def tick(self, agent: int) -> None:
        """Start a new epoch of an agent."""
        self.V[agent, agent] += 1

    def snapshot(self, agent: int) -> list:
        """Return an agent's knowledge as it publishes it, and start a new epoch of the agent."""
        known = [self.V[agent].copy(), self.P[agent].copy(), self.G[agent].copy()]
        self.tick(agent)
        return known

    def merge(self, store: list, known: list) -> None:
        """Join published knowledge into a store (a list of vectors, empty at first)."""
        store[:] = [join(a, b) for a, b in zip(store or [None] * len(known), known, strict=True)]

    def publish(self, agent: int, store: list) -> None:
        """Release: join an agent's knowledge into a store."""
        self.merge(store, self.snapshot(agent))

    def acquire(self, agent: int, store: list) -> None:
        """Acquire: join what was published into an agent's knowledge."""
        for matrix, vector in zip((self.V, self.P, self.G), store, strict=False):
            n = len(vector)
            np.maximum(matrix[agent, :n], vector, out=matrix[agent, :n])

    def clock_of(self, agent: int, clock: int) -> list:
        """Return a store that says only that an agent reached a clock."""
        own = np.zeros(agent + 1, np.uint32)
        own[agent] = clock
        return [own, own * 0, own * 0]

    def proxy_fence(self, agent: int, shared: bool = True, everywhere: bool = False) -> None:
        """Make what the agent has seen visible to the asynchronous proxy in shared memory, global memory or both."""
        for matrix, wanted in ((self.P, shared), (self.G, everywhere)):
            if wanted:
                np.maximum(matrix[agent], self.V[agent], out=matrix[agent])
        self.tick(agent)

    def async_view(self, agent: int) -> np.ndarray:
        """Return what an asynchronous operation issued by an agent may rely on in shared memory."""
        return np.where(self.generic, self.P[agent], self.V[agent])

    def global_view(self, agent: int) -> np.ndarray:
        """Return what an asynchronous operation issued by an agent may rely on in global memory."""
        return np.where(self.generic, self.G[agent], self.V[agent])

    def knowledge(self, agent: int) -> list:
        """Return what an agent has acquired from others, without its own latest accesses."""
        known = [self.V[agent].copy(), self.P[agent].copy(), self.G[agent].copy()]
        known[0][agent] -= 1
        return known

    def tensor_view(self, agent: int, *own: int) -> np.ndarray:
        """Return what a warp's tensor-memory operations may rely on; its own in-order agents are always seen."""
        view = self.T[agent].copy()
        if not self.strict:
            # Production kernels go on after a barrier without tcgen05.fence::after_thread_sync.
            view = np.maximum(view, self.V[agent])
        view[0] = 0
        view[list(own)] = PENDING
        return view

    def tensor_after(self, agent: int) -> None:
        """tcgen05.fence::after_thread_sync: what the warp has seen orders its tensor-memory operations too."""
        np.maximum(self.T[agent], self.V[agent], out=self.T[agent])

    # ---- generic accesses --------------------------------------------------------------------------------------
    def read(
        self, agent: int, shadow: Shadow, words: np.ndarray, where: object, mask: object = 15, strength: int = 0
    ) -> None:
        """Check and record a read by a warp; a strong one does not conflict with strong writes."""
        row = self.V[agent]
        bad = shadow.clock[words] > row[shadow.writer[words]]
        if np.count_nonzero(bad):
            bad &= ~(self._tolerated(agent, shadow, words, strength) if strength else shadow.seen_last(words, row))
            self._report(agent, shadow, words, bad, where, mask, "reads", row)
        if shadow.updates and not strength:
            self._check_updates(agent, shadow, words, row, where, "reads")
        if shadow.bytes and not strength:
            self._check_bytes(agent, shadow, words, row, where, mask, "reads")
        if strength and shadow.updates:
            shadow.observe(agent, words, row[agent])
        key = (agent,)
        if not isinstance(mask, int):
            for value in np.unique(mask):
                index = shadow.row(key, strength > 0, int(value))
                shadow.reads[index][words[mask == value]] = row[agent]
            return
        index = shadow.row(key, True) if strength else shadow.rows[key] if key in shadow.rows else shadow.row(key)
        shadow.reads[index][words] = row[agent]

    def write(
        self, agent: int, shadow: Shadow, words: np.ndarray, where: object, mask: object = 15, strength: int = 0
    ) -> None:
        """Check and record a write by a warp; ``mask`` tells which bytes of each word."""
        row = self.V[agent]
        bad = shadow.clock[words] > row[shadow.writer[words]]
        if np.count_nonzero(bad):
            bad &= ~(self._tolerated(agent, shadow, words, strength) if strength else shadow.seen_last(words, row))
            self._report(agent, shadow, words, bad, where, mask, "writes", row)
        if shadow.updates and not strength:
            self._check_updates(agent, shadow, words, row, where, "writes")
        if shadow.bytes and not strength:
            self._check_bytes(agent, shadow, words, row, where, mask, "writes")
        self._check_reads(agent, shadow, words, row, where, mask, strength)
        if isinstance(mask, int):
            shadow.mask[words] = mask
        else:
            shadow.cover(agent, words, mask, int(row[agent]))
        shadow.writer[words] = agent
        shadow.clock[words] = row[agent]
        shadow.strength[words] = strength
        if strength and isinstance(mask, int):
            shadow.update(agent, words, row[agent])

    def _check_updates(
        self, agent: int, shadow: Shadow, words: np.ndarray, row: np.ndarray, where: object, verb: str
    ) -> None:
        """Check a weak access against the strong writes of every agent."""
        for writer, (clocks, _) in shadow.updates.items():
            bad = clocks[words] > row[writer]
            if np.count_nonzero(bad):
                bad &= ~shadow.seen(writer, words, row)
            if np.count_nonzero(bad):
                place = shadow.space(int(words.reshape(-1)[np.argmax(bad.reshape(-1))]))
                raise RaceError(
                    f"{where}: race at {place}: {self.names[agent]} {verb} after a strong write or reduction of"
                    f" {self.names[writer]} without synchronisation"
                )

    def _check_bytes(
        self, agent: int, shadow: Shadow, words: np.ndarray, row: np.ndarray, where: object, mask: object, verb: str
    ) -> None:
        """Check an access against writes of bytes in words whose other bytes were written later."""
        for (writer, written), clocks in shadow.bytes.items():
            bad = (clocks[words] > row[writer]) & ((np.asarray(mask, np.uint8) & written) != 0)
            if bad.any():
                place = shadow.space(int(words.reshape(-1)[np.argmax(bad.reshape(-1))]))
                raise RaceError(
                    f"{where}: race at {place}: {self.names[agent]} {verb} after a write of {self.names[writer]}"
                    " without synchronisation"
                )

    def _tolerated(self, agent: int, shadow: Shadow, words: np.ndarray, strength: int) -> np.ndarray:
        """Tell which words' last writes are strong enough not to conflict with a strong access."""
        both = np.minimum(shadow.strength[words], np.uint8(strength))
        fine = both > 0
        if self.strict and strength and np.count_nonzero(fine & (both < 3)):
            flat = fine.reshape(-1)
            for i in np.flatnonzero(flat):
                writer = self.homes[shadow.writer[words.reshape(-1)[i]]]
                scope = SCOPES[int(both.reshape(-1)[i]) - 1]
                flat[i] = writer is None or includes(scope, self.homes[agent], writer)
        return fine

    def _check_reads(
        self, agent: int, shadow: Shadow, words: np.ndarray, row: np.ndarray, where: object, mask: object = 15,
        strength: int = 0,
    ) -> None:  # fmt: skip
        """Check a write against earlier reads; a strong one does not conflict with strong reads."""
        count = len(shadow.rows)
        if not count:
            return
        known = row[shadow.row_agents[:count]].min(1)
        bad = shadow.reads[:count].take(words, axis=1) > known[:, None]
        if np.count_nonzero(bad):
            if strength:
                bad &= ~shadow.strong_rows[:count, None]
            if not isinstance(mask, int):
                bad &= (shadow.row_masks[:count, None] & mask) != 0
            if not bad.any():
                return
            hit, at = np.argwhere(bad)[0]
            reader = self.names[shadow.row_agents[hit, 0]]
            place = shadow.space(int(np.asarray(words).reshape(-1)[at]))
            raise RaceError(f"{where}: race at {place}: {self.names[agent]} writes what {reader} may still read")

    def _report(
        self,
        agent: int,
        shadow: Shadow,
        words: np.ndarray,
        bad: np.ndarray,
        where: object,
        mask: object,
        verb: str,
        row: np.ndarray,
    ) -> None:
        """Raise for a conflict with the last writer, unless it touched other bytes of the word."""
        flat = np.asarray(words).reshape(-1)
        space = shadow.space
        masks = np.broadcast_to(np.asarray(mask, np.uint8), flat.shape)
        overlap = bad.reshape(-1) & ((shadow.mask[flat] & masks) != 0)
        if not overlap.any():
            return
        at = int(np.flatnonzero(overlap)[0])
        word = int(flat[at])
        writer = int(shadow.writer[word])
        state = "an unfinished write" if shadow.clock[word] == PENDING else "a write"
        hint = ""
        if shadow.clock[word] <= self.V[agent, writer] and row is not self.V[agent]:
            missing = "tcgen05.fence::after_thread_sync" if shadow.columns else "proxy fence"
            hint = f" (it is ordered, but no {missing} makes it visible here)"
        raise RaceError(
            f"{where}: race at {space(word)}: {self.names[agent]} {verb} after {state} of"
            f" {self.names[writer]} without synchronisation{hint}"
        )

    # ---- asynchronous accesses ---------------------------------------------------------------------------------
    def async_read(
        self,
        agent: int,
        view: np.ndarray,
        shadow: Shadow,
        words: np.ndarray,
        readers: tuple[int, ...],
        clock: int,
        where: object,
    ) -> None:
        """Check a read by the asynchronous proxy against a view, and record it for later writers.

        Parameters
        ----------
        agent : int
            The issuing warp (for messages).
        view : numpy.ndarray
            What the operation may rely on (:meth:`async_view`, possibly of several warps).
        shadow : Shadow
            The memory that is read.
        words : numpy.ndarray
            Word indices.
        readers : tuple of int
            The agent (or four agents) that finish the read at ``clock``.
        clock : int
            Time stamp of the read in the readers' clocks.
        where : object
            Location for messages.
        """
        writers = shadow.writer[words]
        bad = shadow.clock[words] > view[writers]
        if np.count_nonzero(bad):
            self._report(agent, shadow, words, bad, where, 15, "(asynchronously) reads", view)
        if shadow.updates:
            self._check_updates(agent, shadow, words, view, where, "(asynchronously) reads")
        if shadow.bytes:
            self._check_bytes(agent, shadow, words, view, where, 15, "(asynchronously) reads")
        row = shadow.row(readers)
        shadow.reads[row][words] = np.uint32(clock)

    def async_write(
        self,
        agent: int,
        view: np.ndarray,
        shadow: Shadow,
        words: np.ndarray,
        writer: int,
        where: object,
        strength: int = 0,
    ) -> None:
        """Check a write by the asynchronous proxy and mark the words as being written by agent ``writer``.

        A reduction has a strength and does not conflict with other reductions and atomics.
        """
        bad = shadow.clock[words] > view[shadow.writer[words]]
        if np.count_nonzero(bad):
            bad &= ~self._tolerated(agent, shadow, words, strength)
            self._report(agent, shadow, words, bad, where, 15, "(asynchronously) writes", view)
        if shadow.updates and not strength:
            self._check_updates(agent, shadow, words, view, where, "(asynchronously) writes")
        if shadow.bytes and not strength:
            self._check_bytes(agent, shadow, words, view, where, 15, "(asynchronously) writes")
        self._check_reads(agent, shadow, words.reshape(-1), self.V[agent], where, strength=strength)
        shadow.writer[words] = writer
        shadow.clock[words] = PENDING
        shadow.mask[words] = 15
        shadow.strength[words] = strength
        if strength:
            shadow.update(writer, words, PENDING)

    def tensor_read(
        self, agent: int, view: np.ndarray, shadow: Shadow, words: np.ndarray, reader: int, clock: int, where: object
    ) -> None:
        """Check and record a tensor-memory read by one of a warp's asynchronous agents."""
        self.async_read(agent, view, shadow, words, (reader,), clock, where)

    def tensor_write(
        self, agent: int, view: np.ndarray, shadow: Shadow, words: np.ndarray, writer: int, clock: int, where: object
    ) -> None:
        """Check and record a tensor-memory write that its agent finishes at ``clock``."""
        bad = shadow.clock[words] > view[shadow.writer[words]]
        if np.count_nonzero(bad):
            self._report(agent, shadow, words, bad, where, 15, "(asynchronously) writes", view)
        self._check_reads(agent, shadow, words, view, where)
        shadow.writer[words] = writer
        shadow.clock[words] = clock

    def finish_write(self, shadow: Shadow, words: np.ndarray, writer: int, clock: int) -> None:
        """Turn a pending write into one that happened at a clock of its agent."""
        mine = words[(shadow.writer[words] == writer) & (shadow.clock[words] == PENDING)]
        shadow.clock[mine] = clock
        if writer in shadow.updates:
            open_words = words[shadow.updates[writer][0][words] == PENDING]
            shadow.update(writer, open_words, clock)

    def forbid(self, shadow: Shadow, words: np.ndarray, writer: int) -> None:
        """Make every access to words an error (a live mbarrier)."""
        shadow.writer[words] = writer
        shadow.clock[words] = PENDING


def join(store: np.ndarray | None, vector: np.ndarray) -> np.ndarray:
    """Return the element-wise maximum of two clock vectors (None is zero; lengths may differ)."""
    if store is None:
        return vector.copy()
    if len(store) < len(vector):
        store, vector = vector, store
    result = store.copy()
    np.maximum(result[: len(vector)], vector, out=result[: len(vector)])
    return result


def meet(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Return the element-wise minimum of two clock vectors; of agents that the shorter one does not know, nothing."""
    result = np.zeros(max(len(a), len(b)), a.dtype)
    both = min(len(a), len(b))
    np.minimum(a[:both], b[:both], out=result[:both])
    return result
