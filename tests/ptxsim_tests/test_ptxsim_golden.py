"""The simulator against outputs recorded on an H200 (see golden.py)."""

from __future__ import annotations

import numpy as np
import pytest
from golden import FILE, Case, agrees, cases, simulate


@pytest.mark.parametrize("case", list(cases()), ids=lambda c: c.name)
def test_against_the_gpu(case: Case) -> None:
    outputs = simulate(case)
    assert all(out.any() for out in outputs)
    if not FILE.exists():
        pytest.skip("no golden outputs are recorded yet")
    with np.load(FILE) as recorded:
        for index, out in enumerate(outputs):
            assert agrees(case, out, recorded[f"{case.name} #{index}"])


def test_the_comparison_can_fail() -> None:
    exact = Case("", "", "", 1, 1, [], [])
    loose = Case("", "", "", 1, 1, [], [], ulp=2)
    one = np.array([1.0, np.nan], "f4")
    near = np.array([1 + 2.0**-22, np.nan], "f4")
    assert agrees(exact, one, one.copy())
    assert not agrees(exact, one, near)
    assert agrees(loose, one, near)
    assert not agrees(loose, one, np.array([1 + 2.0**-20, np.nan], "f4"))
    assert not agrees(loose, one, np.array([1, 1], "f4"))
