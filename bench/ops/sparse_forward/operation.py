"""The record of the sparse forward."""

from __future__ import annotations

from functools import partial

from ...core.implementation import OWN, Choices, Known
from ...core.operation import BenchOperation
from ...core.samples import judge
from ...peers.flashmla_sparse import FlashMlaSparse
from ...peers.tilelang import tilelang
from ..sparse import check, inputs
from ..sparse.cases import CASE_OPTIONS, FORM
from . import cases
from .own import GENERIC, NAMED, SparseForward

EXAMPLES = """examples:
  run sparse-forward --peers-dir peers                 all cases with FlashMLA beside us
  run sparse-forward --quick --indices clustered       indices as an indexer would select them
  run sparse-forward --case sq512-skv4096-hq16-topk512 any other shape, named in the same form
"""


def implementations(choices: Choices) -> Known:
    """Everything that computes `sparse_mla_forward`."""
    return {
        OWN: lambda: SparseForward(choices.kernel),
        "generic": lambda: SparseForward(GENERIC, "generic"),
        **{name: partial(SparseForward, name, name) for name in NAMED},
        "flashmla": lambda: FlashMlaSparse(choices.directory("flashmla")),
        "tilelang": tilelang,
    }


SPARSE_FORWARD = BenchOperation(
    name="sparse-forward",
    title="sparse forward: each query attends to the rows that its indices select",
    examples=EXAMPLES,
    peers=f"flashmla (imports torch and needs --peers-dir), tilelang, generic, {', '.join(NAMED)}; or none. "
    "Default: flashmla where --peers-dir is given",
    suites=cases.SUITES,
    case_form=FORM,
    parse=cases.parse,
    inputs=inputs.make_inputs,
    expect=check.expect_forward,
    judge=judge,
    results=("out",),
    implementations=implementations,
    default_peers=lambda choices: ["flashmla"] if choices.peers_dir else [],
    peers_dir=True,
    case_options=CASE_OPTIONS,
)
