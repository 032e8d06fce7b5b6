"""What the kernels of the sparse backward share on the host: the problem's numbers and the parameter record."""

from __future__ import annotations

from dataclasses import dataclass

from mla_cupy.launchers.spec import Params, Variant

HEAD_DIM_V = 512
HEAD_DIMS_QK = (576, 512)

# The order in which a main kernel keeps the dims of a row of dkv: `attention/sparse_params.cuh`.
DKV_ORDER_PLAIN = 0
DKV_ORDER_SM90 = 1
DKV_ORDER_SM100 = 2

PARAMS = Params(
    q="u8",
    kv="u8",
    dout="u8",
    rows="u8",
    counts="u8",
    lse2="u8",
    delta="u8",
    rounders="u8",
    dq="u8",
    dkv="u8",
    progress="u8",
    q_stride_s_elems="i8",
    q_stride_h_elems="i8",
    kv_stride_s_elems="i8",
    dout_stride_s_elems="i8",
    dout_stride_h_elems="i8",
    dq_stride_s_elems="i8",
    dq_stride_h_elems="i8",
    rows_stride_elems="i8",
    s_q="i4",
    s_kv="i4",
    h_q="i4",
    padding="i4",
    scale="f4",
    scale_log2="f4",
)


@dataclass(frozen=True)
class SparseBackwardVariant(Variant):
    """Of a main kernel. `deterministic` is 1 for additions whose order does not matter."""

    dtype: str
    head_dim_qk: int
    deterministic: int


VARIANTS = tuple(
    SparseBackwardVariant(dtype, head_dim_qk, deterministic)
    for dtype in ("bfloat16", "float16")
    for head_dim_qk in HEAD_DIMS_QK
    for deterministic in (0, 1)
)
CORE = (SparseBackwardVariant("bfloat16", 576, 0),)


@dataclass(frozen=True)
class SparseBackwardProblem:
    """What decides which kernels run and how: no pointers, no device.

    `aligned` says that q, kv, dout and dq start at, and step by, multiples of 16 bytes.
    """

    s_q: int
    s_kv: int
    h_q: int
    topk: int
    d_qk: int
    dtype: str
    has_sink: bool = False
    deterministic: bool = False
    aligned: bool = True


def plain_variant(problem: SparseBackwardProblem) -> SparseBackwardVariant:
    """The build of a main kernel that has no other choices."""
    return SparseBackwardVariant(problem.dtype, problem.d_qk, int(problem.deterministic))
