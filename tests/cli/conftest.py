"""A registry of one tiny kernel and one that does not compile, for the tests of the command line."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from mla_cupy import kernels
from mla_cupy.kernels.param_layout import Params
from mla_cupy.kernels.spec import HOPPER, KernelSpec, Variant
from mla_cupy.runtime import cache, loader

SOURCE = """extern "C" __constant__ const int mla_fact_smem_bytes = 1024;
extern "C" __global__ void mla_copy(float* x) { x[0] = x[1]; }
"""


@pytest.fixture
def registry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Two kernels: `copy` for every target, `wrong` for sm_90a only."""
    root = tmp_path / "cuda_src"
    root.mkdir()
    (root / "copy.cu").write_text(SOURCE)
    (root / "wrong.cu").write_text("nonsense\n")
    monkeypatch.setenv("MLA_CUPY_CUDA_SRC", str(root))
    monkeypatch.setenv("MLA_CUPY_CACHE_DIR", str(tmp_path / "cache"))
    for name in ("CUBIN_DIR", "JIT", "NVRTC", "LINEINFO", "TMEM_CHECK", "DEBUG", "ADMISSION"):
        monkeypatch.delenv(f"MLA_CUPY_{name}", raising=False)
    plain = (Variant(),)
    specs = {
        "copy": KernelSpec("copy", "copies a number", "copy.cu", Params, core=plain),
        "wrong": KernelSpec("wrong", "does not compile", "wrong.cu", Params, HOPPER),
    }
    monkeypatch.setattr(kernels, "KERNELS", specs)
    cache._warned.clear()
    loader.forget()
    yield tmp_path
    loader.forget()
