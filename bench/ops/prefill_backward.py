"""Un-absorbed prefill, backward: `mla_prefill_backward`, the whole call, statistics and sums included.

The check compares samples of each gradient with the float64 oracle, over all queries that see a key.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

import mla_cupy
from mla_cupy import reference
from mla_cupy.dtypes import round_to

from ..core.cost import ELEMENT_BYTES, SINGLE_BYTES, Cost
from ..core.device import Device
from ..core.errors import BenchError
from ..core.implementation import Choices, Known, Own, Prepared, own_kernels, with_kernel
from ..core.operation import BenchOperation
from ..core.recorders import Call
from ..core.samples import CANCELLED, Sample, judge, tolerance
from ..core.tolerance import spaced
from . import prefill
from .prefill import D_ROPE, PATTERN, PrefillCase, PrefillInputs, PrefillOutputs, fields_of

Array = npt.NDArray[Any]

# ---- Cases -----------------------------------------------------------------------------------------------------------

FORM = "b<N>-sq<N>-skv<N>-hq<N>[-hkv<N>][-d<N>x<N>][-full]"


class PrefillBackwardCase(PrefillCase):
    """A case of `mla_prefill_backward`."""

    op = "mla_prefill_backward"

    @property
    def cost(self) -> Cost:
        """Five products per pair: scores, dq and dk are d_qk wide, dP and dv d_v.

        Read once: q, keys, values, out, dout, lse; written once: the gradients.
        """
        queries, keys = self.b * self.s_q * self.h_q, self.b * self.s_kv * self.heads_kv
        elements = (
            queries * (self.d_qk + self.d_v) + keys * (self.d_qk - D_ROPE + self.d_v) + self.b * self.s_kv * D_ROPE
        )
        return Cost(
            flops=2 * self.pairs * self.h_q * (3 * self.d_qk + 2 * self.d_v),
            nbytes=2 * ELEMENT_BYTES * elements + SINGLE_BYTES * queries,
        )


CASES = (
    PrefillBackwardCase(1, 8192, 8192, 128, peer_us=15448),
    PrefillBackwardCase(4, 2048, 2048, 128, peer_us=4711),
    PrefillBackwardCase(4, 4096, 4096, 16, peer_us=2345),
    PrefillBackwardCase(1, 4096, 4096, 128, causal=False),
    PrefillBackwardCase(1, 16384, 16384, 16),
    PrefillBackwardCase(1, 8192, 8192, 32, d_qk=128, d_v=128),
    PrefillBackwardCase(1, 2048, 7680, 16, causal=False),
)


def case_of(*groups: Any) -> PrefillBackwardCase:
    case = PrefillBackwardCase(**fields_of(*groups))
    if case.state or case.topk or case.fp8:
        why = "masks and e4m3 codes have no backward; a merged result's is like any other's"
        raise ValueError(f"expected {FORM}; {why}")
    return case


# ---- Inputs and outputs ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class GradientInputs(PrefillInputs):
    """One set of inputs of the backward."""

    out: Any  # (b s_q, h_q, d_v)
    dout: Any
    lse: Any  # (b s_q, h_q) float32


@dataclass(frozen=True)
class Gradients:
    """Results of a backward: dk without the last 64 columns, which all heads share."""

    dq: Any
    dk: Any
    dv: Any
    dk_rope: Any


def make_inputs(case: PrefillBackwardCase, dtype: str, seed: int, device: Device) -> GradientInputs:
    """Inputs of the forward with a random gradient; `out` and `lse` are the project's own forward's."""
    made = prefill.make_inputs(case, dtype, seed, device)
    width = case.d_qk - D_ROPE
    out, lse = mla_cupy.mla_prefill(
        made.q,
        made.kv[..., :width],
        made.kv[..., width:],
        k_rope=made.k_rope,
        packed=mla_cupy.Packed(made.starts_q, made.starts_kv),
        causal=case.causal,
        scale=case.scale,
    )
    dout = device.normal((case.b * case.s_q, case.h_q, case.d_v), dtype, 3 * seed + 4)
    return GradientInputs(**vars(made), out=out, dout=dout, lse=lse)


# ---- What is timed ---------------------------------------------------------------------------------------------------

GENERIC = "dense_generic_backward_keys"  # without tensor cores


class PrefillBackward(Own):
    """The call of a training step: keys and values, and their gradients, are views of one array each."""

    def prepare(
        self, case: PrefillBackwardCase, dtype: str, sets: Sequence[GradientInputs], device: Device
    ) -> Prepared:
        results = [self._results(case, dtype, device) for _ in sets]
        calls = [self._call(case, inputs, result) for inputs, result in zip(sets, results, strict=True)]
        includes = "the schedule, statistics and sums; operands as projections leave them"
        return self.prepared(calls, results, device, includes=includes)

    def _results(self, case: PrefillBackwardCase, dtype: str, device: Device) -> Gradients:
        width, keys = case.d_qk - D_ROPE, case.b * case.s_kv
        dq = device.empty((case.b * case.s_q, case.h_q, case.d_qk), dtype)
        dkv = device.empty((keys, case.heads_kv, width + case.d_v), dtype)
        return Gradients(dq, dkv[..., :width], dkv[..., width:], device.empty((keys, D_ROPE), dtype))

    def _call(self, case: PrefillBackwardCase, inputs: GradientInputs, result: Gradients) -> Call:
        width = case.d_qk - D_ROPE
        return partial(
            with_kernel(mla_cupy.mla_prefill_backward, self._kernel),
            *(inputs.q, inputs.kv[..., :width], inputs.kv[..., width:], inputs.out, inputs.dout, inputs.lse),
            k_rope=inputs.k_rope,
            packed=mla_cupy.Packed(inputs.starts_q, inputs.starts_kv),
            causal=case.causal,
            scale=case.scale,
            deterministic=self._deterministic,
            **vars(result),
        )


# ---- Check -----------------------------------------------------------------------------------------------------------

QUERIES, KEYS = 3, 3


def expect(case: PrefillBackwardCase, dtype: str, inputs: GradientInputs, device: Device) -> list[Sample]:
    """dq of a few queries and heads, dk and dv of a few keys and heads, dk_rope of a few keys.

    Before that, whether `out` and `lse` are correct.
    """
    expected = prefill.expect(case, dtype, inputs, device)
    verdict = prefill.judge(expected, PrefillOutputs(inputs.out, inputs.lse), dtype, device)
    if not verdict.ok:
        raise BenchError(f"the forward that gives the backward its out and lse is wrong: {verdict.reason}")
    return [*_of_queries(case, dtype, inputs, device), *_of_keys(case, dtype, inputs, device)]


def _of_queries(case: PrefillBackwardCase, dtype: str, inputs: GradientInputs, device: Device) -> Iterator[Sample]:
    batch, width = case.b - 1, case.d_qk - D_ROPE
    for head in spaced(case.h_q).tolist():
        kv = device.to_host(inputs.kv[_keys(case, batch), head * case.heads_kv // case.h_q])[:, None]
        k_rope = device.to_host(inputs.k_rope[_keys(case, batch)])
        for i in spaced(case.s_q, QUERIES).tolist():
            query = batch * case.s_q + i
            seen = max(0, case.s_kv - (case.s_q - 1 - i)) if case.causal else case.s_kv
            at = slice(query, query + 1), slice(head, head + 1)
            q, out, dout, lse = (device.to_host(x[at]) for x in (inputs.q, inputs.out, inputs.dout, inputs.lse))
            arguments = q, kv[:seen, :, :width], kv[:seen, :, width:], out, dout, lse
            options: dict[str, Any] = {"k_rope": k_rope[:seen], "causal": False, "scale": case.scale}
            want = reference.mla_prefill_backward(*arguments, **options)[0]
            near = reference.mla_prefill_backward(*arguments, **options, rounding=dtype)[0]
            # If no product of dP and delta had a sign: how much may cancel.
            sizes = (np.abs(x.astype(np.float64)) for x in (out, dout, kv[:seen, :, width:]))
            yield _sample("dq", (query, head), want[0, 0], near[0, 0], dtype, CANCELLED * _largest(*sizes))


def _largest(out: Array, dout: Array, values: Array) -> float:
    """The largest magnitude of dP - delta, if nothing in them cancelled."""
    delta = float((out * dout).sum())
    return delta + float((values[:, 0] @ dout[0, 0]).max(initial=0.0))


Both = tuple[Array, Array]
"""A number exactly, and with the kernels' roundings."""


