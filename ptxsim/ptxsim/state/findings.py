"""Findings of the simulator, as objects: errors, and broken rules that are allowed."""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass, field
from typing import Any

from ..parsing.ir import Instr, Reg, operand_regs
from ..translation.registry import OPS

_NAME_LIMIT = 60


@dataclass(frozen=True)
class Place:
    """An instruction in a text: its PTX line, the line of its source (if there is a ``.loc``), and its text."""

    line: int
    text: str
    source: str = ""

    def __str__(self) -> str:
        return f"line {self.line}{f' ({self.source})' if self.source else ''}: {brief(self.text)}"


@dataclass
class Finding:
    """One error, or one allowed breach of a rule.

    Attributes
    ----------
    kind : str
        The name of the exception that it is, or would be.
    rule : str
        The broken rule (see rules.RULES), or ''.
    severity : str
        "error" or "warning".
    message : str
        What is wrong.
    kernel : str
        The kernel's name, demangled and shortened.
    at : Place
        Where.
    block : tuple of int
        Which block.
    warp : int
        Which warp of it.
    lanes : list of int
        Which lanes; empty where that says nothing.
    synchronised : list of Place
        Where the warp last synchronised, the latest last.
    other : str
        The other side of a race.
    other_at : Place or None
        What it executed.
    other_synchronised : list of Place
        Where it last synchronised, if it is a warp.
    origin : list of Place
        Where an undefined or pending value comes from.
    """

    kind: str
    rule: str
    severity: str
    message: str
    kernel: str
    at: Place
    block: tuple[int, ...]
    warp: int
    lanes: list[int] = field(default_factory=list)
    synchronised: list[Place] = field(default_factory=list)
    other: str = ""
    other_at: Place | None = None
    other_synchronised: list[Place] = field(default_factory=list)
    origin: list[Place] = field(default_factory=list)

    @property
    def key(self) -> tuple:
        """Key by which two findings are the same: the rule or kind, and the instructions."""
        return self.rule or self.kind, self.at.line, self.other_at.line if self.other_at else 0, self.message[:24]

    def as_dict(self) -> dict:
        """Return the finding as plain values, for JSON."""
        return asdict(self)

    def __str__(self) -> str:
        lanes = f" lanes {self.lanes}" if self.lanes else ""
        source = f" ({self.at.source})" if self.at.source else ""
        rule = f" [{self.rule}]" if self.rule else ""
        head = f"kernel {self.kernel}, line {self.at.line}{source}, block {self.block} warp {self.warp}{lanes}"
        lines = [f"{head}: {brief(self.at.text)}", f"  {self.message}{rule}"]
        if self.other_at:
            lines.append(f"  the other access: {self.other}, {self.other_at}")
        for who, places in ((f"warp {self.warp}", self.synchronised), ("the other warp", self.other_synchronised)):
            if places:
                lines.append(f"  {who} synchronised last at {'; '.join(map(str, reversed(places)))}")
        lines += [f"  the value comes from {place}" for place in self.origin]
        if self.rule and self.severity == "error":
            lines.append(f'  allow={{"{self.rule}"}}, or --allow {self.rule}, makes this a warning')
        return "\n".join(lines)


_LISTED = 8
"""Registers of a list that a finding shows."""


def brief(text: str) -> str:
    """Return an instruction with long lists of registers cut down to their ends."""

    def cut(match: re.Match) -> str:
        items = match[1].split(",")
        if len(items) <= _LISTED:
            return match[0]
        return f"{{{items[0].strip()}, ..., {items[-1].strip()}}}"

    return re.sub(r"\{([^{}]*)\}", cut, text)


def short_name(name: str) -> str:
    """Return a kernel's name without mangling and template arguments: ``ns::kernel`` for ``_ZN2ns6kernelI...``."""
    if match := re.match(r"_ZN?K?", name):
        rest, parts = name[match.end() :], []
        while found := re.match(r"(\d+)", rest):
            size, start = int(found[1]), found.end()
            parts.append(rest[start : start + size])
            rest = rest[start + size :]
            if rest[:1] == "I" or not name.startswith("_ZN"):
                break
        name = "::".join("(anonymous)" if part.startswith("_GLOBAL__N_") else part for part in parts) or name
    return name if len(name) <= _NAME_LIMIT else name[: _NAME_LIMIT - 3] + "..."


def place_of(program: Any, ins: Instr) -> Place:
    """Return the place of an instruction."""
    return Place(ins.line, ins.text, program.source_line(ins))


_ORIGINS = frozenset(("ld", "ldu", "ldmatrix", "wgmma", "tcgen05", "atom", "shfl", "call"))
_CLEAN = frozenset(("param", "param::entry", "const", "global"))
"""Opcodes whose results may be undefined or in flight, and state spaces whose contents are always defined."""

_MAX_ORIGINS, _MAX_STEPS = 3, 200


def origins(program: Any, ins: Instr, registers: list[Reg], poisoned: Any) -> list[Place]:
    """Return where the undefined values of registers may come from, walking the text backwards.

    Parameters
    ----------
    program : Program
        The kernel.
    ins : Instr
        The instruction that met the value.
    registers : list of Reg
        Its poisoned sources.
    poisoned : callable
        Tells of a register whether it holds poison, as far as that is known.

    Returns
    -------
    list of Place
        Loads and operations in flight, or the instruction that reads a register that is never written; a few at most.
    """
    writers = program.writers
    found: dict[int, Place] = {}
    work = [(reg.index, ins) for reg in registers]
    seen: set[tuple[int, int]] = set()
    while work and len(found) < _MAX_ORIGINS and len(seen) < _MAX_STEPS:
        index, user = work.pop(0)
        if (index, user.number) in seen:
            continue
        seen.add((index, user.number))
        before = [w for w in writers.get(index, ()) if w.number < user.number] or writers.get(index, [])
        if not before:
            place = place_of(program, user)
            found[user.number] = Place(place.line, f"a register that is never written, in {place.text}", place.source)
            continue
        last = before[-1]
        if last.op.startswith("ld") and _CLEAN & set(last.mods):
            continue
        if last.op in _ORIGINS:
            found[last.number] = place_of(program, last)
            continue
        count = OPS[last.op].dst_count(last)
        sources = [reg for arg in last.args[count:] for reg in operand_regs(arg)]
        known = [reg for reg in sources if poisoned(reg)]
        work += [(reg.index, last) for reg in known or sources]
        if not sources and last.guard is not None:
            work.append((index, last))
    return list(found.values())
