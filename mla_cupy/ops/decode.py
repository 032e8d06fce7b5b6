"""Dense decode over a paged latent cache."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, NamedTuple

from mla_cupy import arrays
from mla_cupy.arrays import Native, View
from mla_cupy.errors import PlanError, explain
from mla_cupy.launchers.decode_problem import HEAD_DIM_V, DecodeProblem
from mla_cupy.launchers.decode_sequence import DecodePointers, DecodeSizes, check_variant, sequence
from mla_cupy.ops import backend
from mla_cupy.ops.checks import check_empty_lse, check_writable, steps_by_16_bytes
from mla_cupy.ops.decode_checks import check_inputs, check_outputs, check_scalars, check_values
from mla_cupy.ops.decode_plan import DecodePlan

LOG2_E = math.log2(math.e)


def mla_decode(
    q: Any,
    kv_cache: Any,
    block_table: Any,
    seqlens: Any,
    *,
    d_v: int = HEAD_DIM_V,
    scale: float | None = None,
    causal: bool = True,
    plan: DecodePlan | None = None,
    out: Any = None,
    lse: Any = None,
    out_dtype: str | None = None,
    lse_base: str = "e",
    empty_lse: float = -math.inf,
    variant: str | None = None,
    check: bool = False,
    stream: Any = None,
) -> tuple[Any, Any]:
    """Attend from the newest tokens of each sequence to its paged latent cache (absorbed MLA).

    out[i, h] = sum_j softmax_j(scale * q[i, h] . k[j]) * k[j, :512], where j runs over the tokens that query i sees.

    Parameters
    ----------
    q : array, (b, s_q, h_q, 576), bfloat16 or float16
        Absorbed queries. The last axis is contiguous; other strides are free (multiples of 16 bytes are fastest).
    kv_cache : array, (num_pages, page_size, h_kv, 576) or (num_pages, page_size, 576), dtype of q
        The pool of pages; the values are the first 512 elements of the keys. Query head h reads KV head
        h // (h_q // h_kv). Any page size; strides as for q.
    block_table : array, (b, max_pages), int32
        The pages of each sequence. Entries past a sequence's end are never read. A page outside [0, num_pages) is
        missing: its tokens are invisible.
    seqlens : array, (b,), int32
        Tokens of each sequence in the cache, the query tokens included; clamped to [0, max_pages * page_size].
    d_v : int
        Width of the values: 512.
    scale : float, optional
        Factor of the scores: finite, above 0. Default: 576**-0.5.
    causal : bool
        Query i sees token j iff j <= i + seqlen - s_q; if False, it sees all tokens.
    plan : DecodePlan, optional
        From `plan_decode`, updated for these `seqlens`: saves the scheduling and the allocations of a call.
    out : array, (b, s_q, h_q, 512), dtype of q or float32, optional
        Where the result goes. Not for JAX, whose arrays cannot be written.
    lse : array, (b, h_q, s_q), float32, optional
        Where the log-sum-exp goes.
    out_dtype : str, optional
        "float32" for results to be merged; default: the dtype of `out`, or of q.
    lse_base : str
        "e" or "2": base of the logarithm in `lse`.
    empty_lse : float
        `lse` of a row that sees no token; its `out` is 0.
    variant : str, optional
        Name of the kernel to run, see `mla-cupy list`. Default: the fastest that fits.
    check : bool
        Look at the values of `block_table` and `seqlens` first, which synchronises.
    stream : int or stream object, optional
        Where to run. Default: the caller's library's current stream.

    Returns
    -------
    out : array, (b, s_q, h_q, 512)
        Of the caller's library.
    lse : array, (b, h_q, s_q), float32
        log(sum_j exp(scale * q . k[j])), in base `lse_base`.

    Raises
    ------
    ShapeError, DTypeError, DeviceError, ArgumentError, PlanError
        If an argument does not fit; nothing has been launched, and `out` and `lse` are untouched.
    UnsupportedDeviceError
        If no kernel fits the GPU.

    Notes
    -----
    NumPy arrays (and PyTorch tensors on the CPU) are computed on the GPU if there is one, else by the NumPy oracle.
    A NaN or Inf reaches only the rows that see it. The result does not change from run to run; it depends on how the
    batch is split, that is on the other sequences' lengths, within rounding. With a plan, `out` and `lse`, a call
    allocates nothing and can be captured in a CUDA graph. It takes 2 * b * s_q * h_q * seqlen * 1088 FLOPs.

    Examples
    --------
    >>> import numpy as np, mla_cupy
    >>> q = np.ones((1, 1, 16, 576), np.float16)
    >>> cache = np.ones((4, 64, 576), np.float16)
    >>> out, lse = mla_cupy.mla_decode(q, cache, np.array([[2, 0]], np.int32), np.array([100], np.int32))
    >>> out.shape, float(out[0, 0, 0, 0]), round(float(lse[0, 0, 0]), 3)
    ((1, 1, 16, 512), 1.0, 28.605)
    """
    choices = (d_v, scale, causal, out_dtype, lse_base, empty_lse, variant)
    if plan is not None and not isinstance(plan, DecodePlan):
        raise PlanError(explain("plan", repr(plan), "a DecodePlan, from plan_decode"))
    if plan is not None and not check:
        repeated = plan.repeat((q, kv_cache, block_table, seqlens, out, lse), choices, stream)
        if repeated is not None:
            return repeated
    options = _Options(*choices)
    family = arrays.common_family(
        {"q": q, "kv_cache": kv_cache, "block_table": block_table, "seqlens": seqlens, "out": out, "lse": lse}
    )
    check_writable(family, {"out": out, "lse": lse})
    arrays.check_stream(family, stream)
    check_scalars(d_v, scale, lse_base)
    check_empty_lse(empty_lse)
    check_variant(variant)
    arguments = _Arguments(
        *(None if x is None else family.adopt(x) for x in (q, kv_cache, block_table, seqlens, out, lse))
    )
    run = _decode_on_gpu if family.on_gpu else _decode_on_host
    result, result_lse = run(family.native, arguments, options, plan, check, stream)
    return (
        out if out is not None else family.release(result),
        lse if lse is not None else family.release(result_lse),
    )


class _Arguments(NamedTuple):
    """Arrays of a native family."""

    q: Any
    kv_cache: Any
    block_table: Any
    seqlens: Any
    out: Any
    lse: Any


class _Options(NamedTuple):
    """What, with the arrays, decides the result."""

    d_v: int
    scale: float | None
    causal: bool
    out_dtype: str | None
    lse_base: str
    empty_lse: float
    variant: str | None

    def flags(self, out_is_fp32: bool) -> tuple[float, ...]:
        """The end of the kernels' record, from `causal` on."""
        scale = check_scalars(self.d_v, self.scale, self.lse_base)
        lse_factor = math.log(2) if self.lse_base == "e" else 1.0
        return (bool(self.causal), out_is_fp32, scale * LOG2_E, lse_factor, float(self.empty_lse))


