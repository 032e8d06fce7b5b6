"""`mla-cupy demo`: decode a ragged batch of DeepSeek-V3's shape and check it against the oracle."""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

import mla_cupy
from mla_cupy import formats, reference
from mla_cupy.errors import ArgumentError, KernelCompileError, explain
from mla_cupy.runtime import device, nvrtc

H_Q, D_QK, D_V, PAGE_SIZE = 128, 576, 512, 64
HOST_LENGTHS = (0, 1, 65, 700)
GPU_BATCH, GPU_LONGEST = 64, 8192
ARCH_WITHOUT_GPU = "sm_90a"
CALLS, REPLAYS = 8, 24
HALF_UNIT = {"bfloat16": 1.001 * 2.0**-8, "float16": 1.001 * 2.0**-11}
"""Of the last place, relative, and a little more: the backend rounds by way of float32."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `mla-cupy demo`."""
    parser.add_argument("--dtype", choices=("bfloat16", "float16"), default="bfloat16", help="default: %(default)s")
    parser.add_argument("--seed", type=int, default=0, help="of the random inputs (default: %(default)s)")
    parser.add_argument("--no-compile", action="store_true", help="without a GPU: do not compile the kernels")
    parser.add_argument(
        "-j", "--jobs", type=int, default=os.cpu_count() or 1, metavar="N", help="compilations at a time"
    )


def run(args: argparse.Namespace) -> int:
    """Run the demo on the GPU if there is one, else on NumPy; returns 0, or 1 if a result is wrong."""
    return _on_gpu(args) if device.gpu_count() else _on_host(args)


def bench_module(name: str) -> Any:
    """A module of the benches: they are a part of the installed package, and a directory beside it in a checkout."""
    if importlib.util.find_spec("mla_cupy.bench") is not None:
        return importlib.import_module(f"mla_cupy.bench.{name}")
    checkout = Path(__file__).resolve().parents[1]
    if not (checkout / "bench" / "cli.py").is_file():
        raise ArgumentError(explain("bench", "no benches", "an installed package or a checkout"))
    if str(checkout) not in sys.path:
        sys.path.insert(0, str(checkout))
    return importlib.import_module(f"bench.{name}")


# -- without a GPU ---------------------------------------------------------------------------------------------------


