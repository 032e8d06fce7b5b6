"""The mma.sync kernels in the simulator, each on a GPU of the kind that it is for."""

from __future__ import annotations

import mla_cupy
from mla_cupy.kernels.attention import mma
from tests.support import sparse_cases
from tests.support.cases import DecodeCase, DecodeInputs
from tests.support.flat import flat, mla_decode
from tests.support.sim_driver import simulated
from tests.support.tolerance import check, check_lse

Gpu = tuple[str, tuple[int, int]]
"""A kernel, and the compute capability of a GPU that it runs on, which decides the size of its shared memory."""
Mode = tuple[str, int]

#: The oldest GPU, which has more shared memory, and newer ones, which have less.
SMALL: tuple[Gpu, Gpu] = ((mma.SMALL.name, (8, 0)), (mma.SMALL.name, (12, 0)))
WIDE: tuple[Gpu, Gpu] = ((mma.WIDE.name, (8, 0)), (mma.WIDE.name, (8, 9)))
GPUS = (*SMALL, *WIDE)


def decode(inputs: DecodeInputs, gpu: Gpu, mode: Mode = ("random", 3), sm_count: int = 2) -> None:
    """Dense decode, against the oracle."""
    with simulated(sm_count, gpu[1], *mode) as target:
        got = mla_decode(*inputs.arguments, **inputs.case.options, kernel=gpu[0])
    assert f"mla_{gpu[0]}" in target.launched
    check(got, inputs.exact, inputs.rounded, inputs.case.dtype)


def sparse_forward(inputs: sparse_cases.SparseInputs, gpu: Gpu, mode: Mode = ("random", 3)) -> None:
    """The sparse forward, against the oracle."""
    with simulated(2, gpu[1], *mode):
        got = flat(mla_cupy.sparse_mla_forward)(*inputs.arguments, **inputs.options, kernel=gpu[0])
    check(got[:2], inputs.exact[:2], inputs.rounded[:2], inputs.case.dtype)
    check_lse(got[2], inputs.exact[2], inputs.rounded[2])


#: One block works at three requests; hidden tokens, tokens without a page, and rows beyond the last one.
HARD = DecodeCase(b=3, seqlens=(140, 0, 70), s_q=3, h_q=11, page_size=16, missing_pages=1)
