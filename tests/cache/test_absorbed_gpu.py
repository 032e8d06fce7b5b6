"""Preparation before decode with W_UK on a GPU, in sizes that the simulator has no time for."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.cache.absorbed_runs import CASES, K3, AbsorbedCase, check_absorbed
from tests.support.gpu import fetch, upload

pytestmark = pytest.mark.gpu
LARGE = (
    AbsorbedCase(n=64, h=128, record="v32", return_rope=True),
    AbsorbedCase(n=300, h=16, d_nope=192, dtype="float16", record="fp8", interleaved=False),
    AbsorbedCase(n=129, h=128, q_rope=True),
    AbsorbedCase(n=33, h=64, d_nope=256, record="", angles="theta"),
    replace(K3, n=64, h=96),
    replace(K3, n=129, h=128, record="v32-nope"),
)


@pytest.mark.parametrize("case", [*CASES, *LARGE], ids=str)
def test_equals_the_oracle(gpu: object, case: AbsorbedCase) -> None:
    check_absorbed(case, upload, fetch)
