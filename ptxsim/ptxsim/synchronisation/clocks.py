"""Vector clocks: what every agent has seen of every other, and through which proxy fences.

An *agent* is anything that orders its own accesses: a warp, the matrix operations of a warpgroup, an mbarrier (for the
bytes that bulk copies write), a thread's bulk groups, a warp's tensor-core pipe. ``V[a, b]`` is how far agent ``a`` has
seen agent ``b``. ``P[a, b]`` is the same through a proxy fence: what generic accesses of ``b`` the asynchronous proxy
sees in shared memory when ``a`` issues an operation; ``G[a, b]`` is the same for global memory; ``T[a, b]`` is what
tensor-memory operations of ``a`` may rely on. ``loose`` holds a second V, P and G, and ``loose_T`` a second T, in which
rules of order that are broken (rules.CLOCKED) order, too: those that may be, or, where none may, all, to name the one
whose breach an error is.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ..rules import CLOCKED, ORDERING
from .shadow import PENDING, Shadow

_AGENTS = 128
"""Initial capacity in agents: most clusters have fewer, and growing costs more than unused room."""


class View:
    """Clocks that an access may rely on, one per agent; ``loose`` is the same where broken rules order (or None)."""

    __slots__ = ("clocks", "loose")

    def __init__(self, clocks: np.ndarray, loose: np.ndarray | None = None) -> None:
        self.clocks, self.loose = clocks, loose

    def meet(self, other: View) -> View:
        """Return the clocks that both may rely on."""
        both = self.loose is not None and other.loose is not None
        return View(meet(self.clocks, other.clocks), meet(self.loose, other.loose) if both else None)


class Clocks:
    """The vector clocks of one cluster, or of a launch."""

    def __init__(self, allow: frozenset[str] = frozenset()) -> None:
        self.allow = allow
        self.bent = allow & ORDERING or ORDERING
        self.tolerant = bool(allow & CLOCKED)
        self.names: list[str] = []
        self.homes: list[Any] = []
        self.warps: list[Any] = []
        self.fenced: set[int] = set()
        self.generic = np.zeros(_AGENTS, bool)
        self.soft = np.zeros(_AGENTS, bool)
        self.V, self.P, self.G, self.T = (np.zeros((_AGENTS, _AGENTS), np.uint32) for _ in range(4))
        self.loose = [np.zeros_like(self.V) for _ in range(3)] if self.bent & CLOCKED else []
        self.loose_T = self.T.copy()
        self.new_agent("initial state", False)

    def new_agent(self, name: str, generic: bool, home: Any = None, warp: Any = None, soft: bool = False) -> int:
        """Add an agent and return its number.

        Parameters
        ----------
        name : str
            Name in messages.
        generic : bool
            Whether the asynchronous proxy needs a fence to see what it accesses.
        home : Cta, optional
            Its block, where scopes matter.
        warp : Warp, optional
            The warp itself.
        soft : bool, optional
            Whether production kernels leave that fence out (the rule copy-proxy).
        """
        index = len(self.names)
        if index >= len(self.V):
            for name in ("V", "P", "G", "T", "loose_T"):
                setattr(self, name, _grown(getattr(self, name)))
            self.loose = [_grown(each) for each in self.loose]
            self.generic, self.soft = (np.concatenate([each, each & False]) for each in (self.generic, self.soft))
        self.names.append(name)
        self.homes.append(home)
        self.warps.append(warp)
        self.generic[index], self.soft[index] = generic, soft and "copy-proxy" in self.bent
        for matrix in (self.V, *self.loose[:1]):
            matrix[index, index] = 1
        return index

    # ---- ordering ----------------------------------------------------------------------------------------------
    def tick(self, agent: int) -> None:
        """Start a new epoch of an agent."""
        for matrix in (self.V, *self.loose[:1]):
            matrix[agent, agent] += 1

    def learn(self, agent: int, other: int, clock: int) -> None:
        """Let an agent know that another one has reached a clock."""
        for matrix in (self.V, *self.loose[:1]):
            matrix[agent, other] = max(int(matrix[agent, other]), clock)

    def finished(self, agent: int, own: int, clock: int) -> None:
        """Note that a warp's tensor-memory loads or stores are done; others learn it only after before_thread_sync."""
        self.fenced.add(own)
        self.tensor_learn(agent, own, clock)
        if "tcgen05-fence" in self.bent:
            self.learn_loosely(agent, own, clock)

    def learn_loosely(self, agent: int, other: int, clock: int) -> None:
        """Let an agent know this in the loose clocks, where broken rules order."""
        for matrix in self.loose[:1]:
            matrix[agent, other] = max(int(matrix[agent, other]), clock)

    def knows(self, agent: int, other: int) -> int:
        """Return how far an agent has seen another."""
        matrix = self.loose[0] if self.tolerant else self.V
        return int(matrix[agent, other])

    def snapshot(self, agent: int) -> list:
        """Return an agent's knowledge as it publishes it, and start a new epoch of the agent."""
        known = [matrix[agent].copy() for matrix in (self.V, self.P, self.G, *self.loose)]
        self.tick(agent)
        return known

    def loose_snapshot(self, agent: int) -> list:
        """Return what a broken rule publishes: knowledge for the loose clocks only ([] where there are none)."""
        if not self.loose:
            return []
        known = self.snapshot(agent)
        return [*(each * 0 for each in known[:3]), *known[3:]]

    def merge(self, store: list, known: list) -> None:
        """Join published knowledge into a store (a list of vectors, empty at first)."""
        store[:] = [join(a, b) for a, b in zip(store or [None] * len(known), known, strict=True)]

    def publish(self, agent: int, store: list) -> None:
        """Release: join an agent's knowledge into a store."""
        self.merge(store, self.snapshot(agent))

    def acquire(self, agent: int, store: list) -> None:
        """Acquire: join what was published into an agent's knowledge."""
        for matrix, vector in zip((self.V, self.P, self.G, *self.loose), store, strict=False):
            n = len(vector)
            np.maximum(matrix[agent, :n], vector, out=matrix[agent, :n])

    def acquire_loosely(self, agent: int, store: list) -> None:
        """Join what was published into an agent's knowledge where broken rules order."""
        for matrix, vector in zip(self.loose, store[3:], strict=False):
            n = len(vector)
            np.maximum(matrix[agent, :n], vector, out=matrix[agent, :n])

    def clock_of(self, agent: int, clock: int) -> list:
        """Return a store that says only that an agent reached a clock."""
        own = np.zeros(agent + 1, np.uint32)
        own[agent] = clock
        return [own, own * 0, own * 0] * (2 if self.loose else 1)

    def knowledge(self, agent: int) -> list:
        """Return what an agent has acquired from others, without its own latest accesses."""
        known = [matrix[agent].copy() for matrix in (self.V, self.P, self.G, *self.loose)]
        for each in known[::3]:
            each[agent] -= 1
        return known

    def proxy_fence(self, agent: int, shared: bool = True, everywhere: bool = False) -> None:
        """Make what the agent has seen visible to the asynchronous proxy in shared memory, global memory or both."""
        sets = [(self.V, self.P, self.G), *([tuple(self.loose)] if self.loose else [])]
        for seen, in_shared, in_global in sets:
            for matrix, wanted in ((in_shared, shared), (in_global, everywhere)):
                if wanted:
                    np.maximum(matrix[agent], seen[agent], out=matrix[agent])
        self.tick(agent)

    def tensor_after(self, agent: int) -> None:
        """tcgen05.fence::after_thread_sync: what the warp has seen orders its tensor-memory operations too."""
        np.maximum(self.T[agent], self.V[agent], out=self.T[agent])
        if self.loose:
            np.maximum(self.loose_T[agent], self.loose[0][agent], out=self.loose_T[agent])

    # ---- views -------------------------------------------------------------------------------------------------
    def generic_view(self, agent: int) -> View:
        """Return what an access of a warp may rely on."""
        return View(self.V[agent], self.loose[0][agent] if self.loose else None)

    def async_view(self, agent: int) -> View:
        """Return what an asynchronous operation issued by an agent may rely on in shared memory."""
        return self._through(agent, self.P, 1)

    def global_view(self, agent: int) -> View:
        """Return what an asynchronous operation issued by an agent may rely on in global memory."""
        return self._through(agent, self.G, 2)

    def _through(self, agent: int, fenced: np.ndarray, which: int) -> View:
        clocks = np.where(self.generic, fenced[agent], self.V[agent])
        return View(clocks, self._loose_through(agent, which) if self.tolerant else None)

    def _loose_through(self, agent: int, which: int) -> np.ndarray:
        return np.where(self.generic & ~self.soft, self.loose[which][agent], self.loose[0][agent])

    def tensor_view(self, agent: int, *own: int) -> View:
        """Return what a warp's tensor-memory operations may rely on; its own in-order agents are always seen."""
        views = [self.T[agent].copy()]
        if self.tolerant:
            views.append(np.maximum(self.T[agent], self._loose_tensor(agent)))
        for each in views:
            each[0] = 0
            each[list(own)] = PENDING
        return View(*views)

    def loose_view(self, agent: int, view: View, shadow: Shadow) -> np.ndarray:
        """Return what an access may rely on where broken rules order.

        If no rule may be broken, this is computed only when an error must name one, from the agent's knowledge then.
        """
        if view.loose is not None or not self.loose:
            return view.clocks if view.loose is None else view.loose
        if shadow.columns:
            return np.maximum(view.clocks, self._loose_tensor(agent))
        return np.maximum(view.clocks, self._loose_through(agent, 2 if shadow.name else 1))

    def freeing_view(self, agent: int, *own: int) -> View:
        """Return what a warp that frees tensor memory may rely on: also what no tcgen05 fence makes visible."""
        view = self.tensor_view(agent, *own)
        view.clocks = np.maximum(view.clocks, self.V[agent])
        return view

    def tensor_knows(self, agent: int, other: int) -> int:
        """Return how far a warp's tensor-memory operations have seen an agent."""
        loosely = self._loose_tensor(agent)[other] if self.tolerant else 0
        return int(max(self.T[agent, other], loosely))

    def _loose_tensor(self, agent: int) -> np.ndarray:
        """Return what a warp's tensor-memory operations may rely on where broken rules order."""
        return (self.loose[0] if "tcgen05-fence" in self.bent else self.loose_T)[agent]

    def tensor_learn(self, agent: int, other: int, clock: int) -> None:
        """Let a warp's tensor-memory operations rely on another agent's up to a clock."""
        for matrix in (self.T, self.loose_T):
            matrix[agent, other] = max(int(matrix[agent, other]), clock)


def _grown(matrix: np.ndarray) -> np.ndarray:
    """Return a matrix of twice the size."""
    grown = np.zeros((2 * len(matrix), 2 * len(matrix)), matrix.dtype)
    grown[: len(matrix), : len(matrix)] = matrix
    return grown


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
