"""Calls of `sparse_mla_decode` on caches with poison in all tokens that are not selected."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

import mla_cupy
from mla_cupy import reference
from mla_cupy.cache_formats import FORMATS
from mla_cupy.dtypes import numpy_dtype
from mla_cupy.kernels.sparse_decode import SPARSE_DECODE
from tests.cache.inputs import empty_cache, tokens
from tests.support import tolerance
from tests.support.flat import flat

Array = npt.NDArray[Any]
GENERIC = "sparse_decode_generic"
_NAN = 0x7F  # of e4m3; as the bytes of a scale or of RoPE it is finite, and large


@dataclass(frozen=True)
class SparseDecodeCase:
    """One call. `extra` is the size of the second list, 0 for none, and `extra_record` of the cache that it names.
    `turned`: results are turned back.
    """

    record: str = "v32"
    dtype: str = "bfloat16"
    scales: str | None = None
    b: int = 2
    s_q: int = 1
    h_q: int = 3
    topk: int = 37
    extra: int = 0
    lengths: bool = False
    sink: bool = False
    empty: bool = False
    page_size: int = 5
    sm_count: int = 2
    lse_base: str = "e"
    extra_record: str = ""
    turned: bool = False

    def __str__(self) -> str:
        """Id of the test: what differs from the defaults."""
        changed = [f"{k}={v}" for k, v in vars(self).items() if v != getattr(SparseDecodeCase(), k)]
        return "-".join(changed) or "default"


CASES = (
    SparseDecodeCase(),
    SparseDecodeCase(record="v4", dtype="float16", s_q=2),
    SparseDecodeCase(record="v4", topk=20, extra=33, lengths=True, sink=True, h_q=9),
    SparseDecodeCase(scales="plain", topk=140, b=1, h_q=2, lse_base="2"),
    SparseDecodeCase(extra=1, empty=True, sink=True, s_q=2, topk=1),
    SparseDecodeCase(topk=70, sm_count=1, b=3, lengths=True, h_q=1),
    SparseDecodeCase(b=1, topk=0),
)
#: Of V4.1.
V41_CASES = (
    SparseDecodeCase(record="v41", s_q=2, h_q=9, empty=True, sink=True),
    SparseDecodeCase(record="v41", dtype="float16", topk=20, extra=33, lengths=True),
    SparseDecodeCase(record="v41", topk=19, extra=40, lengths=True, sink=True, extra_record="v41-fp4"),
    SparseDecodeCase(record="v41", dtype="float16", topk=0, extra=70, sm_count=5, b=1, extra_record="v41-fp4"),
    SparseDecodeCase(record="v41", topk=130, extra=9, page_size=64, h_q=2, b=1, extra_record="v41-fp4"),
    SparseDecodeCase(record="v41-fp4", topk=140, lengths=True, sink=True, page_size=64, empty=True),
    SparseDecodeCase(record="v41-fp4", dtype="float16", topk=33, s_q=2, h_q=9, page_size=3),
)
#: More heads than a block of Hopper's kernel for few has, and tiles of both records.
V41_WIDE = SparseDecodeCase(
    record="v41", topk=70, extra=90, page_size=64, h_q=35, b=1, sm_count=1, extra_record="v41-fp4"
)
#: Several blocks of heads, several tiles per work item, splits that cut lists.
MORE_CASES = (
    SparseDecodeCase(dtype="float16", h_q=33, b=1, topk=70),
    SparseDecodeCase(scales="plain", h_q=17, s_q=2, topk=150, lengths=True, sink=True, page_size=64),
    SparseDecodeCase(record="v4", h_q=32, b=3, topk=200, sm_count=1),
    SparseDecodeCase(record="v4", h_q=70, b=1, topk=330, extra=140, sm_count=5),
)
#: The kernels with mma.sync.
SINCE_AMPERE = tuple(kernel.name for kernel in SPARSE_DECODE.kernels if "mma" in kernel.name)
#: The kernels with WGMMA, and products of 16 bits.
ON_HOPPER = tuple(k.name for k in SPARSE_DECODE.kernels if "sm90" in k.name and k.math == "exact")


def fitting(case: SparseDecodeCase, kernel: str) -> SparseDecodeCase:
    """The case, with more heads where the kernel takes no fewer."""
    return replace(case, h_q=case.h_q + 32) if kernel == "sparse_decode_sm90" and case.h_q <= 32 else case


def filled(case: SparseDecodeCase, num_pages: int, page_size: int, seed: int, name: str = "") -> tuple[Array, Array]:
    """A cache of NaN, and the slots of the few tokens that it holds."""
    record, rng = FORMATS[name or case.record], np.random.default_rng(seed)
    cache = empty_cache(record, num_pages, page_size, gap=1)
    cache[...] = _NAN
    room = num_pages * page_size
    held = rng.permutation(room)[: room // 2]
    latent, rope = tokens(record, len(held), "bfloat16", seed)
    latent = (latent.astype(np.float32) / 100).astype(latent.dtype)
    reference.cache_append(latent, rope, cache, held, scales=case.scales)
    return cache, held


def make(case: SparseDecodeCase) -> dict[str, Any]:
    """The arguments of a call."""
    rng = np.random.default_rng(5)
    record = FORMATS[case.record]
    shape = (case.b, case.s_q, case.h_q, record.d_qk)
    q = rng.standard_normal(shape, np.float32).astype(numpy_dtype(case.dtype))
    call: dict[str, Any] = {"q": q, "scale": q.shape[-1] ** -0.5}
    call["kv_cache"], held = filled(case, 9, case.page_size, 1)
    call["indices"] = indices(rng, held, 9 * case.page_size, (case.b, case.s_q, case.topk))
    if case.extra:
        call["extra_kv_cache"], held = filled(case, 4, 3, 2, case.extra_record)
        call["extra_indices"] = indices(rng, held, 12, (case.b, case.s_q, case.extra))
    if case.lengths:
        call["topk_length"] = np.resize(np.array([case.topk - 3, 2**30, 2], np.int32), case.b)
    if case.lengths and case.extra:
        call["extra_topk_length"] = np.resize(np.array([case.extra - 1, -4], np.int32), case.b)
    if case.sink:
        call["attn_sink"] = np.resize(np.array([0.5, -np.inf, 3.0], np.float32), case.h_q)
    if case.turned:
        whole = rng.standard_normal((2, 7, 40)).astype(np.float32)  # rows further apart than they are wide
        call["out_cos"], call["out_sin"] = whole[0, :, :32], whole[1, :, 8:]
        wild = [2**40 + 2, -5, 1, 3, 0] if case.s_q > 1 else [2**31 - 1, -5, 1, 3, 0]
        positions = np.array(wild, np.int64 if case.s_q > 1 else np.int32)
        call["out_positions"] = np.resize(positions, (case.b, 2 * case.s_q))[:, ::2]
    if case.empty:
        for name in {"indices", "extra_indices"} & call.keys():
            call[name][0, 0] = -1
    return call


def indices(rng: np.random.Generator, held: Array, room: int, shape: tuple[int, ...]) -> Array:
    """Held slots, some twice, and some that are none; strided."""
    whole = np.full((*shape[:-1], 2 * shape[-1] + 1), 2**31 - 1, np.int32)
    chosen = whole[..., 1::2]
    chosen[...] = rng.choice(held, shape)
    wild = rng.random(shape) < 0.2
    chosen[wild] = rng.choice(np.array([-1, -(2**31), room, 2**31 - 1]), int(wild.sum()))
    return chosen


def format_of_keys(case: SparseDecodeCase) -> str:
    """Format to which the tensor-core kernels round keys and weights."""
    return "float16" if case.record == "v32" else case.dtype


@np.errstate(over="ignore")
def as_read(case: SparseDecodeCase, call: dict[str, Any]) -> dict[str, Any]:
    """The arguments with the scales of "v32" rounded to float16, as the kernels with tensor cores round them."""
    if case.record != "v32":
        return call
    field, read = FORMATS["v32"].field("scales"), dict(call)
    for name in ("kv_cache", "extra_kv_cache"):
        if name in call:
            read[name] = np.array(call[name])
            scales = read[name][..., field.offset : field.offset + field.nbytes]
            exact = np.ascontiguousarray(scales).view(np.float32)
            scales[...] = exact.astype(np.float16).astype(np.float32).view(np.uint8)
    return read


def check(
    case: SparseDecodeCase,
    to: Callable[[Any], Any],
    back: Callable[[Any], Array],
    kernel: str = GENERIC,
    out_dtype: str = "float32",
) -> None:
    """The generic kernel is as exact as float32; others may err twice as much as the rounded oracle."""
    check_call(case, make(case), to, back, kernel, out_dtype)


def check_call(
    case: SparseDecodeCase,
    call: dict[str, Any],
    to: Callable[[Any], Any],
    back: Callable[[Any], Array],
    kernel: str | None,
    out_dtype: str = "float32",
) -> None:
    """Check with other arguments than the case's own; without a kernel name, with Hopper's choice."""
    options = {"lse_base": case.lse_base, "empty_lse": 7.0}
    exact = reference.sparse_mla_decode(**call, **options)
    given = {name: to(x) if isinstance(x, np.ndarray) else x for name, x in call.items()}
    out, lse = flat(mla_cupy.sparse_mla_decode)(**given, **options, out_dtype=out_dtype, kernel=kernel)
    got = back(out), back(lse)
    if kernel == GENERIC and out_dtype == "float32":
        np.testing.assert_allclose(got[0], exact[0], rtol=2e-5, atol=2e-5)
        np.testing.assert_allclose(got[1], exact[1], rtol=1e-5, atol=1e-5)
    else:
        rounded = reference.sparse_mla_decode(**as_read(case, call), **options, rounding=format_of_keys(case))
        tolerance.check(got, exact, rounded, out_dtype)
