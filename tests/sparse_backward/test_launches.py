"""Driver calls of the public sparse backward: kernels, records, memory; no CUDA is needed."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
import pytest

import mla_cupy
from mla_cupy import ArgumentError, UnsupportedDeviceError
from mla_cupy.kernels import choice
from mla_cupy.kernels.attention import row_lists
from mla_cupy.kernels.sparse_backward import SPARSE_BACKWARD, mma, sm90
from mla_cupy.kernels.sparse_backward.problem import DkvOrder, SparseBackwardProblem
from mla_cupy.runtime.device import DeviceInfo
from mla_cupy.simulation import fake_gpu
from tests.support.flat import flat
from tests.support.gradients import problem_of, reason_against
from tests.support.kernels import BACKWARD_KERNELS, BLACKWELL
from tests.support.recorder import B200, H200, Recorder
from tests.support.sparse_cases import Array, SparseCase, SparseInputs, make
from tests.support.workspace import assert_laid_out

SEQUENCES = ((3, 90), (0, 5), (2, 3), (1, 150))
GENERIC = "sparse_backward_generic"
MAIN = tuple(BACKWARD_KERNELS)
ON_HOPPER = tuple(name for name in MAIN if name not in BLACKWELL)


configure = SPARSE_BACKWARD.configure


def gpu_of(kernel: str) -> DeviceInfo:
    """One that the kernel can run on."""
    return B200 if kernel in BLACKWELL else H200


def name_of(kernel: str) -> str:
    """The name of its entry, since two main kernels may be builds of one source."""
    return BACKWARD_KERNELS[kernel].entry.removeprefix("mla_")


def backward(inputs: SparseInputs, **options: Any) -> tuple[Any, Any, Any]:
    return flat(mla_cupy.sparse_mla_backward)(*inputs.backward_arguments, **{**inputs.backward_options, **options})


def records(recorder: Recorder, entry: str) -> list[Any]:
    return [launch.params for launch in recorder.launches if launch.entry == f"mla_{entry}"]


@pytest.mark.parametrize("kernel", MAIN)
def test_the_order_of_the_kernels(recorder: Recorder, kernel: str) -> None:
    recorder.gpu = gpu_of(kernel)
    backward(make(SparseCase(h_q=100)), kernel=kernel)
    delta = [] if BACKWARD_KERNELS[kernel].makes_delta else ["sparse_backward_delta"]
    assert recorder.entries == ["attention_row_lists", *delta, name_of(kernel), "sparse_backward_dkv"]
    assert records(recorder, "sparse_backward_dkv")[0]["order"] == BACKWARD_KERNELS[kernel].dkv_order


@pytest.mark.parametrize(
    ("cc", "order"),
    [((8, 0), DkvOrder.PLAIN), ((8, 9), DkvOrder.PLAIN), ((9, 0), DkvOrder.SM90), ((12, 0), DkvOrder.SM90)],
)
def test_order_of_the_sums_by_gpu(recorder: Recorder, cc: tuple[int, int], order: DkvOrder) -> None:
    """Four numbers at once, in an order of their own, are added from compute capability 9.0 on."""
    recorder.gpu = dataclasses.replace(H200, cc=cc)
    backward(make(SparseCase(h_q=20)), kernel="sparse_backward_mma")
    assert records(recorder, "sparse_backward_dkv")[0]["order"] == order


@pytest.mark.parametrize("kernel", MAIN)
def test_the_order_of_the_kernels_of_a_deterministic_call(recorder: Recorder, kernel: str) -> None:
    case = SparseCase(h_q=100, sink=True)
    recorder.gpu = gpu_of(kernel)
    if reason_against(kernel, recorder.gpu, case, deterministic=True):
        with pytest.raises(UnsupportedDeviceError, match=kernel):
            backward(make(case), kernel=kernel, deterministic=True)
        assert recorder.launches == []
        return
    backward(make(case), kernel=kernel, deterministic=True)
    before = [
        "attention_row_lists",
        "sparse_backward_delta",
        "exact_sums_norms",
        "exact_sums_bounds",
        "exact_sums_bins",
    ]
    assert recorder.entries == [*before, name_of(kernel), "sparse_backward_dkv", "sparse_backward_sink"]
    (bins,), (main,) = records(recorder, "exact_sums_bins"), records(recorder, name_of(kernel))
    assert bins["extractors"] == main["extractors"]
    assert bins["additions"] == math.ceil(100 / BACKWARD_KERNELS[kernel].heads_per_addition)
    assert [record["num_bins"] for record in records(recorder, "sparse_backward_dkv")] == [6]


@pytest.mark.parametrize("strides", ["padded", "odd", "dense"])
def test_the_main_kernel_gets_the_arrays(recorder: Recorder, strides: Any) -> None:
    inputs = make(SparseCase(topk=70, strides=strides, head_axis=True))
    dq, _, _ = backward(inputs, scale=0.5, kernel=GENERIC)
    (record,) = records(recorder, GENERIC)
    for name, x in (("q", inputs.q), ("kv", inputs.kv), ("dout", inputs.dout), ("dq", dq)):
        assert record[name] == x.ctypes.data
        assert record[f"{name}_stride_s_elems"] == x.strides[0] // 2
        if name != "kv":
            assert record[f"{name}_stride_h_elems"] == x.strides[1] // 2
    sizes = {"s_q": 7, "s_kv": 300, "h_q": 16, "rows_stride_elems": 128, "extractors": 0, "scale": 0.5}
    assert {name: record[name] for name in sizes} == sizes
    assert record["scale_log2"] == np.float32(0.5 * math.log2(math.e))
    first, delta = recorder.launches[0].params, recorder.launches[1].params
    assert (record["rows"], record["counts"]) == (first["rows"], first["counts"])
    assert (record["delta"], record["lse2"]) == (delta["delta"], delta["lse2"])
    (launch,) = [launch for launch in recorder.launches if launch.entry.endswith(GENERIC)]
    assert launch.grid == (7 * 2, 1, 1)


@pytest.mark.parametrize(("dtype", "is_fp32"), [("bfloat16", False), ("float32", True)])
def test_statistics_are_made_of_the_caller_s_arrays(recorder: Recorder, dtype: str, is_fp32: bool) -> None:
    inputs = make(SparseCase(sink=True, topk=70))
    out = inputs.out if not is_fp32 else inputs.exact[0].astype(np.float32)
    arguments = (inputs.q, inputs.kv, out, *inputs.backward_arguments[3:])
    results = flat(mla_cupy.sparse_mla_backward)(*arguments, **inputs.options, lse_base="2" if is_fp32 else "e")
    (record,) = records(recorder, "sparse_backward_delta")
    for name, x in {"out": out, "dout": inputs.dout, "lse": inputs.lse, "attn_sink": inputs.attn_sink}.items():
        assert record[name] == x.ctypes.data
    for name, x in {"out": out, "dout": inputs.dout, "lse": inputs.lse}.items():
        assert record[f"{name}_stride_s_elems"] == x.strides[0] // x.itemsize
        assert record[f"{name}_stride_h_elems"] == x.strides[1] // x.itemsize
    assert record["out_is_fp32"] == is_fp32
    assert record["lse_to_log2"] == np.float32(1 if is_fp32 else math.log2(math.e))
    (sink,) = records(recorder, "sparse_backward_sink")
    assert (sink["sink_sums"], sink["d_sink"]) == (record["sink_sums"], results[2].ctypes.data)
    assert (sink["spans"], sink["h_q"]) == (1, 16)


def test_delta_is_left_to_a_main_kernel_that_can(recorder: Recorder) -> None:
    inputs = make(SparseCase(topk=70))
    backward(inputs, lse_base="2")
    assert recorder.entries == ["attention_row_lists", "sparse_backward_sm90", "sparse_backward_dkv"]
    (main,) = records(recorder, "sparse_backward_sm90")
    assert (main["out"], main["lse2"]) == (inputs.out.ctypes.data, inputs.lse.ctypes.data)
    assert main["delta"] != 0
    for name, x in (("out", inputs.out), ("lse2", inputs.lse)):
        assert main[f"{name}_stride_s_elems"] == x.strides[0] // x.itemsize
        assert main[f"{name}_stride_h_elems"] == x.strides[1] // x.itemsize
    assert main["lse2_factor"] == 1
    backward(inputs)
    assert records(recorder, "sparse_backward_sm90")[-1]["lse2_factor"] == np.float32(math.log2(math.e))


@pytest.mark.parametrize("why", ["sink", "deterministic", "float32", "odd", "dlse"])
def test_delta_comes_first_where_more_needs_it_or_out_is_another(recorder: Recorder, why: str) -> None:
    inputs = make(SparseCase(topk=70, sink=why == "sink", dlse=why == "dlse"))
    out = inputs.out
    if why == "float32":
        out = inputs.exact[0].astype(np.float32)
    elif why == "odd":
        out = np.empty((7, 16, 513), inputs.out.dtype)[..., 1:]
    arguments = (inputs.q, inputs.kv, out, *inputs.backward_arguments[3:])
    flat(mla_cupy.sparse_mla_backward)(*arguments, **inputs.backward_options, deterministic=why == "deterministic")
    (delta,), (main,) = records(recorder, "sparse_backward_delta"), records(recorder, "sparse_backward_sm90")
    assert (main["out"], main["lse2"], main["delta"]) == (0, delta["lse2"], delta["delta"])
    assert (main["lse2_stride_s_elems"], main["lse2_stride_h_elems"], main["lse2_factor"]) == (16, 1, 1)


@pytest.mark.parametrize("dkv_dtype", ["bfloat16", "float32"])
def test_dkv_goes_where_it_is_to_go(recorder: Recorder, dkv_dtype: str) -> None:
    inputs = make(SparseCase(head_axis=True))
    _, dkv, d_sink = backward(inputs, dkv_dtype=dkv_dtype)
    assert dkv.shape == inputs.kv.shape == (300, 1, 576)
    assert d_sink is None
    (record,) = records(recorder, "sparse_backward_dkv")
    wanted = {"dkv": dkv.ctypes.data, "dkv_stride_s_elems": 576, "s_kv": 300, "d_qk": 576, "num_bins": 1}
    assert {name: record[name] for name in wanted} == wanted
    assert record["dkv_is_fp32"] == (dkv_dtype == "float32")
    assert record["order"] == BACKWARD_KERNELS[recorder.entries[-2]].dkv_order


@pytest.mark.parametrize("deterministic", [False, True])
def test_memory(recorder: Recorder, deterministic: bool) -> None:
    """The results, and one workspace; what is added to is zeroed, and nothing else."""
    inputs = make(SparseCase(topk=70, sink=True))
    backward(inputs, deterministic=deterministic, stream=77)
    *results, workspace = recorder.allocations
    assert results == [(7, 16, 576), (300, 576), (16,)]
    config = configure(problem_of(inputs.case, deterministic=deterministic), H200)
    space = SPARSE_BACKWARD.workspace(config)
    assert workspace == (space.nbytes,)
    base = recorder.launches[0].params["rows"] - space.offsets["rows"]
    zeroed = space.offsets["selected"]
    assert recorder.memsets == [(base + zeroed, 0, space.nbytes - zeroed, 77)]
    assert {launch.stream for launch in recorder.launches} == {77}
    (record,) = records(recorder, "attention_row_lists")
    assert record["selected"] == (base + space.offsets["selected"] if deterministic else 0)
    recorder.allocations.clear()
    backward(
        inputs, deterministic=deterministic, dq=np.empty((7, 16, 576), inputs.q.dtype), dkv=np.empty_like(inputs.kv)
    )
    assert recorder.allocations == [(16,), workspace]


@pytest.mark.parametrize(
    "case",
    [SparseCase(s_q=0, sink=True), SparseCase(s_kv=0, sink=True), SparseCase(topk=0, sink=True)],
    ids=lambda case: case.id,
)
@pytest.mark.parametrize("deterministic", [False, True])
def test_no_grid_is_empty(recorder: Recorder, case: SparseCase, deterministic: bool) -> None:
    backward(make(case), deterministic=deterministic)
    assert recorder.launches
    assert all(min(launch.grid) > 0 for launch in recorder.launches)
    assert ("sparse_backward_dkv" in recorder.entries) == (case.s_kv > 0)
    assert recorder.entries[-1] == "sparse_backward_sink"


# ---- The pure part ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("sizes", [(1, 1, 1, 1), (7, 300, 16, 100), (4096, 32768, 128, 2048), (3, 50, 5, 0)], ids=str)
def test_workspace_is_aligned_and_does_not_overlap(sizes: tuple[int, ...], deterministic: bool) -> None:
    s_q, s_kv, h_q, topk = sizes
    problem = SparseBackwardProblem(s_q, s_kv, h_q, topk, 576, "bfloat16", has_sink=True, deterministic=deterministic)
    space = SPARSE_BACKWARD.workspace(configure(problem, H200))
    per_row = 4 * s_kv if deterministic else 0
    needs = {
        "rows": 4 * s_q * row_lists.rows_stride(topk),
        "counts": 4 * s_q,
        "lse2": 4 * s_q * h_q,
        "delta": 4 * s_q * h_q,
        "delta_bounds": 0,
        "sink_sums": 4 * -(-s_q // 8) * h_q,
        "norms": per_row,
        "extractors": 4 * (s_kv + 1) if deterministic else 0,
        "selected": per_row,
        "largest": 4 if deterministic else 0,
        "progress": 8,
        "sums": 4 * s_kv * 576 * (6 if deterministic else 1),
    }
    assert_laid_out(space, needs)


def test_lists_are_sorted_once_the_sums_do_not_fit_in_l2() -> None:
    """19 MB of sums, then 75 MB, where L2 has 50."""
    for s_kv, ordered in ((8192, False), (32768, True)):
        problem = SparseBackwardProblem(4096, s_kv, 64, 2048, 576, "bfloat16")
        assert configure(problem, H200).ordered == ordered


@pytest.mark.parametrize(("s_kv", "ordered"), [(9000, False), (40_000, True)])
def test_sorted_lists_and_blocks_in_step(recorder: Recorder, s_kv: int, ordered: bool) -> None:
    backward(make(SparseCase(s_q=2, h_q=1, s_kv=s_kv, topk=3)))
    (lists,), (main,) = records(recorder, "attention_row_lists"), records(recorder, recorder.entries[-2])
    assert lists["ordered"] == ordered
    assert (main["progress"] != 0) == ordered
    ((zeroed, _, nbytes, _),) = recorder.memsets
    assert not ordered or zeroed <= main["progress"] < zeroed + nbytes


@pytest.mark.parametrize("kernel", MAIN)
def test_additions_cover_the_heads(kernel: str) -> None:
    gpu = gpu_of(kernel)
    taken = [h_q for h_q in (1, 8, 9, 64, 65, 100, 128) if not reason_against(kernel, gpu, SparseCase(h_q=h_q))]
    assert taken
    for h_q in taken:
        problem = SparseBackwardProblem(5, 300, h_q, 64, 576, "bfloat16")
        config = configure(problem, gpu, kernel)
        assert config.kernel.additions(problem) == math.ceil(h_q / BACKWARD_KERNELS[kernel].heads_per_addition)


def test_the_generic_grid_covers_queries_and_heads() -> None:
    for s_q, h_q in ((1, 1), (3, 8), (5, 9), (4096, 128)):
        config = configure(SparseBackwardProblem(s_q, 9, h_q, 1, 512, "float16"), H200, GENERIC)
        assert config.grid == (s_q * math.ceil(h_q / 8), 1, 1)


@pytest.mark.parametrize(("cc", "aligned"), [((7, 5), True), ((8, 0), False), ((9, 0), False), ((10, 0), False)])
def test_the_generic_kernel_takes_what_no_other_can(cc: tuple[int, int], aligned: bool) -> None:
    gpu = dataclasses.replace(H200, name=f"a fake {cc}", cc=cc)
    problem = SparseBackwardProblem(5, 300, 16, 64, 576, "bfloat16", aligned=aligned)
    assert configure(problem, gpu).kernel.name == GENERIC


@pytest.mark.parametrize(
    ("cc", "smem_kb"), [((8, 0), 163), ((8, 6), 99), ((8, 7), 163), ((8, 9), 99), ((12, 0), 99), ((12, 1), 99)]
)
def test_gpus_without_wgmma_get_mma_sync(cc: tuple[int, int], smem_kb: int) -> None:
    config = configure(SparseBackwardProblem(5, 300, 33, 64, 576, "bfloat16"), fake_gpu(7, cc))
    assert config.variant.smem_kb == smem_kb
    assert config.kernel is mma.KERNEL
    assert config.grid == (5 * 2, 1, 1)


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("h_q", [16, 64, 128, 192])
@pytest.mark.parametrize("gpu", [H200, B200], ids=lambda gpu: gpu.name)
def test_the_fastest_kernel_that_fits_is_the_default(gpu: DeviceInfo, h_q: int, deterministic: bool) -> None:
    problem = SparseBackwardProblem(5, 300, h_q, 64, 576, "bfloat16", deterministic=deterministic)
    default = [name for name in MAIN if not BACKWARD_KERNELS[name].on_request]
    fits = [name for name in default if not reason_against(name, gpu, SparseCase(h_q=h_q), deterministic)]
    assert configure(problem, gpu).kernel.name == fits[0]
    assert fits[0] in (BLACKWELL if gpu is B200 else ON_HOPPER)
    assert fits[0] != GENERIC


@pytest.mark.parametrize("deterministic", [False, True])
def test_a_build_for_17_to_32_heads(deterministic: bool) -> None:
    """The Hopper kernel's build for 17 to 32 heads; its results are complete for these numbers only."""
    for h_q, max_heads in ((1, 64), (16, 64), (17, 32), (32, 32), (33, 64), (64, 64), (160, 64)):
        problem = SparseBackwardProblem(5, 300, h_q, 64, 576, "bfloat16", deterministic=deterministic)
        build = sm90.variant(problem, H200)
        assert build.max_heads == max_heads
        assert build in sm90.KERNEL.variants


