"""One compilation: what is recorded, and what is refused; on every installed line of NVRTC."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from tiny_kernels import TINY_REQUEST

from mla_cupy.errors import KernelCompileError
from mla_cupy.runtime import build, elf, nvrtc, sources
from mla_cupy.runtime.build import BuildRequest, compile_kernel

SPILLS = """extern "C" __global__ void __launch_bounds__(1024, 2) mla_bad(float* x) {
    float r[96];
#pragma unroll
    for (int i = 0; i < 96; i++) r[i] = x[i * 1024 + threadIdx.x];
    __syncthreads();
#pragma unroll
    for (int i = 0; i < 96; i++) x[((i * 7) % 96) * 1024 + threadIdx.x] = r[i] * r[(i * 5 + 3) % 96];
}
"""
# The accumulator is scaled while the WGMMA that writes it is still in flight.
SERIALISES = """extern "C" __global__ void __launch_bounds__(128) mla_bad(float* o, unsigned long long a, int n) {
    float d[4] = {0, 0, 0, 0};
    for (int i = 0; i < n; i++) {
        asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
        asm volatile("wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {%0, %1, %2, %3}, %4, %4, 1, 1, 1, 0, 0;"
                     : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]) : "l"(a));
        asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
        d[0] *= 2.0f;
        asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
    }
    for (int i = 0; i < 4; i++) o[threadIdx.x * 4 + i] = d[i];
}
"""
LOG = """ptxas info    : (C7517) wgmma.wait_group is injected in around line 64 by compiler
ptxas warning : Something odd
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'mla_x' for 'sm_90a'
ptxas info    : Function properties for mla_x
ptxas         .     16 bytes stack frame, 8 bytes spill stores, 12 bytes spill loads
ptxas info    : Used 168 registers, used 9 barriers, 16 bytes cumulative stack size, 512 bytes smem
ptxas info    : Compile time = 23.171 ms
"""


def bad(root: Path, text: str) -> BuildRequest:
    (root / "generic" / "bad.cu").write_text(text)
    return BuildRequest("mla_bad", "generic/bad.cu", "sm_90a", (), "plain")


def test_record(cuda_src: Path, nvrtc_line: nvrtc.Nvrtc) -> None:
    made = compile_kernel(TINY_REQUEST, nvrtc_line)
    info = made.info
    assert made.cubin.startswith(b"\x7fELF")
    assert b".target sm_90a" in made.ptx
    assert made.facts == {"threads": 128, "smem_bytes": 2048, "offsets": [0, -8, 16]}
    assert 4 <= info["registers"] <= 32
    assert (info["spill_stores"], info["spill_loads"], info["stack"]) == (0, 0, 0)
    assert (info["static_smem"], info["barriers"], info["notes"]) == (512, 1, [])
    assert info["name"] == "mla_tiny-3-sm_90a"
    assert info["source_digest"] == sources.digest(sources.gather("generic/tiny.cu", cuda_src))
    assert tuple(map(int, info["nvrtc"].split(".")))[:2] == nvrtc_line.version
    assert len([option for option in info["options"] if "arch" in option]) == 1
    assert [symbol.name for symbol in elf.symbols(made.cubin) if symbol.is_entry] == ["mla_tiny"]


def test_a_virtual_target_has_ptx_alone(cuda_src: Path, nvrtc_line: nvrtc.Nvrtc) -> None:
    """PTX and facts equal the whole build's, for the simulator."""
    whole, made = (compile_kernel(each, nvrtc_line) for each in (TINY_REQUEST, TINY_REQUEST.as_virtual()))
    assert (made.cubin, made.facts, made.info["registers"]) == (b"", whole.facts, 0)
    assert made.ptx == whole.ptx
    assert made.info["name"] == "mla_tiny-3-compute_90a"
    with pytest.raises(KernelCompileError, match=r"entries of generic/bad\.cu: got none, expected mla_bad"):
        compile_kernel(bad(cuda_src, "").as_virtual(), nvrtc_line)


