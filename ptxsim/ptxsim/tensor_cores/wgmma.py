"""Warpgroup matrix multiply: descriptors, fragments, accumulators in flight."""

from __future__ import annotations

import functools
import itertools
import operator
from collections.abc import Iterator
from typing import Any

import numpy as np

from ..arithmetic.numeric import LaneSet
from ..errors import DescriptorError, MemoryFault, SyncError
from ..parsing.ir import Instr, Reg
from ..state.accesses import Where
from ..state.machine import AsyncOp
from ..state.warp import Warp
from ..synchronisation.clocks import View
from ..translation.codegen import Park
from .operand import SmemLayout, add_fp8_products, fetch, multiply, placed, widen

_SPANS = {0: 0, 1: 128, 2: 64, 3: 32}
_RESERVED = (0b11 << 14) | (0b11 << 30) | (0b111 << 46) | (((1 << 10) - 1) << 52)


def decode_descriptor(bits: int) -> SmemLayout:
    """Decode an sm_90 matrix descriptor (ISA: wgmma matrix-descriptor format)."""
    if bits & _RESERVED:
        raise DescriptorError(f"matrix descriptor {bits:#018x} has reserved bits set")
    span, base = _SPANS[bits >> 62], bits >> 49 & 7
    if base and not span:
        raise DescriptorError(f"matrix descriptor {bits:#018x} has a base offset without a swizzle")
    lbo, sbo = (bits >> 16 & 0x3FFF) << 4, (bits >> 32 & 0x3FFF) << 4
    return SmemLayout((bits & 0x3FFF) << 4, lbo, sbo, span, base=base)


class Form:
    """The static part of one wgmma.mma_async instruction."""

    def __init__(self, ins: Instr, n: int, depth: int, kinds: tuple[str, str], out: str, d: list[Reg]) -> None:
        self.ins, self.n, self.depth, self.kinds, self.out, self.d = ins, n, depth, kinds, out, d
        self.of_d = operator.itemgetter(*(reg.index for reg in d))  # of a list by register
        self.a_regs: list[Reg] | None = None
        self.scale_a = self.scale_b = 1
        self.a_mn = self.b_mn = self.saturate = False
        self.fp8_sums = out == "f32" and kinds[0] in ("e4m3", "e5m2")


class Accumulator:
    """A D matrix in flight: its value, its element poison, and the register arrays that will receive it."""

    def __init__(self, n: int, out: str) -> None:
        self.n, self.out = n, out
        self.value: np.ndarray | None = None
        self.bad: np.ndarray | None = None
        self.fresh: dict[int, tuple[np.ndarray, np.ndarray | None]] = {}
        self.count = n // 4 if out == "f16" else n // 2
        self.code = "u4" if out == "f16" else "f4" if out == "f32" else "i4"
        self.buffers = [np.zeros((self.count, 32), self.code) for _ in range(4)]
        self.rows = [list(b) for b in self.buffers]
        self.pending = [np.ones(32, bool) for _ in range(4)]
        self.delivered = [False] * 4
        self.last = 0


class Operation:
    """One wgmma of a warpgroup; each warp adds its part, the fourth makes it complete."""

    def __init__(self, form: Form, seq: int) -> None:
        self.form, self.seq = form, seq
        self.key: tuple | None = None
        self.parts = 0
        self.acc: Accumulator | None = None
        self.a_parts: dict[int, tuple[np.ndarray, np.ndarray | None]] = {}
        self.views: list[tuple[Warp, View]] = []
        self.view: View | None = None


class Warpgroup:
    """State of four consecutive warps: operations by sequence number."""

    def __init__(self, cta: Any, index: int) -> None:
        self.cta, self.index = cta, index
        self.issued = [0] * 4
        self.ends: list[list[int]] = [[] for _ in range(4)]
        self.fenced = [False] * 4
        self.done = 0
        self.ops: dict[int, Operation] = {}
        self.recent: list[Accumulator] = []
        detector = cta.cluster.detector
        if detector:
            # The ISA forms wgmma-groups per warpgroup: whichever of its warps has waited knows that all four are done.
            self.agent = detector.new_agent(f"wgmma of block {cta.ctaid} warpgroup {index}", False)

    @property
    def key(self) -> tuple:
        """Name of the operation queue."""
        return ("wgmma", id(self.cta), self.index)


def group_of(W: Warp, ins: Instr, L: LaneSet) -> tuple[Warpgroup, int]:
    """Return the warpgroup and the warp's place in it."""
    if L is not None:
        W.fail(SyncError, ins, "wgmma needs all 32 lanes of the warp", L)
    index = W.index // 4
    if 4 * index + 4 > len(W.cta.warps):
        W.fail(SyncError, ins, "wgmma needs four consecutive warps")
    table = W.cta.state
    if ("wgmma", index) not in table:
        table[("wgmma", index)] = Warpgroup(W.cta, index)
    return table[("wgmma", index)], W.index % 4


