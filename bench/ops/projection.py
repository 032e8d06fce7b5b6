"""The projections around decode by the halves of kv_b_proj: W_UK of queries, W_UV of results, merged before."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy.typing as npt

import mla_cupy
from mla_cupy import reference
from mla_cupy.dtypes import round_to

from ..core.cost import D_QK, D_V, ELEMENT_BYTES, SINGLE_BYTES, Cost
from ..core.device import Device
from ..core.implementation import OWN, Choices, Known, Own, Prepared, copies
from ..core.operation import BenchOperation, Case
from ..core.recorders import Call
from ..core.samples import OutSample, judge_out
from ..core.tolerance import distance, spaced

Array = npt.NDArray[Any]
D_HEAD = 128

# ---- Cases -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ProjectionCase(Case):
    """`tokens` of `h_q` heads; `states` partial results of each in float32, one in 16 bits, or 0: queries."""

    tokens: int
    h_q: int
    states: int = 0

    @property
    def op(self) -> str:
        return "merge_project" if self.states else "absorb"

    @property
    def name(self) -> str:
        kind = f"project-n{self.states}" if self.states else "absorb"
        return f"{kind}-t{self.tokens}-hq{self.h_q}"

    @property
    def cost(self) -> Cost:
        """The weights, what is multiplied by them, and the result, once each."""
        rows, weights = self.tokens * self.h_q, self.h_q * D_HEAD * D_V
        partial = self.states * (D_V * (SINGLE_BYTES if self.states > 1 else ELEMENT_BYTES))
        lses = SINGLE_BYTES * self.states if self.states > 1 else 0
        narrow, wide = ELEMENT_BYTES * D_HEAD, ELEMENT_BYTES * D_V
        of_row = partial + lses + narrow if self.states else narrow + wide
        return Cost(2 * rows * D_HEAD * D_V, ELEMENT_BYTES * weights + rows * of_row)

    def shape(self) -> dict[str, Any]:
        return {**super().shape(), "d_head": D_HEAD}


TOKENS = (1, 4, 16, 32, 64, 128, 256, 512)
"""Tokens of a step, from one sequence to where a matrix product by cuBLAS wins."""
CASES = (
    *(ProjectionCase(tokens, h_q) for h_q in (16, 128) for tokens in TOKENS),
    *(ProjectionCase(tokens, h_q, 1) for h_q in (16, 128) for tokens in TOKENS),
    *(ProjectionCase(tokens, 128, states) for tokens, states in ((1, 66), (4, 17), (16, 5))),
    *(ProjectionCase(tokens, 16, states) for tokens, states in ((1, 132), (16, 9), (64, 2))),
)


def case_of(kind: str, states: str | None, tokens: str, h_q: str) -> ProjectionCase:
    """`kind` is "absorb", or "project-n" and the number of states."""
    if min(int(tokens), int(h_q), int(states or 1)) < 1:
        raise ValueError("every size must be at least 1")
    return ProjectionCase(int(tokens), int(h_q), int(states or 0))


# ---- Inputs and outputs ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ProjectionInputs:
    """One set of inputs: queries, or partial results and, of several, their log-sum-exps."""

    kv_b_proj: Any  # (h_q, 128 + 128, 512)
    q_nope: Any = None  # (t, h_q, 128)
    outs: Any = None  # (n, t, 1, h_q, 512)
    lses: Any = None  # (n, t, h_q, 1)

    @property
    def w_uk(self) -> Any:
        """(h_q, 128, 512), where it lies."""
        return self.kv_b_proj[:, :D_HEAD]

    @property
    def w_uv(self) -> Any:
        """(h_q, 128, 512), where it lies."""
        return self.kv_b_proj[:, D_HEAD:]


@dataclass(frozen=True)
class ProjectionOutputs:
    """Results of a call: (t, h_q, 512) or (t, h_q, 128)."""

    out: Any


def make_inputs(case: ProjectionCase, dtype: str, seed: int, device: Device) -> ProjectionInputs:
    """Normal numbers; whole queries; the columns without RoPE are multiplied."""
    n, t, h_q = case.states, case.tokens, case.h_q
    weights = device.normal((h_q, 2 * D_HEAD, D_V), dtype, 3 * seed + 1, scale=D_V**-0.5)
    if not n:
        return ProjectionInputs(weights, device.normal((t, h_q, D_HEAD + 64), dtype, 3 * seed + 2)[..., :D_HEAD])
    if n == 1:
        return ProjectionInputs(weights, outs=device.normal((1, t, 1, h_q, D_V), dtype, 3 * seed + 2))
    outs = device.normal((n, t, 1, h_q, D_V), "float16", 3 * seed + 2).astype("float32")
    lses = device.normal((n, t, h_q, 1), "float16", 3 * seed + 3).astype("float32")
    return ProjectionInputs(weights, outs=outs, lses=lses)


def make_result(case: ProjectionCase, dtype: str, device: Device) -> Any:
    """Memory for the result: columns of absorbed queries, or heads."""
    if case.states:
        return device.empty((case.tokens, case.h_q, D_HEAD), dtype)
    return device.empty((case.tokens, case.h_q, D_QK), dtype)[..., :D_V]


# ---- What is timed ---------------------------------------------------------------------------------------------------


class Projection(Own):
    """One launch; the figure `copy` reads and writes equally many bytes in all."""

    def prepare(self, case: ProjectionCase, dtype: str, sets: Sequence[ProjectionInputs], device: Device) -> Prepared:
        results = [ProjectionOutputs(make_result(case, dtype, device)) for _ in sets]
        calls = [_call(case, inputs, result.out, device) for inputs, result in zip(sets, results, strict=True)]
        return self.prepared(calls, results, device, figures=copies(case.cost.nbytes, len(sets), device))


def _call(case: ProjectionCase, inputs: ProjectionInputs, result: Any, device: Device) -> Call:
    if not case.states:
        return partial(mla_cupy.absorb, inputs.q_nope, inputs.w_uk, out=result)
    options: dict[str, Any] = {"out": result[:, None]}
    if inputs.lses is not None:
        options |= {"lses": inputs.lses, "lse": device.empty((case.tokens, case.h_q, 1), "float32")}
    return partial(mla_cupy.merge_project, inputs.outs, inputs.w_uv, **options)


# ---- Check -----------------------------------------------------------------------------------------------------------


def expect(case: ProjectionCase, dtype: str, inputs: ProjectionInputs, device: Device) -> list[OutSample]:
    """The oracle's values for a few tokens and heads; errors are of merged results that are rounded."""
    found = []
    for head in spaced(case.h_q).tolist():
        for token in spaced(case.tokens).tolist():
            exact, rounded = (_expected(case, inputs, device, token, head, x) for x in (None, dtype))
            found.append(OutSample((token, head), exact, distance(round_to(rounded, dtype), exact)))
    return found


