"""Queries and keys before decode, in one launch."""

from __future__ import annotations

from typing import Any

from mla_cupy.cache_formats import FORMATS
from mla_cupy.dtypes import HALF
from mla_cupy.errors import ArgumentError, ShapeError, explain
from mla_cupy.kernels.cache.prepare import MLA_PREPARE, MlaPrepareOptions
from mla_cupy.ops.cache import CACHE_AXES, CACHE_DTYPES, INDEX_DTYPES, check_pairs, check_tokens
from mla_cupy.ops.call import call
from mla_cupy.ops.checks import check_all_or_none, check_base, check_factor, check_flag
from mla_cupy.ops.operation import Examined, Input, Operation, Output, Views, only_like_first, present
from mla_cupy.ops.schema import check_wide
from mla_cupy.shapes import D_HEADS, D_QK, D_ROPE, D_V, MAX_INT32

WIDTHS = (576, 512, 192, 64)
"""Widths of queries with their RoPE part: absorbed, with RoPE inside, before W_UK is absorbed, the part alone."""


def mla_prepare(
    q: Any,
    latent: Any = None,
    rope: Any = None,
    cache: Any = None,
    slots: Any = None,
    *,
    q_rope: Any = None,
    w_uk: Any = None,
    cos: Any = None,
    sin: Any = None,
    positions: Any = None,
    theta: float | None = None,
    interleaved: bool = True,
    quantise: bool = False,
    q_scale: float | None = None,
    return_rope: bool = False,
    kv_format: str | None = None,
    scales: str | None = None,
    kv_scale: float = 1.0,
    out: Any = None,
    q_scales: Any = None,
    rope_out: Any = None,
    stream: Any = None,
) -> tuple[Any, Any, Any]:
    """Prepare queries and keys for decode in one launch: RoPE for both, queries in e4m3, tokens into the cache.

    Each part is optional. For keys alone use `cache_append`. With `w_uk` the launch also does the work of `absorb`.

    Parameters
    ----------
    q : array, (n, h, d), bfloat16 or float16
        Queries with the RoPE part in their last 64 columns: d is 576, 512, 192 or 64. With `q_rope`, queries without
        that part: d is 512, 448 or 128. The last axis is contiguous; other strides are free (multiples of 16 bytes are
        fastest).
    latent : array, (n, d_latent), dtype of q, optional
        The tokens' latent part, as for `cache_append`; requires `cache` and `slots`.
    rope : array, (n, 64), dtype of q, optional
        The tokens' RoPE part, before RoPE; requires a cache or `return_rope`.
    cache : array, (num_pages, page_size, width), optional
        As for `cache_append`. It is changed in place.
    slots : array, (n,), int32 or int64, optional
        As for `cache_append`: slots outside the cache are skipped.
    q_rope : array, (n, h, 64), dtype of q, optional
        The queries' RoPE part where it is a separate array, such as next to absorbed queries.
    w_uk : array, (h, d_nope, 512), dtype of q, optional
        The keys' half of kv_b_proj, as for `absorb`; it multiplies the queries' part without RoPE. d is then d_nope +
        64, or d_nope with `q_rope`, where d_nope is 64, 128, 192 or 256. If d is d_nope without `q_rope`, the model has
        no RoPE, as Kimi K3: queries of 192 have a RoPE part with w_uk of 128 rows, and none with w_uk of 192. Such
        queries exclude `rope` and angles, and their tokens go to a format without a RoPE part. q, w_uk, q_rope and out
        start at, and step by, multiples of 16 bytes. Excludes `quantise`.
    cos, sin : array, (max_position, 32), float32, optional
        As for `cache_append`, for q and `rope`. The last axis is contiguous.
    positions : array, (n,), int32 or int64, optional
        Positions of the tokens: rows of cos and sin, clamped to the tables, or any integers with `theta`. Without them
        RoPE is not applied.
    theta : float, optional
        Base of RoPE, at least 1; replaces cos and sin: pair i turns by position * theta**(-i / 32).
    interleaved : bool
        Pairs that RoPE turns: elements (2i, 2i + 1), as in DeepSeek's models, or, if False, (i, i + 32).
    quantise : bool
        Make `out` e4m3 codes of the 16-bit result.
    q_scale : float, optional
        Scale of all codes, for `mla_decode`'s `Fp8.q_scale`. Default: one scale per row.
    return_rope : bool
        Return the turned RoPE part of the tokens, too.
    kv_format, scales, kv_scale
        As for `cache_append`.
    out : array, (n, h, d) or (n, h, d + 64), dtype of q; or uint8 or float8_e4m3fn, optional
        Memory for the queries; with w_uk (n, h, 576), or (n, h, 512) without RoPE. It may be `q` itself; then only the
        RoPE part is written. The last axis is contiguous.
    q_scales : array, (n, h), float32, optional
        Memory for the scales.
    rope_out : array, (n, 64), dtype of q, optional
        Memory for the RoPE part of the tokens; it may be `rope` itself. The last axis is contiguous.
    stream : int or stream object, optional
        Where to run. Default: the caller's library's current stream.

    Returns
    -------
    out : array, (n, h, d) or (n, h, d + 64), or with w_uk (n, h, 576), or (n, h, 512) without RoPE
        Queries for `mla_decode`: with `quantise` uint8, the bits of e4m3.
    q_scales : array, (n, h), float32, or None
        Factors of each row's codes, with `quantise`.
    rope_out : array, (n, 64), or None
        With `return_rope`.

    Raises
    ------
    ShapeError, DTypeError, DeviceError, ArgumentError
        If an argument does not fit; nothing has been launched, and the cache is untouched.

    Notes
    -----
    RoPE is computed in float32, with a rounding after each operation, and rounded to 16 bits once. A row's own scale
    equals `mla_decode`'s with Fp8("fp8"): the smallest power of two, at least 2^-100, that brings the largest magnitude
    to 448 or below. The codes therefore equal the codes that decode makes of the 16-bit result, ties to even. A row
    with NaN or infinity is NaN, and so is its scale. With `q_scale` NaN stays in its element, and magnitudes above 448
    * q_scale saturate.

    Products with `w_uk` are added in float32, with the same bits as in `absorb`. With many tokens a separate matrix
    product is faster: "Around attention" in the documentation has the threshold.

    With tables, results except these products do not depend on the GPU and equal `mla_cupy.reference.mla_prepare` byte
    by byte. With `theta`, angles are right to 2^-24 turns for positions of 31 bits, and cos and sin to 2^-21; tables
    made of a float32 product of position and frequency are off by up to 2^-23 of the angle, which is more. NumPy arrays
    are computed on a GPU if there is one, which copies the cache there and back, else by the oracle.

    Examples
    --------
    >>> import numpy as np, mla_cupy
    >>> q, cache = np.ones((2, 4, 576), np.float16), np.zeros((8, 64, 656), np.uint8)
    >>> latent, rope = np.ones((2, 512), np.float16), np.ones((2, 64), np.float16)
    >>> numbers = {"positions": np.array([6, 7]), "theta": 10000.0}
    >>> out, _, _ = mla_cupy.mla_prepare(q, latent, rope, cache, np.array([70, 71]), **numbers, out=q)
    >>> out is q, float(q[0, 0, 511]), round(float(q[0, 0, 512]), 3)
    (True, 1.0, 1.239)
    """
    return call(mla_prepare, locals())


