"""The kernels of the indexer's losses for Hopper: WGMMA over rows that TMA fetches or that are gathered."""

from __future__ import annotations

from typing import Any

from mla_cupy.kernels.indexer.loss import heuristics
from mla_cupy.kernels.indexer.loss.heuristics import key_splits
from mla_cupy.kernels.indexer.loss.problem import TILE_KEYS, TILE_TOKENS, LossKernel, LossProblem, source
from mla_cupy.kernels.indexer.loss.sm90_maps import (
    PIECE_COLUMNS,
    Maps,
    finite_key_map,
    finite_value_map,
    gradient_query_map,
    key_map,
    pieces,
    query_map,
)
from mla_cupy.kernels.params import LossParams
from mla_cupy.kernels.pipeline import Call
from mla_cupy.kernels.spec import HOPPER, Reason, Variant, needs_alignment, needs_cc, variants
from mla_cupy.runtime.device import DeviceInfo
from mla_cupy.runtime.launching import Dim3

MANY_PIECES, FEW_PIECES = 9, 2
"""Pieces of a row of queries and keys of the attention."""
OWN_KEYS = 0
"""Number of pieces if heads have separate keys."""
ROW_PIECES = (2, 3, 4, MANY_PIECES)
"""Numbers of pieces of the log-sum-exps."""
CODES = "float8_e4m3fn"
INDEX_PIECES = (2, 1)
"""Numbers of pieces of the indexer."""
BLOCK_TOKENS, BLOCK_HEADS = 2, 64
"""Tokens and heads of a block of the gradients by queries, and of lists."""
MAX_LIST_HEADS = 128
"""Most heads of a token in the kernels of lists."""
MAX_ROW_VALUES = 128
"""Width of the values that the kernel of rows supports."""
_CHUNK_ELEMS = 8


# ---- Problems --------------------------------------------------------------------------------------------------
def _needs_hopper(problem: LossProblem, device: DeviceInfo) -> Reason | None:
    """Reason why none of the kernels supports the problem; None if they do."""
    if device.arch not in HOPPER:
        return needs_cc(device, "9.0")
    if 0 in (problem.s_q, problem.s_kv):
        return Reason("takes one token and one key at least")
    return None if problem.aligned else needs_alignment("queries and keys, of both kinds,")


def _all_keys(problem: LossProblem, device: DeviceInfo) -> Reason | None:
    """Reason against kernels of all keys."""
    lists = Reason("takes all keys, not lists of them") if problem.topk is not None else None
    return _needs_hopper(problem, device) or lists


def _rows_of_heads(problem: LossProblem, device: DeviceInfo) -> Reason | None:
    """Reason against kernels with the tokens of one head as rows."""
    widest = FEW_PIECES * PIECE_COLUMNS
    too_wide = Reason(f"takes d up to {widest}") if problem.head_dim > widest else None
    return _all_keys(problem, device) or _own_keys(problem) or too_wide


def _own_keys(problem: LossProblem) -> Reason | None:
    """Reason against kernels of keys that all heads share, in one array."""
    own = problem.kv_heads > 1 or problem.pairs
    return Reason("takes keys that all heads share, whole") if own else None


def _scaled(problem: LossProblem) -> Reason | None:
    """Reason against kernels of plain bfloat16 index queries and keys."""
    scaled = problem.codes or problem.scaled
    return Reason("takes index queries and keys in bfloat16, without scales") if scaled else None


def _summed_over_heads(problem: LossProblem, device: DeviceInfo) -> Reason | None:
    """Reason against kernels of sums over heads."""
    if (reason := _all_keys(problem, device)) is not None:
        return reason
    if problem.per_head:
        return Reason("takes targets that are summed over heads")
    odd = problem.pairs and problem.first_dim % PIECE_COLUMNS
    return Reason(f"takes pairs whose first columns are a multiple of {PIECE_COLUMNS}") if odd else None


