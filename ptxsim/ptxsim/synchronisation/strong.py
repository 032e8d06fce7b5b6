"""Strong accesses and fences: how flags in shared and global memory order other accesses.

A release publishes what its warp knows at the address, an acquire joins what was published there. A relaxed access
does so only together with a fence: a write publishes what the warp knew at its last fence, and what a read finds counts
from the warp's next fence on. A read-modify-write adds to what is published; a store replaces what other warps have
published, and goes on with what its own warp has. Both sides must name a scope that includes the other. Where the rule
relaxed-order may be broken, the detector's loose clocks count relaxed accesses as if a fence were beside them.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

SCOPES = ("cta", "cluster", "gpu", "sys")


@dataclass(frozen=True)
class Order:
    """Strength of an access: acquire, release, and its scope."""

    acquire: bool = False
    release: bool = False
    scope: str = "gpu"

    @property
    def strength(self) -> int:
        """Scope in which the access is strong: 1 for the block to 4 for the system (0 would be a weak access)."""
        return SCOPES.index(self.scope) + 1


@dataclass
class Published:
    """Publication by a warp of a block at an address within a scope (``loosely``: by breaking a rule)."""

    scope: str
    cta: Any
    store: list
    agent: int
    loosely: bool = False


def includes(scope: str, mine: Any, other: Any) -> bool:
    """Tell whether a scope around block ``mine`` includes block ``other``."""
    if scope == "cta":
        return mine is other
    return scope != "cluster" or mine.cluster is other.cluster


class Flags:
    """The published clocks of one detector, and the fences of its warps."""

    def __init__(self, detector: Any) -> None:
        self.detector = detector
        self.places: dict[tuple, list[Published]] = {}
        self.fences: dict[int, tuple[str, list]] = {}
        self.pending: dict[int, list[tuple[Any, list]]] = {}

    def matter(self, agent: int, order: Order, reduction: bool) -> bool:
        """Tell whether a write or atomic of a warp can order accesses, or end an order."""
        if order.release or agent in self.fences or "relaxed-order" in self.detector.allow:
            return True
        return not reduction and bool(self.places)

    def fence(self, agent: int, cta: Any, acquire: bool, release: bool, scope: str) -> None:
        """Execute a fence of a warp."""
        if acquire and agent in self.pending:
            later = []
            for writer, store in self.pending.pop(agent):
                if includes(scope, cta, writer):
                    self.detector.acquire(agent, store)
                else:
                    later.append((writer, store))
            if later:
                self.pending[agent] = later
        if release:
            self.fences[agent] = (scope, self.detector.snapshot(agent))

    def fenced(self, agent: int, scope: str) -> list:
        """Return the knowledge that a relaxed arrival in a barrier's scope may publish: all that a fence showed."""
        known = self.fences.get(agent)
        return known[1] if known and SCOPES.index(known[0]) >= SCOPES.index(scope) else []

    def found(self, agent: int, writer: Any, store: list) -> None:
        """Keep a block's publications that a relaxed read found for the warp's next fence."""
        for known, kept in self.pending.setdefault(agent, []):
            if known is writer:
                self.detector.merge(kept, store)
                return
        self.pending[agent].append((writer, [each.copy() for each in store]))

    def read(self, agent: int, cta: Any, keys: Iterable[tuple], order: Order) -> None:
        """Join the publications at addresses, at once or from the next fence on."""
        for key in set(keys):
            for each in self.places.get(key, ()):
                if not (includes(each.scope, each.cta, cta) and includes(order.scope, cta, each.cta)):
                    continue
                if order.acquire and not each.loosely:
                    self.detector.acquire(agent, each.store)
                    continue
                if not each.loosely:
                    self.found(agent, each.cta, each.store)
                if "relaxed-order" in self.detector.allow:
                    self.detector.acquire_loosely(agent, each.store)

    def write(self, agent: int, cta: Any, keys: Iterable[tuple], order: Order, update: bool) -> None:
        """Publish at addresses; ``update`` tells a read-modify-write."""
        scope, store, new = order.scope, [], []
        if order.release:
            store = self.detector.snapshot(agent)
        elif agent in self.fences:
            fence_scope, store = self.fences[agent]
            scope = min(scope, fence_scope, key=SCOPES.index)
        if store:
            new.append(Published(scope, cta, store, agent))
        if not order.release and "relaxed-order" in self.detector.allow:
            new.append(Published(order.scope, cta, self.detector.loose_snapshot(agent), agent, True))
        for key in set(keys):
            kept = self.places.get(key, [])
            others = [each for each in kept if update and each.agent != agent]
            # A release and later strong writes of its thread are one release pattern.
            own = [each for each in kept if each.agent == agent]
            self.places[key] = [*others, *latest(own + new)]


def latest(published: list[Published]) -> list[Published]:
    """Return the last of a warp's publications of each scope, which includes all earlier ones."""
    last: dict[tuple[str, bool], Published] = {}
    for each in published:
        key, at = (each.scope, each.loosely), 3 if each.loosely else 0
        if key not in last or each.store[at][each.agent] >= last[key].store[at][each.agent]:
            last[key] = each
    return list(last.values())


__all__ = ["Flags", "Order"]
