"""The sparse oracle against loops over Python numbers, finite differences, dense attention, and poison."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from mla_cupy import dtypes, reference
from mla_cupy.errors import ArgumentError
from mla_cupy.reference.sparse import selected_rows, sparse_mla_backward, sparse_mla_forward
from tests.support.sparse_cases import INT_MAX, INT_MIN, SparseCase, SparseInputs, make

SEQUENCES = ((3, 40), (0, 9), (2, 0), (4, 2), (1, 30))
CASES = [
    SparseCase(s_q=4, s_kv=50, h_q=3, topk=20),
    SparseCase(s_q=5, s_kv=60, h_q=3, topk=30, lengths=True, sink=True, dtype="float16", strides="odd"),
    SparseCase(s_q=6, s_kv=8, h_q=2, topk=30, causal=True, d_qk=512, head_axis=True),
    SparseCase(s_q=12, s_kv=90, h_q=4, topk=20, sequences=SEQUENCES, sink=True),
    SparseCase(s_q=12, s_kv=90, h_q=2, topk=20, sequences=SEQUENCES, causal=True, lengths=True, sink=True),
    SparseCase(s_q=3, s_kv=5, h_q=2, topk=9, invalid=1.0, strides="dense"),
]


def gaussian(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape)


def by_loops(inputs: SparseInputs) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The definition, one number at a time."""
    case = inputs.case
    kv, indices = (x[:, 0] if x.ndim == 3 else x for x in (inputs.kv, inputs.indices))
    out = np.zeros((case.s_q, case.h_q, 512))
    lse, most = np.full((2, case.s_q, case.h_q), -np.inf)
    for i, h in np.ndindex(case.s_q, case.h_q):
        start_q, end_q, start_kv, end_kv = 0, case.s_q, 0, case.s_kv
        if inputs.cu_seqlens_q is not None:
            starts_q, starts_kv = inputs.cu_seqlens_q.tolist(), inputs.cu_seqlens_kv.tolist()
            owners = [n for n in range(len(starts_q) - 1) if starts_q[n] <= i < starts_q[n + 1]]
            if not owners:
                continue
            start_q, end_q = starts_q[owners[0]], starts_q[owners[0] + 1]
            start_kv, end_kv = starts_kv[owners[0]], starts_kv[owners[0] + 1]
        len_q, len_kv = end_q - start_q, end_kv - start_kv
        limit = min(len_kv, (i - start_q) + len_kv - len_q + 1) if case.causal else len_kv
        scores, rows = [], []
        for slot in range(case.topk):
            index = int(indices[i, slot])
            if inputs.topk_length is not None and slot >= inputs.topk_length[i]:
                continue
            if 0 <= index < limit:
                row = kv[start_kv + index].astype(float).tolist()
                products = [a * b for a, b in zip(inputs.q[i, h].astype(float).tolist(), row, strict=True)]
                scores.append(math.fsum(products) / math.sqrt(case.d_qk))
                rows.append(row[:512])
        if not scores:
            continue
        weights = [math.exp(score) for score in scores]
        most[i, h], lse[i, h] = max(scores), math.log(math.fsum(weights))
        sink = -math.inf if inputs.attn_sink is None else float(inputs.attn_sink[h])
        if sink < math.inf:
            out[i, h] = np.asarray(weights) @ np.asarray(rows) / (math.fsum(weights) + math.exp(sink))
    return out, lse, most


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_equals_loops_over_numbers(case: SparseCase) -> None:
    inputs = make(case)
    for got, expected in zip(inputs.exact, by_loops(inputs), strict=True):
        assert got.dtype == np.float64
        np.testing.assert_allclose(got, expected, rtol=1e-11, atol=1e-12)


def test_the_cases_reach_every_kind_of_row() -> None:
    """Else the test above would say less than it seems to."""
    counts = [[len(rows) for rows in make(case).rows] for case in CASES]
    assert all(min(row) == 0 for row in counts)
    assert all(max(row) > 0 for row in counts[:-1])
    assert any(len(set(rows.tolist())) < len(rows) for case in CASES for rows in make(case).rows)


def test_one_row_gives_its_value_and_its_score() -> None:
    kv, q = gaussian(9, 576), gaussian(1, 3, 576, seed=1)
    out, lse, most = sparse_mla_forward(q, kv, [[-1, 4, 9]])
    assert np.array_equal(out[0], np.broadcast_to(kv[4, :512], (3, 512)))
    np.testing.assert_allclose(lse[0], q[0] @ kv[4] / 24, rtol=1e-13)
    assert np.array_equal(lse, most)


