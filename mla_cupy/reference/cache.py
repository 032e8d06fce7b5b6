"""The paged cache: records of tokens, written, read and copied, exact byte by byte."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from mla_cupy.cache_formats import (
    BYTE_DTYPES,
    FORMATS,
    HEADER_WORDS,
    MAX_E2M1,
    MAX_E4M3,
    MIN_E4M3,
    MIN_RATIO,
    CacheFormat,
    Field,
    format_of,
    without_heads,
    words_before_changes,
)
from mla_cupy.dtypes import numpy_dtype

Array = npt.NDArray[Any]

_E4M3_NAN = 0x7F
_E8M0_NAN, _E8M0_BIAS = 0xFF, 127
_MIN_SCALE = np.finfo(np.float32).tiny


# ---- Numbers ----------------------------------------------------------------------------------------------------


@np.errstate(all="ignore")
def quantize(x: npt.ArrayLike, group: int, scales: str = "power_of_2") -> tuple[Array, Array]:
    """Round groups of numbers to e4m3 with a scale for each group.

    Parameters
    ----------
    x : array, (n, d)
        Of a 16-bit float type or float32; d is a multiple of `group`.
    group : int
        Consecutive elements that share a scale.
    scales : str
        "power_of_2": the least power of two that is not below max(amax / 448, 1e-4), as FlashMLA's quantiser chooses.
        "plain": max(amax / 448, smallest normal float32), as vLLM chooses. A group with a NaN or an infinity gets a
        scale of NaN or infinity, so that all of it reads as NaN.

    Returns
    -------
    codes : array, (n, d), uint8
        The bits of e4m3(clamp(x / scale, -448, 448)), rounded to nearest even.
    scales : array, (n, d / group), float32
    """
    n, d = np.asarray(x).shape
    groups = np.asarray(x).astype(np.float32).reshape(n, d // group, group)
    ratio = np.abs(groups).max(axis=-1, initial=0) / np.float32(MAX_E4M3)
    if scales == "power_of_2":
        ratio = np.maximum(ratio, np.float32(MIN_RATIO))
        mantissa, exponent = np.frexp(ratio)  # mantissa in [0.5, 1): 0.5 only for powers of two
        scale = np.where(np.isfinite(ratio), np.ldexp(np.float32(1), exponent - (mantissa == 0.5)), ratio)
    else:
        scale = np.maximum(ratio, _MIN_SCALE)
    scale = scale.astype(np.float32)
    codes = to_e4m3(groups / scale[..., None])
    return codes.reshape(n, d), scale


@np.errstate(all="ignore")
def quantize_to_e2m1(x: npt.ArrayLike, group: int) -> tuple[Array, Array]:
    """Round groups of numbers to e2m1 with an e4m3 scale for each group.

    Parameters
    ----------
    x : array, (n, d)
        Of a 16-bit float type or float32; d is a multiple of `group`, an even number.
    group : int
        Consecutive elements that share a scale.

    Returns
    -------
    codes : array, (n, d / 2), uint8
        The bits of e2m1(x / scale), see `to_e2m1`.
    scales : array, (n, d / group), float32
        amax / 6, rounded to e4m3 within [2^-9, 448], as in FlashMLA's quantiser. NaN for a group with a NaN or an
        infinity; the whole group reads as NaN.
    """
    n, d = np.asarray(x).shape
    groups = np.asarray(x).astype(np.float32).reshape(n, d // group, group)
    amax = np.abs(groups).max(axis=-1, initial=0)
    scale = from_e4m3(to_e4m3(np.maximum(amax / np.float32(MAX_E2M1), np.float32(MIN_E4M3))))
    scale = np.where(np.isfinite(amax), scale, np.float32(np.nan))
    return to_e2m1((groups / scale[..., None]).reshape(n, d)), scale


def to_e2m1(x: Array) -> Array:
    """The bits of the nearest e2m1 numbers, ties to even, saturating; NaN is 0. Two to a byte, the first one below."""
    size = np.abs(x)
    above = [size > 0.25, size >= 0.75, size > 1.25, size >= 1.75, size > 2.5, size >= 3.5, size > 5]
    codes = np.sum(above, axis=0, dtype=np.uint8) | np.where(np.signbit(x) & ~np.isnan(x), np.uint8(8), np.uint8(0))
    packed: Array = codes[..., 0::2] | codes[..., 1::2] << 4
    return packed


def from_e2m1(codes: Array) -> Array:
    """The values of pairs of e2m1 bits, float32."""
    values = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
    values = np.concatenate([values, -values])
    pairs: Array = np.stack([values[codes & 15], values[codes >> 4]], axis=-1)
    return pairs.reshape(*codes.shape[:-1], 2 * codes.shape[-1])


@np.errstate(all="ignore")
def to_e4m3(x: Array) -> Array:
    """The bits of the nearest e4m3 numbers, ties to even, saturating; NaN is 0x7F."""
    clamped = np.clip(x, -MAX_E4M3, MAX_E4M3).astype(np.float32)
    bits = clamped.astype(numpy_dtype("float8_e4m3fn")).view(np.uint8)
    return np.where(np.isnan(x), np.uint8(_E4M3_NAN), bits)


def from_e4m3(codes: Array) -> Array:
    """The values of e4m3 bits, float32."""
    return codes.view(numpy_dtype("float8_e4m3fn")).astype(np.float32)


def to_e8m0(scales: Array) -> Array:
    """The exponent bytes of powers of two; NaN and infinity are 0xFF."""
    _, exponent = np.frexp(scales)
    return np.where(np.isfinite(scales), exponent - 1 + _E8M0_BIAS, _E8M0_NAN).astype(np.uint8)


def from_e8m0(codes: Array) -> Array:
    """The powers of two of exponent bytes, float32; 0xFF is NaN."""
    values = np.ldexp(np.float32(1), np.minimum(codes, 254).astype(np.int32) - _E8M0_BIAS)
    scales: Array = np.where(codes == _E8M0_NAN, np.float32(np.nan), values)
    return scales


@np.errstate(all="ignore")
def rotate(
    rope: npt.ArrayLike, cos: npt.ArrayLike, sin: npt.ArrayLike, positions: npt.ArrayLike, interleaved: bool = True
) -> Array:
    """Rotary position embedding, in float32 with a rounding after each operation.

    Parameters
    ----------
    rope : array, (n, d)
    cos, sin : array, (max_position, d / 2), float32
    positions : array, (n,), integers
        Rows of cos and sin; clamped to them.
    interleaved : bool
        Whether RoPE turns elements (2i, 2i + 1), or (i, i + d / 2).

    Returns
    -------
    array, (n, d), float32
    """
    x = np.asarray(rope).astype(np.float32)
    rows = np.clip(np.asarray(positions), 0, len(np.asarray(cos)) - 1)
    c, s = np.asarray(cos, np.float32)[rows], np.asarray(sin, np.float32)[rows]
    half = x.shape[1] // 2
    first, second = (x[:, 0::2], x[:, 1::2]) if interleaved else (x[:, :half], x[:, half:])
    turned = first * c - second * s, second * c + first * s
    return np.stack(turned, axis=2).reshape(x.shape) if interleaved else np.concatenate(turned, axis=1)


# ---- Fields of pages --------------------------------------------------------------------------------------------


def field_view(cache: Array, record: CacheFormat, field: Field) -> Array:
    """The bytes of one field of all tokens: a view, (num_pages, page_size, bytes)."""
    octets = without_heads(cache).view(np.uint8)
    pages, page_size = octets.shape[:2]
    if octets.size == 0:
        return np.zeros((pages, page_size, field.nbytes), np.uint8)
    step = octets.strides[1] if len(record.planes) == 1 else record.planes[field.plane]
    start = sum(record.planes[: field.plane]) * page_size + field.offset
    reach = start + (page_size - 1) * step + field.nbytes
    page = np.lib.stride_tricks.as_strided(octets, (pages, reach), (octets.strides[0], 1))
    shape, strides = (pages, page_size, field.nbytes), (octets.strides[0], step, 1)
    return np.lib.stride_tricks.as_strided(page[:, start:], shape, strides)


def _encode(parts: dict[str, Array], record: CacheFormat, scales: str, kv_scale: float) -> dict[str, Array]:
    """The bytes of the fields of tokens."""
    alone = [name for name in parts if name not in record.grouped]
    encoded = {name: _encode_alone(parts[name], record.field(name), kv_scale) for name in alone}
    if record.grouped:
        fields = [record.field(name) for name in record.grouped]
        x = np.concatenate([parts[field.name].astype(np.float32) for field in fields], axis=1)
        codes, chosen = _quantized(x, record, scales)
        for field in fields:
            encoded[field.name] = codes[:, field.offset : field.offset + field.nbytes]
        encoded["scales"] = chosen
    return encoded


def _encode_alone(x: Array, field: Field, kv_scale: float) -> Array:
    """The bytes of a field without a scale, or with the caller's scale."""
    if field.is_code:
        with np.errstate(all="ignore"):
            return to_e4m3(x.astype(np.float32) / np.float32(kv_scale))
    wanted = numpy_dtype(field.kind)
    with np.errstate(over="ignore"):
        kept = np.ascontiguousarray(x) if x.dtype == wanted else x.astype(np.float32).astype(wanted)
    return kept.view(np.uint8)


