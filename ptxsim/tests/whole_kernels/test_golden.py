"""The simulator against outputs recorded on an H200 (see simtest/golden)."""

from __future__ import annotations

import pickle
import re
from pathlib import Path

import numpy as np
import pytest

import ptxsim
from simtest.golden.__main__ import compare
from simtest.golden.case import FILE, Case, agrees, differences, simulate
from simtest.golden.cases import cases


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
    text = " ".join((Path(ptxsim.__file__).parents[1] / "README.md").read_text().split())
    told = re.search(
        r"(\d+) cases: (\d+) with recorded outputs, (\d+) that the GPU refused, (\d+) not recorded yet", text
    )
    assert told
    assert [int(n) for n in told.groups()] == [len(names), outputs, refused, len(names) - outputs - refused]


def test_another_gpu_is_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Output of ``python -m simtest.golden compare`` for outputs that agree, and for one that differs."""
    some = [case for case in cases() if case.name.startswith("add")][:3]
    (tmp_path / "cases.pickle").write_bytes(pickle.dumps(some))
    outputs = {f"{case.name} #{k}": out for case in some for k, out in enumerate(simulate(case))}
    np.savez(tmp_path / FILE.name, **outputs)
    assert compare(tmp_path) == 0
    outputs[f"{some[1].name} #0"] = outputs[f"{some[1].name} #0"] + 1
    np.savez(tmp_path / FILE.name, **outputs)
    assert compare(tmp_path) == 1
    assert f"{some[1].name}: " in capsys.readouterr().out


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