def test_the_reason_for_the_plain_kernel_is_one_that_can_be_mended(caplog: pytest.LogCaptureFixture) -> None:
    """Not that other GPUs have other kernels."""
    choice._say_slow.cache_clear()
    for gpu in (H200, B200):
        caplog.clear()
        configure(SparseBackwardProblem(5, 300, 16, 64, 576, "bfloat16", aligned=False), gpu)
        assert "multiples of 16 bytes" in caplog.text


@pytest.mark.parametrize("kernel", BLACKWELL)
@pytest.mark.parametrize("d_qk", [512, 576])
def test_tensor_maps(recorder: Recorder, kernel: str, d_qk: int) -> None:
    """Single rows of kv, which are gathered; boxes of 64 heads of q, dout and dq; with the strides of the arrays."""
    recorder.gpu = B200
    inputs = make(SparseCase(h_q=100, d_qk=d_qk))
    dq, _, _ = backward(inputs, kernel=kernel)
    (launch,) = [launch for launch in recorder.launches if launch.entry == f"mla_{name_of(kernel)}"]
    assert launch.grid == (7 * 2, 1, 1)
    assert [int.from_bytes(encoded, "little") for encoded in launch.more] == [1, 2, 3, 4]
    kv, *boxes = recorder.maps
    assert (kv.base, kv.dims, kv.strides_bytes) == (inputs.kv.ctypes.data, (d_qk, 300), inputs.kv.strides[:1])
    assert kv.box == (64, 1)
    for box, x in zip(boxes, (inputs.q, inputs.dout, dq), strict=True):
        assert (box.base, box.dims) == (x.ctypes.data, x.shape[::-1])
        assert box.strides_bytes == (x.strides[1], x.strides[0])
        assert box.box == (64, 64, 1)
    assert {spec.swizzle for spec in recorder.maps} == {"128B"}
    for spec in recorder.maps:
        spec.validate()


