"""The pure part of a decode: which kernel, how many blocks, what lies where in the workspace."""

from __future__ import annotations

import dataclasses
import logging

import pytest

from mla_cupy import ArgumentError, UnsupportedDeviceError
from mla_cupy.launchers import decode_schedule, dense_decode_generic, split_combine
from mla_cupy.launchers.choice import say_slow
from mla_cupy.launchers.decode_block_sm90 import BLOCK_M, kv_map
from mla_cupy.launchers.decode_problem import HEAD_DIM_V, MAX_PARTS, PARAMS, DecodeProblem
from mla_cupy.launchers.decode_sequence import KERNELS, configure
from mla_cupy.runtime.device import DeviceInfo
from tests.ops.conftest import H200

HOPPER = [name for name in KERNELS if "sm90" in name]
GENERIC = "dense_decode_generic"


def gpu(cc: tuple[int, int] = (9, 0), sm_count: int = 132) -> DeviceInfo:
    return dataclasses.replace(H200, name=f"a fake {cc}", cc=cc, sm_count=sm_count)


def problem(
    s_q: int = 1, h_q: int = 128, h_kv: int = 1, dtype: str = "bfloat16", aligned: bool = True
) -> DecodeProblem:
    return DecodeProblem(s_q, h_q, h_kv, dtype, aligned)


SIZES = [
    (sm_count, s_q, h_q, h_kv)
    for sm_count in (1, 20, 78, 114, 132, 400)
    for s_q in (1, 2, 4, 70)
    for h_q, h_kv in ((1, 1), (16, 1), (64, 1), (128, 1), (128, 2), (192, 1), (128, 128), (5, 5))
]


