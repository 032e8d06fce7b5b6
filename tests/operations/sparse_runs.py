"""The sparse forward and backward as one: how each is run and judged on a GPU."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest

import mla_cupy
from mla_cupy.runtime.device import DeviceInfo
from tests.support import gradients, sparse_gpu
from tests.support.calls import assert_same
from tests.support.flat import flat
from tests.support.kernels import has_sizes
from tests.support.sparse_cases import SparseCase, SparseInputs


@dataclass(frozen=True)
class SparseRun:
    """An operation with one of its kernels, and the options of the call."""

    operation: str
    kernel: str
    case: SparseCase
    options: dict[str, Any] = field(default_factory=dict, hash=False)

    @property
    def id(self) -> str:
        return "-".join([self.kernel, *(name for name, value in self.options.items() if value)])

    @property
    def _support(self) -> Any:
        return sparse_gpu if self.operation == "sparse_mla_forward" else gradients

    @property
    def neighbours(self) -> tuple[SparseCase, SparseCase]:
        """Two cases of different sizes; the forward's second one is split, so that there are partial results."""
        if self.operation == "sparse_mla_forward":
            return WHOLE, SPLIT
        return self.case, replace(self.case, s_q=9, seed=1)

    def need(self, gpu: DeviceInfo) -> None:
        """Skip where the kernel cannot run the case."""
        self._support.need(self.kernel, gpu, self.case, **self.options)

    def check(self, inputs: SparseInputs) -> None:
        """The call on the GPU against the oracle."""
        self._support.run_and_check(inputs, kernel=self.kernel, **self.options)

    def prepared(self, inputs: SparseInputs) -> functools.partial[Any]:
        """The call, with its arrays on the GPU; it takes further options."""
        arguments, named = self._support.uploaded(inputs)
        function = flat(getattr(mla_cupy, self.operation))
        fixed = {**named, **self.options, "kernel": self.kernel}
        return functools.partial(function, *arguments, **fixed)

    def assert_same(self, got: Sequence[Any], wanted: Sequence[Any]) -> None:
        """Bit by bit, but for the sums of a backward that has no fixed order."""
        free = self.operation == "sparse_mla_backward" and not self.options["deterministic"]
        for at, (x, expected) in enumerate(zip(got, wanted, strict=True)):
            if expected is None or (free and at == 1):
                assert np.shape(x) == np.shape(expected)
            else:
                assert_same(x, expected)


FORWARD = SparseCase(s_q=40, s_kv=500, h_q=16, topk=200, sink=True)
WHOLE = SparseCase(s_q=300, s_kv=900, h_q=16, topk=130, lengths=True, sink=True)
SPLIT = SparseCase(s_q=3, s_kv=9000, h_q=16, topk=5000, sink=True)
BACKWARD = SparseCase(s_q=60, s_kv=500, h_q=72, topk=200, lengths=True, sink=True)

_RUNS = (
    *(SparseRun("sparse_mla_forward", kernel, FORWARD) for kernel in sparse_gpu.ALL_KERNELS),
    *(
        SparseRun("sparse_mla_backward", kernel, BACKWARD, {"deterministic": deterministic})
        for kernel in gradients.ALL_KERNELS
        for deterministic in (False, True)
    ),
)
RUNS = [
    *(pytest.param(run, id=run.id) for run in _RUNS),
    *(pytest.param(run, id=f"{run.id}-99kb", marks=pytest.mark.in_99kb) for run in _RUNS if has_sizes(run.kernel)),
]
