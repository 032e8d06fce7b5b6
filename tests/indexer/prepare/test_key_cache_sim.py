"""Index keys in pages, in the simulator, which also reports every access outside of an array."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

import mla_cupy
from mla_cupy import reference
from mla_cupy.errors import ArgumentError
from tests.indexer.prepare.key_cache_cases import CASES, KeyCase, check, empty, make
from tests.indexer.prepare.prepare_cases import both
from tests.support.calls import assert_same
from tests.support.indexer_cases import PagedCase, paged_inputs
from tests.support.mutant_suite import mutant_suite
from tests.support.mutants import Mutant
from tests.support.sim_driver import simulated

GENERIC = "indexer_logits_generic"


def same(x: object) -> object:
    return x


@pytest.mark.one_in(4)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_equals_the_oracle(case: KeyCase) -> None:
    with simulated(2) as target:
        check(case, same, np.asarray)
        assert target.launched == ["mla_indexer_prepare_quantize", "mla_indexer_prepare_gather_keys"]


@pytest.mark.parametrize("e2m1", [False, True])
def test_without_instructions_for_e4m3(e2m1: bool) -> None:
    with simulated(2, (8, 0)):
        check(KeyCase(n=9, e2m1=e2m1), same, np.asarray)


def test_groups_of_e2m1() -> None:
    """Zeros, the least scale, ties, infinities and NaN: a group's own, whatever the others are."""
    k = np.zeros((1, 128), ml_dtypes.bfloat16)
    k[0, 32:40] = 6, 0.25, 0.75, 1.25, 2.5, 5, -3.5, -0.5
    k[0, 64:66] = np.inf, 1
    k[0, 96:98] = np.nan, 7
    cache = np.zeros((1, 4, 68), np.uint8)
    with simulated(1):
        mla_cupy.indexer_cache_append(k, cache, np.array([2]), hadamard=False)
    page = cache.reshape(-1)
    least = int(np.ceil(np.log2(1e-4 / 6))) + 127
    assert page[256 + 8 : 256 + 12].tolist() == [least, 127, 253, 0xFF]
    codes = page[128:192]
    assert not codes[:16].any()
    assert codes[16:20].tolist() == [0x07, 0x22, 0x64, 0x9E]
    assert codes[32:34].tolist() == [0x07, 0]
    assert not codes[48:].any()


def test_keys_in_e2m1_as_e4m3() -> None:
    """Each group times its scale over the largest: exact to 2^14, zeros beyond; NaN is none of the largest."""
    cache = np.zeros((1, 4, 68), np.uint8)
    page = cache.reshape(-1)
    page[:256] = np.arange(256)
    page[256:260], page[260:264] = (127, 126, 113, 112), (10, 0xFF, 9, 0)
    page[264:268], page[268:272] = 0xFF, (0, 0, 1, 0)
    slots = np.array([3, 0, 1, 2, 4])
    with simulated(1):
        codes, k_scale = mla_cupy.indexer_cache_gather(cache, slots, d=128)
    assert k_scale.tolist() == [2.0**-132, 2.0**-6, 2.0**-123, 2.0**-133, 0]
    values = codes.view(ml_dtypes.float8_e4m3fn).astype(np.float64)
    exact = reference.indexer_records.e2m1_keys(cache)[0]
    np.testing.assert_array_equal(values[1] * 2.0**-6, np.where(np.arange(128) < 96, exact[0], 0))
    np.testing.assert_array_equal(values[2] * 2.0**-123, exact[1])
    np.testing.assert_array_equal(values[0] * 2.0**-132, exact[3])
    assert np.isnan(values[3]).all()
    assert not values[4].any()