def _quantized(x: Array, record: CacheFormat, scales: str) -> tuple[Array, Array]:
    """The bytes of all codes of tokens, and of their scales."""
    kind = record.field("scales").kind
    if record.field(record.grouped[0]).kind == "float4_e2m1fn":
        codes, chosen = quantize_to_e2m1(x, record.group)
        return codes, to_e4m3(chosen)
    codes, chosen = quantize(x, record.group, scales)
    return codes, chosen.view(np.uint8) if kind == "float32" else to_e8m0(chosen)


def _decode(tokens: Array, field: Field, scale: Array | float) -> Array:
    """The values of a field of n tokens, float32; `scale` is repeated per element."""
    if field.is_code:
        codes = np.ascontiguousarray(tokens)
        with np.errstate(all="ignore"):
            values: Array = from_e2m1(codes) if field.kind == "float4_e2m1fn" else from_e4m3(codes)
            return values * np.asarray(scale, np.float32)
    return np.ascontiguousarray(tokens).view(numpy_dtype(field.kind)).astype(np.float32)


def _scales_of(cache: Array, record: CacheFormat, pages: Array, tokens: Array, kv_scale: float) -> Array:
    """The scale of each element, (n, d_qk), or of those that share scales."""
    if not record.group:
        return np.full((len(pages), record.d_qk), kv_scale, np.float32)
    field = record.field("scales")
    stored = np.ascontiguousarray(field_view(cache, record, field)[pages, tokens])
    read = {"float32": lambda x: x.view(np.float32), "float8_e8m0fnu": from_e8m0, "float8_e4m3fn": from_e4m3}
    return np.repeat(read[field.kind](stored), record.group, axis=1)


