"""Every mistake in a call of the cache operations: argument, got and expected, before anything has happened."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import mla_cupy
from mla_cupy import ArgumentError, DTypeError, MlaError, ShapeError, ops
from mla_cupy.cache_formats import V4, V32, CacheFormat
from mla_cupy.ops import POOL_OPERATIONS
from mla_cupy.ops.operation import Operation
from tests.cache.inputs import Array, empty_cache, tokens
from tests.cache.runs import SlotsCase, copy_case, slots_case, update_case
from tests.support.mistakes import Bad, Call, option, raises, swap
from tests.support.operations import mistakes
from tests.support.recorder import Recorder


def good_append() -> Call:
    latent, rope = tokens(V32, 3)
    angles = np.random.default_rng(0).random((7, 32), np.float32)
    return {
        "latent": latent,
        "rope": rope,
        "cache": empty_cache(V32, 4, 8),
        "slots": np.array([3, -1, 9]),
        "cos": np.cos(angles),
        "sin": np.sin(angles),
        "positions": np.array([0, 5, 6]),
    }


def pages_apart(width: int, page: int, token: int = 0) -> Array:
    """Four pages of eight tokens."""
    memory = np.zeros(4 * page + 64, np.uint8)
    return np.lib.stride_tricks.as_strided(memory[-memory.ctypes.data % 16 :], (4, 8, width), (page, token or width, 1))


def good_gather() -> Call:
    return {"cache": empty_cache(V32, 4, 8), "slots": np.array([3, -1, 9]), "out": np.full((3, 576), 7, np.float32)}


def good_copy() -> Call:
    pool, pairs = copy_case(2, 6, 64, 0)
    return {"pool": pool, "pairs": pairs[:3]}


def good_update() -> Call:
    packed, arrays = update_case(6, 5, 3)
    names = ("table", "seqlens", "step_table", "step_seqlens", "slots", "positions")
    return {"packed": packed, **dict(zip(names, arrays, strict=True)), "page_size": 3}


def good_slots() -> Call:
    results = {"slots": np.full(40, 7, np.int32), "cu_seqlens": np.full(8, 7, np.int32)}
    return {**slots_case(SlotsCase(hostile=False)), **results, "page_size": 4, "max_tokens": 40, "num_pages": 9}


def good_append_keys() -> Call:
    angles = np.random.default_rng(0).random((7, 32), np.float32)
    return {
        "k": np.ones((3, 128), ml_dtypes.bfloat16),
        "cache": np.zeros((4, 8, 132), np.uint8),
        "slots": np.array([3, -1, 9]),
        "cos": np.cos(angles),
        "sin": np.sin(angles),
        "positions": np.array([0, 5, 6], np.int32),
    }


def good_prepare_both() -> Call:
    call = good_append_keys()
    q, weights = np.ones((3, 2, 128), ml_dtypes.bfloat16), np.ones((3, 2), np.float32)
    results = {"codes": np.zeros((3, 2, 128), np.uint8), "folded": np.zeros((3, 2), np.float32)}
    norm = {"norm_weight": np.ones(128, np.float32), "norm_bias": np.zeros(128, np.float32)}
    return {"q": q, "weights": weights, **call, **norm, **results}


def good_gather_keys() -> Call:
    results = {"codes": np.zeros((3, 128), np.uint8), "k_scale": np.zeros(3, np.float32)}
    return {"cache": np.zeros((4, 8, 132), np.uint8), "slots": np.array([3, -1, 9]), **results}


def good_prepare() -> Call:
    kind = ml_dtypes.bfloat16
    results = {"out": np.full((3, 2, 576), 7, kind), "rope_out": np.full((3, 64), 7, kind)}
    q, q_rope = np.ones((3, 2, 512), kind), np.ones((3, 2, 64), kind)
    return {"q": q, "q_rope": q_rope, **good_append(), **results, "return_rope": True}


GOOD: dict[str, Callable[[], Call]] = {
    "cache_append": good_append,
    "mla_prepare": good_prepare,
    "cache_gather": good_gather,
    "cache_copy_pages": good_copy,
    "cache_update": good_update,
    "cache_slots": good_slots,
    "indexer_cache_append": good_append_keys,
    "indexer_cache_gather": good_gather_keys,
    "indexer_prepare": good_prepare_both,
}
#: Operations that launch a kernel of another name.
ENTRIES = {
    "indexer_cache_append": "indexer_prepare_quantize",
    "indexer_cache_gather": "indexer_prepare_gather_keys",
    "indexer_prepare": "indexer_prepare_quantize",
    "mla_prepare": "cache_prepare",
}


def function_of(name: str) -> Any:
    return getattr(ops, name)


#: No mistakes here: bytes lie anywhere.
EXEMPT = ("pool between items", "pool odd strides")


def from_records(operation: Operation) -> list[Bad]:
    wide = tuple(f"{x.name} int64" for x in operation.inputs if "int64" in x.dtypes)
    return [bad for bad in mistakes(operation) if not bad.id.startswith((*EXEMPT, *wide))]


RECORDED = [
    pytest.param(name, bad, id=f"{name}-{bad.id}".replace(" ", "_"))
    for name, operation in POOL_OPERATIONS.items()
    if name in GOOD
    for given in [GOOD[name]()]
    for bad in from_records(operation)
    if bad.id.partition(" ")[0] in given
]


@pytest.mark.parametrize(("name", "bad"), RECORDED)
def test_refuses_arrays(name: str, bad: Bad, recorder: Recorder) -> None:
    call = GOOD[name]()
    bad.change(call)
    with pytest.raises(bad.error):
        function_of(name)(**call)
    assert recorder.launches == []


APPEND = [
    Bad("latent of v4", swap("latent", lambda x: x[:, :448].copy()), ShapeError,
        ("latent.shape[-1]", "448", "512 for v32")),
    Bad("no rope", lambda c: c.update(rope=None), ShapeError, ("rope", "None", "an array of width 64 for v32")),
    Bad("narrow rope", swap("rope", lambda x: x[:, :32].copy()), ShapeError, ("rope", "width 32", "width 64")),
    Bad("no sin", lambda c: c.pop("sin"), ArgumentError, ("sin", "None", "cos, sin, positions, or none")),
    Bad("16 pairs", lambda c: c.update(cos=c["cos"][:, :16].copy(), sin=c["sin"][:, :16].copy()), ShapeError,
        ("cos.shape[-1]", "16", "32 pairs")),
    Bad("unknown width", swap("cache", lambda x: np.zeros((4, 8, 640), np.uint8)), ShapeError,
        ("cache.shape[-1]", "640 of uint8", "656 of uint8 (v32)")),
    Bad("another record", option("kv_format", "v4"), ShapeError, ("cache.shape[-1]", "656", "584 of uint8")),
    Bad("no record", option("kv_format", "v5"), ArgumentError, ("kv_format", "'v5'", "v32, v32-nope, v4")),
    Bad("scales of numbers", option("scales", np.array([1, 2])), ArgumentError, ("scales", "power_of_2, plain")),
    Bad("record of numbers", option("kv_format", np.array([1, 2])), ArgumentError, ("kv_format", "v32, v32-nope, v4")),
    Bad("a large flag", option("interleaved", 2**63), ArgumentError, ("interleaved", "True or False")),
    Bad("rule of scales", option("scales", "ue8m0"), ArgumentError, ("scales", "'ue8m0'", "power_of_2, plain")),
    Bad("kv_scale", option("kv_scale", 0.0), ArgumentError, ("kv_scale", "0.0", "above 0")),
    Bad("kv_scale of v32", option("kv_scale", 0.5), ArgumentError, ("kv_scale", "0.5", "1 for v32")),
    Bad("interleaved", option("interleaved", "yes"), ArgumentError, ("interleaved", "'yes'", "True or False")),
    Bad("odd pages", swap("cache", lambda x: pages_apart(656, 8 * 656 + 8)), ShapeError,
        ("cache.strides", "multiples of 16 bytes", "5248")),
    Bad("planes apart", swap("cache", lambda x: pages_apart(584, 8 * 592, 592)), ShapeError,
        ("cache.strides[1]", "592", "584 bytes per token")),
    Bad("cache overlaps latent", lambda c: c.update(
        latent=c["cache"].reshape(-1)[: 3 * 512 * 2].view(np.float16).reshape(3, 512),
        rope=c["rope"].astype(np.float16), cache=c["cache"]), ShapeError, ("cache", "memory that overlaps latent")),
]  # fmt: skip


def without(*names: str, **changes: Any) -> Callable[[Call], Any]:
    """Takes arguments out of a call, and changes others."""

    def change(call: Call) -> None:
        for name in names:
            del call[name]
        call.update(changes)

    return change


_KEYS = ("latent", "cache", "slots")
PREPARE = [
    Bad("q of 500", swap("q", lambda x: x[..., :500].copy()), ShapeError, ("q.shape[-1]", "500", "512 or 448 or 128")),
    Bad("q without its RoPE part", without("q_rope", q=np.ones((3, 2, 448), ml_dtypes.bfloat16)), ShapeError,
        ("q.shape[-1]", "448", "576 or 512 or 192 or 64")),
    Bad("narrow q_rope", swap("q_rope", lambda x: x[..., :32].copy()), ShapeError, ("q_rope.shape", "32", "64")),
    Bad("latent of v4", swap("latent", lambda x: x[:, :448].copy()), ShapeError, ("latent.shape[-1]", "448", "512")),
    Bad("no rope", without("rope", "rope_out", return_rope=False), ShapeError, ("rope", "None", "width 64 for v32")),
    Bad("no slots", without("slots"), ArgumentError, ("slots", "None", "latent, cache, slots, or none")),
    Bad("no positions", without("positions"), ArgumentError, ("positions", "None", "an array")),
    Bad("no sin", without("sin"), ArgumentError, ("sin", "None", "both, or none")),
    Bad("no angles", without("cos", "sin"), ArgumentError, ("theta", "neither cos nor theta")),
    Bad("both angles", option("theta", 1e4), ArgumentError, ("theta", "both cos and theta")),
    Bad("16 pairs", lambda c: c.update(cos=c["cos"][:, :16].copy(), sin=c["sin"][:, :16].copy()), ShapeError,
        ("cos.shape[-1]", "16", "32 pairs")),
    *(Bad(f"theta {value!r}", without("cos", "sin", theta=value), ArgumentError, ("theta", repr(value), "at least 1"))
      for value in (0.5, -1, float("nan"), float("inf"), "1e4", True, 2**70 * 1e30)),
    *(Bad(f"{name} {value!r}", option(name, value), ArgumentError, (name, repr(value), "True or False"))
      for name in ("interleaved", "quantise", "return_rope") for value in ("yes", None, 2)),
    *(Bad(f"q_scale {value!r}", without("out", quantise=True, q_scale=value), ArgumentError, ("q_scale", repr(value)))
      for value in (0.0, -1.0, "1", float("inf"), float("nan"))),
    Bad("q_scale of no codes", option("q_scale", 0.5), ArgumentError, ("q_scale", "0.5", "None without quantise")),
    Bad("codes in 16 bits", option("quantise", True), DTypeError, ("out.dtype", "bfloat16", "uint8")),
    Bad("scales of no codes", option("q_scales", np.ones((3, 2), np.float32)), ArgumentError,
        ("q_scales", "quantise is not set")),
    Bad("rope_out unasked", option("return_rope", False), ArgumentError, ("rope_out", "return_rope is not set")),
    Bad("no rope to return", without(*_KEYS, "rope", return_rope=True), ArgumentError, ("rope", "None")),
    Bad("rope for nothing", without(*_KEYS, "rope_out", return_rope=False), ArgumentError,
        ("rope", "None without a cache")),
    Bad("a format without a cache", without(*_KEYS, kv_format="v32"), ArgumentError,
        ("kv_format", "None without a cache")),
    Bad("kv_scale without a cache", without(*_KEYS, kv_scale=0.5), ArgumentError, ("kv_scale", "1 without a cache")),
    Bad("kv_scale of v32", option("kv_scale", 0.5), ArgumentError, ("kv_scale", "0.5", "1 for v32")),
    Bad("rule of scales", option("scales", "ue8m0"), ArgumentError, ("scales", "'ue8m0'", "power_of_2, plain")),
    Bad("results overlap", lambda c: c.update(rope_out=c["out"][:, 0, :64]), ShapeError, ("overlaps",)),
    Bad("beside in place", lambda c: c.update(q=c["out"][..., :512]), ShapeError, ("out", "overlaps q")),
]  # fmt: skip
GATHER = [
    Bad("out of another width", swap("out", lambda x: x[:, :512].copy()), ShapeError,
        ("out.shape", "(3, 512)", "(3, 576)")),
    Bad("out_dtype", option("out_dtype", "float64"), DTypeError, ("out_dtype", "float64")),
    Bad("kv_scale", option("kv_scale", -1), ArgumentError, ("kv_scale", "-1")),
]  # fmt: skip
UPDATE = [
    Bad("page_size", option("page_size", 0), ArgumentError, ("page_size", "0", "an integer from 1 to")),
    Bad(
        "a large page_size",
        option("page_size", 2**63),
        ArgumentError,
        ("page_size", str(2**63), "an integer from 1 to"),
    ),
    Bad("short", swap("packed", lambda x: x[:20].copy()), ShapeError, ("packed.shape[0]", "20", "at least 34")),
]
SLOTS = [
    *(
        Bad(f"{name} {value!r}", option(name, value), ArgumentError, (name, repr(value), "an integer from"))
        for name, values in {
            "page_size": (0, -1, 1.0, True, None, 2**31),
            "max_tokens": (-1, "3", None, 2**31),
            "num_pages": (-1, 2.0, False, 2**31),
        }.items()
        for value in values
    ),
    Bad("few slots", option("max_tokens", 41), ShapeError, ("slots.shape", "(40,)", "(41,)")),
    Bad("results overlap", lambda c: c.update(cu_seqlens=c["slots"][:8]), ShapeError, ("overlaps",)),
]  # fmt: skip
APPEND_KEYS = [
    Bad("no positions", lambda c: c.pop("positions"), ArgumentError, ("positions", "None", "or none")),
    Bad("8 pairs", lambda c: c.update(cos=c["cos"][:, :8].copy(), sin=c["sin"][:, :8].copy()), ShapeError,
        ("cos.shape[-1]", "8", "a multiple of d / 8 = 16")),
    Bad("keys of 64", lambda c: c.update(k=c["k"][:, :64].copy(), cos=c["cos"][:, :16].copy(),
        sin=c["sin"][:, :16].copy()), ShapeError, ("cache.shape[-1]", "132", "68 bytes")),
    Bad("tokens apart", swap("cache", lambda x: pages_apart(132, 8 * 144, 144)), ShapeError,
        ("cache.strides", "144", "(any, 132, 1)")),
    Bad("odd pages", swap("cache", lambda x: pages_apart(132, 8 * 132 + 8)), ShapeError,
        ("cache.strides", "1064", "multiples of 16 bytes")),
    Bad("rule of scales", option("scales", "ue8m0"), ArgumentError, ("scales", "'ue8m0'", '"plain"')),
    Bad("hadamard", option("hadamard", "yes"), ArgumentError, ("hadamard", "'yes'", "True or False")),
]  # fmt: skip
PREPARE_BOTH = [
    Bad("no bias", lambda c: c.pop("norm_bias"), ArgumentError, ("norm_bias", "None", "both, or none")),
    Bad("no slots", lambda c: c.pop("slots"), ArgumentError, ("slots", "None", "both, or none")),
    Bad("keys nowhere", without("cache", "slots"), ArgumentError, ("return_k", "without a cache")),
    Bad("keys twice", option("return_k", True), ArgumentError, ("return_k", "with a cache")),
    Bad("return_k", option("return_k", "yes"), ArgumentError, ("return_k", "'yes'", "True or False")),
    Bad("eps", option("eps", -1.0), ArgumentError, ("eps", "-1.0", "at least 0")),
    Bad("k_scale of pages", option("k_scale", np.zeros(3, np.float32)), ArgumentError,
        ("k_scale", "return_k is not set")),
    Bad("keys of 64", swap("k", lambda x: x[:, :64].copy()), ShapeError, ("k.shape", "64", "d=128")),
    Bad("norm of 64", swap("norm_weight", lambda x: x[:64].copy()), ShapeError, ("norm_weight.shape", "64", "d=128")),
    Bad("tokens apart", swap("cache", lambda x: pages_apart(132, 8 * 144, 144)), ShapeError,
        ("cache.strides", "144", "(any, 132, 1)")),
    Bad("accumulate", option("accumulate", "fp8"), ArgumentError, ("accumulate", "'fp8'")),
]  # fmt: skip
GATHER_KEYS = [
    Bad("codes of 64", swap("codes", lambda x: x[:, :64].copy()), ShapeError, ("codes.shape", "(3, 64)", "(3, 128)")),
    Bad(
        "odd pages",
        swap("cache", lambda x: pages_apart(132, 8 * 132 + 8)),
        ShapeError,
        ("cache.strides", "1064", "multiples of 16 bytes"),
    ),
]
#: Uploading would undo them.
OF_THE_HOST = (
    "odd pages",
    "planes apart",
    "tokens apart",
    "cache overlaps latent",
    "results overlap",
    "beside in place",
)
TABLES = {
    "cache_append": APPEND,
    "mla_prepare": PREPARE,
    "cache_gather": GATHER,
    "cache_update": UPDATE,
    "cache_slots": SLOTS,
    "indexer_cache_append": APPEND_KEYS,
    "indexer_cache_gather": GATHER_KEYS,
    "indexer_prepare": PREPARE_BOTH,
}


@pytest.mark.parametrize(
    ("name", "bad"),
    [
        pytest.param(name, bad, id=f"{name}-{bad.id}".replace(" ", "_"))
        for name, table in TABLES.items()
        for bad in table
    ],
)
def test_refuses(name: str, bad: Bad, place: str) -> None:
    if place == "cupy" and bad.id in OF_THE_HOST:
        pytest.skip("uploading undoes it")
    call = GOOD[name]()
    if name == "cache_gather" and bad.id == "out_dtype":
        del call["out"]
    raises(bad, function_of(name), call, place)


@pytest.mark.parametrize("name", GOOD)
def test_the_calls_that_the_mistakes_are_made_in_are_good(name: str, recorder: Recorder) -> None:
    """And repeated calls are launched as the first."""
    for launches in (1, 2, 3):
        function_of(name)(**GOOD[name]())
        assert recorder.entries == [ENTRIES.get(name, name)] * launches


def test_read_only_caches_are_refused(recorder: Recorder) -> None:
    call = good_append()
    call["cache"].flags.writeable = False
    with pytest.raises(MlaError, match="cache: got a read-only array"):
        mla_cupy.cache_append(**call)


def test_numpy_caches_are_changed_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLA_CUPY_BACKEND", "numpy")
    call = good_append()
    before = call["cache"].copy()
    assert mla_cupy.cache_append(**call) is None  # type: ignore[func-returns-value]
    changed = (call["cache"] != before).any(axis=2)
    assert sorted(np.flatnonzero(changed)) == [3, 9]


def test_planar_records_of_one_token_per_page(monkeypatch: pytest.MonkeyPatch) -> None:
    """The token's own stride then means nothing."""
    monkeypatch.setenv("MLA_CUPY_BACKEND", "numpy")
    cache = np.lib.stride_tricks.as_strided(np.zeros(5000, np.uint8), (4, 1, 584), (1152, 7, 1))
    latent, rope = tokens(V4, 1)
    mla_cupy.cache_append(latent, rope, cache, np.array([2]))
    assert mla_cupy.cache_gather(cache, np.array([2, 1])).astype(np.float32).any(axis=1).tolist() == [True, False]


@pytest.mark.parametrize("record", [V32, V4], ids=lambda record: record.name)
def test_no_token_at_all_is_fine(record: CacheFormat, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every slot of a padded step may be -1."""
    monkeypatch.setenv("MLA_CUPY_BACKEND", "numpy")
    cache = empty_cache(record, 2, 4)
    before = cache.copy()
    latent, rope = tokens(record, 3)
    mla_cupy.cache_append(latent, rope, cache, np.array([-1, -1, 8]))
    mla_cupy.cache_append(latent[:0], None if rope is None else rope[:0], cache, np.zeros(0, np.int64))
    assert (cache == before).all()


def test_a_large_flag_after_a_good_call(recorder: Recorder) -> None:
    """NumPy's truth values cannot be compared with it."""
    call = GOOD["cache_append"]()
    mla_cupy.cache_append(**call, interleaved=np.uint8(1))
    with pytest.raises(ArgumentError, match="interleaved: got 9223372036854775808"):
        mla_cupy.cache_append(**call, interleaved=2**63)
