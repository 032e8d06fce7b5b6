"""The checks that several operations share: of numbers, names, lists of lengths and workspaces."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np

from mla_cupy import dtypes
from mla_cupy.arrays import View
from mla_cupy.cache_formats import BYTE_DTYPES
from mla_cupy.errors import ArgumentError, DeviceError, DTypeError, ShapeError, explain
from mla_cupy.kernels.attention.quantize_output import COLUMNS as SCALE_COLUMNS
from mla_cupy.kernels.decode.combine_pieces import MAX_PIECES
from mla_cupy.kernels.decode.problem import DecodeProblem
from mla_cupy.kernels.decode.sm90_fp8 import LEAST_ROWS_OF_TERMS, TERMS
from mla_cupy.kernels.lse import LseOptions
from mla_cupy.kernels.pipeline import WORKSPACE_ALIGNMENT as WORKSPACE_ALIGNMENT
from mla_cupy.ops.operation import Arrays, Input, Views, present
from mla_cupy.shapes import D_ROPE, D_UNABSORBED, D_V, MAX_TOKENS, TILE_TOKENS

_F = TypeVar("_F", bound=Callable[..., Any])
_MAX_FLOAT32 = float(np.finfo(np.float32).max)
_MIN_SCALE, _MAX_SCALE = 2.0**-126, 2.0**126
"""Range of float32, also after a multiplication by log2(e)."""

MODEL_SCALES = (
    "the model's softmax scale: 192**-0.5 for DeepSeek-V2, V3 and V3.2, 256**-0.5 for GLM-5, 128**-0.5 for Mistral "
    "Small 4, times YaRN's mscale**2 where the model uses it"
)
"""Softmax scales of models, for the error of a missing `scale`."""
ACCUMULATE = ("float32", "float16")
MAX_DRAFTS = 64
"""The most drafts of a tree: one bit each."""
MAX_CP_WORLD = 1 << 16
"""Ranks that may share a sequence: far more than there are, so that sums of tokens and ranks fit 32 bits."""
MAX_SPLIT_BLOCKS = 65535
"""Pieces of a batch-invariant call: the most blocks of a grid's second axis."""

STARTS = (
    Input("cu_seqlens_q", "b+1", ("int32",), optional=True),
    Input("cu_seqlens_kv", "b+1", ("int32",), optional=True),
)
"""Starts of sequences stored one after another, and the end of the last one."""


def absorbing(d_qk: int) -> str:
    """A remedy for queries with their width before W_UK is absorbed; "" for others."""
    if d_qk != D_UNABSORBED:
        return ""
    return f"absorb W_UK: q_nope @ W_UK is {D_V} wide, beside q_rope's {D_ROPE}; scale stays {D_UNABSORBED}**-0.5"


def resolve_scale(scale: Any, d_qk: int) -> float:
    """Check the factor of the scores; None is d_qk**-0.5."""
    if scale is None:
        return float(d_qk**-0.5)
    return check_factor("scale", scale)


def check_scale(scale: Any) -> float:
    """Check the factor of the scores of absorbed queries; their width does not determine it."""
    if scale is None:
        raise ArgumentError(explain("scale", None, MODEL_SCALES, "pass scale=..."))
    return check_factor("scale", scale)


def explains_scale(function: _F) -> _F:
    """Let a call without `scale` reach `check_scale`, which names models' values, in place of Python's TypeError."""
    function.__signature__ = inspect.signature(function)  # type: ignore[attr-defined]
    function.__kwdefaults__ = {**(function.__kwdefaults__ or {}), "scale": None}
    return function


def check_factor(argument: str, value: Any) -> float:
    """Check a number that float32 can hold, above 0."""
    if not (is_number(value) and _MIN_SCALE <= value <= _MAX_SCALE):
        remedy = "" if is_number(value) else "pass a Python number"
        raise ArgumentError(explain(argument, repr(value), "a finite number above 0, in float32", remedy))
    return float(value)


def check_eps(argument: str, value: Any) -> float:
    """Check the number that is added to a variance: at least 0, and representable in float32."""
    if not (is_number(value) and 0 <= value <= _MAX_FLOAT32):
        remedy = "" if is_number(value) else "pass a Python number"
        raise ArgumentError(explain(argument, repr(value), "a finite number, at least 0", remedy))
    return float(value)


