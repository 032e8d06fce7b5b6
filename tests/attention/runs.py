"""The mma.sync kernels in the simulator, each on a GPU of the kind that it is for."""

from __future__ import annotations

import mla_cupy
from mla_cupy.kernels.attention import mma
from tests.support import sparse_cases
from tests.support.cases import DecodeCase, DecodeInputs
from tests.support.flat import flat, mla_decode
from tests.support.sim_driver import simulated
from tests.support.tolerance import check, check_lse

#: Compute capability by kernel: among them the oldest one, one whose blocks have little shared memory, and the newest.
GPUS = {
    mma.SMALL_163KB.name: (8, 0),
    mma.SMALL.name: (12, 0),
    mma.WIDE_163KB.name: (8, 0),
    mma.WIDE.name: (8, 9),
}

Mode = tuple[str, int]


def decode(inputs: DecodeInputs, kernel: str, mode: Mode = ("random", 3), sm_count: int = 2) -> None:
    """Dense decode, against the oracle."""
    with simulated(sm_count, GPUS[kernel], *mode) as target:
        got = mla_decode(*inputs.arguments, **inputs.case.options, kernel=kernel)
    assert any(entry.startswith("mla_attention_mma") for entry in target.launched)
    check(got, inputs.exact, inputs.rounded, inputs.case.dtype)


def sparse_forward(inputs: sparse_cases.SparseInputs, kernel: str, mode: Mode = ("random", 3)) -> None:
    """The sparse forward, against the oracle."""
    with simulated(2, GPUS[kernel], *mode):
        got = flat(mla_cupy.sparse_mla_forward)(*inputs.arguments, **inputs.options, kernel=kernel)
    check(got[:2], inputs.exact[:2], inputs.rounded[:2], inputs.case.dtype)
    check_lse(got[2], inputs.exact[2], inputs.rounded[2])


#: One block works at three requests; hidden tokens, tokens without a page, and rows beyond the last one.
HARD = DecodeCase(b=3, seqlens=(140, 0, 70), s_q=3, h_q=11, page_size=16, missing_pages=1)
