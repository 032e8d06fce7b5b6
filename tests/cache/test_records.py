"""The records and their quantisers, against bytes that follow from the definitions of the formats alone."""

from __future__ import annotations

import itertools
import math
import struct
from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest

from mla_cupy.cache_formats import FORMATS, FP8, INDEXER, LATENT_FORMATS, V4, V32, CacheFormat, format_of
from mla_cupy.errors import ArgumentError, ShapeError
from mla_cupy.reference import cache as oracle
from tests.cache.inputs import Array, empty_cache, records_with

BF16 = np.dtype(ml_dtypes.bfloat16)


def e4m3_value(code: int) -> float:
    """Value by the definition: sign, 4 bits of exponent with bias 7, 3 bits of mantissa; no infinity."""
    sign, exponent, mantissa = -1 if code & 128 else 1, code >> 3 & 15, code & 7
    if (exponent, mantissa) == (15, 7):
        return math.nan
    return sign * (mantissa / 8 * 2.0**-6 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7))


CODES = sorted(range(127), key=e4m3_value)  # of the numbers from 0 up


def nearest_e4m3(x: float) -> int:
    """The nearest code by exact comparison; of two, the one with an even mantissa."""
    if math.isnan(x):
        return 0x7F
    size = Fraction(min(abs(x), 448.0))
    code = min(CODES, key=lambda code: (abs(Fraction(e4m3_value(code)) - size), code & 1))
    return code | (128 if math.copysign(1, x) < 0 else 0)


def bf16_numbers() -> Array:
    """Every finite bfloat16 from 0 up."""
    return np.arange(0x7F80, dtype=np.uint16).view(BF16)


# ---- Layouts ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("record", FORMATS.values(), ids=lambda record: record.name)
def test_fields_fill_the_planes(record: CacheFormat) -> None:
    """Without gaps and without overlap."""
    for plane, nbytes in enumerate(record.planes):
        fields = sorted((f.offset, f.offset + f.nbytes) for f in record.fields if f.plane == plane)
        assert [begin for begin, _ in fields] == [0, *(end for _, end in fields)][: len(fields)]
        assert fields[-1][1] == nbytes


@pytest.mark.parametrize("page_size", [1, 2, 61, 64, 256])
@pytest.mark.parametrize("record", FORMATS.values(), ids=lambda record: record.name)
def test_tokens_fill_the_page(record: CacheFormat, page_size: int) -> None:
    owned = np.zeros(record.page_bytes(page_size), int)
    for field, token in itertools.product(record.fields, range(page_size)):
        begin = record.offset(field, page_size, token)
        owned[begin : begin + field.nbytes] += 1
    used = record.token_bytes * page_size
    assert (owned[:used] == 1).all()
    assert (owned[used:] == 0).all()
    assert len(owned) % record.page_multiple == 0
    assert len(owned) - used < record.page_multiple


def test_sizes_are_those_of_the_engines() -> None:
    assert (V32.token_bytes, V32.page_bytes(64)) == (656, 41984)
    assert [V4.page_bytes(size) for size in (1, 2, 64, 256)] == [1152, 1728, 37440, 149760]
    assert (INDEXER.token_bytes, FP8.token_bytes) == (132, 576)
    assert [record.width for record in LATENT_FORMATS] == [656, 656, 584, 528, 288, 576, 576, 576, 512, 512]


def test_which_record_an_array_holds() -> None:
    for record in LATENT_FORMATS:
        assert format_of(record.dtype, record.width, d_qk=record.d_qk) is record
        assert format_of(record.dtype, record.width, name=record.name) is record
    assert format_of("float8_e4m3fn", 656) is V32
    assert format_of("uint8", 528, name="v32-nope").name == "v32-nope"
    assert format_of("uint8", 528, d_qk=512).name == "v41"
    assert format_of("float8_e4m3fn", 584) is V4
    with pytest.raises(ShapeError, match=r"cache.shape\[-1\]: got 656 of bfloat16, expected 656 of uint8 \(v32\)"):
        format_of("bfloat16", 656)
    with pytest.raises(ShapeError, match="got 656 of uint8, expected 584 of uint8"):
        format_of("uint8", 656, name="v4")
    with pytest.raises(ArgumentError, match="kv_format: got 'v5', expected None, or one of v32, v32-nope, v4"):
        format_of("uint8", 656, name="v5")


