"""Index keys in a paged cache: writing them, and reading them back."""

from __future__ import annotations

from typing import Any, NamedTuple

from mla_cupy.arrays.view import View
from mla_cupy.errors import ArgumentError, ShapeError, explain
from mla_cupy.kernels.indexer.logits.problem import HEAD_DIMS
from mla_cupy.kernels.indexer.prepare import APPEND_KEYS, GATHER_KEYS
from mla_cupy.kernels.indexer.prepare.quantize import PrepareOptions
from mla_cupy.ops.call import call
from mla_cupy.ops.checks import check_all_or_none, check_count
from mla_cupy.ops.indexer.prepare import (
    NORM,
    check_prepare_options,
    check_vectors,
    code_dtypes,
)
from mla_cupy.ops.operation import Examined, Input, Operation, Output, Views, present

_SLOT_DTYPES = ("int32", "int64")
SCALE_BYTES = 4
"""Bytes of a record's scale: after the codes of a page come its scales, float32; or four exponents of e2m1."""
E2M1_WIDTH = 128
"""Elements of keys in e2m1."""
CACHE = "num_pages page_size 1? d+4"
"""The axes of a cache of index keys."""
SIZES = {"d": HEAD_DIMS, "d+4": tuple(d + SCALE_BYTES for d in HEAD_DIMS)}
_PAGE_ALIGNMENT = 16


def indexer_cache_append(
    k: Any,
    cache: Any,
    slots: Any,
    *,
    cos: Any = None,
    sin: Any = None,
    positions: Any = None,
    norm_weight: Any = None,
    norm_bias: Any = None,
    interleaved: bool = False,
    hadamard: bool = True,
    scales: str = "power_of_2",
    reference_rounding: bool = True,
    eps: float = 1e-6,
    stream: Any = None,
) -> None:
    """Write index keys to a paged cache, in place: `indexer_prepare_k`, scattered by slot.

    Parameters
    ----------
    k : array, (n, d), bfloat16
        Keys of d = 32, 64 or 128 elements, after their LayerNorm unless `norm_weight` is passed. The last axis is
        contiguous.
    cache : array, (num_pages, page_size, d + 4), uint8
        As for `indexer_logits_paged`; keys of 128 elements may also use 68 bytes, in e2m1. It is changed in place.
    slots : array, (n,), int32 or int64
        Key i goes to page slots[i] // page_size, place slots[i] % page_size. Slots outside the cache, usually -1, are
        skipped. If several keys have the same slot, any one of them is written.
    cos, sin : array, (max_position, rope_pairs), float32, optional
        As for `indexer_prepare_k`. Default: no RoPE, for keys that are already rotated.
    positions : array, (n,), int32, optional
        Rows of cos and sin; clamped to the tables. Required with cos and sin, and not allowed without them.
    norm_weight, norm_bias : array, (d,), float32, optional
        As for `indexer_prepare_k`.
    interleaved, hadamard, scales, reference_rounding, eps
        As for `indexer_prepare_k`. e2m1 supports only "power_of_2" scales: 2**ceil(log2(max(amax, 1e-4) / 6)) per 32
        elements; codes are rounded to nearest even and saturate. A group with a NaN gets a NaN scale.
    stream : int or stream object, optional
        Where to run. Default: the caller's library's current stream.

    Raises
    ------
    ShapeError, DTypeError, DeviceError, ArgumentError
        If an argument does not fit; nothing has been launched, and the cache is untouched.

    Notes
    -----
    One launch, which a CUDA graph can capture: a replay follows the slots. The bytes equal the oracle's. NumPy caches
    are changed on a GPU if there is one, which copies the cache there and back, else by the oracle. Not for JAX, whose
    arrays cannot be written: `mla_cupy.jax.indexer_cache_append` returns the changed cache.

    Examples
    --------
    >>> import ml_dtypes, numpy as np, mla_cupy
    >>> cache = np.zeros((8, 64, 132), np.uint8)
    >>> k = np.full((3, 128), 448, ml_dtypes.bfloat16)
    >>> mla_cupy.indexer_cache_append(k, cache, np.array([70, -1, 71]), hadamard=False)
    >>> codes, k_scale = mla_cupy.indexer_cache_gather(cache, np.array([70, 72]))
    >>> codes.view(ml_dtypes.float8_e4m3fn)[:, 0].tolist(), k_scale.tolist()
    ([448.0, 0.0], [1.0, 0.0])
    """
    return call(indexer_cache_append, locals())


