"""Functions of `mla_cupy.ops.indexer.key_cache` for PyTorch's tensors.

Written by `python -m tests.generate` from the records there.
"""

from __future__ import annotations

import torch

from mla_cupy.ops.call import Invocation, run
from mla_cupy.ops.indexer.key_cache import APPEND_OPERATION, GATHER_OPERATION
from mla_cupy.torch.call import call
from mla_cupy.torch.library import is_plain_call
from mla_cupy.torch.operators import INDEXER_CACHE_APPEND, INDEXER_CACHE_GATHER


def indexer_cache_append(
    k: torch.Tensor,
    cache: torch.Tensor,
    slots: torch.Tensor,
    *,
    cos: torch.Tensor | None = None,
    sin: torch.Tensor | None = None,
    positions: torch.Tensor | None = None,
    norm_weight: torch.Tensor | None = None,
    norm_bias: torch.Tensor | None = None,
    interleaved: bool = False,
    hadamard: bool = True,
    scales: str = "power_of_2",
    reference_rounding: bool = True,
    eps: float = 1e-06,
) -> None:
    """Write index keys to a paged cache, in place: `indexer_prepare_k`, scattered by slot.

    For tensors of PyTorch: the notes of `mla_cupy.indexer_cache_append` hold here, too.

    Parameters
    ----------
    k : tensor, (n, d), bfloat16
        Keys, d 32, 64 or 128: after their LayerNorm, unless this is given. The last axis is contiguous.
    cache : tensor, (num_pages, page_size, d + 4), uint8
        As for `indexer_logits_paged`: of keys of 128 elements also 68 bytes, in e2m1. It is changed in place.
    slots : tensor, (n,), int32 or int64
        Key i goes to page slots[i] // page_size, place slots[i] % page_size. A slot outside of the cache, -1 being the
        usual mark, is skipped. If several keys have the same slot, which of them wins is undefined.
    cos, sin : tensor, (max_position, rope_pairs), float32, optional
        As for `indexer_prepare_k`. Default: no RoPE, as for keys that have been rotated.
    positions : tensor, (n,), int32, optional
        Rows of cos and sin; clamped to them. Given with these, or not at all.
    norm_weight, norm_bias : tensor, (d,), float32, optional
        As for `indexer_prepare_k`.
    interleaved, hadamard, scales, reference_rounding, eps
        As for `indexer_prepare_k`. Scales of e2m1 are "power_of_2": 2**ceil(log2(max(amax, 1e-4) / 6)) of each 32
        elements; codes are rounded to nearest even and saturate. A group with a NaN gets a scale of NaN.

    Raises
    ------
    ShapeError, DTypeError, DeviceError, ArgumentError
        If an argument does not fit; nothing has been launched, and the cache is untouched.

    Notes
    -----
    It has no gradient.
    """
    arrays = (k, cache, slots, cos, sin, positions, norm_weight, norm_bias)
    options = (interleaved, hadamard, scales, reference_rounding, eps)
    if is_plain_call(arrays):
        run(Invocation(APPEND_OPERATION, arrays, options))
    else:
        call(INDEXER_CACHE_APPEND, arrays, options)


def indexer_cache_gather(
    cache: torch.Tensor,
    slots: torch.Tensor,
    *,
    d: int | None = None,
    codes: torch.Tensor | None = None,
    k_scale: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Read index keys of a paged cache: what `indexer_logits` takes.

    For tensors of PyTorch: the notes of `mla_cupy.indexer_cache_gather` hold here, too.

    Parameters
    ----------
    cache : tensor
        As for `indexer_cache_append`.
    slots : tensor, (n,), int32 or int64
        A slot outside of the cache, such as -1, gives zeros.
    d : int, optional
        Elements of a key: 32, 64 or 128. With 128 records of 68 bytes are keys in e2m1: each becomes codes of e4m3 with
        one scale, which is exact where its scales are at most 2**14 apart; elements with a smaller one become zeros.
        Default: as many as a record has codes of e4m3, 64 of 68 bytes.
    codes : tensor, (n, d), uint8 or float8_e4m3fn, optional
        Where the codes go; it starts at, and steps by, multiples of 16 bytes.
    k_scale : tensor, (n,), float32, optional
        Where the scales go.

    Returns
    -------
    codes : tensor, (n, d), uint8
        Bits of e4m3.
    k_scale : tensor, (n,), float32

    Raises
    ------
    ShapeError, DTypeError, DeviceError, ArgumentError
        If an argument does not fit; nothing has been launched.

    Notes
    -----
    It has no gradient. Tensors for the results are given all or none.
    """
    arrays = (cache, slots, codes, k_scale)
    options = (d,)
    if is_plain_call(arrays) and (codes is None) is (k_scale is None):
        codes, k_scale = run(Invocation(GATHER_OPERATION, arrays, options))
    else:
        codes, k_scale = call(INDEXER_CACHE_GATHER, arrays, options)
    return codes, k_scale
