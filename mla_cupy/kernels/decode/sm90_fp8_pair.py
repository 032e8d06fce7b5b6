"""Host side of `decode/sm90_fp8_pair.cu`: pairs of blocks that read each tile once."""

from __future__ import annotations

from dataclasses import replace

from mla_cupy.kernels.attention.kernel import NO_TREE
from mla_cupy.kernels.decode import sm90_fp8
from mla_cupy.kernels.decode.problem import DecodeProblem
from mla_cupy.kernels.spec import Reason, variants
from mla_cupy.runtime.device import DeviceInfo

BLOCK_ROWS = sm90_fp8.BLOCK_ROWS[-1]
READERS = 2
"""Blocks of a cluster."""


def unsupported(problem: DecodeProblem, device: DeviceInfo) -> Reason | None:
    """Reason that the kernel cannot take the problem; None if it can."""
    if problem.tree_mask:
        return NO_TREE
    if -(-problem.rows // BLOCK_ROWS) % READERS:
        return Reason(f"takes an even number of blocks of {BLOCK_ROWS} query rows")
    return sm90_fp8.unsupported(problem, device)


KERNEL = replace(
    sm90_fp8.KERNEL,
    name="decode_sm90_fp8_pair",
    about="dense decode in FP8 of more than 64 query rows: pairs of blocks read each tile once",
    source="decode/sm90_fp8_pair.cu",
    variants=variants(dtype=sm90_fp8.QUERIES, block_rows=(BLOCK_ROWS,)),
    facts={**sm90_fp8.KERNEL.facts, "cluster": READERS},
    unsupported=unsupported,
    on_request=True,
)
