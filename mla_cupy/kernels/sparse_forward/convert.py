"""Converting a whole cache of FP8 records to 16-bit rows, before queries that gather each row many times.

The kernels that read records convert a row whenever a query gathers it.
"""

from __future__ import annotations

from dataclasses import replace

from mla_cupy.cache_formats import FORMATS
from mla_cupy.dtypes import TABLE
from mla_cupy.kernels.attention import record_layout
from mla_cupy.kernels.cache.table import GATHER, GATHERED_PER_BLOCK
from mla_cupy.kernels.params import CacheGatherParams
from mla_cupy.kernels.pipeline import Call, Launch, LaunchArgs
from mla_cupy.kernels.sparse_forward import records, sm90
from mla_cupy.kernels.sparse_forward.heuristics import GATHERS_OF_MORE, GATHERS_OF_ONE_BLOCK
from mla_cupy.kernels.sparse_forward.problem import SparseForwardProblem
from mla_cupy.kernels.spec import PLAIN
from mla_cupy.runtime.device import DeviceInfo

ROWS = "kv_rows"
"""The part of the workspace that holds the rows."""


def is_faster(problem: SparseForwardProblem, device: DeviceInfo) -> bool:
    """True if converting first is faster; only where the kernels over rows have tensor cores."""
    if (
        not problem.record
        or problem.math != "exact"
        or sm90.unsupported(replace(problem, record=""), device) is not None
    ):
        return False
    one_block = problem.h_q <= records.BLOCK_ROWS[-1]
    gathers = GATHERS_OF_ONE_BLOCK if one_block else GATHERS_OF_MORE
    return problem.s_q * problem.topk >= gathers * problem.s_kv


def nbytes(problem: SparseForwardProblem) -> int:
    """Size of the rows."""
    return problem.s_kv * problem.d_qk * TABLE[problem.dtype].nbytes


def launches(problem: SparseForwardProblem, record: str, call: Call) -> list[Launch]:
    """Convert all tokens of `kv`, to the workspace; nothing without a token."""
    kept, kv = FORMATS[record], call.view("kv")
    num_pages, page_size, _ = kv.shape
    page, token = record_layout.page_and_token_bytes(kept, kv)
    params = CacheGatherParams(
        cache="kv",
        rows=ROWS,
        rows_stride_bytes=problem.d_qk * TABLE[problem.dtype].nbytes,
        page_stride_bytes=page,
        token_stride_bytes=token,
        n=problem.s_kv,
        num_pages=num_pages,
        page_size=page_size,
        element=record_layout.KINDS[problem.dtype],
        **record_layout.members(kept, page_size, token, 1.0),
    )
    blocks = -(-problem.s_kv // GATHERED_PER_BLOCK)
    return [Launch(GATHER, PLAIN[0], (blocks, 1, 1), LaunchArgs(params))] if blocks else []
