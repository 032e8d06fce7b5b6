"""Hostile inputs of the decode operation, the same for every suite: `make(DecodeCase(...))`.

Whatever an operation must not read is poison. The pool is NaN but for the tokens that a sequence owns, and there are
pages that no sequence owns. Pages are permuted. Block-table entries past a sequence's end are out of range. No array is
contiguous, and what lies in the gaps is NaN.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from mla_cupy import dtypes, reference
from mla_cupy.cache_formats import FORMATS

Array = npt.NDArray[Any]

D_QK, D_V = 576, 512
#: Page ids that are in no pool.
GARBAGE_PAGES = (2147480000, -7)
_E4M3 = "float8_e4m3fn"
_NAN_BYTE = 0xFF  # of e4m3, e8m0, bfloat16 and float32
_GAP_OF_ROW = {"padded": 8, "odd": 1, "dense": 0}


@dataclass(frozen=True)
class DecodeCase:
    """One case, reproducible from its fields; `id` names it in a test's parameters.

    seqlens
        The lengths, repeated as often as `b` asks for; one number for all; or "ragged-N": 0, 1, N and random ones.
    strides
        "padded": rows 8 elements apart (what TMA can take: multiples of 16 bytes), outer axes one longer than the
        view. "odd": rows 1 element apart, so that rows are not even 4-byte aligned. "dense": contiguous.
    spare_pages
        Pages of NaN that no sequence owns.
    missing_pages
        How many pages of each sequence (from its second on, where it has one) are replaced by an id out of range.
    head_axis
        False drops the cache's head axis.
    record, scales
        "v32", "v32-nope", "v4", "v41" or "fp8" for a cache of FP8 records, and the rule of its scales; "v32-nope",
        "v4" and "v41" need a d_qk of 512.
    kv_scale, math
        Of "fp8".
    queries, q_scale
        "float8_e4m3fn" or "uint8" for queries in e4m3, and their scale; `dtype` is then the results'.
    """

    b: int = 3
    s_q: int = 1
    h_q: int = 16
    page_size: int = 64
    seqlens: tuple[int, ...] | int | str = "ragged-300"
    dtype: str = "bfloat16"
    causal: bool = True
    seed: int = 0
    strides: Literal["padded", "odd", "dense"] = "padded"
    spare_pages: int = 3
    missing_pages: int = 0
    head_axis: bool = True
    d_qk: int = D_QK
    cp_world: int = 1
    cp_rank: int = 0
    record: str = ""
    scales: str | None = None
    kv_scale: float = 1.0
    math: str = "exact"
    queries: str = ""
    q_scale: float = 1.0

    @property
    def id(self) -> str:
        lengths = self.seqlens if isinstance(self.seqlens, (int, str)) else ",".join(map(str, self.seqlens))
        parts = [
            f"b{self.b}-sq{self.s_q}-h{self.h_q}-page{self.page_size}-len{lengths}-{self.dtype}",
            "causal" if self.causal else "full",
            "" if self.strides == "padded" else self.strides,
            f"missing{self.missing_pages}" if self.missing_pages else "",
            "" if self.head_axis else "3d",
            f"dqk{self.d_qk}" if self.d_qk != D_QK else "",
            f"rank{self.cp_rank}of{self.cp_world}" if self.cp_world > 1 else "",
            self.record,
            self.scales or "",
            f"scale{self.kv_scale:g}" if self.kv_scale != 1 else "",
            self.math if self.math != "exact" else "",
            self.queries,
            f"qscale{self.q_scale:g}" if self.q_scale != 1 else "",
            f"seed{self.seed}" if self.seed else "",
        ]
        return "-".join(part for part in parts if part)

    @property
    def options(self) -> dict[str, Any]:
        """The options of `mla_decode` that say which tokens there are and who sees them."""
        options = {"causal": self.causal, "cp_world": self.cp_world, "cp_rank": self.cp_rank}
        others = {"kv_scale": (self.kv_scale, 1.0), "q_scale": (self.q_scale, 1.0), "math": (self.math, "exact")}
        return options | {name: value for name, (value, usual) in others.items() if value != usual}

    def lengths(self) -> Array:
        """The lengths themselves, (b,) int32."""
        if isinstance(self.seqlens, str):
            policy, _, longest = self.seqlens.partition("-")
            if policy != "ragged":
                raise ValueError(f"unknown policy of lengths: {self.seqlens}")
            random = np.random.default_rng([self.seed, 1]).integers(0, int(longest) + 1, self.b)
            random[:3] = [int(longest), 0, 1][: self.b]
            return random.astype(np.int32)
        return np.resize(np.asarray(self.seqlens, np.int32), self.b)


@dataclass(frozen=True)
class DecodeInputs:
    """The arrays of a case, and what the oracle says about them."""

    case: DecodeCase
    q: Array = field(repr=False)
    kv_cache: Array = field(repr=False)
    block_table: Array = field(repr=False)
    seqlens: Array = field(repr=False)

    @property
    def arguments(self) -> tuple[Array, Array, Array, Array]:
        """The positional arguments of `mla_decode`."""
        return self.q, self.kv_cache, self.block_table, self.seqlens

    @cached_property
    def exact(self) -> tuple[Array, Array]:
        """out and lse of the oracle."""
        out, lse = reference.mla_decode(*self.arguments, **self.case.options)
        return out, lse

    @cached_property
    def rounded(self) -> tuple[Array, Array]:
        """out and lse of the oracle with the kernels' roundings."""
        if not self.case.record:
            out, lse = reference.mla_decode(*self.arguments, **self.case.options, rounding=self.case.dtype)
            return out, lse
        arguments = self.q, as_read(self.case.record, self.kv_cache), self.block_table, self.seqlens
        rounding = self.case.dtype if self.case.record == "v4" else "float16"
        out, lse = reference.mla_decode(*arguments, **self.case.options, rounding=rounding)
        return out, lse


