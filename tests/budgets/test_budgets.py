"""Every kernel compiles for every target on both lines of NVRTC, within the resources that the golden file holds.

An ordinary run makes one build of each sixth kernel, `-m slow` all of them.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

from mla_cupy.kernels.attention import mma
from mla_cupy.runtime import nvrtc
from mla_cupy.runtime.build import Build, compile_kernel
from tools import budgets
from tools.budgets import Target

REGISTERS_OF_AN_SM = 65536
SMEM_OF_A_BLOCK = {
    "sm_75": 64 << 10,
    "sm_80": 163 << 10,
    "sm_90a": 227 << 10,
    "sm_100a": 227 << 10,
    "sm_103a": 227 << 10,
    "sm_89": 99 << 10,
    "sm_120": 99 << 10,
}
NAMED_BARRIERS = 16
TMEM_COLUMNS = 512
MAX_SECONDS_OF_A_VARIANT = 15
MAX_KERNELS, MAX_HOPPER_BUILDS, MAX_BUILDS_OF_AN_IMPORT = 110, 450, 32
"""Limits, to be raised on purpose only: every build is code to read, to compile, and to store in an image."""


def built(target: Target) -> Build:
    """The target's build; skipped only where its NVRTC is not installed."""
    if not budgets.library(target.line):
        pytest.skip(f"no NVRTC wheel of CUDA {target.line} is installed")
    return budgets.build(target)


def to_build(targets: Iterable[Target]) -> list[Any]:
    """Builds as parameters of tests."""
    marks = {True: [], False: [pytest.mark.slow]}
    return [pytest.param(target, id=str(target), marks=marks[target.is_first]) for target in targets]


@pytest.fixture(params=to_build(budgets.TARGETS))
def target(request: pytest.FixtureRequest) -> Target:
    found: Target = request.param
    return found


def test_compiles_and_fits(target: Target) -> None:
    """Spills, stack and serialised WGMMAs are slow without an error of NVRTC's; the rest would not launch.

    A kernel that may spill has a limit in bytes, which its stack respects, too.
    """
    made = built(target)
    info, figures = made.info, budgets.figures(made)
    allowed = target.spec.spill_bytes
    assert max(info["spill_stores"], figures["stack"]) <= allowed
    assert info["spill_loads"] <= 2 * allowed
    assert info["notes"] == []
    assert f".target {target.arch}".encode() in made.ptx
    assert made.entry == target.spec.entry
    assert figures["registers"] * made.facts["threads"] <= REGISTERS_OF_AN_SM
    assert figures["smem"] <= SMEM_OF_A_BLOCK[target.arch]
    assert figures["barriers"] <= NAMED_BARRIERS
    assert figures.get("tmem_columns_used", 0) <= figures.get("tmem_columns", 0) <= TMEM_COLUMNS


@pytest.mark.perf
def test_compiles_in_time(target: Target) -> None:
    """Anew: what a cached record says may have been measured on a busy machine."""
    if not budgets.library(target.line):
        pytest.skip(f"no NVRTC wheel of CUDA {target.line} is installed")
    request = target.spec.request(target.variant, target.arch)
    made = compile_kernel(request, nvrtc.load(budgets.library(target.line)))
    assert made.info["seconds"] <= MAX_SECONDS_OF_A_VARIANT


def test_resources_are_the_golden_ones(target: Target) -> None:
    made = built(target)
    known = budgets.golden()
    version = budgets.version(target.line)
    if version not in known:
        pytest.skip(f"the golden file has no figures of NVRTC {version}, only of {', '.join(known)}")
    assert budgets.figures(made) == known[version].get(target.name), "if intended: python -m tools.budgets"


def test_each_sixth_kernel_is_built_once_and_both_lines_take_part() -> None:
    first = [target for target in budgets.TARGETS if target.is_first]
    assert [target.kernel for target in first] == sorted([*budgets.KERNELS][::6], key=[t.kernel for t in first].index)
    assert {target.line for target in first} == {*budgets.LINES}


def test_other_versions_write_no_golden_file(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A set of figures of another NVRTC would replace the pinned one's."""
    monkeypatch.setattr(budgets, "version", lambda line: "12.8.93" if line == 12 else budgets.pinned(line))
    monkeypatch.setattr(budgets, "make", lambda *given: pytest.fail("the work has begun"))
    assert budgets.main([]) == 1
    assert "NVRTC of CUDA 12: got 12.8.93, expected 12.9.86; pip install nvidia-cuda-nvrtc-cu12==12.9.86" in (
        capsys.readouterr().err
    )


@pytest.mark.parametrize("line", budgets.LINES)
def test_golden_file_is_complete(line: int) -> None:
    """One set of figures a line, of the version that the extra `test` pins, without a kernel that is no more."""
    pin = budgets.pinned(line)
    assert [pin] == [version for version in budgets.golden() if version.startswith(f"{line}.")]
    assert budgets.golden()[pin].keys() == {target.name for target in budgets.TARGETS if target.line == line}


def test_kernels_and_builds_are_few() -> None:
    assert len(budgets.KERNELS) <= MAX_KERNELS
    assert sum(len(kernel.defaults_on("sm_90a")) for kernel in budgets.KERNELS.values()) <= MAX_HOPPER_BUILDS


@pytest.mark.parametrize("arch", [*budgets.ARCHS, *budgets.CONSUMER])
def test_an_import_compiles_few_builds(arch: str) -> None:
    """The first call may wait for them."""
    assert sum(len(kernel.core_on(arch)) for kernel in budgets.KERNELS.values()) <= MAX_BUILDS_OF_AN_IMPORT


@pytest.mark.parametrize(("arch", "smem_kb"), [("sm_80", 163), ("sm_89", 99), ("sm_90a", 0), ("sm_120", 99)])
def test_an_import_compiles_what_a_gpu_gets(arch: str, smem_kb: int) -> None:
    """Import compiles mma.sync kernels for the GPU's shared memory, and none on Hopper, which has faster ones."""
    compiled = {(kernel.name, build.smem_kb) for kernel in mma.KERNELS for build in kernel.core_on(arch)}
    assert compiled == {(kernel.name, smem_kb) for kernel in mma.KERNELS if smem_kb}
