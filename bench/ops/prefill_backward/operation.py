"""The record of un-absorbed prefill, backward."""

from __future__ import annotations

from ...core.implementation import OWN, Choices, Known
from ...core.operation import BenchOperation
from ...core.samples import judge
from ...peers.dense_backward import CudnnBackward, CudnnDeterministicBackward
from ...peers.fa4 import FlashAttention4Backward, FlashAttention4Deterministic
from . import cases, check, inputs
from .own import DETERMINISTIC, GENERIC, PrefillBackward

EXAMPLES = """examples:
  run prefill-backward --peers cudnn --deterministic   all cases, cuDNN and our deterministic call beside us
  run prefill-backward --quick --method events         single calls instead of graphs
  run prefill-backward --case b1-sq512-skv512-hq16     any other shape, named in the same form
"""


def implementations(choices: Choices) -> Known:
    """Everything that computes `mla_prefill_backward`."""
    return {
        OWN: lambda: PrefillBackward(choices.kernel),
        DETERMINISTIC: lambda: PrefillBackward(choices.kernel, DETERMINISTIC, deterministic=True),
        "generic": lambda: PrefillBackward(GENERIC, "generic"),
        "cudnn": CudnnBackward,
        "cudnn_deterministic": CudnnDeterministicBackward,
        "fa4": FlashAttention4Backward,
        "fa4_deterministic": FlashAttention4Deterministic,
    }


PREFILL_BACKWARD = BenchOperation(
    name="prefill-backward",
    title="prefill, un-absorbed, backward: the whole call, statistics and sums included",
    examples=EXAMPLES,
    peers="cudnn (through torch), cudnn_deterministic (through cudnn-frontend), fa4, fa4_deterministic (flash-attn-4), "
    "generic. Default: none",
    suites=cases.SUITES,
    case_form=cases.FORM,
    parse=cases.parse,
    inputs=inputs.make_inputs,
    expect=check.expect,
    judge=judge,
    results=("dq", "dk", "dv", "dk_rope"),
    implementations=implementations,
    default_peers=lambda choices: [],
    single_calls=True,
    deterministic=True,
)