def _per_head(problem: LossProblem, device: DeviceInfo) -> Reason | None:
    """Reason against kernels of targets per head."""
    reason = None if problem.per_head else Reason("takes targets per head")
    return _rows_of_heads(problem, device) or _scaled(problem) or reason


def _lists(problem: LossProblem, device: DeviceInfo) -> Reason | None:
    """Reason against kernels that gather the keys of lists."""
    if (reason := _needs_hopper(problem, device)) is not None:
        return reason
    if problem.topk is None:
        return Reason("takes lists of keys")
    if (reason := _own_keys(problem)) is not None:
        return reason
    if max(problem.heads, problem.index_heads) > MAX_LIST_HEADS:
        return Reason(f"takes h and h_i up to {MAX_LIST_HEADS}")
    return Reason("takes d in multiples of 8") if problem.head_dim % _CHUNK_ELEMS else None


def _too_wide(problem: LossProblem) -> Reason | None:
    return Reason(f"takes d_v up to {MAX_ROW_VALUES}") if problem.value_dim > MAX_ROW_VALUES else None


def attends(problem: LossProblem, device: DeviceInfo) -> bool:
    """True if the kernel of targets per head can make the attention's output for another main kernel."""
    return _rows_of_heads(problem, device) is None and _too_wide(problem) is None


# ---- Builds ----------------------------------------------------------------------------------------------------
def _main_pieces(problem: LossProblem) -> int:
    return FEW_PIECES if pieces(problem.head_dim) <= FEW_PIECES else MANY_PIECES


def _pieces_of_rows(problem: LossProblem) -> Variant:
    """Build for the attention's number of pieces, or the next larger one."""
    return Variant(pieces=min(count for count in ROW_PIECES if count >= pieces(problem.head_dim)))


def _by_pieces(problem: LossProblem) -> Variant:
    """Build for pieces of the attention."""
    return Variant(pieces=_main_pieces(problem))


def _by_index_pieces(problem: LossProblem) -> Variant:
    """Build for pieces of the indexer."""
    return Variant(index_pieces=pieces(problem.index_dim))


def _of_scores(problem: LossProblem) -> Variant:
    """Build for pieces of both, keys of all heads or of each, and the dtype of the indexer."""
    main = OWN_KEYS if problem.kv_heads > 1 else _main_pieces(problem)
    if problem.codes:
        return Variant(index_dtype=CODES, index_pieces=1, pieces=main)
    return Variant(index_dtype="bfloat16", index_pieces=max(1, pieces(problem.index_dim)), pieces=main)


def _of_heads(problem: LossProblem) -> Variant:
    """Build for pieces of the indexer, 0 for attention alone; and with or without an output."""
    index_pieces = pieces(problem.index_dim) if problem.per_head else 0
    return Variant(index_pieces=index_pieces, with_output=int(problem.value_dim > 0))


_PIECES = variants(pieces=(MANY_PIECES, FEW_PIECES))
_INDEX_PIECES = variants(index_pieces=INDEX_PIECES)
_SCORES = tuple(
    Variant(index_dtype=dtype, index_pieces=index, pieces=main)
    for main in (MANY_PIECES, FEW_PIECES, OWN_KEYS)
    for dtype, index in (*(("bfloat16", index) for index in INDEX_PIECES), (CODES, 1))
)