@pytest.mark.parametrize(("sm_count", "s_q", "h_q", "h_kv"), SIZES)
def test_grid_fits_the_gpu(sm_count: int, s_q: int, h_q: int, h_kv: int) -> None:
    for name in HOPPER:
        config = configure(problem(s_q, h_q, h_kv), gpu(sm_count=sm_count), name)
        assert config.row_blocks == h_kv * -(-s_q * h_q // h_kv // BLOCK_M)
        assert 1 <= config.num_parts <= MAX_PARTS
        # All blocks resident at once, unless a single part is too much already; and no SM is left over that could work.
        assert config.row_blocks * config.num_parts <= sm_count or config.num_parts == 1
        assert config.row_blocks * (config.num_parts + 1) > sm_count or config.num_parts == MAX_PARTS
    config = configure(problem(s_q, h_q, h_kv), gpu(sm_count=sm_count), GENERIC)
    resident = dense_decode_generic.BLOCKS_PER_SM * sm_count
    assert config.row_blocks * dense_decode_generic.BLOCK_M >= s_q * h_q
    assert config.row_blocks * config.num_parts <= resident or config.num_parts == 1


@pytest.mark.parametrize(("sm_count", "s_q", "h_q", "h_kv"), SIZES)
def test_workspace_is_aligned_and_does_not_overlap(sm_count: int, s_q: int, h_q: int, h_kv: int) -> None:
    config = configure(problem(s_q, h_q, h_kv), gpu(sm_count=sm_count))
    space, parts = config.workspace, config.num_parts
    rows = 2 * parts * s_q * h_q if parts > 1 else 0
    assert space.schedule == 0
    assert space.partial_lse >= space.schedule + decode_schedule.POINT_BYTES * (parts + 1)
    assert space.partial_out >= space.partial_lse + 4 * rows
    assert space.nbytes >= space.partial_out + 4 * HEAD_DIM_V * rows
    assert {space.schedule % 256, space.partial_lse % 256, space.partial_out % 256} == {0}


def test_merge_only_where_something_is_split() -> None:
    assert configure(problem(), gpu()).combine_blocks == split_combine.blocks(gpu())
    alone = configure(problem(), gpu(sm_count=1))
    assert (alone.num_parts, alone.combine_blocks) == (1, 0)


@pytest.mark.parametrize(
    ("device", "aligned", "kernel"),
    [
        (gpu(), True, next(iter(KERNELS))),
        (gpu(), False, GENERIC),
        (gpu((7, 5)), True, GENERIC),
        (gpu((8, 0)), True, GENERIC),
        (gpu((8, 9)), True, GENERIC),
        (gpu((10, 0)), True, GENERIC),  # has no WGMMA
        (gpu((12, 0)), True, GENERIC),
    ],
    ids=str,
)
def test_choice(device: DeviceInfo, aligned: bool, kernel: str) -> None:
    assert configure(problem(aligned=aligned), device).kernel == kernel


@pytest.mark.parametrize("name", KERNELS)
def test_forced(name: str) -> None:
    assert configure(problem(), gpu(), name).kernel == name


def test_no_such_kernel() -> None:
    with pytest.raises(ArgumentError, match=r"variant: got 'fast', expected one of ") as caught:
        configure(problem(), gpu(), "fast")
    assert all(name in str(caught.value) for name in KERNELS)


def test_no_fit_lists_every_reason() -> None:
    with pytest.raises(UnsupportedDeviceError, match="no kernel fits") as caught:
        configure(problem(), gpu((7, 0)))
    for name in KERNELS:
        assert f"{name} needs compute capability" in str(caught.value)
    assert str(caught.value).count("has 7.0") == len(KERNELS)


@pytest.mark.parametrize("name", HOPPER)
def test_forced_kernel_that_does_not_fit_says_why(name: str) -> None:
    with pytest.raises(UnsupportedDeviceError, match=f"{name} needs compute capability 9.0, a fake .* has 8.0"):
        configure(problem(), gpu((8, 0)), name)
    with pytest.raises(UnsupportedDeviceError, match=f"{name} needs q and kv_cache .* multiples of 16 bytes"):
        configure(problem(aligned=False), gpu(), name)


def test_slow_kernel_on_a_datacentre_gpu_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    say_slow.cache_clear()
    with caplog.at_level(logging.WARNING, "mla_cupy"):
        configure(problem(), gpu((7, 5)))  # nothing faster is to be had for it
        configure(problem(), gpu((8, 0)), GENERIC)  # asked for
        assert caplog.records == []
        for _ in range(3):
            configure(problem(), gpu((8, 0)))
    say_slow.cache_clear()
    assert len(caplog.records) == 1
    assert GENERIC in caplog.text
    assert "compute capability 9.0" in caplog.text


def test_configuration_is_pure() -> None:
    assert configure(problem(2, 64), gpu()) == configure(problem(2, 64), gpu())


def test_record_of_the_parameters() -> None:
    kinds = [str(PARAMS.dtype[name]) for name in PARAMS.dtype.names or ()]
    assert kinds == sorted(kinds, key=["uint64", "int64", "int32", "float32"].index)  # 8-byte members first
    assert PARAMS.size % 8 == 0


@pytest.mark.parametrize("page_size", [1, 2, 3, 16, 24, 32, 64, 65, 96, 128, 192, 4096])
def test_kv_map_boxes_tile_a_page(page_size: int) -> None:
    spec = kv_map("bfloat16", 1 << 20, page_size, 2, 10, page_size * 1200, 1200, 600)
    assert spec.box[1] == max(n for n in (1, 2, 4, 8, 16, 32, 64) if page_size % n == 0)
    assert spec.dims == (576, page_size, 2, 10)
    assert spec.strides_bytes == (2400 if page_size > 1 else 1152, 1200, page_size * 2400)


def test_kv_map_replaces_strides_that_mean_nothing() -> None:
    """A driver refuses zero and odd strides, also those of axes of one element."""
    assert kv_map("float16", 1 << 20, 1, 1, 1, 0, 3, -5).strides_bytes == (1152, 1152, 1152)
