"""Pieces of vLLM's CPU platform that need its compiled extension or Triton, in PyTorch."""

from __future__ import annotations

import itertools
from typing import Any


def install() -> None:
    """Use the plain forms that vLLM has of its layers, and three functions of our own."""
    import vllm.model_executor.layers.activation as activation
    import vllm.model_executor.layers.rotary_embedding.base as rotary
    import vllm.utils.cpu_triton_utils as kernels
    import vllm.v1.sample.ops.topk_topp_sampler as sampling
    import vllm.v1.sample.sampler as sampler

    rotary.RotaryEmbedding.forward_cpu = rotary.RotaryEmbedding.forward_native
    native = activation.SiluAndMul.__dict__["forward_native"]
    plain = native.__func__ if isinstance(native, staticmethod) else None
    activation.SiluAndMul.forward_cpu = (lambda self, x: plain(x)) if plain else native
    kernels.compute_slot_mapping_kernel = _Launched(slot_mapping)
    sampling.HAS_TRITON = False
    sampler.Sampler.greedy_sample = staticmethod(lambda logits, *_, **__: logits.argmax(-1).view(-1))


class _Launched:
    """A function with the syntax of a Triton kernel."""

    def __init__(self, function: Any) -> None:
        self.function = function

    def __getitem__(self, grid: Any) -> Any:
        return self.function


def slot_mapping(
    num_tokens: int,
    max_num_tokens: int,
    query_start_loc: Any,
    positions: Any,
    block_table: Any,
    block_table_stride: int,
    block_size: int,
    slots: Any,
    **_: Any,
) -> None:
    """Slot of each token; -1 for padding of the batch."""
    slots[num_tokens:max_num_tokens] = -1
    starts = query_start_loc.tolist()
    for request, (start, end) in enumerate(itertools.pairwise(starts)):
        position = positions[start:end]
        page = block_table[request, (position // block_size).long()].long()
        slots[start:end] = page * block_size + position % block_size
