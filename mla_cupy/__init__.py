"""Attention kernels for Multi-head Latent Attention: hand-written CUDA, compiled at run time, for any array library.

The names below are loaded when they are first used. Importing touches neither CUDA nor CuPy; where a supported GPU is
there and its kernels are not compiled yet, a child process starts to compile them (MLA_CUPY_JIT).
"""

from __future__ import annotations

import importlib
import os
from typing import TYPE_CHECKING, Any

from mla_cupy._version import __version__

if TYPE_CHECKING:
    # ---- Written by `python -m tools.generate`: names for type checkers
    from mla_cupy import reference
    from mla_cupy.cache import (
        CacheStats,
        CacheStep,
        PagedKVCache,
    )
    from mla_cupy.errors import (
        ArgumentError,
        CacheFullError,
        DeviceError,
        DTypeError,
        KernelCompileError,
        KernelNotBuiltError,
        MlaError,
        ParallelError,
        PlanError,
        ShapeError,
        UnsupportedDeviceError,
    )
    from mla_cupy.ops import (
        CascadePlan,
        DecodePlan,
        Fp8,
        KernelChoice,
        LossResults,
        OutRope,
        Packed,
        PrefixGroup,
        Project,
        Shard,
        SparseLoss,
        WarmupLoss,
        absorb,
        cache_append,
        cache_copy_pages,
        cache_gather,
        cache_slots,
        cascade_decode,
        checking,
        indexer_cache_append,
        indexer_cache_gather,
        indexer_head_sums,
        indexer_logits,
        indexer_logits_paged,
        indexer_prepare,
        indexer_prepare_k,
        indexer_prepare_q,
        indexer_select,
        indexer_select_paged,
        indexer_sparse_loss,
        indexer_topk,
        indexer_warmup_loss,
        merge_project,
        merge_states,
        mla_decode,
        mla_prefill,
        mla_prefill_backward,
        mla_prepare,
        plan_cascade,
        plan_decode,
        prefill_mask,
        prefill_segments,
        shared_prefixes,
        sparse_mla_backward,
        sparse_mla_decode,
        sparse_mla_forward,
        which,
        workspace_bytes,
    )
    # ---- End of the generated part

# ---- Written by `python -m tools.generate`: public names
__all__ = [
    "ArgumentError",
    "CacheFullError",
    "CacheStats",
    "CacheStep",
    "CascadePlan",
    "DTypeError",
    "DecodePlan",
    "DeviceError",
    "Fp8",
    "KernelChoice",
    "KernelCompileError",
    "KernelNotBuiltError",
    "LossResults",
    "MlaError",
    "OutRope",
    "Packed",
    "PagedKVCache",
    "ParallelError",
    "PlanError",
    "PrefixGroup",
    "Project",
    "ShapeError",
    "Shard",
    "SparseLoss",
    "UnsupportedDeviceError",
    "WarmupLoss",
    "__version__",
    "absorb",
    "cache_append",
    "cache_copy_pages",
    "cache_gather",
    "cache_slots",
    "cascade_decode",
    "checking",
    "indexer_cache_append",
    "indexer_cache_gather",
    "indexer_head_sums",
    "indexer_logits",
    "indexer_logits_paged",
    "indexer_prepare",
    "indexer_prepare_k",
    "indexer_prepare_q",
    "indexer_select",
    "indexer_select_paged",
    "indexer_sparse_loss",
    "indexer_topk",
    "indexer_warmup_loss",
    "merge_project",
    "merge_states",
    "mla_decode",
    "mla_prefill",
    "mla_prefill_backward",
    "mla_prepare",
    "plan_cascade",
    "plan_decode",
    "prefill_mask",
    "prefill_segments",
    "reference",
    "shared_prefixes",
    "sparse_mla_backward",
    "sparse_mla_decode",
    "sparse_mla_forward",
    "which",
    "workspace_bytes",
]

_HOMES = {
    "CacheStats": "cache",
    "CacheStep": "cache",
    "PagedKVCache": "cache",
    "ArgumentError": "errors",
    "CacheFullError": "errors",
    "DTypeError": "errors",
    "DeviceError": "errors",
    "KernelCompileError": "errors",
    "KernelNotBuiltError": "errors",
    "MlaError": "errors",
    "ParallelError": "errors",
    "PlanError": "errors",
    "ShapeError": "errors",
    "UnsupportedDeviceError": "errors",
    "CascadePlan": "ops",
    "DecodePlan": "ops",
    "Fp8": "ops",
    "KernelChoice": "ops",
    "LossResults": "ops",
    "OutRope": "ops",
    "Packed": "ops",
    "PrefixGroup": "ops",
    "Project": "ops",
    "Shard": "ops",
    "SparseLoss": "ops",
    "WarmupLoss": "ops",
    "absorb": "ops",
    "cache_append": "ops",
    "cache_copy_pages": "ops",
    "cache_gather": "ops",
    "cache_slots": "ops",
    "cascade_decode": "ops",
    "checking": "ops",
    "indexer_cache_append": "ops",
    "indexer_cache_gather": "ops",
    "indexer_head_sums": "ops",
    "indexer_logits": "ops",
    "indexer_logits_paged": "ops",
    "indexer_prepare": "ops",
    "indexer_prepare_k": "ops",
    "indexer_prepare_q": "ops",
    "indexer_select": "ops",
    "indexer_select_paged": "ops",
    "indexer_sparse_loss": "ops",
    "indexer_topk": "ops",
    "indexer_warmup_loss": "ops",
    "merge_project": "ops",
    "merge_states": "ops",
    "mla_decode": "ops",
    "mla_prefill": "ops",
    "mla_prefill_backward": "ops",
    "mla_prepare": "ops",
    "plan_cascade": "ops",
    "plan_decode": "ops",
    "prefill_mask": "ops",
    "prefill_segments": "ops",
    "shared_prefixes": "ops",
    "sparse_mla_backward": "ops",
    "sparse_mla_decode": "ops",
    "sparse_mla_forward": "ops",
    "which": "ops",
    "workspace_bytes": "ops",
}
# ---- End of the generated part


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'mla_cupy' has no attribute {name!r}")
    if name == "reference":
        return importlib.import_module("mla_cupy.reference")
    value = globals()[name] = getattr(importlib.import_module(f"mla_cupy.{_HOMES[name]}"), name)
    return value


def __dir__() -> list[str]:
    return __all__


def _find_benches() -> None:
    """Make `mla_cupy.bench` find, in a checkout, the folder next to this one."""
    checkout = os.path.dirname(os.path.abspath(__path__[0]))
    if os.path.isdir(os.path.join(checkout, "cuda_src")):
        __path__.append(checkout)


_find_benches()


def _compile_core_kernels() -> None:
    """Start compiling for this machine's GPUs, if MLA_CUPY_JIT requests it; costs a call of NVML where there is one."""
    from mla_cupy.errors import ArgumentError
    from mla_cupy.runtime import env

    try:
        if env.get("JIT") != "import":
            return
    except ArgumentError:  # the first call and `mla-cupy info` say it: an import must not fail for it
        return
    from mla_cupy.runtime import device

    archs = device.nvml_archs()
    if not archs:
        return
    from mla_cupy.kernels import KERNELS
    from mla_cupy.runtime import worker

    worker.start(
        [
            kernel.request(variant, arch)
            for arch in archs
            for kernel in KERNELS.values()
            for variant in kernel.core_on(arch)
        ]
    )


_compile_core_kernels()
