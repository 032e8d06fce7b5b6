"""Probes of whole kernels: the public sparse backward against the oracle, first one block, then real sizes."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

import mla_cupy
from mla_cupy import dtypes, reference
from mla_cupy.kernels.sparse_backward import SPARSE_BACKWARD, mma
from mla_cupy.kernels.sparse_backward.problem import SparseBackwardProblem
from mla_cupy.runtime import device as devices
from mla_cupy.runtime.build import BuildRequest
from mla_cupy.selftest.probe import ARCHS, TMA_ARCHS, Array, Finding, Machine, UnfitError, random

D_QK, D_V = 576, 512
SCALE = D_QK**-0.5
"""Scale of scores of random queries and keys, which then are of one size."""
TOLERANCE = 2.0**-6
"""Tolerance relative to the largest gradient of the array. P, dS and the results are rounded to 8 (float16: 11) bits;
in all random cases seen the error stayed below a third of this."""
DIRECTION = 1e-4
"""The largest cosine distance of the whole gradient from the oracle's: a term left out anywhere costs more."""
CALL_SECONDS = 600.0
_MAIN = {kernel.name: kernel for kernel in SPARSE_BACKWARD.kernels}
_FAMILY = {"sm_90a": "sm90", "sm_100a": "sm100", "sm_103a": "sm100"}
_MMA = mma.KERNEL.name
_INSTRUCTIONS = ("tmem/*", "mma/*", "copy/*", "reduce/*", "stmatrix/*")


class Size(NamedTuple):
    """The sizes of one call."""

    s_q: int
    s_kv: int
    topk: int
    repeats: int = 1


ONE_BLOCK = Size(s_q=1, s_kv=90, topk=40)
REAL = Size(s_q=64, s_kv=8192, topk=2048, repeats=3)
SIMULATED = Size(s_q=2, s_kv=90, topk=70)
SIMULATED_TWICE = SIMULATED._replace(repeats=2)


@dataclass(frozen=True)
class CallProbe:
    """Calls of one main kernel.

    heads
        The number of heads; of several, the first that the kernel supports.
    """

    name: str
    about: str
    kernel: str
    dtype: str
    heads: tuple[int, ...]
    on_gpu: Size
    simulated: Size
    deterministic: bool
    archs: tuple[str, ...]
    needs: tuple[str, ...]
    seconds: float = CALL_SECONDS
    d_qk: int = D_QK

    def requests(self, arch: str) -> list[BuildRequest]:
        """Empty: the call compiles what it needs."""
        return []

    def run(self, machine: Machine) -> Finding:
        """Call, compare with the oracle, and with the first of several calls bit by bit where that is promised.

        Raises
        ------
        UnfitError
            If the kernel does not support the case.
        """
        size = self.simulated if machine.simulated else self.on_gpu
        h_q = self._heads_that_fit(machine, size)
        inputs, exact = _problem(size, h_q, self.d_qk, self.dtype)
        placed = [machine.upload(x) for x in inputs]
        worst = {"dq": 0.0, "dkv": 0.0}
        compared = "{} calls, {} heads: error of dq {:.1e}, of dkv {:.1e} of the largest; allowed {:.1e}"
        first: list[Array] = []
        difference = ""
        for number in range(size.repeats):
            got = self._call(machine, placed)
            for name, x, wanted in zip(worst, got, exact, strict=True):
                error, found = compare(name, x, wanted)
                worst[name] = max(worst[name], error)
                difference = difference or found
            if number == 0:
                first = got
            elif not difference:
                difference = self._changed(got, first)
            if difference:
                difference = f"call {number + 1}: {difference}"
                break
        return Finding(difference, compared.format(size.repeats, h_q, worst["dq"], worst["dkv"], TOLERANCE))

    def _call(self, machine: Machine, placed: list[Any]) -> list[Array]:
        dq, dkv, _ = mla_cupy.sparse_mla_backward(
            *placed, scale=SCALE, kernel=self.kernel, deterministic=self.deterministic, dkv_dtype="float32"
        )
        return [machine.download(x) for x in (dq, dkv)]

    def _changed(self, got: list[Array], first: list[Array]) -> str:
        """Description of bits that changed from call to call and must not."""
        names = ("dq", "dkv") if self.deterministic else ("dq",)
        for name, x, before in zip(names, got, first, strict=False):
            changed = int((x.view(np.uint8) != before.view(np.uint8)).sum())
            if changed:
                return f"{name}: {changed} bytes of {x.nbytes} changed from the first call"
        return ""

    def _heads_that_fit(self, machine: Machine, size: Size) -> int:
        reasons = []
        for h_q in self.heads:
            problem = SparseBackwardProblem(
                size.s_q, size.s_kv, h_q, size.topk, self.d_qk, self.dtype, deterministic=self.deterministic
            )
            reason = _MAIN[self.kernel].unsupported(problem, devices.describe(machine.device))
            if reason is None:
                return h_q
            reasons.append(f"{h_q} heads: {reason}")
        raise UnfitError("; ".join(reasons))


