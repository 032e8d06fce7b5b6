"""Host side of `attention/combine_forms.cu`."""

from __future__ import annotations

from mla_cupy.kernels.attention import combine
from mla_cupy.kernels.params import DecodeFormParams
from mla_cupy.kernels.pipeline import Launch, LaunchArgs
from mla_cupy.kernels.spec import DTYPE_VARIANTS, KernelSpec, Variant

KERNEL: KernelSpec[object] = KernelSpec(
    "attention_combine_forms",
    "merges the partial results of groups of queries that were split",
    "attention/combine_forms.cu",
    DecodeFormParams,
    variants=DTYPE_VARIANTS,
    facts=combine.KERNEL.facts,
)


def launch(dtype: str, num_blocks: int, args: LaunchArgs) -> Launch:
    """Merge what the attention kernel of the same arguments has left in the workspace."""
    return Launch(KERNEL, Variant(dtype=dtype), (num_blocks, 1, 1), args)
