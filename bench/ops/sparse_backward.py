"""The sparse backward: `sparse_mla_backward`, gradients in the dtype of the inputs, written in place.

The check samples dq of some queries, and dkv of some rows, summed over every query that selects them. A row of kv that
no query selects must have a gradient of exactly 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

import mla_cupy
from mla_cupy import reference

from ..core.cost import D_V, ELEMENT_BYTES, SINGLE_BYTES, Cost
from ..core.device import Device
from ..core.errors import BenchError
from ..core.implementation import Choices, Known, Own, Prepared, own_kernels, with_kernel
from ..core.operation import BenchOperation
from ..core.recorders import EVENTS, Call
from ..core.samples import CANCELLED, Sample, judge, samples
from . import sparse
from .sparse import (
    CASE_OPTIONS,
    FORM,
    PATTERN,
    SparseCase,
    SparseInputs,
    SparseOutputs,
    expect_forward,
    fields_of,
    sampled_queries,
)

Array = npt.NDArray[Any]

# ---- Cases -----------------------------------------------------------------------------------------------------------


class SparseBackwardCase(SparseCase):
    """A case of `sparse_mla_backward`."""

    op = "sparse_mla_backward"

    @property
    def cost(self) -> Cost:
        """Five products per top-k entry, one row gathered, one float32 row added.

        Scores, dq and the first part of dkv are d_qk wide; dP and the second part of dkv are d_v wide. Read once: q,
        out, dout, lse, kv and the indices; written once: dq and dkv.
        """
        rows = self.s_q * self.h_q
        elements = 2 * rows * (self.d_qk + D_V) + 2 * self.s_kv * self.d_qk
        return Cost(
            flops=2 * self.pairs * self.h_q * (3 * self.d_qk + 2 * D_V),
            nbytes=ELEMENT_BYTES * elements + SINGLE_BYTES * (rows + self.pairs),
            l2_bytes=self.pairs * self.d_qk * (ELEMENT_BYTES + SINGLE_BYTES),
        )


CASES = (
    # s_q, s_kv, h_q; the peer is cudnn-frontend
    SparseBackwardCase(4096, 8192, 64, peer_us=6690, target_us=5900),
    SparseBackwardCase(4096, 8192, 128, peer_us=13900, target_us=11600),
    SparseBackwardCase(4096, 32768, 128, peer_us=17700, target_us=12500),
    SparseBackwardCase(4096, 32768, 64, peer_us=12000, target_us=7500),
    SparseBackwardCase(4096, 8192, 16, peer_us=6490, target_us=5600),
)


# ---- Inputs and outputs ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class GradientInputs(SparseInputs):
    """One set of inputs of the backward."""

    out: Any  # (s_q, h_q, 512)
    dout: Any  # (s_q, h_q, 512)
    lse: Any  # (s_q, h_q) float32


@dataclass(frozen=True)
class Gradients:
    """Results of a backward."""

    dq: Any
    dkv: Any


def make_inputs(case: SparseBackwardCase, dtype: str, seed: int, device: Device) -> GradientInputs:
    """Inputs of the forward with a random gradient; `out` and `lse` are the project's own forward's."""
    forward = sparse.make_inputs(case, dtype, seed, device)
    dout = device.normal((case.s_q, case.h_q, D_V), dtype, 3 * seed + 3)
    out, lse, _ = mla_cupy.sparse_mla_forward(forward.q, forward.kv, forward.indices, scale=case.scale)
    return GradientInputs(**vars(forward), out=out, dout=dout, lse=lse)


# ---- What is timed ---------------------------------------------------------------------------------------------------

GENERIC = "sparse_backward_generic"  # without tensor cores
NAMED = ("sparse_backward_mma",)  # of GPUs without WGMMA


class SparseBackward(Own):
    """The call of a training step, gradients in the dtype of the inputs."""

    def prepare(self, case: SparseBackwardCase, dtype: str, sets: Sequence[GradientInputs], device: Device) -> Prepared:
        results = [
            Gradients(
                dq=device.empty((case.s_q, case.h_q, case.d_qk), dtype),
                dkv=device.empty((case.s_kv, case.d_qk), dtype),
            )
            for _ in sets
        ]
        backward = with_kernel(mla_cupy.sparse_mla_backward, self._kernel)
        calls: list[Call] = [
            partial(
                backward,
                *(inputs.q, inputs.kv, inputs.out, inputs.dout, inputs.lse, inputs.indices),
                scale=case.scale,
                deterministic=self._deterministic,
                **vars(result),
            )
            for inputs, result in zip(sets, results, strict=True)
        ]
        return self.prepared(calls, results, device)


# ---- Check -----------------------------------------------------------------------------------------------------------

CHUNK = 256  # queries per step of the gradients with respect to one row of kv


def expect(case: SparseBackwardCase, dtype: str, inputs: GradientInputs, device: Device) -> list[Sample]:
    """The oracle's dq of a few queries and dkv of a few rows; before that, whether `out` and `lse` are correct."""
    forward = expect_forward(case, dtype, inputs, device)
    verdict = judge(forward, SparseOutputs(inputs.out, inputs.lse, None), dtype, device)
    if not verdict.ok:
        raise BenchError(f"the forward that gives the backward its out and lse is wrong: {verdict.reason}")
    return [*_expect_dq(case, dtype, inputs, device), *_expect_dkv(case, dtype, inputs, device)]


