"""The preparation on a GPU against the oracle, byte by byte."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import mla_cupy
from tests.indexer.prepare.prepare_cases import arrays, both, expected, norm
from tests.indexer.prepare.test_prepare_sim import FLAGS
from tests.support.calls import assert_same, on_host
from tests.support.gpu import upload

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("name", ["prepare_q", "prepare_k"])
@pytest.mark.parametrize("d", [32, 64, 128])
@pytest.mark.parametrize("flags", FLAGS, ids=lambda flags: "-".join(map(str, flags.values())))
def test_equals_the_oracle(gpu: object, name: str, d: int, flags: dict[str, Any]) -> None:
    inputs = arrays(name, d, tokens=300, heads=13)
    got = on_host(getattr(mla_cupy, f"indexer_{name}")(**{key: upload(x) for key, x in inputs.items()}, **flags))
    for x, wanted in zip(got, expected(name, inputs, **flags), strict=True):
        assert_same(x, wanted)


def test_no_number(gpu: object) -> None:
    inputs = arrays("prepare_k", 128, tokens=50)
    inputs["k"][7, 3] = np.nan
    codes, scales = on_host(mla_cupy.indexer_prepare_k(**{key: upload(x) for key, x in inputs.items()}))
    assert (codes[7] == 0x7F).all()
    assert np.isfinite(scales).all()


@pytest.mark.parametrize("d", [32, 64, 128])
@pytest.mark.parametrize("flags", FLAGS, ids=lambda flags: "-".join(map(str, flags.values())))
def test_keys_with_their_norm(gpu: object, d: int, flags: dict[str, Any]) -> None:
    inputs = {**arrays("prepare_k", d, tokens=300), **norm(d)}
    got = on_host(mla_cupy.indexer_prepare_k(**{key: upload(x) for key, x in inputs.items()}, **flags))
    for x, wanted in zip(got, expected("prepare_k", inputs, **flags), strict=True):
        assert_same(x, wanted)


@pytest.mark.parametrize("d", [32, 64, 128])
@pytest.mark.parametrize("flags", FLAGS, ids=lambda flags: "-".join(map(str, flags.values())))
def test_queries_and_keys(gpu: object, d: int, flags: dict[str, Any]) -> None:
    inputs = both(d, tokens=300, heads=13)
    given = {key: upload(x) for key, x in inputs.items()}
    got = mla_cupy.indexer_prepare(**given, **flags, return_k=True)
    for x, wanted in zip([*on_host(got[:2]), *on_host(got[2:])], expected("prepare", inputs, **flags), strict=True):
        assert_same(x, wanted)
