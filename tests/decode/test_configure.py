"""The pure part of a decode: which kernel, how many blocks, what lies where in the workspace."""

from __future__ import annotations

import dataclasses
import logging

import pytest

from mla_cupy import ArgumentError, UnsupportedDeviceError
from mla_cupy.arrays import HOST, View
from mla_cupy.kernels.attention import combine, generic, schedule
from mla_cupy.kernels.attention.split_schedule import MAX_SPLITS
from mla_cupy.kernels.choice import _say_slow
from mla_cupy.kernels.decode import DECODE
from mla_cupy.kernels.decode.problem import Batch, DecodeProblem
from mla_cupy.kernels.decode.sm90 import box_maps, kv_map
from mla_cupy.kernels.param_layout import layout_of
from mla_cupy.kernels.params import DecodeParams
from mla_cupy.runtime.device import DeviceInfo, smem_per_block
from mla_cupy.shapes import D_V
from tests.support.kernels import DECODE_KERNELS, SCHEDULED_KERNELS, cc_of, on_hopper
from tests.support.recorder import H200
from tests.support.workspace import assert_laid_out

HOPPER = on_hopper(SCHEDULED_KERNELS)
SMALL, SEESAW, GENERIC = "decode_sm90_small", "decode_sm90_seesaw", "attention_generic"
MMA = "attention_mma"


def gpu(cc: tuple[int, int] = (9, 0), sm_count: int = 132) -> DeviceInfo:
    return dataclasses.replace(H200, name=f"a fake {cc}", cc=cc, sm_count=sm_count, smem_optin=smem_per_block(cc))


def problem(s_q: int = 1, h_q: int = 128, dtype: str = "bfloat16", aligned: bool = True) -> DecodeProblem:
    return DecodeProblem(s_q, h_q, dtype, aligned)


SIZES = [
    (sm_count, s_q, h_q)
    for sm_count in (1, 20, 78, 114, 132, 400)
    for s_q in (1, 2, 4, 70)
    for h_q in (1, 5, 16, 64, 128, 192)
]


