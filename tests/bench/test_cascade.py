"""The benchmark of decode over a shared prefix, on the NumPy device."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from bench.core import report
from bench.core.errors import BenchError
from bench.core.implementation import Choices, make
from bench.core.runner import Options, run_case
from bench.operations import CASCADE
from bench.ops.cascade.cases import CASES

SMALL = "b2-hq3-prefix64-suffix64"


def test_names_round_trip():
    assert CASCADE.select([], "targets") == CASES
    for case in CASES:
        assert CASCADE.parse(case.name) is case
    assert CASCADE.parse(SMALL).name == SMALL


@pytest.mark.parametrize("name", ["", "b2-hq3-prefix64", "b2-hq3-prefix65-suffix64", "b0-hq3-prefix64-suffix64"])
def test_a_bad_name_is_refused(name):
    with pytest.raises(BenchError, match="case"):
        CASCADE.parse(name)


def test_every_page_counts_once():
    case = CASCADE.parse(SMALL)
    assert case.num_pages == 3
    assert case.cost.nbytes == 2 * (3 * 64 * 576 + 2 * 3 * 1088)
    assert case.cost.flops == 2 * 2 * 128 * 3 * 1088


def test_tables_begin_alike(device):
    case = CASCADE.parse(SMALL)
    table = CASCADE.inputs(case, "bfloat16", 0, device).host_table
    assert sorted(np.unique(table)) == [0, 1, 2]
    assert table[0, 0] == table[1, 0]
    assert table[0, 1] != table[1, 1]


def test_ours_with_the_prefix_once_and_plain(device, limits, numpy_backend):
    device.method, device.stream, ticks = "events", SimpleNamespace(ptr=77), iter(range(10**6))
    device.watch = SimpleNamespace(start=lambda: None, stop_us=lambda: 1.0 + next(ticks) % 2)
    options = Options("bfloat16", replays=20, check=True, limits=limits, env={"gpu": "host"}, repro="bench")
    implementations = make(["always", "plain"], CASCADE.implementations(Choices()))
    rows = run_case(CASCADE, CASCADE.parse(SMALL), implementations, device, options)
    for row in rows:
        report.validate(row)
        assert (row["status"], row["reason"]) == ("ok", "")
    assert [row["kernel"] for row in rows[:2]] == ["plain", "the prefix once"]
