"""The simulator against outputs recorded on an H200 (see golden.py)."""

from __future__ import annotations

import re
from pathlib import Path

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
        pytest.skip("no H200 output is recorded for this case yet: nothing to compare with")
    outputs = simulate(case)
    assert all(out.any() for out in outputs)
    for index, out in enumerate(outputs):
        assert differences(case, out, recorded[f"{case.name} #{index}"]) == []


def test_the_readme_counts_the_recordings(recorded: dict[str, np.ndarray]) -> None:
    """The README tells how many cases have an output of the GPU, were refused by it, and are not recorded."""
    names = [case.name for case in cases()]
    outputs, refused = (sum(f"{name} {what}" in recorded for name in names) for what in ("#0", "failed"))
    text = " ".join((Path(ptxsim.__file__).parent / "README.md").read_text().split())
    told = re.search(
        r"(\d+) cases: (\d+) with recorded outputs, (\d+) that the GPU refused, (\d+) not recorded yet", text
    )
    assert told
    assert [int(n) for n in told.groups()] == [len(names), outputs, refused, len(names) - outputs - refused]


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
