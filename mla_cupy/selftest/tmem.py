"""Probes of tcgen05.ld and tcgen05.st: which register holds which cell."""

from __future__ import annotations

from functools import partial

import numpy as np

from mla_cupy.kernels.spec import KernelSpec, Variant
from mla_cupy.selftest.layouts import LANES, WARP, shape_cells
from mla_cupy.selftest.params import ProbeTmemParams
from mla_cupy.selftest.probe import BLACKWELL, Array, Case, InstructionProbe, random

WINDOW = 128
"""Columns that a probe fills and dumps."""
LAST_WINDOW = 512 - WINDOW
WARPS = 4


SHAPES = {256: ("16x256b", (4, 8, 16, 32)), 32: ("32x32b", (16, 32))}
_PER_REPETITION = {256: 4, 32: 1}

KERNEL: KernelSpec[object] = KernelSpec(
    "probes_tmem",
    "loads and stores of tensor memory",
    "probes/tmem.cu",
    ProbeTmemParams,
    BLACKWELL,
    variants=tuple(Variant(shape=shape, registers=count) for shape, (_, counts) in SHAPES.items() for count in counts),
)


def known_cells() -> Array:
    """Initial contents of the window: no two cells the same, and so small that sums with products are exact."""
    lane, column = np.arange(LANES)[:, None], np.arange(WINDOW)[None, :]
    return (lane + LANES * column - LANES * WINDOW // 2).astype(np.float32)


def _case(name: str, variant: Variant, lane: int, column: int, window: int, group: int, store: bool) -> Case:
    cells, count = known_cells(), variant.registers
    registers = random(name).integers(-(2**20), 2**20, (WARPS, count, WARP)).astype(np.float32)
    at = shape_cells(SHAPES[variant.shape][0], count)
    dump = cells.copy()
    loaded = np.empty_like(registers)
    for warp in range(WARPS):
        place = at.lanes + 32 * warp + lane, at.columns + column
        if store:
            dump[place] = registers[warp]
        loaded[warp] = dump[place]
    nothing = np.full_like(loaded, np.nan), np.full_like(dump, np.nan)
    return Case(
        {"cells": cells, "registers": registers, "loaded": nothing[0], "dump": nothing[1]},
        ProbeTmemParams(
            cells="cells",
            registers="registers",
            loaded="loaded",
            dump="dump",
            window=window,
            lane=lane,
            column=column,
            group=group,
            store=store,
        ),
        {"loaded": loaded, "dump": dump},
    )


def _probe(variant: Variant, lane: int, store: bool) -> InstructionProbe:
    shape = SHAPES[variant.shape][0]
    repetitions = variant.registers // _PER_REPETITION[variant.shape]
    name = f"tmem/{'st' if store else 'ld'}/{shape}.x{repetitions}-lane{lane}"
    # The upper lanes also at the last columns, and by the second warpgroup.
    column, window, group = (32, LAST_WINDOW, 1) if lane else (0, 0, 0)
    if store:
        about = f"tcgen05.st.{shape}.x{repetitions} from lane {lane} of 32 on, read by 32x32b and by itself"
    else:
        about = f"tcgen05.ld.{shape}.x{repetitions} from lane {lane} of 32 on, of cells stored by 32x32b"
    case = partial(_case, name, variant, lane, column, window, group, store)
    return InstructionProbe(name, about, KERNEL, variant, case)


PROBES = tuple(
    _probe(Variant(shape=shape, registers=count), lane, store)
    for shape, (_, counts) in SHAPES.items()
    for count in counts
    for lane in ((0, 16) if shape == 256 else (0,))
    for store in (False, True)
)