# ---- Numbers ----------------------------------------------------------------------------------------------------


def test_codes_are_e4m3() -> None:
    values = oracle.from_e4m3(np.arange(256, dtype=np.uint8))
    np.testing.assert_array_equal(values, [e4m3_value(code) for code in range(256)])
    numbers = np.concatenate([np.linspace(-500, 500, 997), 2.0 ** np.arange(-12, 9), [0.0, -0.0, np.nan, np.inf]])
    between = [(e4m3_value(a) + e4m3_value(b)) / 2 for a, b in itertools.pairwise(CODES)]  # ties
    numbers = np.concatenate([numbers, between, -np.array(between)]).astype(np.float32)
    assert oracle.to_e4m3(numbers).tolist() == [nearest_e4m3(float(x)) for x in numbers]


def test_codes_are_e8m0() -> None:
    powers = np.ldexp(np.float32(1), np.arange(-13, 120))
    assert oracle.to_e8m0(powers).tolist() == list(range(-13 + 127, 120 + 127))
    np.testing.assert_array_equal(oracle.from_e8m0(oracle.to_e8m0(powers)), powers)
    assert oracle.to_e8m0(np.float32([np.inf, np.nan])).tolist() == [255, 255]
    assert np.isnan(oracle.from_e8m0(np.uint8([255]))).all()


@pytest.mark.parametrize("dtype", [np.float16, BF16], ids=str)
def test_scales_of_powers_of_two(dtype: np.dtype) -> None:
    """FlashMLA's formula, in float64, for every number that can be the largest of a group."""
    amax = np.arange(0x7F80 if dtype == BF16 else 0x7C00, dtype=np.uint16).view(dtype)
    _, scales = oracle.quantize(amax[:, None], 1, "power_of_2")
    ratios = np.maximum(amax.astype(np.float64) / 448, 1e-4)
    np.testing.assert_array_equal(scales[:, 0], 2.0 ** np.ceil(np.log2(ratios)))


@pytest.mark.parametrize("dtype", [BF16, np.dtype(np.float16)], ids=str)
def test_16_bits_are_enough_for_powers_of_two(dtype: np.dtype) -> None:
    """Assumptions of `append.cu`, for all numbers: the exponent by an addition, and products rounded to 16 bits."""
    numbers = np.arange(1 << 16, dtype=np.uint16).view(dtype).astype(np.float32)
    numbers = numbers[np.isfinite(numbers)]
    sizes = np.abs(numbers)
    exponents = np.maximum(sizes.view(np.uint32) + 0x1FFFFF >> 23, 122) - 8
    scales = (exponents.astype(np.uint32) << 23).view(np.float32)
    np.testing.assert_array_equal(scales, oracle.quantize(sizes[:, None], 1, "power_of_2")[1][:, 0])
    for scale in np.unique(scales).astype(np.float64):
        products = numbers[sizes <= 448 * scale].astype(np.float64) / scale
        codes = [x.astype(np.float32).astype(ml_dtypes.float8_e4m3fn) for x in (products, products.astype(dtype))]
        np.testing.assert_array_equal(*(x.view(np.uint8) for x in codes))


def test_scales_as_they_are() -> None:
    """vLLM's rule: one division in float32, nothing below the smallest normal number."""
    amax = bf16_numbers()
    _, scales = oracle.quantize(amax[:, None], 1, "plain")
    exact = [max(Fraction(float(x)) / 448, Fraction(2) ** -126) for x in amax.astype(np.float32)]
    np.testing.assert_array_equal(scales[:, 0], np.array([float(x) for x in exact]).astype(np.float32))


