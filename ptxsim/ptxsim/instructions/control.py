"""Emitters of control flow, hints and miscellaneous instructions."""

from __future__ import annotations

import numpy as np

from ..arithmetic.numeric import LaneSet, Poison, count_nonzero
from ..errors import KernelTrap, MemoryFault
from ..memory.spaces import GENERIC_BASE, RANK_SHIFT, SHARED_RESERVED
from ..parsing.ir import Imm, Instr
from ..state.warp import Warp
from ..translation.codegen import EXIT, Codegen, Park
from ..translation.registry import Mods, op


@op("bra", "term", dsts=0)
def _bra(cg: Codegen, ins: Instr, mods: Mods) -> int:
    mods.flag("uni")
    mods.args(1)
    return cg.cfg.target_block(ins)


@op("brx", "term", dsts=0)
def _brx(cg: Codegen, ins: Instr, mods: Mods) -> str:
    """Emit an indexed branch; its operands are the index and the labels of the table."""
    mods.choose("idx")
    mods.flag("uni")
    targets = np.array([cg.cfg.target_block(ins, i) for i in range(1, len(ins.args))])

    def pick(W: Warp, L: LaneSet, index: np.ndarray, q: Poison) -> np.ndarray | int:
        if q is not None:
            W.poisoned(q, ins, "a branch index", L)
        if int(index.max()) >= len(targets):
            W.fault(ins, f"branch index {int(index.max())} exceeds the table of {len(targets)} labels", L)
        chosen = targets[index]
        return int(chosen[0]) if count_nonzero(chosen != chosen[0]) == 0 else chosen

    value = cg.src(ins.args[0], "u32")
    poison = cg.sources[0] if cg.sources else "None"
    return f"{cg.bind(pick)}(W, L, {value}, {poison})"


@op("exit", "term", dsts=0)
def _exit(cg: Codegen, ins: Instr, mods: Mods) -> int:
    mods.args(0)
    return EXIT


@op("ret", "term", dsts=0)
def _ret(cg: Codegen, ins: Instr, mods: Mods) -> int:
    mods.flag("uni")
    return EXIT


@op("call", "call", dsts=0)
def _call(cg: Codegen, ins: Instr, mods: Mods) -> None:
    mods.fail("a call that was not inlined")


@op("trap", "call", dsts=0)
def _trap(cg: Codegen, ins: Instr, mods: Mods) -> None:
    def run(W: Warp, L: LaneSet) -> None:
        W.fail(KernelTrap, ins, "the kernel executed trap", L)

    cg.call(run, [], [])


def _nothing(cg: Codegen, ins: Instr, mods: Mods) -> None:
    """Emit nothing for an instruction without a functional effect."""


@op("nanosleep pmevent brkpt", "call", dsts=0)
def _sleep(cg: Codegen, ins: Instr, mods: Mods) -> None:
    mods.flag("u32", "mask")


@op("prefetch prefetchu applypriority", "call", dsts=0)
def _prefetch(cg: Codegen, ins: Instr, mods: Mods) -> None:
    for name in ("global", "local", "const", "param", "tensormap", "L1", "L2", "L2::evict_normal", "L2::evict_last"):
        mods.flag(name)


@op("discard", "call", dsts=0)
def _discard(cg: Codegen, ins: Instr, mods: Mods) -> None:
    """Emit discard: a line of global memory becomes undefined, which a pattern makes visible."""
    mods.flag("global")
    mods.choose("L2")
    address, size = mods.args(2)
    if not isinstance(size, Imm) or size.value != 128:
        mods.fail("the size must be 128")

    def run(W: Warp, L: LaneSet, a: np.ndarray, qa: Poison) -> None:
        if qa is not None:
            W.poisoned(qa, ins, "an address", L)
        for each in {int(v) for v in a}:
            if each % 128:
                W.fault(ins, f"address {each:#x} is not a multiple of 128", L)
            try:
                W.memory.slice(each, 128, write=True)[:] = 0xCB
            except MemoryFault as error:
                W.fault(ins, str(error), L)

    cg.call(run, [(address, "addr64")], [])