def indexer_cache_gather(
    cache: Any,
    slots: Any,
    *,
    d: int | None = None,
    codes: Any = None,
    k_scale: Any = None,
    stream: Any = None,
) -> tuple[Any, Any]:
    """Read index keys of a paged cache as codes and scales for `indexer_logits`.

    Parameters
    ----------
    cache : array
        As for `indexer_cache_append`.
    slots : array, (n,), int32 or int64
        Slots outside the cache, such as -1, give zeros.
    d : int, optional
        Elements of a key: 32, 64 or 128. With 128 elements in 68 bytes, keys are e2m1: each becomes e4m3 codes with one
        scale, which is exact where its scales are at most 2**14 apart; elements with a smaller scale become zeros.
        Default: the number of e4m3 codes that fit, so 64 for 68 bytes.
    codes : array, (n, d), uint8 or float8_e4m3fn, optional
        Memory for the codes; it starts at, and steps by, multiples of 16 bytes.
    k_scale : array, (n,), float32, optional
        Memory for the scales.
    stream : int or stream object, optional
        Where to run. Default: the caller's library's current stream.

    Returns
    -------
    codes : array, (n, d), uint8
        Bits of e4m3.
    k_scale : array, (n,), float32

    Raises
    ------
    ShapeError, DTypeError, DeviceError, ArgumentError
        If an argument does not fit; nothing has been launched.

    Notes
    -----
    Exact. The NumPy backend returns 0x7f for a NaN code of either sign, and may return a signalling NaN scale as a
    quiet one.

    Examples
    --------
    >>> import numpy as np, mla_cupy
    >>> codes, k_scale = mla_cupy.indexer_cache_gather(np.zeros((2, 64, 132), np.uint8), np.array([5, -1]))
    >>> codes.shape, k_scale.shape
    ((2, 128), (2,))
    """
    return call(indexer_cache_gather, locals())


# ---- Checks -----------------------------------------------------------------------------------------------------


def holds_e2m1(cache: View, d: int) -> bool:
    """True for a cache with the token size of e2m1 keys of d elements."""
    return d == E2M1_WIDTH and cache.shape[2] == d // 2 + SCALE_BYTES


def check_pages(cache: View, d: int) -> None:
    """Check that the cache holds keys of d codes, in contiguous pages at multiples of 16 bytes.

    Raises
    ------
    ShapeError
    """
    record = d // 2 + SCALE_BYTES if holds_e2m1(cache, d) else d + SCALE_BYTES
    if cache.shape[2] != record:
        expected = f"{record} bytes: d = {d} codes and a float32"
        if d == E2M1_WIDTH:
            expected += f"; or {d // 2 + SCALE_BYTES}, of keys in e2m1"
        raise ShapeError(explain("cache.shape[-1]", cache.shape[2], expected))
    num_pages, page_size = cache.shape[:2]
    if 0 in cache.shape:
        return
    if cache.strides[2] != 1 or (page_size > 1 and cache.strides[1] != record):
        remedy = "only whole pages may lie apart"
        raise ShapeError(explain("cache.strides", cache.strides, f"contiguous pages: (any, {record}, 1)", remedy))
    if cache.ptr % _PAGE_ALIGNMENT or (num_pages > 1 and (cache.strides[0] % _PAGE_ALIGNMENT or cache.strides[0] < 0)):
        got = f"{cache.strides} from {cache.ptr:#x}"
        raise ShapeError(explain("cache.strides", got, f"pages at multiples of {_PAGE_ALIGNMENT} bytes"))


def _examine_append(views: Views, given: PrepareOptions) -> Examined:
    k, cache = present(views, "k"), present(views, "cache")
    check_pages(cache, k.shape[1])
    check_all_or_none(views, "cos", "sin", "positions")
    check_all_or_none(views, "norm_weight", "norm_bias")
    options = check_prepare_options(given)
    check_e2m1_scales(cache, k.shape[1], options.scales)
    return Examined(check_vectors(k, views["cos"]), options)


def check_e2m1_scales(cache: View, d: int, scales: str) -> None:
    """Check that keys in e2m1 are to have the scales that they can have.

    Raises
    ------
    ArgumentError
    """
    if holds_e2m1(cache, d) and scales != "power_of_2":
        raise ArgumentError(
            explain(
                "scales", repr(scales), '"power_of_2" for keys in e2m1', "use power_of_2: their scales are exponents"
            )
        )


class GatherKeysOptions(NamedTuple):
    """Options of `indexer_cache_gather`."""

    d: int | None


def _examine_gather(views: Views, given: GatherKeysOptions) -> Examined:
    cache = present(views, "cache")
    d = cache.shape[2] - SCALE_BYTES if given.d is None else check_count("d", given.d, 1, max(HEAD_DIMS))
    check_pages(cache, d)
    return Examined(None, given, sizes={"d": d})


APPEND_OPERATION = Operation(
    "indexer_cache_append",
    inputs=(
        Input("k", "n d", ("bfloat16",), contiguous=True),
        Input("cache", CACHE, ("uint8",), contiguous=True, written=True),
        Input("slots", "n", _SLOT_DTYPES),
        Input("cos", "max_position rope_pairs", ("float32",), optional=True, contiguous=True),
        Input("sin", "max_position rope_pairs", ("float32",), optional=True, contiguous=True),
        Input("positions", "n", ("int32",), optional=True),
        *NORM,
    ),
    outputs=(),
    sizes=SIZES,
    min_sizes={"max_position": 1},
    options=PrepareOptions,
    examine=_examine_append,
    pipeline=APPEND_KEYS,
    on_pages=True,
)

GATHER_OPERATION = Operation(
    "indexer_cache_gather",
    inputs=(Input("cache", CACHE, ("uint8",), contiguous=True), Input("slots", "n", _SLOT_DTYPES)),
    outputs=(Output("codes", "n d", code_dtypes, layout="wide"), Output("k_scale", "n")),
    sizes=SIZES,
    options=GatherKeysOptions,
    parallel={"n": ()},
    examine=_examine_gather,
    pipeline=GATHER_KEYS,
    on_pages=True,
)
