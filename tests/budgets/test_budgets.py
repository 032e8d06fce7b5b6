"""Every kernel compiles for every target on both lines of NVRTC, within the resources that the golden file holds.

A run without long forms makes some of the builds: see `Target.is_made`.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mla_cupy.kernels.attention import mma
from mla_cupy.runtime import nvrtc, sources
from mla_cupy.runtime.build import Build, compile_kernel
from mla_cupy.runtime.device import TARGETS
from tests.budgets import builds, update
from tests.budgets.builds import Target

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
#: With ten of V4.1's records and of narrow keys for any GPU, 14 for Hopper, and twelve on tensor cores of GPUs since
#: Ampere, eight more of narrow keys on Hopper, and twelve of records in dense decode on Blackwell, which no import
#: compiles; results of sparse decode that are turned back; six on Hopper for pieces of the sparse backward and FP8, and
#: six on Blackwell for dense decode in FP8; three on Hopper for two terms in FP8, 18 for forms over records, two for
#: blocks of 40 rows, and one for partial results in bfloat16.
MAX_BUILDS = {"sm_90a": 560, "sm_100a": 364, "sm_103a": 364}
MAX_BUILDS_ELSEWHERE, MAX_CORE_BUILDS = 262, 32
SETUP = Path(__file__).resolve().parents[2] / "setup.cfg"


def built(target: Target) -> Build:
    """The target's build; skipped only where its NVRTC is not installed."""
    if not builds.library(target.line):
        pytest.skip(f"no NVRTC wheel of CUDA {target.line} is installed")
    return builds.build(target)


def to_build(targets: Iterable[Target]) -> list[Any]:
    """As parameters of tests."""
    marks = {True: [pytest.mark.slow], False: []}
    return [pytest.param(target, id=str(target), marks=marks[target.is_long_form]) for target in targets]


@pytest.fixture(params=to_build(builds.TARGETS))
def target(request: pytest.FixtureRequest) -> Target:
    found: Target = request.param
    return found


def test_compiles_and_fits(target: Target) -> None:
    """Spills, stack and serialised WGMMAs are slow without an error of NVRTC's; the rest would not launch.

    A kernel that may spill may do so for so many bytes, which its stack holds too.
    """
    made = built(target)
    info, figures = made.info, builds.figures(made)
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
    if not builds.library(target.line):
        pytest.skip(f"no NVRTC wheel of CUDA {target.line} is installed")
    request = target.spec.request(target.variant, target.arch)
    made = compile_kernel(request, nvrtc.load(builds.library(target.line)))
    assert made.info["seconds"] <= MAX_SECONDS_OF_A_VARIANT


def test_resources_are_the_golden_ones(target: Target) -> None:
    made = built(target)
    known = builds.golden()
    version = builds.version(target.line)
    if version not in known:
        pytest.skip(f"the golden file has no figures of NVRTC {version}, only of {', '.join(known)}")
    assert builds.figures(made) == known[version].get(target.name), "if intended: python -m tests.budgets.update"


def test_every_run_has_some_kernels_both_lines_and_the_main_targets() -> None:
    short = [target for target in builds.TARGETS if target.is_made(changed=False)]
    assert {target.kernel for target in short} == {*[*builds.KERNELS][:: builds.UNCHANGED]}
    assert len({target.kernel for target in short}) == len(short)
    many = [target for target in short if target.runs_on_many]
    assert {target.line for target in many} == {*builds.LINES}
    assert {target.arch for target in many} == {*builds.MAIN}


def test_a_run_after_a_change_has_each_variant_once() -> None:
    short = [target for target in builds.TARGETS if target.is_made(changed=True)]
    assert {(target.arch, target.kernel) for target in short} == {(t.arch, t.kernel) for t in builds.TARGETS}
    assert {(target.kernel, target.variant) for target in short} == {(t.kernel, t.variant) for t in builds.TARGETS}
    assert {(target.line, target.kernel) for target in short} == {(t.line, t.kernel) for t in builds.TARGETS}
    of_one_arch = [target for target in builds.TARGETS if not target.runs_on_many and target.arch not in builds.TWINS]
    assert {target.name for target in of_one_arch} <= {target.name for target in short}


