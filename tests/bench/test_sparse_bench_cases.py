from __future__ import annotations

import numpy as np
import pytest

from bench.core.cost import Cost
from bench.operations import SPARSE_BACKWARD, SPARSE_FORWARD
from bench.ops.sparse import NEIGHBOURS, RECENT_TOKENS, SINK_TOKENS, choose_indices, with_indices
from bench.ops.sparse_backward import CASES as BACKWARD
from bench.ops.sparse_backward import SparseBackwardCase
from bench.ops.sparse_forward import CASES as FORWARD
from bench.ops.sparse_forward import SparseForwardCase

OPERATIONS = {"forward": (SPARSE_FORWARD, FORWARD), "backward": (SPARSE_BACKWARD, BACKWARD)}


def test_cost_of_two_slots_by_hand():
    # One query with three heads and two slots, over five rows.
    forward = SparseForwardCase(1, 5, 3, topk=2).cost
    assert forward == Cost(
        flops=2 * 3 * 2 * (576 + 512),
        nbytes=2 * (5 * 576 + 3 * 576 + 3 * 512) + 4 * 2,
        l2_bytes=2 * 576 * 2,
    )
    assert forward.l2_tbps(1.0) == pytest.approx(2304e-6)
    backward = SparseBackwardCase(1, 5, 3, topk=2).cost
    assert backward == Cost(
        flops=2 * 3 * 2 * (576 + 512 + 576 + 576 + 512),
        nbytes=2 * (2 * 5 * 576 + 2 * 3 * (576 + 512)) + 4 * (3 + 2),
        l2_bytes=2 * 576 * (2 + 4),
    )


def test_a_narrower_head_costs_less():
    wide, narrow = SparseForwardCase(8, 64, 4, 16).cost, SparseForwardCase(8, 64, 4, 16, d_qk=512).cost
    assert wide.flops - narrow.flops == 2 * 8 * 4 * 16 * 64


@pytest.mark.parametrize("kind", OPERATIONS)
def test_names_with_indices(kind):
    operation, built_in = OPERATIONS[kind]
    for case in built_in:
        clustered = operation.parse(with_indices(case.name, "clustered"))
        assert (clustered.indices, clustered.peer_us) == ("clustered", None)
        assert with_indices(clustered.name, "clustered") == clustered.name
        assert operation.parse(with_indices(clustered.name, "random")) is case
    odd = operation.parse("sq3-skv70-hq5-topk100-dqk512-clustered")
    assert (odd.s_q, odd.s_kv, odd.h_q, odd.topk, odd.d_qk, odd.indices) == (3, 70, 5, 100, 512, "clustered")
    assert odd.name == "sq3-skv70-hq5-topk100-dqk512-clustered"
    assert odd.shape() == {**odd.shape(), "d_v": 512, "indices": "clustered"}


@pytest.mark.parametrize("indices", ["random", "clustered"])
@pytest.mark.parametrize("s_kv", [50, 40, 30])
def test_indices_are_distinct_causal_rows(indices, s_kv):
    case = SparseForwardCase(s_q=40, s_kv=s_kv, h_q=1, topk=20, indices=indices)
    chosen = choose_indices(case, seed=1)
    assert chosen.shape == (40, 20)
    assert chosen.dtype == np.int32
    for i, row in enumerate(chosen):
        visible = max(0, i + s_kv - 40 + 1)
        count = min(20, visible)
        assert (row[count:] == -1).all()
        assert len(set(row[:count].tolist())) == count
        assert ((row[:count] >= 0) & (row[:count] < visible)).all()
    assert (np.diff(chosen[-1]) < 0).any(), "in no order"
    assert (choose_indices(case, seed=1) == chosen).all()
    assert (choose_indices(case, seed=2) != chosen).any()


def test_clusters_have_sinks_recent_tokens_and_neighbours_alike():
    case = SparseForwardCase(s_q=2 * NEIGHBOURS, s_kv=8192, h_q=1, topk=2048, indices="clustered")
    chosen = [set(row.tolist()) for row in choose_indices(case, seed=3)]
    last = 8192 - 2 * NEIGHBOURS
    for i, row in enumerate(chosen):
        assert row >= set(range(SINK_TOKENS)) | set(range(last + i - RECENT_TOKENS + 1, last + i + 1))

    def common(a, b):
        return len(chosen[a] & chosen[b]) / case.topk

    neighbours, strangers = common(0, NEIGHBOURS - 1), common(0, NEIGHBOURS)
    assert neighbours > 0.75
    assert strangers < 0.6
    uniform = choose_indices(SparseForwardCase(s_q=2, s_kv=8192, h_q=1), seed=3)
    assert len(np.intersect1d(*uniform)) / case.topk < 0.3
