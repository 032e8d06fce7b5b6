"""Host side of `attention/combine_project.cu`: W_UV during the combine, or after it."""

from __future__ import annotations

from mla_cupy.kernels.attention.projection import Build, addresses, kernel, launch, sizes
from mla_cupy.kernels.params import CombineProjectParams, DecodeParams
from mla_cupy.kernels.pipeline import Call, Launch
from mla_cupy.shapes import D_V, TILE_TOKENS

KERNEL = kernel(
    "attention_combine_project",
    "merges the partial results of decode, and multiplies them by W_UV",
    "attention/combine_project.cu",
    CombineProjectParams,
    {"tile_tokens": TILE_TOKENS},
)

LATENTS = "latents"
"""The part of the workspace with results of attention: results that need no merge, in float32; or all results, in 16
bits, where a separate launch multiplies them.
"""


def latents_nbytes(rows: int, apart: bool) -> int:
    """Size of the latents' part of the workspace, for `rows` rows of all heads."""
    return (2 if apart else 4) * D_V * rows


def latents_strides(s_q: int, h_q: int) -> tuple[int, int, int]:
    """Strides of its axes b, s_q and h_q, in elements."""
    return s_q * h_q * D_V, h_q * D_V, D_V


def combine(
    build: Build,
    call: Call,
    params: DecodeParams,
    *,
    has_pieces: bool = False,
    by_query: bool = False,
) -> Launch:
    """Merge and project the results of the attention kernel with the same parameters: its `out` is `LATENTS`.

    `has_pieces` says that the schedule is batch-invariant; for `by_query` see `sizes`.
    """
    projected = CombineProjectParams(
        projection_addresses=addresses(call),
        decode_params=params,
        projection_sizes=sizes(call, build, by_query),
        has_pieces=has_pieces,
    )
    return launch(build, call, projected)
