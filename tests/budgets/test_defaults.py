"""Kernels that a GPU runs by default are compiled ahead: they are in every image, and in the golden file."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from typing import Any

import pytest

from mla_cupy.dtypes import HALF
from mla_cupy.errors import MlaError
from mla_cupy.kernels.attention.records import COMPACT, DENSE_RECORDS, PLAIN_RECORDS, SPARSE_RECORDS
from mla_cupy.kernels.decode import DECODE
from mla_cupy.kernels.decode.problem import Batch, DecodeProblem, Forms
from mla_cupy.kernels.dense import DENSE
from mla_cupy.kernels.dense.problem import GEOMETRIES, DenseProblem
from mla_cupy.kernels.sparse_backward import SPARSE_BACKWARD
from mla_cupy.kernels.sparse_backward.problem import SparseBackwardProblem
from mla_cupy.kernels.sparse_decode import SPARSE_DECODE
from mla_cupy.kernels.sparse_decode.problem import SparseDecodeProblem
from mla_cupy.kernels.sparse_forward import SPARSE_FORWARD
from mla_cupy.kernels.sparse_forward.problem import HEAD_DIMS_QK, SparseForwardProblem
from mla_cupy.runtime.device import SAMPLES, DeviceInfo
from mla_cupy.shapes import VALUE_WIDTHS

BOTH = (False, True)
HEADS = (1, 16, 20, 33, 64, 128)
#: Blackwell, where the self-test has not passed.
UNPROVEN = tuple(replace(gpu, name=f"{gpu.name}, untested", admitted=frozenset()) for gpu in SAMPLES if gpu.cc[0] == 10)


def problems() -> Iterator[tuple[Any, Any]]:
    """Problems of all widths, formats and optional inputs, for each family with mma.sync kernels."""
    for s_q, h_q, dtype, aligned, tree in product((1, 3), HEADS, HALF, BOTH, BOTH):
        for d_qk, batch in product(VALUE_WIDTHS, (None, Batch(1, 100), Batch(64, 100_000))):
            problem = DecodeProblem(s_q, h_q, dtype, aligned, d_qk, tree_mask=tree, batch=batch)
            yield DECODE, problem
            yield DECODE, replace(problem, forms=Forms(q_rope=True, window=9))
        for record in (*DENSE_RECORDS, *PLAIN_RECORDS):
            yield DECODE, DecodeProblem(s_q, h_q, dtype, aligned, record=record, tree_mask=tree)
    for (d_qk, d_v), dtype, aligned, masked in product(GEOMETRIES, HALF, BOTH, BOTH):
        yield DENSE, DenseProblem(100, 100, 16, 16, d_qk, d_v, dtype, aligned=aligned, masked=masked)
    for h_q, d_qk, dtype, aligned in product(HEADS, HEAD_DIMS_QK, HALF, BOTH):
        for record in ("", *SPARSE_RECORDS):
            yield SPARSE_FORWARD, SparseForwardProblem(5, 900, h_q, 64, d_qk, dtype, aligned, record)
        for deterministic in BOTH:
            yield SPARSE_BACKWARD, SparseBackwardProblem(5, 900, h_q, 64, d_qk, dtype, False, deterministic, aligned)
    for queries, h_q, dtype, record, aligned in product((1, 64), HEADS, HALF, (*SPARSE_RECORDS, *PLAIN_RECORDS), BOTH):
        for compact in BOTH if record in COMPACT else (False,):
            yield SPARSE_DECODE, SparseDecodeProblem(queries, h_q, 64, dtype, record, aligned, compact=compact)


@pytest.mark.parametrize("gpu", [*SAMPLES, *UNPROVEN], ids=lambda gpu: gpu.name)
def test_what_runs_by_default_is_compiled_ahead(gpu: DeviceInfo) -> None:
    run = 0
    for pipeline, problem in problems():
        try:
            config = pipeline.configure(problem, gpu)
        except MlaError:
            continue
        assert config.variant in config.kernel.defaults_on(gpu.arch), (config.kernel.name, str(config.variant), problem)
        run += 1
    assert run > 1000
