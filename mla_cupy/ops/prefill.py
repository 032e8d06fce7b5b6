"""Dense attention with keys and values per head, un-absorbed: prefill and training."""

from __future__ import annotations

from typing import Any

from mla_cupy.cache_formats import BYTE_DTYPES
from mla_cupy.errors import ShapeError, explain
from mla_cupy.kernels.dense import DENSE
from mla_cupy.kernels.dense.problem import FP8_GEOMETRY, MASK_ROW_BYTES, DenseProblem, PrefillOptions
from mla_cupy.ops import combinations
from mla_cupy.ops.call import call
from mla_cupy.ops.checks import STARTS, check_all_or_none, check_flag, check_scale_values, resolve_scale
from mla_cupy.ops.groups import Packed
from mla_cupy.ops.operation import Arrays, Examined, Input, Operation, Output, Views, like_first_or_wider, present
from mla_cupy.ops.prefill_inputs import (
    MIN_SIZES,
    QKV_OR_CODES,
    ROPES,
    SIZES,
    WIDTHS,
    Sizes,
    aligned,
    check_prefill_values,
    check_sizes,
)

SCALES = ("q_scales", "k_scales", "v_scales")
"""Names of the scales of e4m3 codes."""


def mla_prefill(
    q: Any,
    k: Any,
    v: Any,
    *,
    q_rope: Any = None,
    k_rope: Any = None,
    packed: Packed | None = None,
    state_out: Any = None,
    state_lse: Any = None,
    mask: Any = None,
    q_scales: Any = None,
    k_scales: Any = None,
    v_scales: Any = None,
    causal: bool = True,
    scale: float | None = None,
    out: Any = None,
    lse: Any = None,
    workspace: Any = None,
    out_dtype: Any = None,
    kernel: str | None = None,
    stream: Any = None,
) -> tuple[Any, Any]:
    """Attend from the queries of each sequence to its keys, with keys and values per head (un-absorbed MLA).

    out[i, h] = sum_j softmax_j(scale * q[i, h] . k[j, g]) * v[j, g], where g = h * h_kv // h_q is the KV head of h, and
    j runs over the keys of query i's sequence that the query sees.

    Parameters
    ----------
    q : array, (s_q, h_q, d_qk), bfloat16 or float16; or float8_e4m3fn or uint8
        Queries. With `q_rope`, all columns except the last 64. (d_qk, d_v) is (192, 128), (256, 256) or (128, 128). The
        last axis is contiguous; other strides are free (multiples of 16 bytes are fast, on Hopper). The same holds for
        `q_rope`, `k`, `k_rope` and `v`. With e4m3 queries all of these are e4m3, (d_qk, d_v) is (192, 128), and
        `state_out` and `mask` are not supported. uint8 holds e4m3 codes, for libraries without that dtype.
    k : array, (s_kv, h_kv, d_qk), dtype of q
        Keys. With `k_rope`, all columns except the last 64. h_q is a multiple of h_kv.
    v : array, (s_kv, h_kv, d_v), dtype of q
        Values. Keys and values may be views of one array, such as a projection's (s_kv, h_kv, 128 + 128).
    q_rope : array, (s_q, h_q, 64), dtype of q, optional
        Last 64 columns of the queries.
    k_rope : array, (s_kv, 64), (s_kv, 1, 64) or (s_kv, h_kv, 64), dtype of q, optional
        Last 64 columns of the keys: shared by all heads, or per KV head.
    packed : Packed, optional
        Starts of several sequences, both `cu_seqlens_q` and `cu_seqlens_kv`. Default: one sequence. The kernels read
        them on the device, clamp them to [0, s_q] and [0, s_kv], and raise a start below its predecessor to it. A query
        outside all sequences sees no key.
    state_out : array, (s_q, h_q, d_v), dtype of q or float32, optional
        The attention of the same queries to other keys, such as an earlier chunk. The result is the attention to all
        keys. It may be `out` itself.
    state_lse : array, (s_q, h_q), float32, optional
        Log-sum-exps of `state_out`. Both infinities mean that the query saw no key; its `state_out` is then not read.
        It may be `lse` itself.
    mask : array, (s_q, mask_bytes), uint8, optional
        Keys of its sequence that each query sees, in all heads, on top of `causal`: bit j % 8 (0 is the lowest) of byte
        j // 8 is 1 for key j, counted from the sequence's first key. `prefill_mask` makes one from indices; so does
        `numpy.packbits(seen, axis=1, bitorder="little")`, for a multiple of 128 keys. Rows start at, step by, and have
        multiples of 16 bytes. Keys beyond 8 * mask_bytes are hidden; without `packed` the mask must cover all keys.
    q_scales, k_scales, v_scales : array, (b, h_kv), float32, optional
        For e4m3: factors of the numbers of each sequence and KV head, finite, at least 0; q_scales[n, g] applies to all
        query heads of KV head g. Any strides, so a broadcast number will do. b is 1 without `packed`. Default: 1.
    causal : bool
        Hide the keys after a query's own position, the queries being the last of their sequence: query i of n sees the
        first s - n + i + 1 of its s keys.
    scale : float, optional
        Factor of the scores: finite, above 0. Default: d_qk**-0.5.
    out : array, (s_q, h_q, d_v), dtype of q (of e4m3: bfloat16 or float16) or float32, optional
        Memory for the result. Not for JAX, whose arrays cannot be written.
    lse : array, (s_q, h_q), float32, optional
        Memory for the log-sum-exp; any strides.
    workspace : array, (n,), uint8, optional
        Memory for the call, 256-byte aligned, of at least `workspace_bytes(mla_prefill, ...)` bytes.
    out_dtype : str or dtype, optional
        "float32" for results to be merged; for e4m3 any of the three. Default: the dtype of `out`, or of q, or bfloat16
        for e4m3.
    kernel : str, optional
        Name of the attention kernel to run, see `mla-cupy list`. Default: the fastest that fits.
    stream : int or stream object, optional
        Where to run. Default: the caller's library's current stream.

    Returns
    -------
    out : array, (s_q, h_q, d_v)
        Array of the caller's library; 0 for a query without a key.
    lse : array, (s_q, h_q), float32
        log(sum_j exp(scale * q . k[j])), natural; -inf for a query without a key.

    Raises
    ------
    ShapeError, DTypeError, DeviceError, ArgumentError
        If an argument does not fit; nothing has been launched, and `out` and `lse` are untouched.
    UnsupportedDeviceError
        If no kernel fits the GPU.

    Notes
    -----
    NumPy arrays (and PyTorch tensors on the CPU) are computed on the GPU if there is one, else by the NumPy oracle.

    Nothing is copied or concatenated. Keys and values that a query does not see never reach its result, whatever they
    contain: NaN or Inf in later or masked keys and values, or in another sequence. The result does not change from run
    to run. Workspace: 32 bytes per 128 queries and per sequence, and 28 more per sequence. A call takes 2 * h_q * (d_qk
    + d_v) FLOPs per query and key that it sees; keys that only a mask hides count as well.

    `out` has a contiguous last axis; its start and other strides are multiples of 16 bytes.

    Weights are rounded to 16 bits for the product with the values, and `out` is divided by the sum of the weights
    before rounding: where keys have equal scores, all of `out` may have one common relative error, up to 2^-8 in
    bfloat16, 2^-11 in float16. The CUDA-core fallback does not round weights.

    For e4m3 the products of the CUDA-core fallback are exact. Hopper's kernel multiplies in e4m3: the weights of each
    128 keys, counted from the sequence's first, are rounded to e4m3, the largest one being 256, so weights below 2^-18
    of it become 0. `out` is divided by the sum of the rounded weights; `lse` uses the weights before rounding. Tensor
    cores lose low bits of sums of e4m3 products: each term may lose 2^-13 of the largest term, so no sum is longer than
    192 columns or 64 keys. A score loses 0.02 % of the sum of its terms' magnitudes where their signs mix, and up to
    0.3 % where they have one sign, so scores in the thousands are off by up to tens. NaN codes, 0x7F and 0xFF, reach no
    query that does not see them. There is no gradient.

    Examples
    --------
    >>> import numpy as np, mla_cupy
    >>> q = np.ones((3, 4, 192), np.float16)
    >>> kv = np.ones((3, 4, 256), np.float16)  # of a projection
    >>> k_rope = np.ones((3, 64), np.float16)
    >>> out, lse = mla_cupy.mla_prefill(q, kv[..., :128], kv[..., 128:], k_rope=k_rope)
    >>> out.shape, float(out[0, 0, 0]), [round(float(x), 3) for x in lse[:, 0]]
    ((3, 4, 128), 1.0, [13.856, 14.55, 14.955])
    """
    return call(mla_prefill, locals())


