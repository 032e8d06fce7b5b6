"""Dense attention with keys and values per head, backward."""

from __future__ import annotations

from typing import Any

from mla_cupy.kernels.dense import DENSE_BACKWARD
from mla_cupy.kernels.dense.problem import DenseBackwardProblem, PrefillBackwardOptions
from mla_cupy.ops.call import call
from mla_cupy.ops.checks import STARTS, check_flag, resolve_scale
from mla_cupy.ops.groups import Packed
from mla_cupy.ops.operation import Examined, Input, Operation, Output, Views, only_like_first
from mla_cupy.ops.prefill_inputs import MIN_SIZES, QKV, ROPES, SIZES, WIDTHS, aligned, check_prefill_values, check_sizes


def mla_prefill_backward(
    q: Any,
    k: Any,
    v: Any,
    out: Any,
    dout: Any,
    lse: Any,
    *,
    q_rope: Any = None,
    k_rope: Any = None,
    dlse: Any = None,
    packed: Packed | None = None,
    causal: bool = True,
    scale: float | None = None,
    deterministic: bool = False,
    dq: Any = None,
    dk: Any = None,
    dv: Any = None,
    dq_rope: Any = None,
    dk_rope: Any = None,
    workspace: Any = None,
    kernel: str | None = None,
    stream: Any = None,
) -> tuple[Any, Any, Any, Any, Any]:
    """Compute the gradients of `mla_prefill` with respect to queries, keys and values.

    With P = exp(scale * q . k - lse), dP = dout . v, delta = sum(out * dout) - dlse and dS = scale * P * (dP - delta):

    dq = dS k,   dk = dS^T q,   dv = P^T dout

    summed over the query heads of a KV head; the keys' last columns also over the heads that share them.

    Parameters
    ----------
    q, k, v, q_rope, k_rope, packed, causal, scale
        As for the forward.
    out : array, (s_q, h_q, d_v), dtype of q or float32
        As the forward returned it. `out` and `lse` may also belong to attention over more keys than these, such as the
        merged result of all chunks: the results are then the gradients of this chunk's keys and values, and its share
        of dq.
    dout : array, (s_q, h_q, d_v), dtype of q
        Gradient with respect to `out`. The last axes of both are contiguous.
    lse : array, (s_q, h_q), float32
        As the forward returned it, or merged. Both infinities mark a query without a key: it has no gradient and
        contributes none. The same holds for a query with an lse of 1.2e7 or more in magnitude: float32 no longer
        resolves its weights.
    dlse : array, (s_q, h_q), float32, optional
        Gradient with respect to `lse`, for a loss on `lse` or for a merge outside.
    deterministic : bool
        Make all results bitwise reproducible: see the notes.
    dq : array, shape and dtype of q, optional
        Memory for the gradient: a contiguous last axis, other strides in multiples of 16 bytes. Not for JAX, whose
        arrays cannot be written.
    dk, dv, dq_rope, dk_rope : array, shapes of k, v, q_rope and k_rope, dtype of q, optional
        Likewise for these. `dk` and `dv` may be views of one array, such as the gradient of a projection's (s_kv, h_kv,
        128 + 128).
    workspace : array, (n,), uint8, optional
        Memory for the call, 256-byte aligned, of at least `workspace_bytes(mla_prefill_backward, ...)` bytes.
    kernel : str, optional
        Name of the kernel for the gradients of keys, see `mla-cupy list`. Default: the fastest that fits.
    stream : int or stream object, optional
        Where to run. Default: the caller's library's current stream.

    Returns
    -------
    dq : array, shape and dtype of q
        Array of the caller's library; 0 for a query without a key.
    dk, dv : array, shapes of k and v
        0 for a key that no query sees.
    dq_rope, dk_rope : array, shapes of q_rope and k_rope, or None
        None without `q_rope` or `k_rope`.

    Raises
    ------
    ShapeError, DTypeError, DeviceError, ArgumentError
        If an argument does not fit; nothing has been launched, and the results' memory is untouched.
    UnsupportedDeviceError
        If no kernel fits the GPU.

    Notes
    -----
    NumPy arrays (and PyTorch tensors on the CPU) are computed on the GPU if there is one, else by the NumPy oracle.

    Nothing is copied or concatenated. A query and the keys that it does not see have no influence on each other's
    gradients, whatever they contain. If `lse` is infinite for a query that sees keys, its q and dout must be finite.

    `dk`, `dv` and, per head, `dk_rope` are the same in every run. `dq` and a `dk_rope` that heads share are accumulated
    in float32, in an order that varies, so their last bits may differ from run to run before they are rounded.
    `deterministic=True` sums them in one order: 1.38 times the FLOPs for (192, 128), but neither atomic additions nor
    sums of dq in memory. The CUDA-core fallback is always deterministic.

    On Hopper, P and dS / scale are rounded to the dtype of q for the products. In float16 magnitudes below 3e-8 become
    0, and a dS / scale above 65,504 becomes infinite: scale the loss, or use bfloat16. The CUDA-core fallback computes
    in float32.

    Workspace: 8 bytes per head and row, with a row per query, up to 15 more per sequence, and 128; 4 * d_qk bytes more
    per head and row if not deterministic; for a shared dk_rope 256 bytes per key, or 256 * h_kv if deterministic; and
    the forward's tile lists, for queries and keys. A call takes 2 * h_q * (3 * d_qk + 2 * d_v) FLOPs per query and key
    that it sees.

    Examples
    --------
    >>> import numpy as np, mla_cupy
    >>> q = np.ones((3, 4, 192), np.float16)
    >>> kv = np.ones((3, 4, 256), np.float16)  # of a projection
    >>> k_rope = np.ones((3, 64), np.float16)
    >>> k, v = kv[..., :128], kv[..., 128:]
    >>> out, lse = mla_cupy.mla_prefill(q, k, v, k_rope=k_rope)
    >>> dkv = np.empty_like(kv)
    >>> gradients = {"dk": dkv[..., :128], "dv": dkv[..., 128:]}
    >>> _ = mla_cupy.mla_prefill_backward(q, k, v, out, np.ones_like(out), lse, k_rope=k_rope, **gradients)
    >>> [round(float(x), 2) for x in dkv[:, 0, -1]]  # one by the first query, a half by the second, a third by the last
    [1.83, 0.83, 0.33]
    """
    return call(mla_prefill_backward, locals())