def test_gathered_keys_score_as_those_in_pages() -> None:
    """Contiguous logits of gathered keys equal the paged ones."""
    inputs = paged_inputs(PagedCase(b=1, h=3, page_size=16, seqlens=(40,), e2m1=True))
    slots = (inputs["block_table"][0, :3, None].astype(np.int64) * 16 + np.arange(16)).reshape(-1)[:40]
    with simulated(1):
        codes, k_scale = mla_cupy.indexer_cache_gather(inputs["cache"], slots, d=128)
        rows = {"q": inputs["q"][0], "weights": inputs["weights"][0], "kernel": GENERIC}
        plain = mla_cupy.indexer_logits(rows.pop("q"), codes, rows.pop("weights"), k_scale=k_scale, **rows)
        paged = mla_cupy.indexer_logits_paged(**inputs, kernel=GENERIC)
    np.testing.assert_allclose(plain, paged[0, :, :40], rtol=1e-5, atol=1e-6)


def test_only_powers_of_2_scale_e2m1() -> None:
    inputs, cache, options = make(KeyCase(e2m1=True, scales="plain"))
    with simulated(1) as target, pytest.raises(ArgumentError, match="power_of_2"):
        mla_cupy.indexer_cache_append(cache=cache, **inputs, **options)
    assert target.launched == []


def test_queries_beside_keys_in_e2m1() -> None:
    """The joint launch writes the same records, and the queries' codes."""
    given = both(128, tokens=9)
    slots = np.array([3, -1, 12, 11, 0, 2, 5, 7, 1])
    names = ("k", "cos", "sin", "positions", "norm_weight", "norm_bias")
    pages, alone = (np.full((3, 4, 68), 0xA5, np.uint8) for _ in range(2))
    reference.indexer_cache_append(cache=alone, slots=slots, **{name: given[name] for name in names})
    queries = {name: given[name] for name in ("q", "weights", "cos", "sin", "positions")}
    with simulated(2):
        codes, folded, *_ = mla_cupy.indexer_prepare(**given, cache=pages, slots=slots)
        alike = mla_cupy.indexer_prepare_q(**queries)
    assert_same(pages, alone)
    assert_same(codes, alike[0])
    assert_same(folded, alike[1])


def test_the_records_are_what_the_paged_logits_read() -> None:
    """Logits of a cache that was appended to, and of the keys that were prepared, are equal bit by bit."""
    inputs, cache, _ = make(KeyCase(n=9, gap=0, num_pages=3))
    inputs["slots"] = np.array([4, 5, 6, 7, 0, 1, 2, 3, 8])
    rng = np.random.default_rng(1)
    q = rng.integers(0x20, 0x48, (1, 1, 3, 128)).astype(np.uint8)
    weights = rng.standard_normal((1, 1, 3)).astype(np.float32)
    with simulated(2):
        mla_cupy.indexer_cache_append(cache=cache, **inputs)
        table, seqlens = np.array([[1, 0, 2]], np.int32), np.array([9], np.int32)
        paged = mla_cupy.indexer_logits_paged(q, cache, weights, seqlens, table, kernel=GENERIC)
        keys = {name: x for name, x in inputs.items() if name != "slots"}
        codes, k_scale = mla_cupy.indexer_prepare_k(**keys)
        plain = mla_cupy.indexer_logits(q[0], codes, weights[0], k_scale=k_scale, kernel=GENERIC)
    np.testing.assert_array_equal(paged[0, :, :9], plain)


def test_nothing_to_do_is_no_launch() -> None:
    inputs, cache, _ = make(KeyCase(rope=False))
    with simulated(1) as target:
        mla_cupy.indexer_cache_append(inputs["k"][:0], cache, inputs["slots"][:0])
        mla_cupy.indexer_cache_append(inputs["k"], cache[:0], inputs["slots"])
        assert mla_cupy.indexer_cache_gather(cache, inputs["slots"][:0])[0].shape == (0, 128)
        assert target.launched == []
        codes, scales = mla_cupy.indexer_cache_gather(empty(KeyCase())[:0], np.array([0, 1]))
        assert not codes.any()
        assert not scales.any()


def run() -> None:
    with simulated(2):
        check(KeyCase(), same, np.asarray)


test_is_caught, test_as_it_is = mutant_suite(
    "indexer_prepare_gather_keys",
    [run],
    {},
    [Mutant("hostile slots are read", "indexer_prepare_gather_keys", "slot >= 0 && slot <", "slot <")],
)
