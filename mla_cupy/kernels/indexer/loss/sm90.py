"""What the kernels of the warm-up loss for Hopper have in common: what they take, and their tensor maps."""

from __future__ import annotations

from dataclasses import dataclass

from mla_cupy.arrays.view import View
from mla_cupy.dtypes import TABLE
from mla_cupy.kernels.indexer.loss.problem import LossProblem
from mla_cupy.kernels.pipeline import Call
from mla_cupy.kernels.spec import HOPPER, Reason, Variant, needs_alignment, needs_cc
from mla_cupy.runtime.device import DeviceInfo
from mla_cupy.runtime.tensormap import TensorMapSpec

PIECE_COLUMNS = 64
"""What one TMA copy fetches of a row: the span of the swizzle. Beyond a shorter row it writes zeros."""
TILE_KEYS = 128
MANY_PIECES, FEW_PIECES = 9, 2
INDEX_PIECES = (2, 1)
FINITE_KEYS = "finite_keys"
"""The part of the workspace that the gradients take the index keys from."""
FINITE_VALUES, NONFINITE_TILES = "finite_values", "nonfinite_tiles"
"""Those that the attention takes its values from, and which tiles of keys of them are not whole."""
HEAD_TILE_TOKENS = 128
"""Tokens in a step of the gradients per head."""
MIN_SPLIT_TOKENS = 32
"""Fewest tokens of a split of those that see a tile of keys: with fewer, starting and storing outweigh the products."""
_ENOUGH_BLOCKS, _MAX_SPLITS, _MAX_SUM_BYTES = 1056, 16, 64 << 20


@dataclass(frozen=True)
class IndexVariant(Variant):
    """Pieces of a row of index queries and keys."""

    index_pieces: int


@dataclass(frozen=True)
class ScoresVariant(IndexVariant):
    """And of queries and keys of the main attention."""

    pieces: int


def pieces(width: int) -> int:
    """How many pieces a row has."""
    return -(-width // PIECE_COLUMNS)


def index_variant(problem: LossProblem) -> IndexVariant:
    """The build that the kernels of the gradients take."""
    return IndexVariant(pieces(problem.index_dim))


def key_splits(problem: LossProblem) -> int:
    """Into how many parts the tokens that see a tile of keys are divided for the gradient by them: enough to fill a GPU
    with blocks, while the sums of all parts stay small. By shapes alone, so that bits do not depend on the GPU.
    """
    filling = _ENOUGH_BLOCKS // max(1, -(-problem.s_kv // TILE_KEYS))
    fitting = _MAX_SUM_BYTES // max(1, 4 * problem.s_kv * problem.index_dim)
    head_tiles = -(-problem.s_q // HEAD_TILE_TOKENS) * problem.heads
    parts = head_tiles if problem.per_head else problem.s_q // MIN_SPLIT_TOKENS
    return max(1, min(filling, fitting, _MAX_SPLITS, parts))


def needs_hopper(problem: LossProblem, device: DeviceInfo) -> Reason | None:
    """Why none of the kernels for Hopper can take the problem; None if they can."""
    if device.arch not in HOPPER:
        return needs_cc(device, "9.0")
    if 0 in (problem.s_q, problem.s_kv):
        return Reason("takes one token and one key at least")
    return None if problem.aligned else needs_alignment("queries and keys, of both kinds,")


def takes(problem: LossProblem, device: DeviceInfo) -> Reason | None:
    """The same of those that take all keys."""
    lists = Reason("takes all keys, not lists of them") if problem.topk is not None else None
    return needs_hopper(problem, device) or lists


def takes_rows(problem: LossProblem, device: DeviceInfo) -> Reason | None:
    """The same of those whose rows are the tokens of one head."""
    widest = FEW_PIECES * PIECE_COLUMNS
    too_wide = Reason(f"takes d up to {widest}") if problem.head_dim > widest else None
    return takes(problem, device) or too_wide


def unsupported(problem: LossProblem, device: DeviceInfo) -> Reason | None:
    """Why the kernels of sums over heads cannot take the problem; None if they can."""
    reason = Reason("takes targets that are summed over heads") if problem.per_head else None
    return takes(problem, device) or reason


def unsupported_per_head(problem: LossProblem, device: DeviceInfo) -> Reason | None:
    """Why the kernels of targets per head cannot take the problem; None if they can."""
    reason = None if problem.per_head else Reason("takes targets per head")
    return takes_rows(problem, device) or reason


def query_map(q: View, box: tuple[int, int]) -> TensorMapSpec:
    """Queries as (heads, tokens, width), fetched as boxes of (tokens, heads)."""
    (tokens, heads, width), nbytes = q.shape, TABLE[q.dtype].nbytes
    token, head = (nbytes * stride for stride in q.strides[:2])
    row = -(-nbytes * width // 16) * 16
    return TensorMapSpec(
        q.dtype,
        q.ptr,
        dims=(width, tokens, heads),
        strides_bytes=(token if tokens > 1 else row, head if heads > 1 else row),
        box=(PIECE_COLUMNS, *box),
    )


def finite_key_map(call: Call) -> TensorMapSpec:
    """The contiguous copy of the index keys."""
    keys = call.view("index_k")
    return key_map(keys._replace(ptr=0, strides=(keys.shape[1], 1)))


def finite_value_map(call: Call) -> tuple[str, TensorMapSpec]:
    """The copy of the values, whose rows start at multiples of 16 bytes."""
    values = call.view("v")
    return FINITE_VALUES, key_map(values._replace(ptr=0, strides=(finite_value_stride(values.shape[1]), 1)))


def finite_value_stride(value_dim: int) -> int:
    """Elements between two rows of the copy of the values."""
    return -(-value_dim // 8) * 8


def head_gradient_maps(call: Call) -> tuple[tuple[str, TensorMapSpec], ...]:
    """The maps of the gradients per head: queries, one head of a tile of tokens at a time, and keys."""
    box = (HEAD_TILE_TOKENS, 1)
    return (
        ("q", query_map(call.view("q"), box)),
        ("k", key_map(call.view("k"))),
        ("index_q", query_map(call.view("index_q"), box)),
        (FINITE_KEYS, finite_key_map(call)),
    )


def key_map(k: View) -> TensorMapSpec:
    """Keys as (1, keys, width), fetched in tiles."""
    (keys, width), nbytes = k.shape, TABLE[k.dtype].nbytes
    stride = nbytes * k.strides[0] if keys > 1 else -(-nbytes * width // 16) * 16
    return TensorMapSpec(
        k.dtype, k.ptr, dims=(width, keys, 1), strides_bytes=(stride, stride), box=(PIECE_COLUMNS, TILE_KEYS, 1)
    )
