"""What the kernels of the sparse forward share on the host: the problem's numbers."""

from __future__ import annotations

from dataclasses import dataclass

HEAD_DIMS_QK = (576, 512)


@dataclass(frozen=True)
class SparseForwardProblem:
    """What decides which kernels run and how: no pointers, no device, and none of the sizes that change from call to
    call.

    `aligned` says that q and kv start at, and step by, multiples of 16 bytes.
    """

    h_q: int
    d_qk: int
    dtype: str
    aligned: bool = True