def _examine(views: Views, given: PrefillOptions) -> Examined:
    sizes = check_sizes(views)
    check_all_or_none(views, "state_out", "state_lse", expected="an array, as its counterpart")
    _check_mask(views)
    _check_codes(views, sizes)
    problem = DenseProblem(*sizes, aligned=aligned(views, "state_out"), masked=views["mask"] is not None)
    options = given._replace(causal=check_flag("causal", given.causal), scale=resolve_scale(given.scale, sizes.d_qk))
    return Examined(problem, options)


def _check_codes(views: Views, sizes: Sizes) -> None:
    """Check the arguments that only e4m3 codes support, and those that they do not support."""
    dtype, scales = present(views, "q").dtype, [name for name in SCALES if views[name] is not None]
    coded = {"codes" if dtype in BYTE_DTYPES else "half": dtype}
    combinations.check(combinations.PREFILL, coded | combinations.given(views, *SCALES, "state_out", "mask"))
    if dtype not in BYTE_DTYPES:
        return
    if (sizes.d_qk, sizes.d_v) != FP8_GEOMETRY:
        given = sizes.d_qk, sizes.d_v
        remedy = "convert to bfloat16"
        raise ShapeError(explain("q.shape[-1], v.shape[-1]", given, f"{FP8_GEOMETRY} for queries in {dtype}", remedy))
    for name in scales:
        count = present(views, name).shape[0]
        if count != sizes.sequences:
            remedy = "pass one row per sequence"
            raise ShapeError(explain(f"{name}.shape[0]", count, f"b={sizes.sequences}, as in cu_seqlens_q", remedy))


