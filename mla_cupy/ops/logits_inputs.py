"""What the two forms of the indexer's logits have in common: dtypes, sizes, checks."""

from __future__ import annotations

from mla_cupy.errors import ShapeError, explain
from mla_cupy.kernels.indexer.logits.problem import CODES, HEAD_DIMS, MAX_HEADS
from mla_cupy.shapes import MAX_INT32

MIN_SIZES = {"h": 1}


def out_dtypes(first: str) -> tuple[str, ...]:
    """Logits are float32, or rounded to bfloat16."""
    return ("float32", "bfloat16")


def kernel_dtype(name: str) -> str:
    """The kernels' name of a dtype: bytes are e4m3 codes."""
    return CODES[0] if name in CODES else name


def check_sizes(*, heads: int, **counts: int) -> None:
    """Check the number of heads, and numbers that the kernels count in int32.

    Raises
    ------
    ShapeError
    """
    if heads > MAX_HEADS:
        raise ShapeError(explain("q.shape[-2]", f"{heads} heads", f"at most {MAX_HEADS}"))
    for name, count in counts.items():
        if count > MAX_INT32:
            raise ShapeError(explain(name, count, f"at most {MAX_INT32}", "the kernels count in int32"))


SIZES = {"d": HEAD_DIMS}
