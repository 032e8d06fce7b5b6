"""The kernels that each operation chooses from, by name, the fastest first."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest

from mla_cupy.kernels import KERNELS
from mla_cupy.kernels.attention.kernel import AttentionKernel
from mla_cupy.kernels.decode import DECODE
from mla_cupy.kernels.decode.problem import DecodeProblem
from mla_cupy.kernels.pipeline import Pipeline
from mla_cupy.kernels.sparse_backward import SPARSE_BACKWARD
from mla_cupy.kernels.sparse_backward.problem import BackwardKernel
from mla_cupy.kernels.sparse_forward import SPARSE_FORWARD
from mla_cupy.shapes import D_V
from mla_cupy.simulation import fake_gpu
from tests.support.cases import DecodeCase


def by_name(pipeline: Pipeline[Any]) -> dict[str, Any]:
    """The kernels of a pipeline."""
    return {kernel.name: kernel for kernel in pipeline.kernels}


def on_hopper(kernels: dict[str, Any]) -> tuple[str, ...]:
    """Kernels with WGMMA."""
    return tuple(name for name in kernels if "sm90" in name)


def on_blackwell(kernels: dict[str, Any]) -> tuple[str, ...]:
    """Kernels with tcgen05."""
    return tuple(name for name in kernels if "sm100" in name)


_OF_ROWS = {k: v for k, v in by_name(DECODE).items() if "records" not in k and v.math == "exact"}
#: Dense decode's kernels for 16-bit rows with values of 512 columns, and for FP8 tokens.
DECODE_KERNELS: dict[str, AttentionKernel[Any]] = {k: v for k, v in _OF_ROWS.items() if D_V in v.value_widths}
#: Kernels for narrower values, which have separate tests.
NARROW_KERNELS: dict[str, AttentionKernel[Any]] = {k: v for k, v in _OF_ROWS.items() if min(v.value_widths) < D_V}
RECORD_KERNELS: dict[str, AttentionKernel[Any]] = {k: v for k, v in by_name(DECODE).items() if "records" in k}
#: Kernels with FP8 matmuls.
FP8_KERNELS: dict[str, AttentionKernel[Any]] = {k: v for k, v in by_name(DECODE).items() if v.math == "fp8"}
#: Kernels that need no schedule; they have separate tests.
CLUSTER_KERNELS = tuple(name for name, kernel in DECODE_KERNELS.items() if kernel.cluster_blocks > 1)
SCHEDULED_KERNELS = {name: kernel for name, kernel in DECODE_KERNELS.items() if name not in CLUSTER_KERNELS}
FORWARD_KERNELS: dict[str, AttentionKernel[Any]] = {
    k: v for k, v in by_name(SPARSE_FORWARD).items() if "records" not in k and v.math == "exact"
}
BACKWARD_KERNELS: dict[str, BackwardKernel] = by_name(SPARSE_BACKWARD)
#: Those with tcgen05.
BLACKWELL = on_blackwell(BACKWARD_KERNELS)


def has_sizes(kernel: str) -> bool:
    """True if a kernel has builds for two sizes of shared memory."""
    return hasattr(KERNELS[kernel].variants[0], "smem_kb")


def in_both_sizes(kernels: Iterable[str]) -> list[Any]:
    """Parameters of tests: kernels with builds for two sizes of shared memory are repeated with the smaller one."""
    names = [*kernels]
    in_99kb = [name for name in names if has_sizes(name)]
    return [*names, *(pytest.param(name, id=f"{name}-99kb", marks=pytest.mark.in_99kb) for name in in_99kb)]


def cc_of(kernel: str) -> tuple[int, int]:
    """The compute capability of a GPU that has the kernel: a Hopper, unless it is Blackwell's."""
    return (10, 0) if "sm100" in kernel else (9, 0)


def takes(kernel: str, case: DecodeCase) -> bool:
    """True if a decode kernel supports the case, on a Hopper."""
    sizes: dict[str, Any] = {"d_qk": case.d_qk, "record": case.record, "math": case.math}
    problem = DecodeProblem(case.s_q, case.h_q, case.dtype, **sizes)
    return not {**DECODE_KERNELS, **RECORD_KERNELS, **FP8_KERNELS}[kernel].unsupported(problem, fake_gpu(1))


def fitting(case: DecodeCase, kernel: str) -> DecodeCase:
    """The case, with fewer heads where the kernel takes no more."""
    while not takes(kernel, case):
        case = replace(case, h_q=case.h_q // 2)
        assert case.h_q > 0, f"{kernel} takes no number of heads"
    return case
