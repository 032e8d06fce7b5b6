"""Operations without plans: what an export of each fixes."""

from __future__ import annotations

import math
from collections.abc import Sequence

from mla_cupy.dtypes import FLOATS, HALF
from mla_cupy.errors import ArgumentError, explain
from mla_cupy.export.subject import Subject
from mla_cupy.ops.merge import OPERATION as MERGE
from mla_cupy.shapes import D_V


def choice(option: str, value: str | None, among: Sequence[str | None]) -> str | None:
    """Check that an option is one of several.

    Raises
    ------
    ArgumentError
    """
    if value not in among:
        raise ArgumentError(explain(option, repr(value), "one of " + ", ".join(each for each in among if each)))
    return value


def merge(*, h_q: int, dtype: str | None = None, out_dtype: str | None = None) -> Subject:
    """Merging partial results of decode, of float32 by default."""
    dtype = choice("--dtype", dtype or "float32", FLOATS) or ""
    out_dtype = choice("--out-dtype", out_dtype or (dtype if dtype in HALF else HALF[0]), FLOATS) or ""
    return Subject(
        MERGE,
        {"h_q": h_q, "d": D_V},
        {"outs": dtype, "lses": "float32", "out": out_dtype, "lse": "float32"},
        fixed={"lse_base": "e", "out_dtype": None},
        free={"empty_lse": "real"},
        defaults={"empty_lse": -math.inf},
    )