@pytest.mark.parametrize("causal", [False, True])
def test_every_row_selected_is_dense_attention(causal: bool) -> None:
    q, kv = gaussian(5, 3, 576), gaussian(40, 576, seed=1)
    indices = np.stack([np.random.default_rng(i).permutation(40) for i in range(5)])
    out, lse, _ = sparse_mla_forward(q, kv, indices, causal=causal)
    dense, dense_lse = reference.mla_decode(q[None], kv[None], [[0]], [40], causal=causal)
    np.testing.assert_allclose(out, dense[0], rtol=1e-11, atol=1e-12)
    np.testing.assert_allclose(lse, dense_lse[0].T, rtol=1e-12)


def test_sequences_equal_separate_calls() -> None:
    inputs = make(SparseCase(s_q=12, s_kv=90, h_q=3, topk=30, sequences=SEQUENCES, causal=True))
    starts_q, starts_kv = inputs.cu_seqlens_q, inputs.cu_seqlens_kv
    for n, (len_q, len_kv) in enumerate(SEQUENCES):
        mine, rows = slice(starts_q[n], starts_q[n] + len_q), slice(starts_kv[n], starts_kv[n] + len_kv)
        alone = sparse_mla_forward(inputs.q[mine], inputs.kv[rows], inputs.indices[mine], causal=True)
        for whole, part in zip(inputs.exact, alone, strict=True):
            assert np.array_equal(whole[mine], part)
    assert all(len(rows) == 0 for rows in inputs.rows[starts_q[-1] :])


@pytest.mark.parametrize(
    ("starts_q", "starts_kv", "expected"),
    [
        ([0, 2, 4], [0, 3, 6], [[0, 1, 2], [0, 1, 2], [3, 4, 5], [3, 4, 5]]),
        ([1, 2, 3], [0, 3, 6], [[], [0, 1, 2], [3, 4, 5], []]),  # queries before and after all sequences
        ([0, 4], [-5, 3], [[0, 1, 2]] * 4),  # starts are clamped
        ([0, 4], [4, INT_MAX], [[4, 5]] * 4),
        ([0, 4], [INT_MIN, INT_MAX], [[0, 1, 2, 3]] * 4),  # one short: index 4 is not asked for
        ([0, 4], [5, 2], [[]] * 4),  # a negative length
        ([0, 2, 0, 4], [0, 1, 2, 4], [[0], [0], [2, 3], [2, 3]]),  # the first sequence that has the query
        ([INT_MIN, INT_MAX], [0, 6], [[0, 1, 2, 3]] * 4),
        ([4, 0], [0, 6], [[]] * 4),
        ([0], [0], [[]] * 4),  # no sequence at all
    ],
)
def test_hostile_starts(starts_q: list[int], starts_kv: list[int], expected: list[list[int]]) -> None:
    indices = np.tile(np.array([0, 1, 2, 3, -1, INT_MAX, INT_MIN], np.int32), (4, 1))
    starts = (np.asarray(x, np.int32) for x in (starts_q, starts_kv))
    rows = [row.tolist() for row in selected_rows(indices, 6, None, False, *starts)]
    assert rows == expected


def test_hostile_starts_with_causal() -> None:
    indices = np.tile(np.arange(6, dtype=np.int32), (4, 1))

    def counts(starts_q: list[int], starts_kv: list[int]) -> list[int]:
        starts = (np.asarray(x, np.int32) for x in (starts_q, starts_kv))
        return [len(row) for row in selected_rows(indices, 6, None, True, *starts)]

    assert counts([0, 4], [0, 6]) == [3, 4, 5, 6]
    assert counts([0, 4], [0, 2]) == [0, 0, 1, 2]  # more queries than rows
    assert counts([0, 100], [0, 6]) == [0, 0, 0, 0]  # most of the queries are not there
    assert counts([-3, 4], [0, 6]) == [3, 4, 5, 6]
    assert counts([INT_MIN, INT_MAX], [INT_MIN, INT_MAX]) == [0, 0, 0, 0]


@pytest.mark.parametrize("rounding", [None, "bfloat16"])
def test_queries_without_a_row(rounding: str | None) -> None:
    inputs = make(SparseCase(sink=True, lengths=True))
    empty = np.array([len(rows) == 0 for rows in inputs.rows])
    assert 0 < empty.sum() < len(empty)
    options = {**inputs.options, "rounding": rounding}
    out, lse, most = sparse_mla_forward(*inputs.arguments, **options, empty_lse=5.0, lse_base="2")
    assert np.all(out[empty] == 0)
    assert np.all(lse[empty] == 5)
    assert np.all(most[empty] == -np.inf)
    assert np.isfinite(most[~empty]).all()
    for given in (np.inf, -np.inf):
        stored = np.where(empty[:, None], given, inputs.lse)
        dq, dkv, d_sink = sparse_mla_backward(
            inputs.q, inputs.kv, inputs.out, inputs.dout, stored, inputs.indices, **options
        )
        assert np.all(dq[empty] == 0)
        assert all(np.isfinite(x).all() for x in (dq, dkv, d_sink))


