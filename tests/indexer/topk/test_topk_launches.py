"""Driver calls of `indexer_topk`, and mistakes that the description does not cover."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import mla_cupy
from mla_cupy import ArgumentError, ShapeError
from mla_cupy.kernels.indexer.topk import select
from mla_cupy.kernels.indexer.topk.problem import TopkProblem
from mla_cupy.kernels.spec import Variant
from mla_cupy.simulation import fake_gpu
from tests.support.recorder import Recorder, address, elements


def test_parameters(recorder: Recorder) -> None:
    logits = np.zeros((6, 700), np.float32)[:, 3:503]
    bounds = np.zeros((2, 18), np.int32)[:, ::3]
    table = np.zeros((3, 20), np.int32)[:, ::2]
    options: dict[str, Any] = {"page_size": 16, "keep_first": 4, "keep_last": 5, "order": "value"}
    results = mla_cupy.indexer_topk(logits, 99, ks=bounds[0], ke=bounds[1], block_table=table, **options, stream=3)
    (launch,) = recorder.launches
    p = launch.params
    assert (launch.grid, launch.stream) == ((6, 1, 1), 3)
    names = ("logits", "ks", "ke", "block_table", "indices", "counts", "values")
    arrays = (logits, bounds[0], bounds[1], table, *results)
    assert [p[name] for name in names] == [address(x) for x in arrays]
    assert p["logits_stride_q_elems"] == 700
    assert [p["ks_stride_elems"], p["ke_stride_elems"]] == [3, 3]
    assert [p["table_stride_b_elems"], p["table_stride_page_elems"]] == elements(table, 2)
    strides = [p[f"{name}_elems"] for name in ("indices_stride_q", "counts_stride", "values_stride_q")]
    assert strides == [99, 1, 99]
    assert [p[name] for name in ("s_q", "s_kv", "k", "rows_per_table", "max_pages")] == [6, 500, 99, 2, 10]
    assert [p[name] for name in ("page_size", "keep_first", "keep_last", "by_value", "relative")] == [16, 4, 5, 1, 0]
    assert [x.shape for x in results] == [(6, 99), (6,), (6, 99)]
    assert p["rows_per_ke"] == 1
    mla_cupy.indexer_topk(logits, 99, ke=bounds[1, :3])
    assert recorder.launches[-1].params["rows_per_ke"] == 2


@pytest.mark.parametrize(
    ("shape", "blocks"),
    [
        ((1, 32768), 1),
        ((16, 32769), 16 * 8),
        ((17, 65536), 17),
        ((17, 65537), 17 * 8),
        ((500, 65537), 500),
        ((0, 9), 0),
    ],
)
def test_blocks(recorder: Recorder, shape: tuple[int, int], blocks: int) -> None:
    """A cluster per row where rows are long and few."""
    mla_cupy.indexer_topk(np.zeros(shape, np.float32), 8)
    assert sum(launch.grid[0] for launch in recorder.launches) == blocks


@pytest.mark.parametrize(("width", "threads"), [(1, 512), (16384, 512), (16385, 1024), (32768, 1024), (99999, 1024)])
def test_short_rows_take_smaller_blocks(width: int, threads: int) -> None:
    """The fewest threads whose registers hold the row."""
    chosen = select.variant(TopkProblem(500, width, 1), fake_gpu(132, (8, 0)))
    assert chosen == Variant(cluster_blocks=1, threads=threads)


def test_values_are_optional(recorder: Recorder) -> None:
    logits = np.zeros((2, 9), np.float32)
    assert mla_cupy.indexer_topk(logits, 2, return_values=False)[2] is None
    assert recorder.launches[0].params["values"] == 0
    with pytest.raises(ArgumentError, match="values: got an array, expected None: return_values is not set"):
        mla_cupy.indexer_topk(logits, 2, return_values=False, values=np.zeros((2, 2), np.float32))


def test_mistakes(recorder: Recorder) -> None:
    logits, table = np.zeros((5, 9), np.float32), np.zeros((2, 3), np.int32)
    with pytest.raises(ShapeError, match=r"logits.shape\[0\]: got 5, expected a multiple of 2"):
        mla_cupy.indexer_topk(logits, block_table=table)
    with pytest.raises(ArgumentError, match="relative: got True, with a block_table"):
        mla_cupy.indexer_topk(logits[:4], block_table=table, relative=True)
    with pytest.raises(ArgumentError, match="k: got 8193, expected an integer from 1 to 8192"):
        mla_cupy.indexer_topk(logits, 8193)
    assert recorder.launches == []
