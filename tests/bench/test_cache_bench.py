"""The benchmark of the paged cache, on the NumPy device."""

from __future__ import annotations

import pytest

from bench.core.errors import BenchError
from bench.core.implementation import Choices, make
from bench.operations import CACHE
from bench.ops.cache.cases import CASES, CacheCase

SMALL = ("append-v32-n70", "append-v4-n100", "append-bf16-n5", "gather-v32-n70", "gather-v4-n3", "copy-v32-n192")


def test_names_round_trip():
    assert CACHE.select([], "targets") == CASES
    for case in CASES:
        assert CACHE.parse(case.name) is case
    for name in SMALL:
        assert CACHE.parse(name).name == name


@pytest.mark.parametrize("name", ["", "append-v32", "move-v32-n64", "append-v5-n64", "append-fp8-n64", "copy-v32-n65"])
def test_a_bad_name_is_refused(name):
    with pytest.raises(BenchError, match="case"):
        CACHE.parse(name)


def test_bytes():
    assert CacheCase("append", "v32", 10).cost.nbytes == 10 * (656 + 2 * 576 + 4)
    assert CacheCase("gather", "v4", 10).cost.nbytes == 10 * (584 + 2 * 512 + 4)
    assert CacheCase("copy", "v32", 64).cost.nbytes == 2 * 64 * 656


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("name", SMALL)
def test_our_own(rows_of, name, dtype):
    """The bytes are checked before the timing, and again after they were spoiled and written by a replay."""
    (row,) = rows_of(CACHE, name, dtype=dtype).values()
    assert (row["status"], row["reason"]) == ("ok", "")
    assert row["figures_us"]["copy"] > 0


@pytest.mark.parametrize("name", SMALL)
def test_a_wrong_byte_is_found(device, numpy_backend, name):
    case = CACHE.parse(name)
    inputs = CACHE.inputs(case, "bfloat16", 0, device)
    prepared = make([], CACHE.implementations(Choices()))[0].prepare(case, "bfloat16", [inputs], device)
    prepared.calls[0]()
    samples = CACHE.expect(case, "bfloat16", inputs, device)
    outputs = prepared.outputs(0)
    assert CACHE.judge(samples, outputs, "bfloat16", device).ok
    sample = samples[-1]
    octets = outputs.written.view("u1")[sample.row]
    octets[sample.mask.nonzero()[0][-1]] ^= 1
    assert not CACHE.judge(samples, outputs, "bfloat16", device).ok
