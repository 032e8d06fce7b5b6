"""Any text gets an answer or a named error: kernels with random pieces dropped, repeated, swapped or cut."""

from __future__ import annotations

import re

import numpy as np
import pytest

import ptxsim
from ptxsim.tool.survey import survey
from simtest import nvrtc
from simtest.mutants.run import DEFINES

KERNELS = [("hopper_gemm", "sm_90a"), ("cp_async_ring", "sm_90a"), ("blackwell_gemm", "sm_100a")]
_TOKEN = re.compile(r"[\w.%$:]+|\s+|.", re.S)


def broken(text: str, rng: np.random.Generator) -> str:
    """Return a text with one token damaged."""
    tokens = _TOKEN.findall(text)
    solid = [i for i, token in enumerate(tokens) if not token.isspace()]
    at, other = (int(i) for i in rng.choice(solid, 2, replace=False))
    kind = int(rng.integers(5))
    if kind == 0:
        tokens[at] = ""
    elif kind == 1:
        tokens[at] *= 2
    elif kind == 2:
        tokens[at], tokens[other] = tokens[other], tokens[at]
    elif kind == 3:
        tokens[at] = tokens[at][: len(tokens[at]) // 2]
    else:
        tokens = tokens[:at]
    return "".join(tokens)


def attempt(text: str, threads: int) -> None:
    """Load, survey and run every kernel of a text on zeros for a moment."""
    try:
        module = ptxsim.Module(text, strict=False)
    except ptxsim.SimError:
        return
    for name in module.kernels:
        try:
            survey(module.ir, module.ir.functions[name])
            sizes = module.parameter_sizes(name)
            module.launch(name, 1, threads, [bytes(size) for size in sizes], 8192, max_steps=200)
        except ptxsim.SimError:
            continue


@pytest.mark.filterwarnings("ignore::ptxsim.StrictWarning")
@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel[0])
def test_damaged_kernels(kernel: tuple[str, str]) -> None:
    name, arch = kernel
    text = nvrtc.kernel_ptx(f"{name}.cu", arch, None, DEFINES.get(name, ()))
    for seed in range(60):
        attempt(broken(text, np.random.default_rng([seed, len(name)])), 192)


@pytest.mark.parametrize(
    "text",
    ["", "nonsense", ".global .align 4 x[4];",
     ".visible .entry k(", ".visible .entry k()\n{", ".visible .entry k()\n{\nadd.u32 %r1;\n}\n",
     '.visible .entry k()\n{\nmov.u32 %r1, "x;\n}\n', ".global .b8 x[;", ".visible .entry k(.param .u64)\n{\n}\n",
     ".visible .entry ()\n{\n}\n", "}", "{", ".visible .entry k()\n{\n@%p1 bra\n;}\n"],
)  # fmt: skip
def test_texts_that_are_not_ptx(text: str) -> None:
    attempt(text, 32)
