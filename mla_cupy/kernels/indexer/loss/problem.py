"""Problem and options of the indexer's losses, which their kernels share on the host."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from mla_cupy.kernels.pipeline import Call
from mla_cupy.kernels.spec import PLAIN, KernelSpec, Variant
from mla_cupy.runtime.launching import Dim3
from mla_cupy.runtime.tensormap import TensorMapSpec
from mla_cupy.shapes import D_ROPE

TARGETS = ("head_sum", "per_head")
MAX_HEAD_DIM, MAX_VALUE_DIM, MAX_INDEX_DIM = 576, 512, 128
MAX_GRID_Y = 65535
TILE_KEYS, TILE_TOKENS = 128, 128
"""Tiles of the kernels for Hopper. Rows in the workspace are a multiple of the first apart."""


@dataclass(frozen=True)
class LossProblem:
    """Sizes and dtypes that decide which kernels run and how: no pointers, no device.

    `value_dim` is 0 without an output of the attention; with it, there is an array for its log-sum-exps. `needs_lse`:
    the target's log-sum-exps have to be computed. `aligned`: queries and keys, of both kinds, start at, and step by,
    multiples of 16 bytes. In the sparse stage, a token has a list of `topk` keys. `given_sums`: the target is already
    summed over heads. `kv_heads` of the keys serve heads / kv_heads heads each; with `pairs`, the last columns of
    queries or keys are separate arrays. `codes`: the index queries and keys are e4m3; `scaled`: they have scales.
    """

    s_q: int
    s_kv: int
    heads: int
    index_heads: int
    head_dim: int
    index_dim: int
    value_dim: int = 0
    per_head: bool = False
    needs_lse: bool = False
    gradients: bool = True
    buffer_bytes: int = 1 << 29
    aligned: bool = True
    topk: int | None = None
    deterministic: bool = True
    given_sums: bool = False
    kv_heads: int = 1
    pairs: bool = False
    codes: bool = False
    scaled: bool = False

    @property
    def first_dim(self) -> int:
        """Columns of queries and keys that come before the last ones, which may be separate arrays."""
        return self.head_dim - (D_ROPE if self.pairs else 0)

    @property
    def keys(self) -> int:
        """The most keys that a token can see."""
        return self.s_kv if self.topk is None else self.topk

    @property
    def target_heads(self) -> int:
        """Heads that the target is yet to be summed over."""
        return 0 if self.given_sums else self.heads

    @property
    def score_unit(self) -> float:
        """Factor of the indexer's weights. Weights for codes include it."""
        if self.per_head or self.codes:
            return 1.0
        return float(max(1, self.index_heads * self.index_dim) ** -0.5)

    @property
    def rows_per_token(self) -> int:
        """Losses of a token."""
        return self.heads if self.per_head else 1

    @property
    def row_stride(self) -> int:
        """Elements between two rows in the workspace."""
        return -(-max(1, self.keys) // TILE_KEYS) * TILE_KEYS


class WarmupLossOptions(NamedTuple):
    """A call's arguments other than arrays: as passed, then as resolved by the checks."""

    scale: float
    target: str
    target_scale: float
    causal: bool
    gradients: bool
    buffer_bytes: int
    kernel: str | None


class SparseLossOptions(NamedTuple):
    """Options of `indexer_sparse_loss`."""

    scale: float
    causal: bool
    relative: bool
    gradients: bool
    deterministic: bool
    buffer_bytes: int
    kernel: str | None

    @property
    def target_scale(self) -> float:
        """Factor of the scores in targets per head."""
        return 1.0


class HeadSumsOptions(NamedTuple):
    """Options of `indexer_head_sums`."""

    scale: float
    causal: bool
    relative: bool
    buffer_bytes: int
    kernel: str | None

    @property
    def target_scale(self) -> float:
        """Factor of the scores in targets per head."""
        return 1.0


LossOptions = WarmupLossOptions | SparseLossOptions | HeadSumsOptions


@dataclass(frozen=True)
class LossKernel(KernelSpec[LossProblem]):
    """A kernel of the losses.

    Attributes
    ----------
    grid : callable
        `grid(problem, tokens)`: for that many tokens.
    variant : callable
        `variant(problem)`: the build for a problem.
    maps : callable
        `maps(call, tokens)`: its tensor maps, by the names of the arrays, for a chunk of that many tokens.
    """

    grid: Callable[[LossProblem, int], Dim3] = lambda problem, tokens: (1, 1, 1)
    variant: Callable[[LossProblem], Variant] = lambda problem: PLAIN[0]
    maps: Callable[[Call, int], tuple[tuple[str, TensorMapSpec], ...]] = lambda call, tokens: ()


def source(kernel: str) -> str:
    """The source of a kernel with a separate file."""
    return f"indexer/loss/{kernel.removeprefix('indexer_loss_')}.cu"
