"""The record of the indexer's logits."""

from __future__ import annotations

from ...core.implementation import OWN, Choices, Known
from ...core.operation import BenchOperation
from ...peers.deep_gemm import DeepGemm
from . import cases, check, inputs
from .own import GENERIC, MMA, IndexerLogits

EXAMPLES = """examples:
  run indexer-logits --peers-dir peers           all cases with DeepGEMM beside us
  run indexer-logits --quick --peers-dir peers   two of prefill, two of paged decode
  run indexer-logits --case b8-sq2-skv4096-h64   any other shape, named in the same form
"""


def implementations(choices: Choices) -> Known:
    """Everything that computes the indexer's logits."""
    return {
        OWN: lambda: IndexerLogits(choices.kernel),
        "generic": lambda: IndexerLogits(GENERIC, "generic"),
        MMA: lambda: IndexerLogits(MMA, MMA),
        "deep_gemm": lambda: DeepGemm(choices.directory("deep_gemm")),
    }


INDEXER_LOGITS = BenchOperation(
    name="indexer-logits",
    title="indexer logits: each query's score for the keys that it sees, in prefill and in paged decode",
    examples=EXAMPLES,
    peers="deep_gemm (imports torch, compiles with nvcc and needs --peers-dir), indexer_logits_mma, generic; or none. "
    "Default: deep_gemm where --peers-dir is given",
    suites=cases.SUITES,
    case_form=cases.FORM,
    parse=cases.parse,
    inputs=inputs.make_inputs,
    expect=check.expect,
    judge=check.judge,
    results=("shared",),
    implementations=implementations,
    default_peers=lambda choices: ["deep_gemm"] if choices.peers_dir else [],
    peers_dir=True,
)
