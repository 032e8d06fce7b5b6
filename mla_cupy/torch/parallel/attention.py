"""Dense attention to gathered latents, forward and backward: keys and values exist for a chunk of them at a time.

Latents travel once in each direction. Exchanges between the chunks would cost more: ranks come to them at different
times, and NCCL's kernels probably keep multiprocessors busy while they wait for one another.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch

import mla_cupy.torch as mla
from mla_cupy.errors import DTypeError, explain
from mla_cupy.torch.parallel.links import Chunk, Links, Segments

Expand = Callable[..., tuple[torch.Tensor, torch.Tensor]]
Tensors = Sequence[torch.Tensor]
Maybe: TypeAlias = "torch.Tensor | None"


class Attention(NamedTuple):
    """Attention of a rank.

    Attributes
    ----------
    links : Links
    own : Segments
        Each piece with itself.
    chunks : tuple of Chunk
        Keys before the queries.
    expand : callable
        Latents and parameters to keys and values.
    width : int
        Columns of the latents; the other columns of a row are the RoPE columns of its key.
    scale : float, optional
    deterministic : bool
    """

    links: Links
    own: Segments
    chunks: tuple[Chunk, ...]
    expand: Expand
    width: int
    scale: float | None
    deterministic: bool

    def rope(self, rows: torch.Tensor) -> Maybe:
        """RoPE columns of the keys."""
        return rows[:, self.width :] if rows.shape[1] > self.width else None

    def forward(
        self, q: torch.Tensor, q_rope: Maybe, rows: torch.Tensor, parameters: Tensors
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Output in float32, and log-sum-exps."""
        pending = self.links.gather(rows)
        keys = self._keys(rows, parameters)
        of = {"packed": self.own.packed, "scale": self.scale, "out_dtype": torch.float32}
        out, lse = mla.mla_prefill(q, **keys, q_rope=q_rope, **of)
        gathered = pending.wait()
        for chunk in self.chunks:
            if chunk.calls:
                keys = self._keys(gathered[chunk.order], parameters)
            for call in chunk.calls:
                of_q, of_rope, of_out, of_lse = call.of(q, q_rope, out, lse)
                state = {"state_out": of_out, "state_lse": of_lse, "out": of_out, "lse": of_lse}
                of = {"packed": call.packed, "scale": self.scale, "causal": False}
                mla.mla_prefill(of_q, **keys, q_rope=of_rope, **of, **state)
        return out, lse

    def _keys(self, rows: torch.Tensor, parameters: Tensors) -> dict[str, Any]:
        """Expand keys and values. Every tensor that needs a gradient must be a parameter, else its gradient is lost."""
        with torch.enable_grad():
            k, v = self.expand(*(x.detach() for x in (rows[:, : self.width], *parameters)))
        if k.requires_grad or v.requires_grad:
            remedy = "pass it in parameters, and let expand take it as an argument"
            raise DTypeError(explain("expand", "a tensor that requires grad", "none but its arguments", remedy))
        return {"k": k, "v": v, "k_rope": self.rope(rows)}