@op("createpolicy", "call")
def _createpolicy(cg: Codegen, ins: Instr, mods: Mods) -> None:
    mods.choose("fractional", "range", "cvt")
    for name in list(mods.left):
        if name.startswith(("L2::", "L2")) or name == "global":
            mods.flag(name)
    mods.type("b64")
    cg.call(lambda W, L: (np.full(W.width(L), 0x14F0000000000000, "u8"), None), [], [(ins.args[0], "b64")])


@op("griddepcontrol", "call", dsts=0)
def _griddep(cg: Codegen, ins: Instr, mods: Mods) -> None:
    mods.choose("wait", "launch_dependents")


@op("setmaxnreg", "sync", dsts=0, collective=True)
def _setmaxnreg(cg: Codegen, ins: Instr, mods: Mods) -> None:
    grow = mods.choose("inc", "dec") == "inc"
    mods.choose("sync")
    mods.choose("aligned")
    mods.type("u32")
    (count,) = mods.args(1)
    if not 24 <= count.value <= 256 or count.value % 8:
        mods.fail("the register count must be a multiple of 8 in 24..256")

    def run(W: Warp, L: LaneSet) -> Park | None:
        held = W.cta.registers
        pool = 32 * W.launch.registers * len(W.cta.warps)

        def ready() -> bool:
            if grow and 32 * (held.total() - held[W.index] + count.value) > pool:
                return False
            held[W.index] = count.value
            return True

        what = f"waits for {count.value} registers per thread (the block has {pool})"
        return None if ready() else Park(ready, what)

    cg.call(run, [], [])


@op("activemask", "call")
def _activemask(cg: Codegen, ins: Instr, mods: Mods) -> None:
    mods.type("b32")

    def run(W: Warp, L: LaneSet) -> tuple:
        mask = 0xFFFFFFFF if L is None else sum(1 << int(i) for i in L)
        return np.full(W.width(L), mask, "u4"), None

    cg.call(run, [], [(ins.args[0], "b32")])


@op("mapa", "call")
def _mapa(cg: Codegen, ins: Instr, mods: Mods) -> None:
    shared = mods.flag("shared::cluster")
    type_name = mods.type("u32", "u64")
    dst, a, b = mods.args(3)

    def run(
        W: Warp,
        L: LaneSet,
        address: np.ndarray,
        qa: Poison,
        rank: np.ndarray,
        qr: Poison,
    ) -> tuple:
        for mask in (qa, qr):
            if mask is not None:
                W.poisoned(mask, ins, "an address", L)
        if int(rank.max()) >= len(W.cta.cluster.ctas):
            W.sync_error(ins, f"block rank {int(rank.max())} does not exist in the cluster", L)
        base = np.uint64(0 if shared else GENERIC_BASE["shared"])
        offset = address.astype("u8") - base - np.uint64(SHARED_RESERVED)
        low = offset & np.uint64((1 << RANK_SHIFT) - 1)
        target = low + np.uint64(SHARED_RESERVED) + base + (rank.astype("u8") << np.uint64(RANK_SHIFT))
        return target.astype("u4" if type_name == "u32" else "u8"), None

    cg.call(run, [(a, type_name), (b, "u32")], [(dst, type_name)])


@op("getctarank", "call")
def _getctarank(cg: Codegen, ins: Instr, mods: Mods) -> None:
    shared = mods.flag("shared::cluster")
    type_name = mods.type("u32", "u64")
    dst, a = mods.args(2)

    def run(W: Warp, L: LaneSet, address: np.ndarray, qa: Poison) -> tuple:
        base = np.uint64(SHARED_RESERVED + (0 if shared else GENERIC_BASE["shared"]))
        return ((address.astype("u8") - base) >> np.uint64(RANK_SHIFT)).astype("u4"), qa

    cg.call(run, [(a, type_name)], [(dst, "u32")])
