"""The record of un-absorbed prefill."""

from __future__ import annotations

from functools import partial

from ...core.implementation import OWN, Choices, Known
from ...core.operation import BenchOperation
from ...peers.dense import CudnnAttention, FlashAttention3Dense
from ...peers.fa4 import FlashAttention4
from . import cases, check, inputs
from .own import GENERIC, GENERIC_NAME, NAMED, Prefill

EXAMPLES = """examples:
  run prefill --peers-dir peers --peers fa3,cudnn      all cases, FlashAttention-3 and cuDNN beside us
  run prefill --quick --method events                  single calls instead of graphs
  run prefill --peers dense_mma,dense_mma_163kb        the kernels of other GPUs on this one
  run prefill --suite masked                           2,048 selected keys a query, by a mask
  run prefill --suite fp8                              queries, keys and values in e4m3
  run prefill --case b1-sq512-skv4096-hq16             any other shape, named in the same form
"""


def implementations(choices: Choices) -> Known:
    """Everything that computes `mla_prefill`."""
    return {
        OWN: lambda: Prefill(choices.kernel),
        GENERIC_NAME: lambda: Prefill(GENERIC, GENERIC_NAME),
        "fa3": lambda: FlashAttention3Dense(choices.directory("fa3")),
        "fa4": FlashAttention4,
        "cudnn": CudnnAttention,
        **{name: partial(Prefill, name, name) for name in NAMED},
    }


PREFILL = BenchOperation(
    name="prefill",
    title="prefill, un-absorbed: keys and values per head",
    examples=EXAMPLES,
    peers="fa3 (imports torch and needs --peers-dir), fa4 (flash-attn-4), cudnn (through torch), generic, "
    f"{', '.join(NAMED)}; or none. Default: fa3 where --peers-dir is given",
    suites=cases.SUITES,
    case_form=cases.FORM,
    parse=cases.parse,
    inputs=inputs.make_inputs,
    expect=check.expect,
    judge=check.judge,
    results=("out",),
    implementations=implementations,
    default_peers=lambda choices: ["fa3"] if choices.peers_dir else [],
    single_calls=True,
    peers_dir=True,
)
