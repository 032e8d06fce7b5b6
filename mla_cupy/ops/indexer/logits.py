"""Scores of the lightning indexer, for contiguous queries and keys."""

from __future__ import annotations

from typing import Any

from mla_cupy.errors import ArgumentError, ShapeError, explain
from mla_cupy.kernels.indexer.logits import LOGITS
from mla_cupy.kernels.indexer.logits.problem import CODES, HEAD_DIMS, MAX_HEADS, LogitsOptions, LogitsProblem
from mla_cupy.ops.call import call
from mla_cupy.ops.checks import check_accumulate, check_flag
from mla_cupy.ops.operation import Examined, Input, Operation, Output, Views, present
from mla_cupy.ops.schema import steps_by_16_bytes
from mla_cupy.shapes import MAX_INT32

MIN_SIZES = {"h": 1}
SIZES = {"d": HEAD_DIMS}


def indexer_logits(
    q: Any,
    k: Any,
    weights: Any,
    ks: Any = None,
    ke: Any = None,
    *,
    k_scale: Any = None,
    accumulate: str = "float32",
    clean: bool = True,
    logits: Any = None,
    workspace: Any = None,
    out_dtype: Any = None,
    kernel: str | None = None,
    stream: Any = None,
) -> Any:
    """Score each key in a query's range (the lightning indexer of DeepSeek sparse attention).

    logits[t, s] = k_scale[s] * sum_h weights[t, h] * max(q[t, h] . k[s], 0) for ks[t] <= s < ke[t]

    Parameters
    ----------
    q : array, (s_q, h, d), float8_e4m3fn, uint8 or bfloat16
        Indexer queries of 1 to 128 heads, d 32, 64 or 128. uint8 holds e4m3 codes, for libraries without that dtype.
        The last axis is contiguous; other strides are free (multiples of 16 bytes are fastest).
    k : array, (s_kv, d), dtype of q
        Index keys. Strides as for q. For keys in e2m1 see `indexer_cache_append` and `indexer_logits_paged`.
    weights : array, (s_q, h), float32
        Weights of the heads, of any sign. Multiply them by the scales of q's codes and by any other factors.
    ks, ke : array, (s_q,), int32, optional
        Query t sees the keys from ks[t] up to ke[t], both clamped to [0, s_kv]. Default: all keys.
    k_scale : array, (s_kv,), float32, optional
        Scales of the keys' codes. Default: 1.
    accumulate : str
        Accumulator of the products of codes: "float32" or, faster, "float16", for queries of `indexer_prepare_q(...,
        accumulate="float16")`. For other queries the caller must know that no product, nor a part of one, exceeds
        65,504: with ``448 * sum_d abs(q[t, h, d]) <= 65504`` none does, whatever the keys.
    clean : bool
        Write -inf where a query does not see a key. Otherwise the memory of these logits is left unchanged.
    logits : array, (s_q, s_kv), float32 or bfloat16, optional
        Memory for the result; the last axis is contiguous (rows that start at multiples of 4 elements are fastest).
    workspace : array, (n,), uint8, optional
        Memory for the call, 256-byte aligned, of at least `workspace_bytes(indexer_logits, ...)` bytes.
    out_dtype : str or dtype, optional
        "float32" or "bfloat16". Default: the dtype of `logits`, or float32.
    kernel : str, optional
        Name of the kernel to run, see `mla-cupy list`. Default: the fastest that fits.
    stream : int or stream object, optional
        Where to run. Default: the caller's library's current stream.

    Returns
    -------
    array, (s_q, s_kv)
        Array of the caller's library.

    Raises
    ------
    ShapeError, DTypeError, DeviceError, ArgumentError
        If an argument does not fit; nothing has been launched, and `logits` is untouched.
    UnsupportedDeviceError
        If no kernel fits the GPU.

    Notes
    -----
    A NaN product counts as 0, as max(NaN, 0) does in hardware; NaN in `weights` or `k_scale` reaches the logits. Keys
    that a query does not see never reach its logits, whatever they hold. NumPy arrays are computed on the GPU if there
    is one, else by the NumPy oracle (which writes -inf with `clean=False`, too). Deterministic. With the kernels for
    Hopper and "float32", a logit's bits do not depend on the place of its query and key, and equal the bits of
    `indexer_logits_paged`.

    Tensor cores sum e4m3 products with 13 bits below the largest term, so each term may lose up to 2^-13 of the largest
    term: some 0.1 % of a logit. The CUDA-core fallback adds in float32, and so do all kernels for bfloat16.

    "float16" is a permission that only the kernel for Hopper uses. Calls with many queries and keys take 0.8 of the
    time; calls with few may be slower. The kernel computes products, and sums over a quarter of the heads, in float16,
    with weights scaled so that no sum overflows unless a product does. Logits are off by about 1e-3 of a row's largest,
    less than the error of the quantisation to e4m3. Nothing checks the codes: a product with a part above 65,504
    becomes infinite; +inf makes the logit infinite (or NaN, together with another one), -inf counts as 0 as usual.
    Other kernels add in float32.

    Source: DeepSeek-V3.2-Exp's report and DeepGEMM's fp8_mqa_logits.

    Examples
    --------
    >>> import numpy as np, ml_dtypes, mla_cupy
    >>> q, k = np.ones((2, 4, 32), ml_dtypes.bfloat16), np.ones((3, 32), ml_dtypes.bfloat16)
    >>> mla_cupy.indexer_logits(q, k, np.ones((2, 4), np.float32), ke=np.array([2, 3], np.int32))
    array([[128., 128., -inf],
           [128., 128., 128.]], dtype=float32)
    """
    return call(indexer_logits, locals())


