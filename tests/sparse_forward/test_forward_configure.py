"""The pure part of the sparse forward: which kernel, how many blocks, what lies where in the workspace."""

from __future__ import annotations

import dataclasses
import logging

import numpy as np
import pytest

import mla_cupy
from mla_cupy import ArgumentError, UnsupportedDeviceError
from mla_cupy.kernels.attention import combine, row_lists, schedule
from mla_cupy.kernels.attention.split_schedule import MAX_SPLITS
from mla_cupy.kernels.choice import _say_slow
from mla_cupy.kernels.sparse_forward import SPARSE_FORWARD
from mla_cupy.kernels.sparse_forward.heuristics import ORDERED_BY_WIDE_MMA_FROM, ORDERED_FROM
from mla_cupy.kernels.sparse_forward.problem import HEAD_DIMS_QK, SparseForwardProblem
from mla_cupy.runtime.device import DeviceInfo, smem_per_block
from mla_cupy.shapes import D_V
from tests.support.kernels import FORWARD_KERNELS
from tests.support.recorder import H200, Recorder
from tests.support.workspace import assert_laid_out

SMALL, LARGE, GENERIC = "sparse_forward_sm90_small", "sparse_forward_sm90", "attention_generic"


def gpu(cc: tuple[int, int] = (9, 0), sm_count: int = 132) -> DeviceInfo:
    return dataclasses.replace(H200, name=f"a fake {cc}", cc=cc, sm_count=sm_count, smem_optin=smem_per_block(cc))


def problem(
    h_q: int = 128, d_qk: int = 576, aligned: bool = True, s_q: int = 7, s_kv: int = 300, topk: int = 100
) -> SparseForwardProblem:
    return SparseForwardProblem(s_q, s_kv, h_q, topk, d_qk, "bfloat16", aligned)


@pytest.mark.parametrize(
    ("h_q", "aligned", "device", "kernel"),
    [
        (1, True, gpu(), SMALL),
        (32, True, gpu(), SMALL),
        (33, True, gpu(), LARGE),
        (65, True, gpu(), LARGE),
        (128, True, gpu(), LARGE),
        (16, False, gpu(), GENERIC),
        (128, False, gpu((8, 0)), GENERIC),
        (128, True, gpu((8, 0)), "attention_mma"),
        (32, True, gpu((8, 0)), "attention_mma_small"),
        (33, True, gpu((8, 9)), "attention_mma"),
        (16, True, gpu((12, 0)), "attention_mma_small"),
        (128, True, gpu((10, 0)), "attention_mma"),  # has no WGMMA
    ],
    ids=str,
)
def test_choice(h_q: int, aligned: bool, device: DeviceInfo, kernel: str) -> None:
    assert SPARSE_FORWARD.configure(problem(h_q, aligned=aligned), device).kernel.name == kernel


@pytest.mark.parametrize("name", FORWARD_KERNELS)
@pytest.mark.parametrize("d_qk", HEAD_DIMS_QK)
@pytest.mark.parametrize("h_q", [1, 16, 17, 32])
def test_forced_kernels_have_a_build_for_every_problem(name: str, d_qk: int, h_q: int) -> None:
    h_q += 64 * name.endswith(("_pair", "_joint"))
    config = SPARSE_FORWARD.configure(problem(h_q, d_qk), gpu((10, 0) if "sm100" in name else (9, 0)), name)
    assert config.kernel.name == name
    assert config.variant in config.kernel.variants


def test_no_such_kernel() -> None:
    with pytest.raises(ArgumentError, match=r"kernel: got 'decode_sm90_seesaw', expected None, or one of ") as caught:
        SPARSE_FORWARD.configure(problem(), gpu(), "decode_sm90_seesaw")
    assert all(name in str(caught.value) for name in FORWARD_KERNELS)


def test_no_fit_lists_every_reason() -> None:
    with pytest.raises(UnsupportedDeviceError, match="no kernel fits") as caught:
        SPARSE_FORWARD.configure(problem(), gpu((7, 0)))
    for name, kernel in FORWARD_KERNELS.items():
        assert kernel.on_request or f"{name} needs compute capability" in str(caught.value)


