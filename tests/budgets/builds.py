"""Every kernel, variant and target, compiled once for each line of NVRTC; shared by the processes of a test run."""

from __future__ import annotations

import functools
import json
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mla_cupy.kernels import KERNELS
from mla_cupy.kernels.spec import KernelSpec, Variant
from mla_cupy.runtime import cache, nvrtc, worker
from mla_cupy.runtime.build import Build

ARCHS = ("sm_75", "sm_80", "sm_90a", "sm_100a", "sm_103a")
#: Of each the PTX is the other's but for its target, and so are the golden figures, which a test demands.
TWINS = {"sm_103a": "sm_100a"}
#: What the tests in the simulator run, where they name no other: they share its builds.
SIMULATED = "sm_90a"
LINES = (12, 13)
GOLDEN = Path(__file__).resolve().parents[1] / "golden" / "budgets.json"

Figures = dict[str, int]


@dataclass(frozen=True)
class Target:
    """One kernel to compile, and the line of NVRTC to do it with."""

    line: int
    kernel: str
    variant: Variant
    arch: str

    @property
    def spec(self) -> KernelSpec[Any]:
        return KERNELS[self.kernel]

    @property
    def name(self) -> str:
        """Name of the cubin, the same for both lines of NVRTC."""
        return self.spec.request(self.variant, self.arch).name

    @property
    def is_long_form(self) -> bool:
        """Whether a run without long forms leaves it out.

        Such a run makes each build with one line of NVRTC. The lines take turns over a kernel's variants and over the
        architectures, so that every kernel meets both. Of a twin, and of a kernel for any GPU on a GPU that the
        simulated one is not, it makes a kernel's first variant alone: what spills are kernels of one architecture.
        """
        index = self.spec.variants.index(self.variant)
        turn = LINES[(index + ARCHS.index(self.arch)) % len(LINES)]
        elsewhere = self.arch in TWINS or (not self.spec.archs and self.arch != SIMULATED)
        return self.line != turn or (elsewhere and index > 0)

    def __str__(self) -> str:
        return f"nvrtc{self.line}-{self.name}"


TARGETS = tuple(
    Target(line, spec.name, variant, arch)
    for line in LINES
    for spec in KERNELS.values()
    for arch in ARCHS
    if spec.supports_arch(arch)
    for variant in spec.variants
)


@functools.cache
def library(line: int) -> str:
    """The wheel's library of a line; "" where it is not installed."""
    return next(nvrtc._wheels((line,)), "")


@functools.cache
def version(line: int) -> str:
    """Such as "12.9.86"."""
    return nvrtc.load(library(line)).exact_version()


@functools.cache
def build(target: Target) -> Build:
    """From the ordinary cache, whose key holds every byte and option, or compiled in this process."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # nothing is writable: then nothing is shared
        places = cache.places()
    request = target.spec.request(target.variant, target.arch)
    return worker.build_here(request, library(target.line), places.read, places.write)[0]


def figures(made: Build) -> Figures:
    """What the golden file holds of a build; spills are not in it, they are refused."""
    info, facts = made.info, made.facts
    of_tensor_cores = {
        name: facts[name] for name in ("tmem_columns", "tmem_columns_used", "mbarriers") if name in facts
    }
    if "products" in facts:  # (M, N, number) of each kind
        of_tensor_cores["mmas_per_tile"] = sum(facts["products"][2::3])
    return {
        "registers": info["registers"],
        "stack": info["stack"],
        "smem": info["static_smem"] + facts.get("smem_bytes", 0),
        "barriers": info["barriers"],
        **of_tensor_cores,
    }


def golden() -> dict[str, dict[str, Figures]]:
    """Exact version of NVRTC -> name of the cubin -> figures."""
    found: dict[str, dict[str, Figures]] = json.loads(GOLDEN.read_text())
    return found
