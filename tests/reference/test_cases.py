"""The inputs of the kernel tests are as hostile as they claim to be."""

from __future__ import annotations

import numpy as np
import pytest

from tests.support.cases import D_QK, DecodeCase, make

CASES = [
    DecodeCase(),
    DecodeCase(s_q=2, h_q=8, page_size=24, dtype="float16", strides="odd"),
    DecodeCase(page_size=1, seqlens=(5, 0, 2), strides="dense"),
    DecodeCase(b=5, seqlens=(64, 65), missing_pages=1, head_axis=False),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_the_pool_is_nan_but_for_owned_tokens(case: DecodeCase) -> None:
    inputs = make(case)
    cache = inputs.kv_cache if case.head_axis else inputs.kv_cache[:, :, None]
    num_pages = len(cache)
    owned = np.zeros(cache.shape[:2], bool)
    missing = 0
    for pages, length in zip(inputs.block_table, inputs.seqlens, strict=True):
        for j in range(length):
            page = pages[j // case.page_size]
            if 0 <= page < num_pages:
                assert not owned[page, j % case.page_size]
                owned[page, j % case.page_size] = True
            else:
                missing += 1
        past_the_end = pages[-(-int(length) // case.page_size) :]
        assert len(past_the_end) >= 2
        assert np.all((past_the_end < 0) | (past_the_end > 2**30))
    assert np.array_equal(np.isfinite(cache.astype(np.float32)).all(axis=(2, 3)), owned)
    assert np.array_equal(np.isnan(cache.astype(np.float32)).all(axis=(2, 3)), ~owned)
    assert np.sum(~owned.any(axis=1)) >= case.spare_pages
    assert (missing > 0) == (case.missing_pages > 0)
    owned_pages = inputs.block_table[(inputs.block_table >= 0) & (inputs.block_table < num_pages)]
    assert np.any(np.diff(owned_pages) < 0)
    assert np.isfinite(inputs.q.astype(np.float32)).all()
    assert np.isfinite(inputs.exact[0]).all()


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_strides(case: DecodeCase) -> None:
    inputs = make(case)
    itemsize = inputs.q.itemsize
    for array in (inputs.q, inputs.kv_cache):
        assert array.strides[-1] == itemsize
        assert array.flags.c_contiguous == (case.strides == "dense")
        aligned = all(stride % 16 == 0 for stride in array.strides[:-1])
        assert aligned == (case.strides != "odd")
    assert inputs.block_table.strides[-1] == inputs.block_table.itemsize
    assert inputs.block_table.flags.c_contiguous == (case.strides == "dense")
    if case.strides != "dense":  # the gap next to the first row of q is poison, too
        row = np.lib.stride_tricks.as_strided(inputs.q, (D_QK + 1,), (itemsize,))
        assert np.isnan(np.float32(row[D_QK]))


def test_lengths() -> None:
    assert DecodeCase(b=4, seqlens=(3, 5)).lengths().tolist() == [3, 5, 3, 5]
    assert DecodeCase(b=2, seqlens=7).lengths().tolist() == [7, 7]
    ragged = DecodeCase(b=6, seqlens="ragged-90").lengths()
    assert ragged[:3].tolist() == [90, 0, 1]
    assert ragged.dtype == np.int32
    assert np.all((ragged >= 0) & (ragged <= 90))
    with pytest.raises(ValueError, match="policy"):
        DecodeCase(seqlens="uniform-3").lengths()


def test_a_case_is_reproducible_and_its_seed_matters() -> None:
    one, same, other = make(DecodeCase()), make(DecodeCase()), make(DecodeCase(seed=1))
    assert one.q.tobytes() == same.q.tobytes()
    assert one.kv_cache.tobytes() == same.kv_cache.tobytes()
    assert np.array_equal(one.block_table, same.block_table)
    assert one.q.tobytes() != other.q.tobytes()


def test_the_softmax_is_neither_flat_nor_one_hot() -> None:
    inputs = make(DecodeCase(b=1, h_q=64, seqlens=1024))
    _, lse = inputs.exact
    tokens = inputs.kv_cache[inputs.block_table[0, :16]].reshape(1024, D_QK).astype(np.float64)
    scores = 576**-0.5 * inputs.q[0, 0].astype(np.float64) @ tokens.T
    peak = np.exp(scores.max(axis=1) - lse[0, :, 0])
    assert peak.max() > 0.5
    assert peak.min() < 0.1


def test_ids_tell_cases_apart() -> None:
    assert len({case.id for case in CASES}) == len(CASES)
    assert DecodeCase(b=2, s_q=3, seqlens=(4, 5), seed=6).id == "b2-sq3-h16-page64-len4,5-bfloat16-causal-seed6"
