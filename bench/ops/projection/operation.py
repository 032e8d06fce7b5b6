"""The record of projections."""

from __future__ import annotations

from ...core.implementation import OWN, Choices, Known
from ...core.operation import BenchOperation
from ...peers.cublas_projection import CUBLAS, CublasProjection
from . import cases, check, inputs
from .own import Projection

EXAMPLES = """examples:
  run projection                              all cases beside cuBLAS, each with a copy of as many bytes
  run projection --case project-n4-t8-hq64    any other sizes, named in the same form
"""


def implementations(choices: Choices) -> Known:
    """Ours, and cuBLAS."""
    return {OWN: Projection, CUBLAS: CublasProjection}


PROJECTION = BenchOperation(
    name="projection",
    title="kv_b_proj's halves around decode: absorbed queries, and merged results per head",
    examples=EXAMPLES,
    peers="cublas (a batched product; partial results are merged by merge_states before); or none. Default: cublas",
    suites=cases.SUITES,
    case_form=cases.FORM,
    parse=cases.parse,
    inputs=inputs.make_inputs,
    expect=check.expect,
    judge=check.judge,
    results=("out",),
    implementations=implementations,
    default_peers=lambda choices: [CUBLAS],
)
