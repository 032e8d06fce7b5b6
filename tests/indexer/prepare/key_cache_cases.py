"""Calls that write index keys to pages and read them back, and what the oracle makes of them, byte by byte."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

import mla_cupy
from mla_cupy import reference
from tests.indexer.prepare.prepare_cases import Array, arrays, norm
from tests.support.calls import assert_same

POISON = 0xA5
#: Slots that nothing may be written to, and that read as zeros.
HOSTILE = {"int32": (-1, -(2**31), 2**31 - 1), "int64": (-1, -(2**63), 2**63 - 1, 2**32, 2**40 + 3)}


@dataclass(frozen=True)
class KeyCase:
    """An append, and a gather of what it wrote; `gap` times 16 bytes lie between pages. `e2m1`: keys are in it."""

    d: int = 128
    n: int = 13
    num_pages: int = 5
    page_size: int = 4
    gap: int = 1
    slot_dtype: str = "int64"
    rope: bool = True
    hadamard: bool = True
    scales: str = "power_of_2"
    head_axis: bool = False
    norm: bool = False
    e2m1: bool = False

    @property
    def record(self) -> int:
        """Bytes of a key and its scales."""
        return (self.d // 2 if self.e2m1 else self.d) + 4

    def __str__(self) -> str:
        """Id of the test: what differs from the defaults."""
        changed = [f"{k}={v}" for k, v in vars(self).items() if v != getattr(KeyCase(), k)]
        return "-".join(changed) or "plain"


CASES = (
    KeyCase(),
    KeyCase(d=64, page_size=1, num_pages=30, slot_dtype="int32", scales="plain"),
    KeyCase(d=32, page_size=7, gap=0, rope=False, num_pages=3, head_axis=True, slot_dtype="int32"),
    KeyCase(d=64, norm=True, gap=0),
    KeyCase(n=70, page_size=64, num_pages=2, rope=False, hadamard=False),
    KeyCase(e2m1=True),
    KeyCase(e2m1=True, page_size=7, gap=0, norm=True, head_axis=True, slot_dtype="int32"),
    KeyCase(e2m1=True, n=70, page_size=64, num_pages=2, rope=False, hadamard=False),
)


def empty(case: KeyCase) -> Array:
    """A cache of poison."""
    record, step = case.record, -(-case.page_size * case.record // 16) * 16 + 16 * case.gap
    memory = np.full(case.num_pages * step + 16, POISON, np.uint8)
    begin = -memory.ctypes.data % 16
    cache = np.ndarray((case.num_pages, case.page_size, record), np.uint8, memory, begin, (step, record, 1))
    return cache[:, :, None] if case.head_axis else cache


def make(case: KeyCase) -> tuple[dict[str, Array], Array, dict[str, Any]]:
    """The key, its RoPE tables, and slots, some hostile; the cache; the options."""
    inputs = arrays("prepare_k", case.d, tokens=case.n, seed=case.n)
    if not case.rope:
        inputs = {"k": inputs["k"]}
    room, hostile = case.num_pages * case.page_size, HOSTILE[case.slot_dtype]
    slots = np.random.default_rng(case.n).permutation(max(room, case.n))[: case.n].astype(np.int64)
    slots[-len(hostile) :] = hostile
    slots[-len(hostile) - 1] = room
    inputs |= norm(case.d) if case.norm else {}
    inputs["slots"] = slots.astype(case.slot_dtype)
    return inputs, empty(case), {"hadamard": case.hadamard, "scales": case.scales}


def check(case: KeyCase, to: Callable[[Any], Any], back: Callable[[Any], Array]) -> None:
    """The calls on arrays that `to` makes and `back` reads: every byte of the memory, gaps included."""
    inputs, cache, options = make(case)
    expected = empty(case)
    reference.indexer_cache_append(cache=expected, **inputs, **options)
    given = {name: to(x) for name, x in inputs.items()}
    there = to(cache)
    mla_cupy.indexer_cache_append(cache=there, **given, **options)
    width = {"d": case.d} if case.e2m1 else {}
    codes, k_scale = mla_cupy.indexer_cache_gather(there, given["slots"], **width)
    assert_same(whole(back(there)), whole(expected))
    wanted = reference.indexer_cache_gather(expected, inputs["slots"], **width)
    assert_same(back(k_scale), wanted[1].astype(np.float32))
    assert_same(back(codes), reference.cache.to_e4m3(wanted[0]))


def whole(cache: Array) -> Array:
    """The bytes of the pages and of the gaps between them."""
    step = cache.strides[0]
    used = cache.shape[1] * cache.shape[-1]
    length = step * (cache.shape[0] - 1) + used
    return np.lib.stride_tricks.as_strided(cache, (length,), (1,))
