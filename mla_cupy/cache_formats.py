"""The records in which a paged cache keeps its tokens, described once, byte by byte.

The oracle, the checks, the documentation and `mla-cupy formats` read these descriptions. `attention/records.cuh` holds
the same for the device; `tests/budgets` compares the facts of the cubins with these.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, TypeVar

from mla_cupy.errors import ArgumentError, ShapeError, explain
from mla_cupy.shapes import D_QK, D_ROPE, D_V

_ArrayT = TypeVar("_ArrayT")

Kind = Literal["float8_e4m3fn", "float4_e2m1fn", "bfloat16", "float16", "float32", "float8_e8m0fnu", "padding"]
Scales = Literal["power_of_2", "plain", "tensor", "none"]

_BITS: dict[str, int] = {"bfloat16": 16, "float16": 16, "float32": 32, "float4_e2m1fn": 4}  # all others have 8


def _bits(kind: str) -> int:
    return _BITS.get(kind, 8)


@dataclass(frozen=True)
class Field:
    """One field of a token.

    Attributes
    ----------
    name : str
        "latent", "rope", "scales", "key", "padding" or "reserved".
    kind : str
        Element type. Of float4_e2m1fn a byte has two, the first one in its lower half.
    count : int
        Number of elements.
    offset : int
        First byte within the token's share of the plane.
    plane : int
        Which plane of the page holds it.
    """

    name: str
    kind: Kind
    count: int
    offset: int
    plane: int = 0

    @property
    def is_code(self) -> bool:
        """True if elements are to be multiplied by a scale."""
        return self.kind in ("float8_e4m3fn", "float4_e2m1fn")

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return self.count * _bits(self.kind) // 8


@dataclass(frozen=True)
class CacheFormat:
    """Layout of one token in a page.

    A page holds one plane after the other, and a plane one token after the other. Most records have one plane.

    Attributes
    ----------
    name : str
    about : str
        Who uses it.
    planes : tuple of int
        Bytes per token in each plane.
    fields : tuple of Field
    scales : tuple of str
        Rules that a quantiser may use for scales, the default first.
    group : int
        Elements that share a scale; 0 for formats without scales.
    d_qk, d_v : int
        Widths of the key and of the value (the first elements of the key). 0 for formats that attention does not read.
    other_widths : tuple of int
        Further sizes of the last axis, of shorter tokens with the same fields, if the format is named.
    page_multiple : int
        Page strides are multiples of this many bytes by convention. Kernels support any page stride that is large
        enough.
    """

    name: str
    about: str
    planes: tuple[int, ...]
    fields: tuple[Field, ...]
    scales: tuple[Scales, ...] = ("none",)
    group: int = 0
    d_qk: int = D_QK
    d_v: int = D_V
    page_multiple: int = 1
    other_widths: tuple[int, ...] = ()

    @property
    def token_bytes(self) -> int:
        """Bytes per token: the last axis of a cache of bytes."""
        return sum(self.planes)

    @property
    def dtype(self) -> str:
        """Dtype of the arrays that hold it: the 16-bit dtype of plain rows, else "uint8"."""
        kinds = {field.kind for field in self.fields}
        return kinds.pop() if len(kinds) == 1 and kinds <= {"bfloat16", "float16"} else "uint8"

    @property
    def width(self) -> int:
        """Size of the last axis of an array of `dtype`."""
        return self.token_bytes * 8 // _bits(self.dtype)

    @property
    def d_latent(self) -> int:
        """Elements of the latent part."""
        return sum(field.count for field in self.fields if field.name == "latent")

    @property
    def d_rope(self) -> int:
        """Elements of the RoPE part."""
        return sum(field.count for field in self.fields if field.name == "rope")

    @property
    def grouped(self) -> tuple[str, ...]:
        """Names of the fields with scales per group of elements."""
        return tuple(f.name for f in self.fields if f.name in ("latent", "rope", "key") and self.group and f.is_code)

    def field(self, name: str) -> Field:
        """The field of a name."""
        return next(field for field in self.fields if field.name == name)

    def page_bytes(self, page_size: int) -> int:
        """Smallest page stride by the record's convention, in bytes."""
        return -(-self.token_bytes * page_size // self.page_multiple) * self.page_multiple

    def offset(self, field: Field, page_size: int, token: int) -> int:
        """First byte of a token's field within its page."""
        before = sum(self.planes[: field.plane]) * page_size
        return before + token * self.planes[field.plane] + field.offset


def _rows(kind: Kind, latent: int, rope: int, name: str, about: str) -> CacheFormat:
    size = _bits(kind) // 8
    fields = (Field("latent", kind, latent, 0), Field("rope", kind, rope, latent * size))
    return CacheFormat(
        name, about, ((latent + rope) * size,), fields[: 2 if rope else 1], d_qk=latent + rope, page_multiple=1
    )


V32 = CacheFormat(
    "v32",
    "DeepSeek-V3.2 (fp8_ds_mla): FlashMLA, vLLM, SGLang",
    (656,),
    (
        Field("latent", "float8_e4m3fn", D_V, 0),
        Field("scales", "float32", D_V // 128, 512),
        Field("rope", "bfloat16", D_ROPE, 528),
    ),
    scales=("power_of_2", "plain"),
    group=128,
)
#: The reserved bytes may hold anything: nothing reads or writes them. FlashMLA's V32_NO_ROPE lacks them.
V32_NOPE = CacheFormat(
    "v32-nope",
    "GLM-5.3-Flash: v32 with reserved bytes in place of RoPE: FlashMLA, FlashInfer, vLLM",
    (656,),
    (*V32.fields[:2], Field("reserved", "padding", 128, 528)),
    scales=V32.scales,
    group=V32.group,
    d_qk=D_V,
    other_widths=(528,),
)
V4 = CacheFormat(
    "v4",
    "DeepSeek-V4: FlashMLA's MODEL1, SGLang",
    (576, 8),
    (
        Field("latent", "float8_e4m3fn", 448, 0),
        Field("rope", "bfloat16", D_ROPE, 448),
        Field("scales", "float8_e8m0fnu", 7, 0, plane=1),
        Field("padding", "padding", 1, 7, plane=1),
    ),
    scales=("power_of_2",),
    group=64,
    d_qk=512,
    page_multiple=576,
)
V41 = CacheFormat(
    "v41",
    "DeepSeek-V4.1, its window: FlashMLA's V41, vLLM, SGLang",
    (512, 16),
    (
        Field("latent", "float8_e4m3fn", 448, 0),
        Field("rope", "float8_e4m3fn", D_ROPE, 448),
        Field("scales", "float8_e8m0fnu", 16, 0, plane=1),
    ),
    scales=("power_of_2",),
    group=32,
    d_qk=512,
    page_multiple=512,
)
V41_FP4 = CacheFormat(
    "v41-fp4",
    "DeepSeek-V4.1, its compressed tokens: FlashMLA's V41_FP4, SGLang",
    (256, 32),
    (
        Field("latent", "float4_e2m1fn", 448, 0),
        Field("rope", "float4_e2m1fn", D_ROPE, 224),
        Field("scales", "float8_e4m3fn", 32, 0, plane=1),
    ),
    scales=("plain",),
    group=16,
    d_qk=512,
)
FP8 = CacheFormat(
    "fp8",
    "one scale per tensor: vLLM's dense MLA backends with kv_cache_dtype=fp8",
    (576,),
    (Field("latent", "float8_e4m3fn", D_V, 0), Field("rope", "float8_e4m3fn", D_ROPE, D_V)),
    scales=("tensor",),
)
BF16 = _rows("bfloat16", D_V, D_ROPE, "bf16", "plain rows")
FP16 = _rows("float16", D_V, D_ROPE, "fp16", "plain rows")
BF16_NOPE = _rows("bfloat16", D_V, 0, "bf16-nope", "plain rows without RoPE")
FP16_NOPE = _rows("float16", D_V, 0, "fp16-nope", "plain rows without RoPE")
INDEXER = CacheFormat(
    "indexer",
    "keys of the lightning indexer: DeepGEMM's paged layout",
    (128, 4),
    (Field("key", "float8_e4m3fn", 128, 0), Field("scales", "float32", 1, 0, plane=1)),
    scales=("power_of_2", "plain"),
    group=128,
    d_qk=0,
    d_v=0,
)
INDEXER_FP4 = CacheFormat(
    "indexer-fp4",
    "keys of the lightning indexer in e2m1: DeepGEMM's paged layout for FP4, of DeepSeek-V4 and V4.1",
    (64, 4),
    (Field("key", "float4_e2m1fn", 128, 0), Field("scales", "float8_e8m0fnu", 4, 0, plane=1)),
    scales=("power_of_2",),
    group=32,
    d_qk=0,
    d_v=0,
)

#: Records of index keys.
INDEX_FORMATS: tuple[CacheFormat, ...] = (INDEXER, INDEXER_FP4)
#: Those that hold a latent and, mostly, a RoPE part: what `cache_append` writes and `cache_gather` reads.
LATENT_FORMATS: tuple[CacheFormat, ...] = (
    V32,
    V32_NOPE,
    V4,
    V41,
    V41_FP4,
    FP8,
    BF16,
    FP16,
    BF16_NOPE,
    FP16_NOPE,
)
#: Every record by its name.
FORMATS: dict[str, CacheFormat] = {record.name: record for record in (*LATENT_FORMATS, *INDEX_FORMATS)}
#: Dtypes of arrays of bytes: 8-bit floats travel as bytes, whatever a library calls them.
BYTE_DTYPES = ("uint8", "float8_e4m3fn")

#: Alignment of a page's start and strides, in bytes.
PAGE_ALIGNMENT = 16

_RULES = {
    "power_of_2": "the least power of two >= max(amax / 448, 1e-4)",
    "plain": "max(amax / 448, 2**-126)",
    "tensor": "one for all pages, which the caller keeps: kv_scale",
    "none": "there is none: 1",
}
_OTHER_RULES = {
    "v41-fp4": {"plain": "max(amax / 6, 2**-9), rounded to e4m3 and at most 448"},
    "indexer": {
        "power_of_2": "the least power of two >= max(amax, 1e-4) / 448",
        "plain": "max(amax, 1e-4) / 448",
    },
    "indexer-fp4": {"power_of_2": "the least power of two >= max(amax, 1e-4) / 6"},
}


def describe(record: CacheFormat) -> dict[str, Any]:
    """Description of a record for programs that move and convert pages: `mla-cupy formats --json` prints it."""
    described = asdict(record)
    for field, own in zip(record.fields, described["fields"], strict=True):
        own["nbytes"], own["token_stride"] = field.nbytes, record.planes[field.plane]
    return {
        **described,
        "token_bytes": record.token_bytes,
        "dtype": record.dtype,
        "width": record.width,
        "page_alignment": PAGE_ALIGNMENT,
        "page_stride": "any multiple of page_alignment of at least page_size * token_bytes; by convention a multiple of"
        " page_multiple",
        "field_offset": "in its page: page_size * sum(planes[:plane]) + token * token_stride + offset",
        "byte_order": "little",
        "scaled_fields": list(record.grouped or (f.name for f in record.fields if f.is_code)),
        "scale_index": "column // group, columns counted over scaled_fields in order" if record.group else None,
        "scale_rules": {rule: {**_RULES, **_OTHER_RULES.get(record.name, {})}[rule] for rule in record.scales},
        "value": "element * scale; float8_e8m0fnu x is 2**(x - 127), 255 is NaN; float4_e2m1fn has two elements a byte,"
        " the first in the lower half",
    }


#: Words before the lists of a step's upload, see `cache/update.cu`.
HEADER_WORDS = 8


def words_before_changes(max_rows: int) -> int:
    """Words of a step's upload before the changes: the header and four lists."""
    return HEADER_WORDS + 4 * max_rows + 2


#: The quantisers' constants: largest e4m3 value, and FlashMLA's least ratio to it, with a power of two of 2^-13.
MAX_E4M3 = 448.0
MIN_RATIO = 1e-4
#: Largest e2m1 value, and the least scale of such a group: the smallest e4m3 number above 0.
MAX_E2M1 = 6.0
MIN_E4M3 = 2.0**-9


def widths_of(names: Collection[str]) -> tuple[int, ...]:
    """Sizes of the last axis of arrays that hold records of these names, each once."""
    return tuple(dict.fromkeys(width for name in names for width in (FORMATS[name].width, *FORMATS[name].other_widths)))


def head_axis(shape: Sequence[int], argument: str = "cache") -> int:
    """The axis of KV heads in a cache of four axes: FlashMLA puts it after a page's tokens, FlashInfer before them.

    MLA has one KV head, so the axis of heads is the one of size 1. In pages of one token both axes have that size, and
    both readings are right.

    Raises
    ------
    ShapeError
        If neither axis has size 1.
    """
    for axis in (2, 1):
        if shape[axis] == 1:
            return axis
    expected = "(num_pages, page_size, 1, width) or (num_pages, 1, page_size, width)"
    remedy = "pass one KV head, or leave its axis out"
    raise ShapeError(explain(f"{argument}.shape", tuple(shape), expected, remedy))


def without_heads(cache: _ArrayT, argument: str = "cache") -> _ArrayT:
    """A NumPy array of pages without the axis of KV heads, if it has one: a view."""
    pages: Any = cache
    if pages.ndim == 4:
        pages = pages[:, 0] if head_axis(pages.shape, argument) == 1 else pages[:, :, 0]
    found: _ArrayT = pages
    return found


def format_of(
    dtype: str,
    width: int,
    argument: str = "cache",
    name: object = None,
    listed: Collection[str] = (),
    d_qk: int | None = None,
) -> CacheFormat:
    """The latent format of a cache with this dtype and last axis, or check that it is the one called `name`.

    Two records have tokens of 656 bytes: queries of `d_qk` columns read the record with keys of `d_qk` columns; without
    `d_qk` it is "v32". An error lists the records of these names, or else all of them.

    Raises
    ------
    ArgumentError
        If there is no format called `name`.
    ShapeError
        If the array cannot hold the format, or any format.
    """
    kind = "uint8" if dtype in BYTE_DTYPES else dtype
    names = [record.name for record in LATENT_FORMATS]
    if name is not None and not (isinstance(name, str) and name in names):
        raise ArgumentError(explain("kv_format", repr(name), f"None, or one of {', '.join(names)}"))
    candidates = [record for record in LATENT_FORMATS if name in (None, record.name)]
    named = name is not None
    fitting = [
        record
        for record in candidates
        if record.dtype == kind and (record.width == width or (named and width in record.other_widths))
    ]
    if fitting:
        return next((record for record in fitting if record.d_qk == d_qk), fitting[0])
    expected = ", ".join(
        f"{record.width} of {record.dtype} ({record.name})"
        for record in candidates
        if not listed or record.name in listed
    )
    raise ShapeError(explain(f"{argument}.shape[-1]", f"{width} of {dtype}", expected, "`mla-cupy formats` lists them"))