# ---- Operations -------------------------------------------------------------------------------------------------


def cache_append(
    latent: npt.ArrayLike,
    rope: npt.ArrayLike | None,
    cache: Array,
    slots: npt.ArrayLike,
    *,
    cos: npt.ArrayLike | None = None,
    sin: npt.ArrayLike | None = None,
    positions: npt.ArrayLike | None = None,
    kv_format: str | None = None,
    scales: str | None = None,
    kv_scale: float = 1.0,
    interleaved: bool = True,
) -> tuple[()]:
    """Write tokens to a paged cache, in place.

    Parameters
    ----------
    latent : array, (n, d_latent)
    rope : array, (n, d_rope), or None for records without it
    cache : array, (num_pages, page_size, width)
        Of the record's dtype; an axis of size 1 may stand on either side of the tokens. Pages may be any distance
        apart.
    slots : array, (n,), integers
        Token i goes to page slots[i] // page_size, place slots[i] % page_size. Slots outside of the cache, such as -1,
        are skipped. Of equal slots one token wins.
    cos, sin, positions : array, optional
        Apply RoPE first: see `rotate`. Where its part is quantised in groups, as in "v41",
        what it gives is rounded to the dtype of `rope` before it is quantised, as the models do.
    kv_format : str, optional
        Name of the format. Default: the one that the cache's dtype and width belong to.
    scales : str, optional
        See `quantize`. Default: the record's first rule.
    kv_scale : float
        Scale of the record "fp8".
    interleaved : bool
        See `rotate`.
    """
    chosen = format_of(str(cache.dtype), cache.shape[-1], name=kv_format)
    cache = without_heads(cache)
    num_pages, page_size = cache.shape[:2]
    where = np.asarray(slots).astype(np.int64)
    (live,) = np.nonzero((where >= 0) & (where < num_pages * page_size))
    pages, tokens = np.divmod(where[live], max(1, page_size))
    parts = {"latent": np.asarray(latent)[live]}
    if chosen.d_rope:
        turned = np.asarray(rope)
        if cos is not None and sin is not None and positions is not None:
            turned = rotate(turned, cos, sin, positions, interleaved)
            if "rope" in chosen.grouped:
                with np.errstate(over="ignore"):
                    turned = turned.astype(np.asarray(rope).dtype)
        parts["rope"] = turned[live]
    for name, octets in _encode(parts, chosen, scales or chosen.scales[0], kv_scale).items():
        field_view(cache, chosen, chosen.field(name))[pages, tokens] = octets
    if any(field.name == "padding" for field in chosen.fields):
        field_view(cache, chosen, chosen.field("padding"))[pages, tokens] = 0
    return ()


