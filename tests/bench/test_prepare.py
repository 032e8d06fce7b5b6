"""The benchmark of the preparation before decode, on the NumPy device."""

from __future__ import annotations

import pytest

from bench.core.errors import BenchError
from bench.core.implementation import Choices, make
from bench.operations import PREPARE
from bench.ops.prepare.cases import CASES, MlaPrepareCase

SMALL = ("codes-fp8-n70-h2", "new-v4-n5-h3", "inplace-v32-n3-h2-theta", "inplace-bf16-n2-h1", "codes-none-n3-h2")


def test_names_round_trip():
    assert PREPARE.select([], "targets") == CASES
    for case in CASES:
        assert PREPARE.parse(case.name) is case
    for name in SMALL:
        assert PREPARE.parse(name).name == name


@pytest.mark.parametrize("name", ["", "codes-fp8", "move-v32-n64-h1", "codes-v5-n64-h1", "codes-fp8-n0-h1"])
def test_a_bad_name_is_refused(name):
    with pytest.raises(BenchError, match="case"):
        PREPARE.parse(name)


def test_bytes():
    angles, token = 2 * 10 * 32 * 4, 4 + 4 + 1152 + 576
    assert MlaPrepareCase("codes", "fp8", 10, 3).cost.nbytes == 10 * (3 * (576 * 3 + 4) + token) + angles
    assert MlaPrepareCase("inplace", "", 10, 3, theta=True).cost.nbytes == 10 * (3 * 2 * 128 + 4)


@pytest.mark.parametrize("name", SMALL)
def test_our_own(rows_of, name):
    """The bytes are checked before the timing, and again after they were spoiled and written by a replay."""
    (row,) = rows_of(PREPARE, name, dtype="bfloat16").values()
    assert (row["status"], row["reason"]) == ("ok", "")
    assert row["figures_us"]["copy"] > 0


@pytest.mark.parametrize("name", SMALL)
def test_a_wrong_byte_is_found(device, numpy_backend, name):
    case = PREPARE.parse(name)
    inputs = PREPARE.inputs(case, "bfloat16", 0, device)
    samples = PREPARE.expect(case, "bfloat16", inputs, device)
    prepared = make([], PREPARE.implementations(Choices()))[0].prepare(case, "bfloat16", [inputs], device)
    prepared.calls[0]()
    outputs = prepared.outputs(0)
    assert PREPARE.judge(samples, outputs, "bfloat16", device).ok
    sample = samples[-1]
    octets = getattr(outputs, sample.result).view("u1")[sample.row].reshape(-1)
    octets[sample.mask.reshape(-1).nonzero()[0][-40:]] ^= 1
    assert not PREPARE.judge(samples, outputs, "bfloat16", device).ok
