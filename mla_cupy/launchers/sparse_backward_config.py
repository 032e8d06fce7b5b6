"""The pure part of the sparse backward: which main kernel runs, and how the workspace is laid out."""

from __future__ import annotations

from dataclasses import dataclass
from types import ModuleType
from typing import NamedTuple

from mla_cupy.errors import ArgumentError, explain
from mla_cupy.launchers import (
    choice,
    sparse_backward_generic,
    sparse_backward_sm90,
    sparse_backward_sm90_pair,
    sparse_backward_sm100,
    sparse_backward_sm100_keys64,
    sparse_backward_sm100_ws,
    sparse_delta,
    sparse_rounders,
    sparse_rows,
)
from mla_cupy.launchers.sparse_problem import SparseBackwardProblem
from mla_cupy.launchers.workspace import offsets
from mla_cupy.runtime import driver
from mla_cupy.runtime.device import DeviceInfo

#: The main kernels, the fastest first.
KERNELS: dict[str, ModuleType] = {
    "sparse_backward_sm100": sparse_backward_sm100,
    "sparse_backward_sm100_keys64": sparse_backward_sm100_keys64,
    "sparse_backward_sm100_ws": sparse_backward_sm100_ws,
    "sparse_backward_sm90_pair": sparse_backward_sm90_pair,
    "sparse_backward_sm90": sparse_backward_sm90,
    "sparse_backward_generic": sparse_backward_generic,
}
_FLOAT = 4
_PROGRESS_BYTES = 8


class Workspace(NamedTuple):
    """Offsets of the parts of the workspace, in bytes, and its size. What lies from `zeroed` on starts as zeros."""

    rows: int
    counts: int
    lse2: int
    delta: int
    sink_sums: int
    norms: int
    rounders: int
    zeroed: int
    selected: int
    largest: int
    progress: int
    sums: int
    nbytes: int


@dataclass(frozen=True)
class SparseBackwardConfig:
    """Everything about a backward that does not depend on pointers.

    additions
        How often the main kernel adds to an element of dkv for each slot that selects its row.
    ordered
        Whether the lists of rows are sorted, so that queries that run together touch the same part of kv.
    """

    problem: SparseBackwardProblem
    kernel: str
    grid: driver.Dim3
    additions: int
    ordered: bool
    workspace: Workspace


def configure(problem: SparseBackwardProblem, device: DeviceInfo, variant: str | None = None) -> SparseBackwardConfig:
    """Choose the main kernel and lay out the workspace.

    Parameters
    ----------
    problem : SparseBackwardProblem
    device : DeviceInfo
    variant : str, optional
        The main kernel to take; default: the fastest that fits.

    Raises
    ------
    ArgumentError
        If there is no such kernel, or too many slots for a deterministic call.
    UnsupportedDeviceError
        If it does not fit, or none does: the message has each one's reason.
    """
    kernel = choice.choose("the sparse backward", KERNELS, problem, device, variant)
    module = KERNELS[kernel]
    additions = -(-problem.h_q // module.HEADS_PER_ADDITION)
    most = problem.s_q * problem.topk * additions
    if problem.deterministic and most >= 2**32:
        got = f"s_q * topk * {additions} = {most}"
        raise ArgumentError(explain("deterministic", f"True, with {got}", "less than 2^32", "split the queries"))
    # Once the sums no longer fit in L2, it matters that those in use lie together.
    ordered = _FLOAT * problem.s_kv * problem.d_qk > device.l2_bytes
    return SparseBackwardConfig(
        problem, kernel, module.geometry(problem, device), additions, ordered, _lay_out(problem)
    )


def check_variant(variant: str | None) -> None:
    """Raise ArgumentError unless it names a main kernel, or None."""
    choice.check_variant(KERNELS, variant)


def levels(problem: SparseBackwardProblem) -> int:
    """How many sums there are for each element of dkv."""
    return sparse_rounders.LEVELS if problem.deterministic else 1


def _lay_out(problem: SparseBackwardProblem) -> Workspace:
    rows_of_heads = _FLOAT * problem.s_q * problem.h_q
    per_row, one = (_FLOAT * problem.s_kv, _FLOAT) if problem.deterministic else (0, 0)
    sizes = {
        "rows": _FLOAT * problem.s_q * sparse_rows.rows_stride(problem.topk),
        "counts": _FLOAT * problem.s_q,
        "lse2": rows_of_heads,
        "delta": rows_of_heads,
        "sink_sums": _FLOAT * sparse_delta.spans(problem.s_q) * problem.h_q if problem.has_sink else 0,
        "norms": per_row,
        "rounders": per_row + one,
        "zeroed": 0,
        "selected": per_row,
        "largest": one,
        "progress": _PROGRESS_BYTES,
        "sums": _FLOAT * problem.s_kv * problem.d_qk * levels(problem),
    }
    *starts, end = offsets(sizes.values())
    return Workspace(**dict(zip(sizes, starts, strict=True)), nbytes=end)