def test_macros_and_target_reach_the_code(cuda_src: Path, nvrtc_line: nvrtc.Nvrtc) -> None:
    three = compile_kernel(TINY_REQUEST, nvrtc_line)
    five = compile_kernel(replace(TINY_REQUEST, defines=(("MLA_FACTOR", "5.0f"),)), nvrtc_line)
    old = compile_kernel(replace(TINY_REQUEST, arch="sm_75"), nvrtc_line)
    assert three.cubin != five.cubin
    assert b".target sm_75" in old.ptx
    assert old.facts == three.facts


def test_spills_are_refused(cuda_src: Path, nvrtc_line: nvrtc.Nvrtc) -> None:
    with pytest.raises(KernelCompileError, match=r"mla_bad-plain-sm_90a is refused.*\nspills \d+ bytes of stores"):
        compile_kernel(bad(cuda_src, SPILLS), nvrtc_line)


def test_serialisation_is_refused(cuda_src: Path, nvrtc_line: nvrtc.Nvrtc) -> None:
    with pytest.raises(KernelCompileError) as caught:
        compile_kernel(bad(cuda_src, SERIALISES), nvrtc_line)
    assert "C7517" in str(caught.value)
    assert "Potential Performance Loss" in str(caught.value)


def test_tensor_memory_can_be_checked(cuda_src: Path, nvrtc_line: nvrtc.Nvrtc, monkeypatch: pytest.MonkeyPatch) -> None:
    """Such a build for Blackwell is meant to be slow, and may spill."""
    monkeypatch.setenv("MLA_CUPY_TMEM_CHECK", "1")
    for arch, checked in (("sm_90a", False), ("sm_100a", True), ("sm_103a", True)):
        info = compile_kernel(replace(TINY_REQUEST, arch=arch), nvrtc_line).info
        assert any("tensor-memory-access-check" in option for option in info["options"]) == checked
    spilling = replace(bad(cuda_src, SPILLS), arch="sm_100a")
    assert compile_kernel(spilling, nvrtc_line).info["spill_stores"] > 0


