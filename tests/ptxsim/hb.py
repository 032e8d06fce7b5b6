"""Happens-before race and proxy detection for shared memory, with vector clocks.

An *agent* is anything that orders its own accesses: a warp, the share of a warp in asynchronous matrix operations, an
mbarrier (for the bytes that bulk copies write), a warp's bulk groups, a warp's tensor-core pipe. ``V[a, b]`` is how far
agent ``a`` has seen agent ``b``. ``P[a, b]`` is the same through a proxy fence: what generic accesses of ``b`` the
asynchronous proxy sees when ``a`` issues an operation. A word remembers its last writer (agent and clock) and, per
reading agent, the clock of its last read.
"""

from __future__ import annotations

import numpy as np

from .errors import RaceError

PENDING = np.uint32(0xFFFFFFFF)


class Shadow:
    """What the detector knows about each 4-byte word of one block's shared memory."""

    def __init__(self, words: int, columns: int = 0) -> None:
        self.columns = columns
        self.writer = np.zeros(words, np.intp)
        self.clock = np.zeros(words, np.uint32)
        self.mask = np.full(words, 15, np.uint8)
        self.atomic = np.zeros(words, bool)
        self.rows: dict[tuple[int, ...], int] = {}
        self.row_agents = np.zeros((0, 4), np.intp)
        self.reads = np.zeros((0, words), np.uint32)
        self.read_masks: np.ndarray | None = None
        self.writer4 = self.writer.reshape(-1, 4)
        self.clock4 = self.clock.reshape(-1, 4)

    def space(self, word: int) -> str:
        """Describe where a word is."""
        if self.columns:
            return f"tensor memory lane {word // self.columns} column {word % self.columns}"
        return f"shared byte {word * 4}"

    def row(self, agents: tuple[int, ...]) -> int:
        """Return the read row of an agent, or of four agents that read together."""
        if agents not in self.rows:
            index = self.rows[agents] = len(self.rows)
            if index >= len(self.reads):
                grown = np.zeros((max(8, 2 * len(self.reads)), self.reads.shape[1]), np.uint32)
                grown[: len(self.reads)] = self.reads
                self.reads = grown
                self.read_masks = None if self.read_masks is None else _grow_masks(self.read_masks, len(grown))
            four = agents if len(agents) == 4 else agents * 4
            self.row_agents = np.concatenate([self.row_agents, np.array([four], np.intp)])
        return self.rows[agents]


