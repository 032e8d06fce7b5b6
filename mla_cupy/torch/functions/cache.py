"""Functions of `mla_cupy.ops.cache` for PyTorch's tensors.

Written by `python -m tests.generate` from the records there.
"""

from __future__ import annotations

from typing import Any

import torch

from mla_cupy.ops.cache import APPEND_OPERATION, GATHER_OPERATION
from mla_cupy.ops.call import Invocation, run
from mla_cupy.torch.call import call
from mla_cupy.torch.library import is_plain_call
from mla_cupy.torch.operators import CACHE_APPEND, CACHE_GATHER


def cache_append(
    latent: torch.Tensor,
    rope: torch.Tensor | None,
    cache: torch.Tensor,
    slots: torch.Tensor,
    *,
    cos: torch.Tensor | None = None,
    sin: torch.Tensor | None = None,
    positions: torch.Tensor | None = None,
    record: str | None = None,
    scales: str | None = None,
    kv_scale: float = 1,
    interleaved: bool = True,
) -> None:
    """Write tokens to a paged cache, in place: quantise, apply RoPE if asked to, scatter by slot.

    For tensors of PyTorch: the notes of `mla_cupy.cache_append` hold here, too.

    Parameters
    ----------
    latent : tensor, (n, d_latent), bfloat16, float16 or float32
        d_latent is 512, or 448 for the records "v4", "v41" and "v41-fp4". The last axis is contiguous.
    rope : tensor, (n, 64), dtype of latent, or None
        None for records without RoPE. The last axis is contiguous.
    cache : tensor, (num_pages, page_size, width), uint8 or a 16-bit float type
        Pages of a record: `mla-cupy formats` lists them. An axis of size 1 may stand on either side of the tokens, as
        for `mla_decode`. Pages may be any distance apart; caches of bytes start at, and step by, multiples of 16 bytes.
        It is changed in place.
    slots : tensor, (n,), int32 or int64
        Token i goes to page slots[i] // page_size, place slots[i] % page_size. A slot outside of the cache, -1 being
        the usual mark, is skipped. If several tokens have the same slot, which of them wins is undefined.
    cos, sin : tensor, (max_position, 32), float32, optional
        Apply RoPE to `rope` first: a pair (x, y) becomes (x * cos - y * sin, x * sin + y * cos). The last axis is
        contiguous.
    positions : tensor, (n,), int32 or int64, optional
        Rows of cos and sin; clamped to them. Given with these, or not at all.
    record : str, optional
        Name of the record. Default: the one of this dtype and width.
    scales : str, optional
        For the record "v32": "power_of_2", the default, gives the bytes of FlashMLA's quantiser; "plain" those of
        vLLM's.
    kv_scale : float
        For the record "fp8": the scale by which the stored numbers are multiplied when they are read.
    interleaved : bool
        Pairs that RoPE turns: elements (2i, 2i + 1), as in DeepSeek's models, or, if False, (i, i + 32).

    Raises
    ------
    ShapeError, DTypeError, DeviceError, ArgumentError
        If an argument does not fit; nothing has been launched, and the cache is untouched.

    Notes
    -----
    No gradient flows through the cache.
    """
    arrays = (latent, rope, cache, slots, cos, sin, positions)
    options = (record, scales, kv_scale, interleaved)
    if is_plain_call(arrays):
        run(Invocation(APPEND_OPERATION, arrays, options))
    else:
        call(CACHE_APPEND, arrays, options)


def cache_gather(
    cache: torch.Tensor,
    slots: torch.Tensor,
    *,
    record: str | None = None,
    kv_scale: float = 1,
    out: torch.Tensor | None = None,
    out_dtype: Any = None,
) -> torch.Tensor:
    """Read tokens of a paged cache as rows of numbers, dequantised.

    For tensors of PyTorch: the notes of `mla_cupy.cache_gather` hold here, too.

    Parameters
    ----------
    cache, record, kv_scale
        As for `cache_append`.
    slots : tensor, (n,), int32 or int64
        A slot outside of the cache, such as -1, gives a row of zeros.
    out : tensor, (n, d_qk), optional
        Where the rows go; the last axis is contiguous.
    out_dtype : str or dtype, optional
        "bfloat16", "float16" or "float32". Default: the dtype of `out`, or of a 16-bit cache, or bfloat16.

    Returns
    -------
    tensor, (n, d_qk)
        Latent, then RoPE. A quantised element is its value times its scale, rounded to float32 and then to `out_dtype`.

    Raises
    ------
    ShapeError, DTypeError, DeviceError, ArgumentError
        If an argument does not fit; nothing has been launched.

    Notes
    -----
    It has no gradient.
    """
    arrays = (cache, slots, out)
    options = (record, kv_scale, out_dtype)
    if is_plain_call(arrays):
        (out,) = run(Invocation(GATHER_OPERATION, arrays, options))
    else:
        (out,) = call(CACHE_GATHER, arrays, options)
    return out
