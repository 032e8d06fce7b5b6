"""The benchmark of projections, on the NumPy device."""

from __future__ import annotations

import pytest

from bench.core.errors import BenchError
from bench.core.implementation import Choices, make
from bench.operations import PROJECTION
from bench.ops.projection.cases import CASES, ProjectionCase

SMALL = ("absorb-t3-hq2", "project-n1-t2-hq2", "project-n3-t2-hq1")


def test_names_round_trip():
    assert PROJECTION.select([], "targets") == CASES
    for case in CASES:
        assert PROJECTION.parse(case.name) is case
    for name in SMALL:
        assert PROJECTION.parse(name).name == name


@pytest.mark.parametrize("name", ["", "absorb-t3", "project-t3-hq4", "project-n0-t3-hq4", "absorb-t0-hq4"])
def test_a_bad_name_is_refused(name):
    with pytest.raises(BenchError, match="case"):
        PROJECTION.parse(name)


def test_bytes():
    weights = 16 * 128 * 512 * 2
    assert ProjectionCase(3, 16).cost.nbytes == weights + 3 * 16 * (128 + 512) * 2
    assert ProjectionCase(3, 16, 1).cost.nbytes == weights + 3 * 16 * (512 + 128) * 2
    assert ProjectionCase(3, 16, 5).cost.nbytes == weights + 3 * 16 * (5 * (512 + 1) * 4 + 128 * 2)


@pytest.mark.parametrize("name", SMALL)
def test_our_own(rows_of, name):
    (row,) = rows_of(PROJECTION, name).values()
    assert (row["status"], row["reason"]) == ("ok", "")
    assert row["figures_us"]["copy"] > 0


@pytest.mark.parametrize("name", SMALL)
def test_a_wrong_element_is_found(device, numpy_backend, name):
    case = PROJECTION.parse(name)
    inputs = PROJECTION.inputs(case, "bfloat16", 0, device)
    prepared = make([], PROJECTION.implementations(Choices()))[0].prepare(case, "bfloat16", [inputs], device)
    prepared.calls[0]()
    samples = PROJECTION.expect(case, "bfloat16", inputs, device)
    outputs = prepared.outputs(0)
    assert PROJECTION.judge(samples, outputs, "bfloat16", device).ok
    outputs.out[-1, -1, 7] += 3
    assert not PROJECTION.judge(samples, outputs, "bfloat16", device).ok
