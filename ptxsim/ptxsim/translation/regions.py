"""Decisions of a branch: the blocks up to where both ways meet again, and the registers that they write."""

from __future__ import annotations

from collections.abc import Sequence

from ..parsing.ir import Instr
from .cfg import Block, uses_defs
from .registry import OPS

_STRONG = frozenset(("volatile", "mmio", "relaxed", "acquire"))
"""Modifiers of loads that synchronise."""


def postdominators(blocks: Sequence[Block]) -> list[int]:
    """Return for each block the set of blocks that every way from it to the exit runs through, as bits."""
    everything = (1 << len(blocks)) - 1
    after = [everything] * len(blocks)
    changed = True
    while changed:
        changed = False
        for block in reversed(blocks):
            through = everything if block.succ else 0
            for each in block.succ:
                through &= after[each]
            if block.instrs[-1].op == "exit":  # with a guard it has a successor, too
                through = 0
            through |= 1 << block.index
            if through != after[block.index]:
                after[block.index], changed = through, True
    return after


def meeting(after: Sequence[int], index: int) -> int | None:
    """Return the first block that all ways from a block run through (None: they meet at the exit only)."""
    others = after[index] & ~(1 << index)
    size = others.bit_count()
    while others:
        low = others & -others
        if after[low.bit_length() - 1].bit_count() == size:
            return low.bit_length() - 1
        others ^= low
    return None


def harmless(ins: Instr) -> bool:
    """Tell whether an instruction only writes registers of its own thread."""
    spec = OPS[ins.op]
    if spec.is_collective(ins):
        return False
    if ins.op in ("ld", "ldu"):
        return not _STRONG & set(ins.mods)
    return spec.kind == "alu" or ins.op == "bra"


def decided(blocks: Sequence[Block], after: Sequence[int], index: int) -> tuple[int, list[int]] | None:
    """Return where the ways of a block's branch meet, and the registers that they leave different there.

    None where one of the ways stores, synchronises or exits: more than registers depends on the branch then.
    """
    join = meeting(after, index)
    if join is None:
        return None
    work, seen, written = [*blocks[index].succ], set[int](), 0
    while work:
        at = work.pop()
        if at == join or at in seen:
            continue
        seen.add(at)
        if not all(map(harmless, blocks[at].instrs)):
            return None
        for ins in blocks[at].instrs:
            for reg in uses_defs(ins)[1]:
                written |= 1 << reg.index
        work += blocks[at].succ
    written &= blocks[join].live_in
    registers = []
    while written:  # a few of thousands
        registers.append((written & -written).bit_length() - 1)
        written &= written - 1
    return join, registers
