"""The tcgen05 GEMM against NumPy: groups, layouts, majors, lane halves, weight-stationary, in every mode."""

from __future__ import annotations

import pytest

from simtest import nvrtc
from simtest.runners import MODES, blackwell_gemm

SHAPES = [
    # m, n, group, ws, a_mn, b_mn, half
    (128, 64, 1, 0, 0, 0, 0),
    (128, 256, 1, 0, 1, 0, 0),
    (128, 128, 1, 0, 0, 1, 0),
    (64, 64, 1, 0, 1, 1, 0),
    (64, 64, 1, 0, 0, 0, 16),
    (64, 72, 1, 0, 0, 0, 0),
    (64, 128, 1, 0, 1, 1, 16),
    (32, 64, 1, 1, 0, 0, 0),
    (64, 128, 1, 1, 0, 1, 0),
    (128, 64, 1, 1, 1, 0, 0),
    (32, 256, 1, 1, 0, 1, 0),
    (256, 128, 2, 0, 0, 0, 0),
    (256, 256, 2, 0, 1, 1, 0),
    (128, 64, 2, 0, 0, 0, 0),
    (128, 128, 2, 0, 1, 1, 0),
]


def build(shape: tuple[int, ...], major: int | None = None) -> str:
    """Compile the kernel for a shape."""
    names = ("M", "N", "GROUP", "WS", "A_MN", "B_MN", "HALF")
    return nvrtc.kernel_ptx(
        "blackwell_gemm.cu", "sm_100a", major, tuple(f"{k}={v}" for k, v in zip(names, shape, strict=False))
    )


def run(shape: tuple[int, ...], mode: str, seed: int, major: int | None = None) -> None:
    """Run one shape."""
    m, n, group, ws, a_mn, b_mn, half = shape
    blackwell_gemm(build(shape, major), mode, seed, True, m, n, group, bool(ws), bool(a_mn), bool(b_mn), half)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_shapes(shape: tuple[int, ...]) -> None:
    run(shape, "late", 0)


@pytest.mark.parametrize("major", [12, 13])
@pytest.mark.parametrize(("mode", "seed"), MODES)
@pytest.mark.parametrize("shape", [SHAPES[0], SHAPES[6], SHAPES[7], SHAPES[11]], ids=str)
def test_modes(shape: tuple[int, ...], mode: str, seed: int, major: int) -> None:
    run(shape, mode, seed, major)