def test_forced_kernel_that_does_not_fit_says_why() -> None:
    with pytest.raises(UnsupportedDeviceError, match=f"{SMALL} takes at most 32 heads"):
        SPARSE_FORWARD.configure(problem(33), gpu(), SMALL)
    with pytest.raises(UnsupportedDeviceError, match=f"{LARGE} needs q and kv .* multiples of 16 bytes"):
        SPARSE_FORWARD.configure(problem(aligned=False), gpu(), LARGE)


@pytest.mark.parametrize(("h_q", "reason"), [(128, "multiples of 16 bytes"), (16, "multiples of 16 bytes")])
def test_slow_kernel_says_what_the_fast_one_wants(h_q: int, reason: str, caplog: pytest.LogCaptureFixture) -> None:
    _say_slow.cache_clear()
    with caplog.at_level(logging.WARNING, "mla_cupy"):
        SPARSE_FORWARD.configure(problem(h_q), gpu())  # not the first in the list, but fast
        SPARSE_FORWARD.configure(problem(h_q), gpu(), GENERIC)  # asked for
        assert caplog.records == []
        SPARSE_FORWARD.configure(problem(h_q, aligned=False), gpu())
    _say_slow.cache_clear()
    assert reason in caplog.text
    assert "the sparse forward runs on the slow kernel" in caplog.text


@pytest.mark.parametrize("sm_count", [1, 20, 132, 400])
@pytest.mark.parametrize("h_q", [1, 16, 32, 64, 100, 128, 5000])
def test_grid_fits_the_gpu(sm_count: int, h_q: int) -> None:
    config = SPARSE_FORWARD.configure(problem(h_q), gpu(sm_count=sm_count))
    block = 32 if config.kernel.name == SMALL else 64
    assert config.row_blocks == -(-h_q // block)
    assert 1 <= config.num_splits <= MAX_SPLITS
    assert config.row_blocks * config.num_splits <= sm_count or config.num_splits == 1
    assert config.row_blocks * (config.num_splits + 1) > sm_count or config.num_splits == MAX_SPLITS
    assert config.combine_blocks == combine.blocks(config.num_splits, gpu(sm_count=sm_count))
    assert (config.combine_blocks > 0) == (config.num_splits > 1)


@pytest.mark.parametrize("sm_count", [1, 132])
@pytest.mark.parametrize(("s_q", "topk"), [(1, 0), (1, 1), (3, 64), (1000, 2048), (7, 65)])
def test_workspace_is_aligned_and_does_not_overlap(sm_count: int, s_q: int, topk: int) -> None:
    config = SPARSE_FORWARD.configure(problem(s_q=s_q, topk=topk), gpu(sm_count=sm_count))
    partial_rows = 2 * config.num_splits * 128 if config.num_splits > 1 else 0
    needed = {
        "rows": 4 * s_q * row_lists.rows_stride(topk),
        "counts": 4 * s_q,
        "schedule": schedule.POINT_BYTES * (config.num_splits + 1),
        "partial_lse": 4 * partial_rows,
        "partial_max": 4 * partial_rows,
        "partial_out": 4 * partial_rows * D_V,
    }
    assert_laid_out(SPARSE_FORWARD.workspace(config), needed)


@pytest.mark.parametrize(
    ("kernel", "share"),
    [
        (None, ORDERED_FROM),
        ("attention_mma_small", ORDERED_FROM),
        ("attention_mma", ORDERED_BY_WIDE_MMA_FROM),
    ],
)
def test_large_kv_is_walked_in_order(recorder: Recorder, kernel: str | None, share: float) -> None:
    q, indices = np.zeros((1, 1, 576), np.float16), np.zeros((1, 1), np.int32)
    first = -(-int(share * H200.l2_bytes) // (2 * 576))  # number of rows
    for s_kv in (first - 1, first):
        mla_cupy.sparse_mla_forward(q, np.zeros((s_kv, 576), np.float16), indices, kernel=kernel, scale=576**-0.5)
    lists = [launch for launch in recorder.launches if launch.entry == "mla_attention_row_lists"]
    assert [launch.params["ordered"] for launch in lists] == [0, 1]