@pytest.mark.parametrize(("sm_count", "s_q", "h_q"), SIZES)
def test_grid_fits_the_gpu(sm_count: int, s_q: int, h_q: int) -> None:
    for name in HOPPER:
        kernel = DECODE_KERNELS[name]
        if kernel.unsupported(problem(s_q, h_q), gpu()):
            continue
        config = DECODE.configure(problem(s_q, h_q), gpu(sm_count=sm_count), name)
        assert config.row_blocks == -(-s_q * h_q // kernel.block_rows)
        assert 1 <= config.num_splits <= MAX_SPLITS
        # All blocks are resident at once, unless a single split is too much already; and no SM is left idle.
        assert config.row_blocks * config.num_splits <= sm_count or config.num_splits == 1
        assert config.row_blocks * (config.num_splits + 1) > sm_count or config.num_splits == MAX_SPLITS
    config = DECODE.configure(problem(s_q, h_q), gpu(sm_count=sm_count), GENERIC)
    resident = generic.KERNEL.blocks_per_sm * sm_count
    assert config.row_blocks * generic.BLOCK_M >= s_q * h_q
    assert config.row_blocks * config.num_splits <= resident or config.num_splits == 1


@pytest.mark.parametrize(("sm_count", "s_q", "h_q"), SIZES)
def test_workspace_is_aligned_and_does_not_overlap(sm_count: int, s_q: int, h_q: int) -> None:
    config = DECODE.configure(problem(s_q, h_q), gpu(sm_count=sm_count))
    rows = 2 * config.num_splits * s_q * h_q if config.num_splits > 1 else 0
    sizes = {
        "schedule": schedule.POINT_BYTES * (config.num_splits + 1),
        "partial_lse": 4 * rows,
        "partial_out": 4 * D_V * rows,
    }
    assert_laid_out(DECODE.workspace(config), sizes)


def test_merge_only_where_something_is_split() -> None:
    assert DECODE.configure(problem(), gpu()).combine_blocks == combine.blocks(2, gpu())
    alone = DECODE.configure(problem(), gpu(sm_count=1))
    assert (alone.num_splits, alone.combine_blocks) == (1, 0)


@pytest.mark.parametrize(
    ("device", "aligned", "kernel"),
    [
        (gpu(), True, SEESAW),
        (gpu(), False, GENERIC),
        (gpu((7, 5)), True, GENERIC),
        (gpu((8, 0)), True, MMA),
        (gpu((8, 0)), False, GENERIC),
        (gpu((8, 6)), True, MMA),
        (gpu((8, 9)), True, MMA),
        (gpu((10, 0)), True, MMA),  # has no WGMMA
        (gpu((12, 0)), True, MMA),
    ],
    ids=str,
)
def test_choice(device: DeviceInfo, aligned: bool, kernel: str) -> None:
    assert DECODE.configure(problem(aligned=aligned), device).kernel.name == kernel


@pytest.mark.parametrize(
    ("s_q", "h_q", "kernel", "block_rows"),
    [
        (1, 1, SMALL, 8),
        (1, 8, SMALL, 8),
        (1, 9, SMALL, 16),
        (1, 16, SMALL, 16),
        (3, 8, SMALL, 24),
        (5, 5, SMALL, 32),
        (4, 8, SMALL, 32),
        (1, 33, SEESAW, None),
        (4, 16, SEESAW, None),
        (1, 128, SEESAW, None),
    ],
)
def test_few_rows_have_a_kernel_of_their_own(s_q: int, h_q: int, kernel: str, block_rows: int) -> None:
    config = DECODE.configure(problem(s_q, h_q), gpu())
    assert config.kernel.name == kernel
    assert getattr(config.variant, "block_rows", None) == block_rows


@pytest.mark.parametrize(("h_q", "block_rows"), [(1, 16), (16, 16), (17, 32), (32, 32)])
def test_few_rows_of_narrow_keys(h_q: int, block_rows: int) -> None:
    """Narrow keys have builds of fewer widths than the usual keys."""
    config = DECODE.configure(dataclasses.replace(problem(h_q=h_q), d_qk=512), gpu())
    build = config.variant
    assert (config.kernel.name, str(build)) == (SMALL, f"bfloat16-{block_rows}-512")
    assert build in config.kernel.variants


def test_few_rows_fall_back_like_many() -> None:
    assert DECODE.configure(problem(h_q=16, aligned=False), gpu()).kernel.name == GENERIC


@pytest.mark.parametrize(
    ("h_q", "batch", "kernel"),
    [
        (128, Batch(1, 8192), SMALL),
        (128, Batch(2, 8192), SMALL),
        (128, Batch(4, 8192), SEESAW),
        (128, Batch(8, 1025), SMALL),
        (128, Batch(1, 131072), SEESAW),
        (64, Batch(4, 8192), SMALL),
        (64, Batch(8, 8192), SMALL),
        (64, Batch(32, 2048), SMALL),
        (64, Batch(64, 2048), SEESAW),
        (96, Batch(4, 8192), SEESAW),
        (128, None, SEESAW),
        (16, Batch(128, 8192), SMALL),  # in one block anyway
    ],
)
def test_small_batches_are_divided_among_blocks_of_few_rows(h_q: int, batch: Batch | None, kernel: str) -> None:
    asked = dataclasses.replace(problem(h_q=h_q), batch=batch)
    config = DECODE.configure(asked, gpu())
    assert config.kernel.name == kernel
    assert config.row_blocks * config.kernel.block_rows >= h_q
    assert asked == problem(h_q=h_q)  # a plan serves smaller batches


@pytest.mark.parametrize("name", DECODE_KERNELS)
def test_forced(name: str) -> None:
    h_q = 128 if name == "decode_sm100_joint" else 16  # which takes pairs of blocks of 64 rows
    assert DECODE.configure(problem(h_q=h_q), gpu(cc_of(name)), name).kernel.name == name


def test_no_such_kernel() -> None:
    with pytest.raises(ArgumentError, match=r"kernel: got 'fast', expected None, or one of ") as caught:
        DECODE.configure(problem(), gpu(), "fast")
    assert all(name in str(caught.value) for name in DECODE_KERNELS)


def test_no_fit_lists_every_reason() -> None:
    with pytest.raises(UnsupportedDeviceError, match="no kernel fits") as caught:
        DECODE.configure(problem(), gpu((7, 0)))
    tried = [name for name, kernel in DECODE_KERNELS.items() if not kernel.on_request]
    for name in tried:
        assert f"{name} needs compute capability" in str(caught.value)
    assert str(caught.value).count("has 7.0") == len(tried)


@pytest.mark.parametrize("name", HOPPER)
def test_forced_kernel_that_does_not_fit_says_why(name: str) -> None:
    with pytest.raises(UnsupportedDeviceError, match=f"{name} needs compute capability 9.0, a fake .* has 8.0"):
        DECODE.configure(problem(), gpu((8, 0)), name)
    with pytest.raises(UnsupportedDeviceError, match=f"{name} needs q and kv_cache .* multiples of 16 bytes"):
        DECODE.configure(problem(aligned=False), gpu(), name)


def test_slow_kernel_on_a_datacentre_gpu_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    _say_slow.cache_clear()
    with caplog.at_level(logging.WARNING, "mla_cupy"):
        DECODE.configure(problem(), gpu((7, 5)))  # nothing faster is to be had for it
        DECODE.configure(problem(), gpu((8, 0)), GENERIC)  # asked for
        DECODE.configure(problem(), gpu((8, 0)))
        assert caplog.records == []
        for _ in range(3):
            DECODE.configure(problem(aligned=False), gpu((8, 0)))
    _say_slow.cache_clear()
    assert len(caplog.records) == 1
    assert GENERIC in caplog.text
    assert "multiples of 16 bytes" in caplog.text


def test_configuration_is_pure() -> None:
    assert DECODE.configure(problem(2, 64), gpu()) == DECODE.configure(problem(2, 64), gpu())


def test_layout_of_the_parameters() -> None:
    layout = layout_of(DecodeParams)
    kinds = [str(layout.dtype[name]) for name in layout.dtype.names or ()]
    assert kinds == sorted(kinds, key=["uint64", "int64", "int32", "float32"].index)  # 8-byte members first
    assert layout.size % 8 == 0


@pytest.mark.parametrize("page_size", [1, 2, 3, 16, 24, 32, 64, 65, 96, 128, 192, 4096])
def test_kv_map_boxes_tile_a_page(page_size: int) -> None:
    strides = (page_size * 1200, 1200, 1)
    spec = kv_map(View(1 << 20, (10, page_size, 576), strides, "bfloat16", HOST))
    assert spec.box[1] == max(n for n in (1, 2, 4, 8, 16, 32, 64) if page_size % n == 0)
    assert spec.dims == (576, page_size, 1, 10)
    narrow = kv_map(View(1 << 20, (10, page_size, 512), strides, "bfloat16", HOST))
    assert (narrow.dims[0], narrow.box) == (512, spec.box)
    assert spec.strides_bytes == (2400 if page_size > 1 else 1152, 1152, page_size * 2400)


@pytest.mark.parametrize("page_size", [8, 16, 24, 32, 64, 192])
@pytest.mark.parametrize("d_qk", [576, 512])
def test_boxes_of_half_the_values_tile_a_page(page_size: int, d_qk: int) -> None:
    """Boxes of 8 tokens tile both a page and 64 tokens; each element of a box is at its place in the array."""
    strides = (page_size * 1200 + 8, 1200, 1)
    half, rope = box_maps(View(1 << 20, (10, page_size, d_qk), strides, "bfloat16", HOST))
    groups = max(n for n in (1, 2, 4, 8) if page_size % (8 * n) == 0)
    assert (half.box, rope.box) == ((64, 8, 4, groups, 1), (64, 8, 1, groups, 1))
    assert half.dims == rope.dims == (64, 8, d_qk // 64, page_size // 8, 10)
    assert half.strides_bytes == rope.strides_bytes == (2400, 128, 8 * 2400, 2 * strides[0])
    half.validate()


@pytest.mark.parametrize("page_size", [1, 2, 4, 12])
def test_pages_of_few_rows_come_in_boxes_within_8(page_size: int) -> None:
    cache = View(1 << 20, (10, page_size, 576), (page_size * 576, 576, 1), "bfloat16", HOST)
    assert box_maps(cache) == (kv_map(cache), kv_map(cache))
    assert kv_map(cache).box[1] <= 4


def test_promotion_of_fetches_is_the_kernels() -> None:
    cache = View(1 << 20, (10, 64, 576), (64 * 576, 576, 1), "bfloat16", HOST)
    wanted = {name: "none" if "small" in name else "128B" for name in HOPPER}
    assert {SMALL, SEESAW} <= wanted.keys()
    for name in HOPPER:
        for build in DECODE_KERNELS[name].variants:
            assert {each.l2 for each in DECODE_KERNELS[name].kv_maps(cache, build)} == {wanted[name]}


def test_kv_map_replaces_strides_that_mean_nothing() -> None:
    """A driver refuses zero and odd strides, also for axes of one element."""
    cache = View(1 << 20, (1, 1, 576), (0, 3, 1), "float16", HOST)
    assert kv_map(cache).strides_bytes == (1152, 1152, 1152)
