# ruff: noqa: E501 (lines of PTX are kept whole)
"""Launches code on an array of flags, of one block or of several that run interleaved."""

from __future__ import annotations

import numpy as np

import ptxsim
from simtest.single import HEADER

REGS = ".reg .b32 %r<20>; .reg .b64 %rd<20>; .reg .pred %p<9>;"
MODES = [("early", 0), ("late", 0), ("random", 1), ("random", 2)]


def launch(code: str, grid: int, block: int, mode: str = "early", seed: int = 0, **more: object) -> np.ndarray:
    """Run code on an array of 64 words; ``%rd1`` is its address, %r0 the thread, %r1 the block, %r2 shared ``s``."""
    out = np.zeros(64, "u4")
    text = f"{REGS} .shared .align 16 .b8 s[256]; mov.u32 %r0, %tid.x; mov.u32 %r1, %ctaid.x; mov.u32 %r2, s; ld.param.u64 %rd1, [a];\n{code}\nret;"
    module = ptxsim.Module(HEADER + f".visible .entry k(.param .u64 a)\n{{\n{text}\n}}\n")
    module.launch("k", grid, block, [out], mode=mode, seed=seed, resident=grid, max_steps=100_000, **more)
    return out
