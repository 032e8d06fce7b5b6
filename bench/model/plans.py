"""Plans of forward kernels for Blackwell: published kernels, and ours.

Tiles of others' kernels come from their sources; tiles of ours from `cuda_src`, or from possible next kernels.
"""

from __future__ import annotations

from dataclasses import replace

from mla_cupy.cache_formats import FORMATS

from ..core.cost import D_QK, D_V, ELEMENT_BYTES
from .forward import OPERAND_ROW_BYTES, Plan, Product, Work

PAIR_ROWS = 128
_SW_TILE_COLUMNS, _GATHERED_ROWS = 64, 4
_DIM_TILES, _TILE_DIMS = 4, 128
_GATHER_WARPS = 4


def pair_plan(name: str, element_bytes: int, tmem_dims: int = 0, apart: bool = False, gathered: bool = False) -> Plan:
    """128 rows by `cta_group::2`, tiles of 128 keys: each block has 64 rows, half of the keys, and half of V's columns.

    `tmem_dims` of Q's columns are in tensor memory. K and V that lie `apart` share no bytes: the half of V's columns of
    the block's own keys is loaded a second time.
    """
    keys, step = 128, OPERAND_ROW_BYTES // element_bytes
    scores = [Product(PAIR_ROWS, keys, (D_QK - tmem_dims) // step, pair=True)]
    if tmem_dims:
        scores.append(Product(PAIR_ROWS, keys, tmem_dims // step, pair=True, a_in_tmem=True))
    half = keys // 2
    values_of = keys if apart else half
    rows = half * D_QK // _SW_TILE_COLUMNS + values_of * (D_V // 2) // _SW_TILE_COLUMNS
    return Plan(
        name,
        2,
        PAIR_ROWS,
        keys,
        tuple(scores),
        (Product(PAIR_ROWS, D_V // 2, 2 * keys // step, pair=True),),
        filled=element_bytes * (half * D_QK + values_of * D_V // 2),
        element_bytes=element_bytes,
        messages=rows // _GATHERED_ROWS if gathered else 0,
        issuers=_GATHER_WARPS,
    )


def swapped_plan(
    name: str, rows: int, keys: int, blocks: int = 1, gathered: bool = False, element_bytes: int = ELEMENT_BYTES
) -> Plan:
    """`rows` rows of each block as N of both products, S^T = K Q^T and O^T = V^T P^T.

    The blocks of a cluster have rows of their own, and fetch the keys for one another.
    """
    step = OPERAND_ROW_BYTES // element_bytes
    messages = keys // _GATHERED_ROWS * (D_QK // _SW_TILE_COLUMNS) // blocks
    return Plan(
        name,
        blocks,
        rows * blocks,
        keys,
        (Product(keys, rows, D_QK // step),),
        (Product(_TILE_DIMS, rows, _DIM_TILES * keys // step),),
        filled=keys * D_QK * element_bytes,
        element_bytes=element_bytes,
        messages=messages if gathered else 0,
        issuers=_GATHER_WARPS,
    )


ROWS = 64
"""Most rows of a block of ours."""
SWAPPED_64 = swapped_plan("swapped, tiles of 64 keys", ROWS, 64)
SWAPPED_128 = swapped_plan("swapped, tiles of 128 keys", ROWS, 128)
SWAPPED_64_CONVERTED = replace(SWAPPED_64, name="swapped, 64 keys, converted from records")
SWAPPED_64_FP8 = swapped_plan("swapped, 64 keys, FP8", ROWS, 64, element_bytes=1)
SWAPPED_64_GATHERED = swapped_plan("swapped, 64 keys, gathered by two blocks", ROWS, 64, 2, gathered=True)
SWAPPED_128_GATHERED = swapped_plan("swapped, 128 keys, gathered by two blocks", ROWS, 128, 2, gathered=True)
SWAPPED_64_ALONE = swapped_plan("swapped, 64 keys, gathered", ROWS, 64, gathered=True)
PAIR = pair_plan("`cta_group::2`, tiles of 128 keys", ELEMENT_BYTES)
JOINT = pair_plan("joint, tiles of 128 keys", ELEMENT_BYTES, apart=True)
JOINT_GATHERED = pair_plan("joint, 128 keys, gathered", ELEMENT_BYTES, apart=True, gathered=True)
JOINT_Q_IN_TMEM = pair_plan("joint, 256 of Q's columns in tensor memory", ELEMENT_BYTES, 256, apart=True)


def _decode(batch: int, heads: int, keys: int, queries: int = 1, record: str = "") -> Work:
    rows = f"{heads} heads" if queries == 1 else f"{heads} heads, {queries} queries"
    name = f"decode{f' of {record}' if record else ''}, {rows}, {batch} of {keys:,}"
    row_bytes = FORMATS[record].token_bytes if record else D_QK * ELEMENT_BYTES
    return Work(name, batch, heads * queries, keys, row_bytes, True)


_FP8 = (_decode(128, 64, 4096, 1, "fp8"), _decode(64, 16, 81920, 4, "fp8"), _decode(128, 128, 8192, 1, "fp8"))
_SPARSE = Work("sparse, 128 heads, 4,096 queries of 2,048 keys", 4096, 128, 2048, 0, True)
_SPARSE_64 = Work("sparse, 64 heads, 4,096 queries of 2,048 keys", 4096, 64, 2048, 0, True)
OURS = (
    *((plan, _decode(128, 64, 4096)) for plan in (SWAPPED_64, SWAPPED_128)),
    *((plan, _decode(64, 16, 81920, 4)) for plan in (SWAPPED_64, SWAPPED_128)),
    *((SWAPPED_64_CONVERTED, _decode(128, 64, 4096, record=record)) for record in ("v32", "fp8")),
    (SWAPPED_64_CONVERTED, _decode(64, 16, 81920, 4, "v32")),
    *((SWAPPED_64_FP8, work) for work in _FP8),
    *((plan, _decode(128, 128, 4096)) for plan in (SWAPPED_64, SWAPPED_128, JOINT, JOINT_Q_IN_TMEM, PAIR)),
    (SWAPPED_64_ALONE, _SPARSE_64),
    *((plan, _SPARSE) for plan in (SWAPPED_64_GATHERED, SWAPPED_128_GATHERED, JOINT_GATHERED, PAIR)),
)
"""Plans of ours and their work, over rows of 16 bits or records.

Of those with tiles of 128 keys `JOINT` and `JOINT_GATHERED` are written.
"""
