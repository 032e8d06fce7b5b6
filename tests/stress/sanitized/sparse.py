"""Sparse attention over 16-bit rows, and its backward."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from tests.stress.sanitized import Call
from tests.support import gradients, sparse_gpu
from tests.support.kernels import BACKWARD_KERNELS, FORWARD_KERNELS
from tests.support.sparse_cases import SparseCase, SparseInputs, make

FEW = (
    SparseCase(s_q=3, s_kv=200, h_q=100, topk=130, lengths=True, sink=True),
    SparseCase(s_q=3, s_kv=90, h_q=16, topk=70, d_qk=512, dtype="float16"),
    SparseCase(s_q=6, s_kv=90, h_q=5, topk=40, sequences=((2, 30), (0, 5), (3, 40)), causal=True),
    SparseCase(s_q=2, s_kv=90, h_q=64, topk=70, invalid=1.0, sink=True),
)
#: Enough queries for several per block.
MANY = (
    SparseCase(s_q=280, s_kv=200, h_q=7, topk=70, lengths=True, sink=True),
    SparseCase(s_q=140, s_kv=90, h_q=70, topk=70, d_qk=512, dtype="float16"),
)
#: With a gradient of the log-sum-exps, which has a kernel of its own.
DLSE = SparseCase(s_q=3, s_kv=60, h_q=20, topk=40, lengths=True, sink=True, dlse=True)
#: With lists that the backward cuts into pieces.
PIECES = SparseCase(s_q=2, s_kv=400, h_q=20, topk=380, lengths=True)


def calls() -> Iterator[Call]:
    """Every kernel, sums of the backward in any order and always the same."""
    for case in (*FEW, *MANY):
        inputs, one_item = make(case), case in FEW
        for kernel in FORWARD_KERNELS:
            yield Call(f"{kernel} {case.id}", partial(sparse_gpu.run_and_check, inputs, kernel=kernel), one_item)
        yield from _backward(inputs, one_item)
    for case in (DLSE, PIECES):
        yield from _backward(make(case), one_item=True)


def _backward(inputs: SparseInputs, one_item: bool) -> Iterator[Call]:
    for kernel in BACKWARD_KERNELS:
        for deterministic in (False, True):
            run = partial(gradients.run_and_check, inputs, kernel=kernel, deterministic=deterministic)
            name = f"{kernel} {inputs.case.id}{' deterministic' if deterministic else ''}"
            yield Call(name, run, one_item)