def test_debug_builds(cuda_src: Path, nvrtc_line: nvrtc.Nvrtc, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "-DMLA_DEBUG" not in compile_kernel(TINY_REQUEST, nvrtc_line).info["options"]
    monkeypatch.setenv("MLA_CUPY_DEBUG", "1")
    assert "-DMLA_DEBUG" in compile_kernel(TINY_REQUEST, nvrtc_line).info["options"]


def test_mixed_groups_are_refused(cuda_src: Path, nvrtc_line: nvrtc.Nvrtc) -> None:
    """NVRTC 13's ptxas refuses them, or else we do: NVRTC 12.9 would accept them."""
    text = """extern "C" __global__ void mla_bad() {
        asm volatile("tcgen05.relinquish_alloc_permit.cta_group::1.sync.aligned;");
        asm volatile("tcgen05.relinquish_alloc_permit.cta_group::2.sync.aligned;");
    }"""
    with pytest.raises(KernelCompileError, match="cta_group"):
        compile_kernel(replace(bad(cuda_src, text), arch="sm_100a"), nvrtc_line)
    one = text.replace("group::2", "group::1")
    assert compile_kernel(replace(bad(cuda_src, one), arch="sm_100a"), nvrtc_line).ptx.count(b"cta_group::1") == 2


@pytest.mark.parametrize(
    ("text", "got"),
    [
        ('extern "C" __global__ void mla_bad() {}\nextern "C" __global__ void mla_more() {}\n', "mla_more"),
        ('extern "C" __global__ void mla_other() {}\n', "got mla_other"),
        ("__device__ int nothing;\n", "got none"),
    ],
)
def test_exactly_one_entry(cuda_src: Path, text: str, got: str) -> None:
    with pytest.raises(KernelCompileError, match="expected mla_bad and no other") as caught:
        compile_kernel(bad(cuda_src, text))
    assert got in str(caught.value)


def test_a_compile_error_shows_the_log(cuda_src: Path, nvrtc_line: nvrtc.Nvrtc) -> None:
    (cuda_src / "common" / "scale.cuh").write_text("int wrong = nowhere;\n")
    with pytest.raises(KernelCompileError, match=r'common/scale\.cuh\(1\): error: identifier "nowhere"'):
        compile_kernel(TINY_REQUEST, nvrtc_line)


def test_a_log_is_read() -> None:
    assert build.resources(LOG) == {
        "registers": 168,
        "spill_stores": 8,
        "spill_loads": 12,
        "stack": 16,
        "static_smem": 512,
        "barriers": 9,
    }
    assert [note.split(":")[0].split()[1] for note in build.notes(LOG)] == ["info", "warning"]
    assert "C7517" in build.notes(LOG)[0]


def test_missing_nvrtc_names_the_remedy(cuda_src: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MLA_CUPY_NVRTC", raising=False)
    monkeypatch.setattr(nvrtc, "_candidates", lambda: iter(()))
    with pytest.raises(KernelCompileError, match=r'pip install "nvidia-cuda-nvrtc-cu12>=12\.9"'):
        compile_kernel(TINY_REQUEST)


def test_a_given_path_that_is_no_nvrtc(cuda_src: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLA_CUPY_NVRTC", str(tmp_path / "none.so"))
    with pytest.raises(KernelCompileError, match="MLA_CUPY_NVRTC"):
        compile_kernel(TINY_REQUEST)
    (tmp_path / "none.so").write_text("not a library")
    with pytest.raises(KernelCompileError, match="expected a loadable libnvrtc"):
        compile_kernel(TINY_REQUEST)


def test_an_old_nvrtc_is_refused(
    cuda_src: Path, shared_library: Callable[[str, str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    old = """int nvrtcVersion(int* major, int* minor) { *major = 12; *minor = 8; return 0; }
    const char* nvrtcGetErrorString(int code) { return "no"; }"""
    library = shared_library(old, "libnvrtc.so.12")
    monkeypatch.setenv("MLA_CUPY_NVRTC", str(library))
    with pytest.raises(KernelCompileError, match=r"version 12\.8, expected 12\.9 or newer; pip install"):
        compile_kernel(TINY_REQUEST)


def test_the_line_of_the_installed_cupy_comes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    installed = {"cupy-cuda13x": "14.2.0"}
    monkeypatch.setattr(nvrtc, "_installed", lambda package: installed.get(package, ""))
    assert nvrtc._lines() == (13, 12)
    installed.clear()
    assert nvrtc._lines() == (12, 13)
    installed["cuda-bindings"] = "13.5.0"
    assert nvrtc._lines() == (13, 12)


def test_a_wheel_that_is_too_old_comes_last(monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as the one that a PyTorch pins, with a newer one next to it."""
    versions = {"nvidia-cuda-nvrtc-cu12": "12.8.93", "nvidia-cuda-nvrtc": "13.5.37"}
    monkeypatch.setattr(nvrtc, "_installed", lambda package: versions.get(package, ""))
    newer, older = nvrtc._wheels((12, 13))
    assert newer.endswith("libnvrtc.so.13")
    assert older.endswith("libnvrtc.so.12")


def test_identity_tells_libraries_apart(tmp_path: Path, nvrtc_line: nvrtc.Nvrtc) -> None:
    identity = nvrtc.identity(nvrtc_line.path)
    assert len(identity) == 40  # a GNU build id
    (tmp_path / "a").write_bytes(b"a")
    (tmp_path / "b").write_bytes(b"b")
    assert len({identity, nvrtc.identity(str(tmp_path / "a")), nvrtc.identity(str(tmp_path / "b"))}) == 3
