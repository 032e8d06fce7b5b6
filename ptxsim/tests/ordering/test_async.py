# ruff: noqa: E501 (lines of PTX are kept whole)
"""Asynchronous operations, both sides of each: right kernels pass in every mode, every missing step is caught."""

from __future__ import annotations

import pytest

from simtest.async_kernels import KERNELS, Bug, Kernel, run

MODES = [("early", 0), ("late", 0), *(("random", seed) for seed in range(1, 5))]
BUGS = [(kernel, bug) for kernel in KERNELS for bug in kernel.bugs()]


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda k: f"{k.operation}-{k.side}")
def test_a_synchronised_kernel_passes(kernel: Kernel) -> None:
    for mode, seed in MODES:
        assert run(kernel, kernel.fine, mode, seed) == [[word] * 32 for word in kernel.out]


@pytest.mark.parametrize(("kernel", "bug"), BUGS, ids=[f"{k.operation}-{k.side}-{b.step}" for k, b in BUGS])
def test_a_missing_step_is_caught(kernel: Kernel, bug: Bug) -> None:
    for mode, seed in MODES:
        with pytest.raises(bug.errors):
            run(kernel, bug.code, mode, seed)


def test_agents_may_appear_between_the_parts_of_a_product() -> None:
    """Clock vectors grow while three warps of a warpgroup still wait to issue their parts of a wgmma."""
    kernel = next(k for k in KERNELS if k.operation == "wgmma" and k.side == "writes")
    make = "mov.u32 %r30, 4096; M: add.u32 %r31, %s, %r30; mbarrier.init.shared::cta.b64 [%r31], 1; add.u32 %r30, %r30, 8; setp.lt.u32 %p2, %r30, 5000; @%p2 bra M;"
    late = f"@%first bra U1; @!%user bra U2; setp.ne.u32 %p3, %lane, 0; @%p3 bra U3; {make} U3: bar.warp.sync -1; U2: bar.sync 1, 128; U1:"
    code = kernel.fine.replace("wgmma.mma_async", f"U4: {late} wgmma.mma_async", 1).replace(
        "@!%group bra U;", "@!%group bra U4;", 1
    )
    code = code.replace("U1: wgmma", "U1: @!%group bra U; wgmma")
    for mode, seed in MODES:
        assert run(kernel, code, mode, seed) == [[word] * 32 for word in kernel.out]