@pytest.mark.parametrize("twin", builds.TWINS)
def test_twins_need_the_same_resources(twin: str) -> None:
    """What lets one stand for the other, where runs without long forms make only one."""
    known = builds.golden()
    made = {target.name for target in builds.TARGETS if target.is_made(changed=True)}
    targets = [target for target in builds.TARGETS if target.arch == twin and target.name not in made]
    assert targets
    for target in targets:
        figures = next(known[version] for version in known if version.startswith(f"{target.line}."))
        other = replace(target, arch=builds.TWINS[twin])
        assert figures[target.name] == figures[other.name], "then both are to be built in every run"


def test_other_versions_write_no_golden_file(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A set of figures of another NVRTC would replace those of the pinned one."""
    monkeypatch.setattr(builds, "version", lambda line: "12.8.93" if line == 12 else builds.pinned(line))
    monkeypatch.setattr(update, "make", lambda *given: pytest.fail("the work has begun"))
    assert update.main([]) == 1
    assert "NVRTC of CUDA 12: got 12.8.93, expected 12.9.86; pip install nvidia-cuda-nvrtc-cu12==12.9.86" in (
        capsys.readouterr().err
    )


@pytest.mark.parametrize("line", builds.LINES)
def test_golden_file_is_complete(line: int) -> None:
    """One set of figures a line, of the version that the extra `test` pins, without a kernel that is no more."""
    pin = builds.pinned(line)
    assert [pin] == [version for version in builds.golden() if version.startswith(f"{line}.")]
    assert builds.golden()[pin].keys() == {target.name for target in builds.TARGETS if target.line == line}


def test_a_fingerprint_is_of_all_that_a_build_depends_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of every source, of the options and of the golden figures; comments, spacing and unused functions may change."""
    kernel, root = "merge_states", tmp_path / "cuda_src"
    shutil.copytree(sources.source_root(), root)
    monkeypatch.setenv("MLA_CUPY_CUDA_SRC", str(root))
    fingerprint = builds.fingerprint.__wrapped__
    known = fingerprint(kernel)
    texts = {name: builds.code(text) for name, text in sources.gather(builds.KERNELS[kernel].source).items()}
    assert any(builds._FUNCTION.search(text) for text in builds.used(texts).values())
    for name in texts:
        text = (root / name).read_bytes()
        more = b"/* Another\none. */\nMLA_DEVICE void nobody_calls_it(i32 x) {\n    bar_sync(x);\n}\n"
        (root / name).write_bytes(b"// A new comment.\n" + text.replace(b"    ", b"\t") + more)
        assert fingerprint(kernel) == known, name
        for function in builds._FUNCTION.finditer(builds.used({**texts, name: builds.code(text)})[name]):
            changed = builds.code(text).replace(function[0], function[0].replace(b"{", b"{ trap();", 1))
            (root / name).write_bytes(changed)
            assert fingerprint(kernel) != known, (name, function[1])
        (root / name).write_bytes(text + b"\n#define kMore 1\n")
        assert fingerprint(kernel) != known, name
        (root / name).write_bytes(text)
    with monkeypatch.context() as changed:
        changed.setenv("MLA_CUPY_LINEINFO", "1")
        assert fingerprint(kernel) != known
    figures = {line: {name: {"registers": 0} for name in names} for line, names in builds.golden().items()}
    monkeypatch.setattr(builds, "golden", lambda: figures)
    assert fingerprint(kernel) != known


@pytest.mark.parametrize("arch", TARGETS)
def test_builds_of_a_target_are_few(arch: str) -> None:
    """All of them, which a container image may hold, and those of an import, which the first call waits for."""
    kernels = [kernel for kernel in builds.KERNELS.values() if kernel.supports_arch(arch)]
    assert sum(len(kernel.variants) for kernel in kernels) <= MAX_BUILDS.get(arch, MAX_BUILDS_ELSEWHERE)
    assert sum(len(kernel.core_on(arch)) for kernel in kernels) <= MAX_CORE_BUILDS


@pytest.mark.parametrize(("arch", "smem_kb"), [("sm_80", 163), ("sm_89", 99), ("sm_90a", 0), ("sm_120", 99)])
def test_an_import_compiles_what_a_gpu_gets(arch: str, smem_kb: int) -> None:
    """Of the kernels with mma.sync those for its shared memory, and on Hopper, which has faster ones, none."""
    compiled = {kernel.name for kernel in mma.KERNELS if kernel.core_on(arch)}
    assert compiled == {kernel.name for kernel in mma.KERNELS if kernel.variants[0].smem_kb == smem_kb}


def test_kernels_that_are_no_more_have_no_fingerprint() -> None:
    assert builds.verified().keys() <= builds.KERNELS.keys()
