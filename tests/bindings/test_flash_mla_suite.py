"""The tool that runs FlashMLA's scripts, on scripts of a few lines: cases as records, and as arguments."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest

POSITIONAL = """
import triton


def test_attention(b, causal, check=True):
    time = triton.testing.do_bench(lambda: None, warmup=2)
    print(f"{time:.3f}")
    assert b != 3, "three"


if __name__ == "__main__":
    for b in range(1, 5):
        test_attention(b, False)
    test_attention(5, True, False)
"""
RECORDS = """
import dataclasses


@dataclasses.dataclass
class Case:
    b: int
    seed: int = -1
    num_runs: int = 10


def run_test(case):
    assert case.num_runs == 0
    return case.b != 3


for b in range(1, 5):
    run_test(Case(b))
"""


def run(script: str, function: str, claimed: list[int], folder: Path, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    monkeypatch.setattr("sys.argv", ["pytest"])
    monkeypatch.syspath_prepend(str(folder))
    suite = importlib.import_module("tests.support.flash_mla_suite")
    (folder / "script.py").write_text(script)
    rows: list[Any] = []
    monkeypatch.setattr("torch.cuda.synchronize", lambda: None)
    suite.time_nothing()
    suite.run_script(folder / "script.py", function, suite.Cases("any", iter(claimed), rows.append))
    return rows


def test_arguments(torch: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = run(POSITIONAL, "test_attention", [1, 3, 5], tmp_path, monkeypatch)
    assert [(row["case"], row["outcome"]) for row in found] == [(1, "passed"), (3, "failed"), (5, "passed")]
    assert found[1]["said"].startswith("AssertionError three")
    assert found[2]["parameters"] == {"b": 5, "causal": True, "check": False}


def test_records(torch: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = run(RECORDS, "run_test", [2, 3], tmp_path, monkeypatch)
    assert [(row["case"], row["outcome"]) for row in found] == [(2, "passed"), (3, "failed")]
    assert found[0]["parameters"] == {"b": 2, "seed": 1, "num_runs": 0}
