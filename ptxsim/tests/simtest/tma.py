# ruff: noqa: E501 (lines of PTX are kept whole)
"""Runs tensor copies by one thread."""

from __future__ import annotations

import numpy as np

import ptxsim
from simtest.single import HEADER

REGS = ".reg .b32 %r<30>; .reg .b64 %rd<20>; .reg .pred %p<9>;"
INIT = (
    "mov.u32 %r1, s; mov.u32 %r2, m; mbarrier.init.shared::cta.b64 [%r2], 1; fence.mbarrier_init.release.cluster;"
    "fence.proxy.async.shared::cta;"
)
WAIT = "W: mbarrier.try_wait.parity.shared::cta.b64 %p1, [%r2], 0; @!%p1 bra W;"


def kernel(params: str, code: str, size: int = 32768) -> ptxsim.Module:
    """Return a module whose kernel ``k`` has shared memory ``s`` and an mbarrier ``m``."""
    shared = f".shared .align 1024 .b8 s[{size}]; .shared .align 8 .b8 m[8];"
    return ptxsim.Module(HEADER + f".visible .entry k({params})\n{{\n{REGS} {shared}\n{code}\nret;\n}}\n")


def dump(size: int) -> str:
    """Return code that copies shared bytes to the array ``out``, by one thread."""
    return (
        "ld.param.u64 %rd9, [out]; mov.u32 %r9, 0; D: add.u32 %r10, %r1, %r9; ld.shared.u32 %r11, [%r10]; cvt.u64.u32 %rd8, %r9;"
        f"add.u64 %rd8, %rd8, %rd9; st.global.u32 [%rd8], %r11; add.u32 %r9, %r9, 4; setp.lt.u32 %p2, %r9, {size}; @%p2 bra D;"
    )


def swizzled(offset: int, mode: str) -> int:
    """Apply the documented address-bit swizzles to a byte offset in a 1024-aligned tile."""
    if mode == "128B":
        return offset ^ ((offset >> 7 & 7) << 4)
    if mode == "64B":
        return offset ^ ((offset >> 7 & 3) << 4)
    if mode == "32B":
        return offset ^ ((offset >> 7 & 1) << 4)
    return offset


MAP = "mov.b64 %rd1, tm; cvta.param.u64 %rd1, %rd1;"
MEMORY = ptxsim.Memory()
"""Global memory of the kernels that :func:`load` and :func:`store` run: tensor maps are made before their modules."""


def module(code: str) -> ptxsim.Module:
    """Return a kernel that takes a tensor map and an array, with the arrays of ``MEMORY``."""
    made = kernel(".param .align 64 .b8 tm[128], .param .u64 out", code)
    made.memory = MEMORY
    return made


def load(instruction: str, tmap: bytes, size: int, tx: int, start: int = 0) -> np.ndarray:
    """Run a load to shared byte ``start`` and return ``size`` bytes from there on."""
    code = (
        INIT
        + MAP
        + f"add.u32 %r1, %r1, {start}; mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r2], {tx}; {instruction};"
        + WAIT
        + dump(size)
    )
    out = np.zeros(size, "u1")
    module(code).launch("k", 1, 1, [tmap, out], mode="late")
    return out


def store(instruction: str, tmap: bytes, tile: np.ndarray, start: int = 0) -> None:
    """Put a tile's bytes to shared byte ``start`` and run a store or reduction."""
    code = (
        INIT + f"add.u32 %r1, %r1, {start}; ld.param.u64 %rd9, [out]; mov.u32 %r9, 0; F: cvt.u64.u32 %rd8, %r9; add.u64 %rd8, %rd8, %rd9;"
        "ld.global.u32 %r11, [%rd8]; add.u32 %r10, %r1, %r9; st.shared.u32 [%r10], %r11; add.u32 %r9, %r9, 4;"
        f"setp.lt.u32 %p2, %r9, {tile.size}; @%p2 bra F; fence.proxy.async.shared::cta;" + MAP
        + f"{instruction}; cp.async.bulk.commit_group; cp.async.bulk.wait_group 0;"
    )  # fmt: skip
    module(code).launch("k", 1, 1, [tmap, tile], mode="late")
