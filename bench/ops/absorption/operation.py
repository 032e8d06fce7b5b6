"""The record of attention in both forms."""

from __future__ import annotations

from ...core.implementation import OWN, Choices, Known
from ...core.operation import BenchOperation
from ...peers.torch_absorption import ABSORBED, UNABSORBED, AbsorbedForm, UnabsorbedForm
from . import cases, check, inputs
from .own import AbsorbedAttention

EXAMPLES = """examples:
  run absorption                                       both forms with PyTorch's products, from 16 to 2048 queries
  run absorption --case sq512-skv32768-hq16            any other shape, named in the same form
"""


def implementations(choices: Choices) -> Known:
    """Absorbed attention alone, and both forms with what the weights of kv_b_proj take."""
    return {OWN: lambda: AbsorbedAttention(choices.kernel), ABSORBED: AbsorbedForm, UNABSORBED: UnabsorbedForm}


ABSORPTION = BenchOperation(
    name="absorption",
    title="attention to a paged cache, absorbed and un-absorbed, from queries to values per head",
    examples=EXAMPLES,
    peers="absorbed (kv_b_proj's halves before and after mla_decode), unabsorbed (the cache gathered, kv_b_proj, "
    "mla_prefill), both with PyTorch's products; or none. Default: both",
    suites=cases.SUITES,
    case_form=cases.FORM,
    parse=cases.parse,
    inputs=inputs.make_inputs,
    expect=check.expect,
    judge=check.judge,
    results=("out",),
    implementations=implementations,
    default_peers=lambda choices: [ABSORBED, UNABSORBED],
)
