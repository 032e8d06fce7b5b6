"""`mla-cupy demo`: decode a ragged batch of DeepSeek-V3's shape and check it against the oracle."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

import mla_cupy
from mla_cupy import dtypes, reference
from mla_cupy.errors import KernelCompileError
from mla_cupy.parts import part
from mla_cupy.runtime import device, nvrtc

H_Q, D_QK, D_V, PAGE_SIZE = 128, 576, 512, 64
HOST_LENGTHS = (0, 1, 65, 700)
GPU_BATCH, GPU_LONGEST = 64, 8192
ARCH_WITHOUT_GPU = "sm_90a"
CALLS, REPLAYS = 8, 24
HALF_UNIT = {"bfloat16": 1.001 * 2.0**-8, "float16": 1.001 * 2.0**-11}
"""Relative unit in the last place, and a little more: the backend rounds by way of float32."""

CompileKernels = Callable[[str, int], bool]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `mla-cupy demo`."""
    parser.add_argument("--dtype", choices=("bfloat16", "float16"), default="bfloat16", help="default: %(default)s")
    parser.add_argument("--seed", type=int, default=0, help="of the random inputs (default: %(default)s)")
    parser.add_argument("--no-compile", action="store_true", help="without a GPU: do not compile the kernels")
    parser.add_argument(
        "-j", "--jobs", type=int, default=os.cpu_count() or 1, metavar="N", help="compilations at a time"
    )


def run(args: argparse.Namespace, compile_kernels: CompileKernels) -> int:
    """Run the demo on the GPU if there is one, else on NumPy.

    Parameters
    ----------
    args : argparse.Namespace
        The options of `add_arguments`.
    compile_kernels : callable
        Takes a target and how many kernels to compile at a time; compiles every kernel for it, prints what became of
        them, and returns whether all compiled. Without a GPU only.

    Returns
    -------
    int
        0, or 1 if a result is wrong or a kernel does not compile.
    """
    return _on_gpu(args) if device.gpu_count() else _on_host(args, compile_kernels)


# -- without a GPU ---------------------------------------------------------------------------------------------------


def _on_host(args: argparse.Namespace, compile_kernels: CompileKernels) -> int:
    """The same call on NumPy arrays, then every kernel compiled for a GPU that is not here."""
    print("No GPU here: the NumPy backend computes, and the kernels are only compiled.")
    rng = np.random.default_rng(args.seed)
    dtype = dtypes.numpy_dtype(args.dtype)
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
        right &= _compile(args.jobs, compile_kernels)
    return 0 if right else 1


def _is_oracle(out: Any, lse: Any, *arguments: Any) -> bool:
    """Whether out and lse are the oracle's, up to the rounding of their own dtypes."""
    want_out, want_lse = reference.mla_decode(*arguments)
    close = (
        np.abs(out.astype(np.float64) - want_out) <= HALF_UNIT[dtypes.dtype_name(out.dtype)] * np.abs(want_out).max()
    )
    return bool(close.all()) and np.allclose(lse, want_lse, rtol=1e-6, atol=1e-6)


def _compile(jobs: int, compile_kernels: CompileKernels) -> bool:
    """Compile every kernel; False if one does not compile, which the lack of a compiler is not."""
    try:
        nvrtc.find_nvrtc()
    except KernelCompileError as error:
        print(f"The kernels cannot be compiled here: {error}")
        return True
    print(f"\nEvery kernel for {ARCH_WITHOUT_GPU}, compiled here or read from the cache.")
    print("The first time this takes minutes; --no-compile leaves it out.")
    return compile_kernels(ARCH_WITHOUT_GPU, max(1, jobs))


# -- on a GPU --------------------------------------------------------------------------------------------------------


def _on_gpu(args: argparse.Namespace) -> int:
    """Decodes, checks a sample of the rows, and only then times; the cache is far larger than the L2."""
    cases, check, inputs = (_bench(f"ops.decode.{name}") for name in ("cases", "check", "inputs"))
    gpu, limits = _bench("core.device").CudaDevice(), _bench("core.limits")
    case = cases.DecodeCase(b=GPU_BATCH, s_q=1, h_q=H_Q, s_kv=GPU_LONGEST)
    with gpu.current():
        batch = _ragged(gpu, inputs.make_inputs(case, args.dtype, args.seed, gpu), args.seed)
        _describe(case.b, batch.host_seqlens, args.dtype)
        results = inputs.make_outputs(case, args.dtype, gpu)
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
    cost, timer = _bench("core.cost"), _bench("core.timer")
    samples = timer.sample(gpu.clock(), gpu.recorder().record([decode] * CALLS), CALLS, REPLAYS, warmup=3)
    timing = timer.summarise(samples, CALLS)
    us = timing.us_median
    # The cost of one sequence that is as long as all of them together, with the queries of all.
    work = cost.Cost(flops=2 * H_Q * tokens * (D_QK + D_V), nbytes=2 * (tokens * D_QK + GPU_BATCH * H_Q * (D_QK + D_V)))
    print(
        f"{gpu.name}: {us:.1f} us (spread {timing.spread:.1%}), {work.tflops(us):.0f} TFLOP/s, {work.tbps(us):.2f} TB/s"
    )
    least = cost.roofline_us(work, limits.gemm_tflops, limits.copy_tbps)
    if least:
        print(f"  {least / us:.0%} of the roofline at the limits measured just now:")
    print(f"  copy {_rate(limits.copy_tbps)} TB/s ({limits.copy_note})")
    print(f"  GEMM {_rate(limits.gemm_tflops)} TFLOP/s ({limits.gemm_note})")


def _bench(name: str) -> Any:
    """A module of the benchmarks."""
    return part("bench", "bench", name)


def _rate(value: float | None) -> str:
    return "unknown" if value is None else f"{value:.4g}"


def _describe(b: int, lengths: Any, dtype: str) -> None:
    print(
        f"Decode of {b} sequences of {lengths.min()} to {lengths.max()} tokens, {H_Q} heads, {D_QK}/{D_V}, "
        f"pages of {PAGE_SIZE}, {dtype}."
    )
