"""Host side of `indexer/prepare/quantize.cu`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from mla_cupy.kernels.params import PrepareParams
from mla_cupy.kernels.spec import KernelSpec, Variant, variants

LANES = 8
"""Lanes per vector: RoPE turns elements of whole lanes."""
BLOCK_GROUPS = 16
"""Groups of lanes of a block: each works on a vector at a time."""
WARP_VECTORS = 4
"""Vectors that a warp works on at once: neighbours."""
GROUP_VECTORS = 4
"""Vectors that a group processes in turn if there are many."""
MANY_VECTORS = 32768
"""Least vectors for this. Fewer vectors go to one group each: the latency of the last one then decides."""
HEAD_DIMS = (32, 64, 128)
SCALE_BYTES = 4
"""Bytes of a key's scale in a cache, or of its four scales."""
MAX_CODE = 448.0
"""The largest finite e4m3."""


@dataclass(frozen=True)
class PrepareProblem:
    """The width, and whether vectors start at, and step by, multiples of 16 bytes."""

    head_dim: int
    aligned: bool


class PrepareOptions(NamedTuple):
    """A call's arguments other than arrays: as passed, then as resolved by the checks."""

    interleaved: bool
    hadamard: bool
    scales: str
    reference_rounding: bool
    eps: float

    @property
    def accumulate(self) -> str:
        """Type that products of queries are added up in; keys do not depend on it."""
        return "float32"


class PrepareQueryOptions(NamedTuple):
    """Options of `indexer_prepare_q`."""

    interleaved: bool
    hadamard: bool
    scales: str
    reference_rounding: bool
    accumulate: str

    @property
    def eps(self) -> float:
        """Number that a LayerNorm adds to the variance; queries have none."""
        return 0.0


class PrepareBothOptions(NamedTuple):
    """Options of `indexer_prepare`."""

    interleaved: bool
    hadamard: bool
    scales: str
    reference_rounding: bool
    accumulate: str
    eps: float
    return_k: bool
    independent: bool = False


KERNEL: KernelSpec[PrepareProblem] = KernelSpec(
    "indexer_prepare_quantize",
    "RoPE, Hadamard transform and e4m3 codes of index queries and keys",
    "indexer/prepare/quantize.cu",
    PrepareParams,
    variants=tuple(
        variant.extended(joint=joint)
        for joint in (0, 1)
        for variant in (*variants(head_dim=HEAD_DIMS, usual=(0,)), Variant(head_dim=HEAD_DIMS[-1], usual=1))
    ),
    facts={"block_groups": BLOCK_GROUPS},
)


def max_code(head_dim: int, accumulate: str) -> float:
    """The largest code. For float16, products with any keys come to 57,344 at most, which it can hold."""
    return 57344 / (head_dim * MAX_CODE) if accumulate == "float16" else MAX_CODE


def group_vectors(vectors: int) -> int:
    """Number of vectors that a group processes in turn."""
    return GROUP_VECTORS if vectors >= MANY_VECTORS else 1
