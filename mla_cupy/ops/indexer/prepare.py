"""Preparation of index queries and keys: RoPE, Hadamard transform, e4m3."""

from __future__ import annotations

from typing import Any, TypeVar

from mla_cupy.arrays.view import View
from mla_cupy.errors import ArgumentError, ShapeError, explain
from mla_cupy.kernels.indexer.logits.problem import CODES
from mla_cupy.kernels.indexer.prepare import PREPARE_K, PREPARE_Q
from mla_cupy.kernels.indexer.prepare.quantize import (
    HEAD_DIMS,
    LANES,
    PrepareBothOptions,
    PrepareOptions,
    PrepareProblem,
    PrepareQueryOptions,
)
from mla_cupy.ops.call import call
from mla_cupy.ops.checks import check_accumulate, check_all_or_none, check_eps, check_flag
from mla_cupy.ops.operation import Examined, Input, Operation, Output, Views, present
from mla_cupy.ops.schema import steps_by_16_bytes
from mla_cupy.shapes import MAX_INT32

SCALES = ("power_of_2", "plain")
_OptionsT = TypeVar("_OptionsT", PrepareOptions, PrepareQueryOptions, PrepareBothOptions)


def indexer_prepare_q(
    q: Any,
    weights: Any,
    cos: Any,
    sin: Any,
    positions: Any,
    *,
    interleaved: bool = False,
    hadamard: bool = True,
    scales: str = "power_of_2",
    reference_rounding: bool = True,
    accumulate: str = "float32",
    codes: Any = None,
    folded: Any = None,
    workspace: Any = None,
    stream: Any = None,
) -> tuple[Any, Any]:
    """Rotate and quantise index queries, and fold their scales into the weights of the heads.

    codes = e4m3(z / s) with z = H rope(q) * d**-0.5, and folded = weights * h**-0.5 * s * d**-0.5: the arguments of
    `indexer_logits`.

    Parameters
    ----------
    q : array, (s_q, h, d), bfloat16
        Before RoPE. d is 32, 64 or 128; the last axis is contiguous.
    weights : array, (s_q, h), float32
    cos, sin : array, (max_position, rope_pairs), float32
        RoPE turns the first 2 * rope_pairs elements; rope_pairs is a multiple of d / 8. A pair (x, y) becomes
        (x * cos - y * sin, x * sin + y * cos). The last axis is contiguous.
    positions : array, (s_q,), int32
        Rows of cos and sin; clamped to the tables.
    interleaved : bool
        Pairs that RoPE turns: elements (2i, 2i + 1), or, if False, (i, i + rope_pairs), as in DeepSeek-V3.2.
    hadamard : bool
        Apply the Hadamard transform, which spreads outliers and does not change exact scores.
    scales : str
        "plain": s = amax * r, where r is 1 / 448, and both r and the product are rounded to float32, so s may differ
        from amax / 448 in the last bit. "power_of_2": 2**ceil(log2(amax * r)). amax is at least 1e-4.
    reference_rounding : bool
        Round to bfloat16 after RoPE and after the transform, as the models' own code does.
    accumulate : str
        Accumulator that `indexer_logits` will use. With "float16" codes are at most 128 / d, which replaces 448 in s.
        No product with key codes then exceeds 57,344; float16 reaches 65,504.
    codes : array, (s_q, h, d), uint8 or float8_e4m3fn, optional
        Memory for the codes; it starts at, and steps by, multiples of 16 bytes.
    folded : array, (s_q, h), float32, optional
        Memory for the weights.
    workspace : array, (n,), uint8, optional
        Unused: `workspace_bytes(indexer_prepare_q, ...)` is 0.
    stream : int or stream object, optional
        Where to run. Default: the caller's library's current stream.

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
    Equal to the oracle byte by byte. NaN becomes the code 0x7f and is ignored in the scale. An infinity counts as the
    largest float32 in amax, and saturates: its code is the largest, and finite elements next to it become 0.

    Codes of at most 1 keep their three mantissa bits from 1/64 on; smaller codes are multiples of 1/512. Elements below
    1/64 of a vector's largest element therefore lose bits, with an error of at most 1/1024 of that largest element. Key
    codes are the same for both accumulators, and queries prepared for "float16" may be used with "float32", too.

    Examples
    --------
    >>> import ml_dtypes, numpy as np, mla_cupy
    >>> q, weights = np.ones((2, 4, 32), ml_dtypes.bfloat16), np.ones((2, 4), np.float32)
    >>> cos, sin = np.ones((8, 16), np.float32), np.zeros((8, 16), np.float32)
    >>> codes, folded = mla_cupy.indexer_prepare_q(q, weights, cos, sin, np.zeros(2, np.int32), hadamard=False)
    >>> float(codes.view(ml_dtypes.float8_e4m3fn)[0, 0, 0]), round(float(folded[0, 0]), 6)
    (256.0, 0.000345)
    """
    return call(indexer_prepare_q, locals())


