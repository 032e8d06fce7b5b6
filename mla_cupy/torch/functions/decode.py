"""Functions of `mla_cupy.ops.decode` for PyTorch's tensors.

Written by `python -m tests.generate` from the records there.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from mla_cupy.ops.call import Invocation, run
from mla_cupy.ops.decode import OPERATION
from mla_cupy.torch.call import call
from mla_cupy.torch.library import is_plain_call
from mla_cupy.torch.operators import MLA_DECODE
from mla_cupy.torch.plan import TorchDecodePlan, call_planned, plan_of


def mla_decode(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    block_table: torch.Tensor,
    seqlens: torch.Tensor,
    *,
    q_rope: torch.Tensor | None = None,
    cu_seqlens_q: torch.Tensor | None = None,
    tree_mask: torch.Tensor | None = None,
    attn_sink: torch.Tensor | None = None,
    out_cos: torch.Tensor | None = None,
    out_sin: torch.Tensor | None = None,
    out_positions: torch.Tensor | None = None,
    w_uv: torch.Tensor | None = None,
    gate: torch.Tensor | None = None,
    q_scales: torch.Tensor | None = None,
    kv_scales: torch.Tensor | None = None,
    d_v: int = 512,
    scale: float | None = None,
    causal: bool = True,
    window: int | None = None,
    max_seqlen_q: int | None = None,
    cp_world: int = 1,
    cp_rank: int = 0,
    kv_scale: float = 1,
    q_scale: float = 1,
    math: str = "exact",
    plan: TorchDecodePlan | None = None,
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
    workspace: torch.Tensor | None = None,
    out_dtype: Any = None,
    lse_base: str = "e",
    empty_lse: float = -math.inf,
    kernel: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend from the newest tokens of each sequence to its paged latent cache (absorbed MLA).

    out[i, h] = sum_j softmax_j(scale * q[i, h] . k[j]) * k[j, :512], where j runs over the tokens that query i sees.

    For tensors of PyTorch: the notes of `mla_cupy.mla_decode` hold here, too.

    Parameters
    ----------
    q : tensor, (b, s_q, h_q, d_qk), bfloat16 or float16; or float8_e4m3fn or uint8
        Absorbed queries; d_qk is 576, or 512 where keys have no RoPE part; or 320 (Mistral Small 4) or 288 (MiniCPM3),
        of which 256 are the latent. With `q_rope`, their first 512 columns. With `cu_seqlens_q` those of all sequences,
        (total_q, h_q, d_qk). The last axis is contiguous; other strides are free (multiples of 16 bytes are fastest).
        In e4m3 with math="fp8" or "fp8x2" only; uint8 holds e4m3 codes, for libraries without that dtype.
    kv_cache : tensor, (num_pages, page_size, d_qk), dtype of q; or uint8
        The pool of pages, which all query heads read; the values are the first `d_v` elements of the keys. Any page
        size; strides as for q. An axis for the one KV head may stand on either side of the tokens: (num_pages,
        page_size, 1, d_qk), or FlashInfer's (num_pages, 1, page_size, d_qk). Or the pages of an FP8 record, see
        `cache_append`: (num_pages, page_size, 656) for "v32", whose d_qk is 576, or (num_pages, page_size, 584) for
        "v4", whose d_qk is 512 and whose values include the RoPE part, or (num_pages, page_size, 528) for "v41", of
        which the same is true, or (num_pages, page_size, 576) for "fp8", with one scale for all. Pages of records start
        at, and step by, multiples of 16 bytes: pages of "v4" with an odd number of tokens need a gap of 8 bytes between
        them.
    block_table : tensor, (b, max_pages), int32
        The pages of each sequence. Entries past a sequence's end are never read. A page outside [0, num_pages) is
        missing: its tokens are invisible.
    seqlens : tensor, (b,), int32
        Tokens of each sequence in the cache, the query tokens included; clamped to [0, max_pages * page_size * cp_world
        + cp_rank].
    q_rope : tensor, (b, s_q, h_q, 64), dtype of q, optional
        The queries' last 64 columns, those of RoPE, where they are a tensor of their own; (total_q, h_q, 64) with
        `cu_seqlens_q`. Strides as for q.
    cu_seqlens_q : tensor, (b + 1,), int32, optional
        Queries of varying length: sequence n has those from cu_seqlens_q[n] to cu_seqlens_q[n + 1], its last tokens.
        Read on the device: clamped to [0, total_q], and one below its predecessor is raised to it. Queries of no
        sequence see no token. Without a `tree_mask` or context parallelism.
    tree_mask : tensor, (b, s_q), uint64 or int64, optional
        For sequences whose last s_q tokens are drafts that form a tree, to be verified in one call: query i sees every
        token before the drafts, and draft j iff bit j of tree_mask[b, i] is set. This takes the place of `causal`. Up
        to 64 drafts; bits from s_q on are ignored. In a sequence of n < s_q tokens these are its last n drafts: token t
        is draft s_q - n + t, and bits of drafts before the sequence's first token have no effect.
    attn_sink : tensor, (h_q,), float32, optional
        Logits of a key without a value, which only lowers `out`, not `lse`. -inf has no effect, +inf makes `out` 0.
    out_cos, out_sin : tensor, (max_position, 32), float32, optional
        Turn the last 64 columns of `out` back, as DeepSeek-V4 does, whose values include the key's RoPE part: a pair
        (x, y) of neighbouring columns becomes (x * cos + y * sin, y * cos - x * sin). With a d_qk of 512. The last axis
        is contiguous.
    out_positions : tensor, (b, s_q), int32 or int64, optional
        The queries' rows of these, clamped to them; (total_q,) with `cu_seqlens_q`. Given with these, or not at all.
    w_uv : tensor, (h_q, d_head, 512), bfloat16 or float16, optional
        The values' half of kv_b_proj, as it lies in the weights: `kv_b_proj.reshape(h_q, -1, 512)[:, d_nope:]`. Results
        are then multiplied by it, out[.., h, d] = sum_c out[.., h, c] * w_uv[h, d, c], where they are merged, or after.
        Of the dtype that `out` has without it; d_head is 64, 128, 192 or 256. A contiguous last axis, a start and other
        strides that are multiples of 16 bytes. Not with `cu_seqlens_q` or a `window`.
    gate : tensor, (b, s_q, h_q, d_head), dtype of w_uv, optional
        Its sigmoid is a factor of each element of the result of `w_uv`. Strides as for w_uv.
    q_scales : tensor, (b, s_q, h_q), float32, optional
        In place of `q_scale`, for queries in e4m3: a scale for each row, such as `mla_prepare` makes, finite and above
        0; any strides, so that one number may serve all rows. (total_q, h_q) with `cu_seqlens_q`.
    kv_scales : tensor, (1,), float32, optional
        In place of `kv_scale`, with math="fp8" or "fp8x2": the number on the device, finite and above 0, where it may
        change between replays of a CUDA graph.
    d_v : int
        Width of the values: 512, or 256 of keys that are 320 or 288 wide. Those are of 16 bits, without `w_uv`,
        `q_rope`, `cu_seqlens_q`, `window` or a batch-invariant plan.
    scale : float, optional
        Factor of the scores: finite, above 0. Default: d_qk**-0.5.
    causal : bool
        Query i sees token j iff j <= i + seqlen - s_q; if False, it sees all tokens. Leave it out with a `tree_mask`.
        With `cu_seqlens_q`, s_q is the number of queries of the sequence.
    window : int, optional
        Query i sees so many tokens at most: j > i + seqlen - s_q - window. Pages that lie wholly before the windows of
        a sequence's queries are not read, nor their entries of `block_table`. Only causal, and without a `tree_mask` or
        context parallelism.
    max_seqlen_q : int, optional
        With `cu_seqlens_q`: how many queries most sequences have, by which a kernel is chosen; a sequence with more is
        served, too. Default: any number. A plan knows it as `s_q`.
    cp_world, cp_rank : int
        Context parallelism: token j of `kv_cache` and `block_table` is token j * cp_world + cp_rank of the sequence.
        `seqlens` are those of the whole sequences, the same on every rank, and so is the limit of `causal`. The results
        of all ranks are to be merged, see `merge_states`; a row that sees none of a rank's tokens has `empty_lse`.
    kv_scale : float
        Scale of the record "fp8", by which its numbers are multiplied.
    q_scale : float
        Scale of queries in e4m3, by which they are multiplied.
    math : str
        "exact" converts the numbers of FP8 records, and multiplies in 16 bits. "fp8", for the record "fp8" on Hopper
        and Blackwell, multiplies in e4m3: weights, and queries in 16 bits, are rounded to it, see the notes. "fp8x2",
        on Hopper, for more than 16 rows (s_q * h_q) and without a `tree_mask`, does so with sums of two numbers in e4m3
        in place of each, which have about eight bits, as bfloat16 has.
    plan : TorchDecodePlan, optional
        From `plan_decode`, updated for these `seqlens`: saves the scheduling and the allocations of a call.
    out : tensor, (b, s_q, h_q, 512), dtype of q (bfloat16 where that is e4m3) or float32, optional
        Memory for the result, (b, s_q, h_q, d_head) with a `w_uv`: a contiguous last axis, a start and other strides
        that are multiples of 16 bytes.
    lse : tensor, (b, h_q, s_q), float32, optional
        Memory for the log-sum-exp; any strides.
    workspace : tensor, (n,), uint8, optional
        Memory for the call, 256-byte aligned, of at least `workspace_bytes(mla_decode, ...)` bytes. Not with a plan,
        which has its own.
    out_dtype : str or dtype, optional
        "float32" for results to be merged; default: the dtype of `out`, or of q, or bfloat16 where that is e4m3.
    lse_base : str
        "e" or "2": base of the logarithm in `lse`.
    empty_lse : float
        `lse` of a row that sees no token; its `out` is 0.
    kernel : str, optional
        Name of the kernel to run, see `mla-cupy list`. Default: the fastest that fits; the choice depends on b and on
        the tokens that a row of `block_table` has room for, too.

    Returns
    -------
    out : tensor, (b, s_q, h_q, 512), or (b, s_q, h_q, d_head) with a `w_uv`
        Array of the caller's library; (total_q, h_q, 512) with `cu_seqlens_q`.
    lse : tensor, (b, h_q, s_q), float32
        log(sum_j exp(scale * q . k[j])), in base `lse_base`; (h_q, total_q) with `cu_seqlens_q`.

    Raises
    ------
    ShapeError, DTypeError, DeviceError, ArgumentError, PlanError
        If an argument does not fit; nothing has been launched, and `out` and `lse` are untouched.
    UnsupportedDeviceError
        If no kernel fits the GPU.

    Notes
    -----
    It has no gradient: decode serves inference. Tensors for the results are given all or none. A `workspace` is for
    calls with tensors for the results.

    Examples
    --------
    >>> import torch
    >>> import mla_cupy.torch as mla
    >>> q, cache = torch.ones(1, 1, 16, 576).bfloat16(), torch.ones(4, 64, 576).bfloat16()
    >>> table, seqlens = torch.tensor([[2, 0]], dtype=torch.int32), torch.tensor([100], dtype=torch.int32)
    >>> out, lse = mla.mla_decode(q, cache, table, seqlens)
    >>> tuple(out.shape), float(out[0, 0, 0, 0]), round(float(lse[0, 0, 0]), 3)
    ((1, 1, 16, 512), 1.0, 28.605)
    """
    arrays = (
        q,
        kv_cache,
        block_table,
        seqlens,
        q_rope,
        cu_seqlens_q,
        tree_mask,
        attn_sink,
        out_cos,
        out_sin,
        out_positions,
        w_uv,
        gate,
        q_scales,
        kv_scales,
        out,
        lse,
    )
    options = (
        d_v,
        scale,
        causal,
        window,
        max_seqlen_q,
        cp_world,
        cp_rank,
        kv_scale,
        q_scale,
        math,
        out_dtype,
        lse_base,
        empty_lse,
        kernel,
    )
    if is_plain_call(arrays) and (out is None) is (lse is None):
        out, lse = run(Invocation(OPERATION, arrays, options, workspace, plan=plan_of(plan)))
    elif plan is not None:
        out, lse = call_planned(plan, arrays, options, workspace)
    else:
        out, lse = call(MLA_DECODE, arrays, options, workspace)
    return out, lse
