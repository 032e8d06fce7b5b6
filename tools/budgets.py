"""Compile every kernel, variant and target with both lines of NVRTC, and write tests/golden/budgets.json anew.

The file has the registers, shared memory and barriers of each build; its difference is for a reviewer to see. Both
lines must be installed, in the versions that the extra `test` pins. All builds take an hour of a core; those that the
kernels' cache has are not made again. With `--only REGEX` those that match are made and those that the file lacks, and
the others keep their figures.
"""

from __future__ import annotations

import argparse
import configparser
import functools
import json
import multiprocessing
import os
import re
import sys
import warnings
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mla_cupy.errors import KernelCompileError, explain
from mla_cupy.kernels import KERNELS
from mla_cupy.kernels.spec import KernelSpec, Variant
from mla_cupy.runtime import cache, nvrtc, worker
from mla_cupy.runtime.build import Build

ARCHS = ("sm_75", "sm_80", "sm_90a", "sm_100a", "sm_103a")
#: Targets that stand for GPUs with little shared memory, of kernels for all GPUs from one on.
CONSUMER = ("sm_89", "sm_120")
LINES = (12, 13)
PACKAGES = {12: "nvidia-cuda-nvrtc-cu12", 13: "nvidia-cuda-nvrtc"}
SETUP = Path(__file__).resolve().parents[1] / "setup.cfg"
GOLDEN = SETUP.with_name("tests") / "golden" / "budgets.json"

Figures = dict[str, int]
Lines = dict[str, dict[str, Figures]]
"""Exact version of NVRTC -> name of the cubin -> figures."""


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
    def is_first(self) -> bool:
        """True for the builds that an ordinary test run makes: one of every sixth kernel.

        It is the first variant, for Hopper if the kernel can; the lines of NVRTC take turns over the kernels.
        """
        archs = archs_of(self.spec)
        arch = "sm_90a" if "sm_90a" in archs else archs[0]
        turn, left_out = divmod([*KERNELS].index(self.kernel), 6)
        first = self.variant == self.spec.defaults_on(arch)[0] and not left_out
        return first and (self.arch, self.line) == (arch, LINES[turn % len(LINES)])

    def __str__(self) -> str:
        return f"nvrtc{self.line}-{self.name}"


def archs_of(spec: KernelSpec[Any]) -> tuple[str, ...]:
    """The targets that a kernel is made for."""
    candidates = (*ARCHS, *CONSUMER) if spec.archs else ARCHS
    return tuple(arch for arch in candidates if spec.defaults_on(arch))


TARGETS = tuple(
    Target(line, spec.name, variant, arch)
    for line in LINES
    for spec in KERNELS.values()
    for arch in archs_of(spec)
    for variant in spec.defaults_on(arch)
)


@functools.cache
def library(line: int) -> str:
    """The wheel's library of a line; "" where it is not installed."""
    return next(nvrtc._wheels((line,)), "")


@functools.cache
def version(line: int) -> str:
    """Such as "12.9.86"."""
    return nvrtc.load(library(line)).exact_version()


def pinned(line: int) -> str:
    """The version that the extra `test` pins, used for the golden file."""
    config = configparser.ConfigParser()
    config.read(SETUP)
    (pin,) = re.findall(rf"^{PACKAGES[line]}==([\d.]+)$", config["options.extras_require"]["test"], re.MULTILINE)
    return str(pin)


@functools.cache
def build(target: Target) -> Build:
    """Build from the ordinary cache, keyed by every byte and option, or compiled in this process."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # nothing is writable: then nothing is shared
        places = cache.places()
    request = target.spec.request(target.variant, target.arch)
    return worker.build_here(request, library(target.line), places.read, places.write)[0]


def figures(made: Build) -> Figures:
    """Figures of a build for the golden file; spills are refused, so they are not in it."""
    info, facts = made.info, made.facts
    of_tensor_cores: dict[str, Any] = {
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


@functools.cache
def golden() -> Lines:
    """Contents of the golden file."""
    found: Lines = json.loads(GOLDEN.read_text())
    return found


def main(argv: Sequence[str] | None = None) -> int:
    options = parser().parse_args(argv)
    missing = [line for line in LINES if not library(line)]
    if missing:
        print(f"no NVRTC wheel of CUDA {missing}: pip install -e '.[test]'", file=sys.stderr)
        return 1
    others = [line for line in LINES if version(line) != pinned(line)]
    for line in others:
        got, pin = version(line), pinned(line)
        remedy = f"pip install {PACKAGES[line]}=={pin}"
        print(explain(f"NVRTC of CUDA {line}", got, pin, remedy), file=sys.stderr)
    if others:
        return 1
    lines, refused = make(options.only, options.jobs)
    write(lines)
    print(f"{GOLDEN}: {sum(map(len, lines.values()))} builds")
    return 1 if refused else 0


def parser() -> argparse.ArgumentParser:
    found = argparse.ArgumentParser(
        prog="python -m tools.budgets", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    found.add_argument("--only", type=re.compile, metavar="REGEX", help="names of builds, such as mla_merge.*sm_90a")
    found.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)), metavar="N", help="compilers at once")
    return found


def make(only: re.Pattern[str] | None, jobs: int) -> tuple[Lines, int]:
    """The figures of all builds, and the number that did not compile."""
    known = {target: golden().get(version(target.line), {}).get(target.name) for target in TARGETS}
    fresh = [target for target in TARGETS if known[target] is None or only is None or only.search(target.name)]
    refused = 0
    # Not forked: NVRTC is loaded here, and has threads.
    with ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn")) as pool:
        results = pool.map(figures_or_error, map(TARGETS.index, fresh))
        for count, (target, found) in enumerate(zip(fresh, results, strict=True), 1):
            if isinstance(found, str):
                refused += 1
                print(f"{target}: {found}", file=sys.stderr)
            known[target] = None if isinstance(found, str) else found
            if count % 50 == 0:
                print(f"{count} of {len(fresh)} builds", file=sys.stderr)
    lines: Lines = {version(line): {} for line in LINES}
    for target, figures in known.items():
        if figures is not None:
            lines[version(target.line)][target.name] = figures
    return lines, refused


def figures_or_error(index: int) -> Figures | str:
    """The figures of one of the targets, or why it does not compile."""
    try:
        return figures(build(TARGETS[index]))
    except KernelCompileError as error:
        return str(error)


def write(lines: Lines) -> None:
    """One kernel a line, so that a change of one is one line of a diff."""
    blocks = (
        f'  "{version}": {{\n'
        + ",\n".join(f'    "{name}": {json.dumps(figures)}' for name, figures in sorted(kernels.items()))
        + "\n  }"
        for version, kernels in lines.items()
    )
    GOLDEN.write_text("{\n" + ",\n".join(blocks) + "\n}\n")


if __name__ == "__main__":
    sys.exit(main())
