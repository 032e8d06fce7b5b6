"""Emitters of ldmatrix, stmatrix, movmatrix and the warp-level mma."""

from __future__ import annotations

import numpy as np

from .codegen import Codegen
from .errors import MemoryFault
from .ir import Instr, Vec
from .ops_float import from_bf16
from .registry import Mods, op

Ctx = "the executing warp (see warp.Warp)"


def _row_chunks(W: Ctx, ins: Instr, L: object, a: np.ndarray, qa: object, rows: int) -> np.ndarray:
    """Return the 16-byte chunk index of every row address."""
    if L is not None:
        W.sync_error(ins, "an .aligned matrix instruction needs all 32 lanes of the warp", L)
    if qa is not None:
        W.poisoned(qa[:rows], ins, "an address", None)
    offset = (a - W.cta.shared_base)[:rows]
    if np.count_nonzero(offset & np.uint32(15)):
        W.misaligned(ins, a[:rows], 16, None)
    chunks = offset >> np.uint32(4)
    if int(chunks.max()) >= len(W.cta.shared.chunks):
        W.fail(MemoryFault, ins, "a matrix row is outside the block's shared memory")
    return chunks


def _form(mods: Mods) -> tuple[int, bool]:
    mods.choose("sync")
    mods.choose("aligned")
    mods.choose("m8n8")
    count = int(mods.choose("x1", "x2", "x4")[1:])
    transposed = mods.flag("trans")
    mods.choose("shared", "shared::cta", default="shared")
    mods.type("b16")
    return count, transposed


def transpose8(block: np.ndarray) -> np.ndarray:
    """Transpose 8x8 matrices of 16-bit elements given as [n, 8, 4] words."""
    halves = np.ascontiguousarray(block).view("u2").reshape(-1, 8, 8)
    return np.ascontiguousarray(halves.transpose(0, 2, 1)).view("u4")


@op("ldmatrix", "call", collective=True)
def _ldmatrix(cg: Codegen, ins: Instr, mods: Mods) -> None:
    count, transposed = _form(mods)
    dst, address = mods.args(2)
    items = dst.items if isinstance(dst, Vec) else (dst,)
    if len(items) != count:
        mods.fail("vector length differs from the matrix count")

    def run(W: Ctx, L: object, a: np.ndarray, qa: object) -> tuple:
        chunks = _row_chunks(W, ins, L, a, qa, 8 * count)
        cta = W.cta
        data = cta.shared.chunks[chunks].reshape(count, 8, 4)
        defined = cta.shared.chunk_init[chunks].reshape(count, 8, 4) == 0x01010101
        if cta.shadow is not None:
            W.shared_read(cta.shadow, chunks << np.uint32(4), 4, 4, ins)
        if W.banks is not None:
            W.banks.access(ins, chunks << np.uint32(4), 16)
        W.traffic[0] += 128 * count
        clean = defined.all()
        if transposed:
            data = transpose8(data)
        out = []
        for k in range(count):
            poison = None
            if not clean:
                bad = ~defined[k]
                if transposed:
                    rows = bad.repeat(2, axis=1)
                    bad = rows.T.reshape(8, 4, 2).any(2)
                poison = bad.reshape(32)
            out += [data[k].reshape(32), poison]
        return tuple(out)

    cg.call(run, [(address, "addr32")], [(item, "b32") for item in items])


