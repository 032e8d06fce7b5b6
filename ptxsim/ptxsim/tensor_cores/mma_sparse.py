"""Products of ``mma.sp``: A stores half of its columns, and metadata selects them.

Values of A lie as in a dense mma of half the depth. A chunk of a row is 4 columns (of tf32 2, of 4-bit integers
8) and has 4 bits of metadata: two indices of 2 bits, the first in the low bits, of single elements or, of 4-bit
integers, of pairs; of tf32, 0b0100 is the first element and 0b1110 the second.

The ISA shows only in figures which lane has which chunk's bits. CUTLASS's order of metadata in memory
(``host_reorder.h``), where ldmatrix loads a word per lane, agrees: for 16- and 32-bit elements a lane has 4 chunks of
row g in its low half and 4 chunks of row g + 8 in its high half; for 8- and 4-bit elements it has 8 chunks of row g,
and the next lane has 8 chunks of row g + 8.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from ..arithmetic.numeric import LaneSet, Poison, count_nonzero
from ..errors import DescriptorError
from ..parsing.ir import Imm, Instr
from ..state.warp import Warp
from ..translation.codegen import Codegen
from ..translation.registry import Mods
from .mma_form import MMA_BITS, known, warp_mma

SHAPES = {
    "f16": (16, 32), "bf16": (16, 32), "tf32": (8, 16), "e4m3": (64,), "e5m2": (64,), "s8": (32, 64), "u8": (32, 64),
    "s4": (64, 128), "u4": (64, 128),
}  # fmt: skip
"""Depths of the shapes, which all have 16 rows."""
_TF32 = (0b0100, 0b1110)


class SparseMma:
    """Shape and types of a sparse mma."""

    def __init__(self, depth: int, kind_a: str, kind_b: str, out: str, clamp: bool, ordered: bool) -> None:
        self.depth, self.kind, self.ordered = depth, kind_a, ordered
        self.packed = warp_mma(16, depth // 2, kind_a, kind_b, out, clamp)
        self.full = warp_mma(16, depth, kind_a, kind_b, out, clamp)
        self.bits = MMA_BITS[kind_a]
        self.chunk = {32: 2, 16: 4, 8: 4, 4: 8}[self.bits]
        chunks = depth // self.chunk
        self.lanes = chunks // 4
        """Lanes of four that have metadata."""

    def codes(self, words: np.ndarray, selector: int) -> np.ndarray:
        """Return the metadata of every chunk as [row, chunk]."""
        given = np.ascontiguousarray(words.reshape(8, 4)[:, selector * self.lanes : (selector + 1) * self.lanes])
        halves = given.view("u2") if self.bits > 8 else given
        rows = halves.reshape(8, -1, 2).transpose(2, 0, 1).reshape(16, -1, 1)
        places = np.arange(0, 8 * rows.itemsize, 4).astype(rows.dtype)
        return (rows >> places & rows.dtype.type(15)).reshape(16, -1).astype(np.intp)

    def invalid(self, codes: np.ndarray) -> np.ndarray:
        """Tell which metadata is invalid."""
        if self.chunk == 2:
            return ~np.isin(codes, _TF32)
        low, high = codes & 3, codes >> 2
        return low >= high if self.ordered else low == high

    def columns(self, codes: np.ndarray) -> np.ndarray:
        """Return the column of every value of A as [row, value]."""
        first = self.chunk * np.arange(codes.shape[1])
        if self.chunk == 2:
            return first + (codes >> 3)
        found = np.stack([codes & 3, codes >> 2], 2)
        if self.chunk == 8:
            found = (2 * found[..., None] + np.arange(2)).reshape(16, -1, 4)
        return (first[:, None] + found).reshape(16, -1)

    def multiply(self, words: list[np.ndarray], masks: list[Poison], columns: np.ndarray) -> tuple:
        """Return D's registers and their poison, in turns. B's other columns do not matter."""
        na, nb = self.packed.a_count, self.full.b_count
        a = self.packed.matrix_a(self.packed.unpack(words[:na], self.full.kinds[0]))
        b = self.full.matrix_b(self.full.unpack(words[na : na + nb], self.full.kinds[1]))
        registers = self.full.finish(np.einsum("mj,mjn->mn", a, b[columns]), words[na + nb :])
        bad = self._poison(masks, columns)
        return tuple(x for k, each in enumerate(registers) for x in (each, None if bad is None else bad[:, k]))

    def _poison(self, masks: list[Poison], columns: np.ndarray) -> np.ndarray | None:
        if all(m is None or not count_nonzero(m) for m in masks):
            return None
        na, nb = self.packed.a_count, self.full.b_count
        a = self.packed.matrix_a(known(masks[:na]))
        b = self.full.matrix_b(known(masks[na : na + nb]).repeat(self.full.per_register, axis=2))
        return self.full.spread(np.any(a, axis=1)[:, None] | np.any(b[columns], axis=1), masks[na + nb :])


@functools.cache
def _sparse_mma(depth: int, kind_a: str, kind_b: str, out: str, clamp: bool, ordered: bool) -> SparseMma:
    return SparseMma(depth, kind_a, kind_b, out, clamp, ordered)


def emit(cg: Codegen, ins: Instr, mods: Mods, depth: int, types: list[str], clamp: bool, ordered: bool) -> None:
    """Emit an ``mma.sp`` whose modifiers have been taken; ``types`` are the types of D, A and B."""
    out, kind_a, kind_b = types
    form = _sparse_mma(depth, kind_a, kind_b, out, clamp, ordered)
    d, a, b, c, metadata, selector = mods.args(6)
    wanted = [form.full.outputs, form.packed.a_count, form.full.b_count, form.full.outputs]
    counts = [len(v.items) for v in (d, a, b, c)]
    if counts != wanted:
        mods.fail(f"takes {wanted[0]}, {wanted[1]}, {wanted[2]} and {wanted[3]} registers, has {counts}")
    choices = 4 // form.lanes
    if not isinstance(selector, Imm) or not 0 <= selector.value < choices:
        mods.fail(f"the sparsity selector is a constant below {choices}")
    chosen = np.arange(32) % 4 // form.lanes == selector.value

    def run(W: Warp, L: LaneSet, words: np.ndarray, poison: Poison, *values: Any) -> tuple:
        if L is not None:
            W.sync_error(ins, "mma needs all 32 lanes of the warp", L)
        if poison is not None:
            W.poisoned(poison & chosen, ins, "the metadata of a sparse mma", None)
        codes = form.codes(words, selector.value)
        wrong = form.invalid(codes)
        if count_nonzero(wrong):
            W.bend("sparse-metadata", DescriptorError, ins, _complaint(form, codes, wrong))
        W.launch.counters[f"flops mma.sp {kind_a}"] += 16 * 8 * depth
        return form.multiply(list(values[::2]), list(values[1::2]), form.columns(codes))

    sources = [(metadata, "b32"), *((v, "b32") for v in (*a.items, *b.items, *c.items))]
    cg.call(run, sources, [(v, "b32") for v in d.items])


def _complaint(form: SparseMma, codes: np.ndarray, wrong: np.ndarray) -> str:
    """Say which metadata is wrong, and why."""
    row, chunk = (int(x) for x in np.argwhere(wrong)[0])
    first = form.chunk * chunk
    rule = "of tf32 it is 0b0100 or 0b1110" if form.chunk == 2 else "its two indices differ"
    if form.ordered and form.chunk > 2:
        rule = "of .sp::ordered_metadata the index in its low bits is the lower one"
    return (
        f"metadata {codes[row, chunk]:#06b} of row {row}, columns {first} to {first + form.chunk - 1}: {rule}"
        f" ({count_nonzero(wrong)} of {wrong.size} chunks are wrong)"
    )
