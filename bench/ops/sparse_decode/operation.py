"""The record of sparse decode."""

from __future__ import annotations

from functools import partial

from ...core.implementation import OWN, Choices, Known
from ...core.operation import BenchOperation
from ...core.samples import judge
from ...peers.flashmla_sparse_decode import FlashMlaSparseDecode
from . import cases, check, inputs
from .own import GENERIC, NAMED, SparseDecode

EXAMPLES = """examples:
  run sparse-decode --peers-dir peers                  all cases with FlashMLA beside us
  run sparse-decode --quick --peers flashmla --peers-dir peers
  run sparse-decode --case b64-sq1-hq24-topk512        any other shape, named in the same form
"""


def implementations(choices: Choices) -> Known:
    """Everything that computes `sparse_mla_decode`."""
    return {
        OWN: lambda: SparseDecode(choices.kernel),
        "generic": lambda: SparseDecode(GENERIC, "generic"),
        **{name: partial(SparseDecode, name, name) for name in NAMED},
        "flashmla": lambda: FlashMlaSparseDecode(choices.directory("flashmla")),
    }


SPARSE_DECODE = BenchOperation(
    name="sparse-decode",
    title="sparse decode: each query attends to the tokens of a paged FP8 cache that its indices select",
    examples=EXAMPLES,
    peers="flashmla (imports torch and needs --peers-dir), generic, "
    f"{', '.join(NAMED)}; or none. "
    "Default: flashmla where --peers-dir is given",
    suites=cases.SUITES,
    case_form=cases.FORM,
    parse=cases.parse,
    inputs=inputs.make_inputs,
    expect=check.expect,
    judge=judge,
    results=("out",),
    implementations=implementations,
    default_peers=lambda choices: ["flashmla"] if choices.peers_dir else [],
    peers_dir=True,
)
