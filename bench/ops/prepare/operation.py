"""The record of the preparation before decode."""

from __future__ import annotations

from ...core.implementation import OWN, Choices, Known
from ...core.operation import BenchOperation
from . import cases, check, inputs
from .own import MlaPrepare

EXAMPLES = """examples:
  run prepare                             all cases, each with a copy of as many bytes
  run prepare --case codes-fp8-n64-h16    any other sizes, named in the same form
"""


def implementations(choices: Choices) -> Known:
    """Only ours: what engines do is several operations."""
    return {OWN: MlaPrepare}


PREPARE = BenchOperation(
    name="prepare",
    title="before decode: RoPE, queries in e4m3, tokens in the cache, in one launch",
    examples=EXAMPLES,
    peers="none",
    suites=cases.SUITES,
    case_form=cases.FORM,
    parse=cases.parse,
    inputs=inputs.make_inputs,
    expect=check.expect,
    judge=check.judge,
    results=("queries", "q_scales", "pages"),
    implementations=implementations,
    default_peers=lambda choices: [],
)
