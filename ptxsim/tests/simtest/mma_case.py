# ruff: noqa: E501 (lines of PTX are kept whole)
"""One tcgen05.mma of random operands, and its expected result."""

from __future__ import annotations

import numpy as np

from simtest.runners import cell_of
from simtest.umma import TYPES, Tile, as_cells, descriptor, execute, from_cells, idesc, numbers, random_codes, tensor_a


class Case:
    """One MMA: random operands and accumulator, their places, and the result."""

    def __init__(
        self, m: int = 128, n: int = 32, group: int = 1, ws: bool = False, half: int = 0, a: str = "bf16", b: str | None = None,
        out: str = "f32", in_tmem: bool = False, a_mode: str = "128B", b_mode: str = "128B", a_mn: bool = False,
        b_mn: bool = False, start: int = 0, base: int = 0, zero: np.ndarray | None = None, gaps: tuple[int, int] = (0, 0),
    ) -> None:  # fmt: skip
        b = b or a
        rng = np.random.default_rng([m, n, group])
        self.m, self.n, self.group, self.ws, self.half, self.out = m, n, group, ws, half, out
        depth = TYPES[a].depth
        a_codes, b_codes = random_codes(a, rng, m, depth), random_codes(b, rng, n, depth)
        b_values = numbers(b, b_codes)
        if zero is not None:
            b_values[zero] = 0
        self.a, self.b = numbers(a, a_codes), b_values
        self.product = self.a @ self.b.T
        self.before = rng.integers(-40, 41, (m, n)).astype("f8")
        self.idesc = idesc(a, b, out, m, n, a_mn, b_mn)
        self.columns = max(32, 1 << (self.width + 8 - 1).bit_length())
        self.images, tiles = [], []
        for block in range(group):
            rows, cols = (
                slice(block * m // group, (block + 1) * m // group),
                slice(block * n // group, (block + 1) * n // group),
            )
            parts = [] if in_tmem else [Tile(a, a_codes[rows], a_mode, a_mn, start, base, gaps)]
            first = -(-max([start, *(p.end for p in parts)]) // 1024) * 1024
            tiles = [*parts, Tile(b, b_codes[cols], b_mode, b_mn, first, 0, gaps)]
            image = np.zeros(tiles[-1].end, "u1")
            for tile in tiles:
                tile.write(image)
            self.images.append(image)
        self.cells = np.full((group, 128, self.columns), 0xAAAAAAAA, "u4")
        self.cells[self.index()] = as_cells(self.before, out)
        self.code = "".join(descriptor(f"%y{i}", t.descriptor) for i, t in zip((1, 0), tiles[::-1], strict=False))
        self.left = "%y0"
        if in_tmem:
            self.cells[:, :, self.width : self.width + 8] = tensor_a(a, a_codes, group, ws, half)
            self.code += f"add.u32 %x1, %tm, {self.width + (half << 16)};"
            self.left = "[%x1]"
        self.code += f"mov.u32 %x0, {self.idesc:#x}; add.u32 %x2, %tm, {half << 16};"
        self.kind = TYPES[a].kind

    @property
    def width(self) -> int:
        """Columns of D."""
        return max(cell_of(0, c, self.m, self.n, self.group, self.ws, 0)[2] for c in range(self.n)) + 1

    def index(self) -> tuple:
        """Return where D[r, c] lies in the cells."""
        places = [
            cell_of(r, c, self.m, self.n, self.group, self.ws, self.half) for r in range(self.m) for c in range(self.n)
        ]
        return tuple(np.array(places).reshape(self.m, self.n, 3).transpose(2, 0, 1))

    def mma(self, tail: str = ", %yes", mods: str = "", idesc: str = "%x0") -> str:
        """Return the instruction."""
        ws = ".ws" if self.ws else ""
        return (
            f"tcgen05.mma{ws}.cta_group::{self.group}.kind::{self.kind}{mods} [%x2], {self.left}, %y1, {idesc}{tail};"
        )

    def run(self, code: str | None = None, mode: str = "late") -> np.ndarray:
        """Run (one accumulating MMA by default) and return D; every other cell must be as before."""
        out = execute(self.code + (code or self.mma()), self.images, self.cells, mode)
        rest = np.ones(out.shape, bool)
        rest[self.index()] = False
        assert (out[rest] == self.cells[rest]).all()
        return from_cells(out[self.index()], self.out)


def check(**options: object) -> None:
    """Run one accumulating MMA and compare."""
    case = Case(**options)
    np.testing.assert_array_equal(case.run(), case.product + case.before)
