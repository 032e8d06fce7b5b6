"""Run-time behaviour of the tensor core: matrix multiply, commits, copies from shared memory."""

from __future__ import annotations

import numpy as np

from .errors import DescriptorError, MemoryFault, SyncError
from .ir import Instr
from .machine import AsyncOp
from .memory import RANK_SHIFT
from .operand import fetch, multiply, placed, widen
from .ops_mbar import find
from .tcgen05 import DEPTH, InstructionDescriptor, data_path, decode_instruction_descriptor, decode_smem_descriptor
from .tmem import COLUMNS, TensorMemory, tmem_of
from .tmemops import check_group, pair, pipe_of
from .warp import Warp, _Where


# ---- matrix multiply -----------------------------------------------------------------------------------------------
class Mma:
    """One tcgen05.mma: its operands located and checked at issue, its arithmetic done when it completes."""

    def __init__(self, W: Warp, ins: Instr, kind: str, group: int, ws: bool) -> None:
        self.W, self.ins, self.kind, self.group, self.ws = W, ins, kind, group, ws
        self.ctas = pair(W, ins, group)
        self.detector = W.cta.cluster.detector
        self.pipe = pipe_of(W)

    def issue(
        self, d: int, a: int, a_in_tmem: bool, b: int, idesc: int, enable: bool, mask: list[int] | None, scale: int
    ) -> None:
        """Decode descriptors, check every access, queue the operation."""
        W, ins = self.W, self.ins
        check_group(W, ins, self.group)
        try:
            desc = decode_instruction_descriptor(idesc, self.kind, self.group, self.ws)
            b_layout = decode_smem_descriptor(b)
            a_layout = None if a_in_tmem else decode_smem_descriptor(a)
        except DescriptorError as error:
            W.fail(DescriptorError, ins, str(error))
        self.pipe.issued += 1
        self.clock = self.pipe.issued
        if self.detector:
            self.view = self.detector.async_view(W.agent)
            self.tensor = self.detector.tensor_view(W.agent, self.pipe.agents[0])
        letter, self.parts, lanes, columns = data_path(desc.m, desc.n, self.group, self.ws)
        base_lane, base_column = d >> 16, d & 0xFFFF
        if base_lane not in ((0, 16) if letter == "F" else (0,)):
            W.fail(MemoryFault, ins, f"D's lane field {base_lane} is not legal for layout {letter}")
        self.lanes, self.columns = lanes + base_lane, columns + base_column
        self._check_columns(self.columns)
        depth = DEPTH[self.kind]
        bits = 256 // depth
        b_rows = desc.n // self.group
        b_places = [self._shared(cta, b_layout, desc.b_mn, b_rows, depth, bits) for cta in self.ctas]
        if a_in_tmem:
            a_places = self._tensor_a(a, letter)
        else:
            a_places = [self._shared(cta, a_layout, desc.a_mn, desc.m // self.group, depth, bits) for cta in self.ctas]
        if a_in_tmem and desc.a_mn:
            W.fail(DescriptorError, ins, "A in tensor memory cannot be transposed")
        self._record_d(desc, enable, base_lane)

        def finish() -> None:
            self._compute(desc, a_in_tmem, a_places, b_places, enable, mask, scale)

        W.cta.cluster.submit(("tcgen05", id(W)), AsyncOp("tcgen05.mma", finish))
        W.launch.counters[f"flops tcgen05 {desc.a_kind}"] += 2 * desc.m * desc.n * depth

    def _check_columns(self, columns: np.ndarray) -> None:
        for cta in self.ctas:
            why = tmem_of(cta).outside(columns)
            if why:
                self.W.fail(MemoryFault, self.ins, why)

    def _shared(self, cta: object, layout: object, mn_major: bool, mn: int, depth: int, bits: int) -> np.ndarray:
        """Return a shared-memory operand's chunks in one block."""
        chunks, words = placed(layout, mn_major, mn, depth, bits)
        if int(chunks.min()) < 0 or int(chunks.max()) * 16 + 16 > cta.shared.limit:
            low, high = int(chunks.min()) * 16, int(chunks.max()) * 16 + 16
            limit = cta.shared.limit
            self.W.fail(MemoryFault, self.ins, f"operand bytes {low}..{high} leave the block's {limit} shared bytes")
        if self.detector:
            where, agents = _Where(self.W, self.ins), (self.pipe.agents[0],)
            self.detector.async_read(self.W.agent, self.view, cta.shadow, words, agents, self.clock, where)
        return chunks

    def _tensor_a(self, address: int, letter: str) -> np.ndarray:
        """Return the cells [rows, parts, 8 columns] of A in tensor memory."""
        lane, column = address >> 16, address & 0xFFFF
        if lane not in ((0, 16) if letter == "F" else (0,)):
            self.W.fail(MemoryFault, self.ins, f"A's lane field {lane} is not legal for layout {letter}")
        base = self.lanes - (int(self.lanes[0, 0]))
        if letter == "F" and lane != int(self.lanes[0, 0]):
            self.W.fail(MemoryFault, self.ins, "A and D of layout F must use the same lane half")
        columns = column + np.arange(8)
        self._check_columns(columns)
        cells = (base + lane)[:, :, None] * COLUMNS + columns
        if self.detector:
            for cta in self.ctas:
                shadow, where = tmem_of(cta).shadow, _Where(self.W, self.ins)
                agent = self.pipe.agents[0]
                self.detector.tensor_read(
                    self.W.agent, self.tensor, shadow, cells.reshape(-1), agent, self.clock, where
                )
        return cells

    def _record_d(self, desc: InstructionDescriptor, enable: bool, base_lane: int) -> None:
        """Check the accumulator against operations in flight, and note this one."""
        W, pipe = self.W, self.pipe
        key = (base_lane, int(self.columns[0]), desc.m, desc.n, self.group, self.ws)
        low, high = int(self.columns[0]), int(self.columns[-1]) + 1
        lanes = frozenset(self.lanes.reshape(-1).tolist())
        done = 0
        if self.detector:
            done = int(self.detector.T[W.agent, pipe.agents[0]])
        pipe.flight = [f for f in pipe.flight if f[0] > done][-256:]
        for clock, first, last, other_lanes, other_key in pipe.flight:
            if other_key != key and first < high and low < last and lanes & other_lanes:
                W.fail(
                    SyncError,
                    self.ins,
                    f"D overlaps the accumulator of tcgen05.mma number {clock}, still in flight with another shape",
                )
        if not any(f[4] == key for f in pipe.flight):
            pipe.flight.append((self.clock, low, high, lanes, key))
        else:
            pipe.flight = [(self.clock, *f[1:]) if f[4] == key else f for f in pipe.flight]
        if self.detector:
            cells = (self.lanes[:, :, None] * COLUMNS + self.columns).reshape(-1)
            for cta in self.ctas:
                shadow, where = tmem_of(cta).shadow, _Where(W, self.ins)
                self.detector.tensor_write(W.agent, self.tensor, shadow, cells, pipe.agents[0], self.clock, where)

    def _compute(
        self, desc: InstructionDescriptor, a_in_tmem: bool, a_places: object, b_places: list, enable: bool,
        mask: list[int] | None, scale: int,
    ) -> None:  # fmt: skip
        parts = [fetch(c.shared, p, desc.b_mn, desc.b_kind) for c, p in zip(self.ctas, b_places, strict=False)]
        b = np.concatenate([p[0] for p in parts])
        b_bad = np.concatenate([np.zeros(len(p[0]), bool) if p[1] is None else p[1] for p in parts])
        for index, cta in enumerate(self.ctas):
            tmem = tmem_of(cta)
            if a_in_tmem:
                a, a_bad = self._read_tensor_a(tmem, a_places, desc.a_kind)
            else:
                a, bad = fetch(cta.shared, a_places[index], desc.a_mn, desc.a_kind)
                a, a_bad = [a], [np.zeros(len(a), bool) if bad is None else bad]
            self._write_d(tmem, desc, a, a_bad, b, b_bad, enable, mask, scale, index)

    def _read_tensor_a(self, tmem: TensorMemory, cells: np.ndarray, kind: str) -> tuple[list, list]:
        """Return A per part of the data path (each lane group multiplies its own part of B)."""
        code = {"f16": "u2", "bf16": "u2", "tf32": "u4"}.get(kind, "u1")
        values, bad = [], []
        for part in range(cells.shape[1]):
            raw = np.ascontiguousarray(tmem.cells.reshape(-1)[cells[:, part]])
            values.append(widen(raw.view(code), kind))
            bad.append(~tmem.defined.reshape(-1)[cells[:, part]].all(1))
        return values, bad

    def _write_d(
        self, tmem: TensorMemory, desc: InstructionDescriptor, a: list, a_bad: list, b: np.ndarray, b_bad: np.ndarray,
        enable: bool, mask: list[int] | None, scale: int, index: int,
    ) -> None:  # fmt: skip
        width = desc.n // self.parts
        negative = desc.negate_a != desc.negate_b
        for part in range(self.parts):
            own, own_bad = (a[part], a_bad[part]) if len(a) > 1 else (a[0], a_bad[0])
            some = slice(part * width, (part + 1) * width)
            product = multiply(own, b[some], desc.out == "s32")
            product = -product if negative else product
            rows = self.lanes[:, part]
            cells = np.ix_(rows, self.columns)
            defined = ~(own_bad[:, None] | b_bad[some][None, :])
            if enable:
                old = _numbers(tmem.cells[cells], desc.out)
                product = product + (old * 2.0**-scale if scale else old)
                defined &= tmem.defined[cells]
            result = _bits(product, desc.out, desc.saturate)
            if mask is not None:
                keep = _lanes_enabled(mask, rows, index, len(self.ctas))
                result = np.where(keep[:, None], result, tmem.cells[cells])
                defined = np.where(keep[:, None], defined, tmem.defined[cells])
            tmem.cells[cells] = result
            tmem.defined[cells] = defined


def _lanes_enabled(mask: list[int], rows: np.ndarray, index: int, blocks: int) -> np.ndarray:
    """Return which lanes a disable-output-lane vector leaves enabled (four words per block)."""
    words = mask[4 * index : 4 * index + 4] if len(mask) == 4 * blocks else mask[:4]
    disabled = np.array([words[lane // 32] >> (lane % 32) & 1 for lane in rows], bool)
    return ~disabled


def _numbers(cells: np.ndarray, out: str) -> np.ndarray:
    if out == "f16":
        return (cells & 0xFFFF).astype("u2").view("f2").astype("f4")
    return np.ascontiguousarray(cells).view("f4" if out == "f32" else "i4")


def _bits(values: np.ndarray, out: str, saturate: bool) -> np.ndarray:
    if out == "f16":
        return values.astype("f2").view("u2").astype("u4")
    if out == "f32":
        return np.ascontiguousarray(values, dtype="f4").view("u4")
    whole = values.astype("i8")
    if saturate:
        whole = np.clip(whole, -(2**31), 2**31 - 1)
    return whole.astype("i4").view("u4")


def commit(W: Warp, ins: Instr, group: int, address: int, mask: int | None) -> None:
    """tcgen05.commit: arrive on mbarriers when all prior operations of the thread have completed."""
    check_group(W, ins, group)
    pipe = pipe_of(W)
    clock = pipe.issued
    if mask is None:
        addresses = [address]
    else:
        low = address & ((1 << RANK_SHIFT) - 1)
        addresses = [low + (rank << RANK_SHIFT) for rank in range(16) if mask >> rank & 1]
    barriers = [find(W, ins, each, asynchronous=True) for each in addresses]
    detector = W.cta.cluster.detector
    known = detector.knowledge(W.agent) if detector else None

    def finish() -> None:
        for barrier in barriers:
            if not barrier.cta.alive:
                W.sync_error(ins, "tcgen05.commit arrives in a block that has exited")
            barrier.gather_known(known)
            if detector:
                barrier.gather_clock(pipe.agents[0], clock)
            try:
                barrier.arrive(1)
            except SyncError as error:
                W.fail(SyncError, ins, str(error))

    W.cta.cluster.submit(("tcgen05", id(W)), AsyncOp("tcgen05.commit", finish))


# ---- copies from shared memory -------------------------------------------------------------------------------------
COPY_FORMS = {
    ("128x256b", ""): (128, 2, [np.arange(128)]),
    ("128x128b", ""): (128, 1, [np.arange(128)]),
    ("64x128b", "warpx2::02_13"): (64, 1, [np.arange(64), np.arange(64) + 64]),
    ("64x128b", "warpx2::01_23"): (64, 1, [np.arange(64) + 32 * (np.arange(64) // 32),
                                           np.arange(64) + 32 * (np.arange(64) // 32) + 32]),
    ("32x128b", "warpx4"): (32, 1, [np.arange(32) + 32 * q for q in range(4)]),
}  # fmt: skip
"""Rows, 16-byte chunks per row, and the lanes that each copy of the rows goes to, of every tcgen05.cp shape."""


def copy(W: Warp, ins: Instr, group: int, shape: str, multicast: str, taddr: int, desc: int) -> None:
    """tcgen05.cp."""
    check_group(W, ins, group)
    rows, chunks_per_row, targets = COPY_FORMS[(shape, multicast)]
    try:
        layout = decode_smem_descriptor(desc)
    except DescriptorError as error:
        W.fail(DescriptorError, ins, str(error))
    pipe, detector = pipe_of(W), W.cta.cluster.detector
    pipe.issued += 1
    clock = pipe.issued
    if taddr >> 16:
        W.fail(MemoryFault, ins, "the destination of tcgen05.cp has a lane field")
    columns = (taddr & 0xFFFF) + np.arange(4 * chunks_per_row)
    for cta in pair(W, ins, group):
        tmem = tmem_of(cta)
        why = tmem.outside(columns)
        if why:
            W.fail(MemoryFault, ins, why)
        chunks, words = placed(layout, False, rows, chunks_per_row * 8, 16)
        if int(chunks.min()) < 0 or int(chunks.max()) * 16 + 16 > cta.shared.limit:
            W.fail(MemoryFault, ins, "the source of tcgen05.cp leaves shared memory")
        if detector:
            where, agent = _Where(W, ins), pipe.agents[0]
            detector.async_read(W.agent, detector.async_view(W.agent), cta.shadow, words, (agent,), clock, where)
            view = detector.tensor_view(W.agent, agent)
            for lanes in targets:
                cells = (lanes[:, None] * COLUMNS + columns).reshape(-1)
                detector.tensor_write(W.agent, view, tmem.shadow, cells, agent, clock, where)

        def finish(cta: object = cta, tmem: TensorMemory = tmem, chunks: np.ndarray = chunks) -> None:
            data = cta.shared.chunks[chunks].reshape(rows, -1)
            defined = (cta.shared.chunk_init[chunks] == 0x01010101).reshape(rows, -1)
            for lanes in targets:
                tmem.cells[np.ix_(lanes, columns)] = data
                tmem.defined[np.ix_(lanes, columns)] = defined

        W.cta.cluster.submit(("tcgen05", id(W)), AsyncOp("tcgen05.cp", finish))
