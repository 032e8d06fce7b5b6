"""Run kernels of other projects in the simulator, unmodified, and compare the results with double precision.

Their sources are no part of this repository. Check them out side by side, then name that directory::

    git clone https://github.com/Dao-AILab/flash-attention && git -C flash-attention checkout 0251105
    git clone https://github.com/NVIDIA/cutlass && git -C cutlass checkout 7107b05
    git clone https://github.com/flashinfer-ai/flashinfer && git -C flashinfer checkout fb28d72
    git clone https://github.com/bitsandbytes-foundation/bitsandbytes && git -C bitsandbytes checkout 95f9af3
    pip install --target cccl nvidia-cuda-cccl==13.3.5.0.6
    python foreign/run.py --sources . --build /tmp/foreign

It needs nvcc 13 and a C compiler. nvcc takes about a minute for each of the programs, their runs ten seconds.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import numpy as np

import ptxsim
from ptxsim.host.command import run_program
from ptxsim.host.session import Settings
from ptxsim.testing import MODES

HERE = Path(__file__).parent
PTX_ALONE = ("-gencode", "arch=compute_90a,code=compute_90a")
NVCC = ("nvcc", "-std=c++17", *PTX_ALONE, "-lineinfo", "--expt-relaxed-constexpr", "--expt-extended-lambda")
LENGTHS = (("192", "192", "1"), ("200", "300", "2"))
"""Queries, keys and heads: whole tiles, and ragged ones."""

STUBS = {
    "c10/cuda/CUDAException.h": "#define C10_CUDA_CHECK(call) do { if (call) abort(); } while (0)\n"
    "#define C10_CUDA_KERNEL_LAUNCH_CHECK() C10_CUDA_CHECK(cudaGetLastError())\n",
    "ATen/cuda/PhiloxCudaState.h": "namespace at { struct PhiloxCudaState {}; }\n"
    "namespace at::cuda::philox { __device__ inline std::pair<long, long> unpack(PhiloxCudaState) { return {}; } }\n",
    "ATen/cuda/detail/UnpackRaw.cuh": "",
    "cublasLt.h": "enum cublasStatus_t { CUBLAS_STATUS_SUCCESS };\n"
    "using cublasHandle_t = void*;\nusing cublasLtHandle_t = void*;\n"
    "using cublasLtMatmulDesc_t = void*;\nusing cublasLtMatrixLayout_t = void*;\n"
    "inline int cublasCreate_v2(void**) { return 0; }\ninline int cublasLtCreate(void**) { return 0; }\n",
    "cublas_v2.h": '#include "cublasLt.h"\n',
}
"""Stand-ins for headers: of PyTorch, for FlashAttention-2's checks and dropout, and of cuBLAS, for bitsandbytes."""


@dataclass(frozen=True)
class Program:
    """A host program beside this file, compiled with macros.

    Attributes
    ----------
    source : str
        Its name, without ``.cu``.
    headers : tuple of str
        Directories to include from, below the checkouts.
    macros : dict
        What selects the kernel.
    lengths : tuple
        Command lines of its runs.
    allow : tuple of str
        Rules that the published kernel breaks.
    """

    source: str
    headers: tuple[str, ...]
    macros: dict[str, int] = field(default_factory=dict)
    lengths: tuple[tuple[str, ...], ...] = LENGTHS
    allow: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """Name it by its source and its macros."""
        return "_".join([self.source, *(f"{key.lower()}{value}" for key, value in self.macros.items())])

    def compile(self, sources: Path, build: Path) -> Path:
        """Compile the program, unless that is done, and return its path."""
        program = build / self.name
        if not program.exists():
            headers = [f"-I{build / 'stubs'}", *(f"-I{sources / each}" for each in self.headers)]
            macros = [f"-D{key}={value}" for key, value in self.macros.items()]
            link = ["-cudart", "shared", f"-L{build}", "-lcuda", "-o", str(program)]
            subprocess.run([*NVCC, "-DNDEBUG", *headers, *macros, HERE / f"{self.source}.cu", *link], check=True)
        return program


_FLASH_3 = ("flash-attention/hopper", "cutlass/include")
_FLASH_2 = ("flash-attention/csrc/flash_attn/src", "cutlass/include")
_CCCL = "cccl/nvidia/cu13/include/cccl"
_FLASHINFER = (_CCCL, "flashinfer/include")


def _forward(head: int, head_v: int, causal: int, cluster: int = 1) -> Program:
    macros = {"HEAD": head, "HEAD_V": head_v, "CAUSAL": causal, "CLUSTER": cluster}
    return Program("flash_attention_3", _FLASH_3, macros)


def _backward(head: int, causal: int, rows: int, swap_dq: int, warpgroups_dq: int, deterministic: int = 0) -> Program:
    """Return FlashAttention-3's backward.

    Its last kernel starts a bulk copy with an mbarrier that no fence has published: a true report.
    """
    tiles = {"ROWS": rows, "KEYS": 128, "SWAP_DQ": swap_dq, "WARPGROUPS_DQ": warpgroups_dq}
    macros = {"HEAD": head, "CAUSAL": causal, **tiles, "DETERMINISTIC": deterministic}
    return Program("flash_attention_3_backward", _FLASH_3, macros, allow=("mbarrier-init-fence",))