def fence(W: Warp, ins: Instr, L: LaneSet) -> None:
    """wgmma.fence."""
    group, w = group_of(W, ins, L)
    group.fenced[w] = True


def commit(W: Warp, ins: Instr, L: LaneSet) -> None:
    """wgmma.commit_group."""
    group, w = group_of(W, ins, L)
    group.ends[w].append(group.issued[w])


def issue(W: Warp, form: Form, L: LaneSet, desc_a: int | None, desc_b: int, scale_d: bool) -> None:
    """Add one warp's part of a wgmma; the last of four warps queues the work."""
    ins = form.ins
    group, w = group_of(W, ins, L)
    if not group.fenced[w]:
        why = "no wgmma.fence orders the registers before this wgmma (since the last wait_group)"
        W.bend("wgmma-fence", SyncError, ins, why)
    group.issued[w] += 1
    seq = group.issued[w]
    operation = group.ops.get(seq)
    if operation is None:
        operation = group.ops[seq] = Operation(form, seq)
    key = (id(form), desc_a, desc_b, scale_d)
    if operation.key is None:
        operation.key = key
    elif operation.key != key:
        W.fail(SyncError, ins, "the four warps of a warpgroup issue different wgmma instructions or descriptors")
    if form.a_regs is not None:
        values = np.concatenate([W.R[r.index].view("u4") for r in form.a_regs]).reshape(len(form.a_regs), 32)
        operation.a_parts[w] = (values, _stack_poison(W, form.a_regs))
    _bind_accumulator(W, group, operation, w, scale_d)
    detector = W.cta.cluster.detector
    if detector:
        view = detector.async_view(W.agent)
        operation.views.append((W, view))
        operation.view = view if operation.view is None else operation.view.meet(view)
    operation.parts += 1
    if operation.parts == 4:
        _submit(W, group, operation, desc_a, desc_b, scale_d)


def _stack_poison(W: Warp, regs: list[Reg]) -> np.ndarray | None:
    masks = [W.Q[r.index] for r in regs]
    if all(m is None for m in masks):
        return None
    stacked = np.stack([np.zeros(32, bool) if m is None else m for m in masks])
    return stacked if stacked.any() else None


def _bind_accumulator(W: Warp, group: Warpgroup, operation: Operation, w: int, scale_d: bool) -> None:
    """Find the accumulator that D's registers continue, or start one."""
    form = operation.form
    regs = form.d
    first = W.R[regs[0].index]
    found = None
    for acc in reversed(group.recent):
        base = acc.rows[w][0]
        if first is base or first.base is acc.buffers[w]:
            found = acc
            break
    in_flight = found is not None and W.Q[regs[0].index] is found.pending[w]
    if in_flight:
        if found.n != form.n or found.out != form.out:
            W.fail(SyncError, form.ins, "D is the accumulator of a wgmma of another shape that is still in flight")
        if not all(map(operator.is_, form.of_d(W.Q), itertools.repeat(found.pending[w]))):
            W.fail(SyncError, form.ins, "some D registers were written while a wgmma on them is in flight")
        acc = found
    else:
        acc = operation.acc or Accumulator(form.n, form.out)
        if acc not in group.recent:
            group.recent = [*(old for old in group.recent if not all(old.delivered)), acc]
        if scale_d:
            code = acc.buffers[w].dtype
            values = np.concatenate(form.of_d(W.R)).reshape(len(regs), 32).view(code)
            acc.fresh[w] = (values, _stack_poison(W, regs))
        storage, own, pending = W.program.cfg.storage, acc.code, acc.pending[w]
        R, Q = W.R, W.Q
        for reg, row in zip(regs, acc.rows[w], strict=False):
            index = reg.index
            code = storage[index]
            R[index] = row if code == own else row.view(code)
            Q[index] = pending
    if operation.acc is None:
        operation.acc = acc
    elif operation.acc is not acc:
        W.fail(SyncError, form.ins, "the warps of a warpgroup continue different accumulators")
    acc.last = max(acc.last, operation.seq)  # a warp may be ahead of this one