def check_base(argument: str, value: Any) -> float:
    """Check the base of RoPE: a number that float32 can hold, of at least 1."""
    if not (is_number(value) and 1 <= value <= _MAX_FLOAT32):
        remedy = "" if is_number(value) else "pass a Python number"
        raise ArgumentError(explain(argument, repr(value), "a finite number, at least 1", remedy))
    return float(value)


def check_lse_base(lse_base: Any) -> str:
    """Check the base of logarithms."""
    if not (isinstance(lse_base, str) and lse_base in ("e", "2")):
        raise ArgumentError(explain("lse_base", repr(lse_base), '"e" or "2"'))
    return lse_base


def check_lse(lse_base: Any, empty_lse: Any) -> LseOptions:
    """Check the base of logarithms, and that the one of an empty row is a number; inf and NaN are allowed."""
    lse_base = check_lse_base(lse_base)
    if is_number(empty_lse) and not _MAX_FLOAT32 < abs(empty_lse) < math.inf:
        return LseOptions(lse_base, float(empty_lse))
    remedy = "" if is_number(empty_lse) else "pass a Python number"
    raise ArgumentError(explain("empty_lse", repr(empty_lse), "a number, as float32", remedy))


def check_math(math: Any, known: Sequence[str] = ("exact", "fp8")) -> str:
    """Check the arithmetic of the products, one of those that the operation has."""
    if not (isinstance(math, str) and math in known):
        names = [f'"{name}"' for name in known]
        raise ArgumentError(explain("math", repr(math), f"{', '.join(names[:-1])} or {names[-1]}"))
    return math


MATH_OF_DENSE_DECODE = "exact", "fp8", "fp8x2"
"""The arithmetic of the products in dense decode."""


def check_accumulate(accumulate: Any) -> str:
    """Check the type in which products of 8-bit codes are added up."""
    if not (isinstance(accumulate, str) and accumulate in ACCUMULATE):
        raise ArgumentError(explain("accumulate", repr(accumulate), '"float32" or "float16"'))
    return accumulate


def check_flag(argument: str, value: Any) -> bool:
    """Check a truth value: Python's, NumPy's, or 0 and 1."""
    if isinstance(value, (bool, np.bool_)) or (is_integer(value) and value in (0, 1)):
        return bool(value)
    raise ArgumentError(explain(argument, repr(value), "True or False"))


