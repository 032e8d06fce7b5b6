"""Table of the parts of a call that exclude each other: checks, messages, a page of the docs and tests follow it.

A *part* is an optional input, or an option that is not at its default, or a dtype or format that an argument has.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

from mla_cupy.cache_formats import BYTE_DTYPES
from mla_cupy.errors import ArgumentError, explain


class Part(NamedTuple):
    """A part of a call, as messages name it.

    Attributes
    ----------
    argument : str
        The argument that selects the part.
    without : str
        Value of that argument in a call without the part.
    beside : str
        End of a message about another argument; "{}" is the value of this part.
    """

    argument: str
    without: str
    beside: str


class Conflict(NamedTuple):
    """Two mutually exclusive parts of a call. The message names `part`; the remedy may be empty."""

    part: str
    other: str
    remedy: str = ""


PARTS = {
    "not_causal": Part("causal", "True", "with causal=False"),
    "tree_mask": Part("tree_mask", "None", "with a tree_mask"),
    "window": Part("window", "None", "with a window"),
    "cu_seqlens_q": Part("packed", "None", "with packed"),
    "equal_lengths": Part("packed.cu_seqlens_q", "an array", "without packed.cu_seqlens_q"),
    "max_seqlen_q": Part("packed.max_seqlen_q", "None", "with packed.max_seqlen_q"),
    "cp_world": Part("shard.world", "1", "with shard.world={}"),
    "q_rope": Part("q_rope", "None", "with q_rope"),
    "w_uv": Part("project", "None", "with project"),
    "out_cos": Part("out_rope", "None", "with out_rope"),
    "batch_invariant": Part("batch_invariant", "False", "with batch_invariant=True"),
    "narrow": Part("q.shape[-1]", "576 or 512", "for keys of {} columns"),
    "fp8_out": Part("out_dtype", "None", "with results in e4m3"),
    "state_out": Part("state_out", "None", "with state_out"),
    "mask": Part("mask", "None", "with a mask"),
    "fp8_math": Part("fp8.math", '"exact"', "with fp8.math={}"),
    "fp8x2": Part("fp8.math", '"fp8"', "with fp8.math={}"),
    "exact_math": Part("fp8.math", '"fp8"', 'with fp8.math="exact"'),
    "codes": Part("q.dtype", "bfloat16 or float16", "for queries in {}"),
    "half": Part("q.dtype", "float8_e4m3fn", "for queries in {}"),
    "rows": Part("kv_cache", "FP8 tokens", "for 16-bit rows"),
    "v32": Part("kv_cache", "16-bit rows", "for the format v32"),
    "v32-nope": Part("kv_cache", "16-bit rows", "for the format v32-nope"),
    "v4": Part("kv_cache", "16-bit rows", "for the format v4"),
    "v41": Part("kv_cache", "16-bit rows", "for the format v41"),
    "fp8": Part("kv_cache", "16-bit rows", "for the format fp8"),
    "kv_scale": Part("fp8.kv_scale", "1", "with fp8.kv_scale"),
    "kv_scales": Part("fp8.kv_scale", "a number", "with an array as fp8.kv_scale"),
    "q_scale": Part("fp8.q_scale", "1", "with fp8.q_scale"),
    "row_scales": Part("fp8.q_scale", "1", "with an array as fp8.q_scale"),
    "q_scales": Part("q_scales", "None", "with q_scales"),
    "k_scales": Part("k_scales", "None", "with k_scales"),
    "v_scales": Part("v_scales", "None", "with v_scales"),
}

_KEEP_FP8 = 'leave fp8.math out, or keep the cache in the format "fp8", see cache_append'


def _of_formats(*names: str) -> tuple[Conflict, ...]:
    """Conflicts of caches in these formats; "rows" hold no scales, and tokens of the others hold their own."""
    math = (Conflict("fp8_math", name, _KEEP_FP8) for name in names)
    own = {name: "" if name == "rows" else "its tokens hold their own scales" for name in names}
    return (*math, *(Conflict("kv_scale", name, remedy) for name, remedy in own.items()))


_NO_ROPE = Conflict("out_cos", "v32-nope", "its values have no RoPE columns")

DECODE = (
    Conflict("tree_mask", "cu_seqlens_q", "pass sequences of one length: a tree needs them"),
    Conflict("window", "tree_mask", "drop one of them: a tree sees all tokens before it"),
    Conflict("not_causal", "tree_mask", "leave causal out: the mask says which drafts a query sees"),
    Conflict("not_causal", "window"),
    Conflict("cp_world", "cu_seqlens_q"),
    Conflict("cp_world", "window"),
    Conflict("cp_world", "fp8_out", "return 16 bits or float32: results of ranks are merged before they are rounded"),
    Conflict("max_seqlen_q", "equal_lengths", "drop it: q.shape[1] sets it"),
    Conflict("w_uv", "cu_seqlens_q", "multiply the result"),
    Conflict("w_uv", "window", "multiply the result"),
    Conflict("w_uv", "narrow", "multiply the result"),
    Conflict("cu_seqlens_q", "narrow", "pass sequences of one length"),
    Conflict("window", "narrow", "pass the tokens of the window"),
    *(Conflict(name, "fp8_math", "leave fp8.math out") for name in ("q_rope", "cu_seqlens_q", "out_cos", "window")),
    Conflict("tree_mask", "fp8x2", 'pass fp8=Fp8("fp8"), or leave it out'),
    Conflict("batch_invariant", "narrow"),
    Conflict(
        "exact_math",
        "codes",
        'pass fp8=Fp8("fp8"), with a cache in the format "fp8", or convert the queries to bfloat16',
    ),
    *_of_formats("rows", "v32", "v32-nope", "v4", "v41"),
    _NO_ROPE,
    Conflict("q_scale", "half", "multiply scale by it: it is for e4m3 queries"),
    Conflict("row_scales", "half", "drop it: it is for e4m3 queries"),
    Conflict("kv_scales", "exact_math", "pass a Python number"),
)

_READ_ROWS = Conflict("exact_math", "fp8", "or read its rows by cache_gather, for sparse_mla_forward")
SPARSE_DECODE = (
    *_of_formats("v32", "v32-nope", "v4", "v41"),
    _NO_ROPE,
    _READ_ROWS,
    Conflict("w_uv", "out_cos", "multiply the result"),
)
SPARSE_FORWARD = (
    *_of_formats("rows", "v32", "v32-nope", "v4"),
    _READ_ROWS._replace(remedy="or read its rows by cache_gather"),
)

_SCALES = ("q_scales", "k_scales", "v_scales")
_CONVERT = "convert queries, keys and values to bfloat16"
PREFILL = (
    *(Conflict(name, "half", "multiply scale by it: it is for e4m3 codes") for name in _SCALES),
    Conflict("state_out", "codes", f"{_CONVERT}, or merge with merge_states"),
    Conflict("mask", "codes", _CONVERT),
)

TABLE = {
    "mla_decode": DECODE,
    "sparse_mla_decode": SPARSE_DECODE,
    "sparse_mla_forward": SPARSE_FORWARD,
    "mla_prefill": PREFILL,
}
"""The conflicts of each operation; plans and composites use the conflicts of the operation that they run."""

Parts = Mapping[str, object | Callable[[], object]]


def check(conflicts: Iterable[Conflict], parts: Parts) -> None:
    """Refuse a call that has both parts of a conflict.

    Parameters
    ----------
    conflicts : iterable of Conflict
    parts : mapping
        Values of the call as messages show them, by the names of `PARTS`; None is absent. A function is evaluated only
        when the conflict's other part is present: a recorded call then compares no number in vain.

    Raises
    ------
    ArgumentError
        That names both parts.
    """
    for part, other, remedy in conflicts:
        beside = _shown(parts, other)
        if beside is not None and (got := _shown(parts, part)) is not None:
            argument, without, _ = PARTS[part]
            raise ArgumentError(explain(argument, got, f"{without} {PARTS[other].beside.format(beside)}", remedy))


def _shown(parts: Parts, name: str) -> Any:
    value = parts.get(name)
    return value() if callable(value) else value


def given(arrays: Mapping[str, object], *names: str) -> dict[str, str]:
    """The parts that are arrays."""
    return {name: "an array" for name in names if arrays[name] is not None}


def other_than(default: float, value: Any) -> Callable[[], object]:
    """An option that is a part if it is not at its default."""
    return lambda: None if value == default else value


def held(record: str) -> dict[str, str]:
    """The part that a cache is: tokens of a record, "" for 16-bit rows."""
    return {record or "rows": record or "16-bit rows"}


def multiplied(math: str, dtype: str) -> dict[str, str]:
    """The parts that the arithmetic and the queries' dtype are."""
    arithmetic = "exact_math" if math == "exact" else "fp8_math"
    terms = {"fp8x2": repr(math)} if math == "fp8x2" else {}
    return {arithmetic: repr(math), **terms, "codes" if dtype in BYTE_DTYPES else "half": dtype}