def backwards(x: Array) -> Array:
    """An equal array with axes of size 1, and strides that no tensor map supports."""
    return np.lib.stride_tricks.as_strided(x, strides=(-2,) * (x.ndim - 1) + (2,))


@pytest.mark.parametrize("kernel", BLACKWELL)
def test_tensor_maps_of_axes_of_size_one_and_of_nothing(recorder: Recorder, kernel: str) -> None:
    """Whatever strides such arrays have, and wherever they are."""
    recorder.gpu = B200
    for case in (SparseCase(s_q=1, s_kv=1, h_q=1, topk=3), SparseCase(s_q=2, s_kv=0, h_q=1, topk=3)):
        recorder.maps.clear()
        inputs = make(case)
        q, kv = (backwards(x) if x.shape[0] == 1 else x for x in (inputs.q, inputs.kv))
        mla_cupy.sparse_mla_backward(q, kv, *inputs.backward_arguments[2:], kernel=kernel, scale=inputs.scale)
        assert len(recorder.maps) == 4
        for spec in recorder.maps:
            spec.validate()


def test_too_many_slots_to_be_counted() -> None:
    fits = SparseBackwardProblem(2**20 - 1, 300, 8, 4096, 576, "bfloat16", deterministic=True)
    configure(fits, H200, GENERIC)
    for more in ({"s_q": 2**20}, {"h_q": 9}):
        with pytest.raises(ArgumentError, match=r"s_q \* topk \* . = .*less than 2\^32"):
            configure(dataclasses.replace(fits, **more), H200, GENERIC)
    configure(dataclasses.replace(fits, h_q=128, deterministic=False), H200, GENERIC)