def _expected(
    case: ProjectionCase, inputs: ProjectionInputs, device: Device, token: int, head: int, rounding: str | None
) -> Array:
    heads, tokens = slice(head, head + 1), slice(token, token + 1)
    if not case.states:
        q_nope = device.to_host(inputs.q_nope[tokens, heads])
        absorbed: Array = reference.absorb(q_nope, device.to_host(inputs.w_uk[heads]))[0][0, 0]
        return absorbed
    outs, w_uv = device.to_host(inputs.outs[:, tokens, :, heads]), device.to_host(inputs.w_uv[heads])
    lses = None if inputs.lses is None else device.to_host(inputs.lses[:, tokens, heads])
    projected: Array = reference.merge_project(outs, w_uv, lses, rounding=rounding)[0][0, 0, 0]
    return projected


# ---- The operation ---------------------------------------------------------------------------------------------------


def implementations(choices: Choices) -> Known:
    """Ours, and cuBLAS."""
    from ..peers.cublas_projection import CublasProjection

    return {OWN: Projection, "cublas": CublasProjection}


PROJECTION = BenchOperation(
    name="projection",
    title="kv_b_proj's halves around decode: absorbed queries, and merged results per head",
    examples="""examples:
  run projection                              all cases beside cuBLAS, each with a copy of the same size
  run projection --case project-n4-t8-hq64    any other sizes, named in the same form
""",
    peers="cublas (a batched product; partial results are merged by merge_states before); or none. Default: cublas",
    suites={
        "targets": CASES,
        "quick": tuple(case for case in CASES if case.h_q == 128 and case.tokens == 16),
    },
    case_form="absorb-t<N>-hq<N>, or project-n<N>-t<N>-hq<N>",
    pattern=r"(absorb|project-n(\d+))-t(\d+)-hq(\d+)",
    case_of=case_of,
    inputs=make_inputs,
    expect=expect,
    judge=judge_out,
    implementations=implementations,
    default_peers=("cublas",),
)
