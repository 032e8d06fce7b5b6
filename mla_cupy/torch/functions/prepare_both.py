"""Functions of `mla_cupy.ops.indexer.prepare_both` for PyTorch's tensors.

Written by `python -m tests.generate` from the records there.
"""

from __future__ import annotations

import torch

from mla_cupy.ops.call import Invocation, run
from mla_cupy.ops.indexer.prepare_both import OPERATION
from mla_cupy.torch.call import call
from mla_cupy.torch.library import is_plain_call
from mla_cupy.torch.operators import INDEXER_PREPARE


def indexer_prepare(
    q: torch.Tensor,
    weights: torch.Tensor,
    k: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    positions: torch.Tensor,
    cache: torch.Tensor | None = None,
    slots: torch.Tensor | None = None,
    *,
    norm_weight: torch.Tensor | None = None,
    norm_bias: torch.Tensor | None = None,
    interleaved: bool = False,
    hadamard: bool = True,
    scales: str = "power_of_2",
    reference_rounding: bool = True,
    accumulate: str = "float32",
    eps: float = 1e-06,
    return_k: bool = False,
    codes: torch.Tensor | None = None,
    folded: torch.Tensor | None = None,
    k_codes: torch.Tensor | None = None,
    k_scale: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """Rotate and quantise the index queries and keys of the same tokens in one launch.

    It is `indexer_prepare_q`, and `indexer_cache_append` or `indexer_prepare_k`: the keys go to a cache, or are
    returned.

    For tensors of PyTorch: the notes of `mla_cupy.indexer_prepare` hold here, too.

    Parameters
    ----------
    q : tensor, (n, h, d), bfloat16
        As for `indexer_prepare_q`.
    weights : tensor, (n, h), float32
    k : tensor, (n, d), bfloat16
        As for `indexer_prepare_k`. The last axis is contiguous.
    cos, sin : tensor, (max_position, rope_pairs), float32
        As for `indexer_prepare_q`, for both.
    positions : tensor, (n,), int32
        Rows of cos and sin; clamped to them.
    cache : tensor, (num_pages, page_size, d + 4), uint8, optional
        As for `indexer_cache_append`; with `slots`. It is changed in place.
    slots : tensor, (n,), int32 or int64, optional
        As for `indexer_cache_append`.
    norm_weight, norm_bias : tensor, (d,), float32, optional
        Of the keys' LayerNorm: see `indexer_prepare_k`.
    interleaved, hadamard, scales, reference_rounding, accumulate
        As for `indexer_prepare_q`.
    eps : float
        Of the LayerNorm.
    return_k : bool
        Return the keys; in place of a cache.
    codes : tensor, (n, h, d), uint8 or float8_e4m3fn, optional
        Where the queries' codes go; it starts at, and steps by, multiples of 16 bytes.
    folded : tensor, (n, h), float32, optional
        Where the weights go.
    k_codes : tensor, (n, d), uint8 or float8_e4m3fn, optional
        Where the keys' codes go; as `codes`.
    k_scale : tensor, (n,), float32, optional
        Where the keys' scales go.

    Returns
    -------
    codes : tensor, (n, h, d), uint8
        Bits of e4m3.
    folded : tensor, (n, h), float32
    k_codes : tensor, (n, d), uint8, or None
        With `return_k`.
    k_scale : tensor, (n,), float32, or None
        With `return_k`.

    Raises
    ------
    ShapeError, DTypeError, DeviceError, ArgumentError
        If an argument does not fit; nothing has been launched, and the cache is untouched.

    Notes
    -----
    It has no gradient. Tensors for the results are given all or none.
    """
    arrays = (q, weights, k, cos, sin, positions, cache, slots, norm_weight, norm_bias, codes, folded, k_codes, k_scale)
    options = (interleaved, hadamard, scales, reference_rounding, accumulate, eps, return_k)
    if (
        is_plain_call(arrays)
        and (codes is None) is (folded is None)
        and (return_k is False or (codes is None) is (k_codes is None) is (k_scale is None))
    ):
        codes, folded, k_codes, k_scale = run(Invocation(OPERATION, arrays, options))
    else:
        codes, folded, k_codes, k_scale = call(INDEXER_PREPARE, arrays, options)
    return codes, folded, k_codes, k_scale