def _of_keys(case: PrefillBackwardCase, dtype: str, inputs: GradientInputs, device: Device) -> Iterator[Sample]:
    """The first key, which all see, one in the middle, and the last, which one query sees."""
    group, width = case.h_q // case.heads_kv, case.d_qk - D_ROPE
    for j in spaced(case.s_kv, KEYS).tolist():
        for kv_head in spaced(case.heads_kv).tolist():
            dk, dv = _of_heads(case, dtype, inputs, device, j, range(kv_head * group, (kv_head + 1) * group))
            yield _sample("dk", (j, kv_head), dk[0][:width], dk[1][:width], dtype)
            yield _sample("dv", (j, kv_head), *dv, dtype)
    # All heads, hence of keys that few queries see.
    for j in sorted({case.s_kv - 1, max(0, case.s_kv - 1 - case.s_q // 16)}):
        dk, _ = _of_heads(case, dtype, inputs, device, j, range(case.h_q))
        yield _sample("dk_rope", (j,), dk[0][width:], dk[1][width:], dtype)


def _of_heads(
    case: PrefillBackwardCase, dtype: str, inputs: GradientInputs, device: Device, key: int, heads: range
) -> tuple[Both, Both]:
    """dk and dv of a key, summed over query heads."""
    made = [_pair(case, dtype, inputs, device, key, head) for head in heads]
    dk, near_dk, dv, near_dv = (np.sum([one[which][at] for one in made], axis=0) for which in (0, 1) for at in (0, 1))
    return (dk, near_dk), (dv, near_dv)


def _pair(
    case: PrefillBackwardCase, dtype: str, inputs: GradientInputs, device: Device, key: int, head: int
) -> tuple[Both, Both]:
    """Gradients of a key of the first sequence, and of its value, by one head: exact, and with roundings."""
    first = max(0, key - (case.s_kv - case.s_q)) if case.causal else 0
    rows, kv_head = slice(first, case.s_q), head * case.heads_kv // case.h_q
    arrays = (inputs.q, inputs.out, inputs.dout, inputs.lse)
    q, out, dout, lse = (device.to_host(x[rows, head]).astype(np.float64) for x in arrays)
    kv = device.to_host(inputs.kv[key, kv_head]).astype(np.float64)
    width = case.d_qk - D_ROPE
    row = np.concatenate([kv[:width], device.to_host(inputs.k_rope[key]).astype(np.float64)])
    weights = np.exp(case.scale * (q @ row) - lse)
    d_scores = case.scale * weights * (dout @ kv[width:] - (out * dout).sum(axis=-1))
    near = round_to(weights, dtype), round_to(d_scores, dtype)
    return (d_scores @ q, near[1] @ q), (weights @ dout, near[0] @ dout)


def _sample(output: str, at: tuple[int, ...], want: Array, near: Array, dtype: str, cancelled: float = 0.0) -> Sample:
    near = near.astype(np.dtype(dtype)).astype(np.float64)
    return Sample(output, at, want, tolerance(output, want, near, dtype) + cancelled)


def _keys(case: PrefillBackwardCase, batch: int) -> slice:
    return slice(batch * case.s_kv, (batch + 1) * case.s_kv)


# ---- The operation ---------------------------------------------------------------------------------------------------


def implementations(choices: Choices) -> Known:
    """Everything that computes `mla_prefill_backward`."""
    from ..peers.dense_backward import CudnnBackward, CudnnDeterministicBackward
    from ..peers.fa4 import FlashAttention4Backward, FlashAttention4Deterministic

    return {
        **own_kernels(PrefillBackward, choices, GENERIC, deterministic=True),
        "cudnn": CudnnBackward,
        "cudnn_deterministic": CudnnDeterministicBackward,
        "fa4": FlashAttention4Backward,
        "fa4_deterministic": FlashAttention4Deterministic,
    }


PREFILL_BACKWARD = BenchOperation(
    name="prefill-backward",
    title="prefill, un-absorbed, backward: the whole call, statistics and sums included",
    examples="""examples:
  run prefill-backward --peers cudnn --deterministic   all cases, cuDNN and our deterministic call beside us
  run prefill-backward --quick --method events         single calls instead of graphs
  run prefill-backward --case b1-sq512-skv512-hq16     any other shape, named in the same form
""",
    peers="cudnn (through torch), cudnn_deterministic (through cudnn-frontend), fa4, fa4_deterministic (flash-attn-4), "
    "generic. Default: none",
    suites={"targets": CASES, "quick": CASES[:3]},
    case_form=FORM,
    pattern=PATTERN,
    case_of=case_of,
    inputs=make_inputs,
    expect=expect,
    judge=judge,
    results=("dq", "dk", "dv", "dk_rope"),
    implementations=implementations,
    single_calls=True,
    deterministic=True,
)
