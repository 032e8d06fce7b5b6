"""The table of opcodes: how each is classified, and the function that emits its code."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ..errors import UnknownInstruction
from ..parsing.ir import TYPE_BITS, Instr


@dataclass(frozen=True)
class OpSpec:
    """Handling of one opcode.

    ``kind`` is ``alu`` (inline expression), ``call`` (a run-time function on operand arrays), ``sync`` (the same, in a
    block of its own and able to park), ``direct`` (works on the register file, in a block of its own) or ``term``.
    ``dsts`` tells how many leading operands are destinations. ``collective`` operations need all their member lanes at
    one place; ``members`` is the index of the operand that holds the member mask (None: all live lanes).
    """

    op: str
    kind: str
    emit: Callable
    dsts: int | Callable[[Instr], int] = 1
    collective: Callable[[Instr], bool] | bool = False
    members: Callable[[Instr], int | None] | None = None
    reads_dst: bool = False

    def dst_count(self, ins: Instr) -> int:
        """Return the number of destination operands of an instruction."""
        return self.dsts(ins) if callable(self.dsts) else self.dsts

    def is_collective(self, ins: Instr) -> bool:
        """Tell whether the instruction must be executed by its member lanes together."""
        return self.collective(ins) if callable(self.collective) else self.collective


OPS: dict[str, OpSpec] = {}


UNMODELLED = {
    "tex tld4 txq istypep": "textures are not modelled",
    "suld sust sured suq": "surfaces are not modelled",
    "multimem": "multicast memory of several GPUs is not modelled",
    "alloca stacksave stackrestore": "stack allocation at run time is not modelled",
    "vadd vsub vabsdiff vmin vmax vshl vshr vmad vset vadd2 vsub2 vavrg2 vabsdiff2 vmin2 vmax2 vset2 vadd4 vsub4 vavrg4"
    " vabsdiff4 vmin4 vmax4 vset4": "video instructions are not modelled",
}
"""Reasons for which some opcodes of the ISA are refused."""


def reason(name: str) -> str:
    """Return why an opcode is unknown."""
    return next((why for names, why in UNMODELLED.items() if name in names.split()), "no such opcode in the simulator")


def op(name: str, kind: str = "alu", **options: Any) -> Callable[[Callable], Callable]:
    """Register the decorated emitter for an opcode."""

    def register(emit: Callable) -> Callable:
        for each in name.split():
            OPS[each] = OpSpec(each, kind, emit, **options)
        return emit

    return register


def kind_of(name: str) -> str:
    """Return the kind of an opcode ('' when unknown)."""
    return OPS[name].kind if name in OPS else ""


class Mods:
    """The modifiers of an instruction; every one must be taken, a leftover is an unknown instruction."""

    def __init__(self, ins: Instr, kernel: str) -> None:
        self.ins, self.kernel, self.left = ins, kernel, list(ins.mods)

    def flag(self, *names: str) -> bool:
        """Take a modifier if present (any of several spellings)."""
        for name in names:
            if name in self.left:
                self.left.remove(name)
                return True
        return False

    def choose(self, *names: str, default: str | None = None) -> str:
        """Take exactly one of the named modifiers; without a default one must be present."""
        for name in names:
            if name in self.left:
                self.left.remove(name)
                return name
        if default is None:
            self.fail(f"needs one of .{', .'.join(names)}")
        return default

    def type(self, *allowed: str) -> str:
        """Take the last type modifier."""
        for index in range(len(self.left) - 1, -1, -1):
            name = self.left[index]
            if name in TYPE_BITS and (not allowed or name in allowed):
                del self.left[index]
                return name
        self.fail("has no supported type" + (f" (supported: {', '.join(allowed)})" if allowed else ""))
        return ""

    def first_type(self) -> str:
        """Take the first type modifier (the destination type of two-type instructions)."""
        for index, name in enumerate(self.left):
            if name in TYPE_BITS:
                del self.left[index]
                return name
        self.fail("has no type")
        return ""

    def args(self, *counts: int) -> list:
        """Return the operands, after a check of their number."""
        if len(self.ins.args) not in counts:
            self.fail(f"takes {' or '.join(map(str, counts))} operands, has {len(self.ins.args)}")
        return self.ins.args

    def done(self) -> None:
        """Raise unless every modifier was taken."""
        if self.left:
            self.fail(f"unknown modifier .{self.left[0]}")

    def fail(self, why: str) -> None:
        """Raise the unknown-instruction error."""
        raise unknown(self.kernel, self.ins, why)


def unknown(kernel: str, ins: Instr, why: str) -> UnknownInstruction:
    """Return the error for an instruction that is not implemented."""
    return UnknownInstruction(
        f"kernel {kernel}, line {ins.line}: unknown instruction {ins.opcode!r}: {why}\n  {ins.text}"
    )
