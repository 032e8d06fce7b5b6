"""Multi-head latent attention of Hugging Face transformers, computed by these kernels.

    model = AutoModelForCausalLM.from_pretrained("deepseek-ai/DeepSeek-V2-Lite", dtype="bfloat16", device_map="cuda")
    mla_cupy.transformers.patch(model)

After `import mla_cupy.transformers`, `from_pretrained(..., attn_implementation="mla_cupy")` does the same from the
second forward pass on. This package needs transformers 5.17 or newer and PyTorch; `import mla_cupy` imports neither.
"""

from mla_cupy.transformers.cache import LatentCache
from mla_cupy.transformers.context import context_parallel_inputs
from mla_cupy.transformers.graph import StepGraph
from mla_cupy.transformers.patching import patch, unpatch
from mla_cupy.transformers.stages import StageLoss, add_indexer, indexer_parameters, indexer_warmup, sparse_training

__all__ = [
    "LatentCache",
    "StageLoss",
    "StepGraph",
    "add_indexer",
    "context_parallel_inputs",
    "indexer_parameters",
    "indexer_warmup",
    "patch",
    "sparse_training",
    "unpatch",
]