def _submit(W: Warp, group: Warpgroup, operation: Operation, desc_a: int | None, desc_b: int, scale_d: bool) -> None:
    """Check what the operation reads, then queue its arithmetic."""
    form, cta = operation.form, W.cta
    try:
        b_layout = decode_descriptor(desc_b)
        a_layout = None if desc_a is None else decode_descriptor(desc_a)
    except DescriptorError as error:
        W.fail(DescriptorError, form.ins, str(error))
    b_chunks = _operand(W, group, operation, b_layout, form.b_mn, form.n, form.kinds[1], False)
    a_chunks = None
    if a_layout is not None:
        a_chunks = _operand(W, group, operation, a_layout, form.a_mn, 64, form.kinds[0], True)
    group.ops.pop(operation.seq, None)

    def finish() -> None:
        b, b_bad = fetch(cta.shared, b_chunks, form.b_mn, form.kinds[1])
        if a_chunks is not None:
            a, a_bad = fetch(cta.shared, a_chunks, form.a_mn, form.kinds[0])
        else:
            a, a_bad = _register_a(operation, form)
        _accumulate(operation.acc, form, a if form.scale_a == form.scale_b else -a, b, a_bad, b_bad, scale_d)
        group.done = operation.seq

    cta.cluster.submit(group.key, AsyncOp("wgmma", finish))
    W.launch.counters[f"flops wgmma {form.kinds[0]}"] += 2 * 64 * form.n * form.depth


def _operand(
    W: Warp, group: Warpgroup, operation: Operation, layout: SmemLayout, mn_major: bool, mn: int, kind: str, own: bool
) -> np.ndarray:
    """Return an operand's chunks, bounds-checked and told to the detector.

    Each warp must see all of B, but of A its ``own`` 16 rows alone: FlashAttention-3 fences each warp's rows of P. On
    an H200, no row was stale when each warp wrote, fenced and synchronised only its own, one of them 200,000 cycles
    late: the others' wgmma ended after it had begun to write.
    """
    form, cta = operation.form, W.cta
    bits = {"tf32": 32, "f16": 16, "bf16": 16}.get(kind, 8)
    if layout.span and layout.start % 16:
        W.fail(DescriptorError, form.ins, "operand start is not 16-byte aligned")
    chunks, words = placed(layout, mn_major, mn, form.depth, bits)
    if int(chunks.min()) < 0 or int(chunks.max()) * 16 + 16 > cta.shared.limit:
        low, high = int(chunks.min()) * 16, int(chunks.max()) * 16 + 16
        W.fail(MemoryFault, form.ins, f"operand bytes {low}..{high} leave the block's {cta.shared.limit} shared bytes")
    detector = cta.cluster.detector
    if detector:
        parts = functools.partial(_parts, operation, words, own)
        where = Where(W, form.ins)
        detector.async_read(W.agent, operation.view, cta.shadow, words, group.agent, operation.seq, where, parts)
    return chunks


def _parts(operation: Operation, words: np.ndarray, own: bool) -> Iterator[tuple]:
    """Yield the issuers of an operation, the clocks that it may rely on, and the words that it must see."""
    for warp, view in operation.views:
        share = words.reshape(4, -1)[warp.index % 4] if own else words
        yield (warp.agent, view, Where(warp, operation.form.ins)), share


def _register_a(operation: Operation, form: Form) -> tuple[np.ndarray, np.ndarray | None]:
    """Assemble A [64, K] from the warps' registers.

    Register j of a warp holds, for lane (g, c), row g + 8*(j & 1) and the 32-bit column c + 4*(j >> 1).
    """
    words = np.concatenate([operation.a_parts[w][0] for w in range(4)]).reshape(4, 2, 2, 8, 4)
    rows = np.ascontiguousarray(words.transpose(0, 2, 3, 1, 4)).reshape(64, 8)
    kind = form.kinds[0]
    values = rows.view({"tf32": "u4", "f16": "u2", "bf16": "u2"}.get(kind, "u1"))
    bad = None
    if any(operation.a_parts[w][1] is not None for w in range(4)):
        masks = [operation.a_parts[w][1] for w in range(4)]
        stacked = np.stack([np.zeros((4, 32), bool) if m is None else m for m in masks]).reshape(4, 2, 2, 8, 4)
        bad = stacked.transpose(0, 2, 3, 1, 4).reshape(64, 8).any(1)
    return widen(values, kind), bad


