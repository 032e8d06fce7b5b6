"""Calls of the cache operations whose answer the oracle knows byte by byte: for the simulator and for GPUs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

import mla_cupy
from mla_cupy import dtypes, reference
from mla_cupy.cache_formats import FORMATS, HEADER_WORDS, LATENT_FORMATS, words_before_changes
from mla_cupy.ops import cache_update
from mla_cupy.reference.cache import field_view
from tests.cache.inputs import Array, empty_cache, tokens

#: Slots that nothing may be written to, and that read as zeros.
HOSTILE = (-1, -(2**31), 2**31 - 1)
HOSTILE_64 = (-1, -(2**63), 2**63 - 1, 2**32, 2**40 + 3)


@dataclass(frozen=True)
class CacheCase:
    """An append, and a gather of what it wrote.

    Attributes
    ----------
    odd : bool
        Inputs that are not aligned, with gaps between their rows.
    special : bool
        NaN, infinities, zeros, subnormal numbers among the inputs.
    """

    record: str
    dtype: str = "bfloat16"
    scales: str | None = None
    n: int = 11
    num_pages: int = 5
    page_size: int = 4
    gap: int = 1
    slot_dtype: str = "int64"
    rotation: str = ""
    odd: bool = False
    special: bool = False
    kv_scale: float = 1.0
    out_dtype: str = "float32"

    def __str__(self) -> str:
        """Id of the test: what differs from the defaults."""
        default = CacheCase(self.record)
        changed = [f"{k}={v}" for k, v in vars(self).items() if k != "record" and v != getattr(default, k)]
        return "-".join([self.record, *changed])


CASES = (
    *(CacheCase(record.name) for record in LATENT_FORMATS),
    *(CacheCase(record.name, dtype="float32", special=True, rotation="interleaved") for record in LATENT_FORMATS[:7]),
    *(CacheCase(record.name, dtype="float16", odd=True, rotation="halves") for record in LATENT_FORMATS[:8]),
    CacheCase("v32", scales="plain", special=True, out_dtype="float16"),
    CacheCase("v32", page_size=1, num_pages=20, slot_dtype="int32", out_dtype="bfloat16"),
    CacheCase("v32-nope", scales="plain", special=True, out_dtype="float16"),
    CacheCase("v32-nope", page_size=1, num_pages=20, slot_dtype="int32", out_dtype="bfloat16"),
    CacheCase("v4", page_size=1, num_pages=20, slot_dtype="int32", special=True, out_dtype="bfloat16"),
    CacheCase("v4", page_size=7, num_pages=3, gap=0),
    *(CacheCase(name, page_size=3, num_pages=5, special=True, odd=True, gap=2) for name in ("v41", "v41-fp4")),
    CacheCase("v41", dtype="float16", rotation="halves", special=True, out_dtype="bfloat16"),
    CacheCase("fp8", kv_scale=0.375, special=True),
    CacheCase("bf16", special=True, odd=True, out_dtype="float16"),
)


@dataclass
class CacheInputs:
    """The arrays of a case; `cache` is poison."""

    latent: Array
    rope: Array | None
    cache: Array
    slots: Array
    rotation: dict[str, Any]


def make(case: CacheCase, seed: int = 0) -> CacheInputs:
    record, rng = FORMATS[case.record], np.random.default_rng(seed)
    latent, rope = tokens(record, case.n, case.dtype, seed)
    if case.special:
        latent = _special(latent)
        rope = None if rope is None else _special(rope)
    if case.odd:
        latent, rope = _odd(latent), None if rope is None else _odd(rope)
    room = case.num_pages * case.page_size
    hostile = HOSTILE_64 if case.slot_dtype == "int64" else HOSTILE
    slots = rng.permutation(room)[: case.n].astype(np.int64)
    slots[-len(hostile) :] = hostile
    slots[-len(hostile) - 1] = room
    rotation: dict[str, Any] = {}
    if case.rotation and record.d_rope:
        angles = rng.random((11, 32), np.float32) * 6
        positions = rng.integers(-3, 14, case.n).astype(case.slot_dtype)
        rotation = {"cos": np.cos(angles), "sin": np.sin(angles), "positions": positions}
        rotation["interleaved"] = case.rotation == "interleaved"
    cache = empty_cache(record, case.num_pages, case.page_size, case.gap)
    return CacheInputs(latent, rope, cache, slots.astype(case.slot_dtype), rotation)


def _special(x: Array) -> Array:
    """Groups with numbers that have no place on the e4m3 scale."""
    wild = [np.nan, np.inf, -np.inf, 0.0, -0.0, 1e-30, 3.0, 6e4]
    changed = x.astype(np.float32)
    for i, value in enumerate(wild):
        changed[i % 3, 70 * i % x.shape[1]] = value
    changed[3] = 0
    with np.errstate(over="ignore"):
        return changed.astype(x.dtype)


def _odd(x: Array) -> Array:
    """Equal rows, an odd number of elements apart, at an odd address."""
    whole = np.zeros((len(x), x.shape[1] + 3), x.dtype)
    whole[:, 1:-2] = x
    return whole[:, 1:-2]


def octets(cache: Array) -> Array:
    """All bytes of the pages, gaps included."""
    return cache.base if isinstance(cache.base, np.ndarray) else cache


def check_append_and_gather(case: CacheCase, to: Callable[[Any], Any], back: Callable[[Any], Array]) -> None:
    """The calls on arrays that `to` makes and `back` reads, against the oracle: every byte, gaps included.

    The bits of a NaN are not compared: which one a conversion makes is not defined.
    """
    inputs = make(case)
    options = {"scales": case.scales, "kv_scale": case.kv_scale, "kv_format": case.record}
    interleaved = {name: inputs.rotation.pop(name) for name in ("interleaved",) if name in inputs.rotation}
    expected = make(case).cache
    reference.cache_append(
        inputs.latent, inputs.rope, expected, inputs.slots, **inputs.rotation, **interleaved, **options
    )
    cache, slots = to(inputs.cache), to(inputs.slots)
    arrays = {name: to(x) for name, x in inputs.rotation.items()}
    rope = None if inputs.rope is None else to(inputs.rope)
    mla_cupy.cache_append(to(inputs.latent), rope, cache, slots, **arrays, **interleaved, **options)
    rows = mla_cupy.cache_gather(cache, slots, kv_format=case.record, kv_scale=case.kv_scale, out_dtype=case.out_dtype)
    assert_same_pages(back(cache), expected, case.record)
    (exact,) = reference.cache_gather(expected, inputs.slots, kv_format=case.record, kv_scale=case.kv_scale)
    wanted = dtypes.round_to(exact, case.out_dtype).astype(dtypes.numpy_dtype(case.out_dtype))
    np.testing.assert_array_equal(back(rows).astype(np.float32), wanted.astype(np.float32))


def check_ties(to: Callable[[Any], Any], back: Callable[[Any], Array]) -> None:
    """Every number halfway between two of e2m1, and every e2m1 number, times a scale: to even, and as they are."""
    numbers = [0, 0.25, 0.5, 0.75, 1, 1.25, 1.5, 1.75, 2, 2.5, 3, 3.5, 4, 5, 6, 6]
    expected = [0, 0, 0.5, 1, 1, 1, 1.5, 2, 2, 2, 3, 4, 4, 4, 6, 6]
    scales = 2.0 ** (np.arange(28) - 9)
    given, wanted = (np.outer(scales, x).reshape(1, -1) for x in (numbers, expected))
    record = FORMATS["v41-fp4"]
    cache, rope = to(empty_cache(record, 1, 2)), np.zeros((2, 64), np.float32)
    latent = np.concatenate([given, -given]).astype(np.float32)
    mla_cupy.cache_append(to(latent), to(rope), cache, to(np.arange(2)))
    rows = back(mla_cupy.cache_gather(cache, to(np.arange(2)), out_dtype="float32"))
    within = np.repeat(scales <= 256, 16)  # larger ones saturate, see below
    np.testing.assert_array_equal(rows[:, :448][:, within], np.concatenate([wanted, -wanted])[:, within])
    assert (np.abs(rows[:, :448]) <= 6 * 448).all()


def assert_same_pages(got: Array, expected: Array, name: str) -> None:
    record = FORMATS[name]
    for field in record.fields:
        a, b = (field_view(x, record, field) for x in (got, expected))
        if field.kind in ("float32", "bfloat16", "float16"):
            numbers = [np.ascontiguousarray(x).view(dtypes.numpy_dtype(field.kind)) for x in (a, b)]
            both_nan = np.isnan(numbers[0].astype(np.float32)) & np.isnan(numbers[1].astype(np.float32))
            same = both_nan | (numbers[0].view(np.uint8).reshape(*both_nan.shape, -1) ==
                               numbers[1].view(np.uint8).reshape(*both_nan.shape, -1)).all(axis=-1)  # fmt: skip
            assert same.all(), field.name
        else:
            np.testing.assert_array_equal(a, b, field.name)


def copy_case(layers: int, num_pages: int, page_bytes: int, gap: int, seed: int = 0) -> tuple[Array, Array]:
    """A pool, and pairs, some without a valid page."""
    rng = np.random.default_rng(seed)
    whole = rng.integers(0, 256, (layers, num_pages, page_bytes + gap)).astype(np.uint8)
    pages = rng.permutation(num_pages)
    pairs = np.stack([pages[: num_pages // 2], pages[num_pages // 2 : num_pages // 2 * 2]], axis=1)
    hostile = [(-1, -1), (0, num_pages), (num_pages, 0), (-(2**31), 2**31 - 1)]
    return whole[..., :page_bytes], np.concatenate([pairs, hostile]).astype(np.int32)


COPIES = ((2, 6, 41984, 0), (3, 7, 640, 32), (1, 5, 1001, 3), (1, 2, 16, 0))


def check_copy(shape: tuple[int, int, int, int], to: Callable[[Any], Any], back: Callable[[Any], Array]) -> None:
    pool, pairs = copy_case(*shape)
    expected, _ = copy_case(*shape)
    reference.cache_copy_pages(expected, pairs)
    given = to(pool)
    mla_cupy.cache_copy_pages(given, to(pairs))
    np.testing.assert_array_equal(back(given), expected)


@dataclass(frozen=True)
class SlotsCase:
    """Chunks of sequences: ragged, and hostile in every argument."""

    b: int = 7
    max_pages: int = 6
    page_size: int = 4
    max_tokens: int = 40
    num_pages: int | None = 9
    hostile: bool = True
    strided: bool = False

    def __str__(self) -> str:
        """Id of the test: what differs from the defaults."""
        return "-".join(f"{k}={v}" for k, v in vars(self).items() if v != getattr(SlotsCase(), k)) or "default"


SLOTS_CASES = (
    SlotsCase(),
    SlotsCase(b=1, max_pages=40, page_size=64, max_tokens=2100, num_pages=None, hostile=False),
    SlotsCase(b=300, max_tokens=1030, strided=True),  # more sequences than a block has threads
    SlotsCase(max_tokens=7, strided=True),  # too few slots
    SlotsCase(page_size=1, max_pages=1),
    SlotsCase(num_pages=None),
    SlotsCase(num_pages=0),
    SlotsCase(max_pages=0),
    SlotsCase(b=0),
    SlotsCase(max_tokens=0),
)
#: Pages that no cache has, and positions that no table has.
NO_PAGES = (-1, -(2**31), 2**31 - 1, 2**29, 9)
NO_STARTS, NO_LENGTHS = (-3, -(2**31), 2**31 - 1, 23), (-1, -(2**31), 2**31 - 1)


def slots_case(case: SlotsCase, seed: int = 0) -> dict[str, Array]:
    rng = np.random.default_rng(seed)
    room = max(1, case.max_pages * case.page_size)
    arrays = {
        "block_table": rng.integers(0, 9, (case.b, case.max_pages)),
        "starts": rng.integers(0, room, case.b),
        "lengths": rng.integers(0, 4 + case.max_tokens // max(1, case.b), case.b),
    }
    if case.hostile and case.b:
        entries = arrays["block_table"].reshape(-1)[1 : 1 + len(NO_PAGES)]
        entries[:] = NO_PAGES[: len(entries)]
        arrays["starts"][: len(NO_STARTS)] = NO_STARTS
        arrays["lengths"][: len(NO_STARTS)] = (20, 3, 3, 3)  # past entries that are no pages, and past the table
        arrays["lengths"][-len(NO_LENGTHS) :] = NO_LENGTHS
    elif case.b:
        arrays["starts"][:], arrays["lengths"][:] = 100, case.max_tokens - 30
    return {name: x.astype(np.int32) for name, x in arrays.items()}


def _every_other(x: Array) -> Array:
    return np.repeat(x, 2, axis=-1)[..., ::2]


def check_slots(case: SlotsCase, to: Callable[[Any], Any], back: Callable[[Any], Array]) -> None:
    """The call, and one whose arrays have gaps, and which writes to given arrays."""
    arrays = slots_case(case)
    sizes = {"page_size": case.page_size, "max_tokens": case.max_tokens, "num_pages": case.num_pages}
    expected = reference.cache_slots(**arrays, **sizes)
    if case.strided:
        given = {name: to(_every_other(x)) for name, x in arrays.items()}
        given |= {name: to(np.full(2 * len(x), 77, np.int32)) for name, x in zip(OUTPUTS, expected, strict=True)}
        results = [given[name][::2] for name in OUTPUTS]
        mla_cupy.cache_slots(**{**given, **dict(zip(OUTPUTS, results, strict=True))}, **sizes)
        assert all((back(given[name])[1::2] == 77).all() for name in OUTPUTS)
    else:
        results = list(mla_cupy.cache_slots(**{name: to(x) for name, x in arrays.items()}, **sizes))
    for got, wanted in zip(results, expected, strict=True):
        np.testing.assert_array_equal(back(got), wanted)


OUTPUTS = ("slots", "cu_seqlens")


def update_case(max_rows: int, max_pages: int, page_size: int, seed: int = 0) -> tuple[Array, list[Array]]:
    """An upload with changes in and out of the step, some of them hostile; and the arrays that it changes."""
    rng = np.random.default_rng(seed)
    in_step, everything = max_rows // 2, max_rows - 1
    room = max_rows * max_pages
    packed = np.full(words_before_changes(max_rows) + 2 * room, -7, np.int32)
    packed[:HEADER_WORDS] = [in_step, everything, *[0] * (HEADER_WORDS - 2)]
    lists = packed[HEADER_WORDS:]
    rows = rng.permutation(max_rows)
    lists[:max_rows] = rows
    lists[everything - 1] = max_rows + 3  # no row
    lists[max_rows : 2 * max_rows] = rng.integers(0, max_pages * page_size + 1, max_rows)
    lists[max_rows] = 2**31 - 1
    counts = rng.integers(0, max_pages, max_rows)
    first = lists[2 * max_rows : 3 * max_rows + 1]
    first[:] = [0, *np.cumsum(counts)]
    added = rng.integers(0, page_size + 2, max_rows)
    lists[3 * max_rows + 1 : 4 * max_rows + 2] = [0, *np.cumsum(added)]
    changes = lists[4 * max_rows + 2 :].reshape(-1, 2)
    for i, count in enumerate(counts):
        changes[first[i] : first[i + 1], 0] = rng.permutation(max_pages)[:count]
        changes[first[i] : first[i + 1], 1] = rng.integers(0, 1000, count)
    changes[0] = (-1, 5)
    changes[int(first[1])] = (max_pages, 5)
    table, step_table = rng.integers(0, 1000, (2, max_rows, max_pages)).astype(np.int32)
    seqlens, step_seqlens = rng.integers(0, 9, (2, max_rows)).astype(np.int32)
    slots, positions = rng.integers(0, 9, (2, max(1, int(added[:in_step].sum()) - 1))).astype(np.int32)  # one too few
    return packed, [table, seqlens, step_table, step_seqlens, slots, positions]


def check_update(to: Callable[[Any], Any], back: Callable[[Any], Array], sizes: tuple[int, int, int]) -> None:
    packed, arrays = update_case(*sizes)
    expected = [x.copy() for x in arrays]
    reference.cache_update(packed, *expected, page_size=sizes[2])
    given = [to(x) for x in arrays]
    cache_update(to(packed), *given, page_size=sizes[2])
    for got, wanted in zip(given, expected, strict=True):
        np.testing.assert_array_equal(back(got), wanted)
