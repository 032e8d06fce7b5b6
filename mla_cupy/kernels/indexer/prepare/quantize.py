"""Host side of `indexer/prepare/quantize.cu`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from mla_cupy.kernels.spec import KernelSpec, ParamLayout, Variant

LANES = 8
"""Lanes per vector: RoPE turns elements of whole lanes."""
BLOCK_GROUPS = 16
"""Groups of lanes of a block: each works on a vector at a time."""
WARP_VECTORS = 4
"""That a warp works on at once: neighbours."""
GROUP_VECTORS = 4
"""That a group takes in turn where there are many."""
MANY_VECTORS = 32768
"""Fewer are one of each group: then what counts is how soon the last one is done."""
HEAD_DIMS = (32, 64, 128)
MAX_CODE = 448.0
"""The largest finite e4m3."""

PARAMS = ParamLayout(
    x="u8",
    weights="u8",
    cos="u8",
    sin="u8",
    positions="u8",
    slots="u8",
    codes="u8",
    scales="u8",
    x_stride_n_elems="i8",
    x_stride_h_elems="i8",
    weights_stride_n_elems="i8",
    weights_stride_h_elems="i8",
    cos_stride_elems="i8",
    sin_stride_elems="i8",
    positions_stride_elems="i8",
    codes_stride_n_elems="i8",
    codes_stride_h_elems="i8",
    scales_stride_n_elems="i8",
    scales_stride_h_elems="i8",
    slots_stride_bytes="i8",
    page_stride_bytes="i8",
    n="i4",
    h="i4",
    half_rope="i4",
    max_position="i4",
    interleaved="i4",
    hadamard="i4",
    power_of_2="i4",
    rounded="i4",
    x_aligned="i4",
    tables_aligned="i4",
    num_pages="i4",
    page_size="i4",
    slots_are_64="i4",
    group_vectors="i4",
    step_tokens="i4",
    step_heads="i4",
    h_factor="f4",
    d_factor="f4",
    max_code="f4",
    inverse_max_code="f4",
)


@dataclass(frozen=True)
class PrepareVariant(Variant):
    """A build for one width of vectors, and for any options or for the usual ones."""

    head_dim: int
    usual: int


@dataclass(frozen=True)
class PrepareProblem:
    """The width, and whether vectors start at, and step by, multiples of 16 bytes."""

    head_dim: int
    aligned: bool


class PrepareOptions(NamedTuple):
    """The numbers of a call."""

    interleaved: bool
    hadamard: bool
    scales: str
    reference_rounding: bool
    accumulate: str = "float32"


KERNEL: KernelSpec[PrepareProblem] = KernelSpec(
    "indexer_prepare_quantize",
    "RoPE, Hadamard transform and e4m3 codes of index queries and keys",
    "indexer/prepare/quantize.cu",
    PARAMS,
    variants=(*(PrepareVariant(d, 0) for d in HEAD_DIMS), PrepareVariant(HEAD_DIMS[-1], 1)),
    facts={"block_groups": BLOCK_GROUPS},
)


def max_code(head_dim: int, accumulate: str) -> float:
    """The largest code. For float16, products with any keys come to 57,344 at most, which it can hold."""
    return 57344 / (head_dim * MAX_CODE) if accumulate == "float16" else MAX_CODE


def group_vectors(vectors: int) -> int:
    """How many a group takes in turn."""
    return GROUP_VECTORS if vectors >= MANY_VECTORS else 1
