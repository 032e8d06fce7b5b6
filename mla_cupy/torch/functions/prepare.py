"""Functions of `mla_cupy.ops.indexer.prepare` for PyTorch's tensors.

Written by `python -m tests.generate` from the records there.
"""

from __future__ import annotations

import torch

from mla_cupy.ops.call import Invocation, run
from mla_cupy.ops.indexer.prepare import OPERATION_K, OPERATION_Q
from mla_cupy.torch.call import call
from mla_cupy.torch.library import is_plain_call
from mla_cupy.torch.operators import INDEXER_PREPARE_K, INDEXER_PREPARE_Q


def indexer_prepare_q(
    q: torch.Tensor,
    weights: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    positions: torch.Tensor,
    *,
    interleaved: bool = False,
    hadamard: bool = True,
    scales: str = "power_of_2",
    reference_rounding: bool = True,
    accumulate: str = "float32",
    codes: torch.Tensor | None = None,
    folded: torch.Tensor | None = None,
    workspace: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotate and quantise index queries, and fold their scales into the weights of the heads.

    codes = e4m3(z / s) with z = H rope(q) * d**-0.5, and folded = weights * h**-0.5 * s * d**-0.5: what
    `indexer_logits` takes.

    For tensors of PyTorch: the notes of `mla_cupy.indexer_prepare_q` hold here, too.

    Parameters
    ----------
    q : tensor, (s_q, h, d), bfloat16
        Before RoPE. d is 32, 64 or 128; the last axis is contiguous.
    weights : tensor, (s_q, h), float32
    cos, sin : tensor, (max_position, rope_pairs), float32
        RoPE turns the first 2 * rope_pairs elements; rope_pairs is a multiple of d / 8. A pair (x, y) becomes (x * cos
        - y * sin, x * sin + y * cos). The last axis is contiguous.
    positions : tensor, (s_q,), int32
        Rows of cos and sin; clamped to them.
    interleaved : bool
        Pairs that RoPE turns: elements (2i, 2i + 1), or, if False, (i, i + rope_pairs), as in DeepSeek-V3.2.
    hadamard : bool
        Apply the Hadamard transform, which spreads outliers and does not change exact scores.
    scales : str
        "plain": s = amax * r, where r is 1 / 448 rounded to float32 and so is the product, which may differ from amax /
        448 in the last bit; "power_of_2": 2**ceil(log2(amax * r)). amax is at least 1e-4.
    reference_rounding : bool
        Round to bfloat16 after RoPE and after the transform, as the models' own code does.
    accumulate : str
        The type in which `indexer_logits` will add up products. With "float16" codes are at most 128 / d, which takes
        the place of 448 in s. Then no product with codes of keys exceeds 57,344, and float16 reaches 65,504.
    codes : tensor, (s_q, h, d), uint8 or float8_e4m3fn, optional
        Where the codes go; it starts at, and steps by, multiples of 16 bytes.
    folded : tensor, (s_q, h), float32, optional
        Where the weights go.
    workspace : tensor, (n,), uint8, optional
        As for the other operations; none is needed.

    Returns
    -------
    codes : tensor, (s_q, h, d), uint8
        Bits of e4m3.
    folded : tensor, (s_q, h), float32

    Raises
    ------
    ShapeError, DTypeError, DeviceError, ArgumentError
        If an argument does not fit; nothing has been launched.

    Notes
    -----
    It has no gradient. Tensors for the results are given all or none. A `workspace` is for calls with tensors for the
    results.
    """
    arrays = (q, weights, cos, sin, positions, codes, folded)
    options = (interleaved, hadamard, scales, reference_rounding, accumulate)
    if is_plain_call(arrays) and (codes is None) is (folded is None):
        codes, folded = run(Invocation(OPERATION_Q, arrays, options, workspace))
    else:
        codes, folded = call(INDEXER_PREPARE_Q, arrays, options, workspace)
    return codes, folded


def indexer_prepare_k(
    k: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    positions: torch.Tensor,
    *,
    interleaved: bool = False,
    hadamard: bool = True,
    scales: str = "power_of_2",
    reference_rounding: bool = True,
    norm_weight: torch.Tensor | None = None,
    norm_bias: torch.Tensor | None = None,
    eps: float = 1e-06,
    codes: torch.Tensor | None = None,
    k_scale: torch.Tensor | None = None,
    workspace: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotate and quantise index keys.

    For tensors of PyTorch: the notes of `mla_cupy.indexer_prepare_k` hold here, too.

    Parameters
    ----------
    k : tensor, (s_kv, d), bfloat16
        Before RoPE; after its LayerNorm, unless this is given. The last axis is contiguous.
    cos, sin, positions, interleaved, hadamard, scales, reference_rounding, workspace
        As for `indexer_prepare_q`. The result of a LayerNorm is rounded to bfloat16, too.
    norm_weight, norm_bias : tensor, (d,), float32, optional
        Normalise k first: (k - mean) / sqrt(variance + eps) * norm_weight + norm_bias. Both, or none of them.
    eps : float
        Of the LayerNorm: finite, at least 0.
    codes : tensor, (s_kv, d), uint8 or float8_e4m3fn, optional
        Where the codes go; it starts at, and steps by, multiples of 16 bytes.
    k_scale : tensor, (s_kv,), float32, optional
        Where the scales go.

    Returns
    -------
    codes : tensor, (s_kv, d), uint8
        Bits of e4m3.
    k_scale : tensor, (s_kv,), float32

    Raises
    ------
    ShapeError, DTypeError, DeviceError, ArgumentError
        If an argument does not fit; nothing has been launched.

    Notes
    -----
    It has no gradient. Tensors for the results are given all or none. A `workspace` is for calls with tensors for the
    results.
    """
    arrays = (k, cos, sin, positions, norm_weight, norm_bias, codes, k_scale)
    options = (interleaved, hadamard, scales, reference_rounding, eps)
    if is_plain_call(arrays) and (codes is None) is (k_scale is None):
        codes, k_scale = run(Invocation(OPERATION_K, arrays, options, workspace))
    else:
        codes, k_scale = call(INDEXER_PREPARE_K, arrays, options, workspace)
    return codes, k_scale