@pytest.mark.parametrize("scales", ["power_of_2", "plain"])
def test_codes_of_groups(scales: str) -> None:
    """x / scale, rounded to float32 and then to e4m3, by exact arithmetic."""
    rng = np.random.default_rng(3)
    x = (rng.standard_normal((4, 256)) * 10.0 ** rng.integers(-4, 4, (4, 1))).astype(BF16)
    codes, chosen = oracle.quantize(x, 128, scales)
    assert chosen.shape == (4, 2)
    for i, j in itertools.product(range(4), range(0, 256, 7)):
        ratio = Fraction(float(x[i, j])) / Fraction(float(chosen[i, j // 128]))
        assert codes[i, j] == nearest_e4m3(float(np.float32(float(ratio)))), (i, j)
    error = np.abs(oracle.from_e4m3(codes) * np.repeat(chosen, 128, axis=1) - x.astype(np.float32))
    largest = np.abs(x.astype(np.float32)).reshape(4, 2, 128).max(axis=2)
    assert (error <= np.repeat(largest, 128, axis=1) * (2**-4 if scales == "plain" else 2**-3)).all()


@pytest.mark.parametrize("scales", ["power_of_2", "plain"])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_shows_in_the_whole_group(scales: str, bad: float) -> None:
    x = np.ones((1, 256), np.float32)
    x[0, 5] = bad
    codes, chosen = oracle.quantize(x, 128, scales)
    with np.errstate(invalid="ignore"):
        read = oracle.from_e4m3(codes) * np.repeat(chosen, 128, axis=1)
    assert np.isnan(read[0, :128]).all()
    np.testing.assert_allclose(read[0, 128:], 1, rtol=2**-4)


def test_signs_of_zeros_and_groups_of_zeros() -> None:
    x = np.zeros((1, 128), np.float32)
    x[0, 1::2] = -0.0
    for scales, least in (("power_of_2", 2.0**-13), ("plain", 2.0**-126)):
        codes, chosen = oracle.quantize(x, 128, scales)
        assert codes[0].tolist() == [0, 0x80] * 64
        assert chosen.tolist() == [[least]]


# ---- Golden bytes, written out by hand ----------------------------------------------------------------------------


def one_token(record: CacheFormat, scales: str | None = None) -> bytes:
    """A token whose groups g hold 1.0 but for an element of 3 * 2^g, and whose RoPE part is 0, 1, 2, ..."""
    latent = np.ones((1, record.d_latent), BF16)
    group = record.group or 128
    for g in range(record.d_latent // group):
        latent[0, g * group] = 3 * 2.0**g
    rope = np.arange(record.d_rope, dtype=np.float32).astype(BF16)[None] if record.d_rope else None
    cache = empty_cache(record, 1, 2)
    oracle.cache_append(latent, rope, cache, [1], scales=scales)
    raw = cache.view(np.uint8).reshape(-1)
    return b"".join(raw[record.offset(f, 2, 1) : record.offset(f, 2, 1) + f.nbytes].tobytes() for f in record.fields)


def test_golden_v32_power_of_2() -> None:
    """3 / 448 lies between 2^-8 and 2^-7: the scale is 2^(g - 7), 3 * 2^g is 384 (0x7C), and 1 is 2^(7 - g)."""
    ones = [0x70, 0x68, 0x60, 0x58]  # 128, 64, 32, 16
    codes = b"".join(bytes([0x7C] + [one] * 127) for one in ones)
    scales = struct.pack("<4f", *(2.0 ** (g - 7) for g in range(4)))
    rope = b"".join(struct.pack("<f", float(i))[2:] for i in range(64))
    assert one_token(V32, "power_of_2") == codes + scales + rope


def test_golden_v32_plain() -> None:
    """The scale is 3 * 2^g / 448 as float32, the largest is 448 (0x7E), and 1 is 448 / 3 / 2^g = 149.3 / 2^g."""
    ones = [0x71, 0x69, 0x61, 0x59]  # the nearest e4m3 to 149.3 is 144 = 1.125 * 128
    codes = b"".join(bytes([0x7E] + [one] * 127) for one in ones)
    scales = struct.pack("<4I", *(0x3BDB6DB7 + (g << 23) for g in range(4)))  # 3 / 448 = 0.00669642857
    rope = b"".join(struct.pack("<f", float(i))[2:] for i in range(64))
    assert one_token(V32, "plain") == codes + scales + rope


def test_golden_v4() -> None:
    ones = [0x70, 0x68, 0x60, 0x58, 0x50, 0x48, 0x40]
    codes = b"".join(bytes([0x7C] + [one] * 63) for one in ones)
    rope = b"".join(struct.pack("<f", float(i))[2:] for i in range(64))
    scales = bytes([*(127 + g - 7 for g in range(7)), 0])
    assert one_token(V4) == codes + rope + scales


def test_golden_v41() -> None:
    """Groups of 32 whose largest is 3 * 2^g; RoPE is 0 to 63, in two groups with scales 2^-3 and 2^-2."""
    record = FORMATS["v41"]
    token = one_token(record)
    for g in range(14):
        one = nearest_e4m3(2.0 ** (7 - g))
        assert token[32 * g : 32 * g + 32] == bytes([0x7C] + [one] * 31), g
    assert list(token[448:512]) == [nearest_e4m3(i * (8 if i < 32 else 4)) for i in range(64)]
    assert list(token[512:]) == [*(127 + g - 7 for g in range(14)), 127 - 3, 127 - 2]


E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]


def nearest_e2m1(x: float) -> int:
    """The nearest code by exact comparison; of two, the even one."""
    size = Fraction(min(abs(x), 6.0))
    code = min(range(8), key=lambda code: (abs(Fraction(E2M1[code]) - size), code & 1))
    return code | (8 if math.copysign(1, x) < 0 else 0)


def test_golden_v41_fp4() -> None:
    """Scales are e4m3 of 3 * 2^g / 6 up to 448: 0.5 * 2^g; the numbers are 6 and 2 / 2^g."""
    token = one_token(FORMATS["v41-fp4"])
    for g in range(10):
        one = nearest_e2m1(2.0 ** (1 - g))
        assert token[8 * g : 8 * g + 8] == bytes([7 | one << 4] + [one | one << 4] * 7), g
        assert token[256 + g] == nearest_e4m3(2.0 ** (g - 1))
    assert token[256 + 10 : 256 + 28] == bytes([0x7E] * 18), "saturated"
    scales = [e4m3_value(nearest_e4m3(largest / 6)) for largest in (15, 31, 47, 63)]
    assert [e4m3_value(code) for code in token[256 + 28 :]] == scales
    rope = [nearest_e2m1(i / scales[i // 16]) for i in range(64)]
    assert list(token[224:256]) == [low | high << 4 for low, high in zip(rope[::2], rope[1::2], strict=True)]


def test_codes_are_e2m1() -> None:
    between = [(a + b) / 2 for a, b in itertools.pairwise(E2M1)]
    numbers = np.array([*E2M1, *between, *np.linspace(0, 8, 97), 1e30, np.inf], np.float32)
    numbers = np.concatenate([numbers, -numbers])
    packed = oracle.to_e2m1(numbers)
    codes = np.stack([packed & 15, packed >> 4], axis=1).reshape(-1)
    assert codes.tolist() == [nearest_e2m1(float(x)) for x in numbers]
    np.testing.assert_array_equal(oracle.from_e2m1(packed), [-E2M1[c & 7] if c > 7 else E2M1[c] for c in codes])
    assert oracle.to_e2m1(np.float32([np.nan, -np.nan])).tolist() == [0]


def test_what_is_not_finite_shows_in_the_whole_group_of_e2m1() -> None:
    x = np.ones((3, 32), np.float32)
    x[[0, 1, 2], [5, 6, 7]] = np.nan, np.inf, -np.inf
    codes, scales = oracle.quantize_to_e2m1(x, 16)
    read = oracle.from_e2m1(codes) * np.repeat(scales, 16, axis=1)
    assert np.isnan(read[:, :16]).all()
    np.testing.assert_allclose(read[:, 16:], 1, rtol=0.25)


def test_golden_fp8() -> None:
    token = one_token(FP8)
    assert token[:2] == bytes([0x44, 0x38])  # 3 = 1.5 * 2 and 1
    assert list(token[512:]) == [nearest_e4m3(float(i)) for i in range(64)]


@pytest.mark.parametrize("record", records_with("none"), ids=lambda record: record.name)
def test_golden_rows(record: CacheFormat) -> None:
    token = one_token(record)
    values = np.frombuffer(token, np.float16 if record.dtype == "float16" else BF16).astype(np.float32)
    assert values[:512:128].tolist() == [3, 6, 12, 24]
    assert values[512:].tolist() == list(range(record.d_rope))