def indexer_prepare_k(
    k: Any,
    cos: Any,
    sin: Any,
    positions: Any,
    *,
    interleaved: bool = False,
    hadamard: bool = True,
    scales: str = "power_of_2",
    reference_rounding: bool = True,
    norm_weight: Any = None,
    norm_bias: Any = None,
    eps: float = 1e-6,
    codes: Any = None,
    k_scale: Any = None,
    workspace: Any = None,
    stream: Any = None,
) -> tuple[Any, Any]:
    """Rotate and quantise index keys.

    Parameters
    ----------
    k : array, (s_kv, d), bfloat16
        Keys before RoPE, and after their LayerNorm unless `norm_weight` is passed. The last axis is contiguous.
    cos, sin, positions, interleaved, hadamard, scales, reference_rounding, workspace, stream
        As for `indexer_prepare_q`; the result of a LayerNorm is also rounded to bfloat16.
    norm_weight, norm_bias : array, (d,), float32, optional
        Normalise k first: (k - mean) / sqrt(variance + eps) * norm_weight + norm_bias. Pass both or neither.
    eps : float
        Epsilon of the LayerNorm: finite, at least 0.
    codes : array, (s_kv, d), uint8 or float8_e4m3fn, optional
        Memory for the codes; it starts at, and steps by, multiples of 16 bytes.
    k_scale : array, (s_kv,), float32, optional
        Where the scales go.

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
    Equal to the oracle byte by byte. A LayerNorm makes every element of a vector with a NaN or an infinity NaN.

    Examples
    --------
    >>> import ml_dtypes, numpy as np, mla_cupy
    >>> k = np.full((3, 64), 448, ml_dtypes.bfloat16)
    >>> cos, sin = np.ones((8, 32), np.float32), np.zeros((8, 32), np.float32)
    >>> codes, k_scale = mla_cupy.indexer_prepare_k(k, cos, sin, np.arange(3, dtype=np.int32), hadamard=False)
    >>> float(codes.view(ml_dtypes.float8_e4m3fn)[0, 0]), float(k_scale[0])
    (448.0, 1.0)
    """
    return call(indexer_prepare_k, locals())


def _examine_q(views: Views, given: PrepareQueryOptions) -> Examined:
    options = check_prepare_options(given)._replace(accumulate=check_accumulate(given.accumulate))
    return Examined(check_vectors(present(views, "q"), views["cos"]), options)


def _examine_k(views: Views, given: PrepareOptions) -> Examined:
    check_all_or_none(views, "norm_weight", "norm_bias")
    return Examined(check_vectors(present(views, "k"), views["cos"]), check_prepare_options(given))


def check_vectors(x: View, cos: View | None, more: int = 0) -> PrepareProblem:
    """Check the number of vectors, plus `more`, and the number of their elements that RoPE turns.

    Raises
    ------
    ShapeError
    """
    d, vectors = x.shape[-1], x.shape[0] * (x.shape[1] if len(x.shape) == 3 else 1)
    pairs = 0 if cos is None else cos.shape[1]
    if pairs % (d // LANES) or 2 * pairs > d:
        expected = f"a multiple of d / {LANES} = {d // LANES}, at most d / 2"
        raise ShapeError(explain("cos.shape[-1]", pairs, expected))
    vectors += more
    if vectors > MAX_INT32:
        raise ShapeError(explain("vectors", vectors, f"at most {MAX_INT32}", "split the call"))
    return PrepareProblem(d, steps_by_16_bytes(x))


def check_prepare_options(given: _OptionsT) -> _OptionsT:
    """Check the flags and the rule of the scales.

    Raises
    ------
    ArgumentError
    """
    if not (isinstance(given.scales, str) and given.scales in SCALES):
        raise ArgumentError(explain("scales", repr(given.scales), '"power_of_2" or "plain"'))
    checked = given._replace(
        interleaved=check_flag("interleaved", given.interleaved),
        hadamard=check_flag("hadamard", given.hadamard),
        reference_rounding=check_flag("reference_rounding", given.reference_rounding),
    )
    return checked if isinstance(checked, PrepareQueryOptions) else checked._replace(eps=check_eps("eps", given.eps))


def code_dtypes(first: str) -> tuple[str, ...]:
    """Bytes: not every library has e4m3."""
    return CODES[::-1]


_ROTATION = (
    Input("cos", "max_position rope_pairs", ("float32",), contiguous=True),
    Input("sin", "max_position rope_pairs", ("float32",), contiguous=True),
)
NORM = (
    Input("norm_weight", "d", ("float32",), optional=True),
    Input("norm_bias", "d", ("float32",), optional=True),
)
OPERATION_Q = Operation(
    "indexer_prepare_q",
    inputs=(
        Input("q", "s_q h d", ("bfloat16",), contiguous=True),
        Input("weights", "s_q h", ("float32",)),
        *_ROTATION,
        Input("positions", "s_q", ("int32",)),
    ),
    outputs=(Output("codes", "s_q h d", code_dtypes, layout="wide"), Output("folded", "s_q h")),
    sizes={"d": HEAD_DIMS},
    min_sizes={"h": 1, "max_position": 1},
    options=PrepareQueryOptions,
    parallel={"s_q": ()},
    examine=_examine_q,
    pipeline=PREPARE_Q,
)

OPERATION_K = Operation(
    "indexer_prepare_k",
    inputs=(
        Input("k", "s_kv d", ("bfloat16",), contiguous=True),
        *_ROTATION,
        Input("positions", "s_kv", ("int32",)),
        *NORM,
    ),
    outputs=(Output("codes", "s_kv d", code_dtypes, layout="wide"), Output("k_scale", "s_kv")),
    sizes={"d": HEAD_DIMS},
    min_sizes={"max_position": 1},
    options=PrepareOptions,
    parallel={"s_kv": ()},
    examine=_examine_k,
    pipeline=PREPARE_K,
)
