"""Preparation of the index queries and keys of the same tokens, in one launch."""

from __future__ import annotations

from typing import Any

from mla_cupy.errors import ArgumentError, explain
from mla_cupy.kernels.indexer.prepare import PREPARE_BOTH
from mla_cupy.kernels.indexer.prepare.quantize import PrepareBothOptions, PrepareProblem
from mla_cupy.ops.call import call
from mla_cupy.ops.checks import check_accumulate, check_all_or_none, check_flag
from mla_cupy.ops.indexer.key_cache import CACHE, SIZES, check_e2m1_scales, check_pages
from mla_cupy.ops.indexer.prepare import NORM, check_prepare_options, check_vectors, code_dtypes
from mla_cupy.ops.operation import Examined, Input, Operation, Output, Views, present


def indexer_prepare(
    q: Any,
    weights: Any,
    k: Any,
    cos: Any,
    sin: Any,
    positions: Any,
    cache: Any = None,
    slots: Any = None,
    *,
    norm_weight: Any = None,
    norm_bias: Any = None,
    interleaved: bool = False,
    hadamard: bool = True,
    scales: str = "power_of_2",
    reference_rounding: bool = True,
    accumulate: str = "float32",
    eps: float = 1e-6,
    return_k: bool = False,
    independent: bool = False,
    codes: Any = None,
    folded: Any = None,
    k_codes: Any = None,
    k_scale: Any = None,
    stream: Any = None,
) -> tuple[Any, Any, Any, Any]:
    """Rotate and quantise the index queries and keys of the same tokens in one launch.

    The call combines `indexer_prepare_q` with `indexer_cache_append` or `indexer_prepare_k`: the keys go to a cache, or
    are returned.

    Parameters
    ----------
    q : array, (n, h, d), bfloat16
        As for `indexer_prepare_q`.
    weights : array, (n, h), float32
    k : array, (n, d), bfloat16
        As for `indexer_prepare_k`. The last axis is contiguous.
    cos, sin : array, (max_position, rope_pairs), float32
        As for `indexer_prepare_q`, for both.
    positions : array, (n,), int32
        Rows of cos and sin; clamped to the tables.
    cache : array, (num_pages, page_size, d + 4), uint8, optional
        As for `indexer_cache_append`; requires `slots`. It is changed in place.
    slots : array, (n,), int32 or int64, optional
        As for `indexer_cache_append`.
    norm_weight, norm_bias : array, (d,), float32, optional
        Weight and bias of the keys' LayerNorm: see `indexer_prepare_k`.
    interleaved, hadamard, scales, reference_rounding, accumulate
        As for `indexer_prepare_q`.
    eps : float
        Epsilon of the LayerNorm.
    return_k : bool
        Return the keys instead of writing them to a cache.
    independent : bool
        A promise: neither this call nor the call before it on the stream writes memory that the other reads or writes.
        They then run at the same time, and later calls find the results of both. Requires memory for all results,
        allocated before the previous call. "Around attention" in the documentation has the rules.
    codes : array, (n, h, d), uint8 or float8_e4m3fn, optional
        Memory for the queries' codes; it starts at, and steps by, multiples of 16 bytes.
    folded : array, (n, h), float32, optional
        Memory for the weights.
    k_codes : array, (n, d), uint8 or float8_e4m3fn, optional
        Memory for the keys' codes; as for `codes`.
    k_scale : array, (n,), float32, optional
        Memory for the keys' scales.
    stream : int or stream object, optional
        Where to run. Default: the caller's library's current stream.

    Returns
    -------
    codes : array, (n, h, d), uint8
        Bits of e4m3.
    folded : array, (n, h), float32
    k_codes : array, (n, d), uint8, or None
        With `return_k`.
    k_scale : array, (n,), float32, or None
        With `return_k`.

    Raises
    ------
    ShapeError, DTypeError, DeviceError, ArgumentError
        If an argument does not fit; nothing has been launched, and the cache is untouched.

    Notes
    -----
    Equal to the oracle byte by byte.

    Examples
    --------
    >>> import ml_dtypes, numpy as np, mla_cupy
    >>> q, k = np.ones((2, 4, 32), ml_dtypes.bfloat16), np.ones((2, 32), ml_dtypes.bfloat16)
    >>> tables, weights = np.ones((2, 8, 16), np.float32), np.ones((2, 4), np.float32)
    >>> cache, slots, positions = np.zeros((4, 16, 36), np.uint8), np.array([3, 17]), np.zeros(2, np.int32)
    >>> codes, folded, _, _ = mla_cupy.indexer_prepare(q, weights, k, *tables, positions, cache, slots)
    >>> codes.shape, folded.shape, sorted(set(np.nonzero(cache)[0].tolist()))
    ((2, 4, 32), (2, 4), [0, 1])
    """
    return call(indexer_prepare, locals())


def _examine(views: Views, given: PrepareBothOptions) -> Examined:
    options = check_prepare_options(given)._replace(
        accumulate=check_accumulate(given.accumulate),
        return_k=check_flag("return_k", given.return_k),
        independent=check_flag("independent", given.independent),
    )
    check_all_or_none(views, "norm_weight", "norm_bias")
    if check_all_or_none(views, "cache", "slots") == options.return_k:
        got = "True, with a cache" if options.return_k else "False, without a cache"
        raise ArgumentError(explain("return_k", got, "a cache, or return_k", "pass either a cache or return_k=True"))
    q, k = present(views, "q"), present(views, "k")
    if views["cache"] is not None:
        check_pages(present(views, "cache"), k.shape[1])
        check_e2m1_scales(present(views, "cache"), k.shape[1], options.scales)
    problem, of_keys = check_vectors(q, views["cos"], more=k.shape[0]), check_vectors(k, views["cos"])
    return Examined(PrepareProblem(problem.head_dim, problem.aligned and of_keys.aligned), options)


OPERATION = Operation(
    "indexer_prepare",
    inputs=(
        Input("q", "n h d", ("bfloat16",), contiguous=True),
        Input("weights", "n h", ("float32",)),
        Input("k", "n d", ("bfloat16",), contiguous=True),
        Input("cos", "max_position rope_pairs", ("float32",), contiguous=True),
        Input("sin", "max_position rope_pairs", ("float32",), contiguous=True),
        Input("positions", "n", ("int32",)),
        Input("cache", CACHE, ("uint8",), optional=True, contiguous=True, written=True),
        Input("slots", "n", ("int32", "int64"), optional=True),
        *NORM,
    ),
    outputs=(
        Output("codes", "n h d", code_dtypes, layout="wide"),
        Output("folded", "n h"),
        Output("k_codes", "n d", code_dtypes, layout="wide", when="return_k"),
        Output("k_scale", "n", when="return_k"),
    ),
    sizes=SIZES,
    min_sizes={"h": 1, "max_position": 1},
    options=PrepareBothOptions,
    examine=_examine,
    pipeline=PREPARE_BOTH,
    on_pages=True,
)