def _check_values(arrays: Arrays, options: PrefillOptions) -> None:
    check_prefill_values(arrays, options)
    check_scale_values(arrays, SCALES, zero=True)


def _check_mask(views: Views) -> None:
    mask = views["mask"]
    if mask is None:
        return
    s_kv = present(views, "k").shape[0]
    if mask.shape[1] % MASK_ROW_BYTES:
        rule = f"a multiple of {MASK_ROW_BYTES} bytes"
        raise ShapeError(explain("mask.shape[1]", mask.shape[1], rule, "pad its rows to a multiple of 128 keys"))
    if views["cu_seqlens_kv"] is None and 8 * mask.shape[1] < s_kv:
        expected = f"at least {-(-s_kv // 8)} bytes"
        raise ShapeError(explain("mask.shape[1]", mask.shape[1], expected, f"give each of {s_kv} keys a bit"))


OPERATION = Operation(
    "mla_prefill",
    inputs=(
        *QKV_OR_CODES,
        *ROPES,
        *STARTS,
        Input("state_out", "s_q h_q d_v", ("=q", "float32"), optional=True, contiguous=True),
        Input("state_lse", "s_q h_q", ("float32",), optional=True),
        Input("mask", "s_q mask_bytes", ("uint8",), optional=True, wide=True),
        *(Input(name, "b h_kv", ("float32",), optional=True) for name in SCALES),
    ),
    outputs=(
        Output("out", "s_q h_q d_v", like_first_or_wider, "out_dtype", "wide", may_be="state_out"),
        Output("lse", "s_q h_q", may_be="state_lse"),
    ),
    sizes=SIZES,
    widths=WIDTHS,
    min_sizes={**MIN_SIZES, "mask_bytes": 1},
    options=PrefillOptions,
    parallel={"h_q": ("h_kv?", "h_rope?")},
    examine=_examine,
    derivative="reverse",
    check_values=_check_values,
    pipeline=DENSE,
    groups={"packed": Packed},
)
