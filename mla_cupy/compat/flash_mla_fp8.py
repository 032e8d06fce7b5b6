"""Dense decode in FP8 with the interface of vLLM's build of FlashMLA, for arrays of any library::

    from mla_cupy.compat.flash_mla_fp8 import flash_mla_with_kvcache_fp8, get_mla_metadata_dense_fp8

Both matmuls run in e4m3, by `mla_cupy.mla_decode` with Fp8("fp8"). Sums are added in float32 tile by tile; FlashMLA
leaves them to the tensor cores.
"""

from __future__ import annotations

import sys
from typing import Any

from mla_cupy import arrays
from mla_cupy.arrays import View
from mla_cupy.cache_formats import BYTE_DTYPES
from mla_cupy.compat.flash_mla import EMPTY_LSE, OF_DECODE, check_decode, default_scale
from mla_cupy.compat.flash_mla_schedule import FlashMLASchedMeta, form_of
from mla_cupy.errors import DTypeError, MlaError, ShapeError, explain, renamed
from mla_cupy.ops import Fp8, mla_decode
from mla_cupy.ops.checks import check_flag, is_number

__all__ = ["flash_mla_with_kvcache_fp8", "get_mla_metadata_dense_fp8"]

_NAMES = {**OF_DECODE, "fp8.q_scale": "descale_q", "fp8.kv_scale": "descale_k"}
"""FlashMLA's names of the arguments of `mla_decode`."""


def get_mla_metadata_dense_fp8(
    cache_seqlens: Any = None, num_q_tokens_per_head_k: Any = None, num_heads_k: Any = None
) -> tuple[FlashMLASchedMeta, None]:
    """Return an empty schedule for `flash_mla_with_kvcache_fp8`; the first call fills it.

    Parameters
    ----------
    cache_seqlens, num_q_tokens_per_head_k, num_heads_k
        Ignored.

    Returns
    -------
    FlashMLASchedMeta
    None
        In place of `num_splits`.
    """
    return FlashMLASchedMeta(), None


def flash_mla_with_kvcache_fp8(
    q: Any,
    k_cache: Any,
    block_table: Any,
    cache_seqlens: Any,
    head_dim_v: int,
    tile_scheduler_metadata: FlashMLASchedMeta,
    num_splits: None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    descale_q: Any = None,
    descale_k: Any = None,
) -> tuple[Any, Any]:
    """Decode from a paged cache in e4m3 with one scale, with FP8 matmuls.

    Parameters
    ----------
    q : array, (b, s_q, h_q, 576), float8_e4m3fn or uint8; or bfloat16 or float16
        uint8 holds e4m3 codes. Rows of 16-bit queries are rounded to e4m3, each with its own scale, see
        `mla_cupy.mla_decode`.
    k_cache : array, (num_blocks, page_size, 1, 576), float8_e4m3fn or uint8
        Pages are any multiple of 16 bytes apart.
    block_table : array, (b, max_pages), int32
    cache_seqlens : array, (b,), int32
    head_dim_v : int
        512.
    tile_scheduler_metadata : FlashMLASchedMeta
        From `get_mla_metadata_dense_fp8`.
    num_splits : None
    softmax_scale : float, optional
        Default: 576**-0.5.
    causal : bool
        Query i sees token j iff j <= i + seqlen - s_q.
    descale_q, descale_k : float, or array of one element, float32, optional
        Factors of the queries' and the cache's numbers; 1 by default. The kernel reads arrays of CuPy and PyTorch on a
        GPU. Arrays of other libraries are copied to the host, which synchronises: pass numbers if the call is captured
        in a CUDA graph.

    Returns
    -------
    out : array, (b, s_q, h_q, 512), bfloat16, or dtype of q
    lse : array, (b, h_q, s_q), float32
        +inf for a query that sees nothing; its `out` is 0.

    Raises
    ------
    ShapeError, DTypeError, DeviceError, ArgumentError, PlanError
        If an argument does not fit; nothing has been launched.
    UnsupportedDeviceError
        If the GPU is not a Hopper.

    Examples
    --------
    >>> import numpy as np
    >>> from mla_cupy.compat.flash_mla_fp8 import flash_mla_with_kvcache_fp8, get_mla_metadata_dense_fp8
    >>> q, cache = np.full((2, 1, 16, 576), 0x38, np.uint8), np.full((4, 64, 1, 576), 0x38, np.uint8)  # 1.0
    >>> table, seqlens = np.array([[2, 0], [1, 3]], np.int32), np.array([100, 0], np.int32)
    >>> schedule, _ = get_mla_metadata_dense_fp8()
    >>> out, lse = flash_mla_with_kvcache_fp8(q, cache, table, seqlens, 512, schedule, descale_q=2.0, descale_k=0.5)
    >>> out.dtype.name, float(out[0, 0, 0, 0]), round(float(lse[0, 0, 0]), 3), float(lse[1, 0, 0])
    ('bfloat16', 0.5, 28.605, inf)
    """
    schedule = tile_scheduler_metadata
    try:
        check_decode(schedule, num_splits, head_dim_v)
        causal = check_flag("causal", causal)
        fp8 = Fp8("fp8", _scale_of_queries(q, descale_q), _scale_of_cache(descale_k))
        form = form_of(q, k_cache, block_table, causal, None, True, (None, None), "fp8")
        if form.record != "fp8":
            raise ShapeError(explain("k_cache.shape[-1]", k_cache.shape[-1], "576: e4m3 with one scale for all"))
        schedule.check(form)
        plan = schedule.plan(form, q, k_cache, cache_seqlens)
        results = mla_decode(
            *(q, k_cache, block_table, cache_seqlens),
            scale=default_scale(form) if softmax_scale is None else softmax_scale,
            causal=causal,
            fp8=fp8,
            plan=plan,
            empty_lse=EMPTY_LSE,
        )
        schedule.keep(form, plan)
    except MlaError as error:
        raise renamed(error, _NAMES) from error
    return results