# ---- Grids -----------------------------------------------------------------------------------------------------
def _head_tiles(problem: LossProblem, tokens: int) -> Dim3:
    """A block per head and tile of tokens."""
    return problem.heads, -(-tokens // TILE_TOKENS), 1


def _key_tiles(problem: LossProblem, tokens: int) -> Dim3:
    """A block per tile of keys and of tokens."""
    return -(-problem.s_kv // TILE_KEYS), -(-tokens // TILE_TOKENS), 1


def _key_splits(problem: LossProblem, tokens: int) -> Dim3:
    """A block per tile of keys and split of the tokens that see it, or of their heads."""
    return -(-problem.s_kv // TILE_KEYS) * key_splits(problem), 1, 1


def _pairs(problem: LossProblem, tokens: int) -> Dim3:
    """Blocks that divide the pairs of tokens, per group of heads."""
    blocks = min(-(-tokens // BLOCK_TOKENS), heuristics.MAX_QUERY_BLOCKS)
    return blocks, -(-problem.index_heads // BLOCK_HEADS), 1


def _tokens(problem: LossProblem, tokens: int) -> Dim3:
    """A block per token."""
    return tokens, 1, 1


def _token_heads(problem: LossProblem, tokens: int) -> Dim3:
    """A block per token and group of heads."""
    return tokens, -(-problem.index_heads // BLOCK_HEADS), 1


# ---- Maps ------------------------------------------------------------------------------------------------------
def _score_maps(call: Call, tokens: int) -> Maps:
    """Queries and keys of the attention, then of the indexer; the attention's again if the indexer has none."""
    index_q, index_k = ("index_q", "index_k") if call.name("index_q") else ("q", "k")
    return (*_main_maps(call, tokens), *_tiles(call, index_q, index_k))


def _main_maps(call: Call, tokens: int) -> Maps:
    """Queries and keys of the attention, each with its last columns; where these are no array, the same again."""
    q_rope, k_rope = call.name("q_rope") or "q", call.name("k_rope") or "k"
    (q, own_q), (k, own_k) = zip(_tiles(call, "q", "k"), _tiles(call, q_rope, k_rope), strict=True)
    return q, own_q, k, own_k


def _head_maps(call: Call, tokens: int) -> Maps:
    """Queries and keys of the attention, then of the indexer, and values; the keys again if there are none."""
    values = finite_value_map(call) if call.name("v") else ("k", key_map(call.view("k")))
    return (*_tiles(call, "q", "k"), *_tiles(call, "index_q", "index_k"), values)


def _head_gradient_maps(call: Call, tokens: int) -> Maps:
    """Queries, one head of a tile of tokens at a time, and keys: the indexer's are the copy."""
    index_q = query_map(call.view("index_q"), (TILE_TOKENS, 1))
    return (*_tiles(call, "q", "k"), ("index_q", index_q), finite_key_map(call))


def _gradient_maps(call: Call, tokens: int) -> Maps:
    """Index queries, a token's heads at a time, and the copy of the keys."""
    return (*_list_gradient_maps(call, tokens), finite_key_map(call))


def _list_gradient_maps(call: Call, tokens: int) -> Maps:
    """A token's index queries, some heads at a time."""
    return (gradient_query_map(call, tokens, (1, BLOCK_HEADS)),)


def _list_lse_maps(call: Call, tokens: int) -> Maps:
    """All heads of a token."""
    return (("q", query_map(call.view("q"), (1, MAX_LIST_HEADS))),)


def _list_score_maps(call: Call, tokens: int) -> Maps:
    """All heads of a token, of both kinds; where there are no index heads, of the attention again."""
    names = ("q", "index_q" if call.name("index_q") else "q")
    return tuple((name, query_map(call.view(name), (1, MAX_LIST_HEADS))) for name in names)


def _tiles(call: Call, queries: str, keys: str) -> Maps:
    """Queries, one head of a tile of tokens at a time, and keys."""
    return (queries, query_map(call.view(queries), (TILE_TOKENS, 1))), (keys, key_map(call.view(keys)))


# ---- Kernels ---------------------------------------------------------------------------------------------------
def _kernel(name: str, about: str, **others: Any) -> LossKernel:
    return LossKernel(name, about, source(name), LossParams, HOPPER, **others)


LSE = _kernel(
    "indexer_loss_sm90_lse",
    "log-sum-exps of the attention for the indexer's loss with WGMMA and TMA",
    variants=variants(pieces=ROW_PIECES),
    facts={"tile_tokens": TILE_TOKENS},
    unsupported=_summed_over_heads,
    grid=_head_tiles,
    variant=_pieces_of_rows,
    maps=_main_maps,
)
SCORES = _kernel(
    "indexer_loss_sm90_scores",
    "targets and scores of the indexer's loss with WGMMA and TMA",
    variants=_SCORES,
    facts={"tile_tokens": TILE_TOKENS},
    unsupported=_summed_over_heads,
    grid=_key_tiles,
    variant=_of_scores,
    maps=_score_maps,
)
QUERIES = _kernel(
    "indexer_loss_sm90_queries",
    "gradients of index queries and weights with WGMMA and TMA",
    variants=_INDEX_PIECES,
    facts={"block_tokens": BLOCK_TOKENS, "block_heads": BLOCK_HEADS},
    unsupported=_summed_over_heads,
    grid=_pairs,
    variant=_by_index_pieces,
    maps=_gradient_maps,
)
KEYS = _kernel(
    "indexer_loss_sm90_keys",
    "gradient of the index keys with WGMMA and TMA: sums over splits of the tokens",
    variants=_INDEX_PIECES,
    facts={"block_keys": TILE_KEYS},
    unsupported=_summed_over_heads,
    grid=_key_splits,
    variant=_by_index_pieces,
    maps=_gradient_maps,
)
HEADS = _kernel(
    "indexer_loss_sm90_heads",
    "loss per head, and the attention's output, with WGMMA and TMA",
    variants=(*variants(index_pieces=INDEX_PIECES, with_output=(1, 0)), Variant(index_pieces=0, with_output=1)),
    facts={"tile_tokens": TILE_TOKENS},
    unsupported=lambda problem, device: _per_head(problem, device) or _too_wide(problem),
    grid=_head_tiles,
    variant=_of_heads,
    maps=_head_maps,
)
HEAD_QUERIES = _kernel(
    "indexer_loss_sm90_head_queries",
    "gradients per head of index queries and weights with WGMMA and TMA",
    variants=_INDEX_PIECES,
    facts={"tile_tokens": TILE_TOKENS},
    unsupported=_per_head,
    grid=_head_tiles,
    variant=_by_index_pieces,
    maps=_head_gradient_maps,
)
HEAD_KEYS = _kernel(
    "indexer_loss_sm90_head_keys",
    "gradient per head of the index keys with WGMMA and TMA: sums over splits of the tokens' heads",
    variants=_INDEX_PIECES,
    facts={"block_keys": TILE_KEYS, "tile_tokens": TILE_TOKENS},
    unsupported=_per_head,
    grid=_key_splits,
    variant=_by_index_pieces,
    maps=_head_gradient_maps,
)
LIST_LSE = _kernel(
    "indexer_loss_sm90_list_lse",
    "log-sum-exps of the attention for the indexer's sparse loss with WGMMA, keys gathered",
    variants=_PIECES,
    facts={"block_heads": MAX_LIST_HEADS},
    unsupported=_lists,
    grid=_tokens,
    variant=_by_pieces,
    maps=_list_lse_maps,
)
LIST_SCORES = _kernel(
    "indexer_loss_sm90_list_scores",
    "targets and scores of the indexer's sparse loss with WGMMA, keys gathered",
    variants=tuple(build for build in _SCORES if build.pieces != OWN_KEYS),
    facts={"block_heads": MAX_LIST_HEADS},
    unsupported=_lists,
    grid=_tokens,
    variant=_of_scores,
    maps=_list_score_maps,
)
LIST_GRADIENTS = _kernel(
    "indexer_loss_sm90_list_gradients",
    "gradients of the indexer's sparse loss with WGMMA, keys gathered",
    variants=_INDEX_PIECES,
    facts={"block_heads": BLOCK_HEADS},
    unsupported=_lists,
    grid=_token_heads,
    variant=_by_index_pieces,
    maps=_list_gradient_maps,
)

KERNELS = (
    *(LSE, SCORES, QUERIES, KEYS),
    *(HEADS, HEAD_QUERIES, HEAD_KEYS),
    *(LIST_LSE, LIST_SCORES, LIST_GRADIENTS),
)
