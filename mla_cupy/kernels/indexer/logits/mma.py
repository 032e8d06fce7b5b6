"""Host side of `indexer/logits/mma.cu`."""

from __future__ import annotations

from mla_cupy.kernels.indexer.logits.problem import (
    BLOCK_TOKENS,
    DTYPES,
    HEAD_DIMS,
    MAX_HEADS,
    LogitsKernel,
    LogitsProblem,
)
from mla_cupy.kernels.params import LogitsParams
from mla_cupy.kernels.spec import SINCE_AMPERE, Reason, Variant, needs_alignment, needs_ampere, variants
from mla_cupy.runtime.device import DeviceInfo

TILE_KEYS = 256
_SHORT_LINE = 128


def unsupported(problem: LogitsProblem, device: DeviceInfo) -> Reason | None:
    """Reason why the kernel does not support the problem; None if it does."""
    if reason := needs_ampere(device):
        return reason
    if problem.block_tokens > BLOCK_TOKENS:
        return Reason(f"takes at most {BLOCK_TOKENS} tokens of a sequence, not {problem.block_tokens}")
    if problem.heads > MAX_HEADS:
        return Reason(f"takes at most {MAX_HEADS} heads, not {problem.heads}")
    return problem.countable(TILE_KEYS) if problem.aligned else needs_alignment("q and k")


KERNEL = LogitsKernel(
    "indexer_logits_mma",
    "indexer logits with mma.sync, of contiguous and of cached keys",
    "indexer/logits/mma.cu",
    LogitsParams,
    SINCE_AMPERE,
    variants(dtype=DTYPES, head_dim=HEAD_DIMS),
    facts={"tile_keys": TILE_KEYS, "max_short_line": _SHORT_LINE, "max_heads": MAX_HEADS},
    unsupported=unsupported,
    variant=lambda problem: Variant(dtype=problem.dtype, head_dim=problem.head_dim),
    tile_keys=lambda problem: TILE_KEYS,
    short_line=_SHORT_LINE,
)