# ---- Checks -----------------------------------------------------------------------------------------------------


def _examine(views: Views, given: MlaPrepareOptions) -> Examined:
    n, h, d = present(views, "q").shape
    width = d + (0 if views["q_rope"] is None else D_ROPE)
    if views["w_uk"] is not None:
        width = D_QK if _check_absorbed(views, given) else D_V
    elif width not in WIDTHS:
        allowed = WIDTHS if views["q_rope"] is None else [each - D_ROPE for each in WIDTHS[:-1]]
        with_rope = "" if views["q_rope"] is None else " with q_rope"
        raise ShapeError(explain("q.shape[-1]", d, " or ".join(map(str, allowed)) + with_rope))
    if n * h > MAX_INT32:
        raise ShapeError(explain("n * h", n * h, f"at most {MAX_INT32} rows", "split the call"))
    options = given._replace(
        theta=None if given.theta is None else check_base("theta", given.theta),
        interleaved=check_flag("interleaved", given.interleaved),
        quantise=check_flag("quantise", given.quantise),
        q_scale=None if given.q_scale is None else check_factor("q_scale", given.q_scale),
        return_rope=check_flag("return_rope", given.return_rope),
    )
    if options.q_scale is not None and not options.quantise:
        raise ArgumentError(explain("q_scale", given.q_scale, "None without quantise", "it is the scale of e4m3 codes"))
    _check_angles(views, options)
    return Examined(None, _with_record(views, options), sizes={"d_out": width})