def to_matrix(regs: np.ndarray, n: int) -> np.ndarray:
    """Return a warp's 16 rows of D from its registers [n/2, 32] (reg i: row g + 8*(i>>1&1), col 8*(i>>2)+2c+(i&1))."""
    return regs.reshape(n // 8, 2, 2, 8, 4).transpose(1, 3, 0, 4, 2).reshape(16, n)


def to_registers(rows: np.ndarray, n: int) -> np.ndarray:
    """Return registers [n/2, 32] from a warp's 16 rows of D."""
    return rows.reshape(2, 8, n // 8, 4, 2).transpose(2, 0, 4, 1, 3).reshape(n // 2, 32)


def _unpack(acc: Accumulator, regs: np.ndarray) -> np.ndarray:
    """Return a warp's rows as numbers; f16 results are packed in pairs of columns."""
    if acc.out != "f16":
        return to_matrix(regs, acc.n)
    pairs = regs.reshape(acc.n // 8, 2, 8, 4).transpose(1, 2, 0, 3)
    return np.ascontiguousarray(pairs).reshape(16, acc.n // 2).view("f2").astype("f4")


def _pack(acc: Accumulator, rows: np.ndarray) -> np.ndarray:
    if acc.out == "f16":
        words = np.ascontiguousarray(rows.astype("f2")).view("u4")
        return words.reshape(2, 8, acc.n // 8, 4).transpose(2, 0, 1, 3).reshape(-1, 32)
    return to_registers(rows, acc.n)


def _accumulate(
    acc: Accumulator, form: Form, a: np.ndarray, b: np.ndarray, a_bad: np.ndarray | None, b_bad: np.ndarray | None,
    scale_d: bool,
) -> None:  # fmt: skip
    if acc.fresh:
        _take_registers(acc)
    before = acc.value if scale_d else None
    if before is None:
        acc.bad = None
    if form.fp8_sums:
        total = add_fp8_products(a, b, before, form.kinds)
    else:
        total = multiply(a, b, form.out == "s32")
        total = total if before is None else before + total
    if form.saturate:
        total = np.clip(total, -(2**31), 2**31 - 1)
    acc.value = {"f32": lambda t: t.astype("f4"), "s32": lambda t: t.astype("i8").astype("i4"),
                 "f16": lambda t: t.astype("f2").astype("f4")}[acc.out](total)  # fmt: skip
    for mask, axis in ((a_bad, 0), (b_bad, 1)):
        if mask is not None and mask.any():
            acc.bad = np.zeros((64, acc.n), bool) if acc.bad is None else acc.bad
            if axis == 0:
                acc.bad[mask] = True
            else:
                acc.bad[:, mask] = True


def _take_registers(acc: Accumulator) -> None:
    """Take the accumulator's value and poison from the registers as they were when the products were issued."""
    rows, bad = [], None
    for w in range(4):
        values, mask = acc.fresh[w]
        rows.append(_unpack(acc, values))
        if mask is not None:
            bad = np.zeros((64, acc.n), bool) if bad is None else bad
            full = mask.repeat(2, axis=0) if acc.out == "f16" else mask
            bad[16 * w : 16 * w + 16] = to_matrix(full, acc.n)
    acc.value, acc.bad = np.concatenate(rows), bad
    acc.fresh = {}


def wait(W: Warp, ins: Instr, L: LaneSet, keep: int) -> Any:
    """wgmma.wait_group: deliver the results of all but the newest ``keep`` groups of this warp."""
    group, w = group_of(W, ins, L)
    ends = group.ends[w]
    if len(ends) <= keep:
        return None
    need = ends[len(ends) - 1 - keep]
    if min(group.issued) < need:
        return Park(lambda: min(group.issued) >= need, "waits for the other warps' part of a wgmma", redo=True)
    W.cta.cluster.drain(group.key, lambda: group.done >= need)
    del ends[: len(ends) - keep - 1]
    group.fenced[w] = False
    detector = W.cta.cluster.detector
    if detector:
        detector.learn(W.agent, group.agent, need)
    for acc in group.recent:
        if not acc.delivered[w] and acc.last and acc.last <= need and acc.value is not None:
            _deliver(W, acc, w)
    return None


def _deliver(W: Warp, acc: Accumulator, w: int) -> None:
    """Write a warp's share into the register arrays and lift their poison."""
    acc.delivered[w] = True
    acc.buffers[w][...] = _pack(acc, acc.value[16 * w : 16 * w + 16])
    Q, R, pending = W.Q, W.R, acc.pending[w]
    bad = None
    if acc.bad is not None and acc.bad[16 * w : 16 * w + 16].any():
        elements = to_registers(acc.bad[16 * w : 16 * w + 16], acc.n)
        bad = elements[::2] | elements[1::2] if acc.out == "f16" else elements
    start = acc.buffers[w].ctypes.data
    for index in W.program.inflight_registers():
        if Q[index] is pending and R[index].base is acc.buffers[w]:
            mask = None
            if bad is not None:
                mask = bad[(R[index].ctypes.data - start) // 128]
                mask = mask if mask.any() else None
            Q[index] = mask
