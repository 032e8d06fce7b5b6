"""Basic blocks, liveness and the storage type of every register."""

from __future__ import annotations

import copy
from collections import Counter, defaultdict
from functools import cache

from ..errors import UnknownInstruction
from ..parsing.ir import TYPE_BITS, Instr, Reg, Sym, operand_regs
from .lower import Lowered
from .registry import OPS, reason, unknown

VIEWS = {
    "pred": "b1",
    "f16": "f2",
    "bf16": "u2",
    "f32": "f4",
    "f64": "f8",
    **{f"{k}{n}": f"{'i' if k == 's' else 'u'}{n // 8}" for k in "usb" for n in (8, 16, 32, 64)},
    **dict.fromkeys(("f16x2", "bf16x2", "u16x2", "s16x2", "tf32"), "u4"),
    "f32x2": "u8",
    "b128": "q",
}
"""NumPy type code in which values of a PTX type are computed."""


_SYNCHRONISING = frozenset(("bar", "barrier", "mbarrier", "wgmma", "tcgen05", "cp"))
_NOT_SYNCHRONISING = frozenset(
    ("init", "inval", "mma_async", "mma", "ld", "st", "alloc", "dealloc", "relinquish_alloc_permit")
)
"""Opcodes of instructions that synchronise, and modifiers of those that do not."""


class Block:
    """A straight run of instructions; ``solo`` blocks hold one instruction that may park the fragment."""

    __slots__ = ("fall", "gather", "index", "instrs", "live_in", "live_out", "solo", "start", "succ", "synchronises")

    def __init__(self, index: int, start: int, instrs: list[Instr]) -> None:
        self.index, self.start, self.instrs = index, start, instrs
        self.solo = False
        self.gather: Instr | None = None
        self.synchronises = False
        self.succ: list[int] = []
        self.fall = index + 1
        self.live_in = self.live_out = 0  # registers by their bits: such sets are joined at the speed of integers

    def with_instrs(self, instrs: list[Instr]) -> Block:
        """Return the block with other instructions, which must branch alike and keep no more registers alive."""
        other = copy.copy(self)
        other.instrs, first = instrs, instrs[0]
        other.gather = first if OPS[first.op].is_collective(first) else None
        other.synchronises = self.solo and _synchronises(first)
        return other


def _synchronises(ins: Instr) -> bool:
    return ins.op in _SYNCHRONISING and not _NOT_SYNCHRONISING & set(ins.mods)


def uses_defs(ins: Instr) -> tuple[list[Reg], list[Reg]]:
    """Return the registers an instruction reads and writes."""
    if ins.registers is None:
        ins.registers = _uses_defs(ins)
    return ins.registers


def _uses_defs(ins: Instr) -> tuple[list[Reg], list[Reg]]:
    spec = OPS[ins.op]
    count = spec.dst_count(ins)
    defs = [r for arg in ins.args[:count] for r in operand_regs(arg)]
    uses = [r for arg in ins.args[count:] for r in operand_regs(arg)]
    if spec.reads_dst:
        uses += defs
    if ins.guard is not None:
        uses = [*uses, ins.guard, *defs]
    return uses, defs


_NEUTRAL = frozenset(("add", "sub", "ld", "st", "mov", "selp"))
"""Opcodes that do the same to the bits of signed and unsigned integers (mul and mad do with ``.lo``)."""


@cache
def _votes(op: str, mods: tuple[str, ...]) -> dict[int, str]:
    """Return, by width in bits, the array type in which instructions of a form want their registers.

    It is unsigned where the sign does not matter.
    """
    types = [m for m in mods if m in TYPE_BITS]
    neutral = op in _NEUTRAL or "lo" in mods or (op == "setp" and mods[0] in ("eq", "ne"))
    views = {}
    for name in types[-1:] + types[:1]:
        if name[0] != "b" and name != "pred":
            view = VIEWS[name]
            views[TYPE_BITS[name]] = f"u{view[1:]}" if neutral and view[0] == "i" else view
    return views


def _as_bits(numbers: set[int], size: int) -> int:
    """Return a set of numbers as the bits of an integer of some bytes."""
    data = bytearray(size)
    for number in numbers:
        data[number >> 3] |= 1 << (number & 7)
    return int.from_bytes(data, "little")


