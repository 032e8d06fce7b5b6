"""Mistakes in what the sparse forward and backward both take, in a call of 2 + 1 queries of 4 heads and 12 + 8 rows."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable
from typing import Any

import ml_dtypes
import numpy as np

from mla_cupy import ArgumentError, DTypeError, ShapeError
from tests.support.mistakes import Bad, Call, option, swap

BF16 = np.dtype(ml_dtypes.bfloat16)


def shared_inputs() -> Call:
    """The arrays that both take: two sequences, every array contiguous."""
    rng = np.random.default_rng(0)
    return {
        "q": rng.standard_normal((3, 4, 576), np.float32).astype(BF16),
        "kv": rng.standard_normal((20, 576), np.float32).astype(BF16),
        "indices": np.array([[0, 5, 11, -1, -1], [3, 3, 3, 2, 1], [7, -1, 0, 6, 5]], np.int32),
        "topk_length": np.array([4, 5, 5], np.int32),
        "attn_sink": np.array([0.5, -math.inf, math.inf, 0], np.float32),
        "cu_seqlens_q": np.array([0, 2, 3], np.int32),
        "cu_seqlens_kv": np.array([0, 12, 20], np.int32),
        "scale": 192**-0.5,
    }


BOTH = [
    # rank
    Bad("q 4-D", swap("q", lambda x: x[None]), ShapeError, ("q.shape", "(1, 3, 4, 576)", "(s_q, h_q, 576 or 512)")),
    Bad("q 2-D", swap("q", lambda x: x[0]), ShapeError, ("q.shape", "(4, 576)")),
    Bad("kv 1-D", swap("kv", lambda x: x[0]), ShapeError, ("kv.shape", "(576,)", "(s_kv, ", "576 or 512")),
    Bad("kv 4-D", swap("kv", lambda x: x[None, None]), ShapeError, ("kv.shape", "(1, 1, 20, 576)")),
    Bad("indices 1-D", swap("indices", lambda x: x[0]), ShapeError, ("indices.shape", "(5,)", "(s_q, topk)")),
    Bad(
        "topk_length 2-D", swap("topk_length", lambda x: x[None]), ShapeError, ("topk_length.shape", "(1, 3)", "(s_q,)")
    ),
    Bad("sink 2-D", swap("attn_sink", lambda x: x[None]), ShapeError, ("attn_sink.shape", "(1, 4)", "(h_q,)")),
    Bad("cu_q 2-D", swap("cu_seqlens_q", lambda x: x[None]), ShapeError, ("cu_seqlens_q.shape", "(1, 3)", "(b+1,)")),
    Bad("cu_kv 0-D", swap("cu_seqlens_kv", lambda x: np.array(0, np.int32)), ShapeError, ("cu_seqlens_kv.shape", "()")),
    # shape
    Bad("q 192", swap("q", lambda x: x[..., :192].copy()), ShapeError, ("q.shape[-1]", "192", "576 or 512")),
    Bad("q 512", swap("q", lambda x: x[..., :512].copy()), ShapeError, ("kv.shape[-1]", "576", "d_qk=512, as in q")),
    Bad("kv 512", swap("kv", lambda x: x[..., :512].copy()), ShapeError, ("kv.shape[-1]", "512", "d_qk=576, as in q")),
    Bad("kv heads", swap("kv", lambda x: x.reshape(10, 2, 576)), ShapeError, ("kv.shape[1]", "2", "1 head")),
    Bad(
        "indices heads",
        swap("indices", lambda x: np.stack([x, x], axis=1)),
        ShapeError,
        ("indices.shape[1]", "2", "1 head"),
    ),
    Bad("cu_q alone", lambda c: c.pop("cu_seqlens_kv"), ArgumentError, ("cu_seqlens_kv", "None", "both, or none")),
    Bad("cu_kv alone", lambda c: c.pop("cu_seqlens_q"), ArgumentError, ("cu_seqlens_q", "None", "both, or none")),
    Bad(
        "too many slots",
        swap("indices", lambda x: np.broadcast_to(x[:, :1], (3, 2**31 - 1))),
        ShapeError,
        ("topk", str(2**31 - 1), str(2**31 - 64)),
    ),
    Bad(
        "too many rows",
        swap("kv", lambda x: np.broadcast_to(x[:1], (2**31, 576))),
        ShapeError,
        ("kv.shape[0]", str(2**31), str(2**31 - 1)),
    ),
    # dtype
    Bad("q fp32", swap("q", lambda x: x.astype(np.float32)), DTypeError, ("q.dtype", "float32", "bfloat16 or float16")),
    Bad("q words", swap("q", lambda x: x.view(np.uint16)), DTypeError, ("q.dtype", "uint16", "ml_dtypes.bfloat16")),
    Bad("indices uint32", swap("indices", lambda x: x.view(np.uint32)), DTypeError, ("indices.dtype", "uint32")),
    Bad("sink bf16", swap("attn_sink", lambda x: x.astype(BF16)), DTypeError, ("attn_sink.dtype", "bfloat16")),
    # stride
    # numbers
    Bad("scale None", option("scale", None), ArgumentError, ("scale", "None", "256**-0.5 for GLM-5", "pass scale=")),
    Bad("scale 0", option("scale", 0), ArgumentError, ("scale", "0", "finite number above 0")),
    Bad("scale nan", option("scale", math.nan), ArgumentError, ("scale", "nan", "finite")),
    Bad("scale inf", option("scale", math.inf), ArgumentError, ("scale", "inf", "finite")),
    Bad("scale tiny", option("scale", 1e-300), ArgumentError, ("scale", "1e-300", "float32")),
    Bad("scale array", option("scale", np.ones(2)), ArgumentError, ("scale", "array", "a finite number")),
    Bad("lse_base", option("lse_base", "10"), ArgumentError, ("lse_base", "'10'", '"e" or "2"')),
]


#: On the host it is not wanted at all.
WORKSPACE = Bad("workspace", option("workspace", np.zeros(1, np.float32)), ArgumentError, ("workspace",))


def arguments_without(bads: Iterable[Bad], function: Callable[..., Any]) -> set[str]:
    """The arguments of `function` that no mistake is about."""
    named = {word.split("[")[0].split(".")[0] for bad in bads for word in bad.words}
    return set(inspect.signature(function).parameters) - named
