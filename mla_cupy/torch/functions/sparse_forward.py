"""Functions of `mla_cupy.ops.sparse_forward` for PyTorch's tensors.

Written by `python -m tests.generate` from the records there.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from mla_cupy.ops.call import Invocation, run
from mla_cupy.ops.sparse_forward import OPERATION
from mla_cupy.torch.call import call
from mla_cupy.torch.gradients.sparse_forward import transformed
from mla_cupy.torch.library import is_plain_call
from mla_cupy.torch.operators import SPARSE_MLA_FORWARD


def sparse_mla_forward(
    q: torch.Tensor,
    kv: torch.Tensor,
    indices: torch.Tensor,
    *,
    d_v: int = 512,
    scale: float | None = None,
    topk_length: torch.Tensor | None = None,
    attn_sink: torch.Tensor | None = None,
    causal: bool = False,
    relative: bool = True,
    cu_seqlens_q: torch.Tensor | None = None,
    cu_seqlens_kv: torch.Tensor | None = None,
    kv_scale: float = 1,
    math: str = "exact",
    lse_base: str = "e",
    empty_lse: float = -math.inf,
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
    max_logits: torch.Tensor | None = None,
    workspace: torch.Tensor | None = None,
    out_dtype: Any = None,
    kernel: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Attend from each query to the rows of a latent cache that its indices select (absorbed MLA).

    out[i, h] = w[i, h] * sum_j softmax_j(scale * q[i, h] . kv[j]) * kv[j, :512], where j runs over the rows that
    query i selects, and w[i, h] = 1 / (1 + exp(attn_sink[h] - lse[i, h])); without a sink, w is 1.

    For tensors of PyTorch: the notes of `mla_cupy.sparse_mla_forward` hold here, too.

    Parameters
    ----------
    q : tensor, (s_q, h_q, d_qk), bfloat16 or float16
        Absorbed queries, d_qk 576 or 512. The last axis is contiguous; other strides are free (multiples of 16 bytes
        are fastest).
    kv : tensor, (s_kv, d_qk) or (s_kv, 1, d_qk), dtype of q; or (num_pages, page_size, width), uint8
        Latents; the values are the first 512 elements of the keys. Strides as for q. Or the pages of an FP8 record, see
        `cache_append`: a width of 656 is "v32", whose d_qk is 576, one of 584 "v4", whose d_qk is 512 and whose values
        include the RoPE part; one of 576 is "fp8", with math="fp8" only. Its rows are slots, page * page_size + token;
        tokens of 656 or 576 bytes need no pages, (s_kv, 656). Pages of records start at, and step by, multiples of 16
        bytes: pages of "v4" with an odd number of tokens need a gap of 8 bytes between them.
    indices : tensor, (s_q, topk) or (s_q, 1, topk), int32
        The rows of each query, in any order, counted from the start of its sequence: see `relative`. Any topk, any
        strides. A slot counts if 0 <= index < limit; all others are skipped, -1 being the usual mark. The limit is the
        sequence's length in kv. Duplicates are counted as often as they occur.
    d_v : int
        Width of the values: 512.
    scale : float, optional
        Factor of the scores: finite, above 0. Default: d_qk**-0.5.
    topk_length : tensor, (s_q,), int32, optional
        Only the first topk_length[i] slots of query i are read; clamped to [0, topk].
    attn_sink : tensor, (h_q,), float32, optional
        Logits of a key without a value: see w above. -inf has no effect, +inf makes `out` 0.
    causal : bool
        Lower the limit of each query by the number of queries of its sequence that come after it: of as many queries as
        rows, query i sees rows 0 to i.
    relative : bool
        With `cu_seqlens_kv`: True if indices count from the first row of the query's sequence, False if they are row
        numbers of kv, as in cuDNN and Megatron. A row of another sequence is then skipped. Pass the same as to
        `indexer_select` or `indexer_topk`, whose default is False.
    cu_seqlens_q, cu_seqlens_kv : tensor, (b + 1,), int32, optional
        Sequence n has the queries from cu_seqlens_q[n] to cu_seqlens_q[n + 1] and the rows from cu_seqlens_kv[n] to
        cu_seqlens_kv[n + 1]. A query of no sequence has no row; a query of several belongs to the first. Values of
        cu_seqlens_kv are clamped to [0, s_kv], and a sequence that ends before it starts is empty. Both or none;
        default: one sequence.
    kv_scale : float
        Scale of the record "fp8": keys and values are its codes times this. Finite, above 0; 1 for all others.
    math : str
        Arithmetic of both products: "exact", of 16-bit elements, or "fp8" for the record "fp8", on the FP8 tensor cores
        of Hopper: queries and weights are rounded to e4m3, see the notes of `mla_decode`.
    lse_base : str
        "e" or "2": base of the logarithm in `lse`.
    empty_lse : float
        `lse` of a query without a row; its `out` is 0, its `max_logits` -inf.
    out : tensor, (s_q, h_q, 512), dtype of q or float32, optional
        Memory for the result: a contiguous last axis, a start and other strides that are multiples of 16 bytes.
    lse, max_logits : tensor, (s_q, h_q), float32, optional
        Memory for these results; any strides.
    workspace : tensor, (n,), uint8, optional
        Memory for the call, 256-byte aligned, of at least `workspace_bytes(sparse_mla_forward, ...)` bytes.
    out_dtype : str or dtype, optional
        "float32" for results to be merged; default: the dtype of `out`, or of q.
    kernel : str, optional
        Name of the attention kernel to run, see `mla-cupy list`. Default: the fastest that fits.

    Returns
    -------
    out : tensor, (s_q, h_q, 512)
        Array of the caller's library.
    lse : tensor, (s_q, h_q), float32
        log(sum_j exp(scale * q . kv[j])), in base `lse_base`, without the sink. The backward takes it.
    max_logits : tensor, (s_q, h_q), float32
        max_j scale * q . kv[j].

    Raises
    ------
    ShapeError, DTypeError, DeviceError, ArgumentError
        If an argument does not fit; nothing has been launched, and `out`, `lse` and `max_logits` are untouched.
    UnsupportedDeviceError
        If no kernel fits the GPU.

    Notes
    -----
    `out` and `lse` are differentiable with respect to `q`, `kv` and `attn_sink`, unless tensors for them are given;
    `max_logits` has no gradient. The gradients are deterministic under `torch.use_deterministic_algorithms(True)`.
    Tensors for the results are given all or none. A `workspace` is for calls with tensors for the results.

    Examples
    --------
    >>> import torch
    >>> import mla_cupy.torch as mla
    >>> q, kv = torch.ones(2, 16, 576).bfloat16(), torch.ones(100, 576).bfloat16().requires_grad_()
    >>> indices = torch.tensor([[3, 70, -1], [5, -1, -1]], dtype=torch.int32)
    >>> out, lse, max_logits = mla.sparse_mla_forward(q, kv, indices)
    >>> out.sum().backward()
    >>> float(kv.grad[3, 0]), float(kv.grad[5, 0]), float(kv.grad[4, 0])
    (8.0, 16.0, 0.0)
    """
    arrays = (q, kv, indices, topk_length, attn_sink, cu_seqlens_q, cu_seqlens_kv, out, lse, max_logits)
    options = (d_v, scale, causal, relative, kv_scale, math, lse_base, empty_lse, out_dtype, kernel)
    if is_plain_call(arrays) and not torch.is_grad_enabled() and (out is None) is (lse is None) is (max_logits is None):
        out, lse, max_logits = run(Invocation(OPERATION, arrays, options, workspace))
    else:
        out, lse, max_logits = call(SPARSE_MLA_FORWARD, arrays, options, workspace, gradient=transformed)
    return out, lse, max_logits