@np.errstate(over="ignore")
def as_read(record: str, cache: Array) -> Array:
    """A cache with the scales of "v32" rounded to float16, as the kernels with tensor cores round them."""
    if record not in ("v32", "v32-nope"):
        return cache
    field, read = FORMATS["v32"].field("scales"), np.array(cache)
    scales = read[..., field.offset : field.offset + field.nbytes]
    exact = np.ascontiguousarray(scales).view(np.float32)
    scales[...] = exact.astype(np.float16).astype(np.float32).view(np.uint8)
    return read


def make(case: DecodeCase) -> DecodeInputs:
    """The inputs of a case."""
    rng = np.random.default_rng(case.seed)
    dtype = dtypes.numpy_dtype(case.dtype)
    lengths = case.lengths()
    local = np.array([len(range(case.cp_rank, n, case.cp_world)) for n in lengths], np.int32)
    pages_of = -(-local // case.page_size)

    q = poisoned(
        (case.b, case.s_q, case.h_q, case.d_qk), dtypes.numpy_dtype(_E4M3) if case.queries else dtype, case.strides
    )
    q[...] = values(rng, q.shape, loud=(0.5, 1.0, 4.0)) / case.q_scale
    if case.queries == "uint8":
        q = q.view(np.uint8)

    num_pages = int(pages_of.sum()) + case.spare_pages
    kv_cache = (
        _records(case, num_pages)
        if case.record
        else poisoned((num_pages, case.page_size, 1, case.d_qk), dtype, case.strides)
    )
    max_pages = int(pages_of.max(initial=0)) + 2
    block_table = _block_table(rng, pages_of, num_pages, max_pages, case.strides)
    for i, length in enumerate(local):
        positions = np.arange(length)
        tokens = values(rng, (int(length), 1, case.d_qk), loud=(1.0,) * 31 + (3.0,))
        if case.record:
            slots = block_table[i, positions // case.page_size].astype(np.int64) * case.page_size
            _append(case, kv_cache, slots + positions % case.page_size, tokens[:, 0])
            continue
        kv_cache[block_table[i, positions // case.page_size], positions % case.page_size] = tokens.astype(dtype)

    for i, count in enumerate(pages_of):
        _lose_pages(rng, kv_cache, block_table[i, : int(count)], case.missing_pages)
    if not case.head_axis:
        kv_cache = kv_cache[:, :, 0]
    return DecodeInputs(case, q, kv_cache, block_table, lengths)


def values(rng: np.random.Generator, shape: tuple[int, ...], loud: tuple[float, ...]) -> Array:
    """Normal values; each row of the last axis is scaled by one of `loud`, so that the softmax is not flat."""
    gains = rng.choice(np.asarray(loud, np.float32), shape[:-1])
    plain: Array = rng.standard_normal(shape, dtype=np.float32)
    scaled: Array = plain * gains[..., None]
    return scaled


def poisoned(shape: tuple[int, ...], dtype: np.dtype[Any], strides: str) -> Array:
    """A view of NaN with gaps of NaN between its rows; its last axis is contiguous."""
    if strides == "dense":
        return np.full(shape, np.nan, dtype)
    *outer, row = shape
    # An axis of one element has no gap: its stride says nothing, and doubling a large pool would cost.
    whole = np.full([n + (n > 1) for n in outer] + [row + _GAP_OF_ROW[strides]], np.nan, dtype)
    view: Array = whole[tuple(slice(n) for n in shape)]
    return view


def _records(case: DecodeCase, num_pages: int) -> Array:
    """A cache of poison: all that is not written is NaN; pages further apart than they must."""
    record = FORMATS[case.record]
    stride = -(-record.page_bytes(case.page_size) // 16) * 16 + 16
    memory: Array = np.full(num_pages * stride + 64, _NAN_BYTE, np.uint8)
    shape, token = (num_pages, case.page_size, 1, record.width), record.token_bytes
    records: Array = np.ndarray(shape, np.uint8, memory, -memory.ctypes.data % 64, (stride, token, token, 1))
    return records


def _append(case: DecodeCase, cache: Array, slots: Array, tokens: Array) -> None:
    """Write tokens to a cache of records."""
    latent = FORMATS[case.record].d_latent
    parts = (tokens[:, :latent], tokens[:, latent:])
    latent_part, rope = (part.astype(dtypes.numpy_dtype("bfloat16")) for part in parts)
    options: dict[str, Any] = {"kv_format": case.record, "scales": case.scales, "kv_scale": case.kv_scale}
    reference.cache_append(latent_part, rope if rope.shape[1] else None, cache, slots, **options)


def _block_table(rng: np.random.Generator, pages_of: Array, num_pages: int, max_pages: int, strides: str) -> Array:
    """Distinct pages in random order for each sequence, garbage after its end and in the gaps between rows."""
    b = len(pages_of)
    gap = 0 if strides == "dense" else 3
    whole = np.resize(np.asarray(GARBAGE_PAGES, np.int32), (b, max_pages + gap))
    table = whole[:, :max_pages]
    order = rng.permutation(num_pages)
    start = 0
    for i, count in enumerate(pages_of):
        table[i, :count] = order[start : start + count]
        start += count
    return table


def _lose_pages(rng: np.random.Generator, kv_cache: Array, pages: Array, count: int) -> None:
    """Replace `count` of a sequence's pages by ids out of range, and poison what they held."""
    candidates = np.arange(1, len(pages))
    for n, lost in enumerate(rng.permutation(candidates)[:count]):
        kv_cache[pages[lost]] = _NAN_BYTE if kv_cache.dtype == np.uint8 else np.nan
        pages[lost] = (kv_cache.shape[0], *GARBAGE_PAGES)[n % 3]
