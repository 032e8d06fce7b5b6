"""Writing tokens to a paged cache, and reading them back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mla_cupy.arrays.view import View
from mla_cupy.cache_formats import BYTE_DTYPES, FORMATS, V32, CacheFormat, format_of
from mla_cupy.dtypes import FLOATS, HALF
from mla_cupy.errors import ArgumentError, ShapeError, explain
from mla_cupy.kernels.attention.record_layout import page_and_token_bytes
from mla_cupy.kernels.cache import APPEND, GATHER
from mla_cupy.kernels.cache.pipeline import AppendOptions, GatherOptions
from mla_cupy.ops.call import call
from mla_cupy.ops.checks import absorbing, check_all_or_none, check_factor, check_flag
from mla_cupy.ops.operation import Examined, Input, Operation, Output, Views, present

CACHE_DTYPES = (*BYTE_DTYPES, *HALF)
INDEX_DTYPES = ("int32", "int64")
CACHE_AXES = "num_pages page_size 1? width"
_RECORD_ALIGNMENT = 16


def cache_append(
    latent: Any,
    rope: Any,
    cache: Any,
    slots: Any,
    *,
    cos: Any = None,
    sin: Any = None,
    positions: Any = None,
    kv_format: str | None = None,
    scales: str | None = None,
    kv_scale: float = 1.0,
    interleaved: bool = True,
    stream: Any = None,
) -> None:
    """Write tokens to a paged cache, in place: quantise, apply RoPE if requested, scatter by slot.

    Parameters
    ----------
    latent : array, (n, d_latent), bfloat16, float16 or float32
        d_latent is 512, or 448 for the formats "v4", "v41" and "v41-fp4". The last axis is contiguous.
    rope : array, (n, 64), dtype of latent, or None
        None for formats without RoPE. The last axis is contiguous.
    cache : array, (num_pages, page_size, width), uint8 or a 16-bit float type
        Pages in one of the formats that `mla-cupy formats` lists. An axis of size 1 may stand on either side of the
        tokens, as for `mla_decode`. Pages may be any distance apart; caches of bytes start at, and step by, multiples
        of 16 bytes. It is changed in place.
    slots : array, (n,), int32 or int64
        Token i goes to page slots[i] // page_size, place slots[i] % page_size. Slots outside the cache, usually -1, are
        skipped. If several tokens have the same slot, any one of them is written.
    cos, sin : array, (max_position, 32), float32, optional
        Apply RoPE to `rope` first: a pair (x, y) becomes (x * cos - y * sin, x * sin + y * cos). The last axis is
        contiguous.
    positions : array, (n,), int32 or int64, optional
        Rows of cos and sin; clamped to the tables. Required with cos and sin, and not allowed without them.
    kv_format : str, optional
        Name of the format, see `mla-cupy formats`. Default: the format with this dtype and width, "v32" for 656 bytes;
        tokens without RoPE need "v32-nope" there.
    scales : str, optional
        For the formats "v32" and "v32-nope": "power_of_2", the default, produces the bytes of FlashMLA's quantiser;
        "plain" produces vLLM's.
    kv_scale : float
        For the format "fp8": factor of the stored numbers when they are read.
    interleaved : bool
        Pairs that RoPE turns: elements (2i, 2i + 1), as in DeepSeek's models, or, if False, (i, i + 32).
    stream : int or stream object, optional
        Where to run. Default: the caller's library's current stream.

    Raises
    ------
    ShapeError, DTypeError, DeviceError, ArgumentError
        If an argument does not fit; nothing has been launched, and the cache is untouched.

    Notes
    -----
    Exact: the bytes do not depend on the GPU and equal the oracle's (`mla_cupy.reference.cache_append`), except for the
    sign and payload of a NaN in `rope` that is converted to bfloat16. A NaN or an infinity makes its whole group of 128
    (64 for "v4", 32 for "v41", 16 for "v41-fp4") read as NaN. The padding byte of "v4" is set to 0, the reserved bytes
    of "v32-nope" are left unchanged. "v41" and "v41-fp4"
    also quantise the RoPE part, after it was turned and rounded to the dtype of `rope`. NumPy caches are changed on a
    GPU if there is one, which copies the cache there and back, else by the oracle. Not for JAX, whose arrays cannot be
    written: `mla_cupy.jax.cache_append` returns the changed cache.

    Examples
    --------
    >>> import numpy as np, mla_cupy
    >>> cache = np.zeros((8, 64, 656), np.uint8)
    >>> latent, rope = np.ones((3, 512), np.float16), np.ones((3, 64), np.float16)
    >>> mla_cupy.cache_append(latent, rope, cache, np.array([70, -1, 71]))
    >>> mla_cupy.cache_gather(cache, np.array([70, 72]))[:, 0].tolist()
    [1.0, 0.0]
    """
    return call(cache_append, locals())


def cache_gather(
    cache: Any,
    slots: Any,
    *,
    kv_format: str | None = None,
    kv_scale: float = 1.0,
    out: Any = None,
    out_dtype: Any = None,
    stream: Any = None,
) -> Any:
    """Read tokens of a paged cache as rows of numbers, dequantised.

    Parameters
    ----------
    cache, kv_format, kv_scale
        As for `cache_append`.
    slots : array, (n,), int32 or int64
        Slots outside the cache, such as -1, give rows of zeros.
    out : array, (n, d_qk), optional
        Memory for the rows; the last axis is contiguous.
    out_dtype : str or dtype, optional
        "bfloat16", "float16" or "float32". Default: the dtype of `out`, or of a 16-bit cache, or bfloat16.
    stream : int or stream object, optional
        Where to run. Default: the caller's library's current stream.

    Returns
    -------
    array, (n, d_qk)
        Latent, then RoPE. A quantised element is its value times its scale, rounded to float32 and then to `out_dtype`.

    Raises
    ------
    ShapeError, DTypeError, DeviceError, ArgumentError
        If an argument does not fit; nothing has been launched.

    Notes
    -----
    Exact: the numbers do not depend on the GPU.

    Examples
    --------
    >>> import numpy as np, mla_cupy
    >>> mla_cupy.cache_gather(np.zeros((2, 64, 584), np.uint8), np.array([5])).shape
    (1, 512)
    """
    return call(cache_gather, locals())


# ---- Checks -----------------------------------------------------------------------------------------------------


def check_layout(record: CacheFormat, cache: View, argument: str = "cache") -> None:
    """Check the kernels' requirements other than the width of the last axis."""
    if 0 in cache.shape or record.dtype != "uint8":
        return
    page, token = page_and_token_bytes(record, cache)
    _, page_size, _ = cache.shape
    if len(record.planes) > 1 and page_size > 1 and cache.strides[1] != record.token_bytes:
        expected = f"{record.token_bytes} bytes per token: the pages of {record.name} are planes"
        remedy = "only pages may be further apart"
        raise ShapeError(explain(f"{argument}.strides[1]", cache.strides[1], expected, remedy))
    if (
        cache.ptr % _RECORD_ALIGNMENT
        or (cache.shape[0] > 1 and page % _RECORD_ALIGNMENT)
        or (page_size > 1 and token % _RECORD_ALIGNMENT)
    ):
        got = f"{cache.strides} at {cache.ptr:#x}"
        remedy = f"allocate pages of a multiple of {_RECORD_ALIGNMENT} bytes, such as {record.page_bytes(page_size)}"
        expected = f"a start and steps that are multiples of {_RECORD_ALIGNMENT} bytes"
        raise ShapeError(explain(f"{argument}.strides", got, expected, remedy))