class Cfg:
    """The control-flow graph of one kernel."""

    def __init__(self, code: Lowered) -> None:
        self.code = code
        for ins in code.instrs:
            if ins.op not in OPS:
                raise unknown(code.name, ins, reason(ins.op))
        self.blocks = self._split()
        self._edges()
        self._liveness()
        self.storage = self._storage()

    def _split(self) -> list[Block]:
        instrs = self.code.instrs
        leaders: set[int] = {0, *self.code.labels.values()}
        gather = {}
        for position, ins in enumerate(instrs):
            spec = OPS[ins.op]
            if spec.kind in ("sync", "direct"):
                leaders |= {position, position + 1}
            elif spec.kind == "term":
                leaders.add(position + 1)
            if spec.is_collective(ins):
                leaders.add(position)
                gather[position] = ins
        starts = sorted(p for p in leaders if p < len(instrs))
        blocks = []
        for index, (start, end) in enumerate(zip(starts, [*starts[1:], len(instrs)], strict=False)):
            block = Block(index, start, instrs[start:end])
            block.solo = OPS[instrs[start].op].kind in ("sync", "direct")
            block.gather = gather.get(start)
            block.synchronises = block.solo and _synchronises(instrs[start])
            blocks.append(block)
        self.block_at = {block.start: block.index for block in blocks}
        self.block_at[len(instrs)] = len(blocks)
        return blocks

    def target_block(self, ins: Instr, position: int = 0) -> int:
        """Return the block that a branch's label operand names."""
        label = ins.args[position]
        if not isinstance(label, Sym) or label.name not in self.code.labels:
            raise UnknownInstruction(
                f"kernel {self.code.name}, line {ins.line}: branch to an unknown label: {ins.text}"
            )
        return self.block_at[self.code.labels[label.name]]

    def _edges(self) -> None:
        last = len(self.blocks) - 1
        for block in self.blocks:
            ins = block.instrs[-1]
            falls = True
            if ins.op == "bra":
                block.succ.append(self.target_block(ins))
                falls = ins.guard is not None
            elif ins.op == "brx":
                block.succ += [self.target_block(ins, i) for i in range(1, len(ins.args))]
                falls = False
            elif ins.op in ("exit", "trap"):
                falls = ins.guard is not None
            if falls and block.index < last:
                block.succ.append(block.index + 1)

    def _liveness(self) -> None:
        size = len(self.code.regs) // 8 + 1
        gen, keep = [], []
        for block in self.blocks:
            used, defined = set[int](), set[int]()
            for ins in block.instrs:
                uses, defs = uses_defs(ins)
                used.update([reg.index for reg in uses if reg.index not in defined])
                if ins.guard is None:
                    defined.update([reg.index for reg in defs])
            gen.append(_as_bits(used, size))
            keep.append(~_as_bits(defined, size))
        preds: dict[int, list[int]] = defaultdict(list)
        for block in self.blocks:
            for succ in block.succ:
                preds[succ].append(block.index)
        work = list(range(len(self.blocks)))
        queued = set(work)
        while work:
            index = work.pop()
            queued.discard(index)
            block = self.blocks[index]
            live_out = 0
            for succ in block.succ:
                live_out |= self.blocks[succ].live_in
            block.live_out = live_out
            live_in = gen[index] | (live_out & keep[index])
            if live_in != block.live_in:
                block.live_in = live_in
                for pred in preds[index]:
                    if pred not in queued:
                        queued.add(pred)
                        work.append(pred)

    def _storage(self) -> list[str]:
        """Choose per register, among the array types of its width, the type that most of its users want."""
        votes: defaultdict[str, Counter[int]] = defaultdict(Counter)
        for ins in self.code.instrs:
            uses, defs = uses_defs(ins)
            for bits, view in _votes(ins.op, tuple(ins.mods)).items():
                votes[view].update([reg.index for reg in (*uses, *defs) if reg.bits == bits])
        storage, most = [VIEWS[reg.type] for reg in self.code.regs], [0] * len(self.code.regs)
        for view, count in votes.items():
            for index, number in count.items():
                if number > most[index]:
                    storage[index], most[index] = view, number
        return storage
