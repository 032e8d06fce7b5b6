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
    report = module.launch(
        "hopper_gemm", (2, 2), 160, [*maps, k // 64], 7 * 8192 + 64, mode=mode, seed=seed, check=check
    )
    expected = a.astype("f4") @ b.astype("f4").T
    np.testing.assert_allclose(c.astype("f4"), expected, rtol=2**-7, atol=2**-7)
    return report


def cluster_exchange(ptx: str, mode: str, seed: int, check: bool = True) -> ptxsim.Report:
    """Run the cluster kernel for three rounds."""
    rng = np.random.default_rng(seed)
    rounds = 3
    tile, out = bf16(rng, 64 * rounds, 64), np.zeros((2, 64), "f4")
    module = ptxsim.Module(ptx)
    tmap = ptxsim.encode_tiled("bfloat16", module.memory.map(tile), [64, 64 * rounds], [128], [64, 64], swizzle="128B")
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


def global_exchange(ptx: str, mode: str, seed: int, check: bool = True) -> ptxsim.Report:
    """Run the kernel whose blocks exchange sums, twice, with four blocks at a time."""
    rng = np.random.default_rng(seed)
    data, weights = rng.standard_normal((4, 4, 64)).astype("f4"), rng.standard_normal(64).astype("f4")
    counter, module = np.zeros(1, "i4"), ptxsim.Module(ptx)
    for _ in range(2):
        parts, chain, out, flags = (
            np.zeros((4, 64), "f4"),
            np.zeros((4, 64), "f4"),
            np.zeros(64, "f4"),
            np.zeros(4, "i4"),
        )
        args = [data, weights, parts, chain, out, counter, flags]
        report = module.launch(
            "global_exchange", 4, 64, args, mode=mode, seed=seed, check=check, resident=4, race_global=check,
            max_steps=200_000,
        )  # fmt: skip
        sums = data.astype("f8").sum(1) * weights
        np.testing.assert_allclose(out, sums.sum(0), rtol=1e-4, atol=1e-4)
        np.testing.assert_allclose(chain, sums.cumsum(0), rtol=1e-4, atol=1e-4)
    return report


RUNNERS: dict[str, Callable] = {
    "global_exchange": global_exchange,
    "hopper_gemm": hopper_gemm,
    "cluster_exchange": cluster_exchange,
    "cp_async_ring": cp_async_ring,
}


def cell_of(r: int, n: int, m_total: int, n_total: int, group: int, ws: bool, half: int) -> tuple[int, int, int]:
    """Return (block, lane, column) of D[r, n].

    Written from the table of data-path layouts A to G and CUTLASS's lane formulas, not from the simulator.
    """
    if group == 2 and m_total == 256:  # A
        return r // 128, r % 128, n
    if group == 2:  # B: 64 rows a block; the second half of N in lanes 64..127
        return r // 64, 64 * (n // (n_total // 2)) + r % 64, n % (n_total // 2)
    if ws and m_total == 32:  # G
        return 0, 32 * (n // (n_total // 4)) + r, n % (n_total // 4)
    if ws and m_total == 64:  # E
        return 0, 64 * (n // (n_total // 2)) + r, n % (n_total // 2)
    if m_total == 64:  # F
        return 0, 32 * (r // 16) + r % 16 + half, n
    return 0, r, n  # D


def blackwell_gemm(
    ptx: str, mode: str, seed: int, check: bool = True, m: int = 128, n: int = 64, group: int = 1, ws: bool = False,
    a_mn: bool = False, b_mn: bool = False, half: int = 0, k_tiles: int = 3,
) -> ptxsim.Report:  # fmt: skip
    """Run one tile of the Blackwell GEMM and compare every tensor-memory cell of D."""
    rng = np.random.default_rng(seed)
    k = 64 * k_tiles
    a, b = bf16(rng, m, k), bf16(rng, n, k)
    out = np.full((2, 128, 256), np.nan, "f4")
    module = ptxsim.Module(ptx)
    maps = []
    for array, rows, transposed in ((a, m, a_mn), (b, n, b_mn)):
        stored = np.ascontiguousarray(array.T if transposed else array)
        inner, outer = (rows, k) if transposed else (k, rows)
        box = [64, 64] if transposed else [64, rows // group]
        address = module.memory.map(stored)
        maps.append(ptxsim.encode_tiled("bfloat16", address, [inner, outer], [inner * 2], box, swizzle="128B"))
    smem = 2 * 128 * (m + n) // group + 1024
    report = module.launch(
        "blackwell_gemm", group, 192, [*maps, out, k_tiles], smem, cluster=group, mode=mode, seed=seed, check=check
    )
    expected = a.astype("f4") @ b.astype("f4").T
    got = np.array([[out[cell_of(r, c, m, n, group, ws, half)] for c in range(n)] for r in range(m)])
    np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-4)
    return report


RUNNERS["blackwell_gemm"] = blackwell_gemm