def _scale_of_queries(q: Any, value: Any) -> Any:
    """Return the scale of all queries: the number, or a GPU array for all rows."""
    coded = getattr(q.dtype, "name", str(q.dtype)).removeprefix("torch.") in BYTE_DTYPES
    library = _library_on_gpu("descale_q", value)
    if library is None or not coded:
        return _number("descale_q", value)
    return library.broadcast_to(value.reshape(()), tuple(q.shape[:3]))


def _scale_of_cache(value: Any) -> Any:
    """Return the cache's scale: the number, or a GPU array."""
    return _number("descale_k", value) if _library_on_gpu("descale_k", value) is None else value.reshape(1)


def _library_on_gpu(argument: str, value: Any) -> Any:
    """Return the library of a one-element array on a GPU; None if the array must be copied to the host, or is there.

    Raises
    ------
    DTypeError, ShapeError
    """
    if value is None or is_number(value) or not hasattr(value, "dtype"):
        return None
    family = arrays.family_of(value, argument)
    _check_scale(argument, family.native.view(family.adopt(value), argument))
    library = sys.modules.get(str(type(value).__module__).partition(".")[0])
    return library if family.on_gpu and library is not None and library.__name__ in ("cupy", "torch") else None


def _check_scale(argument: str, view: View) -> None:
    if view.dtype != "float32":
        raise DTypeError(explain(f"{argument}.dtype", view.dtype, "float32"))
    if any(size != 1 for size in view.shape):
        raise ShapeError(explain(f"{argument}.shape", view.shape, "one element"))


def _number(argument: str, value: Any) -> Any:
    """Return a scale as a number; the operation checks its value."""
    if value is None:
        return 1.0
    if is_number(value) or not hasattr(value, "dtype"):
        return value
    family = arrays.family_of(value, argument)
    native, x = family.native, family.adopt(value)
    view = native.view(x, argument)
    return float(native.to_numpy(x, native.current_stream(view.device)).reshape(()))


def __dir__() -> list[str]:
    return __all__
