"""Launches of `mla_prefill`, without running it: grids, workspaces, tensor maps, results in place."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import mla_cupy
from mla_cupy import ShapeError
from mla_cupy.kernels.dense import DENSE
from mla_cupy.kernels.dense.pipeline import heads_at_once
from mla_cupy.kernels.dense.problem import DenseProblem
from mla_cupy.kernels.dense.table import row_maps
from mla_cupy.kernels.pipeline import Call
from mla_cupy.ops import OPERATIONS, call
from tests.support.dense_cases import DenseCase, make
from tests.support.flat import flat
from tests.support.recorder import Recorder
from tests.support.sim_driver import fake_gpu

PROBLEM = DenseProblem(s_q=1000, s_kv=8192, h_q=16, h_kv=4, d_qk=192, d_v=128, dtype="bfloat16", sequences=3)


def test_grid_and_workspace() -> None:
    """No more blocks than there can be work for, and tiles for whatever the starts say."""
    config = DENSE.configure(PROBLEM, fake_gpu(132))
    assert config.grid == (132, 1, 1)
    assert PROBLEM.most_tiles == 1000 // 128 + 3 + 2
    layout = DENSE.workspace(config)
    assert layout.offsets["tiles"] + 32 * PROBLEM.most_tiles <= layout.nbytes
    assert DENSE.configure(replace(PROBLEM, s_q=2, h_q=4), fake_gpu(132)).grid == (2 * 4, 1, 1)
    generic = DENSE.configure(PROBLEM, fake_gpu(132), "dense_generic")
    assert generic.grid == (PROBLEM.most_tiles, 16, 1)


@pytest.mark.parametrize(
    ("s_kv", "kv_heads"), [(100, 4), (8192, 4), (20_000, 2), (10**6, 1), (0, 4)], ids=lambda x: str(x)
)
def test_heads_at_once(s_kv: int, kv_heads: int) -> None:
    """Whole groups, the most with keys and values that fit into L2."""
    device = replace(fake_gpu(132), l2_bytes=50 << 20)
    assert heads_at_once(replace(PROBLEM, s_kv=s_kv), device) == 4 * kv_heads


def test_kernel_of_a_problem() -> None:
    assert DENSE.configure(PROBLEM, fake_gpu(1)).kernel.name == "dense_sm90"
    assert DENSE.configure(replace(PROBLEM, aligned=False), fake_gpu(1)).kernel.name == "dense_generic"
    by_gpu = {(10, 0): "163-64-0", (8, 0): "163-64-0", (8, 6): "99-48-1", (12, 1): "99-48-1"}
    for cc, build in by_gpu.items():
        config = DENSE.configure(PROBLEM, fake_gpu(1, cc))
        assert (config.kernel.name, str(config.variant)) == ("dense_mma", f"bfloat16-192-128-{build}")
    assert DENSE.configure(PROBLEM, fake_gpu(1, (7, 5))).kernel.name == "dense_generic"
    for cc in (*by_gpu, (7, 5)):
        assert DENSE.configure(replace(PROBLEM, d_qk=256, d_v=256), fake_gpu(1, cc)).kernel.name == "dense_generic"
        assert DENSE.configure(replace(PROBLEM, aligned=False), fake_gpu(1, cc)).kernel.name == "dense_generic"


@pytest.mark.parametrize("s_kv", [9, 0])
def test_tensor_maps(s_kv: int) -> None:
    """Views of one array keep its strides; the heads share their last columns. Without keys, no map is of any."""
    inputs = make(DenseCase(((3, s_kv),), h_q=4, h_kv=2, starts=False))
    operation = OPERATIONS["mla_prefill"]
    views = dict.fromkeys(operation.names)
    arrays = {**dict(zip(("q", "k", "v"), inputs.arguments, strict=True)), "k_rope": inputs.options["k_rope"][:, None]}
    native: Any = mla_cupy.arrays.common_family(arrays, ()).native
    views |= {name: native.view(x, name) for name, x in arrays.items()}
    maps = row_maps(DenseProblem(3, s_kv, 4, 2, 192, 128, "bfloat16"), Call(views, None))
    names, specs = zip(*maps, strict=True)
    assert names == (("q", "q", "k", "k_rope", "v") if s_kv else ("q",) * 5)
    assert [spec.box for spec in specs] == [(64, 64, 1)] * 2 + [(64, 128, 1)] * 3  # of queries, a warpgroup's
    if s_kv:
        row = inputs.k.strides[1]
        assert row == inputs.v.strides[1] > 2 * (128 + 128)
        assert specs[2].dims == (128, 9, 2)
        assert specs[2].strides_bytes == specs[4].strides_bytes == (2 * row, row)
        assert specs[3].dims == (64, 9, 1)


def in_place(inputs: Any, out: np.ndarray, lse: np.ndarray) -> dict[str, Any]:
    return {**inputs.options, "state_out": out, "state_lse": lse, "out": out, "lse": lse}


def test_results_in_the_place_of_the_state(recorder: Recorder, monkeypatch: pytest.MonkeyPatch) -> None:
    """A repeated call with other addresses is not prepared again."""
    inputs = make(DenseCase(((3, 4),), h_q=2))
    shape = inputs.q.shape[:2]

    def again() -> None:
        memory = np.zeros((*shape, 128), np.float32), np.zeros(shape, np.float32)
        flat(mla_cupy.mla_prefill)(*inputs.arguments, **in_place(inputs, *memory))

    again()
    monkeypatch.setattr(call, "_prepare", None)
    again()
    assert len(recorder.launches) == 2  # one sequence needs no schedule


def test_results_beside_the_state(recorder: Recorder) -> None:
    """Results may overwrite the state or be elsewhere, but not overlap it otherwise: rows would be read after they were
    written.
    """
    inputs = make(DenseCase(((3, 4),), h_q=2))
    memory, lse = np.zeros((4, 2, 128), np.float32), np.zeros((3, 2), np.float32)
    options = in_place(inputs, memory[:3], lse)
    flat(mla_cupy.mla_prefill)(*inputs.arguments, **options)
    for wrong in (memory[1:], memory[2::-1]):
        with pytest.raises(ShapeError, match=r"out: got memory that overlaps state_out|out\.strides"):
            flat(mla_cupy.mla_prefill)(*inputs.arguments, **{**options, "out": wrong})
    with pytest.raises(ShapeError, match="lse: got memory that overlaps state_out"):
        flat(mla_cupy.mla_prefill)(*inputs.arguments, **{**options, "lse": memory[:3, :, 0]})
