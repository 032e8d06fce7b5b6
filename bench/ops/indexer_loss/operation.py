"""The record of the indexer's warm-up loss."""

from __future__ import annotations

from ...core.implementation import OWN, Choices, Known
from ...core.operation import BenchOperation
from ...core.recorders import EVENTS
from ...peers.cudnn_loss import CudnnLoss
from . import cases, check, inputs
from .own import GENERIC, IndexerLoss

EXAMPLES = """examples:
  run indexer-loss --quick                             two shapes, without peers
  run indexer-loss --quick --peers cudnn               cudnn-frontend's three steps beside us
  run indexer-loss --case b2-s1000-h16x128-i8x64       any other shape, named in the same form
"""


def implementations(choices: Choices) -> Known:
    """Everything that computes the gradients of the loss."""
    return {
        OWN: lambda: IndexerLoss(choices.kernel),
        "generic": lambda: IndexerLoss(GENERIC, "generic"),
        "cudnn": CudnnLoss,
    }


INDEXER_LOSS = BenchOperation(
    name="indexer-loss",
    title="the indexer's warm-up loss: divergence from the main attention, and its gradients",
    examples=EXAMPLES,
    peers="cudnn (cudnn-frontend: imports torch, compiles at its first call; FlashAttention-2 through torch is one of "
    "its figures), generic; or none. Default: none",
    suites=cases.SUITES,
    case_form=cases.FORM,
    parse=cases.parse,
    inputs=inputs.make_inputs,
    expect=check.expect,
    judge=check.judge,
    results=("d_index_q",),
    implementations=implementations,
    default_peers=lambda choices: [],
    method=EVENTS,
)
