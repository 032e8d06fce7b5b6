"""Steps of compiled kernels are planted where they can be, or the test says why not."""

from __future__ import annotations

import pytest

from tests.support import mutants
from tests.support.mutants import Mutant, steps

pytest_plugins = "pytester"
TEST = """
from tests.support.mutants import Mutant, plant, steps

def test_it(plant):
    plant(Mutant("keys not waited for", "decode/no_kernel.cu", *steps("bar.sync", 0, of=1)))
"""


def test_a_header_has_no_steps() -> None:
    known = len(mutants.KNOWN)
    with pytest.raises(ValueError, match=r"'lost': got the header ptx/barrier.cuh, expected the .cu file of a kernel"):
        Mutant("lost", "ptx/barrier.cuh", *steps("bar.sync", 0, of=1))
    assert len(mutants.KNOWN) == known


def test_a_kernel_that_is_not_loaded_is_named(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mutants, "KNOWN", [])
    pytester.makepyfile(TEST)
    result = pytester.runpytest_inprocess("-p", "no:cacheprovider")
    result.assert_outcomes(passed=1, errors=1)
    result.stdout.fnmatch_lines(
        ["*'keys not waited for' was planted nowhere: the test has loaded no kernel of decode/no_kernel.cu*"]
    )
