"""Happens-before race and proxy detection: accesses are checked against vector clocks (clocks.py), word by word.

A word remembers its last writer (agent, clock and instruction) and, per reading agent, the clock and instruction of its
last read. A conflict that only a broken rule orders (rules.CLOCKED) is reported under that rule's name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..arithmetic.numeric import count_nonzero, distinct
from .clocks import Clocks, View
from .shadow import PENDING, Box, Shadow
from .strong import SCOPES, Flags, includes


@dataclass(frozen=True)
class Conflict:
    """An unordered access: its word, agent, instruction and kind."""

    word: int
    agent: int
    site: int
    what: str


class Detector(Clocks):
    """Vector clocks of one cluster (or of a launch), and the checks of accesses against them."""

    def __init__(self, allow: frozenset[str] = frozenset()) -> None:
        super().__init__(allow)
        self.flags = Flags(self)
        self.watch: Callable | None = None

    # ---- generic accesses --------------------------------------------------------------------------------------
    def read(
        self, agent: int, shadow: Shadow, words: np.ndarray, where: Any, mask: np.ndarray | int = 15, strength: int = 0
    ) -> None:
        """Check and record a read by a warp; a strong one does not conflict with strong writes."""
        row = self.V[agent]
        if count_nonzero(shadow.clock[words] > row[shadow.writer[words]]) or (shadow.aside and shadow.hides(row)):
            self._against_writes(agent, shadow, words, self.generic_view(agent), where, "reads", mask, strength)
        if strength and shadow.updates:
            shadow.observe(agent, words, row[agent])
        if self.watch is not None:
            self.watch(shadow, words, where, "reads")
        if mask.__class__ is int:
            shadow.note_read(shadow.row(agent, strength > 0), words, row[agent], where.ins.number)
            return
        for value in distinct(mask):
            index = shadow.row(agent, strength > 0, value)
            shadow.note_read(index, words[mask == value], row[agent], where.ins.number)

    def write(
        self,
        agent: int,
        shadow: Shadow,
        words: np.ndarray,
        where: Any,
        mask: np.ndarray | int = 15,
        strength: int = 0,
        stored: tuple | None = None,
    ) -> None:
        """Check and record a write by a warp; ``mask`` tells which bytes of each word (``stored``: see Warp)."""
        row = self.V[agent]
        if count_nonzero(shadow.clock[words] > row[shadow.writer[words]]) or (shadow.aside and shadow.hides(row)):
            view = self.generic_view(agent)
            self._against_writes(agent, shadow, words, view, where, "writes", mask, strength, stored)
        self._against_reads(agent, shadow, words, where, mask, strength, row)
        if isinstance(mask, int):
            if shadow.partial:
                shadow.mask[words] = mask
        else:
            shadow.partial = True
            shadow.cover(agent, words, mask, int(row[agent]))
        self._wrote(agent, shadow, words, row[agent], where, strength, "writes")
        if strength and mask.__class__ is int:
            shadow.update(agent, words, row[agent])

    def _wrote(
        self, agent: int, shadow: Shadow, words: np.ndarray, clock: int, where: Any, strength: int, verb: str
    ) -> None:
        shadow.writer[words] = agent
        shadow.clock[words] = clock
        if strength or shadow.strong:
            shadow.strong = True
            shadow.strength[words] = strength
        shadow.sites[words] = where.ins.number
        if self.watch is not None:
            self.watch(shadow, words, where, verb)

    # ---- asynchronous accesses ---------------------------------------------------------------------------------
    def async_read(
        self,
        agent: int,
        view: View,
        shadow: Shadow,
        words: np.ndarray,
        reader: int,
        clock: int,
        where: Any,
        parts: Callable[[], Iterable[tuple]] | None = None,
    ) -> None:
        """Check a read by the asynchronous proxy against a view, and record it for later writers.

        Parameters
        ----------
        agent : int
            The issuing warp (for messages).
        view : View
            Clocks that the operation may rely on.
        shadow : Shadow
            The memory that is read.
        words : numpy.ndarray
            Word indices.
        reader : int
            The agent that finishes the read at ``clock``.
        clock : int
            Time stamp of the read in the reader's clock.
        where : Where
            The instruction and its warp.
        parts : callable, optional
            For a read by several warps that all rely on ``view``: pairs of (agent, view, where) and the
            words that this warp must see. They are looked at only where the common view does not suffice.
        """
        if count_nonzero(shadow.clock[words] > view.clocks[shadow.writer[words]]) or (
            shadow.aside and shadow.hides(view.clocks)
        ):
            for (who, seen, place), share in parts() if parts else [((agent, view, where), words)]:
                self._against_writes(who, shadow, share, seen, place, "(asynchronously) reads")
        if self.watch is not None:
            self.watch(shadow, words, where, "(asynchronously) reads")
        shadow.note_read(shadow.row(reader), words, np.uint32(clock), where.ins.number)

    def async_write(
        self,
        agent: int,
        view: View,
        shadow: Shadow,
        words: np.ndarray,
        writer: int,
        where: Any,
        strength: int = 0,
    ) -> None:
        """Check a write by the asynchronous proxy and mark the words as being written by agent ``writer``.

        A reduction has a strength and does not conflict with other reductions and atomics.
        """
        verb = "(asynchronously) writes"
        if count_nonzero(shadow.clock[words] > view.clocks[shadow.writer[words]]) or (
            shadow.aside and shadow.hides(view.clocks)
        ):
            self._against_writes(agent, shadow, words, view, where, verb, strength=strength)
        self._against_reads(agent, shadow, words.reshape(-1), where, 15, strength, self.V[agent], verb=verb)
        if shadow.partial:
            shadow.mask[words] = 15
        self._wrote(writer, shadow, words, PENDING, where, strength, verb)
        if strength:
            shadow.update(writer, words, PENDING)

    def tensor_read(
        self, agent: int, view: View, shadow: Shadow, words: np.ndarray, reader: int, clock: int, where: Any
    ) -> None:
        """Check and record a tensor-memory read by one of a warp's asynchronous agents."""
        self.async_read(agent, view, shadow, words, reader, clock, where)

    def tensor_write(
        self, agent: int, view: View, shadow: Shadow, words: np.ndarray, writer: int, clock: int, where: Any
    ) -> None:
        """Check and record a tensor-memory write that its agent finishes at ``clock``."""
        verb = "(asynchronously) writes"
        if count_nonzero(shadow.clock[words] > view.clocks[shadow.writer[words]]):
            self._against_writes(agent, shadow, words, view, where, verb)
        self._against_reads(agent, shadow, words, where, 15, 0, view.clocks, view, verb)
        self._wrote(writer, shadow, words, clock, where, 0, verb)

    def tensor_write_box(
        self, agent: int, view: View, shadow: Shadow, box: Box, writer: int, clock: int, where: Any
    ) -> None:
        """Do as tensor_write for a block of lanes and columns: faster, as long as nothing conflicts."""
        late = shadow.row_tops > view.clocks[shadow.row_agents]
        if (
            self.watch is not None
            or shadow.strong
            or count_nonzero(box.of(shadow.clock) > view.clocks.take(box.of(shadow.writer)))
            or any(
                count_nonzero(box.of(shadow.reads[i][0]) > view.clocks[shadow.row_agents[i]])
                for i in np.flatnonzero(late)
            )
        ):
            self.tensor_write(agent, view, shadow, box.cells(), writer, clock, where)
            return
        for table, value in ((shadow.writer, writer), (shadow.clock, clock), (shadow.sites, where.ins.number)):
            box.of(table)[...] = value

    def finish_write(self, shadow: Shadow, words: np.ndarray, writer: int, clock: int) -> None:
        """Turn a pending write into one that happened at a clock of its agent."""
        mine = words[(shadow.writer[words] == writer) & (shadow.clock[words] == PENDING)]
        shadow.clock[mine] = clock
        if writer in shadow.updates:
            open_words = words[shadow.updates[writer][0][words] == PENDING]
            shadow.update(writer, open_words, clock)
            shadow.settle(writer)

    def forbid(self, shadow: Shadow, words: np.ndarray, writer: int) -> None:
        """Make every access to words an error (a live mbarrier)."""
        shadow.writer[words] = writer
        shadow.clock[words] = PENDING

    # ---- conflicts ---------------------------------------------------------------------------------------------
    def _against_writes(
        self,
        agent: int,
        shadow: Shadow,
        words: np.ndarray,
        view: View,
        where: Any,
        verb: str,
        mask: np.ndarray | int = 15,
        strength: int = 0,
        stored: tuple | None = None,
    ) -> None:
        """Report an access that earlier writes conflict with."""
        flat = np.asarray(words).reshape(-1)
        masks = np.broadcast_to(np.asarray(mask, np.uint8), flat.shape)

        def find(row: np.ndarray, loosely: bool) -> Conflict | None:
            bad = shadow.clock[flat] > row[shadow.writer[flat]]
            if count_nonzero(bad):
                if strength:
                    bad &= ~self._tolerated(agent, shadow, flat, strength, loosely)
                else:
                    bad &= ~shadow.seen_last(flat, row)
                bad &= (shadow.mask[flat] & masks) != 0
                if stored is not None and count_nonzero(bad):
                    bad = where.changed(bad, stored)
                if count_nonzero(bad):
                    word = int(flat[np.argmax(bad)])
                    what = "an unfinished write" if shadow.clock[word] == PENDING else "a write"
                    return Conflict(word, int(shadow.writer[word]), int(shadow.sites[word]), what)
            return None if strength else self._hidden(shadow, flat, masks, row)

        self._judge(find, agent, shadow, view, where, verb + " after")

    def _hidden(self, shadow: Shadow, words: np.ndarray, masks: np.ndarray, row: np.ndarray) -> Conflict | None:
        """Find a conflict with a strong write, or a write of some bytes, that is not its word's last write."""
        for writer, (clocks, _) in shadow.updates.items():
            bad = clocks[words] > row[writer]
            if count_nonzero(bad):
                bad &= ~shadow.seen(writer, words, row)
            if count_nonzero(bad):
                return self._earlier(shadow, int(words[np.argmax(bad)]), writer, "a strong write or reduction")
        for (writer, written), clocks in shadow.bytes.items():
            bad = (clocks[words] > row[writer]) & ((masks & written) != 0)
            if bad.any():
                return self._earlier(shadow, int(words[np.argmax(bad)]), writer, "a write")
        return None

    def _earlier(self, shadow: Shadow, word: int, writer: int, what: str) -> Conflict:
        return Conflict(word, writer, int(shadow.sites[word]) if shadow.writer[word] == writer else -1, what)

    def _tolerated(self, agent: int, shadow: Shadow, words: np.ndarray, strength: int, loosely: bool) -> np.ndarray:
        """Tell which words' last writes are strong enough not to conflict with a strong access."""
        both = np.minimum(shadow.strength[words], np.uint8(strength))
        fine = both > 0
        if not (loosely and "scope" in self.bent) and count_nonzero(fine & (both < 3)):
            for i in np.flatnonzero(fine):
                writer = self.homes[shadow.writer[words[i]]]
                fine[i] = writer is None or includes(SCOPES[int(both[i]) - 1], self.homes[agent], writer)
        return fine

    def _against_reads(
        self,
        agent: int,
        shadow: Shadow,
        words: np.ndarray,
        where: Any,
        mask: np.ndarray | int,
        strength: int,
        row: np.ndarray,
        view: View | None = None,
        verb: str = "writes",
    ) -> None:
        """Report a write that earlier reads conflict with; a strong one does not conflict with strong reads."""
        late = shadow.row_tops > row[shadow.row_agents]
        if not count_nonzero(late):
            return
        rows = np.flatnonzero(late)
        agents = shadow.row_agents[rows]
        clocks = np.concatenate([shadow.reads[i][0][words] for i in rows]).reshape(len(rows), -1)
        if not count_nonzero(clocks > row[agents][:, None]):
            return

        def find(known: np.ndarray, loosely: bool) -> Conflict | None:
            bad = clocks > known[agents][:, None]
            if strength:
                bad &= ~shadow.strong_rows[rows, None]
            if not isinstance(mask, int):
                bad &= (shadow.row_masks[rows, None] & mask) != 0
            if not bad.any():
                return None
            hit, at = np.argwhere(bad)[0]
            word = int(np.asarray(words).reshape(-1)[at])
            return Conflict(word, int(agents[hit]), int(shadow.reads[rows[hit]][1][word]), "a read")

        self._judge(find, agent, shadow, view or self.generic_view(agent), where, verb)

    def _judge(self, find: Callable, agent: int, shadow: Shadow, view: View, where: Any, verb: str) -> None:
        """Report a conflict: an error, or a conflict that only a broken rule orders."""
        conflict = find(view.clocks, False)
        if conflict is None:
            return
        rule = ""
        if find(self.loose_view(agent, view, shadow), True) is None:
            rule = self._rule(find, agent, conflict, shadow, view)
        other = self.names[conflict.agent]
        place = shadow.space(conflict.word)
        if conflict.what == "a read":
            text = f"race at {place}: {self.names[agent]} {verb} what {other} may still read"
        else:
            text = f"race at {place}: {self.names[agent]} {verb} {conflict.what} of {other} without synchronisation"
            text += self._hint(agent, shadow, view, conflict)
        where.warp.race(where.ins, text, rule, other, conflict.site, self.warps[conflict.agent])

    def _rule(self, find: Callable, agent: int, conflict: Conflict, shadow: Shadow, view: View) -> str:
        """Name the rule whose breach a conflict is."""
        if shadow.columns:
            # Either side's fence is missing, unless it is the ordering itself.
            ordered = conflict.agent in self.fenced or find(self.V[agent], True) is None
            return "tcgen05-fence" if ordered else "relaxed-order"
        if find(view.clocks, True) is None:
            return "scope"
        return "copy-proxy" if self.soft[conflict.agent] else "relaxed-order"

    def _hint(self, agent: int, shadow: Shadow, view: View, conflict: Conflict) -> str:
        clock = shadow.clock[conflict.word]
        ordered = shadow.writer[conflict.word] == conflict.agent and clock <= self.V[agent, conflict.agent]
        if not ordered or view.clocks[conflict.agent] >= clock:
            return ""
        missing = "tcgen05.fence::after_thread_sync" if shadow.columns else "proxy fence"
        return f" (it is ordered, but no {missing} makes it visible here)"
