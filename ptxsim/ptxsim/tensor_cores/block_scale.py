"""Block-scaled tcgen05.mma: its instruction descriptors, and scale factors in tensor memory.

A scale factor belongs to 16 or 32 consecutive elements along K of one row of A or B. Row r has its factors in byte
``id`` (and those after it, where an MMA needs several) of the cell in lane r % 32 and column r / 32 from the operand's
address; each quarter of the lanes holds a copy, which the rows of D in that quarter use.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import ml_dtypes
import numpy as np

from ..errors import DescriptorError, MemoryFault
from ..state.accesses import Where
from .pipe import Region, region
from .tcgen05 import InstructionDescriptor
from .tmem import COLUMNS, LANES, TensorMemory, tmem_of
from .umma import Mma

_FORMATS = {0: "e4m3", 1: "e5m2", 3: "e2m3", 4: "e3m2", 5: "e2m1"}
VECTORS = {
    ("mxf8f6f4", ""): 1, ("mxf8f6f4", "scale_vec::1X"): 1, ("mxf8f6f4", "block32"): 1,
    ("mxf4", ""): 2, ("mxf4", "scale_vec::2X"): 2, ("mxf4", "block32"): 2,
    ("mxf4nvf4", "scale_vec::2X"): 2, ("mxf4nvf4", "block32"): 2,
    ("mxf4nvf4", "scale_vec::4X"): 4, ("mxf4nvf4", "block16"): 4,
}  # fmt: skip
"""Scale factors along K of one MMA, per kind and modifier."""


@dataclass(frozen=True)
class ScaledDescriptor(InstructionDescriptor):
    """The instruction descriptor of a block-scaled MMA, decoded: also the bytes and the type of the scale factors."""

    a_id: int = 0
    b_id: int = 0
    exponents: bool = True


@lru_cache(maxsize=256)
def decode_scaled_descriptor(bits: int, kind: str, group: int, vectors: int) -> ScaledDescriptor:
    """Decode and check an instruction descriptor of ``.block_scale`` (ISA tables 43 and 44)."""

    def refuse(condition: bool, why: str) -> None:
        if condition:
            raise DescriptorError(f"instruction descriptor {bits:#010x}: {why}")

    packed = kind != "mxf8f6f4"
    refuse(bits & 0b111 != 0, "sparsity bits 0-2 are set in a dense MMA")
    for position in (3, 6, 24, 25, 26, *([12] if packed else [])):
        refuse(bits >> position & 1 == 1, f"reserved bit {position} is set")
    refuse(bits >> 31 == 1, "bit 31 is set (K=96 exists on sm_103a only)" if packed else "reserved bit 31 is set")
    codes = bits >> 7 & 7, bits >> 10 & (3 if packed else 7)
    for name, code in zip("AB", codes, strict=True):
        refuse(code != 1 if packed else code not in _FORMATS, f"{name} type {code} is invalid for .kind::{kind}")
    exponents = bool(bits >> 23 & 1)
    refuse(not exponents and vectors != 4, f"scale factors of .kind::{kind} are ue8m0 here: bit 23 must be set")
    refuse(packed and bits >> 15 & 3 != 0, f"operands of .kind::{kind} cannot be transposed")
    a_id, b_id = bits >> 29 & 3, bits >> 4 & 3
    refuse(a_id % vectors != 0 or b_id % vectors != 0, f"scale factor ids {a_id} and {b_id} with {vectors} per row")
    m, n = (bits >> 24 & 31) << 4, (bits >> 17 & 63) << 3
    refuse(m == 128 and group == 2, "M=128 of a pair with block scaling is not modelled")
    refuse(m != 128 * group, f"M={m}: .cta_group::{group} takes {128 * group}")
    step = 8 * group
    refuse(not step <= n <= 256 or n % step != 0, f"N={n}: .cta_group::{group} takes multiples of {step} up to 256")
    a_mn, b_mn = bool(bits >> 15 & 1), bool(bits >> 16 & 1)
    refuse(b_mn and n % (16 * group) != 0, f"N={n} of a transposed 8-bit B must be a multiple of {16 * group}")
    kinds = ("e2m1x2", "e2m1x2") if packed else (_FORMATS[codes[0]], _FORMATS[codes[1]])
    negative = bool(bits >> 13 & 1), bool(bits >> 14 & 1)
    return ScaledDescriptor(m, n, *kinds, "f32", *negative, a_mn, b_mn, False, a_id, b_id, exponents)


_EXPONENTS = np.where(np.arange(256) == 255, np.nan, 2.0 ** (np.minimum(np.arange(256), 254) - 127.0))
_FRACTIONS = (np.arange(256, dtype="u1") & np.uint8(127)).view(ml_dtypes.float8_e4m3fn).astype("f8")


class ScaledMma(Mma):
    """A block-scaled MMA."""

    desc: ScaledDescriptor

    def _descriptor(self) -> ScaledDescriptor:
        return decode_scaled_descriptor(self.operands.idesc, self.form.kind, self.form.group, self.form.vectors)

    def _more_regions(self) -> list[Region]:
        """Check the scale factors' places, tell the detector that they are read, and return their regions."""
        regions = []
        for name, address, rows in (("A", self.operands.sfa, 128), ("B", self.operands.sfb, self.desc.n)):
            if address >> 16:
                why = f"the address of the scale factors of {name} has a lane field"
                self.W.fail(MemoryFault, self.ins, why)
            columns = address + np.arange(-(-rows // 32))
            self._check_columns(columns)
            lanes = np.arange(LANES) if rows >= 32 else np.flatnonzero(np.arange(LANES) % 32 < rows)
            regions.append(region(lanes, columns, False))
            if self.detector:
                agent, where = self.pipe.agents[0], Where(self.W, self.ins)
                cells = (lanes[:, None] * COLUMNS + columns).reshape(-1)
                for cta in self.ctas:
                    shadow = tmem_of(cta).shadow
                    self.detector.tensor_read(self.W.agent, self.tensor, shadow, cells, agent, self.clock, where)
        return regions

    def _product(
        self, tmem: TensorMemory, a: np.ndarray, a_bad: np.ndarray, b: np.ndarray, b_bad: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        results, defined = [], []
        for quarter in range(4):
            rows = slice(32 * quarter, 32 * quarter + 32)
            lanes = 32 * quarter + np.arange(32)
            left, left_bad = self._scales(tmem, lanes, self.operands.sfa + quarter, self.desc.a_id)
            n = np.arange(len(b))
            at = self.operands.sfb + n // 32
            right, right_bad = self._scales(tmem, 32 * quarter + n % 32, at, self.desc.b_id)
            results.append(_scaled(a[rows], left) @ _scaled(b, right).T)
            defined.append(~((a_bad[rows] | left_bad)[:, None] | (b_bad | right_bad)[None, :]))
        return np.concatenate(results), np.concatenate(defined)

    def _scales(self, tmem: TensorMemory, lanes: np.ndarray, columns: Any, first: int) -> tuple[np.ndarray, np.ndarray]:
        """Return scale factors [rows, blocks along K], and which rows' are undefined."""
        cells = np.ascontiguousarray(tmem.cells[lanes, columns]).view("u1").reshape(-1, 4)
        codes = cells[:, first : first + self.form.vectors]
        return (_EXPONENTS if self.desc.exponents else _FRACTIONS)[codes], ~tmem.defined[lanes, columns]


def _scaled(values: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """Multiply each block of a row by its scale factor, in float64 (exact)."""
    blocks = values.astype("f8").reshape(len(values), scales.shape[1], -1)
    return (blocks * scales[:, :, None]).reshape(len(values), -1)