class Detector:
    """Vector clocks of one cluster, and the checks of accesses against them."""

    def __init__(self, strict: bool = True) -> None:
        self.strict = strict
        self.names: list[str] = []
        self.generic = np.zeros(64, bool)
        self.V = np.zeros((64, 64), np.uint32)
        self.P = np.zeros((64, 64), np.uint32)
        self.T = np.zeros((64, 64), np.uint32)
        self.new_agent("initial state", False)

    def new_agent(self, name: str, generic: bool) -> int:
        """Add an agent and return its number."""
        index = len(self.names)
        if index >= len(self.V):
            for key in ("V", "P", "T"):
                old = getattr(self, key)
                grown = np.zeros((2 * len(old), 2 * len(old)), np.uint32)
                grown[: len(old), : len(old)] = old
                setattr(self, key, grown)
            self.generic = np.concatenate([self.generic, np.zeros(len(self.generic), bool)])
        self.names.append(name)
        self.generic[index] = generic
        self.V[index, index] = 1
        return index

    # ---- ordering ----------------------------------------------------------------------------------------------
    def tick(self, agent: int) -> None:
        """Start a new epoch of an agent."""
        self.V[agent, agent] += 1

    def publish(self, agent: int, store: list) -> None:
        """Release: join an agent's knowledge into ``store`` (a pair of vectors or Nones), then tick."""
        store[0] = join(store[0], self.V[agent])
        store[1] = join(store[1], self.P[agent])
        self.tick(agent)

    def acquire(self, agent: int, store: list) -> None:
        """Acquire: join what was published into an agent's knowledge."""
        if store[0] is not None:
            n = len(store[0])
            np.maximum(self.V[agent, :n], store[0], out=self.V[agent, :n])
            np.maximum(self.P[agent, :n], store[1], out=self.P[agent, :n])

    def proxy_fence(self, agent: int) -> None:
        """Make what the agent has seen visible to the asynchronous proxy."""
        np.maximum(self.P[agent], self.V[agent], out=self.P[agent])
        self.tick(agent)

    def async_view(self, agent: int) -> np.ndarray:
        """Return what an asynchronous operation issued by an agent may rely on."""
        return np.where(self.generic, self.P[agent], self.V[agent])

    def knowledge(self, agent: int) -> list:
        """Return what an agent has acquired from others, without its own latest accesses."""
        known = [self.V[agent].copy(), self.P[agent].copy()]
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
    def read(self, agent: int, shadow: Shadow, words: np.ndarray, where: object, mask: int = 15) -> None:
        """Check and record a read by a warp."""
        row = self.V[agent]
        bad = shadow.clock[words] > row[shadow.writer[words]]
        if np.count_nonzero(bad):
            self._report(agent, shadow, words, bad, where, mask, "reads", row)
        key = (agent,)
        index = shadow.rows[key] if key in shadow.rows else shadow.row(key)
        shadow.reads[index, words] = row[agent]
        if shadow.read_masks is not None or not isinstance(mask, int):
            if shadow.read_masks is None:
                shadow.read_masks = np.full(shadow.reads.shape, 15, np.uint8)
            shadow.read_masks[index, words] = 0
            np.bitwise_or.at(shadow.read_masks[index], words, mask)

    def write(
        self, agent: int, shadow: Shadow, words: np.ndarray, where: object, mask: object = 15, atomic: bool = False
    ) -> None:
        """Check and record a write by a warp; ``mask`` tells which bytes of each word."""
        row = self.V[agent]
        bad = shadow.clock[words] > row[shadow.writer[words]]
        if atomic:
            bad &= ~shadow.atomic[words]
        if np.count_nonzero(bad):
            self._report(agent, shadow, words, bad, where, mask, "writes", row)
        if not (atomic and shadow.atomic[words].all()):
            self._check_reads(agent, shadow, words, row, where, mask)
        shadow.writer[words] = agent
        shadow.clock[words] = row[agent]
        if isinstance(mask, int):
            shadow.mask[words] = mask
        else:
            shadow.mask[words] = 0
            np.bitwise_or.at(shadow.mask, words, mask)
        shadow.atomic[words] = atomic

    def _check_reads(
        self, agent: int, shadow: Shadow, words: np.ndarray, row: np.ndarray, where: object, mask: object = 15
    ) -> None:
        count = len(shadow.rows)
        if not count:
            return
        known = row[shadow.row_agents[:count]].min(1)
        bad = shadow.reads[:count].take(words, axis=1) > known[:, None]
        if np.count_nonzero(bad):
            if shadow.read_masks is not None:
                bad &= (shadow.read_masks[:count][:, words] & np.asarray(mask, np.uint8)) != 0
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
        row = shadow.row(readers)
        shadow.reads[row, words] = np.uint32(clock)

    def async_write(
        self, agent: int, view: np.ndarray, shadow: Shadow, words: np.ndarray, writer: int, where: object
    ) -> None:
        """Check a write by the asynchronous proxy and mark the words as being written by agent ``writer``."""
        bad = shadow.clock[words] > view[shadow.writer[words]]
        if np.count_nonzero(bad):
            self._report(agent, shadow, words, bad, where, 15, "(asynchronously) writes", view)
        self._check_reads(agent, shadow, words.reshape(-1), self.V[agent], where)
        shadow.writer[words] = writer
        shadow.clock[words] = PENDING
        shadow.mask[words] = 15
        shadow.atomic[words] = False

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


def _grow_masks(masks: np.ndarray, rows: int) -> np.ndarray:
    """Return read masks with more rows."""
    grown = np.full((rows, masks.shape[1]), 15, np.uint8)
    grown[: len(masks)] = masks
    return grown