def compare(name: str, got: Array, exact: Array) -> tuple[float, str]:
    """The largest error in units of the largest exact value, and the problem ("" for none)."""
    peak = float(np.abs(exact).max())
    errors = np.abs(got.astype(np.float64) - exact) / peak
    errors = np.where(np.isfinite(errors), errors, np.inf)
    worst = float(errors.max())
    if worst > TOLERANCE:
        where = tuple(map(int, np.unravel_index(np.argmax(errors), errors.shape)))
        index = ", ".join(map(str, where))
        out = int((errors > TOLERANCE).sum())
        return worst, (
            f"{name}[{index}]: got {got[where]}, expected {exact[where]:.6g} within {TOLERANCE * peak:.2g} "
            f"({out} of {errors.size} values are out)"
        )
    distance = _cosine_distance(got.astype(np.float64), exact)
    if distance > DIRECTION:
        return worst, f"{name}: cosine distance {distance:.1e} from the oracle, allowed {DIRECTION:.0e}"
    return worst, ""


def _cosine_distance(got: Array, exact: Array) -> float:
    lengths = float(np.linalg.norm(got)), float(np.linalg.norm(exact))
    if 0.0 in lengths:
        return 1.0
    return float(((got / lengths[0] - exact / lengths[1]) ** 2).sum() / 2)


@functools.lru_cache(maxsize=2)
def _problem(size: Size, h_q: int, d_qk: int, dtype: str) -> tuple[list[Array], tuple[Array, Array]]:
    """Random inputs, with indices that are no rows and with duplicates; and the oracle's gradients."""
    s_q, s_kv, topk, _ = size
    rng = random(f"{s_q} {s_kv} {topk} {h_q} {d_qk} {dtype}")
    kind = dtypes.numpy_dtype(dtype)
    q = rng.standard_normal((s_q, h_q, d_qk), np.float32).astype(kind)
    kv = rng.standard_normal((s_kv, d_qk), np.float32).astype(kind)
    indices = rng.integers(0, s_kv, (s_q, topk)).astype(np.int32)
    indices[rng.random(indices.shape) < 0.05] = -1
    indices[:, topk // 2] = s_kv
    out, lse, _ = reference.sparse_mla_forward(q, kv, indices, scale=SCALE)
    dout = rng.standard_normal((s_q, h_q, D_V), np.float32).astype(kind)
    inputs = [q, kv, out.astype(np.float32).astype(kind), dout, lse.astype(np.float32), indices]
    dq, dkv, _ = reference.sparse_mla_backward(*inputs, scale=SCALE)
    return inputs, (dq, dkv)


def _probes_of(kernel: str, archs: tuple[str, ...]) -> Iterator[CallProbe]:
    needs = (*_INSTRUCTIONS, "mma.ws/*") if kernel.endswith("_ws") else () if kernel == _MMA else _INSTRUCTIONS
    for name, dtype, d_qk in (
        ("bfloat16", "bfloat16", D_QK),
        ("float16", "float16", D_QK),
        ("bfloat16-without-rope", "bfloat16", D_V),
    ):
        yield CallProbe(
            f"block/{kernel}/{name}",
            f"sparse_mla_backward, one query, {ONE_BLOCK.topk} slots, d_qk {d_qk}, against the oracle",
            kernel,
            dtype,
            (64, 128),
            ONE_BLOCK,
            ONE_BLOCK,
            False,
            archs,
            needs,
            d_qk=d_qk,
        )
    after = (f"block/{kernel}/*",)
    for heads in (64, 128):
        yield CallProbe(
            f"kernel/{kernel}/{heads}heads",
            f"sparse_mla_backward, {heads} heads, {REAL.s_q} queries of {REAL.topk} slots (simulated: {SIMULATED.s_q} "
            f"of {SIMULATED.topk}), {REAL.repeats} times, dq the same bits each time",
            kernel,
            "bfloat16",
            (heads,),
            REAL,
            SIMULATED,
            False,
            archs,
            after,
        )
    if any(getattr(variant, "deterministic", 0) for variant in _MAIN[kernel].variants):
        yield CallProbe(
            f"kernel/{kernel}/deterministic",
            "sparse_mla_backward(deterministic=True), the same sizes: dq and dkv the same bits each time",
            kernel,
            "bfloat16",
            (64, 128),
            REAL,
            SIMULATED_TWICE,
            True,
            archs,
            after,
        )


def probes() -> list[CallProbe]:
    """Probes of every main kernel that is registered for a family of GPUs with probes."""
    found: list[CallProbe] = []
    for kernel in _MAIN:
        archs = ARCHS if kernel == _MMA else tuple(arch for arch in TMA_ARCHS if _FAMILY[arch] in kernel)
        if archs:
            found.extend(_probes_of(kernel, archs))
    return found
