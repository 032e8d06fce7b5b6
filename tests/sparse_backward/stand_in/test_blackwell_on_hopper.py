"""The Blackwell kernels of the sparse backward on a Hopper GPU, with stand-ins for the instructions that Hopper lacks.

tcgen05 and gather4 are replaced (`ptx/` beside this file); everything else is the kernels' own and runs on real
hardware: TMA boxes and their swizzle, mbarriers, setmaxnreg, the stmatrix writers, MN-major and K-major descriptors,
fp32 reductions in the permuted order, stores of dQ, and the sequence around the kernel. In the simulator one small case
shows that the stand-ins are correct.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import mla_cupy
from mla_cupy.kernels.sparse_backward import SPARSE_BACKWARD, sm100
from mla_cupy.kernels.spec import takes_all
from mla_cupy.ops.call import forget
from mla_cupy.runtime import loader, sources
from mla_cupy.runtime.device import DeviceInfo
from tests.support.flat import flat
from tests.support.gradients import backward, check_gradients
from tests.support.kernels import BACKWARD_KERNELS, BLACKWELL
from tests.support.sim_driver import simulated
from tests.support.sparse_cases import SparseCase, make

STAND_INS = Path(__file__).parent / "ptx"

#: At most 64 blocks each, which is what the stand-in has tensor memory for.
CASES = [
    SparseCase(s_q=1, s_kv=100, h_q=64, topk=32, invalid=0.0),
    SparseCase(s_q=3, s_kv=300, h_q=128, topk=200, lengths=True, sink=True),
    SparseCase(s_q=4, s_kv=200, h_q=65, topk=130, causal=True, d_qk=512, dtype="float16"),
    SparseCase(s_q=7, s_kv=40, h_q=9, topk=130, invalid=0.3),
    SparseCase(s_q=32, s_kv=500, h_q=100, topk=333, sink=True),
    SparseCase(s_q=2, s_kv=50, h_q=16, topk=40, invalid=1.0),
]


@pytest.fixture
def stand_ins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Within a test, the Blackwell kernels are built with the stand-ins, for the GPU at hand."""
    root = tmp_path / "cuda_src"
    shutil.copytree(sources.source_root(), root)
    for header in STAND_INS.iterdir():
        assert (root / "ptx" / header.name).exists()
        shutil.copy(header, root / "ptx")
    monkeypatch.setenv("MLA_CUPY_CUDA_SRC", str(root))
    kernels = SPARSE_BACKWARD.kernels
    taking_all = tuple(
        replace(kernel, unsupported=takes_all) if kernel.name in BLACKWELL else kernel for kernel in kernels
    )
    monkeypatch.setattr(type(SPARSE_BACKWARD), "kernels", taking_all)
    _forget()
    yield
    _forget()


def _forget() -> None:
    loader.forget()
    forget()


@pytest.mark.gpu
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
@pytest.mark.parametrize("kernel", BLACKWELL)
def test_on_a_gpu(stand_ins: None, gpu: DeviceInfo, kernel: str, case: SparseCase, deterministic: bool) -> None:
    if gpu.cc < (9, 0):
        pytest.skip(f"TMA needs compute capability 9.0, {gpu.name} has {gpu.cc[0]}.{gpu.cc[1]}")
    inputs = make(case)
    for _ in range(3):
        got = backward(inputs, kernel=kernel, deterministic=deterministic)
        check_gradients(got, inputs, deterministic=deterministic)


@pytest.mark.slow
@pytest.mark.parametrize("kernel", BLACKWELL)
def test_in_the_simulator(stand_ins: None, kernel: str) -> None:
    """A program for Hopper in the simulator."""
    inputs = make(SparseCase(s_q=1, s_kv=60, h_q=16, topk=33, d_qk=576, invalid=0.0))
    with simulated(2, (9, 0), "late") as target:
        got: Any = flat(mla_cupy.sparse_mla_backward)(*inputs.backward_arguments, **inputs.options, kernel=kernel)
    assert BACKWARD_KERNELS[kernel].entry in target.launched
    check_gradients(got, inputs)


def test_the_cases_fit() -> None:
    for case in CASES:
        assert case.s_q * -(-case.h_q // sm100.BLOCK_HEADS) <= 64
