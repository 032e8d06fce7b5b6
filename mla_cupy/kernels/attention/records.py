"""Host side that the kernels reading FP8 records share, in dense and sparse decode."""

from __future__ import annotations

from typing import Any

from mla_cupy.kernels.attention.kernel import ON_DEMAND_RECORDS, identifier, narrowest
from mla_cupy.kernels.spec import Variant
from mla_cupy.runtime.device import DeviceInfo

SPARSE_RECORDS = ("v32", "v4")
"""Names of the records that the kernels read."""
DENSE_RECORDS = (*SPARSE_RECORDS, "fp8")
"""Names of the records that the kernels of dense decode read."""
PLAIN_RECORDS = ("v41",)
"""Names of further formats that the kernels on CUDA cores read, in dense and in sparse decode."""
MMA_DENSE = (*DENSE_RECORDS, *ON_DEMAND_RECORDS)
"""Names of the formats that the tensor-core kernels of dense decode read."""
READ_SPARSE = (*SPARSE_RECORDS, *PLAIN_RECORDS, *ON_DEMAND_RECORDS)
READ_DENSE = (*DENSE_RECORDS, *PLAIN_RECORDS, *ON_DEMAND_RECORDS)
"""Names of the records that some kernel of sparse, and of dense, decode reads."""
READ_FORWARD = (*SPARSE_RECORDS, *ON_DEMAND_RECORDS)
"""Names of the records that kernels of the sparse forward read."""

COMPACT = {"v41": "v41-fp4"}
"""Format that sparse decode's second cache may use with another format in the first."""
BLOCK_ROWS = (8, 16, 32)
"""Numbers of query rows that a block of the kernels with swapped operands may compute."""


TREE_BLOCK_ROWS = BLOCK_ROWS[1:]


def record_variant(problem: Any, device: DeviceInfo) -> Variant:
    """The build for a problem's `dtype` and `record`."""
    return Variant(dtype=problem.dtype, record=identifier(problem.record))


def rows_variant(problem: Any, block_rows: int) -> Variant:
    """The build for blocks of `block_rows` rows."""
    return Variant(dtype=problem.dtype, record=identifier(problem.record), block_rows=block_rows)


def small_record_variant(problem: Any, rows: int) -> Variant:
    """The build for `rows` rows: the narrowest block that holds them, or several of the widest."""
    return rows_variant(problem, narrowest(BLOCK_ROWS, rows))
