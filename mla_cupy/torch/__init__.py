"""The operations as operators of PyTorch: under autograd, `torch.compile` and CUDA graphs.

The functions have the names, the arguments and the meaning of those of `mla_cupy`, with these differences:

- `mla_prefill` and `sparse_mla_forward` are differentiable, and so are the scalars of `indexer_warmup_objective` and
  `indexer_sparse_objective`: in reverse mode, by autograd and by torch.func. Other derivatives raise DTypeError.
- `torch.compile` sees one operator instead of Python, with `fullgraph=True` and with dynamic batch sizes, too; what an
  operator writes is declared.
- There is no `check` or `stream`: the work goes to PyTorch's current stream.
- Give all arrays for results, or none. Plans come from `mla_cupy.torch.plan_decode`.

This package needs PyTorch 2.4 or newer. `import mla_cupy` does not import it.
"""

# ---- Written by `python -m tests.generate`: names of the modules
from mla_cupy.torch.functions.cache import cache_append, cache_gather
from mla_cupy.torch.functions.cache_pages import cache_copy_pages, cache_slots
from mla_cupy.torch.functions.decode import mla_decode
from mla_cupy.torch.functions.head_sums import indexer_head_sums
from mla_cupy.torch.functions.key_cache import indexer_cache_append, indexer_cache_gather
from mla_cupy.torch.functions.logits import indexer_logits
from mla_cupy.torch.functions.logits_paged import indexer_logits_paged
from mla_cupy.torch.functions.masks import prefill_mask
from mla_cupy.torch.functions.merge import merge_states
from mla_cupy.torch.functions.prefill import mla_prefill
from mla_cupy.torch.functions.prefill_backward import mla_prefill_backward
from mla_cupy.torch.functions.preparation import mla_prepare
from mla_cupy.torch.functions.prepare import indexer_prepare_k, indexer_prepare_q
from mla_cupy.torch.functions.prepare_both import indexer_prepare
from mla_cupy.torch.functions.projection import absorb, merge_project
from mla_cupy.torch.functions.segments import prefill_segments
from mla_cupy.torch.functions.sparse_backward import sparse_mla_backward
from mla_cupy.torch.functions.sparse_decode import sparse_mla_decode
from mla_cupy.torch.functions.sparse_forward import sparse_mla_forward
from mla_cupy.torch.functions.sparse_loss import indexer_sparse_loss, indexer_sparse_objective
from mla_cupy.torch.functions.topk import indexer_topk
from mla_cupy.torch.functions.warmup_loss import indexer_warmup_loss, indexer_warmup_objective
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
# ---- End of what is written


def __dir__() -> list[str]:
    return __all__