PROGRAMS = {
    "flash_attention_3": (
        _forward(64, 64, 0),
        _forward(64, 64, 1),
        _forward(128, 128, 0),
        _forward(128, 128, 0, cluster=2),
        _forward(128, 128, 1),
        _forward(192, 128, 0),
        _forward(192, 128, 0, cluster=2),
        _forward(192, 128, 1),
    ),
    "flash_attention_3_backward": (
        _backward(64, 0, 128, 0, 2),
        _backward(64, 1, 128, 0, 2),
        _backward(64, 0, 128, 0, 2, deterministic=1),
        _backward(128, 0, 80, 1, 1),
        _backward(128, 1, 64, 0, 1),
    ),
    "flash_attention_2": tuple(
        Program("flash_attention_2", _FLASH_2, {"HEAD": head, "CAUSAL": causal}) for head, causal in ((64, 1), (128, 0))
    ),
    "flashinfer_prefill": tuple(
        Program("flashinfer_prefill", _FLASHINFER, {"HEAD": head, "CAUSAL": causal})
        for head, causal in ((64, 1), (128, 0))
    ),
    "cub_scan": (Program("cub_scan", (_CCCL,), lengths=(("1000",), ("5000",))),),
}
"""Host programs by the source that they are compiled from."""


def prepare(build: Path) -> None:
    """Write what the programs are compiled and linked with."""
    build.mkdir(parents=True, exist_ok=True)
    for name, text in STUBS.items():
        stub = build / "stubs" / name
        stub.parent.mkdir(parents=True, exist_ok=True)
        stub.write_text(f"#pragma once\n{text}")
    code = b"void cuTensorMapEncodeTiled(void) {}"  # to link with; the simulator's own library takes its place
    library = ["-Wl,-soname,libcuda.so.1", "-o", str(build / "libcuda.so")]
    subprocess.run(["cc", "-shared", "-fPIC", "-x", "c", "-", *library], input=code, check=True)


def programs(source: str, sources: Path, build: Path) -> int:
    """Run the host programs of a source in every mode; return how many runs failed."""
    failed = 0
    for each in PROGRAMS[source]:
        path = each.compile(sources, build)
        for lengths in each.lengths:
            for mode, seed in MODES:
                print(f"{each.name} {' '.join(lengths)}, {mode} {seed}", flush=True)
                options = {"mode": mode, "seed": seed, "allow": each.allow}
                failed += run_program([str(path), *lengths], Settings(2, 90, True, options, None, True)) != 0
    return failed


def product_4bit(sources: Path, build: Path) -> int:
    """Run bitsandbytes' product of a vector with a matrix of 4-bit codes; return how many runs failed."""
    ptx, csrc = build / "bitsandbytes.ptx", sources / "bitsandbytes/csrc"
    if not ptx.exists():
        subprocess.run(
            [*NVCC, f"-I{build / 'stubs'}", "-I", str(csrc), "-ptx", str(csrc / "kernels.cu"), "-o", str(ptx)],
            check=True,
        )
    module = ptxsim.Module(ptx.read_text())
    (name,) = (each for each in module.kernels if "kgemm_4bit_inference_naiveIf" in each)
    failed = 0
    for rows, columns, block in ((8, 256, 64), (4, 1056, 32)):
        rng = np.random.default_rng(columns)
        table, x = rng.standard_normal(16).astype("f4"), rng.standard_normal(columns).astype("f4")
        codes = rng.integers(0, 256, (rows, columns // 2)).astype("u1")
        scale = rng.random(rows * columns // block).astype("f4")
        pairs = np.stack([codes >> 4, codes & 15], -1).reshape(rows, columns)
        want = (table[pairs] * scale.repeat(block).reshape(rows, columns)).astype("f8") @ x
        for mode, seed in MODES:
            out = np.zeros(rows, "f4")
            args = [rows, 1, columns, x, codes, scale, table, out, 1, columns // 2, 1, block]
            module.launch(name, -(-rows // 4), 128, args, mode=mode, seed=seed)
            print(f"bitsandbytes, {rows} x {columns}, {mode} {seed}: largest error {np.abs(out - want).max():.1e}")
            failed += not np.allclose(out, want, rtol=1e-4, atol=1e-4)
    return failed


def main() -> int:
    """Run all, or the projects that are named; return 1 if a result is wrong or something was reported."""
    runs = {**{source: partial(programs, source) for source in PROGRAMS}, "product_4bit": product_4bit}
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("kernels", nargs="*", help=f"of {', '.join(runs)} (default: all)")
    parser.add_argument("--sources", type=Path, required=True, help="directory of the projects' checkouts")
    parser.add_argument("--build", type=Path, required=True, help="directory for what nvcc writes")
    options = parser.parse_args()
    prepare(options.build)
    failed = sum(runs[each](options.sources, options.build) for each in options.kernels or runs)
    print(f"{failed} runs failed")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
