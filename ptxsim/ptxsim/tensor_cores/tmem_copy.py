"""Tensor-memory data movement by the tensor core: copies from shared memory (tcgen05.cp) and row shifts."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..errors import DescriptorError, MemoryFault
from ..parsing.ir import Instr
from ..state.accesses import Where
from ..state.machine import AsyncOp
from ..state.warp import Warp
from .operand import CONTAINER_SHIFT, placed, unpack
from .pipe import check_group, pair, pipe_of, region
from .tcgen05 import check_layout, decode_smem_descriptor
from .tmem import COLUMNS, TensorMemory, tmem_of

_R32, _R64 = np.arange(32), np.arange(64)
COPY_FORMS = {
    ("128x256b", ""): (128, 2, [np.arange(128)]),
    ("4x256b", ""): (4, 2, [32 * np.arange(4)]),
    ("128x128b", ""): (128, 1, [np.arange(128)]),
    ("64x128b", "warpx2::02_13"): (64, 1, [_R64, _R64 + 64]),
    ("64x128b", "warpx2::01_23"): (64, 1, [_R64 + 32 * (_R64 // 32), _R64 + 32 * (_R64 // 32) + 32]),
    ("32x128b", "warpx4"): (32, 1, [_R32 + 32 * q for q in range(4)]),
}
"""Rows, 16-byte chunks per row, and the lanes that each copy of the rows goes to, of every tcgen05.cp shape.

The four rows of 4x256b go to one lane of each 32; the address names the lane. Sources: the ISA's shapes and warp pairs,
CUTLASS's copy traits of SM100_UTCCP_*.
"""

FORMATS = {"b6x16_p32": ("e3m2", 6), "b4x16_p64": ("e2m1", 4)}
"""Source formats of a decompressing copy: an element kind with that container, and its bits."""

_SHIFT_COLUMNS = 8


def decompress(data: np.ndarray, source: str) -> np.ndarray:
    """Return 16-byte chunks [..., 4 words] of packed elements as sixteen 8-bit containers each."""
    kind, bits = FORMATS[source]
    codes = unpack(np.ascontiguousarray(data).view("u1"), bits)
    return (codes << CONTAINER_SHIFT[kind]).view("u4")


def _defined(init: np.ndarray, source: str) -> np.ndarray:
    """Return which words of [rows, chunks, 4] definedness are defined after a copy."""
    if not source:
        return init == 0x01010101
    missing = (np.ascontiguousarray(init).view("u1") ^ np.uint8(1)) * np.uint8(255)
    return unpack(missing, FORMATS[source][1]).view("u4") == 0


def copy(W: Warp, ins: Instr, group: int, form: tuple[str, str], source: str, taddr: int, desc: int) -> None:
    """tcgen05.cp."""
    check_group(W, ins, group)
    rows, chunks_per_row, targets = COPY_FORMS[form]
    try:
        layout = decode_smem_descriptor(desc)
        check_layout(layout, False, "cp")
    except DescriptorError as error:
        W.fail(DescriptorError, ins, str(error))
    lane = taddr >> 16
    if lane >= (32 if form[0] == "4x256b" else 1):
        W.fail(MemoryFault, ins, f"the lane field {lane} of the destination is not legal for .{form[0]}")
    columns = (taddr & 0xFFFF) + np.arange(4 * chunks_per_row)
    pipe, detector = pipe_of(W), W.cta.cluster.detector
    pipe.issued += 1
    clock = pipe.issued
    lanes = [each + lane for each in targets]
    pipe.launch(W, ins, "cp", form[0], [region(np.concatenate(lanes), columns, True)])
    for cta in pair(W, ins, group):
        tmem = tmem_of(cta)
        why = tmem.outside(columns)
        if why:
            W.fail(MemoryFault, ins, why)
        chunks, words = placed(layout, False, rows, chunks_per_row * 8, 16)
        if int(chunks.min()) < 0 or int(chunks.max()) * 16 + 16 > cta.shared.limit:
            W.fail(MemoryFault, ins, "the source of tcgen05.cp leaves shared memory")
        if detector:
            where, agent = Where(W, ins), pipe.agents[0]
            detector.async_read(W.agent, detector.async_view(W.agent), cta.shadow, words, agent, clock, where)
            view = detector.tensor_view(W.agent, agent)
            for each in lanes:
                cells = (each[:, None] * COLUMNS + columns).reshape(-1)
                detector.tensor_write(W.agent, view, tmem.shadow, cells, agent, clock, where)

        def finish(cta: Any = cta, tmem: TensorMemory = tmem, chunks: np.ndarray = chunks) -> None:
            data = cta.shared.chunks[chunks]
            data = (decompress(data, source) if source else data).reshape(rows, -1)
            defined = _defined(cta.shared.chunk_init[chunks], source).reshape(rows, -1)
            for each in lanes:
                tmem.cells[np.ix_(each, columns)] = data
                tmem.defined[np.ix_(each, columns)] = defined

        W.cta.cluster.submit(("tcgen05", id(W)), AsyncOp("tcgen05.cp", finish))


def shift_rows(tmem: TensorMemory, first: int, columns: np.ndarray) -> None:
    """Move the rows of 32 lanes down by one lane; the last one stays (as CUTLASS observed on a B200: see the tests)."""
    for array in (tmem.cells, tmem.defined):
        part = array[first : first + 32]
        part[:31, columns] = part[1:, columns].copy()


def shift(W: Warp, ins: Instr, group: int, taddr: int) -> None:
    """tcgen05.shift.down: 32 bytes of each of the 32 rows of one warp's lanes move to the lane below."""
    check_group(W, ins, group)
    first, columns = taddr >> 16, (taddr & 0xFFFF) + np.arange(_SHIFT_COLUMNS)
    if first % 32 or first >= 128:
        W.fail(MemoryFault, ins, f"the lane field {first} of tcgen05.shift is not a multiple of 32 below 128")
    pipe = pipe_of(W)
    pipe.issued += 1
    lanes = np.arange(first, first + 32)
    pipe.launch(W, ins, "shift", None, [region(lanes, columns, True)])
    for cta in pair(W, ins, group):
        record_shift(W, ins, cta, lanes, columns)
        tmem = tmem_of(cta)
        finish = lambda tmem=tmem: shift_rows(tmem, first, columns)  # noqa: E731
        W.cta.cluster.submit(("tcgen05", id(W)), AsyncOp("tcgen05.shift", finish))


def record_shift(W: Warp, ins: Instr, cta: Any, lanes: np.ndarray, columns: np.ndarray) -> None:
    """Check bounds, and tell the detector that rows are read and all but the last of each 32 written."""
    tmem, pipe, detector = tmem_of(cta), pipe_of(W), W.cta.cluster.detector
    why = tmem.outside(columns)
    if why:
        W.fail(MemoryFault, ins, why)
    if detector:
        agent, where = pipe.agents[0], Where(W, ins)
        view = detector.tensor_view(W.agent, agent)
        cells = lanes[:, None] * COLUMNS + columns
        detector.tensor_read(W.agent, view, tmem.shadow, cells.reshape(-1), agent, pipe.issued, where)
        kept = cells[lanes % 32 != 31].reshape(-1)
        detector.tensor_write(W.agent, view, tmem.shadow, kept, agent, pipe.issued, where)