class _Checked(NamedTuple):
    """What the checks found out about the arrays."""

    q: View
    kv: View  # with its head axis
    table: View
    seqlens: View
    out: View | None
    lse: View | None
    out_dtype: str
    problem: DecodeProblem
    sizes: DecodeSizes


def _check(native: Native, arguments: _Arguments, options: _Options) -> _Checked:
    view = native.view
    q, table, seqlens = view(arguments.q), view(arguments.block_table), view(arguments.seqlens)
    kv = check_inputs(q, view(arguments.kv_cache), table, seqlens)
    out = None if arguments.out is None else view(arguments.out)
    lse = None if arguments.lse is None else view(arguments.lse)
    out_dtype = check_outputs(q, out, lse, options.out_dtype)
    b, s_q, h_q, _ = q.shape
    num_pages, page_size, h_kv, _ = kv.shape
    aligned = num_pages > 0 and steps_by_16_bytes(q) and steps_by_16_bytes(kv)
    problem = DecodeProblem(s_q, h_q, h_kv, q.dtype, aligned)
    sizes = DecodeSizes(b, num_pages, page_size, table.shape[1])
    return _Checked(q, kv, table, seqlens, out, lse, out_dtype, problem, sizes)


def _decode_on_gpu(
    native: Native, arguments: _Arguments, options: _Options, plan: DecodePlan | None, check: bool, stream: Any
) -> tuple[Any, ...]:
    """Check, allocate what is missing, enqueue."""
    checked = _check(native, arguments, options)
    q, sizes = checked.q, checked.sizes
    device = q.device
    if plan is None:
        kernels = sequence(checked.problem, device, options.variant)
    else:
        kernels = plan.sequence_for(checked.problem, sizes, device, options.variant)
    handle = native.current_stream(device) if stream is None else arrays.stream_handle(stream)
    if check:
        table, seqlens = (native.to_numpy(x, handle) for x in (arguments.block_table, arguments.seqlens))
        check_values(table, seqlens, sizes.num_pages, sizes.page_size)
    kernels.bind(handle)  # what can fail does so before anything is allocated or enqueued

    out, lse, out_view, lse_view = arguments.out, arguments.lse, checked.out, checked.lse
    if out_view is None:
        out = native.empty((*q.shape[:3], HEAD_DIM_V), checked.out_dtype, device, handle)
        out_view = native.view(out)
    if lse_view is None:
        lse = native.empty((sizes.b, q.shape[2], q.shape[1]), "float32", device, handle)
        lse_view = native.view(lse)
    if sizes.b == 0:
        return out, lse
    if plan is None:
        scratch = native.empty((kernels.config.workspace.nbytes,), "uint8", device, handle)  # held to the end
        workspace = native.view(scratch).ptr
        kernels.schedule(checked.seqlens.ptr, checked.seqlens.strides[0], sizes, workspace, handle)
    else:
        workspace = plan.workspace_address
    pointers = DecodePointers(
        q.ptr,
        checked.kv.ptr,
        checked.table.ptr,
        checked.seqlens.ptr,
        out_view.ptr,
        lse_view.ptr,
        q.strides[:3],
        checked.kv.strides[:3],
        checked.table.strides,
        checked.seqlens.strides,
        out_view.strides[:3],
        lse_view.strides,
    )
    prepared = kernels.prepare(pointers, sizes, options.flags(checked.out_dtype == "float32"), workspace, handle)
    prepared.enqueue(pointers[:6], handle)
    if plan is not None:
        plan.remember(native, arguments, checked.out_dtype, tuple(options), prepared)
    return out, lse