def _on_host(args: argparse.Namespace) -> int:
    """The same call on NumPy arrays, then every kernel compiled for a GPU that is not here."""
    print("No GPU here: the NumPy backend computes, and the kernels are only compiled.")
    rng = np.random.default_rng(args.seed)
    dtype = formats.numpy_dtype(args.dtype)
    lengths = np.asarray(HOST_LENGTHS, np.int32)
    max_pages = -(-int(lengths.max()) // PAGE_SIZE)
    pages = rng.permutation(len(lengths) * max_pages).astype(np.int32)
    q = rng.standard_normal((len(lengths), 1, H_Q, D_QK), np.float32).astype(dtype)
    kv_cache = rng.standard_normal((pages.size, PAGE_SIZE, 1, D_QK), np.float32).astype(dtype)
    block_table = pages.reshape(len(lengths), max_pages)
    _describe(len(lengths), lengths, args.dtype)

    out, lse = mla_cupy.mla_decode(q, kv_cache, block_table, lengths)
    right = _is_oracle(out, lse, q, kv_cache, block_table, lengths)
    print(f"Result: {'that of' if right else 'DIFFERENT FROM'} the float64 oracle, rounded to {args.dtype}.")
    if not args.no_compile:
        right &= _compile(args.jobs)
    return 0 if right else 1


def _is_oracle(out: Any, lse: Any, *arguments: Any) -> bool:
    """Whether out and lse are the oracle's, up to the rounding of their own dtypes."""
    want_out, want_lse = reference.mla_decode(*arguments)
    close = (
        np.abs(out.astype(np.float64) - want_out) <= HALF_UNIT[formats.dtype_name(out.dtype)] * np.abs(want_out).max()
    )
    return bool(close.all()) and np.allclose(lse, want_lse, rtol=1e-6, atol=1e-6)


def _compile(jobs: int) -> bool:
    """Compiles every kernel and prints what ptxas says of it; False if one does not compile."""
    from mla_cupy import cli

    try:
        nvrtc.find_nvrtc()
    except KernelCompileError as error:
        print(f"The kernels cannot be compiled here: {error}")
        return True
    print(f"\nEvery kernel for {ARCH_WITHOUT_GPU}, compiled here or read from the cache:")
    return cli.main(["compile", "--arch", ARCH_WITHOUT_GPU, "--jobs", str(max(1, jobs))]) == 0


# -- on a GPU --------------------------------------------------------------------------------------------------------


def _on_gpu(args: argparse.Namespace) -> int:
    """Decodes, checks a sample of the rows, and only then times; the cache is far larger than the L2."""
    cases, check, inputs, limits = (bench_module(name) for name in ("cases", "check", "inputs", "limits"))
    gpu = bench_module("device").CudaDevice()
    case = cases.DecodeCase(b=GPU_BATCH, s_q=1, h_q=H_Q, s_kv=GPU_LONGEST)
    with gpu.current():
        batch = _ragged(gpu, gpu.inputs(case, args.dtype, args.seed), args.seed)
        _describe(case.b, batch.host_seqlens, args.dtype)
        results = inputs.Outputs(
            gpu.empty(inputs.out_shape(case), args.dtype), gpu.empty(inputs.lse_shape(case), "float32")
        )
        plan = mla_cupy.plan_decode(
            max_b=case.b, s_q=1, h_q=H_Q, max_pages=case.max_pages, page_size=PAGE_SIZE, dtype=args.dtype
        )
        plan.update(batch.seqlens)

        def decode() -> None:
            arrays = batch.q, batch.kv_cache, batch.block_table, batch.seqlens
            mla_cupy.mla_decode(*arrays, plan=plan, out=results.out, lse=results.lse)

        decode()
        verdict = check.judge(check.expect(case, args.dtype, batch, gpu), results, args.dtype, gpu)
        print(f"Checked {verdict.sampled_rows} rows against the float64 oracle: {verdict.reason or 'right'}")
        print(f"  largest error of out {verdict.out_max:.2e}, tolerance {verdict.out_tolerance:.2e}")
        if not verdict.ok:
            return 1
        _print_speed(gpu, decode, int(batch.host_seqlens.sum()), limits.measure(gpu))
    return 0


def _ragged(gpu: Any, batch: Any, seed: int) -> Any:
    """The same inputs with a length of its own for each sequence; the first one is empty."""
    lengths = np.random.default_rng(seed).integers(1, GPU_LONGEST + 1, GPU_BATCH).astype(np.int32)
    lengths[0] = 0
    return replace(batch, seqlens=gpu.upload(lengths), host_seqlens=lengths)


def _print_speed(gpu: Any, decode: Any, tokens: int, limits: Any) -> None:
    costs, timer = bench_module("costs"), bench_module("timer")
    samples = timer.sample(gpu.clock(), gpu.recorder().record([decode] * CALLS), CALLS, REPLAYS, warmup=3)
    timing = timer.summarise(samples, CALLS)
    us = timing.us_median
    # The cost of one sequence that is as long as all of them together, with the queries of all.
    cost = costs.Cost(
        flops=2 * H_Q * tokens * (D_QK + D_V), nbytes=2 * (tokens * D_QK + GPU_BATCH * H_Q * (D_QK + D_V))
    )
    print(
        f"{gpu.name}: {us:.1f} us (spread {timing.spread:.1%}), {cost.tflops(us):.0f} TFLOP/s, {cost.tbps(us):.2f} TB/s"
    )
    least = costs.roofline_us(cost, limits.gemm_tflops, limits.copy_tbps)
    if least:
        print(f"  {least / us:.0%} of the roofline at the limits measured just now:")
    print(f"  copy {_rate(limits.copy_tbps)} TB/s ({limits.copy_note})")
    print(f"  GEMM {_rate(limits.gemm_tflops)} TFLOP/s ({limits.gemm_note})")


def _rate(value: float | None) -> str:
    return "unknown" if value is None else f"{value:.4g}"


def _describe(b: int, lengths: Any, dtype: str) -> None:
    print(
        f"Decode of {b} sequences of {lengths.min()} to {lengths.max()} tokens, {H_Q} heads, {D_QK}/{D_V}, "
        f"pages of {PAGE_SIZE}, {dtype}."
    )
