"""The operations as operators of PyTorch: under autograd, `torch.compile` and CUDA graphs.

The functions have the names, arguments and meaning of `mla_cupy`'s functions, with these differences:

- `mla_prefill` and `sparse_mla_forward` are differentiable, and so are the scalars of `indexer_warmup_objective` and
  `indexer_sparse_objective`: in reverse mode, by autograd and by torch.func. Other derivatives raise DTypeError.
- `torch.compile` sees one operator instead of Python, with `fullgraph=True` and with dynamic batch sizes, too; what an
  operator writes is declared.
- There is no `stream`: the work goes to PyTorch's current stream.
- Give all arrays for results, or none. Plans come from `mla_cupy.torch.plan_decode`.

This package needs PyTorch 2.4 or newer. `import mla_cupy` does not import it.
"""

# ---- Written by `python -m tools.generate`: names of the modules
from mla_cupy.torch.functions import (
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
from mla_cupy.torch.plan import TorchDecodePlan, plan_decode

__all__ = [
    "TorchDecodePlan",
    "absorb",
    "cache_append",
    "cache_copy_pages",
    "cache_gather",
    "cache_slots",
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
    "plan_decode",
    "prefill_mask",
    "prefill_segments",
    "sparse_mla_backward",
    "sparse_mla_decode",
    "sparse_mla_forward",
]
# ---- End of the generated part

import mla_cupy.torch.pytrees  # noqa: F401


def __dir__() -> list[str]:
    return __all__
