"""Sequences that lie one after another: the arrays that say where each begins."""

from __future__ import annotations

from mla_cupy.ops.checks import check_all_or_none
from mla_cupy.ops.operation import Input, Views

STARTS = (
    Input("cu_seqlens_q", "b+1", ("int32",), optional=True),
    Input("cu_seqlens_kv", "b+1", ("int32",), optional=True),
)


def check_starts(views: Views) -> None:
    """Check that queries and keys have their starts, or neither.

    Raises
    ------
    ArgumentError
    """
    check_all_or_none(views, *(array.name for array in STARTS), expected="as many starts as its counterpart")
