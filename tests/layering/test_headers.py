"""Every header of the CUDA sources compiles alone: it includes what it declares things with, and needs no macros.

What the bodies of its templates use is checked in the text (`tests.layering.cuda`).
"""

from __future__ import annotations

from pathlib import Path

import pytest

from mla_cupy.runtime import nvrtc, sources
from tools import budgets

HEADERS = sorted(path.relative_to(sources.source_root()).as_posix() for path in sources.source_root().rglob("*.cuh"))
ARCHS = ("sm_90a", "sm_100a")
#: In turn for one of the targets, ordinarily: kernels that include a header are built for theirs.
PLACES = [
    pytest.param(header, arch, marks=[pytest.mark.slow] if (i + turn) % len(ARCHS) else [])
    for i, header in enumerate(HEADERS)
    for turn, arch in enumerate(ARCHS)
]
KERNEL = b'#include "%s"\nextern "C" __global__ void alone() {}\n'


def log_of(header: str, root: Path, arch: str) -> str:
    """NVRTC's log for a kernel that includes one header; empty if there is none."""
    library = budgets.library(budgets.LINES[0])
    if not library:
        pytest.skip(f"no NVRTC wheel of CUDA {budgets.LINES[0]} is installed")
    options = (f"-arch={arch}", "-std=c++17", "-default-device")
    output = nvrtc.load(library).compile("alone.cu", KERNEL % header.encode(), sources.gather(header, root), options)
    assert output.ok == (not output.log)
    return output.log


@pytest.mark.parametrize(("header", "arch"), PLACES)
def test_compiles_alone(header: str, arch: str) -> None:
    assert log_of(header, sources.source_root(), arch) == ""


@pytest.mark.parametrize(
    "body",
    [
        "inline __device__ i32 f() { return 0; }",
        "template <i32 kCount> __device__ int f() { return 0; }",
        "#ifndef MLA_DTYPE\n#error no dtype\n#endif",
    ],
)
def test_check_sees(tmp_path: Path, body: str) -> None:
    (tmp_path / "tile").mkdir()
    (tmp_path / "tile" / "x.cuh").write_text(f"#pragma once\n{body}\n")
    assert "error" in log_of("tile/x.cuh", tmp_path, ARCHS[0])