def out_dtypes(first: str) -> tuple[str, ...]:
    """Logits are float32, or rounded to bfloat16."""
    return ("float32", "bfloat16")


def kernel_dtype(name: str) -> str:
    """The kernels' name of a dtype: bytes are e4m3 codes."""
    return CODES[0] if name in CODES else name


def check_sizes(*, heads: int, **counts: int) -> None:
    """Check the number of heads, and numbers that the kernels count in int32.

    Raises
    ------
    ShapeError
    """
    if heads > MAX_HEADS:
        raise ShapeError(explain("q.shape[-2]", f"{heads} heads", f"at most {MAX_HEADS}"))
    for name, count in counts.items():
        if count > MAX_INT32:
            raise ShapeError(explain(name, count, f"at most {MAX_INT32}", "the kernels count in int32"))


def _examine(views: Views, given: LogitsOptions) -> Examined:
    q, k = present(views, "q"), present(views, "k")
    s_q, heads, d = q.shape
    s_kv = k.shape[0]
    check_sizes(heads=heads)
    aligned = steps_by_16_bytes(q) and steps_by_16_bytes(k)
    dtype, accumulate = kernel_dtype(q.dtype), check_accumulate(given.accumulate)
    if accumulate == "float16" and dtype not in CODES:
        remedy = "pass accumulate='float32' for bfloat16"
        raise ArgumentError(explain("accumulate", repr(accumulate), f'"float32" for q of {q.dtype}', remedy))
    problem = LogitsProblem(s_q, s_kv, heads, d, dtype, aligned=aligned, accumulate=accumulate)
    return Examined(problem, given._replace(accumulate=accumulate, clean=check_flag("clean", given.clean)))


OPERATION = Operation(
    "indexer_logits",
    inputs=(
        Input("q", "s_q h d", (CODES[0], "bfloat16", CODES[1]), contiguous=True),
        Input("k", "s_kv d", ("=q",), contiguous=True),
        Input("weights", "s_q h", ("float32",)),
        Input("ks", "s_q", ("int32",), optional=True),
        Input("ke", "s_q", ("int32",), optional=True),
        Input("k_scale", "s_kv", ("float32",), optional=True),
    ),
    outputs=(Output("logits", "s_q s_kv", out_dtypes, "out_dtype", "rows"),),
    sizes=SIZES,
    min_sizes=MIN_SIZES,
    options=LogitsOptions,
    parallel={"s_q": ()},
    examine=_examine,
    pipeline=LOGITS,
)