def cache_gather(
    cache: Array, slots: npt.ArrayLike, *, kv_format: str | None = None, kv_scale: float = 1.0
) -> tuple[Array]:
    """Read tokens of a paged cache as rows of numbers.

    Parameters
    ----------
    cache : array
        As for `cache_append`.
    slots : array, (n,), integers
        A slot outside of the cache, such as -1, gives a row of zeros.
    kv_format, kv_scale
        As for `cache_append`.

    Returns
    -------
    rows : array, (n, d_qk), float32
        Latent, then RoPE. A quantised element is its value times its scale, rounded to float32.
    """
    chosen = format_of(str(cache.dtype), cache.shape[-1], name=kv_format)
    cache = without_heads(cache)
    num_pages, page_size = cache.shape[:2]
    where = np.asarray(slots).astype(np.int64)
    (live,) = np.nonzero((where >= 0) & (where < num_pages * page_size))
    pages, tokens = np.divmod(where[live], max(1, page_size))
    rows = np.zeros((len(where), chosen.d_qk), np.float32)
    scale = _scales_of(cache, chosen, pages, tokens, kv_scale)
    at = 0
    for name in ("latent", "rope")[: 2 if chosen.d_rope else 1]:
        field = chosen.field(name)
        octets = field_view(cache, chosen, field)[pages, tokens]
        rows[live, at : at + field.count] = _decode(octets, field, scale[:, at : at + field.count])
        at += field.count
    return (rows,)


def key_format(cache: Array, d_qk: int, kv_format: str | None = None) -> str | None:
    """Name of the record of a cache for queries of `d_qk` columns; None for 16-bit rows.

    Parameters
    ----------
    cache : array
        Pages, or rows.
    d_qk : int
        Says whether 656 bytes are "v32" or "v32-nope".
    kv_format : str, optional
        Name of the record, of a cache that can have it.
    """
    if str(cache.dtype) not in BYTE_DTYPES:
        return None
    width = cache.shape[-1]
    named = FORMATS.get(kv_format) if kv_format else None
    if named is not None and width in (named.width, *named.other_widths):
        return named.name
    return format_of(str(cache.dtype), width, d_qk=d_qk).name