def _expect_dq(case: SparseBackwardCase, dtype: str, inputs: GradientInputs, device: Device) -> list[Sample]:
    queries = sampled_queries(case)
    arguments = _arguments(inputs, device.to_host(inputs.kv), queries, inputs.host_indices[queries], device)
    want, *_ = reference.sparse_mla_backward(*arguments, scale=case.scale)
    near, *_ = reference.sparse_mla_backward(*arguments, scale=case.scale, rounding=dtype)
    return samples("dq", queries, want, near, dtype, CANCELLED * _magnitudes(*arguments, scale=case.scale))


def _magnitudes(
    q: Array, kv: Array, out: Array, dout: Array, lse: Array, indices: Array, *, scale: float
) -> npt.NDArray[np.float64]:
    """The largest element of each query's dq if no product of dP and delta had a sign: how much may cancel.

    With a single key, P is 1, dP equals delta, and dq is 0, whatever the size of the two.
    """
    queries, d_out = q.astype(np.float64), np.abs(dout.astype(np.float64))
    delta = (np.abs(out.astype(np.float64)) * d_out).sum(axis=-1)
    largest = np.zeros(len(q))
    for i, selected in enumerate(indices):
        keys = kv[selected[selected >= 0]].astype(np.float64)
        weights = np.exp(scale * (queries[i] @ keys.T) - lse[i].astype(np.float64)[:, None])
        d_weights = d_out[i] @ np.abs(keys[:, : d_out.shape[-1]]).T + delta[i][:, None]
        largest[i] = (scale * (weights * d_weights) @ np.abs(keys)).max(initial=0.0)
    return largest


def _expect_dkv(case: SparseBackwardCase, dtype: str, inputs: GradientInputs, device: Device) -> list[Sample]:
    rows = _sampled_rows(case)
    sums = [_gradient_of_row(case, dtype, inputs, row, device) for row in rows]
    want, near = (np.stack(values) for values in zip(*sums, strict=True))
    return samples("dkv", rows, want, near.astype(np.dtype(dtype)).astype(np.float64), dtype)


def _gradient_of_row(
    case: SparseBackwardCase, dtype: str, inputs: GradientInputs, row: int, device: Device
) -> tuple[Array, Array]:
    """Without and with the kernels' roundings, as if the row were the only one of kv: lse is given, so it may be."""
    key = device.take(inputs.kv, np.array([row]))
    (queries,) = np.nonzero((inputs.host_indices == row).any(axis=1))
    want, near = np.zeros(case.d_qk), np.zeros(case.d_qk)
    for start in range(0, len(queries), CHUNK):
        some = queries[start : start + CHUNK]
        arguments = _arguments(inputs, key, some, np.zeros((len(some), 1), np.int32), device)
        _, dkv, *_ = reference.sparse_mla_backward(*arguments, scale=case.scale)
        _, rounded, *_ = reference.sparse_mla_backward(
            *arguments, scale=case.scale, rounding=dtype, dkv_dtype="float32"
        )
        want += dkv[0]
        near += rounded[0]
    return want, near


def _sampled_rows(case: SparseBackwardCase) -> list[int]:
    """The first, one in the middle, one near the end that few queries can see, and the last, which one can see."""
    return sorted({0, case.s_kv // 2, max(0, case.s_kv - 1 - case.s_q // 16), case.s_kv - 1})


def _arguments(
    inputs: GradientInputs, kv: Array, queries: npt.NDArray[np.int64], indices: Array, device: Device
) -> tuple[Array, ...]:
    q, out, dout, lse = (device.take(array, queries) for array in (inputs.q, inputs.out, inputs.dout, inputs.lse))
    return q, kv, out, dout, lse, indices


# ---- The operation ---------------------------------------------------------------------------------------------------


def implementations(choices: Choices) -> Known:
    """Everything that computes `sparse_mla_backward`."""
    from ..peers.cudnn_sparse import CudnnSparse
    from ..peers.tilelang import tilelang

    return {
        **own_kernels(SparseBackward, choices, GENERIC, NAMED, deterministic=True),
        "cudnn": CudnnSparse,
        "tilelang": tilelang,
    }


SPARSE_BACKWARD = BenchOperation(
    name="sparse-backward",
    title="sparse backward, the whole call: pre- and post-processing kernels included",
    examples="""examples:
  run sparse-backward --peers cudnn --deterministic    all cases, cudnn-frontend and our deterministic call beside us
  run sparse-backward --case sq512-skv4096-hq16-topk512-clustered
""",
    peers=f"cudnn (imports torch and cudnn-frontend), tilelang, generic, {', '.join(NAMED)}. Default: none",
    # Quick: compute-bound, and with more rows than fit easily in the L2.
    suites={"targets": CASES, "quick": CASES[1:3]},
    case_form=FORM,
    pattern=PATTERN,
    case_of=lambda *groups: SparseBackwardCase(**fields_of(*groups)),
    inputs=make_inputs,
    expect=expect,
    judge=judge,
    results=("dq", "dkv"),
    implementations=implementations,
    method=EVENTS,
    deterministic=True,
    case_options=CASE_OPTIONS,
)
