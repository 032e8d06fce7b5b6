"""Functions of `mla_cupy.ops.indexer.prepare` for JAX's arrays.

Written by `python -m tests.generate` from the records there.
"""

from __future__ import annotations

import jax

from mla_cupy.jax.lowering import run
from mla_cupy.ops.indexer.prepare import OPERATION_K, OPERATION_Q


def indexer_prepare_q(
    q: jax.Array,
    weights: jax.Array,
    cos: jax.Array,
    sin: jax.Array,
    positions: jax.Array,
    *,
    interleaved: bool = False,
    hadamard: bool = True,
    scales: str = "power_of_2",
    reference_rounding: bool = True,
    accumulate: str = "float32",
    codes: jax.Array | None = None,
    folded: jax.Array | None = None,
    exportable: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """Rotate and quantise index queries, and fold their scales into the weights of the heads.

    codes = e4m3(z / s) with z = H rope(q) * d**-0.5, and folded = weights * h**-0.5 * s * d**-0.5: what
    `indexer_logits` takes.

    For arrays of JAX: the notes of `mla_cupy.indexer_prepare_q` hold here, too.

    Parameters
    ----------
    q : array, (s_q, h, d), bfloat16
        Before RoPE. d is 32, 64 or 128; the last axis is contiguous.
    weights : array, (s_q, h), float32
    cos, sin : array, (max_position, rope_pairs), float32
        RoPE turns the first 2 * rope_pairs elements; rope_pairs is a multiple of d / 8. A pair (x, y) becomes (x * cos
        - y * sin, x * sin + y * cos). The last axis is contiguous.
    positions : array, (s_q,), int32
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
    codes : array, (s_q, h, d), uint8 or float8_e4m3fn, optional
        Whose memory the result takes over.
    folded : array, (s_q, h), float32, optional
        Whose memory the result takes over.
    exportable : bool
        Whether `jax.export` can serialise the call: see `disabled_checks`.

    Returns
    -------
    codes : array, (s_q, h, d), uint8
        Bits of e4m3.
    folded : array, (s_q, h), float32

    Raises
    ------
    ShapeError, DTypeError, DeviceError, ArgumentError
        If an argument does not fit; nothing has been launched.

    Notes
    -----
    It has no gradient.
    """
    arrays = (q, weights, cos, sin, positions, codes, folded)
    options = (interleaved, hadamard, scales, reference_rounding, accumulate)
    codes, folded = run(OPERATION_Q, arrays, options, exportable)
    return codes, folded


def indexer_prepare_k(
    k: jax.Array,
    cos: jax.Array,
    sin: jax.Array,
    positions: jax.Array,
    *,
    interleaved: bool = False,
    hadamard: bool = True,
    scales: str = "power_of_2",
    reference_rounding: bool = True,
    norm_weight: jax.Array | None = None,
    norm_bias: jax.Array | None = None,
    eps: float = 1e-06,
    codes: jax.Array | None = None,
    k_scale: jax.Array | None = None,
    exportable: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """Rotate and quantise index keys.

    For arrays of JAX: the notes of `mla_cupy.indexer_prepare_k` hold here, too.

    Parameters
    ----------
    k : array, (s_kv, d), bfloat16
        Before RoPE; after its LayerNorm, unless this is given. The last axis is contiguous.
    cos, sin, positions, interleaved, hadamard, scales, reference_rounding
        As for `indexer_prepare_q`. The result of a LayerNorm is rounded to bfloat16, too.
    norm_weight, norm_bias : array, (d,), float32, optional
        Normalise k first: (k - mean) / sqrt(variance + eps) * norm_weight + norm_bias. Both, or none of them.
    eps : float
        Of the LayerNorm: finite, at least 0.
    codes : array, (s_kv, d), uint8 or float8_e4m3fn, optional
        Whose memory the result takes over.
    k_scale : array, (s_kv,), float32, optional
        Whose memory the result takes over.
    exportable : bool
        Whether `jax.export` can serialise the call: see `disabled_checks`.

    Returns
    -------
    codes : array, (s_kv, d), uint8
        Bits of e4m3.
    k_scale : array, (s_kv,), float32

    Raises
    ------
    ShapeError, DTypeError, DeviceError, ArgumentError
        If an argument does not fit; nothing has been launched.

    Notes
    -----
    It has no gradient.
    """
    arrays = (k, cos, sin, positions, norm_weight, norm_bias, codes, k_scale)
    options = (interleaved, hadamard, scales, reference_rounding, eps)
    codes, k_scale = run(OPERATION_K, arrays, options, exportable)
    return codes, k_scale
