"""Run kernels of other projects in the simulator, unmodified and with its default rules, and compare the results.

Their sources are no part of this repository. Check them out side by side, then name that directory::

    git clone https://github.com/Dao-AILab/flash-attention && git -C flash-attention checkout 0251105
    git clone https://github.com/NVIDIA/cutlass && git -C cutlass checkout 7107b05
    git clone https://github.com/bitsandbytes-foundation/bitsandbytes && git -C bitsandbytes checkout 95f9af3
    python foreign/run.py --sources . --build /tmp/foreign

It needs nvcc 13 and a C compiler, and takes about ten minutes, most of it nvcc.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

import numpy as np

import ptxsim
from ptxsim.host.command import run_program
from ptxsim.host.session import Settings
from ptxsim.testing import MODES

HERE = Path(__file__).parent
NVCC = ("nvcc", "-std=c++17", "-arch=sm_90a", "-lineinfo", "--expt-relaxed-constexpr", "--expt-extended-lambda")
ATTENTION = ((64, 64, 0), (64, 64, 1), (128, 128, 0), (128, 128, 1), (192, 128, 0), (192, 128, 1))
"""Columns of K and of V, and whether the mask is causal."""
LENGTHS = (("192", "192", "1"), ("200", "300", "2"))
"""Queries, keys and heads: whole tiles, and ragged ones."""


def attention_program(sources: Path, build: Path, head: int, head_v: int, causal: int) -> Path:
    """Compile FlashAttention-3's forward with the host program beside this file."""
    program = build / f"attention_{head}_{head_v}_{causal}"
    stub = build / "libcuda.so"  # to link with; the simulator's own takes its place
    code = b"void cuTensorMapEncodeTiled(void) {}"
    make_stub = ["cc", "-shared", "-fPIC", "-x", "c", "-", "-Wl,-soname,libcuda.so.1", "-o", str(stub)]
    subprocess.run(make_stub, input=code, check=True)
    if not program.exists():
        headers = ["-I", str(sources / "flash-attention/hopper"), "-I", str(sources / "cutlass/include")]
        defines = ["-DNDEBUG", f"-DHEAD={head}", f"-DHEAD_V={head_v}", f"-DCAUSAL={causal}"]
        source = str(HERE / "flash_attention_3.cu")
        link = ["-cudart", "shared", "-L", str(build), "-lcuda", "-o", str(program)]
        subprocess.run([*NVCC, *headers, *defines, source, *link], check=True)
    return program


def attention(sources: Path, build: Path) -> int:
    """Run FlashAttention-3's forward kernels; return how many runs failed."""
    failed = 0
    for head, head_v, causal in ATTENTION:
        program = attention_program(sources, build, head, head_v, causal)
        for lengths in LENGTHS:
            for mode, seed in MODES:
                print(f"FlashAttention-3, {head}/{head_v}, causal {causal}, {lengths}, {mode} {seed}", flush=True)
                settings = Settings(2, 90, True, {"mode": mode, "seed": seed}, None, True)
                failed += run_program([str(program), *lengths], settings) != 0
    return failed


def product_4bit(sources: Path, build: Path) -> int:
    """Run bitsandbytes' product of a vector with a matrix of 4-bit codes; return how many runs failed."""
    ptx, csrc = build / "bitsandbytes.ptx", sources / "bitsandbytes/csrc"
    if not ptx.exists():
        subprocess.run([*NVCC, "-I", str(csrc), "-ptx", str(csrc / "kernels.cu"), "-o", str(ptx)], check=True)
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
    runs = {"attention": attention, "product_4bit": product_4bit}
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("kernels", nargs="*", help=f"of {', '.join(runs)} (default: all)")
    parser.add_argument("--sources", type=Path, required=True, help="directory of the projects' checkouts")
    parser.add_argument("--build", type=Path, required=True, help="directory for what nvcc writes")
    options = parser.parse_args()
    options.build.mkdir(parents=True, exist_ok=True)
    failed = sum(runs[each](options.sources, options.build) for each in options.kernels or runs)
    print(f"{failed} runs failed")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
