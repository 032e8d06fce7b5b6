"""`which` tells the kernels of a call on any GPU, and why others do not run."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

import mla_cupy
from mla_cupy import simulation
from mla_cupy.errors import ArgumentError, ShapeError, UnsupportedDeviceError
from mla_cupy.kernels.decode.pipeline import DECODE
from mla_cupy.kernels.gpus import GPUS, described, gpu_of
from mla_cupy.runtime.device import TARGETS

SCALE = 192**-0.5
TABLE, SEQLENS = np.array([[3, 1], [0, 2]], np.int32), np.array([70, 5], np.int32)


def which(arch: str, h_q: int = 16, kernel: str | None = None) -> mla_cupy.KernelChoice:
    q, cache = np.empty((2, 1, h_q, 576), np.float16), np.empty((4, 64, 1, 576), np.float16)
    return mla_cupy.which(mla_cupy.mla_decode, q, cache, TABLE, SEQLENS, scale=SCALE, kernel=kernel, arch=arch)


@pytest.mark.parametrize(
    ("arch", "kernel"),
    [("sm_90a", "decode_sm90_small_cluster8"), ("sm_89", "attention_mma_small"), ("sm_75", "attention_generic")],
)
def test_each_gpu_has_its_kernel(arch: str, kernel: str) -> None:
    choice = which(arch)
    assert (choice.kernel, choice.arch, choice.has_run) == (kernel, arch, arch == "sm_90a")
    assert kernel in {launch.kernel for launch in choice.launches}
    assert {kernel, *choice.passed_over} == {spec.name for spec in DECODE.kernels}


def test_it_tells_what_a_call_then_runs() -> None:
    q, cache = np.zeros((2, 1, 16, 576), np.float16), np.zeros((4, 64, 1, 576), np.float16)
    with simulation.simulated() as gpu:
        mla_cupy.mla_decode(q, cache, TABLE, SEQLENS, scale=SCALE, kernel="attention_mma_small")
    choice = which("sm_90a", kernel="attention_mma_small")
    assert [f"mla_{launch.kernel}" for launch in choice.launches] == [name.partition("-")[0] for name in gpu.launched]


def test_reasons() -> None:
    reasons = which("sm_90a", 128).passed_over
    assert reasons["decode_sm100"] == "needs compute capability 10.0 or 10.3, H200 has 9.0"
    assert reasons["attention_mma_small"] == "fits, but another is preferred for this size"
    assert reasons["attention_generic"] == "fits, but comes later in the order of preference"
    assert reasons["decode_sm90_records"].startswith("reads a cache of FP8 records")
    assert "has never run on hardware" in which("sm_100a", 128).passed_over["decode_sm100"]
    named = which("sm_90a", 128, "attention_generic")
    assert named.kernel == "attention_generic"
    assert named.passed_over["decode_sm90_seesaw"] == "fits, but the call names attention_generic"


def test_kernels_that_wait_have_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLA_CUPY_ADMISSION", "all")
    choice = which("sm_100a", 128)
    assert choice.kernel.startswith("decode_sm100")
    assert not choice.has_run


def test_resources_are_those_of_the_build() -> None:
    q, cache = np.zeros((2, 1, 16, 576), np.float16), np.zeros((4, 64, 1, 576), np.float16)
    with simulation.simulated():
        mla_cupy.mla_decode(q, cache, TABLE, SEQLENS, scale=SCALE)
    for launch in which("sm_90a").launches:
        assert launch.registers is None or launch.registers <= 255
        assert (launch.registers is None) == (launch.smem_bytes is None)


def test_bad_questions_raise() -> None:
    with pytest.raises(ArgumentError, match="arch: got 'sm_42', expected one of sm_75"):
        which("sm_42")
    with pytest.raises(ArgumentError, match="an operation of mla_cupy"):
        mla_cupy.which(print)
    with pytest.raises(UnsupportedDeviceError, match=r"needs compute capability 9\.0"):
        which("sm_80", kernel="decode_sm90_seesaw")
    with pytest.raises(ShapeError):
        mla_cupy.which(mla_cupy.mla_decode, TABLE, TABLE, TABLE, SEQLENS, scale=SCALE)


def test_every_target_has_a_gpu() -> None:
    for arch in TARGETS:
        assert gpu_of(arch).info.arch == arch
    assert gpu_of("sm_90a").name == "H200"


def test_a_gpu_of_this_machine_has_the_rates_of_its_model() -> None:
    for model in GPUS:
        info = replace(model.info, name=f"NVIDIA {model.name} 80GB HBM3")
        assert described(info).tbps == model.tbps
    assert described(replace(GPUS[0].info, name="NVIDIA GH100")).tbps is None
