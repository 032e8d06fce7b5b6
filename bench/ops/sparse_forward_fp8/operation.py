"""The record of the sparse forward from FP8 records."""

from __future__ import annotations

from ...core.implementation import OWN, Choices, Known
from ...core.operation import BenchOperation
from ...core.samples import judge
from ...peers.flashmla_sparse import FlashMlaSparse
from ..sparse.cases import CASE_OPTIONS
from ..sparse_forward.own import SparseForward
from . import cases, inputs
from . import check as own_check
from .own import DIRECT, GENERIC, Fp8Forward, GatheredForward

EXAMPLES = """examples:
  run sparse-forward-fp8 --peers-dir peers                 all cases, our own over rows, FlashMLA
  run sparse-forward-fp8 --quick --peers rows,gathered,direct
  run sparse-forward-fp8 --case sq512-skv4096-hq16-topk512 any other shape, named in the same form
  run sparse-forward-fp8 --case sq4096-skv8192-hq128-topk2048-fp8-math --peers rows    products in FP8
"""


def implementations(choices: Choices) -> Known:
    """Everything that computes it: ours from the records, the others from rows of the same numbers."""
    return {
        OWN: lambda: Fp8Forward(choices.kernel),
        "rows": lambda: SparseForward(None, "rows"),
        "gathered": GatheredForward,
        "direct": lambda: Fp8Forward(DIRECT, "direct"),
        "generic": lambda: Fp8Forward(GENERIC, "generic"),
        "flashmla": lambda: FlashMlaSparse(choices.directory("flashmla")),
    }


SPARSE_FORWARD_FP8 = BenchOperation(
    name="sparse-forward-fp8",
    title="sparse forward from FP8 records; the peers read 16-bit rows of the same numbers",
    examples=EXAMPLES,
    peers="rows (our own over 16-bit rows), gathered (the same, after all records were made rows by its own call), "
    "direct (the kernel that converts whatever a query gathers), flashmla "
    "(imports torch and needs --peers-dir), generic; or none. Default: rows, and flashmla where --peers-dir is given",
    suites=cases.SUITES,
    case_form=cases.FORM,
    parse=cases.parse,
    inputs=inputs.make_inputs,
    expect=own_check.expect,
    judge=judge,
    results=("out",),
    implementations=implementations,
    default_peers=lambda choices: ["rows", *(["flashmla"] if choices.peers_dir else [])],
    peers_dir=True,
    case_options=CASE_OPTIONS,
)
