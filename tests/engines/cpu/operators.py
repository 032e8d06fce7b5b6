"""The operators of vLLM's compiled extension that a small MLA model calls, in PyTorch: the extension is not needed."""

from __future__ import annotations

import sys
import types
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch

CALLS: Counter[str] = Counter()
"""Number of calls of each operator; 0 means that a run has not reached it."""
_EXTENSIONS = ("_C_stable_libtorch", "_C", "_moe_C", "_moe_C_stable_libtorch", "_C_utils", "_rocm_C")
_SCHEMAS = {
    "concat_and_cache_mla": "(Tensor kv_c, Tensor k_pe, Tensor(a!) kv_cache, Tensor slot_mapping, "
    "str kv_cache_dtype, Tensor scale, bool skip_scale=False) -> ()",
    "gather_and_maybe_dequant_cache": "(Tensor src_cache, Tensor(a!) dst, Tensor block_table, Tensor cu_seq_lens, "
    "Tensor token_to_seq, int num_tokens, str kv_cache_dtype, Tensor scale, Tensor? seq_starts=None) -> ()",
}
_NAMED = ("silu_and_mul", "rms_norm", "fused_add_rms_norm", "rotary_embedding")
"""Operators that layers name when they are made, and do not call: `smaller` has them run their plain forms."""


def counted(function: Callable[..., Any]) -> Callable[..., Any]:
    """Count the calls of a stand-in."""

    def call(*arguments: Any, **named: Any) -> Any:
        CALLS[function.__name__] += 1
        return function(*arguments, **named)

    return call


def install() -> None:
    """Make the extensions importable, empty, and define the operators."""
    for name in _EXTENSIONS:
        sys.modules.setdefault(f"vllm.{name}", types.ModuleType(f"vllm.{name}"))
    library = torch.library.Library("_C_cache_ops", "DEF")
    for function in (concat_and_cache_mla, gather_and_maybe_dequant_cache):
        library.define(function.__name__ + _SCHEMAS[function.__name__])
        library.impl(function.__name__, counted(function), "CPU")
    named = torch.library.Library("_C", "DEF")
    for name in _NAMED:
        named.define(f"{name}() -> ()")
    _KEPT.extend([library, named])


_KEPT: list[Any] = []
"""A library's operators go with it."""


def concat_and_cache_mla(
    kv_c: Any, k_pe: Any, kv_cache: Any, slot_mapping: Any, kv_cache_dtype: str, scale: Any, skip_scale: bool = False
) -> None:
    """Keep new tokens; a slot below 0 is none."""
    tokens = slot_mapping.numel()
    rows = torch.cat([kv_c[:tokens], k_pe[:tokens].reshape(tokens, -1)], -1)
    slots = kv_cache.view(-1, kv_cache.shape[-1])
    kept = slot_mapping >= 0
    if kv_cache.element_size() == 1:
        stored = (rows.float() / scale.float()).to(torch.float8_e4m3fn)
        slots.view(torch.uint8)[slot_mapping[kept]] = stored[kept].view(torch.uint8)
    else:
        slots[slot_mapping[kept]] = rows[kept].to(slots.dtype)


def rows_of(cache: Any, blocks: Any, positions: Any, scale: Any = 1.0) -> Any:
    """The rows of tokens in a paged cache, multiplied by the scale where they are FP8.

    Parameters
    ----------
    cache : tensor, (num_pages, page_size, width)
    blocks : tensor, (tokens,)
        The page of each.
    positions : tensor, (tokens,)
        Of each in its sequence.
    scale : float or tensor
    """
    page = cache.shape[1]
    slots = blocks.long() * page + positions.long() % page
    flat = cache.reshape(-1, cache.shape[-1])
    if cache.element_size() == 1:
        return flat.view(torch.uint8)[slots].view(torch.float8_e4m3fn).float() * scale
    return flat[slots]


def gather_and_maybe_dequant_cache(
    src_cache: Any,
    dst: Any,
    block_table: Any,
    cu_seq_lens: Any,
    token_to_seq: Any,
    num_tokens: int,
    kv_cache_dtype: str,
    scale: Any,
    seq_starts: Any = None,
) -> None:
    """Rows of the cached prefixes, one after the other."""
    sequence = token_to_seq[:num_tokens].long()
    position = torch.arange(num_tokens, device=sequence.device) - cu_seq_lens[sequence]
    if seq_starts is not None:
        position = position + seq_starts[sequence]
    blocks = block_table[sequence, (position // src_cache.shape[1]).long()]
    dst[:num_tokens] = rows_of(src_cache, blocks, position, scale.float()).to(dst.dtype)
