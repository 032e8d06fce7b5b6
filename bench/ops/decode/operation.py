"""The record of the dense decode."""

from __future__ import annotations

from functools import partial

from ...core.implementation import OWN, Choices, Known
from ...core.operation import BenchOperation
from ...peers.cupy_unfused import CupyUnfused
from ...peers.fa3 import FlashAttention3
from ...peers.flashmla import FlashMla
from ...peers.triton_mla import TritonMla
from . import cases, check, inputs
from .own import (
    GENERIC,
    IN_PARTS,
    INVARIANT,
    NAMED,
    PACKED,
    SINK,
    TREE,
    TURNED,
    VARYING,
    BatchInvariant,
    Decode,
    InParts,
    Packed,
    TreeMasked,
    Turned,
    WithSink,
)

EXAMPLES = """examples:
  run decode --quick                                   the four main cases, with the built-in baselines
  run decode --peers-dir peers --json h200.jsonl       all cases, FlashMLA and FlashAttention-3 beside us
  run decode --case b128-sq1-hq128-skv4096 --peers generic
  run decode --suite small-batches --peers decode_sm90_small,decode_sm90_small_cluster8
  run decode --suite pages                             pages of 16 to 128 tokens
  run decode --suite forms --peers q_rope,attn_sink,out_rope,packed,varying
  run decode --suite narrow --peers generic,attention_mma_small_narrow
  run decode --suite windows --peers none              windows beside plain calls over as many keys
  run decode --case b3-sq2-hq16-skv1000-page16         any other shape, named in the same form
"""


def implementations(choices: Choices) -> Known:
    """Everything that computes `mla_decode`."""
    return {
        OWN: lambda: Decode(choices.kernel),
        "generic": lambda: Decode(GENERIC, "generic"),
        **{name: partial(Decode, name, name) for name in NAMED},
        **{name: partial(BatchInvariant, name, split) for name, split in INVARIANT.items()},
        TREE: lambda: TreeMasked(name=TREE),
        IN_PARTS: lambda: InParts(name=IN_PARTS),
        SINK: lambda: WithSink(name=SINK),
        TURNED: lambda: Turned(name=TURNED),
        PACKED: lambda: Packed(PACKED, varying=False),
        VARYING: lambda: Packed(VARYING, varying=True),
        "cupy": CupyUnfused,
        "flashmla": lambda: FlashMla(choices.directory("flashmla")),
        "fa3": lambda: FlashAttention3(choices.directory("fa3")),
        "triton": lambda: TritonMla(choices.directory("triton")),
    }


DECODE = BenchOperation(
    name="decode",
    title="dense paged decode",
    examples=EXAMPLES,
    peers="flashmla, fa3, triton (they import torch and need --peers-dir), cupy, generic, "
    f"{', '.join(NAMED)}, batch_invariant, batch_invariant_512, "
    "tree_mask, q_rope, attn_sink, out_rope, packed, varying; or none. "
    "Default: generic,cupy, and flashmla,fa3 where --peers-dir is given",
    suites=cases.SUITES,
    case_form=cases.FORM,
    parse=cases.parse,
    inputs=inputs.make_inputs,
    expect=check.expect,
    judge=check.judge,
    results=("out",),
    implementations=implementations,
    default_peers=lambda choices: ["generic", "cupy", *(["flashmla", "fa3"] if choices.peers_dir else [])],
    peers_dir=True,
)