def _check_absorbed(views: Views, given: MlaPrepareOptions) -> bool:
    """Check queries before W_UK: their width, alignment, and RoPE arguments; returns True if they have a RoPE part."""
    d, d_nope, own = present(views, "q").shape[2], present(views, "w_uk").shape[1], views["q_rope"] is None
    if d not in (d_nope, d_nope + D_ROPE * own):
        widths = f"{d_nope + D_ROPE}, or {d_nope} without RoPE" if own else f"{d_nope} with q_rope"
        raise ShapeError(explain("q.shape[-1]", d, f"{widths}, with w_uk.shape[1]={d_nope}"))
    has_rope = not own or d != d_nope
    if not has_rope:
        _check_no_rope(views, given)
    if given.quantise:
        raise ArgumentError(
            explain(
                "quantise", True, "False with w_uk", "quantise in a separate call: absorbed queries stay in 16 bits"
            )
        )
    for name in ("q", "q_rope"):
        if (view := views[name]) is not None:
            check_wide(name, view)
    return has_rope


def _check_no_rope(views: Views, given: MlaPrepareOptions) -> None:
    passed = {name: "an array" for name in ("rope", "cos", "sin", "positions") if views[name] is not None}
    if given.theta is not None:
        passed["theta"] = repr(given.theta)
    for name, got in passed.items():
        raise ArgumentError(explain(name, got, "None: q has no RoPE part", "pass q_rope, or leave it out"))


def _check_angles(views: Views, options: MlaPrepareOptions) -> None:
    """Check that positions come with tables or a base, and nothing of these without positions."""
    tables = check_all_or_none(views, "cos", "sin")
    if views["positions"] is None and (tables or options.theta is not None):
        raise ArgumentError(explain("positions", None, "an array", "pass positions with cos/sin or theta"))
    if views["positions"] is not None and tables == (options.theta is not None):
        got = "both cos and theta" if tables else "neither cos nor theta"
        raise ArgumentError(explain("theta", got, "cos and sin, or theta", "pass one of them with positions"))
    if tables:
        check_pairs(views, D_ROPE)


def _with_record(views: Views, options: MlaPrepareOptions) -> MlaPrepareOptions:
    """The options, with the format's options resolved."""
    if options.return_rope and views["rope"] is None:
        raise ArgumentError(explain("rope", None, "an array with return_rope"))
    if check_all_or_none(views, "latent", "cache", "slots"):
        record, scales, kv_scale = check_tokens(views, options.kv_format, options.scales, options.kv_scale)
        if options.return_rope and not FORMATS[record].d_rope:
            raise ArgumentError(explain("return_rope", True, f"False: {record} has no RoPE part"))
        return options._replace(kv_format=record, scales=scales, kv_scale=kv_scale)
    for name in ("kv_format", "scales"):
        if getattr(options, name) is not None:
            raise ArgumentError(explain(name, repr(getattr(options, name)), "None without a cache"))
    kv_scale = check_factor("kv_scale", options.kv_scale)
    if kv_scale != 1:
        raise ArgumentError(explain("kv_scale", kv_scale, "1 without a cache"))
    if views["rope"] is not None and not options.return_rope:
        remedy = "pass latent, cache and slots, or return_rope=True"
        raise ArgumentError(explain("rope", "an array", "None without a cache", remedy))
    return options._replace(kv_scale=kv_scale)


OPERATION = Operation(
    "mla_prepare",
    inputs=(
        Input("q", "n h d", HALF, contiguous=True),
        Input("latent", "n d_latent", ("=q",), optional=True, contiguous=True),
        Input("rope", "n d_rope", ("=q",), optional=True, contiguous=True),
        Input("cache", CACHE_AXES, CACHE_DTYPES, optional=True, contiguous=True, written=True),
        Input("slots", "n", INDEX_DTYPES, optional=True),
        Input("q_rope", "n h d_rope", ("=q",), optional=True, contiguous=True),
        Input("w_uk", "h d_nope d_v", ("=q",), optional=True, wide=True),
        Input("cos", "max_position pairs", ("float32",), optional=True, contiguous=True),
        Input("sin", "max_position pairs", ("float32",), optional=True, contiguous=True),
        Input("positions", "n", INDEX_DTYPES, optional=True),
    ),
    outputs=(
        Output("out", "n h d_out", only_like_first, layout="rows", wide_with="w_uk", may_be="q", coded="quantise"),
        Output("q_scales", "n h", when="quantise"),
        Output("rope_out", "n d_rope", only_like_first, layout="rows", when="return_rope", may_be="rope"),
    ),
    sizes={"d_nope": D_HEADS, "d_rope": (D_ROPE,), "d_v": (D_V,)},
    min_sizes={"h": 1, "max_position": 1},
    options=MlaPrepareOptions,
    examine=_examine,
    pipeline=MLA_PREPARE,
    on_pages=True,
)