def check_pieces(batch_invariant: Any, split_tokens: Any, longest: tuple[str, int], requests: tuple[str, int]) -> int:
    """Check the pieces of a batch-invariant call or plan; returns the tiles of one, 0 without `batch_invariant`.

    `longest` is the largest number of tokens of a request, with its name; `requests` is the number of requests, with
    its name.
    """
    if not is_integer(split_tokens) or not 0 < split_tokens <= MAX_TOKENS or split_tokens % TILE_TOKENS:
        raise ArgumentError(explain("split_tokens", repr(split_tokens), f"a multiple of {TILE_TOKENS}"))
    if not check_flag("batch_invariant", batch_invariant):
        return 0
    tiles = int(split_tokens) // TILE_TOKENS
    most = max(1, -(-longest[1] // int(split_tokens)))
    if most > MAX_PIECES:
        expected = f"at least 1/{MAX_PIECES} of {longest[0]} = {longest[1]}"
        raise ArgumentError(explain("split_tokens", split_tokens, expected, "longer pieces"))
    if requests[1] * most > MAX_SPLIT_BLOCKS:
        got, remedy = f"{requests[0]} of up to {most} pieces", "longer pieces" if most > 1 else "split the queries"
        raise ArgumentError(explain("split_tokens", got, f"at most {MAX_SPLIT_BLOCKS} pieces", remedy))
    return tiles


def check_shard(cp_world: Any, cp_rank: Any) -> tuple[int, int]:
    """Check the number of ranks that share the tokens of the sequences, and which of them this one is."""
    if not is_integer(cp_world) or not 1 <= cp_world <= MAX_CP_WORLD:
        raise ArgumentError(explain("cp_world", repr(cp_world), f"an integer from 1 to {MAX_CP_WORLD}"))
    if not is_integer(cp_rank) or not 0 <= cp_rank < cp_world:
        raise ArgumentError(explain("cp_rank", repr(cp_rank), f"an integer from 0 to {cp_world - 1}"))
    return int(cp_world), int(cp_rank)


def check_drafts(tree_mask: bool, s_q: int) -> None:
    """Check the number of query tokens of a call with a mask of drafts, if there is one."""
    if tree_mask and s_q > MAX_DRAFTS:
        raise ShapeError(explain("s_q", s_q, f"at most {MAX_DRAFTS} with a tree_mask", "each draft is one of 64 bits"))


def check_terms(problem: DecodeProblem) -> None:
    """Check that there are enough query rows for two FP8 terms.

    Raises
    ------
    ArgumentError
    """
    if problem.math == TERMS and problem.rows < LEAST_ROWS_OF_TERMS:
        got, expected = (
            f"{problem.rows} query rows (s_q * h_q)",
            f"at least {LEAST_ROWS_OF_TERMS} with fp8.math={TERMS!r}",
        )
        raise ArgumentError(explain("q", got, expected, 'pass fp8=Fp8("fp8"), or leave it out'))


def check_count(argument: str, value: Any, minimum: int, maximum: int) -> int:
    """Check a whole number in [minimum, maximum]."""
    if not (is_integer(value) and minimum <= value <= maximum):
        raise ArgumentError(explain(argument, repr(value), f"an integer from {minimum} to {maximum}"))
    return int(value)


def check_float(argument: str, value: Any) -> float:
    """Check that `value` is a number."""
    try:
        if is_number(value):
            return float(value)
    except OverflowError:  # of an integer
        pass
    raise ArgumentError(explain(argument, repr(value), "a number", "" if is_number(value) else "pass a Python number"))


def check_dtype(argument: str, dtype: Any) -> str | None:
    """The name of a dtype in any form: a name, or a dtype or scalar type of NumPy, `ml_dtypes` or PyTorch.

    None stays None. Other checks decide if the dtype fits.
    """
    if dtype is None:
        return None
    name = dtypes.name_of(dtype)
    if name not in dtypes.TABLE:
        raise DTypeError(explain(argument, repr(dtype), "None, or a dtype or its name", "such as 'float32'"))
    return name


def is_e4m3(dtype: Any) -> bool:
    """True if results of this dtype, in any form, are e4m3 codes with scales."""
    return dtype is not None and dtypes.name_of(dtype) in BYTE_DTYPES


def check_codes(out_dtype: Any, d_head: int, argument: str = "w_uv.shape[1]") -> bool:
    """Check the width of heads after W_UV, 0 without it, if results are e4m3 codes; returns whether they are."""
    fp8_out = is_e4m3(out_dtype)
    if fp8_out and d_head % SCALE_COLUMNS:
        expected = f"a multiple of {SCALE_COLUMNS}, the columns of a scale, with results in e4m3"
        raise ShapeError(explain(argument, d_head, expected))
    return fp8_out


def check_scales_of_results(scales: Any, fp8_out: bool) -> str:
    """Check the rule of the scales of e4m3 results; other results have the default."""
    if not (isinstance(scales, str) and scales in ("plain", "power_of_2")):
        raise ArgumentError(explain("scales", repr(scales), '"plain" or "power_of_2"'))
    if scales != "plain" and not fp8_out:
        raise ArgumentError(explain("scales", repr(scales), '"plain" for results in 16 bits or float32'))
    return scales


def sizes_of_results(columns: int) -> dict[str, int]:
    """Sizes of axes that only results of decode have: a row's columns, and the scales of its e4m3 codes."""
    return {"d_head": columns, "row_scales": columns // SCALE_COLUMNS}


def check_all_or_none(views: Views, *names: str, expected: str = "an array", group: str = "") -> bool:
    """Check that optional arrays of one group are all passed or all absent; returns True if they are passed."""
    missing = [name for name in names if views[name] is None]
    if len(missing) not in (0, len(names)):
        all_of_them = "both" if len(names) == 2 else f"all of {', '.join(names)}"
        remedy = f"give {all_of_them}, or none{f', as {group}' if group else ''}"
        raise ArgumentError(explain(missing[0], None, expected, remedy))
    return not missing


def pair_width(views: Views) -> int:
    """The width of queries and keys; their last columns may be separate arrays, `q_rope` and `k_rope`.

    Raises
    ------
    ShapeError
        If queries and keys differ.
    """
    widths = {}
    for name in ("q", "k"):
        rope = views[f"{name}_rope"]
        widths[name] = present(views, name).shape[2] + (0 if rope is None else rope.shape[2])
    if widths["q"] != widths["k"]:
        remedy = f"the last {D_ROPE} columns are in q_rope and k_rope, or in q and k"
        raise ShapeError(explain("the width of k", widths["k"], f"{widths['q']}, like q", remedy))
    return widths["q"]


def check_kv_heads(views: Views, heads: int, kv_heads: int) -> None:
    """Check that KV heads divide the query heads evenly, and that `k_rope` has one head or one per KV head.

    Raises
    ------
    ShapeError
    """
    if heads % kv_heads:
        remedy = "each KV head serves h_q / h_kv heads"
        raise ShapeError(explain("q.shape[1]", heads, f"a multiple of h_kv={kv_heads}", remedy))
    k_rope = views["k_rope"]
    if k_rope is not None and k_rope.shape[1] not in (1, kv_heads):
        expected = f"1 or h_kv={kv_heads}" if kv_heads > 1 else "1, as k has no more heads"
        raise ShapeError(explain("k_rope.shape[1]", k_rope.shape[1], expected, "pass one head, or one per KV head"))


def check_starts(views: Views) -> None:
    """Check that queries and keys have their starts, or neither.

    Raises
    ------
    ArgumentError
    """
    names, expected = (array.name for array in STARTS), "as many starts as its counterpart"
    check_all_or_none(views, *names, expected=expected, group="packed=Packed(cu_seqlens_q, cu_seqlens_kv)")


def check_start_values(arrays: Arrays, s_q: int, s_kv: int) -> None:
    """Check that the starts, if passed, ascend from 0 to at most the number of queries or keys.

    Raises
    ------
    ArgumentError
        That names the first bad one.
    """
    for array, end in zip(STARTS, (s_q, s_kv), strict=True):
        starts = arrays[array.name]
        if starts is not None:
            bad = (starts < 0) | (starts > end) | (np.diff(starts, prepend=starts[:1]) < 0)
            name_first(array.name, starts, bad, f"ascending starts of 0 to {end}")


def name_first(argument: str, values: np.ndarray[Any, Any], bad: np.ndarray[Any, Any], expected: str) -> None:
    """Raise ArgumentError for the first of the `values` that is `bad`, if there is one."""
    if bad.any():
        at = int(np.flatnonzero(bad)[0])
        raise ArgumentError(explain(f"{argument}[{at}]", int(values[at]), expected))


def check_scale_values(arrays: Arrays, names: Sequence[str], *, zero: bool) -> None:
    """Check arrays of scales, if passed: finite, and above 0 or, where `zero` is allowed, at least 0.

    Raises
    ------
    ArgumentError
        That names the first bad one.
    """
    for name in names:
        scales = arrays[name]
        if scales is None:
            continue
        bad = ~(np.isfinite(scales) & ((scales >= 0) if zero else (scales > 0)))
        if bad.any():
            at = tuple(map(int, np.argwhere(bad)[0]))
            expected = f"a finite number, {'at least' if zero else 'above'} 0"
            raise ArgumentError(explain(f"{name}[{', '.join(map(str, at))}]", scales[at], expected))


_NO_NUMBERS = (bool, np.bool_, np.timedelta64)
"""Kinds that count as integers for Python or NumPy."""


def is_integer(value: Any) -> bool:
    """True for an integer that is no bool and no length of time."""
    return isinstance(value, (int, np.integer)) and not isinstance(value, _NO_NUMBERS)


def is_number(value: Any) -> bool:
    """True for a number of Python or NumPy that is no bool and no length of time."""
    return is_integer(value) or isinstance(value, (float, np.floating))


def check_memory(view: View, nbytes: int, device: int) -> None:
    """Check a workspace: a contiguous, aligned vector of at least `nbytes` bytes on `device`.

    Raises
    ------
    ShapeError, DeviceError, ArgumentError
    """
    if view.device != device:
        raise DeviceError(explain("workspace's device", view.device, str(device), "move it"))
    if view.dtype != "uint8" or len(view.shape) != 1 or (view.strides != (1,) and view.shape[0] > 1):
        raise ShapeError(explain("workspace", f"{view.dtype} {view.shape}", "a contiguous vector of uint8"))
    if view.shape[0] < nbytes:
        remedy = "call mla_cupy.workspace_bytes for the size"
        raise ShapeError(explain("workspace.shape[0]", view.shape[0], f"at least {nbytes} bytes", remedy))
    if view.ptr % WORKSPACE_ALIGNMENT:
        raise ShapeError(explain("workspace's address", hex(view.ptr), f"a multiple of {WORKSPACE_ALIGNMENT}"))
