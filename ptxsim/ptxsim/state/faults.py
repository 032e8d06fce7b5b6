"""Reports of a warp: errors, broken rules and races, each with its instruction and its place."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import numpy as np

from ..arithmetic.numeric import LaneSet, Poison, count_nonzero
from ..errors import MemoryFault, PoisonError, RaceError, SimError, SyncError
from ..parsing.ir import Instr
from ..translation.cfg import uses_defs
from .findings import Finding, Place, brief, origins, place_of, short_name


class Faults:
    """The part of a :class:`~.warp.Warp` that reports."""

    program: Any
    launch: Any
    cta: Any
    index: int
    name: Any
    Q: list[Poison]
    synchronisations: Any

    def where(self, ins: Instr, lanes: LaneSet = None) -> str:
        """Return the place of an error: kernel, line, block, warp, lanes, instruction."""
        which = "" if lanes is None else f" lanes {list(map(int, lanes))}"
        return f"kernel {short_name(self.program.name)}, line {ins.line}, {self.name}{which}: {brief(ins.text)}\n  "

    def fail(self, kind: type[SimError], ins: Instr, why: str, lanes: LaneSet = None) -> NoReturn:
        """Raise an error of a kind at an instruction."""
        stop: Callable[..., NoReturn] = self.launch.stop
        stop(self.finding(kind, ins, why, "", lanes), kind)

    def bend(self, rule: str, kind: type[SimError], ins: Instr, why: str) -> None:
        """Raise, or warn if the launch allows the rule to be broken."""
        finding = self.finding(kind, ins, why, rule)
        if rule not in self.launch.allow:
            self.launch.stop(finding, kind)
        self.launch.warn(finding)

    def race(self, ins: Instr, why: str, rule: str, other: str, site: int, warp: Faults | None) -> None:
        """Report a race: an error, a broken rule, or (``keep_going``) one of several errors."""
        finding = self.finding(RaceError, ins, why, rule)
        finding.other = other
        finding.synchronised = self.synchronised()
        if site >= 0:
            finding.other_at = place_of(self.program, self.program.instructions[site])
        if warp is not None and warp is not self:
            finding.other_synchronised = warp.synchronised()
        if rule in self.launch.allow:
            self.launch.warn(finding)
        elif self.launch.keep_going:
            self.launch.keep(finding)
        else:
            self.launch.stop(finding, RaceError)

    def finding(self, kind: type[SimError], ins: Instr, why: str, rule: str = "", lanes: LaneSet = None) -> Finding:
        """Return a finding about an instruction."""
        severity = "warning" if rule in self.launch.allow else "error"
        where = [] if lanes is None else [int(lane) for lane in lanes]
        at, name = place_of(self.program, ins), short_name(self.program.name)
        return Finding(kind.__name__, rule, severity, why, name, at, self.cta.ctaid, self.index, where)

    def synchronised(self) -> list[Place]:
        """Return where this warp has synchronised last."""
        return [place_of(self.program, self.program.blocks[index].instrs[0]) for index in self.synchronisations]

    def _lanes(self, L: LaneSet, pick: np.ndarray) -> np.ndarray:
        return np.flatnonzero(pick) if L is None else L[pick]

    def poisoned(self, mask: np.ndarray, ins: Instr, what: str, L: LaneSet) -> None:
        """Raise if any active lane's value is poison."""
        if count_nonzero(mask):
            why = f"an undefined or still pending value reaches {what}"
            finding = self.finding(PoisonError, ins, why, "poison", self._lanes(L, mask))
            uses = [reg for reg in uses_defs(ins)[0] if self.Q[reg.index] is not None]
            finding.origin = origins(self.program, ins, uses, lambda reg: self.Q[reg.index] is not None)
            if "poison" not in self.launch.allow:
                self.launch.stop(finding, PoisonError)
            self.launch.warn(finding)

    def fault(self, ins: Instr, why: str, L: LaneSet) -> None:
        """Raise a memory fault."""
        self.fail(MemoryFault, ins, why, L)

    def misaligned(self, ins: Instr, a: np.ndarray, size: int, L: LaneSet) -> None:
        """Raise for an address that is not a multiple of the access size."""
        bad = (a & a.dtype.type(size - 1)) != 0
        first = int(a[bad][0]) if bad.any() else int(a[0])
        self.fail(MemoryFault, ins, f"address {first:#x} is misaligned for {size} bytes", self._lanes(L, bad))

    def unmapped(self, ins: Instr, a: np.ndarray, L: LaneSet) -> None:
        """Raise for a global address in no array."""
        self.fail(MemoryFault, ins, f"global address {int(a[0]):#x} is in no array", L)

    def out_of_bounds(self, ins: Instr, buffer: Any, offset: np.ndarray, size: int, L: LaneSet) -> None:
        """Raise for an access beyond an array."""
        bad = offset + offset.dtype.type(size) > buffer.size
        first = int(offset[bad][0]) if bad.any() else int(offset[0])
        if first > 1 << 62:
            first -= 1 << 64
        self.fail(
            MemoryFault,
            ins,
            f"{size} bytes at byte {first} of {buffer.name} ({buffer.size} bytes) are out of bounds",
            self._lanes(L, bad),
        )

    def out_of_shared(self, ins: Instr, a: np.ndarray, L: LaneSet) -> None:
        """Raise for an address outside the block's shared memory."""
        offset = a.astype("i8") - int(self.cta.shared.base)
        bad = (offset < 0) | (offset >= self.cta.shared.limit)
        first = int(a[bad][0]) if bad.any() else int(a.max())
        self.fail(
            MemoryFault,
            ins,
            f"shared address {first:#x} is outside the block's window"
            f" {self.cta.shared.base:#x}..{self.cta.shared.base + self.cta.shared.limit:#x}",
            self._lanes(L, bad),
        )

    def lane_conflict(self, ins: Instr, a: np.ndarray, L: LaneSet, kept: np.ndarray, given: np.ndarray) -> None:
        """Report a store whose lanes share an address, so that memory holds other bits than some lane stored."""
        code = f"u{kept.dtype.itemsize}"
        given = np.ascontiguousarray(given, kept.dtype)
        lost = kept.view(code) != given.view(code)
        if lost.any():
            address = int(a[lost][0])
            lanes = self._lanes(L, a == address).tolist()
            why = f"lanes {lanes} of one store write different values to {address:#x}"
            self.bend("lane-store", RaceError, ins, why)

    def sync_error(self, ins: Instr, why: str, L: LaneSet = None) -> None:
        """Raise a misuse of a synchronisation object."""
        self.fail(SyncError, ins, why, L)
