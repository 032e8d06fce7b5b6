"""Host side of `indexer/logits/generic.cu`."""

from __future__ import annotations

from mla_cupy.kernels.indexer.logits.problem import DTYPES, HEAD_DIMS, LogitsKernel, LogitsProblem
from mla_cupy.kernels.params import LogitsParams
from mla_cupy.kernels.spec import variants
from mla_cupy.runtime.device import DeviceInfo
from mla_cupy.runtime.launching import Dim3

TILE_KEYS = 128
_MAX_GRID_Y = 65535


def grid(problem: LogitsProblem, device: DeviceInfo) -> Dim3:
    """A block per tile of keys and token; tokens wrap around beyond the limit of the grid."""
    return -(-problem.num_keys // TILE_KEYS), min(problem.num_tokens, _MAX_GRID_Y), 1


KERNEL = LogitsKernel(
    "indexer_logits_generic",
    "indexer logits on any GPU, in fp32",
    "indexer/logits/generic.cu",
    LogitsParams,
    variants=variants(dtype=DTYPES),
    facts={"max_head_dim": max(HEAD_DIMS)},
    fallback=True,
    grid=grid,
)
