"""The benchmark of decode over a shared prefix, on the NumPy device."""

from __future__ import annotations

import numpy as np
import pytest

from bench.core.errors import BenchError
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


def test_ours_with_the_prefix_once_and_plain(rows_of):
    rows = list(rows_of(CASCADE, SMALL, ["always", "plain"]).values())
    for row in rows:
        assert (row["status"], row["reason"]) == ("ok", "")
    assert [row["kernel"] for row in rows[:2]] == ["plain", "the prefix once"]
