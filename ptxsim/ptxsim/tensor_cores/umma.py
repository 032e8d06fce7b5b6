"""Run-time behaviour of the tensor core: matrix multiply and commits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from ..errors import DescriptorError, MemoryFault, SyncError
from ..instructions.mbarrier import find
from ..memory.spaces import RANK_SHIFT
from ..parsing.ir import Instr
from ..state.accesses import Where
from ..state.machine import AsyncOp
from ..state.warp import Warp
from ..synchronisation.shadow import Box
from .operand import fetch, from_containers, multiply, nibbles, placed, widen
from .pipe import Region, check_group, pair, pipe_of, region
from .tcgen05 import (
    DEPTH,
    InstructionDescriptor,
    check_layout,
    data_path,
    decode_instruction_descriptor,
    decode_smem_descriptor,
    zero_columns,
)
from .tmem import COLUMNS, TensorMemory, tmem_of
from .tmem_copy import record_shift, shift_rows

_LANES = np.arange(128)


@dataclass(frozen=True)
class Form:
    """The static part of a tcgen05.mma instruction (``vectors``: scale factors along K, of .block_scale)."""

    kind: str
    group: int
    ws: bool
    a_in_tmem: bool
    ashift: bool = False
    scale: int = 0
    vectors: int = 0


@dataclass(frozen=True)
class Operands:
    """The operands of one tcgen05.mma: addresses, descriptors and masks."""

    d: int
    a: int
    b: int
    idesc: int
    enable: bool
    mask: tuple[int, ...] = ()
    zeros: int = 0
    sfa: int = 0
    sfb: int = 0


class Mma:
    """One tcgen05.mma: its operands located and checked at issue, its arithmetic done when it completes."""

    def __init__(self, W: Warp, ins: Instr, form: Form, operands: Operands) -> None:
        self.W, self.ins, self.form, self.operands = W, ins, form, operands
        self.ctas = pair(W, ins, form.group)
        self.detector = W.cta.cluster.detector
        self.pipe = pipe_of(W)

    def issue(self) -> None:
        """Decode descriptors, check every access, queue the operation."""
        W, ins, form, operands = self.W, self.ins, self.form, self.operands
        check_group(W, ins, form.group)
        a_layout, b_layout = self._decode()
        desc = self.desc
        self.pipe.issued += 1
        self.clock = self.pipe.issued
        if self.detector:
            self.view = self.detector.async_view(W.agent)
            self.tensor = self.detector.tensor_view(W.agent, self.pipe.agents[0])
        letter, self.parts, lanes, columns = data_path(desc.m, desc.n, form.group, form.ws)
        base_lane, base_column = operands.d >> 16, operands.d & 0xFFFF
        if base_lane not in ((0, 16) if letter == "F" else (0,)):
            W.fail(MemoryFault, ins, f"D's lane field {base_lane} is not legal for layout {letter}")
        self.lanes, self.columns = lanes + base_lane, columns + base_column
        self._check_columns(self.columns)
        depth = DEPTH[form.kind]
        bits = 256 // depth
        b_places = [self._shared(cta, b_layout, desc.b_mn, desc.n // form.group, depth, bits) for cta in self.ctas]
        regions = [region(self.lanes, self.columns, True), *self._more_regions()]
        a_places: Any
        if a_layout is None:
            a_places = self._tensor_a(letter)
            regions.append(region(_LANES if form.ashift else self.lanes, self.a_columns, form.ashift))
        else:
            rows = desc.m // form.group
            a_places = [self._shared(cta, a_layout, desc.a_mn, rows, depth, bits) for cta in self.ctas]
        key = (operands.d, desc.m, desc.n, form.group, form.ws)
        self.pipe.launch(W, ins, "mma", key, regions)
        self._record_d()
        if form.ashift:
            for cta in self.ctas:
                record_shift(W, ins, cta, _LANES, self.a_columns)
        operation = AsyncOp("tcgen05.mma", lambda: self._compute(a_places, b_places))
        W.cta.cluster.submit(("tcgen05", id(W)), operation)
        W.launch.counters[f"flops tcgen05 {desc.a_kind}"] += 2 * desc.m * desc.n * depth

    def _decode(self) -> tuple:
        """Decode and check all descriptors; return the layouts of A (None: in tensor memory) and B."""
        form, operands = self.form, self.operands
        a_layout = None
        try:
            desc = self._descriptor()
            b_layout = decode_smem_descriptor(operands.b)
            check_layout(b_layout, desc.b_mn, form.kind)
            if not form.a_in_tmem:
                a_layout = decode_smem_descriptor(operands.a)
                check_layout(a_layout, desc.a_mn, form.kind)
            elif desc.a_mn:
                raise DescriptorError("A in tensor memory cannot be transposed")
            if form.ashift and desc.m not in (128, 256):
                raise DescriptorError(f".ashift with M={desc.m}: only 128 and 256 are allowed")
            self.zeros = zero_columns(operands.zeros, desc.m, desc.n) if operands.zeros else None
        except DescriptorError as error:
            self.W.fail(DescriptorError, self.ins, str(error))
        self.desc = desc
        return a_layout, b_layout

    def _descriptor(self) -> InstructionDescriptor:
        form = self.form
        return decode_instruction_descriptor(self.operands.idesc, form.kind, form.group, form.ws)

    def _more_regions(self) -> list[Region]:
        """Return the regions that other operands than A and D touch."""
        return []

    def _product(
        self, tmem: TensorMemory, a: np.ndarray, a_bad: np.ndarray, b: np.ndarray, b_bad: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return the product of some rows of A and B, and which of its elements are defined."""
        return multiply(a, b, self.desc.out == "s32"), ~(a_bad[:, None] | b_bad[None, :])

    def _check_columns(self, columns: np.ndarray) -> None:
        for cta in self.ctas:
            why = tmem_of(cta).outside(columns)
            if why:
                self.W.fail(MemoryFault, self.ins, why)

    def _shared(self, cta: Any, layout: Any, mn_major: bool, mn: int, depth: int, bits: int) -> np.ndarray:
        """Return a shared-memory operand's chunks in one block."""
        chunks, words = placed(layout, mn_major, mn, depth, bits)
        if int(chunks.min()) < 0 or int(chunks.max()) * 16 + 16 > cta.shared.limit:
            low, high = int(chunks.min()) * 16, int(chunks.max()) * 16 + 16
            limit = cta.shared.limit
            self.W.fail(MemoryFault, self.ins, f"operand bytes {low}..{high} leave the block's {limit} shared bytes")
        if self.detector:
            where, agent = Where(self.W, self.ins), self.pipe.agents[0]
            self.detector.async_read(self.W.agent, self.view, cta.shadow, words, agent, self.clock, where)
        return chunks

    def _tensor_a(self, letter: str) -> np.ndarray:
        """Return the cells [rows, parts, 8 columns] of A in tensor memory."""
        lane, column = self.operands.a >> 16, self.operands.a & 0xFFFF
        if lane not in ((0, 16) if letter == "F" else (0,)):
            self.W.fail(MemoryFault, self.ins, f"A's lane field {lane} is not legal for layout {letter}")
        base = self.lanes - (int(self.lanes[0, 0]))
        if letter == "F" and lane != int(self.lanes[0, 0]):
            self.W.fail(MemoryFault, self.ins, "A and D of layout F must use the same lane half")
        self.a_columns = column + np.arange(8)
        self._check_columns(self.a_columns)
        cells = (base + lane)[:, :, None] * COLUMNS + self.a_columns
        if self.detector:
            agent, words = self.pipe.agents[0], cells.reshape(-1)
            for cta in self.ctas:
                shadow, where = tmem_of(cta).shadow, Where(self.W, self.ins)
                self.detector.tensor_read(self.W.agent, self.tensor, shadow, words, agent, self.clock, where)
        return cells

    def _record_d(self) -> None:
        """Tell the detector of the writes of D."""
        if not self.detector:
            return
        blocks = [_block(self.lanes[:, part], self.columns) for part in range(self.parts)]
        agent, where = self.pipe.agents[0], Where(self.W, self.ins)
        for cta in self.ctas:
            told = (self.W.agent, self.tensor, tmem_of(cta).shadow)
            for lanes, columns in blocks:
                if isinstance(lanes, slice):
                    self.detector.tensor_write_box(*told, Box(lanes, columns, COLUMNS), agent, self.clock, where)
                else:
                    cells = (lanes * COLUMNS + columns).reshape(-1)
                    self.detector.tensor_write(*told, cells, agent, self.clock, where)

    def _compute(self, a_places: Any, b_places: list) -> None:
        desc = self.desc
        parts = [fetch(c.shared, p, desc.b_mn, desc.b_kind) for c, p in zip(self.ctas, b_places, strict=False)]
        b = np.concatenate([p[0] for p in parts])
        b_bad = np.concatenate([np.zeros(len(p[0]), bool) if p[1] is None else p[1] for p in parts])
        if self.zeros is not None:
            b, b_bad = np.where(self.zeros[:, None], np.float32(0), b), b_bad & ~self.zeros
        for index, cta in enumerate(self.ctas):
            tmem = tmem_of(cta)
            if self.form.a_in_tmem:
                a, a_bad = self._read_tensor_a(tmem, a_places)
            else:
                rows, bad = fetch(cta.shared, a_places[index], desc.a_mn, desc.a_kind)
                a, a_bad = [rows], [np.zeros(len(rows), bool) if bad is None else bad]
            self._write_d(tmem, a, a_bad, b, b_bad, index)
            if self.form.ashift:
                for first in range(0, 128, 32):
                    shift_rows(tmem, first, self.a_columns)

    def _read_tensor_a(self, tmem: TensorMemory, cells: np.ndarray) -> tuple[list, list]:
        """Return A per part of the data path (each lane group multiplies its own part of B)."""
        kind = self.desc.a_kind
        code = {"f16": "u2", "bf16": "u2", "tf32": "u4"}.get(kind, "u1")
        values, bad = [], []
        for part in range(cells.shape[1]):
            defined = tmem.defined.reshape(-1)[cells[:, part]]
            raw = np.where(defined, tmem.cells.reshape(-1)[cells[:, part]], np.uint32(0))
            raw, padded = from_containers(raw.view(code), kind)
            if padded:
                why = f"padding bits of {kind} containers of A are set"
                self.W.bend("padding-bits", DescriptorError, self.ins, why)
            values.append(widen(nibbles(raw) if kind == "e2m1x2" else raw, kind))
            bad.append(~defined.all(1))
        return values, bad

    def _write_d(self, tmem: TensorMemory, a: list, a_bad: list, b: np.ndarray, b_bad: np.ndarray, index: int) -> None:
        desc, scale, mask = self.desc, self.form.scale, self.operands.mask
        width = desc.n // self.parts
        negative = desc.negate_a != desc.negate_b
        for part in range(self.parts):
            own, own_bad = (a[part], a_bad[part]) if len(a) > 1 else (a[0], a_bad[0])
            some = slice(part * width, (part + 1) * width)
            product, defined = self._product(tmem, own, own_bad, b[some], b_bad[some])
            product = -product if negative else product
            rows = self.lanes[:, part]
            cells = _block(rows, self.columns)
            if self.operands.enable:
                old = _numbers(tmem.cells[cells], desc.out)
                product = product + (old * 2.0**-scale if scale else old)
                defined &= tmem.defined[cells]
            result = _bits(product, desc.out, desc.saturate)
            if mask:
                keep = _lanes_enabled(mask, rows, index)
                result = np.where(keep[:, None], result, tmem.cells[cells])
                defined = np.where(keep[:, None], defined, tmem.defined[cells])
            tmem.cells[cells] = result
            tmem.defined[cells] = defined


def _block(rows: np.ndarray, columns: np.ndarray) -> tuple:
    """Return the index of rows x columns (consecutive ones) of tensor memory: slices, as a rule."""
    first, last = int(rows[0]), int(rows[-1])
    if last - first + 1 == len(rows):
        return slice(first, last + 1), slice(int(columns[0]), int(columns[-1]) + 1)
    return rows[:, None], columns


def _lanes_enabled(mask: tuple[int, ...], rows: np.ndarray, index: int) -> np.ndarray:
    """Return which lanes a disable-output-lane vector leaves enabled (four words per block)."""
    words = mask[4 * index : 4 * index + 4]
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
