"""The record of the indexer's preparation."""

from __future__ import annotations

from ...core.implementation import OWN, Choices, Known
from ...core.operation import BenchOperation
from . import cases, check, inputs
from .own import IndexerPrepare

EXAMPLES = """examples:
  run indexer-prepare                     all cases, each with a copy of as many bytes
  run indexer-prepare --case sq64-h64-keys  queries and keys in one launch
  run indexer-prepare --case sq512-h32    any other shape, named in the same form
"""


def implementations(choices: Choices) -> Known:
    """Only ours: what models do is a chain of operations."""
    return {OWN: IndexerPrepare}


INDEXER_PREPARE = BenchOperation(
    name="indexer-prepare",
    title="indexer preparation: RoPE, Hadamard, e4m3 codes of index queries, keys with their LayerNorm",
    examples=EXAMPLES,
    peers="none",
    suites=cases.SUITES,
    case_form=cases.FORM,
    parse=cases.parse,
    inputs=inputs.make_inputs,
    expect=check.expect,
    judge=check.judge,
    results=("codes", "folded", "k_codes", "k_scale"),
    implementations=implementations,
    default_peers=lambda choices: [],
)