def record_read(
    cache: View, d_qk: int, read: Sequence[str], argument: str, remedy: str, name: object = None
) -> CacheFormat:
    """The FP8 record of a cache's pages: one that kernels `read`, for queries of this width, called `name` if given.

    Raises
    ------
    ShapeError
    """
    record = format_of(cache.dtype, cache.shape[-1], argument, name, read, d_qk)
    if record.name not in read:
        raise ShapeError(explain(argument, f"pages of {record.name}", " or ".join(read), remedy))
    if d_qk != record.d_qk:
        raise ShapeError(explain("q.shape[-1]", d_qk, f"{record.d_qk} for {record.name}", absorbing(d_qk)))
    return record


def check_no_format(name: object) -> None:
    """Check that a cache of 16-bit rows has no format named.

    Raises
    ------
    ArgumentError
    """
    if name is not None:
        raise ArgumentError(explain("kv_format", repr(name), "None for 16-bit rows"))


def _record(views: Views, name: Any, kv_scale: Any) -> tuple[CacheFormat, float]:
    cache = present(views, "cache")
    record = format_of(cache.dtype, cache.shape[2], name=name)
    check_layout(record, cache)
    scale = check_factor("kv_scale", kv_scale)
    if scale != 1 and "tensor" not in record.scales:
        raise ArgumentError(explain("kv_scale", kv_scale, f"1 for {record.name}: its tokens hold their own scales"))
    return record, scale


