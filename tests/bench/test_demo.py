"""`mla-cupy demo` without a GPU, and its GPU half on the NumPy device."""

from __future__ import annotations

import argparse

import numpy as np
import pytest

import mla_cupy
from bench.core.limits import Limits
from mla_cupy import demo, reference
from mla_cupy.parts import part


def options(*arguments):
    parser = argparse.ArgumentParser()
    demo.add_arguments(parser)
    return parser.parse_args(arguments)


def oracle(q, *arguments, plan=None, out=None, lse=None):
    """The public call, computed by the oracle."""
    values = reference.mla_decode(q, *arguments)
    results = values[0].astype(q.dtype), values[1].astype(np.float32)
    if out is None:
        return results
    out[...], lse[...] = results
    return out, lse


def off_by_one_key(q, cache, table, seqlens, **rest):
    return oracle(q, cache, table, np.maximum(seqlens - 1, 0), **rest)


def not_compiled(arch, jobs):
    pytest.fail("compiled")


@pytest.fixture
def no_gpu(monkeypatch):
    monkeypatch.setattr(demo.device, "gpu_count", lambda: 0)
    monkeypatch.setenv("MLA_CUPY_BACKEND", "numpy")


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_without_a_gpu(no_gpu, capsys, dtype):
    assert demo.run(options("--no-compile", "--dtype", dtype), not_compiled) == 0
    text = capsys.readouterr().out
    assert "No GPU" in text
    assert "that of the float64 oracle" in text


def test_a_wrong_result_without_a_gpu(no_gpu, capsys, monkeypatch):
    monkeypatch.setattr(mla_cupy, "mla_decode", off_by_one_key)
    assert demo.run(options("--no-compile"), not_compiled) == 1
    assert "DIFFERENT" in capsys.readouterr().out


@pytest.mark.parametrize("works", [True, False])
def test_kernels_are_compiled_and_a_failure_counts(no_gpu, monkeypatch, works):
    asked = []
    monkeypatch.setattr(mla_cupy, "mla_decode", oracle)
    monkeypatch.setattr(demo.nvrtc, "find_nvrtc", lambda: "libnvrtc.so")
    assert demo.run(options("-j", "3"), lambda arch, jobs: asked.append((arch, jobs)) or works) == (0 if works else 1)
    assert asked == [("sm_90a", 3)]


def test_without_nvrtc_it_says_so(no_gpu, monkeypatch, capsys):
    def missing():
        raise demo.KernelCompileError("no NVRTC; run pip install something")

    monkeypatch.setattr(mla_cupy, "mla_decode", oracle)
    monkeypatch.setattr(demo.nvrtc, "find_nvrtc", missing)
    assert demo.run(options(), not_compiled) == 0
    assert "pip install something" in capsys.readouterr().out


@pytest.mark.parametrize("decode", [oracle, off_by_one_key])
def test_the_gpu_half(monkeypatch, capsys, device, decode):
    class Plan:
        updates = 0

        def update(self, seqlens):
            Plan.updates += 1

    def timed(*arguments, **results):
        device.watch.now_us += 12.5
        return decode(*arguments, **results)

    monkeypatch.setattr(demo.device, "gpu_count", lambda: 1)
    monkeypatch.setattr(demo, "H_Q", 4)
    monkeypatch.setattr(demo, "GPU_BATCH", 5)
    monkeypatch.setattr(demo, "GPU_LONGEST", 200)
    monkeypatch.setattr(part("bench", "bench", "core.device"), "CudaDevice", lambda: device)
    monkeypatch.setattr(
        part("bench", "bench", "core.limits"), "measure", lambda gpu: Limits(4.0, None, "given", "no cuBLAS")
    )
    monkeypatch.setattr(mla_cupy, "plan_decode", lambda **sizes: Plan())
    monkeypatch.setattr(mla_cupy, "mla_decode", timed)
    right = decode is oracle
    assert demo.run(options(), not_compiled) == (0 if right else 1)
    assert Plan.updates == 1
    text = capsys.readouterr().out
    assert ("right" in text) == right
    assert ("12.5 us" in text) == right, "a wrong result is not timed"
    assert ("no cuBLAS" in text) == right
    assert "0 to" in text, "the batch has an empty sequence"
