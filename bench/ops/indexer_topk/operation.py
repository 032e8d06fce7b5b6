"""The record of the indexer's top-k."""

from __future__ import annotations

from ...core.implementation import OWN, Choices, Known
from ...core.operation import BenchOperation
from ...peers.torch_topk import TorchTopk
from . import cases, check, inputs
from .own import IndexerTopk

EXAMPLES = """examples:
  run indexer-topk --peers torch            all cases with torch.topk beside us
  run indexer-topk --quick                  normal logits, and logits of 32 hot digits
  run indexer-topk --case sq8-skv4096-k64   any other shape, named in the same form
"""


def implementations(choices: Choices) -> Known:
    """Everything that selects."""
    return {OWN: lambda: IndexerTopk(choices.kernel), "torch": TorchTopk}


INDEXER_TOPK = BenchOperation(
    name="indexer-topk",
    title="indexer top-k: the k largest logits of each query, exactly",
    examples=EXAMPLES,
    peers="torch (torch.topk; imports torch); or none. Default: none",
    suites=cases.SUITES,
    case_form=cases.FORM,
    parse=cases.parse,
    inputs=inputs.make_inputs,
    expect=check.expect,
    judge=check.judge,
    results=("indices",),
    implementations=implementations,
    default_peers=lambda choices: [],
)
