"""`attn_implementation="mla_cupy"`: masks that stay small, and attention for calls that the kernels do not serve.

transformers builds its mask once, before the layers. Dense families get None (causal), a padding mask [b, keys] in
bool, or the numbers of packed sequences [b, keys] in int64. The stock code of the sparse families indexes four axes, so
they get the same as an expanded view [b, 1, queries, keys] that uses no memory. Anything else is the mask of "sdpa".
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import causal_mask_function, sdpa_mask

from mla_cupy.transformers.families import Family

NAME = "mla_cupy"


def register(family_of: Callable[[Any], Family | None], attach: Callable[[torch.nn.Module], object]) -> None:
    """Register "mla_cupy" as an attention implementation of transformers.

    Parameters
    ----------
    family_of : callable
        (config) -> the family of a model whose attention modules are served, and read small masks; or None.
    attach : callable
        (module) -> serve this module from its next call on.
    """

    def mask(*, config: Any = None, **options: Any) -> torch.Tensor | None:
        family = family_of(config)
        found = None if family is None else _lean(family, **options)
        if found is not None:
            return found[0]
        return sdpa_mask(config=config, **{**options, "allow_is_causal_skip": False})  # None would be ambiguous

    def attention(module: torch.nn.Module, *arrays: Any, **options: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
        attach(module)
        return stock_attention(module, *arrays, **options)

    AttentionMaskInterface.register(NAME, mask)
    AttentionInterface.register(NAME, attention)


def _lean(
    family: Family,
    *,
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: Any = 0,
    kv_offset: int = 0,
    mask_function: Any = causal_mask_function,
    attention_mask: torch.Tensor | None = None,
    use_vmap: bool = False,
    device: Any = "cpu",
    **others: Any,
) -> tuple[torch.Tensor | None] | None:
    """The mask in a tuple, or None if it is not a causal mask of padded or packed sequences."""
    found = attention_mask
    if isinstance(q_offset, torch.Tensor) or kv_offset or q_offset + q_length != kv_length:
        return None
    if found is not None and found.shape[-1] != kv_length:
        return None
    if mask_function is not causal_mask_function:
        if use_vmap or found is not None:
            return None
        found = _segments(mask_function, batch_size, q_length, device)
        if found is None:
            return None
    elif found is not None and q_length > 1 and bool(found.all()):
        found = None  # of one token a step this is not asked: it waits for the GPU
    if family.indexer is None:
        return (found,)
    flat = torch.ones((), dtype=torch.bool, device=device) if found is None else found[:, None, None, :]
    return (flat.expand(batch_size, 1, q_length, kv_length),)


def _segments(mask_function: Any, b: int, s: int, device: Any) -> torch.Tensor | None:
    """Numbers of the packed sequences of each row, int64, or None for another kind of function.

    A token begins a sequence if it does not see the one before it. The function is then compared at both sides of each
    sequence's start, which no window passes.
    """
    row = torch.arange(b, device=device)[:, None]
    i = torch.arange(s, device=device)[None, :]

    def sees(query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        return torch.as_tensor(mask_function(row, 0, query, key.clamp(min=0)), device=device).expand(b, s)

    begins = ~sees(i, i - 1)
    begins[:, 0] = True
    start = torch.where(begins, i, 0).cummax(1).values
    is_packed = sees(i, i) & sees(i, start) & (~sees(i, start - 1) | (start == 0))
    return begins.cumsum(1) if bool(is_packed.all()) else None


def lean(mask: torch.Tensor | None) -> torch.Tensor | None:
    """The small mask [b, keys] of one that this module made, or None if all tokens are real.

    Raises
    ------
    ValueError
        If it is another mask.
    """
    if mask is None or mask.ndim == 2:
        return mask
    if mask.ndim == 4 and (mask.stride(2) == 0 or mask.shape[2] == 1) and mask.dtype in (torch.bool, torch.int64):
        return None if mask.stride(3) == 0 else mask[:, 0, 0]
    raise ValueError(f"a mask of {tuple(mask.shape)} and {mask.dtype}, neither causal padding nor packed sequences")


def dense(mask: torch.Tensor | None, s: int, keys: int, device: torch.device) -> torch.Tensor:
    """Expand a small mask to [b or 1, 1, s, keys] of bool."""
    places = torch.arange(keys, device=device)
    causal = (places[None, :] <= places[keys - s :, None])[None, None]
    if mask is None:
        return causal
    if mask.dtype == torch.bool:
        return causal & mask[:, None, None, :]
    return causal & (mask[:, None, keys - s :, None] == mask[:, None, None, :])


def stock_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    indices: torch.Tensor | None = None,
    **options: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """transformers' own attention, "sdpa", or "eager" where weights or a sink are asked for."""
    s, keys = query.shape[2], key.shape[2]
    mask = attention_mask
    if mask is not None and mask.ndim == 2:
        mask = dense(mask, s, keys, query.device)
    if indices is not None:
        chosen = torch.zeros(*indices.shape[:2], keys, dtype=torch.bool, device=query.device)
        chosen = chosen.scatter(-1, indices.long(), True)[:, None]
        mask = chosen & (dense(None, s, keys, query.device) if mask is None else _seen(mask))
    if not (options.get("output_attentions") or options.get("s_aux") is not None):
        if mask is None and 1 < s < keys:
            mask = dense(None, s, keys, query.device)
        found: tuple[torch.Tensor, torch.Tensor | None]
        found = sdpa_attention_forward(module, query, key, value, mask, **options)
        return found
    seen = dense(None, s, keys, query.device) if mask is None else _seen(mask)
    added = torch.zeros(seen.shape, dtype=query.dtype, device=query.device).masked_fill(
        ~seen, torch.finfo(query.dtype).min
    )
    eager: Any = vars(sys.modules[type(module).__module__])["eager_attention_forward"]
    found = eager(module, query, key, value, added, **options)
    return found


def _seen(mask: torch.Tensor) -> torch.Tensor:
    return mask if mask.dtype == torch.bool else mask > torch.finfo(mask.dtype).min / 2
