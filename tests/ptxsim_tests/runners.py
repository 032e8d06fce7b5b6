"""Runs the test kernels: one function per kernel, which launches and compares with NumPy."""

from __future__ import annotations

from collections.abc import Callable

import ml_dtypes
import numpy as np
import ptxsim

MODES = [("early", 0), ("late", 0), ("random", 1), ("random", 2)]


def bf16(rng: np.random.Generator, *shape: int) -> np.ndarray:
    """Return small random bf16 values."""
    return (rng.standard_normal(shape) * 0.5).astype(ml_dtypes.bfloat16)


def hopper_gemm(ptx: str, mode: str, seed: int, check: bool = True) -> ptxsim.Report:
    """Run the Hopper GEMM on a 2x2 grid of tiles."""
    rng = np.random.default_rng(seed)
    m, n, k = 128, 128, 320
    a, b, c = bf16(rng, m, k), bf16(rng, n, k), np.zeros((m, n), ml_dtypes.bfloat16)
    module = ptxsim.Module(ptx)
    maps = []
    for array, cols in ((a, k), (b, k), (c, n)):
        address = module.memory.map(array)
        maps.append(ptxsim.encode_tiled("bfloat16", address, [cols, 128], [cols * 2], [64, 64], swizzle="128B"))
    report = module.launch("hopper_gemm", (2, 2), 160, [*maps, k // 64], 7 * 8192 + 64, mode=mode, seed=seed, check=check)
    expected = a.astype("f4") @ b.astype("f4").T
    np.testing.assert_allclose(c.astype("f4"), expected, rtol=2**-7, atol=2**-7)
    return report


def cluster_exchange(ptx: str, mode: str, seed: int, check: bool = True) -> ptxsim.Report:
    """Run the cluster kernel for three rounds."""
    rng = np.random.default_rng(seed)
    rounds = 3
    tile, out = bf16(rng, 64 * rounds, 64), np.zeros((2, 64), "f4")
    module = ptxsim.Module(ptx)
    tmap = ptxsim.encode_tiled(
        "bfloat16", module.memory.map(tile), [64, 64 * rounds], [128], [64, 64], swizzle="128B"
    )
    report = module.launch(
        "cluster_exchange", 2, 64, [tmap, out, rounds], 8192 + 512, cluster=2, mode=mode, seed=seed, check=check
    )
    sums = tile.astype("f8").reshape(rounds, 64, 64).sum((0, 2)) * 3
    np.testing.assert_allclose(out, np.stack([sums, sums]), rtol=1e-4, atol=1e-3)
    return report


def cp_async_ring(ptx: str, mode: str, seed: int, check: bool = True) -> ptxsim.Report:
    """Run the cp.async ring over five tiles."""
    rng = np.random.default_rng(seed)
    data, out = rng.standard_normal((40, 128)).astype("f4"), np.zeros(128, "f4")
    report = ptxsim.Module(ptx).launch("cp_async_ring", 1, 64, [data, out, 5], mode=mode, seed=seed, check=check)
    np.testing.assert_allclose(out, data.sum(0), rtol=1e-4, atol=1e-4)
    return report


RUNNERS: dict[str, Callable] = {
    "hopper_gemm": hopper_gemm,
    "cluster_exchange": cluster_exchange,
    "cp_async_ring": cp_async_ring,
}