class Backward:
    """Gradients of q, q_rope, rows and parameters, added up in float32.

    Parameters
    ----------
    attention : Attention
    q, q_rope, rows, parameters
        As for the forward.
    results : dict
        `out` and `lse` of all keys, `dout` and `dlse`. With these the gradients of a chunk need no other chunk.
    """

    def __init__(
        self,
        attention: Attention,
        q: torch.Tensor,
        q_rope: Maybe,
        rows: torch.Tensor,
        parameters: Tensors,
        results: dict[str, Maybe],
    ) -> None:
        self.attention, self.q, self.q_rope, self.rows = attention, q, q_rope, rows
        self.parameters, self.results = parameters, results
        self.dq, self.dq_rope, self.drows = _zeros(q), None if q_rope is None else _zeros(q_rope), _zeros(rows)
        self.dparameters = [_zeros(x) if x.requires_grad else None for x in parameters]

    def run(self) -> tuple[Maybe, ...]:
        """Return all gradients, each in the dtype of its tensor."""
        links = self.attention.links
        pending, gradients = links.gather(self.rows), links.gradients(self.rows)
        if len(self.rows):
            self.drows += self._pull((self.attention.own,), self.rows, causal=True)
        gathered = pending.wait()
        for chunk in self.attention.chunks:
            if chunk.calls:
                gradient = self._pull(chunk.calls, gathered[chunk.order], causal=False)
                gradients[chunk.order] = gradient.to(gradients.dtype)
        self.drows += links.added_up(gradients, len(self.rows))
        sums, given = (self.dq, self.dq_rope, self.drows), (self.q, self.q_rope, self.rows)
        pairs = zip((*sums, *self.dparameters), (*given, *self.parameters), strict=True)
        return tuple(None if x is None or like is None else x.to(like.dtype) for x, like in pairs)

    def _pull(self, calls: Sequence[Segments], rows: torch.Tensor, causal: bool) -> torch.Tensor:
        """Gradients of the rows that the calls read, in float32; adds up the gradients of queries and parameters."""
        gradient, width = _zeros(rows), self.attention.width
        leaves = [rows[:, :width].detach().requires_grad_()]
        leaves += [x.detach().requires_grad_(x.requires_grad) for x in self.parameters]
        with torch.enable_grad():
            k, v = self.attention.expand(*leaves)
        keys = {"k": k.detach(), "v": v.detach(), "k_rope": self.attention.rope(rows)}
        dk, dv, dk_rope = map(_sum, zip(*(self._call(call, keys, causal) for call in calls), strict=True))
        wanted = [x for x in leaves if x.requires_grad]
        made = torch.autograd.grad((k, v), wanted, (dk, dv), materialize_grads=True)
        gradient[:, :width] = made[0]
        if dk_rope is not None:
            gradient[:, width:] = dk_rope
        for total, found in zip((x for x in self.dparameters if x is not None), made[1:], strict=True):
            total += found
        return gradient

    def _call(self, call: Segments, keys: dict[str, Any], causal: bool) -> tuple[Maybe, ...]:
        """Gradients of keys, values and RoPE columns; adds up the gradients of the queries."""
        q, q_rope, *results = call.of(self.q, self.q_rope, *self.results.values())
        of: dict[str, Any] = {"packed": call.packed, "causal": causal, "scale": self.attention.scale}
        of |= {"q_rope": q_rope, "deterministic": self.attention.deterministic}
        of |= zip(self.results, results, strict=True)
        dq, dk, dv, dq_rope, dk_rope = mla.mla_prefill_backward(q, **keys, **of)
        self.dq[call.begin : call.end] += dq
        if self.dq_rope is not None:
            self.dq_rope[call.begin : call.end] += dq_rope
        return dk, dv, dk_rope


def _zeros(x: torch.Tensor) -> torch.Tensor:
    return torch.zeros(x.shape, dtype=torch.float32, device=x.device)


def _sum(parts: tuple[Maybe, ...]) -> Maybe:
    """Add in place, in the memory of the first part."""
    first, *others = parts
    for x in others:
        if first is not None and x is not None:
            first += x
    return first


class Prefill(torch.autograd.Function):  # type: ignore[misc]
    """Attention as one autograd function, which saves latents instead of keys and values."""

    @staticmethod
    def forward(
        ctx: Any, attention: Attention, q: torch.Tensor, q_rope: Maybe, rows: torch.Tensor, *parameters: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        out, lse = attention.forward(q, q_rope, rows, parameters)
        out = out.to(q.dtype)
        ctx.set_materialize_grads(False)
        ctx.attention = attention
        ctx.save_for_backward(q, q_rope, rows, out, lse, *parameters)
        return out, lse

    @staticmethod
    @torch.autograd.function.once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, dout: Maybe, dlse: Maybe) -> tuple[Any, ...]:
        q, q_rope, rows, out, lse, *parameters = ctx.saved_tensors
        dout = torch.zeros_like(out) if dout is None else dout.to(q.dtype).contiguous()
        results = {"out": out, "lse": lse, "dout": dout, "dlse": dlse}
        return None, *Backward(ctx.attention, q, q_rope, rows, parameters, results).run()
