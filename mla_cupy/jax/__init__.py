"""The operations as functions of JAX: under `jit`, `grad`, `vmap` and `shard_map`, inside XLA's CUDA graphs.

The functions have the names, arguments and meaning of `mla_cupy`'s functions, with these differences:

- There is no `plan`, `workspace` or `stream`: XLA owns the memory and the order of the work.
- Arrays for results are not written to: a result takes the array's memory over, as `jax.jit` does with donated
  arguments. Where XLA still needs the array, it copies it first. `cache_append` and others that change an array of the
  caller return it in the same way.
- `mla_prefill` and `sparse_mla_forward` are differentiable, and so are the scalars of `indexer_warmup_objective` and
  `indexer_sparse_objective`, in reverse mode. Other derivatives raise DTypeError; forward mode of these functions
  raises JAX's TypeError.
- `exportable=True` makes the call part of what `jax.export` can serialise, see `disabled_checks`.

Kernels are chosen, compiled and loaded while JAX traces. What does not fit raises the errors of `mla_cupy` then; what
goes wrong while the compiled program runs is a `jax.errors.JaxRuntimeError` with the text of ours.

Arrays on the CPU are computed as NumPy arrays are: by a GPU if there is one, else by the oracle. `vmap` runs the calls
one after the other. In `jax.shard_map` a call sees the arrays of its device.

This package needs JAX 0.5 or newer. `import mla_cupy` does not import it.
"""

# ---- Written by `python -m tools.generate`: names of the modules
from mla_cupy.jax.exported import ExportedCall
from mla_cupy.jax.ffi import disabled_checks
from mla_cupy.jax.functions import (
    absorb,
    cache_append,
    cache_copy_pages,
    cache_gather,
    cache_slots,
    indexer_cache_append,
    indexer_cache_gather,
    indexer_head_sums,
    indexer_logits,
    indexer_logits_paged,
    indexer_prepare,
    indexer_prepare_k,
    indexer_prepare_q,
    indexer_sparse_loss,
    indexer_sparse_objective,
    indexer_topk,
    indexer_warmup_loss,
    indexer_warmup_objective,
    merge_project,
    merge_states,
    mla_decode,
    mla_prefill,
    mla_prefill_backward,
    mla_prepare,
    prefill_mask,
    prefill_segments,
    sparse_mla_backward,
    sparse_mla_decode,
    sparse_mla_forward,
)
from mla_cupy.jax.segments import segment_starts

__all__ = [
    "ExportedCall",
    "absorb",
    "cache_append",
    "cache_copy_pages",
    "cache_gather",
    "cache_slots",
    "disabled_checks",
    "indexer_cache_append",
    "indexer_cache_gather",
    "indexer_head_sums",
    "indexer_logits",
    "indexer_logits_paged",
    "indexer_prepare",
    "indexer_prepare_k",
    "indexer_prepare_q",
    "indexer_sparse_loss",
    "indexer_sparse_objective",
    "indexer_topk",
    "indexer_warmup_loss",
    "indexer_warmup_objective",
    "merge_project",
    "merge_states",
    "mla_decode",
    "mla_prefill",
    "mla_prefill_backward",
    "mla_prepare",
    "prefill_mask",
    "prefill_segments",
    "segment_starts",
    "sparse_mla_backward",
    "sparse_mla_decode",
    "sparse_mla_forward",
]
# ---- End of the generated part

import mla_cupy.jax.pytrees  # noqa: F401


def __dir__() -> list[str]:
    return __all__
