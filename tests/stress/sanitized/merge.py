"""Merging of partial results, empty ones of NaN among them."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import mla_cupy
from tests.merge.test_merge import DTYPES, assert_close, states
from tests.stress.sanitized import Call
from tests.support.calls import on_host
from tests.support.gpu import upload


def calls() -> Iterator[Call]:
    """Few states and many, any width."""
    for dtype in DTYPES:
        for n, d in ((1, 7), (2, 512), (9, 100)):
            yield Call(f"{n} states of {d} {dtype}", partial(merge, n, d, dtype))


def merge(n: int, d: int, dtype: str) -> None:
    """Strided inputs."""
    outs, lses = states(n, dtype, d=d)
    assert_close(on_host(mla_cupy.merge_states(upload(outs), upload(lses))), outs, lses, dtype)