def check_tokens(views: Views, name: Any, scales: Any, kv_scale: Any) -> tuple[str, str, float]:
    """Check tokens against the record of their cache; returns its name, the rule of its scales and the caller's one.

    Raises
    ------
    ShapeError, ArgumentError
    """
    record, factor = _record(views, name, kv_scale)
    latent, rope = present(views, "latent"), views["rope"]
    if latent.shape[1] != record.d_latent:
        raise ShapeError(explain("latent.shape[-1]", latent.shape[1], f"{record.d_latent} for {record.name}"))
    if (0 if rope is None else rope.shape[1]) != record.d_rope:
        got = "None" if rope is None else f"an array of width {rope.shape[1]}"
        expected = f"an array of width {record.d_rope}" if record.d_rope else "None"
        remedy = 'pass kv_format="v32-nope" for tokens without RoPE' if rope is None and record is V32 else ""
        raise ShapeError(explain("rope", got, f"{expected} for {record.name}", remedy))
    named = isinstance(scales, str) and scales in [name for name in record.scales if name != "none"]
    if scales is not None and not named:
        raise ArgumentError(explain("scales", repr(scales), f"None, or one of {', '.join(record.scales)}"))
    return record.name, record.scales[0] if scales is None else scales, factor


def check_pairs(views: Views, d_rope: int) -> None:
    """Check the width of the tables of RoPE.

    Raises
    ------
    ShapeError
    """
    pairs = present(views, "cos").shape[1]
    if pairs != d_rope // 2:
        raise ShapeError(explain("cos.shape[-1]", pairs, f"{d_rope // 2} pairs"))


def _examine_append(views: Views, given: AppendOptions) -> Examined:
    record, scales, kv_scale = check_tokens(views, given.kv_format, given.scales, given.kv_scale)
    d_rope = FORMATS[record].d_rope
    if check_all_or_none(views, "cos", "sin", "positions"):
        if not d_rope:
            raise ArgumentError(explain("cos", "an array", f"None: {record} has no RoPE part"))
        check_pairs(views, d_rope)
    interleaved = check_flag("interleaved", given.interleaved)
    return Examined(None, AppendOptions(record, scales, kv_scale, interleaved))


def _examine_gather(views: Views, given: GatherOptions) -> Examined:
    record, kv_scale = _record(views, given.kv_format, given.kv_scale)
    return Examined(None, given._replace(kv_format=record.name, kv_scale=kv_scale), sizes={"d_qk": record.d_qk})


def _row_dtypes(first: str) -> tuple[str, ...]:
    """Dtypes of rows: first a 16-bit cache's, else bfloat16."""
    return (first, *(dtype for dtype in FLOATS if dtype != first)) if first in HALF else FLOATS


APPEND_OPERATION = Operation(
    "cache_append",
    inputs=(
        Input("latent", "n d_latent", FLOATS, contiguous=True),
        Input("rope", "n d_rope", ("=latent",), optional=True, contiguous=True),
        Input("cache", CACHE_AXES, CACHE_DTYPES, contiguous=True, written=True),
        Input("slots", "n", INDEX_DTYPES),
        Input("cos", "max_position pairs", ("float32",), optional=True, contiguous=True),
        Input("sin", "max_position pairs", ("float32",), optional=True, contiguous=True),
        Input("positions", "n", INDEX_DTYPES, optional=True),
    ),
    outputs=(),
    min_sizes={"max_position": 1},
    options=AppendOptions,
    examine=_examine_append,
    pipeline=APPEND,
    on_pages=True,
)

GATHER_OPERATION = Operation(
    "cache_gather",
    inputs=(Input("cache", CACHE_AXES, CACHE_DTYPES, contiguous=True), Input("slots", "n", INDEX_DTYPES)),
    outputs=(Output("out", "n d_qk", _row_dtypes, "out_dtype", "rows"),),
    options=GatherOptions,
    parallel={"n": ()},
    examine=_examine_gather,
    pipeline=GATHER,
    on_pages=True,
)
