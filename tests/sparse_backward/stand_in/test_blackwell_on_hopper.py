"""The Blackwell kernels of the sparse backward on a Hopper GPU, with stand-ins for what Hopper has not.

tcgen05 and gather4 are replaced (`ptx/` beside this file); everything else is the kernels' own and runs on real
hardware: TMA boxes and their swizzle, mbarriers, setmaxnreg, the stmatrix writers, MN-major and K-major descriptors,
fp32 reductions in the permuted order, stores of dQ, and the sequence around the kernel. In the simulator one small case
shows that the stand-ins are right.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import mla_cupy
from mla_cupy.launchers import sparse_backward_sequence, sparse_backward_sm100
from mla_cupy.launchers.sparse_backward_config import KERNELS
from mla_cupy.runtime import kernels, sources
from mla_cupy.runtime.device import DeviceInfo
from tests.support.gradients import backward, check_gradients
from tests.support.sim_driver import simulated
from tests.support.sparse_cases import SparseCase, make

STAND_INS = Path(__file__).parent / "ptx"
BLACKWELL = tuple(name for name in KERNELS if "sm100" in name)

#: Of at most 64 blocks, which is what the stand-in has tensor memory for.
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
    """Within a test, the Blackwell kernels are built with the stand-ins, for whatever GPU there is."""
    root = tmp_path / "cuda_src"
    shutil.copytree(sources.source_root(), root)
    for header in STAND_INS.iterdir():
        assert (root / "ptx" / header.name).exists()
        shutil.copy(header, root / "ptx")
    monkeypatch.setenv("MLA_CUPY_CUDA_SRC", str(root))
    for name in BLACKWELL:
        monkeypatch.setattr(KERNELS[name], "unsupported", lambda problem, device: "")
    _forget()
    yield
    _forget()


def _forget() -> None:
    kernels.forget()
    sparse_backward_sequence.sequence.cache_clear()


@pytest.mark.gpu
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
@pytest.mark.parametrize("kernel", BLACKWELL)
def test_on_a_gpu(stand_ins: None, gpu: DeviceInfo, kernel: str, case: SparseCase, deterministic: bool) -> None:
    if gpu.cc < (9, 0):
        pytest.skip(f"TMA needs compute capability 9.0, {gpu.name} has {gpu.cc[0]}.{gpu.cc[1]}")
    inputs = make(case)
    for _ in range(3):
        got = backward(inputs, variant=kernel, deterministic=deterministic)
        check_gradients(got, inputs, deterministic=deterministic)


@pytest.mark.parametrize("kernel", BLACKWELL)
def test_in_the_simulator(stand_ins: None, kernel: str) -> None:
    """As a program for Hopper."""
    inputs = make(SparseCase(s_q=1, s_kv=60, h_q=16, topk=33, d_qk=576, invalid=0.0))
    with simulated(2, (9, 0), "late") as target:
        got: Any = mla_cupy.sparse_mla_backward(*inputs.backward_arguments, **inputs.options, variant=kernel)
    assert KERNELS[kernel].SPEC.entry in target.launched
    check_gradients(got, inputs)


def test_the_cases_fit() -> None:
    for case in CASES:
        assert case.s_q * -(-case.h_q // sparse_backward_sm100.HEADS_PER_ADDITION) <= 64
