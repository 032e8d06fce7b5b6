"""The record of the sparse backward."""

from __future__ import annotations

from functools import partial

from ...core.implementation import OWN, Choices, Known
from ...core.operation import BenchOperation
from ...core.recorders import EVENTS
from ...core.samples import judge
from ...peers.cudnn_sparse import CudnnSparse
from ...peers.tilelang import tilelang
from ..sparse.cases import CASE_OPTIONS, FORM
from . import cases, check, inputs
from .own import DETERMINISTIC, GENERIC, NAMED, SparseBackward

EXAMPLES = """examples:
  run sparse-backward --peers cudnn --deterministic    all cases, cudnn-frontend and our deterministic call beside us
  run sparse-backward --case sq512-skv4096-hq16-topk512-clustered
"""


def implementations(choices: Choices) -> Known:
    """Everything that computes `sparse_mla_backward`."""
    return {
        OWN: lambda: SparseBackward(choices.kernel),
        DETERMINISTIC: lambda: SparseBackward(choices.kernel, DETERMINISTIC, deterministic=True),
        "generic": lambda: SparseBackward(GENERIC, "generic"),
        **{name: partial(SparseBackward, name, name) for name in NAMED},
        "cudnn": CudnnSparse,
        "tilelang": tilelang,
    }


SPARSE_BACKWARD = BenchOperation(
    name="sparse-backward",
    title="sparse backward, the whole call: pre- and post-processing kernels included",
    examples=EXAMPLES,
    peers=f"cudnn (imports torch and cudnn-frontend), tilelang, generic, {', '.join(NAMED)}. Default: none",
    suites=cases.SUITES,
    case_form=FORM,
    parse=cases.parse,
    inputs=inputs.make_inputs,
    expect=check.expect,
    judge=judge,
    results=("dq", "dkv"),
    implementations=implementations,
    default_peers=lambda choices: [],
    method=EVENTS,
    deterministic=True,
    case_options=CASE_OPTIONS,
)