def _decode_on_host(
    native: Native, arguments: _Arguments, options: _Options, plan: DecodePlan | None, check: bool, stream: Any
) -> tuple[Any, ...]:
    """NumPy arrays: on the GPU and back, or by the oracle."""
    given = (arguments.out, arguments.lse)
    if not backend.use_gpu():
        return backend.deliver(_decode_by_oracle(native, arguments, options, plan, check), given)
    out_dtype = _check(native, arguments, options).out_dtype
    q, kv_cache, block_table, seqlens = backend.sent(arguments[:4], plan.device if plan else None, stream)
    on_gpu = _Arguments(q, kv_cache, block_table, seqlens, None, None)
    options = options._replace(out_dtype=out_dtype)
    results = _decode_on_gpu(arrays.cupy_family(), on_gpu, options, plan, check, stream)
    return backend.deliver(backend.fetched(results, stream), given)


def _decode_by_oracle(
    native: Native, arguments: _Arguments, options: _Options, plan: DecodePlan | None, check: bool
) -> list[Any]:
    checked = _check(native, arguments, options)
    if plan is not None:
        plan.check_fit(replace(checked.problem, aligned=True), checked.sizes, arrays.HOST)
    if check:
        check_values(arguments.block_table, arguments.seqlens, checked.sizes.num_pages, checked.sizes.page_size)
    results = backend.reference_decode(
        *arguments[:4],
        scale=options.scale,
        causal=options.causal,
        lse_base=options.lse_base,
        empty_lse=options.empty_lse,
    )
    return backend.rounded(results, (checked.out_dtype, "float32"))
