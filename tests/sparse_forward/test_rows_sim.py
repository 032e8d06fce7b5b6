"""The index pre-pass of sparse MLA in the simulator, against NumPy: which rows, in which order, how many."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any
from unittest import mock

import numpy as np
import pytest

from mla_cupy import arrays
from mla_cupy.arrays import View
from mla_cupy.kernels.attention import heuristics
from mla_cupy.kernels.attention import row_lists as attention_row_lists
from mla_cupy.kernels.pipeline import NULL, Call, Layout, Prepared
from mla_cupy.reference.sparse import selected_rows
from tests.support.mutant_suite import mutant_suite
from tests.support.sim_driver import DEVICE, fake_gpu, simulated
from tests.support.sparse_cases import INT_MAX, INT_MIN, SparseCase, SparseInputs, make

SEQUENCES = ((3, 90), (0, 5), (2, 3), (1, 150), (1, 0))
UNTOUCHED = 0x7EADBEEF
#: The arrays of the launch, in the order in which they are handed over.
NAMES = ("indices", "topk_length", "cu_seqlens_q", "cu_seqlens_kv", "rows", "counts", "selected")

CASES = [
    SparseCase(s_q=5, s_kv=300, topk=100),
    SparseCase(s_q=6, s_kv=70, topk=64, lengths=True, strides="odd"),  # a bucket is a row
    SparseCase(s_q=7, s_kv=100_000, topk=257, lengths=True, strides="dense"),
    SparseCase(s_q=5, s_kv=4, topk=130, causal=True),
    SparseCase(s_q=9, s_kv=300, topk=77, sequences=SEQUENCES),
    SparseCase(s_q=9, s_kv=300, topk=77, sequences=SEQUENCES, causal=True, lengths=True, strides="odd"),
    SparseCase(s_q=2, s_kv=5000, topk=2048),  # the rows stay in registers
    SparseCase(s_q=2, s_kv=5000, topk=2049, lengths=True),  # they are read again
    SparseCase(s_q=1, s_kv=9000, topk=4500, invalid=0.01),  # more than shared memory holds
    SparseCase(s_q=3, s_kv=50, topk=20, invalid=1.0),
    SparseCase(s_q=3, s_kv=50, topk=1),
    SparseCase(s_q=2, s_kv=50, topk=0),
    SparseCase(s_q=2, s_kv=0, topk=9),
]


@dataclass(frozen=True)
class Lists:
    """Output of the kernel."""

    rows: np.ndarray[Any, Any]
    counts: np.ndarray[Any, Any]
    selected: np.ndarray[Any, Any]


def run(
    inputs: SparseInputs,
    ordered: bool,
    count_selected: bool = True,
    s_kv: int | None = None,
    relative: bool = True,
) -> Lists:
    """The launcher on a simulated GPU, with the strides of the inputs."""
    indices = inputs.indices
    s_q, topk = indices.shape
    s_kv = inputs.case.s_kv if s_kv is None else s_kv
    rows = np.full((s_q, attention_row_lists.rows_stride(topk)), UNTOUCHED, np.int32)
    counts = np.full(s_q, UNTOUCHED, np.int32)
    selected = np.zeros(s_kv if count_selected else 0, np.uint32)

    few_blocks = mock.patch.object(heuristics, "MAX_ROW_LIST_BLOCKS", 2)  # so that each takes several queries
    with few_blocks, simulated(mode="random", seed=len(indices)) as target:
        inputs_of = {name: getattr(inputs, name) for name in NAMES[:4]}
        views = {name: None if x is None else arrays.NUMPY.view(x, name) for name, x in inputs_of.items()}
        kv = View(0, (s_kv, 512), (512, 1), "bfloat16", DEVICE)
        call = Call({**views, "kv": kv}, options=None)
        counted = "selected" if count_selected else NULL
        launch = attention_row_lists.launch(call, inputs.case.causal, relative, ordered=ordered, selected=counted)
        written = (*inputs_of.values(), rows, counts, selected)
        addresses = [0 if x is None or x.size == 0 else target.memory.map(x) for x in written]
        Prepared([launch], NAMES, Layout({}), fake_gpu(1), 0).enqueue([0, *addresses], 0, 0)
        assert target.launched == ["mla_attention_row_lists"]
    return Lists(rows, counts, selected)


def expected_rows(inputs: SparseInputs, s_kv: int, relative: bool = True) -> list[np.ndarray[Any, Any]]:
    starts = inputs.cu_seqlens_q, inputs.cu_seqlens_kv
    return list(selected_rows(inputs.indices, s_kv, inputs.topk_length, inputs.case.causal, *starts, relative))


def check(lists: Lists, wanted: list[np.ndarray[Any, Any]], ordered: bool, s_kv: int) -> None:
    shift = max(0, (s_kv - 1).bit_length() - 8)
    for got, count, rows in zip(lists.rows, lists.counts, wanted, strict=True):
        if ordered:
            assert len(rows) == 0 or (rows >> shift).max() < 256
            rows = rows[np.argsort(rows >> shift, kind="stable")]
        padded = -(-len(rows) // 64) * 64
        assert count == len(rows)
        assert got[:count].tolist() == rows.tolist()
        assert (got[count:padded] == -1).all()
        assert (got[padded:] == UNTOUCHED).all()


@pytest.mark.one_in(4)
@pytest.mark.parametrize("ordered", [True, False], ids=["ordered", "given"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_lists(case: SparseCase, ordered: bool) -> None:
    inputs = make(replace(case, h_q=1))
    wanted = expected_rows(inputs, case.s_kv)
    lists = run(inputs, ordered)
    check(lists, wanted, ordered, case.s_kv)
    times = np.bincount(np.concatenate(wanted), minlength=case.s_kv) if case.s_kv else []
    assert lists.selected.tolist() == list(times)


def test_the_cases_hold_what_they_should() -> None:
    """Duplicates, empty lists, full ones, and lists whose order the sort changes."""
    wanted = [rows for case in CASES for rows in expected_rows(make(replace(case, h_q=1)), case.s_kv)]
    assert any(len(set(rows.tolist())) < len(rows) for rows in wanted)
    assert any(len(rows) == 0 for rows in wanted)
    assert any(len(rows) > 4096 for rows in wanted)
    assert any((np.diff(rows) < 0).any() for rows in wanted)


def bare(indices: np.ndarray[Any, Any], **arrays: Any) -> SparseInputs:
    """Inputs without the arrays that the kernel does not see."""
    nothing = np.zeros(0)
    return SparseInputs(
        SparseCase(s_q=len(indices), topk=indices.shape[1]), nothing, nothing, indices, nothing, **arrays
    )


@pytest.mark.parametrize("s_kv", [1, 255, 256, 257, 2**31 - 1])
def test_buckets_at_the_edges(s_kv: int) -> None:
    """The last row is in the last bucket, also where a row number just fits into int32."""
    edges = np.array([s_kv - 1, 0, s_kv // 2, s_kv, INT_MAX, INT_MIN, s_kv - 1, s_kv // 3, -1], np.int64)
    indices = np.minimum(edges, INT_MAX).astype(np.int32)[None]
    inputs = bare(indices)
    lists = run(inputs, True, count_selected=False, s_kv=s_kv)
    check(lists, expected_rows(inputs, s_kv), True, s_kv)


@pytest.mark.parametrize("relative", [True, False])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    ("starts_q", "starts_kv"),
    [
        ([1, 2, 3], [0, 3, 6]),
        ([0, 4], [-5, 3]),
        ([0, 4], [4, INT_MAX]),
        ([INT_MIN, INT_MAX], [INT_MIN, INT_MAX]),
        ([0, 4], [5, 2]),
        ([0, 2, 0, 4], [0, 1, 2, 4]),
        ([3, 1, 4, 0, INT_MAX], [INT_MAX, 0, 6, INT_MIN, 5]),
        ([0], [0]),
    ],
)
def test_hostile_starts(starts_q: list[int], starts_kv: list[int], causal: bool, relative: bool) -> None:
    indices = np.tile(np.array([0, 1, 5, 2, 3, 4, -1, -5, INT_MAX, INT_MIN], np.int32), (4, 1))
    starts = {"cu_seqlens_q": starts_q, "cu_seqlens_kv": starts_kv}
    inputs = bare(indices, **{name: np.asarray(x, np.int32) for name, x in starts.items()})
    inputs = replace(inputs, case=replace(inputs.case, causal=causal))
    check(run(inputs, True, s_kv=6, relative=relative), expected_rows(inputs, 6, relative), True, 6)


@pytest.mark.parametrize("index", [INT_MIN, -1, 0, INT_MAX - 2, INT_MAX - 1, INT_MAX])
def test_row_numbers_at_the_ends_of_int32(index: int) -> None:
    """A sequence of the last two rows that 32 bits can number."""
    starts = {"cu_seqlens_q": [0, 0, 1], "cu_seqlens_kv": [0, INT_MAX - 2, INT_MAX]}
    arrays = {name: np.asarray(x, np.int32) for name, x in starts.items()}
    inputs = bare(np.full((1, 1), index, np.int32), **arrays)
    lists = run(inputs, False, count_selected=False, s_kv=INT_MAX, relative=False)
    check(lists, expected_rows(inputs, INT_MAX, relative=False), False, INT_MAX)


def test_many_sequences() -> None:
    """More than a block has threads; every query has its own."""
    ends = np.arange(701, dtype=np.int32)
    indices = np.tile(np.array([1, 0, 2], np.int32), (700, 1))[::70]
    inputs = bare(np.ascontiguousarray(indices), cu_seqlens_q=ends, cu_seqlens_kv=2 * ends)
    check(run(inputs, False, s_kv=1400), [np.array([2 * i + 1, 2 * i]) for i in range(10)], False, 1400)
    far = replace(inputs, cu_seqlens_q=np.concatenate([np.full(691, -1), np.arange(10)]).astype(np.int32))
    check(run(far, False, s_kv=1400), expected_rows(far, 1400), False, 1400)


test_is_caught, test_as_it_is = mutant_suite(
    "attention_row_lists",
    [partial(test_lists, CASES[0], ordered=True), partial(test_lists, CASES[7], ordered=True)],
    {"bar.sync": (6, [3, 5])},
)
