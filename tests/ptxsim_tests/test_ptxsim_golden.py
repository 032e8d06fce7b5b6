"""The simulator against outputs recorded on an H200 (see golden.py)."""

from __future__ import annotations

import numpy as np
import ptxsim
import pytest
from golden import FILE, Case, agrees, cases, differences, simulate


@pytest.fixture(scope="module", name="recorded")
def _recorded() -> dict[str, np.ndarray]:
    with np.load(FILE) as file:
        return dict(file)


@pytest.mark.parametrize("case", list(cases()), ids=lambda c: c.name)
def test_against_the_gpu(case: Case, recorded: dict[str, np.ndarray]) -> None:
    if f"{case.name} failed" in recorded:
        with pytest.raises(ptxsim.SimError):
            simulate(case)
        return
    if f"{case.name} #0" not in recorded:
        pytest.skip("this case is not recorded yet")
    outputs = simulate(case)
    assert all(out.any() for out in outputs)
    for index, out in enumerate(outputs):
        assert differences(case, out, recorded[f"{case.name} #{index}"]) == []


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