def _examine(views: Views, given: PrefillBackwardOptions) -> Examined:
    sizes = check_sizes(views)
    options = given._replace(
        causal=check_flag("causal", given.causal),
        scale=resolve_scale(given.scale, sizes.d_qk),
        deterministic=check_flag("deterministic", given.deterministic),
    )
    k_rope = views["k_rope"]
    problem = DenseBackwardProblem(
        *sizes,
        aligned=aligned(views, "dout"),
        deterministic=options.deterministic,
        shared_rope=k_rope is not None and k_rope.shape[1] < sizes.h_kv,
    )
    return Examined(problem, options)


OPERATION = Operation(
    "mla_prefill_backward",
    inputs=(
        *QKV,
        Input("out", "s_q h_q d_v", ("=q", "float32"), contiguous=True),
        Input("dout", "s_q h_q d_v", ("=q",), contiguous=True),
        Input("lse", "s_q h_q", ("float32",)),
        *ROPES,
        Input("dlse", "s_q h_q", ("float32",), optional=True),
        *STARTS,
    ),
    outputs=(
        Output("dq", "s_q h_q d_q", only_like_first, layout="wide"),
        Output("dk", "s_kv h_kv d_k", only_like_first, layout="wide"),
        Output("dv", "s_kv h_kv d_v", only_like_first, layout="wide"),
        Output("dq_rope", "s_q h_q d_rope", only_like_first, layout="wide", needs="q_rope"),
        Output("dk_rope", "s_kv h_rope d_rope", only_like_first, layout="wide", like="k_rope", needs="k_rope"),
    ),
    sizes=SIZES,
    widths=WIDTHS,
    min_sizes=MIN_SIZES,
    options=PrefillBackwardOptions,
    parallel={"h_q": ("h_kv?", "h_rope?")},
    examine=_examine,
    check_values=check_prefill_values,
    pipeline=DENSE_BACKWARD,
    groups={"packed": Packed},
)
