"""Functions of `mla_cupy.ops.preparation` for PyTorch's tensors.

Written by `python -m tests.generate` from the records there.
"""

from __future__ import annotations

import torch

from mla_cupy.ops.call import Invocation, run
from mla_cupy.ops.preparation import OPERATION
from mla_cupy.torch.call import call
from mla_cupy.torch.library import is_plain_call
from mla_cupy.torch.operators import MLA_PREPARE


def mla_prepare(
    q: torch.Tensor,
    latent: torch.Tensor | None = None,
    rope: torch.Tensor | None = None,
    cache: torch.Tensor | None = None,
    slots: torch.Tensor | None = None,
    *,
    q_rope: torch.Tensor | None = None,
    w_uk: torch.Tensor | None = None,
    cos: torch.Tensor | None = None,
    sin: torch.Tensor | None = None,
    positions: torch.Tensor | None = None,
    theta: float | None = None,
    interleaved: bool = True,
    quantise: bool = False,
    q_scale: float | None = None,
    return_rope: bool = False,
    record: str | None = None,
    scales: str | None = None,
    kv_scale: float = 1,
    out: torch.Tensor | None = None,
    q_scales: torch.Tensor | None = None,
    rope_out: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """Make queries and keys ready for decode, in one launch: RoPE of both, queries in e4m3, tokens in the cache.

    Each part is optional; `cache_append` is the form for keys alone. With `w_uk` the launch is that of `absorb`, too.

    For tensors of PyTorch: the notes of `mla_cupy.mla_prepare` hold here, too.

    Parameters
    ----------
    q : tensor, (n, h, d), bfloat16 or float16
        Queries, whose last 64 columns are their RoPE part: d is 576, 512, 192 or 64. With `q_rope` those without it: d
        is 512, 448 or 128. The last axis is contiguous; other strides are free (multiples of 16 bytes are fastest).
    latent : tensor, (n, d_latent), dtype of q, optional
        The tokens' latent part, as for `cache_append`; with `cache` and `slots`.
    rope : tensor, (n, 64), dtype of q, optional
        Their RoPE part, before RoPE; with a cache, or with `return_rope`.
    cache : tensor, (num_pages, page_size, width), optional
        As for `cache_append`. It is changed in place.
    slots : tensor, (n,), int32 or int64, optional
        As for `cache_append`: a token whose slot is outside of the cache is skipped.
    q_rope : tensor, (n, h, 64), dtype of q, optional
        The queries' RoPE part where it lies elsewhere, as beside absorbed queries.
    w_uk : tensor, (h, d_nope, 512), dtype of q, optional
        The keys' half of kv_b_proj, as for `absorb`: the queries without their RoPE part are multiplied by it. Then d
        is d_nope + 64, or with `q_rope` d_nope, of 64, 128, 192 or 256; q, w_uk, q_rope and out start at, and step by,
        multiples of 16 bytes; and queries stay in 16 bits.
    cos, sin : tensor, (max_position, 32), float32, optional
        As for `cache_append`, for q and `rope`. The last axis is contiguous.
    positions : tensor, (n,), int32 or int64, optional
        Of the tokens: rows of cos and sin, clamped to them, or any integers with `theta`. Without them nothing turns.
    theta : float, optional
        Base of RoPE, at least 1, in place of cos and sin: pair i turns by position * theta**(-i / 32).
    interleaved : bool
        Pairs that RoPE turns: elements (2i, 2i + 1), as in DeepSeek's models, or, if False, (i, i + 32).
    quantise : bool
        Make `out` e4m3 codes of the 16-bit result.
    q_scale : float, optional
        Scale of all codes, as `mla_decode` takes it. Default: each row has its own.
    return_rope : bool
        Return the turned RoPE part of the tokens, too.
    record, scales, kv_scale
        As for `cache_append`.
    out : tensor, (n, h, d) or (n, h, d + 64), or (n, h, 576) with w_uk, dtype of q; or uint8 or float8_e4m3fn, optional
        Where the queries go. It may be `q` itself, of which only the RoPE part is then touched. The last axis is
        contiguous.
    q_scales : tensor, (n, h), float32, optional
        Where the scales go.
    rope_out : tensor, (n, 64), dtype of q, optional
        Where the RoPE part of the tokens goes; it may be `rope` itself. The last axis is contiguous.

    Returns
    -------
    out : tensor, (n, h, d) or (n, h, d + 64), or (n, h, 576) with w_uk
        Queries for `mla_decode`: with `quantise` uint8, the bits of e4m3.
    q_scales : tensor, (n, h), float32, or None
        With `quantise`: what each row's codes are to be multiplied by.
    rope_out : tensor, (n, 64), or None
        With `return_rope`.

    Raises
    ------
    ShapeError, DTypeError, DeviceError, ArgumentError
        If an argument does not fit; nothing has been launched, and the cache is untouched.

    Notes
    -----
    It has no gradient: decode serves inference. Tensors for the results are given all or none.
    """
    arrays = (q, latent, rope, cache, slots, q_rope, w_uk, cos, sin, positions, out, q_scales, rope_out)
    options = (theta, interleaved, quantise, q_scale, return_rope, record, scales, kv_scale)
    if (
        is_plain_call(arrays)
        and (quantise is False or (out is None) is (q_scales is None))
        and (return_rope is False or (out is None) is (rope_out is None))
    ):
        out, q_scales, rope_out = run(Invocation(OPERATION, arrays, options))
    else:
        out, q_scales, rope_out = call(MLA_PREPARE, arrays, options)
    return out, q_scales, rope_out
