"""Products of the warp-level mma: fragments to matrices, the product, and poison that follows rows and columns."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import numpy as np

from ..arithmetic import native
from ..arithmetic.formats import to_f16
from ..arithmetic.native import MmaForm
from ..arithmetic.numeric import count_nonzero
from .operand import widen

MMA_BITS = {"f16": 16, "bf16": 16, "tf32": 32, "e4m3": 8, "e5m2": 8, "s8": 8, "u8": 8, "s4": 4, "u4": 4, "b1": 1,
             "f64": 64}  # fmt: skip
"""Bits of an element."""


class WarpMma:
    """Shape and types of an mma, and its fragment layouts.

    Lane (g, c) = (lane / 4, lane % 4). Register i of A holds row g + 8 (i % (M/8)) and ``e`` neighbouring columns from
    4e (i / (M/8)) + e c; register i of B holds ``e`` neighbouring rows from 4e i + e c of column g; C and D hold row
    g + 8 (j / 2) and column 2c + j % 2 (ISA: matrix fragments of mma).
    """

    def __init__(
        self, rows: int, depth: int, kind_a: str, kind_b: str, out: str, clamp: bool, differing: bool = False
    ) -> None:
        self.rows, self.depth, self.kinds, self.out, self.clamp = rows, depth, (kind_a, kind_b), out, clamp
        self.differing = differing  # single bits are counted where they differ, not where both are set
        self.wide = kind_a == "f64"
        self.per_register = max(1, 32 // MMA_BITS[kind_a])
        self.b_count = depth // (4 * self.per_register)
        self.a_count = self.b_count * rows // 8
        self.outputs = rows // 8 * (1 if out == "f16" else 2)

    @functools.cached_property
    def native(self) -> tuple[Callable, MmaForm] | None:
        """Return the product in C and what it is told of the form; None: it is left to NumPy."""
        bits = MMA_BITS[self.kinds[0]]
        if not native.available() or self.out not in ("f32", "s32") or not 8 <= bits <= 32:
            return None
        form = MmaForm(self.rows, self.depth, bits, self.out == "s32", self.clamp)
        tables = [widen(np.arange(1 << bits, dtype=f"u{bits // 8}"), kind) for kind in self.kinds] if bits < 32 else []
        return native.mma(form, tables, self.a_count + self.b_count + self.outputs, self.outputs), form

    def multiply(self, words: list[np.ndarray], masks: list[np.ndarray | None]) -> tuple:
        """Return D's registers and their poison, in turns."""
        registers = self._product(words)
        bad = self._poison(masks)
        return tuple(x for k in range(self.outputs) for x in (registers[k], None if bad is None else bad[:, k]))

    def _product(self, words: list[np.ndarray]) -> Sequence[np.ndarray]:
        """Return D's registers."""
        if self.native is None:
            return self._by_numpy(words)
        function, form = self.native
        found = function(*words)
        if form.nan:  # whose bits are NumPy's
            form.nan = 0
            return self._by_numpy(words)
        return found

    def unpack(self, words: list[np.ndarray], kind: str) -> np.ndarray:
        """Return [lane, register, element] numbers."""
        raw = np.ascontiguousarray(np.stack(words, 1))
        if kind == "f64":
            return raw.view("f8")[..., None]
        bits = MMA_BITS[kind]
        if bits < 8:
            values = raw[..., None] >> (bits * np.arange(self.per_register)).astype("u4") & ((1 << bits) - 1)
            numbers = values.astype("f8")
            return np.where(numbers > 7, numbers - 16, numbers) if kind == "s4" else numbers
        values = raw.view(f"u{bits // 8}").reshape(32, len(words), self.per_register)
        return widen(values, kind).astype("f8")

    def matrix_a(self, lanes: np.ndarray) -> np.ndarray:
        """Arrange [lane, register, element] of A as [row, column]."""
        part = lanes.reshape(8, 4, self.b_count, self.rows // 8, lanes.shape[-1])
        return part.transpose(3, 0, 2, 1, 4).reshape(self.rows, -1)

    def matrix_b(self, lanes: np.ndarray) -> np.ndarray:
        """Arrange [lane, register, element] of B as [row, column]."""
        return lanes.reshape(8, 4, self.b_count, lanes.shape[-1]).transpose(2, 1, 3, 0).reshape(-1, 8)

    def matrix_c(self, lanes: np.ndarray) -> np.ndarray:
        """Arrange [lane, element] of C as [row, column]."""
        return lanes.reshape(8, 4, self.rows // 8, 2).transpose(2, 0, 1, 3).reshape(self.rows, 8)

    def _by_numpy(self, words: list[np.ndarray]) -> list[np.ndarray]:
        na, nb = self.a_count, self.b_count
        a = self.matrix_a(self.unpack(words[:na], self.kinds[0]))
        b = self.matrix_b(self.unpack(words[na : na + nb], self.kinds[1]))
        products = a @ b
        if self.differing:
            products = a.sum(1)[:, None] + b.sum(0) - 2 * products
        return self.finish(products, words[na + nb :])

    def finish(self, products: np.ndarray, words: list[np.ndarray]) -> list[np.ndarray]:
        """Add C to the products and return D's registers."""
        code = {"f32": "f4", "s32": "i4", "f64": "f8", "f16": "f2"}[self.out]
        raw = np.ascontiguousarray(np.stack(words, 1))
        total = products + self.matrix_c(raw.view(code).astype("f8"))
        if self.out == "s32":
            total = np.clip(total, -(2**31), 2**31 - 1) if self.clamp else total
            total = total.astype("i8")
        result = to_f16(total) if self.out == "f16" else total.astype(code)
        out = np.ascontiguousarray(self._lanes(result)).view("u8" if self.wide else "u4")
        return [out[:, k].copy() for k in range(self.outputs)]

    def _lanes(self, matrix: np.ndarray) -> np.ndarray:
        """Arrange [row, column] of D as [lane, element]."""
        return matrix.reshape(self.rows // 8, 8, 4, 2).transpose(1, 2, 0, 3).reshape(32, -1)

    def _poison(self, masks: list[np.ndarray | None]) -> np.ndarray | None:
        """Return poison per lane and D register: rows of A, columns of B and elements of C pass it on."""
        if all(m is None or not count_nonzero(m) for m in masks):
            return None
        na, nb = self.a_count, self.b_count
        a = self.matrix_a(known(masks[:na]))
        b = self.matrix_b(known(masks[na : na + nb]))
        return self.spread(np.any(a, axis=1)[:, None] | np.any(b, axis=0)[None, :], masks[na + nb :])

    def spread(self, bad: np.ndarray, masks: list[np.ndarray | None]) -> np.ndarray:
        """Return poison per lane and D register, from the poison of the products and of C."""
        c = known(masks)[..., 0]
        c = c.repeat(2, axis=1) if self.out == "f16" else c
        lanes = self._lanes(bad | self.matrix_c(c))
        return np.any(lanes.reshape(32, -1, 2), axis=2) if self.out == "f16" else lanes


def known(masks: list[np.ndarray | None]) -> np.ndarray:
    """Return the poison of some registers as [lane, register, 1]."""
    return np.stack([np.zeros(32, bool) if m is None else m for m in masks], 1)[..., None]


@functools.cache
def warp_mma(
    rows: int, depth: int, kind_a: str, kind_b: str, out: str, clamp: bool, differing: bool = False
) -> WarpMma:
    """Return the one object of a form, which all its instructions share."""
    return WarpMma(rows, depth, kind_a, kind_b, out, clamp, differing)