def cache_copy_pages(pool: Array, pairs: npt.ArrayLike) -> tuple[()]:
    """Copy pages within each layer of a pool, in place.

    Parameters
    ----------
    pool : array, (num_layers, num_pages, page_bytes), uint8
    pairs : array, (n, 2), integers
        (source, destination). Pairs with a page outside of the pool are skipped. No page may be both a destination
        and anything else.
    """
    sources, destinations = np.asarray(pairs).reshape(-1, 2).T
    num_pages = pool.shape[1]
    live = (sources >= 0) & (sources < num_pages) & (destinations >= 0) & (destinations < num_pages)
    pool[:, destinations[live]] = pool[:, sources[live]]
    return ()


def cache_slots(
    block_table: npt.ArrayLike,
    starts: npt.ArrayLike,
    lengths: npt.ArrayLike,
    *,
    page_size: int,
    max_tokens: int,
    num_pages: int | None = None,
) -> tuple[Array, Array]:
    """Find the slots of consecutive tokens of each sequence, packed.

    Parameters
    ----------
    block_table : array, (b, max_pages), integers
    starts, lengths : array, (b,), integers
        Of the positions that are wanted; lengths below 0 are 0.
    page_size, max_tokens : int
    num_pages : int, optional
        Default: the most pages that 32-bit slots can address.

    Returns
    -------
    slots : array, (max_tokens,), int32
        -1 for positions without a page, and behind the last token.
    cu_seqlens : array, (b + 1,), int32
        Where the sequences begin in `slots`, at most max_tokens.
    """
    table, counts = np.asarray(block_table).astype(np.int64), np.maximum(np.asarray(lengths).astype(np.int64), 0)
    b, max_pages = table.shape
    cu_seqlens = np.minimum(np.concatenate([[0], np.cumsum(counts)]), max_tokens)
    most = (2**31 - 1) // page_size
    pages = most if num_pages is None else min(num_pages, most)
    slots = np.full(max_tokens, -1, np.int32)
    for n in range(b):
        begin, end = cu_seqlens[n : n + 2]
        position = int(np.asarray(starts)[n]) + np.arange(end - begin)
        column = position // page_size
        in_table = (position >= 0) & (column < max_pages)
        page = np.where(in_table, table[n, np.where(in_table, column, 0)] if max_pages else -1, -1)
        slot = page * page_size + position % page_size
        slots[begin:end] = np.where((page >= 0) & (page < pages), slot, -1)
    return slots, cu_seqlens.astype(np.int32)


def cache_update(
    packed: npt.ArrayLike,
    table: Array,
    seqlens: Array,
    step_table: Array,
    step_seqlens: Array,
    slots: Array,
    positions: Array,
    *,
    page_size: int,
) -> tuple[()]:
    """Bring a block table up to date, and place the tokens of a step: see `mla_cupy.ops.cache_update`."""
    words = np.asarray(packed)
    max_rows, max_pages = table.shape
    in_step, everything = (min(int(words[at]), max_rows) for at in (0, 1))
    rows, lengths, first = (words[HEADER_WORDS + at * max_rows :] for at in range(3))
    tokens = first[max_rows + 1 :]
    rest = words[words_before_changes(max_rows) :]
    changes = rest[: len(rest) // 2 * 2].reshape(-1, 2)
    for i in range(everything):
        row, length = int(rows[i]), int(lengths[i])
        if not 0 <= row < max_rows:
            continue
        mine = changes[max(0, int(first[i])) : max(0, int(first[i + 1]))]
        mine = mine[(mine[:, 0] >= 0) & (mine[:, 0] < max_pages)]
        table[row, mine[:, 0]] = mine[:, 1]
        seqlens[row] = length
        if i < in_step:
            columns = min(max_pages, -(-max(0, length) // page_size))
            step_table[i, :columns] = table[row, :columns]
            step_table[i, mine[:, 0]] = mine[:, 1]
            step_seqlens[i] = length
            end = int(tokens[i + 1])
            at = np.arange(max(0, int(tokens[i])), min(end, len(slots)))
            position = length - end + at
            exists = (position >= 0) & (position < max_pages * page_size)
            pages = step_table[i, np.where(exists, position // page_size, 0)].astype(np.int64)
            slots[at] = np.where(exists, pages * page_size + position % page_size, -1)
            positions[at] = np.where(exists, position, -1)
    return ()
