"""Index keys in pages, in the simulator, which also reports every access outside of an array."""

from __future__ import annotations

import numpy as np
import pytest

import mla_cupy
from tests.indexer.prepare.key_cache_cases import CASES, KeyCase, check, empty, make
from tests.support.mutants import CAUGHT, Mutant, Plant
from tests.support.sim_driver import simulated

GENERIC = "indexer_logits_generic"


def same(x: object) -> object:
    return x


@pytest.mark.parametrize("case", CASES, ids=str)
def test_equals_the_oracle(case: KeyCase) -> None:
    with simulated(2) as target:
        check(case, same, np.asarray)
        assert target.launched == ["mla_indexer_prepare_quantize", "mla_indexer_prepare_gather_keys"]


def test_without_instructions_for_e4m3() -> None:
    with simulated(2, (8, 0)):
        check(KeyCase(n=9), same, np.asarray)


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


PREPARE, GATHER = "indexer/prepare/quantize.cu", "indexer/prepare/gather_keys.cu"
MUTANTS = [
    Mutant("slots are not checked", PREPARE, "slot >= (i64)p.num_pages * p.page_size", "false"),
    Mutant("scales of a neighbour", PREPARE, "p.page_size * kHeadDim) + at}", "p.page_size * kHeadDim) + (at ^ 1)}"),
    Mutant("slots of 32 bits", PREPARE, "p.slots_are_64 ?", "false ?"),
    Mutant("hostile slots are read", GATHER, "slot >= 0 && slot <", "slot <"),
    Mutant("last bytes are left out", GATHER, "lane < p.d / kChunkBytes", "lane < p.d / kChunkBytes - 1"),
]


@pytest.mark.parametrize(
    "mutant", [pytest.param(m, marks=() if at == 1 else pytest.mark.slow, id=m.id) for at, m in enumerate(MUTANTS)]
)
def test_mutants_are_caught(mutant: Mutant, plant: Plant) -> None:
    plant(mutant)
    with simulated(2), pytest.raises(CAUGHT):
        check(KeyCase(), same, np.asarray)
