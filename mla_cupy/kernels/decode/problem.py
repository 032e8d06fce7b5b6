"""Problem and options of dense decode, which its kernels share on the host."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

from mla_cupy.dtypes import HALF
from mla_cupy.kernels.attention.kernel import identifier, key_variant, narrowest
from mla_cupy.kernels.attention.records import TREE_BLOCK_ROWS, small_record_variant
from mla_cupy.kernels.spec import Variant
from mla_cupy.runtime.device import DeviceInfo
from mla_cupy.shapes import D_QK, TILE_TOKENS, VALUE_WIDTHS


class Forms(NamedTuple):
    """Optional inputs of a call: anything beyond queries of one length, in one array, that see all tokens.

    Each kernel lists the ones that it supports, by the names of the call's arguments.
    """

    attn_sink: bool = False
    q_rope: bool = False
    packed: bool = False
    out_rope: bool = False
    window: int = 0

    @property
    def names(self) -> tuple[str, ...]:
        """Names of those that there are."""
        return tuple(name for name, value in self._asdict().items() if value)

    @property
    def beyond_sink(self) -> bool:
        """True if there are any except a sink, which every kernel except the clusters supports."""
        return any(name != "attn_sink" for name in self.names)

    @property
    def grouped(self) -> bool:
        """True if queries are scheduled in groups (`cuda_src/attention/query_groups.cuh`)."""
        return self.packed or self.window > 0


class Batch(NamedTuple):
    """The largest batch that a configuration serves: sequences, the tokens that each may have, all query tokens.

    The last is 0 where each sequence has the problem's number of queries.
    """

    b: int
    tokens: int
    queries: int = 0

    @property
    def tiles(self) -> int:
        """The tiles of all sequences, at their longest."""
        return self.b * -(-self.tokens // TILE_TOKENS)


@dataclass(frozen=True)
class BatchStep:
    """The batch that a schedule is for, and strides of its lengths and starts.

    `s_q` is the number of queries per sequence, or in all if these are packed; a line of the block table holds
    `max_tokens`. `shard` is (cp_world, cp_rank).
    """

    b: int
    s_q: int
    max_tokens: int
    seqlens_stride: int
    starts_stride: int
    shard: tuple[int, int] = (1, 0)


NO_FORMS = Forms()


@dataclass(frozen=True)
class DecodeProblem:
    """Sizes and dtypes that decide which kernels run and how: no pointers, no device. `dtype` is the queries'.

    `aligned`: q and the cache start at, and step by, multiples of 16 bytes, as TMA requires. For FP8 formats this
    concerns the queries alone, in calls with optional inputs. `record` is the FP8 format of the cache, "" for rows of
    `dtype`. `math` is "exact", "fp8" or "fp8x2". For packed queries `s_q` is the usual number. `d_head` is the width
    after W_UV, 0 without it. `fp8_out`: results are e4m3 codes with scales.

    `batch` may be None; then the choice among kernels ignores the batch size. Problems that differ in nothing else are
    equal, since a plan serves smaller batches than its own.
    """

    s_q: int
    h_q: int
    dtype: str
    aligned: bool = True
    d_qk: int = D_QK
    record: str = ""
    tree_mask: bool = False
    math: str = "exact"
    forms: Forms = NO_FORMS
    d_head: int = 0
    fp8_out: bool = False
    batch: Batch | None = field(default=None, compare=False, repr=False)

    @property
    def d_v(self) -> int:
        """Width of the values."""
        return VALUE_WIDTHS[self.d_qk]

    @property
    def told(self) -> dict[str, Any]:
        """Properties that the caller passes, by name."""
        names = ("s_q", "h_q", "dtype", "d_qk", "tree_mask", "math", "d_head", "fp8_out")
        told = {name: getattr(self, name) for name in names}
        return {**told, "kv_format": self.record or None, **self.forms._asdict()}

    @property
    def half(self) -> str:
        """The 16-bit dtype of results: the queries', or bfloat16 for e4m3 queries."""
        return self.dtype if self.dtype in HALF else "bfloat16"

    @property
    def rows(self) -> int:
        """Query rows of a sequence."""
        return self.s_q * self.h_q


class DecodeOptions(NamedTuple):
    """A call's arguments other than arrays: as passed, then as resolved by the checks."""

    scale: float
    max_seqlen_q: int | None
    causal: bool
    window: int | None
    math: str
    q_scale: float
    kv_scale: float
    kv_format: str | None
    cp_world: int
    cp_rank: int
    out_dtype: str | None
    scales: str
    lse_base: str
    empty_lse: float
    kernel: str | None


def tree_variant(problem: DecodeProblem, device: DeviceInfo) -> Variant:
    """The build for a problem's `dtype`, `d_qk` and mask."""
    if not problem.tree_mask:
        return key_variant(problem, device)
    return Variant(dtype=problem.dtype, head_dim_qk=problem.d_qk, tree_mask=1)


def tree_record_variant(problem: DecodeProblem, device: DeviceInfo) -> Variant:
    """The build for a problem of dense decode."""
    if not problem.tree_mask:
        return small_record_variant(problem, problem.rows)
    block_rows = narrowest(TREE_BLOCK_ROWS, problem.rows)
    return Variant(dtype=problem.dtype, record=identifier(problem.record), block_rows=block_rows, tree_mask=1)
