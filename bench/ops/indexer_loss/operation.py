"""The record of the indexer's losses."""

from __future__ import annotations

from ...core.implementation import OWN, Choices, Known
from ...core.operation import BenchOperation
from ...core.recorders import EVENTS
from ...peers.cudnn_loss import CudnnLoss
from ...peers.torch_flash import FlashAttention
from . import cases, check, inputs
from .own import DETERMINISTIC, GENERIC, IndexerLoss
from .ratios import ratios

EXAMPLES = """examples:
  run indexer-loss --quick                             two shapes, without peers
  run indexer-loss --suite aims --deterministic --peers cudnn,flash    the ratios that have an aim
  run indexer-loss --suite per-head --peers flash      the table of a target per head
  run indexer-loss --case b2-s1000-h16x128-i8x64       any other shape, named in the same form
"""


def implementations(choices: Choices) -> Known:
    """Everything that computes the gradients of a loss, and attention for scale."""
    return {
        OWN: lambda: IndexerLoss(choices.kernel),
        DETERMINISTIC: lambda: IndexerLoss(choices.kernel, DETERMINISTIC, deterministic=True),
        "generic": lambda: IndexerLoss(GENERIC, "generic"),
        "cudnn": CudnnLoss,
        "flash": FlashAttention,
    }


INDEXER_LOSS = BenchOperation(
    name="indexer-loss",
    title="the indexer's losses, over all or selected keys: divergence from the main attention, and gradients",
    examples=EXAMPLES,
    peers="cudnn (cudnn-frontend: imports torch, compiles at its first call), flash (FlashAttention-2 of torch: a "
    "scale, no loss), generic; or none. Default: none",
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
    deterministic=True,
    ratios=ratios,
)
