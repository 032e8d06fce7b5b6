"""The Triton kernels of the files beside this; ``python kernels.py``, with Triton installed, compiles them anew.

Of the description that Triton writes, what a launch needs is kept; of the PTX all but its debug sections.
"""

from __future__ import annotations

import json
from pathlib import Path

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

KEPT = ("name", "num_ctas", "num_warps", "shared", "global_scratch_size", "profile_scratch_size", "tensordesc_meta")


@triton.jit
def scaled_sum(x_ptr, y_ptr, out_ptr, n, scale, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + i, mask=i < n, other=0.0)
    y = tl.load(y_ptr + i, mask=i < n, other=0.0)
    tl.store(out_ptr + i, x * scale + y, mask=i < n)


@triton.jit
def matmul(a, b, c, depth, BLOCK: tl.constexpr):
    m, n = tl.program_id(0) * BLOCK, tl.program_id(1) * BLOCK
    total = tl.zeros((BLOCK, BLOCK), dtype=tl.float32)
    for k in range(0, depth, BLOCK):
        total = tl.dot(a.load([m, k]), b.load([k, n]), total)
    c.store([m, n], total.to(tl.float16))


TILE = "tensordesc<fp16[64, 64]>"
SIGNATURES = {
    scaled_sum: ({"x_ptr": "*fp32", "y_ptr": "*fp32", "out_ptr": "*fp32", "n": "i32", "scale": "fp32"}, 256, (90,)),
    matmul: ({"a": TILE, "b": TILE, "c": TILE, "depth": "i32"}, 64, (90, 100)),
}


def main() -> None:
    here = Path(__file__).parent
    for kernel, (signature, block, capabilities) in SIGNATURES.items():
        source = ASTSource(kernel, signature={**signature, "BLOCK": "constexpr"}, constexprs={"BLOCK": block})
        for capability in capabilities:
            made = triton.compile(source, target=GPUTarget("cuda", capability, 32))
            name = f"{kernel.__name__}_sm{capability}"
            facts = {key: value for key, value in made.metadata._asdict().items() if key in KEPT}
            (here / f"{name}.json").write_text(json.dumps(facts, indent=1) + "\n")
            ptx = made.asm["ptx"].partition("\t.section")[0].replace(f"{here}/", "").replace(str(here), "")
            (here / f"{name}.ptx").write_text("\n".join(line.rstrip() for line in ptx.splitlines()) + "\n")


if __name__ == "__main__":
    main()
