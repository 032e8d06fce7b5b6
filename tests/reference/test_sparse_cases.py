"""The inputs of the sparse kernels' tests are as hostile as they claim to be."""

from __future__ import annotations

import numpy as np
import pytest

from mla_cupy.dtypes import round_to
from tests.support.sparse_cases import INT_MAX, INT_MIN, SparseCase, make

CASES = [
    SparseCase(),
    SparseCase(causal=True, lengths=True, sink=True, strides="odd", head_axis=True),
    SparseCase(s_q=12, sequences=((4, 100), (0, 5), (5, 3), (1, 150)), causal=True, lengths=True, dtype="float16"),
    SparseCase(s_q=12, sequences=((4, 100), (0, 5), (5, 3), (1, 150)), d_qk=512, strides="dense"),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_kv_is_nan_but_for_selected_rows(case: SparseCase) -> None:
    inputs = make(case)
    selected = np.zeros(case.s_kv, bool)
    for rows in inputs.rows:
        selected[rows] = True
    kv = inputs.kv.astype(np.float32).reshape(case.s_kv, case.d_qk)
    assert np.array_equal(np.isfinite(kv).all(axis=1), selected)
    assert np.array_equal(np.isnan(kv).all(axis=1), ~selected)
    assert (~selected).sum() > 10
    for x in (inputs.q, inputs.dout, *inputs.exact[:1], *inputs.exact_gradients[:2]):
        assert np.isfinite(x.astype(np.float32)).all()


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_slots(case: SparseCase) -> None:
    inputs = make(case)
    indices = inputs.indices.reshape(case.s_q, case.topk)
    assert {INT_MIN, INT_MAX, -1} <= set(indices.ravel().tolist())
    assert any(len(set(rows.tolist())) < len(rows) for rows in inputs.rows)
    assert any(len(rows) == 0 for rows in inputs.rows)
    assert len(inputs.rows[1]) == 0
    assert (inputs.topk_length is not None) == case.lengths
    if inputs.topk_length is not None:
        assert inputs.topk_length.min() < 0
        assert inputs.topk_length.max() > case.topk
        past = np.arange(case.topk) >= inputs.topk_length[:, None]
        assert np.isin(indices[past], [3, 10, 17]).any()  # rows that exist, and that nobody selects
    if inputs.attn_sink is not None:
        assert np.isneginf(inputs.attn_sink).any()
        assert np.isposinf(inputs.attn_sink).any()
        assert np.isfinite(inputs.attn_sink).any()


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_strides(case: SparseCase) -> None:
    inputs = make(case)
    dense = case.strides == "dense"
    arrays = [inputs.q, inputs.kv, inputs.indices, inputs.dout, inputs.out, inputs.lse]
    assert all(x.flags.c_contiguous == dense for x in arrays)
    for x in (inputs.q, inputs.kv, inputs.dout, inputs.out):
        assert x.strides[-1] == x.itemsize
        assert all(stride % 16 == 0 for stride in x.strides[:-1]) == (case.strides != "odd")
    vectors = [x for x in (inputs.topk_length, inputs.cu_seqlens_q, inputs.cu_seqlens_kv) if x is not None]
    for x in (inputs.indices, *vectors):
        assert x.strides[-1] == (8 if case.strides == "odd" else 4)
    assert np.array_equal(inputs.out, round_to(inputs.exact[0], case.dtype))
    assert np.array_equal(inputs.lse, inputs.exact[1].astype(np.float32))


def test_a_case_is_reproducible_and_its_seed_matters() -> None:
    one, same, other = make(SparseCase()), make(SparseCase()), make(SparseCase(seed=1))
    for name in ("q", "kv", "indices", "dout"):
        assert getattr(one, name).tobytes() == getattr(same, name).tobytes()
        assert getattr(one, name).tobytes() != getattr(other, name).tobytes()


@pytest.mark.parametrize(
    "case",
    [SparseCase(topk=0), SparseCase(s_kv=0), SparseCase(s_q=0), SparseCase(s_q=1, s_kv=1, topk=1, invalid=0.0)],
    ids=lambda case: case.id,
)
def test_sizes_of_nothing(case: SparseCase) -> None:
    inputs = make(case)
    assert sum(map(len, inputs.rows)) == (case.s_q == 1)
    assert inputs.exact[0].shape == (case.s_q, case.h_q, 512)


def test_ids_tell_cases_apart() -> None:
    assert len({case.id for case in CASES}) == len(CASES)
    assert CASES[1].id == "sq7-skv300-h16-topk100-d576-bfloat16-causal-lengths-sink-odd-3d"
