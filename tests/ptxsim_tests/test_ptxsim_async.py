"""Asynchronous operations, both sides of each: right kernels pass in every mode, every missing step is caught."""

from __future__ import annotations

import pytest
from ptx_async import KERNELS, Bug, Kernel, run

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
