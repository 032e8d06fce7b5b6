"""The record of decode over a shared prefix."""

from __future__ import annotations

from ...core.implementation import OWN, Choices, Known
from ...core.operation import BenchOperation
from ...peers.fa3 import FlashAttention3
from ...peers.flashmla import FlashMla
from ..decode import check
from ..decode.own import Decode
from . import cases, inputs
from .own import Cascade

EXAMPLES = """examples:
  run cascade --peers-dir peers                        all cases, FlashMLA and FlashAttention-3 on the same block tables
  run cascade --case b32-hq16-prefix4096-suffix512     any other shape, named in the same form
"""


def implementations(choices: Choices) -> Known:
    """Ours as the model chooses, ours with the prefix once whatever it says, and plain decode on the same table."""
    return {
        OWN: Cascade,
        "always": lambda: Cascade(always=True, name="always"),
        "plain": lambda: Decode(None, "plain"),
        "flashmla": lambda: FlashMla(choices.directory("flashmla")),
        "fa3": lambda: FlashAttention3(choices.directory("fa3")),
    }


CASCADE = BenchOperation(
    name="cascade",
    title="dense paged decode of sequences that share a prefix, all on one block table",
    examples=EXAMPLES,
    peers="always (the prefix once, whatever the model says), plain (our mla_decode), flashmla, fa3 (they import torch "
    "and need --peers-dir); or none. Default: always,plain, and flashmla,fa3 where --peers-dir is given",
    suites=cases.SUITES,
    case_form=cases.FORM,
    parse=cases.parse,
    inputs=inputs.make_inputs,
    expect=check.expect,
    judge=check.judge,
    results=("out",),
    implementations=implementations,
    default_peers=lambda choices: ["always", "plain", *(["flashmla", "fa3"] if choices.peers_dir else [])],
    peers_dir=True,
)
