"""The pure part of the sparse forward: which kernel, how many blocks, what lies where in the workspace."""

from __future__ import annotations

import dataclasses
import logging

import numpy as np
import pytest

import mla_cupy
from mla_cupy import ArgumentError, UnsupportedDeviceError
from mla_cupy.launchers import decode_schedule, sparse_rows, split_combine
from mla_cupy.launchers.choice import say_slow
from mla_cupy.launchers.decode_problem import HEAD_DIM_V, MAX_PARTS
from mla_cupy.launchers.sparse_forward_problem import HEAD_DIMS_QK, SparseForwardProblem
from mla_cupy.launchers.sparse_forward_sequence import KERNELS, configure, lay_out
from mla_cupy.runtime.device import DeviceInfo
from tests.ops.conftest import H200, Recorder

SMALL, LARGE, GENERIC = "sparse_forward_small_sm90", "sparse_forward_sm90", "dense_decode_generic"


def gpu(cc: tuple[int, int] = (9, 0), sm_count: int = 132) -> DeviceInfo:
    return dataclasses.replace(H200, name=f"a fake {cc}", cc=cc, sm_count=sm_count)


def problem(h_q: int = 128, d_qk: int = 576, aligned: bool = True) -> SparseForwardProblem:
    return SparseForwardProblem(h_q, d_qk, "bfloat16", aligned)


@pytest.mark.parametrize(
    ("h_q", "aligned", "device", "kernel"),
    [
        (1, True, gpu(), SMALL),
        (32, True, gpu(), SMALL),
        (33, True, gpu(), LARGE),
        (65, True, gpu(), LARGE),
        (128, True, gpu(), LARGE),
        (16, False, gpu(), GENERIC),
        (128, True, gpu((8, 0)), GENERIC),
        (128, True, gpu((10, 0)), GENERIC),  # has no WGMMA
    ],
    ids=str,
)
def test_choice(h_q: int, aligned: bool, device: DeviceInfo, kernel: str) -> None:
    assert configure(problem(h_q, aligned=aligned), device).kernel == kernel


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("d_qk", HEAD_DIMS_QK)
@pytest.mark.parametrize("h_q", [1, 16, 17, 32])
def test_forced_kernels_have_a_build_for_every_problem(name: str, d_qk: int, h_q: int) -> None:
    assert configure(problem(h_q, d_qk), gpu(), name).kernel == name
    assert KERNELS[name].variant(problem(h_q, d_qk)) in KERNELS[name].SPEC.variants


def test_no_such_kernel() -> None:
    with pytest.raises(ArgumentError, match=r"variant: got 'dense_decode_sm90_seesaw', expected one of ") as caught:
        configure(problem(), gpu(), "dense_decode_sm90_seesaw")
    assert all(name in str(caught.value) for name in KERNELS)


def test_no_fit_lists_every_reason() -> None:
    with pytest.raises(UnsupportedDeviceError, match="no kernel fits") as caught:
        configure(problem(), gpu((7, 0)))
    for name in KERNELS:
        assert f"{name} needs compute capability" in str(caught.value)


def test_forced_kernel_that_does_not_fit_says_why() -> None:
    with pytest.raises(UnsupportedDeviceError, match=f"{SMALL} takes at most 32 heads"):
        configure(problem(33), gpu(), SMALL)
    with pytest.raises(UnsupportedDeviceError, match=f"{LARGE} needs q and kv .* multiples of 16 bytes"):
        configure(problem(aligned=False), gpu(), LARGE)


@pytest.mark.parametrize(("h_q", "reason"), [(128, "multiples of 16 bytes"), (16, "multiples of 16 bytes")])
def test_slow_kernel_says_what_the_fast_one_wants(h_q: int, reason: str, caplog: pytest.LogCaptureFixture) -> None:
    say_slow.cache_clear()
    with caplog.at_level(logging.WARNING, "mla_cupy"):
        configure(problem(h_q), gpu())  # not the first in the list, but fast
        configure(problem(h_q), gpu(), GENERIC)  # asked for
        assert caplog.records == []
        configure(problem(h_q, aligned=False), gpu())
    say_slow.cache_clear()
    assert reason in caplog.text
    assert "the sparse forward runs on the slow kernel" in caplog.text


@pytest.mark.parametrize("sm_count", [1, 20, 132, 400])
@pytest.mark.parametrize("h_q", [1, 16, 32, 64, 100, 128, 5000])
def test_grid_fits_the_gpu(sm_count: int, h_q: int) -> None:
    config = configure(problem(h_q), gpu(sm_count=sm_count))
    block = 32 if config.kernel == SMALL else 64
    assert config.row_blocks == -(-h_q // block)
    assert 1 <= config.num_parts <= MAX_PARTS
    assert config.row_blocks * config.num_parts <= sm_count or config.num_parts == 1
    assert config.row_blocks * (config.num_parts + 1) > sm_count or config.num_parts == MAX_PARTS
    assert config.combine_blocks == (split_combine.blocks(gpu(sm_count=sm_count)) if config.num_parts > 1 else 0)


@pytest.mark.parametrize("sm_count", [1, 132])
@pytest.mark.parametrize(("s_q", "topk"), [(1, 0), (1, 1), (3, 64), (1000, 2048), (7, 65)])
def test_workspace_is_aligned_and_does_not_overlap(sm_count: int, s_q: int, topk: int) -> None:
    config = configure(problem(), gpu(sm_count=sm_count))
    space = lay_out(config, s_q, topk)
    partial_rows = 2 * config.num_parts * 128 if config.num_parts > 1 else 0
    needed = {
        "rows": 4 * s_q * sparse_rows.rows_stride(topk),
        "counts": 4 * s_q,
        "schedule": decode_schedule.POINT_BYTES * (config.num_parts + 1),
        "partial_lse": 4 * partial_rows,
        "partial_max": 4 * partial_rows,
        "partial_out": 4 * partial_rows * HEAD_DIM_V,
    }
    assert tuple(needed) == space._fields[:-1]
    assert space.rows == 0
    for offset, nbytes, following in zip(space, needed.values(), space[1:], strict=False):
        assert offset % 256 == 0
        assert offset + nbytes <= following


def test_large_kv_is_walked_in_order(recorder: Recorder) -> None:
    q, indices = np.zeros((1, 1, 576), np.float16), np.zeros((1, 1), np.int32)
    first = -(-configure(problem(1), H200).ordered_from // (2 * 576))  # number of rows
    for s_kv in (first - 1, first):
        mla_cupy.sparse_mla_forward(q, np.zeros((s_kv, 576), np.float16), indices)
    lists = [launch for launch in recorder.launches if launch.entry == "mla_sparse_rows"]
    assert [launch.params["ordered"] for launch in lists] == [0, 1]