@op("stmatrix", "call", dsts=0, collective=True)
def _stmatrix(cg: Codegen, ins: Instr, mods: Mods) -> None:
    count, transposed = _form(mods)
    address, source = mods.args(2)
    items = source.items if isinstance(source, Vec) else (source,)
    if len(items) != count:
        mods.fail("vector length differs from the matrix count")

    def run(W: Ctx, L: object, a: np.ndarray, qa: object, *values: object) -> None:
        chunks = _row_chunks(W, ins, L, a, qa, 8 * count)
        cta = W.cta
        data = np.stack(values[::2]).reshape(count, 8, 4)
        data = transpose8(data) if transposed else data
        defined = np.full((count * 8, 4), 0x01010101, "u4")
        for k, poison in enumerate(values[1::2]):
            if poison is not None and np.count_nonzero(poison):
                bad = poison.reshape(8, 4)
                if transposed:
                    bad = bad.repeat(2, axis=1).T.reshape(8, 4, 2).any(2)
                defined[8 * k : 8 * k + 8][bad] = 0
        if cta.shadow is not None:
            W.shared_write(cta.shadow, chunks << np.uint32(4), 4, 4, ins)
            if len(np.unique(chunks)) < len(chunks):
                W.sync_error(ins, "two rows of one stmatrix have the same address")
        if W.banks is not None:
            W.banks.access(ins, chunks << np.uint32(4), 16)
        cta.shared.chunks[chunks] = data.reshape(-1, 4)
        cta.shared.chunk_init[chunks] = defined
        W.traffic[1] += 128 * count

    cg.call(run, [(address, "addr32")] + [(item, "b32") for item in items], [])


@op("movmatrix", "call", collective=True)
def _movmatrix(cg: Codegen, ins: Instr, mods: Mods) -> None:
    for name in ("sync", "aligned", "m8n8", "trans"):
        mods.choose(name)
    mods.type("b16")
    dst, a = mods.args(2)

    def run(W: Ctx, L: object, v: np.ndarray, q: object) -> tuple:
        poison = None if q is None else np.full(32, bool(q.any()))
        return transpose8(v.reshape(1, 8, 4)).reshape(32), poison

    cg.call(run, [(a, "b32")], [(dst, "b32")])


@op("mma", "call", collective=True)
def _mma(cg: Codegen, ins: Instr, mods: Mods) -> None:
    """Emit ``mma.sync.aligned.m16n8k{8,16}.row.col.f32.{bf16,f16}.{bf16,f16}.f32``."""
    mods.choose("sync")
    mods.choose("aligned")
    depth = 16 if mods.choose("m16n8k16", "m16n8k8") == "m16n8k16" else 8
    mods.choose("row")
    mods.choose("col")
    types = [mods.first_type() for _ in range(4)]
    if types[0] != "f32" or types[3] != "f32" or types[1] != types[2] or types[1] not in ("bf16", "f16"):
        mods.fail("only f32 accumulation of bf16 or f16 is modelled")
    d, a, b, c = mods.args(4)
    brain = types[1] == "bf16"
    na, nb = depth // 4, depth // 8

    def widen(words: np.ndarray) -> np.ndarray:
        halves = np.ascontiguousarray(words).view("u2")
        return from_bf16(halves) if brain else halves.view("f2").astype("f4")

    def run(W: Ctx, L: object, *values: object) -> tuple:
        if L is not None:
            W.sync_error(ins, "mma needs all 32 lanes of the warp", L)
        regs, masks = values[::2], values[1::2]
        # Fragment layouts (ISA, mma.m16n8k16): A register i holds row g + 8*(i%2), columns 8*(i//2) + 2c + {0, 1}.
        fa = widen(np.stack(regs[:na], 1)).reshape(8, 4, na // 2, 2, 2)
        rows = fa.transpose(3, 0, 2, 1, 4).reshape(16, depth)
        fb = widen(np.stack(regs[na : na + nb], 1)).reshape(8, 4, nb, 2)
        cols = fb.transpose(2, 1, 3, 0).reshape(depth, 8)
        fc = np.stack(regs[na + nb :], 1).reshape(8, 4, 2, 2)
        acc = fc.transpose(2, 0, 1, 3).reshape(16, 8)
        total = (rows.astype("f8") @ cols + acc).astype("f4")
        bad = None
        if any(m is not None and m.any() for m in masks):
            bad = np.ones(32, bool)
        out = total.reshape(2, 8, 4, 2).transpose(1, 2, 0, 3).reshape(32, 4)
        return tuple(x for k in range(4) for x in (np.ascontiguousarray(out[:, k]), bad))

    sources = [(v, "b32") for v in (*a.items, *b.items)] + [(v, "f32") for v in c.items]
    cg.call(run, sources, [(v, "f32") for v in d.items])
