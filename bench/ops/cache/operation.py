"""The record of the paged cache."""

from __future__ import annotations

from ...core.implementation import OWN, Choices, Known
from ...core.operation import BenchOperation
from . import cases, check, inputs
from .own import Cache

EXAMPLES = """examples:
  run cache                          all cases, each with a copy of as many bytes
  run cache --case gather-v4-n1000   any other number of tokens, named in the same form
"""


def implementations(choices: Choices) -> Known:
    """Only ours."""
    return {OWN: Cache}


CACHE = BenchOperation(
    name="cache",
    title="paged cache: tokens quantised into it, read back, and pages copied",
    examples=EXAMPLES,
    peers="none",
    suites=cases.SUITES,
    case_form=cases.FORM,
    parse=cases.parse,
    inputs=inputs.make_inputs,
    expect=check.expect,
    judge=check.judge,
    results=("written",),
    implementations=implementations,
    default_peers=lambda choices: [],
)