def test_lse_base_2() -> None:
    inputs = make(SparseCase(sink=True))
    out, lse, most = sparse_mla_forward(*inputs.arguments, **inputs.options, lse_base="2")
    assert np.array_equal(out, inputs.exact[0])
    np.testing.assert_allclose(lse, inputs.exact[1] / math.log(2), rtol=1e-14)
    assert np.array_equal(most, inputs.exact[2])
    q, kv, out, dout, lse, indices = inputs.backward_arguments
    binary = sparse_mla_backward(
        q, kv, out, dout, lse.astype(float) / math.log(2), indices, **inputs.options, lse_base="2"
    )
    for got, expected in zip(binary, inputs.exact_gradients, strict=True):
        np.testing.assert_allclose(got, expected, rtol=1e-9, atol=1e-12)
    with pytest.raises(ArgumentError, match="lse_base"):
        sparse_mla_forward(*inputs.arguments, lse_base="10")


def test_sink_takes_weight_away() -> None:
    inputs = make(SparseCase(h_q=8))
    out, lse, most = inputs.exact
    sink = np.array([-np.inf, np.inf, 0, 5, -5, 80, 1000, -1000], np.float32)
    damped, same_lse, same_most = sparse_mla_forward(*inputs.arguments, attn_sink=sink)
    assert np.array_equal(lse, same_lse)
    assert np.array_equal(most, same_most)
    assert np.array_equal(damped[:, 0], out[:, 0])
    assert np.all(damped[:, 1] == 0)
    assert np.all(damped[:, 6] == 0)
    assert np.array_equal(damped[:, 7], out[:, 7])
    for h in range(2, 6):
        part = np.exp(lse[:, h]) / (np.exp(lse[:, h]) + np.exp(float(sink[h])))
        np.testing.assert_allclose(damped[:, h], part[:, None] * out[:, h], rtol=1e-12)


def test_a_sink_is_a_key_without_value() -> None:
    """Against ordinary attention with one more row, whose value part is zero and whose score is the sink."""
    q, kv = gaussian(3, 2, 576), gaussian(10, 576, seed=1)
    q[..., 575], kv[:, 575] = 1, 0
    extra = np.zeros((1, 576))
    extra[0, 575] = 24 * 0.7
    out, _, _ = sparse_mla_forward(q, np.concatenate([kv, extra]), [[1, 5, 10]] * 3)
    damped, _, _ = sparse_mla_forward(q, kv, [[1, 5]] * 3, attn_sink=np.full(2, 0.7))
    np.testing.assert_allclose(damped, out, rtol=1e-12)


# ---- backward --------------------------------------------------------------------------------------------------


