"""Host side of `indexer/select/sm90_paged.cu`: logits and top-k of a few tokens in one launch."""

from __future__ import annotations

from mla_cupy.kernels.indexer.logits import sm90_paged as logits
from mla_cupy.kernels.indexer.select.problem import SelectProblem
from mla_cupy.kernels.params import SelectParams
from mla_cupy.kernels.spec import HOPPER, KernelSpec, Reason
from mla_cupy.runtime.device import DeviceInfo

BLOCKS = 16
"""Thread blocks of a token's cluster."""
BLOCK_HEADS = 64
MAX_KEYS = BLOCKS * 8192
"""Keys whose logits fit into a cluster's shared memory."""
MAX_TOKENS = 8
RESIDENT_TOKENS = 7
"""Clusters that an H200 runs at once."""
ROUND_KEYS = 32768
"""Keys of a token up to which one launch is faster than two, if all clusters run at once."""
_GPCS = 8
"""Most GPCs of a Hopper GPU; a cluster lies within one."""


def unsupported(problem: SelectProblem, device: DeviceInfo) -> Reason | None:
    """Reason that the kernel cannot take the problem; None if it can."""
    of = problem.logits
    if problem.order != "index":
        return Reason(f"selects in the order of the index, not of the {problem.order}")
    if of.heads > BLOCK_HEADS or of.e2m1:
        return Reason(f"takes at most {BLOCK_HEADS} heads of keys in e4m3")
    if of.num_keys > MAX_KEYS:
        return Reason(f"takes at most {MAX_KEYS} keys, not {of.num_keys}")
    return logits.unsupported(of, device)


def preferred(problem: SelectProblem, device: DeviceInfo) -> bool:
    """Prefer it for few tokens of short sequences, on GPUs where some GPC has SMs enough for a cluster."""
    of = problem.logits
    rounds = -(-of.num_tokens // RESIDENT_TOKENS)
    is_small = of.num_tokens <= MAX_TOKENS and rounds * of.num_keys <= ROUND_KEYS
    return is_small and device.sm_count > (BLOCKS - 1) * _GPCS


KERNEL: KernelSpec[SelectProblem] = KernelSpec(
    "indexer_select_sm90_paged",
    "logits of cached keys and their exact top-k in one launch, for a few tokens: a cluster of 16 blocks for each",
    "indexer/select/sm90_paged.cu",
    SelectParams,
    HOPPER,
    facts={"cluster": BLOCKS, "max_keys": MAX_KEYS},
    unsupported=unsupported,
    preferred=preferred,
)