def small_problem(**options: Any) -> tuple[list[np.ndarray], dict[str, Any]]:
    """float64 inputs of few dimensions: q, kv, indices and dout, with d_v = 5 of d_qk = 7."""
    rng = np.random.default_rng(3)
    indices = rng.integers(0, 9, (4, 6)).astype(np.int32)
    indices[:, 3] = indices[:, 0]  # duplicates
    indices[1, 1], indices[2, 2], indices[2, 5] = -1, INT_MAX, INT_MIN
    arrays = [rng.standard_normal((4, 3, 7)), rng.standard_normal((9, 7)), indices, rng.standard_normal((4, 3, 5))]
    return arrays, {"d_v": 5, "scale": 0.6, **options}


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"attn_sink": np.array([0.3, -np.inf, 2.0])},
        {"topk_length": np.array([6, 0, 3, 100]), "attn_sink": np.array([0.3, -1.0, np.inf])},
        {"causal": True, "attn_sink": np.zeros(3)},
        {"cu_seqlens_q": np.array([0, 1, 3]), "cu_seqlens_kv": np.array([0, 6, 9]), "attn_sink": np.ones(3)},
    ],
    ids=lambda options: "-".join(options) or "plain",
)
def test_gradients_equal_finite_differences(options: dict[str, Any]) -> None:
    (q, kv, indices, dout), options = small_problem(**options)

    def loss(q: np.ndarray, kv: np.ndarray, sink: np.ndarray | None) -> float:
        given = options if sink is None else {**options, "attn_sink": sink}
        return float((sparse_mla_forward(q, kv, indices, **given)[0] * dout).sum())

    out, lse, _ = sparse_mla_forward(q, kv, indices, **options)
    dq, dkv, d_sink = sparse_mla_backward(q, kv, out, dout, lse, indices, **options)
    sink = options.get("attn_sink")
    assert (d_sink is None) == (sink is None)
    gradients = [dq, dkv] if sink is None else [dq, dkv, d_sink]
    for place, gradient in enumerate(gradients):
        arrays = [q, kv, sink]
        assert gradient.shape == arrays[place].shape
        for at in np.ndindex(gradient.shape):
            if not np.isfinite(arrays[place][at]):
                assert gradient[at] == 0
                continue
            losses = []
            for step in (1e-5, -1e-5):
                moved = [None if x is None else x.astype(float) for x in arrays]
                moved[place][at] += step
                losses.append(loss(*moved))
            np.testing.assert_allclose(gradient[at], (losses[0] - losses[1]) / 2e-5, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_gradients_of_the_hostile_cases(case: SparseCase) -> None:
    """Finite beside poison, 0 where nothing was selected, and the same as the sum of each query's own."""
    inputs = make(case)
    dq, dkv, d_sink = inputs.exact_gradients
    assert dq.shape == inputs.q.shape
    assert dkv.shape == inputs.kv.shape
    assert all(x.dtype == np.float64 for x in (dq, dkv))
    assert np.isfinite(dq).all()
    never = np.isnan(inputs.kv.astype(np.float32)).any(axis=-1).reshape(case.s_kv)
    assert never.any()
    assert np.all(dkv[never] == 0)
    assert np.isfinite(dkv).all()
    for i, rows in enumerate(inputs.rows):
        assert np.any(dq[i]) == (len(rows) > 0)
    assert (d_sink is None) == (not case.sink)

    total = np.zeros(dkv.shape)
    for i in range(case.s_q):
        alone = inputs.dout.copy()
        alone[np.arange(case.s_q) != i] = 0
        # delta is the other queries' only way in: with a dout of 0 they have no gradient
        arguments = (inputs.q, inputs.kv, inputs.out, alone, inputs.lse, inputs.indices)
        total += sparse_mla_backward(*arguments, **inputs.options)[1]
    np.testing.assert_allclose(total, dkv, rtol=1e-9, atol=1e-10)


# ---- the rounding mode -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("dtype", "least", "most"), [("bfloat16", 2**-12, 2**-5), ("float16", 2**-15, 2**-8)])
@pytest.mark.parametrize(
    "case", [SparseCase(h_q=8, topk=200, sink=True), SparseCase(h_q=4, causal=True, lengths=True, d_qk=512)]
)
def test_rounding_errs_as_its_format_does(case: SparseCase, dtype: str, least: float, most: float) -> None:
    inputs = make(replace(case, dtype=dtype))
    (out, *logs), (rounded, *rounded_logs) = inputs.exact, inputs.rounded
    pairs = [(out, rounded), *zip(inputs.exact_gradients[:2], inputs.rounded_gradients[:2], strict=True)]
    for exact, got in pairs:
        error = np.abs(got - exact).max() / np.abs(exact).max()
        assert least < error < most
        assert np.array_equal(dtypes.round_to(got, dtype), got)
    for exact, got in zip(logs, rounded_logs, strict=True):
        finite = np.isfinite(exact)
        assert np.array_equal(finite, np.isfinite(got))
        assert 0 < np.abs(got[finite] - exact[finite]).max() < 1e-4
    if case.sink:
        d_sink, rounded_sink = inputs.exact_gradients[2], inputs.rounded_gradients[2]
        np.testing.assert_allclose(rounded_sink, d_sink, atol=1e-5)


def test_rounding_to_another_dtype() -> None:
    inputs = make(SparseCase(h_q=4))
    options = {**inputs.options, "rounding": "bfloat16"}
    fine = sparse_mla_forward(*inputs.arguments, **options, out_dtype="float32")[0]
    assert np.array_equal(fine, fine.astype(np.float32))
    assert not np.array_equal(fine, inputs.rounded[0])
    assert np.array_equal(dtypes.round_to(fine, "bfloat16"), inputs.rounded[0])
    dkv = sparse_mla_backward(*inputs.backward_arguments, **options, dkv_dtype="float32")[1]
    assert np.array_equal(dkv, dkv.astype(np.float32))
    assert np.array_equal(dtypes.round_to(dkv, "bfloat16"), inputs.rounded_gradients[1])


def test_rounding_of_one_row_is_exact() -> None:
    inputs = make(SparseCase(topk=1, invalid=0.0))
    assert np.array_equal(inputs.rounded[0], inputs.exact[0])
