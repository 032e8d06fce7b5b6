"""Hostile inputs of sparse MLA, the same for every suite: `make(SparseCase(...))`.

Whatever an operation must not read is poison. Rows of `kv` that no query selects are NaN, and slots that do not count
point at them: those past a query's `topk_length`, and those past what a causal query sees. Among the other slots
stand indices of every kind that means "no row", and duplicates. No array is contiguous.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from mla_cupy import dtypes, reference
from mla_cupy.reference.sparse import selected_rows
from tests.support.cases import D_V, poisoned, values

Array = npt.NDArray[Any]

INT_MIN, INT_MAX = -(2**31), 2**31 - 1
#: One in this many rows of a sequence is never selected.
POISON_EVERY = 7


@dataclass(frozen=True)
class SparseCase:
    """One case, reproducible from its fields; `id` names it in a test's parameters.

    sequences
        (len_q, len_kv) of each sequence of a ragged batch; queries and rows that are left over belong to none.
        Without any there is one sequence, and no `cu_seqlens`.
    lengths
        Whether there is a `topk_length`: 0, topk, more than topk, less than 0, and random ones.
    sink
        Whether there is an `attn_sink`: infinities of both signs and finite ones.
    invalid
        The part of the slots that hold no row. 1.0 leaves nothing to attend to.
    strides
        As in `DecodeCase`; "odd" also has gaps between the slots of a query, and in the vectors.
    head_axis
        Whether `kv` and `indices` have an axis of one head.
    dlse
        Whether there is a gradient with respect to `lse`, for the backward.
    """

    s_q: int = 7
    s_kv: int = 300
    h_q: int = 16
    topk: int = 100
    d_qk: int = 576
    dtype: str = "bfloat16"
    causal: bool = False
    sequences: tuple[tuple[int, int], ...] = ()
    lengths: bool = False
    sink: bool = False
    invalid: float = 0.1
    strides: Literal["padded", "odd", "dense"] = "padded"
    head_axis: bool = False
    dlse: bool = False
    seed: int = 0

    @property
    def id(self) -> str:
        parts = [
            f"sq{self.s_q}-skv{self.s_kv}-h{self.h_q}-topk{self.topk}-d{self.d_qk}-{self.dtype}",
            "causal" if self.causal else "",
            "".join(f"({len_q},{len_kv})" for len_q, len_kv in self.sequences),
            "lengths" if self.lengths else "",
            "sink" if self.sink else "",
            f"invalid{self.invalid:g}" if self.invalid != 0.1 else "",
            "" if self.strides == "padded" else self.strides,
            "3d" if self.head_axis else "",
            "dlse" if self.dlse else "",
            f"seed{self.seed}" if self.seed else "",
        ]
        return "-".join(part for part in parts if part)


_SEQUENCES = ((3, 90), (0, 5), (2, 3), (1, 150))
#: Small ones: other layouts, sequences, and sizes of nothing and of one.
CORNERS = (
    SparseCase(h_q=3, head_axis=True, topk=33),
    SparseCase(h_q=2, strides="odd", lengths=True, sink=True),
    SparseCase(h_q=2, strides="dense", causal=True),
    SparseCase(s_q=9, h_q=2, topk=30, sequences=_SEQUENCES),
    SparseCase(s_q=9, h_q=2, topk=30, sequences=_SEQUENCES, causal=True, lengths=True, strides="odd"),
    SparseCase(invalid=1.0, h_q=2, sink=True),
    SparseCase(s_q=0, h_q=2, sink=True),
    SparseCase(s_kv=0, h_q=2),
    SparseCase(topk=0, h_q=2),
    SparseCase(h_q=1, s_q=1, s_kv=1, topk=1, invalid=0.0),
)


@dataclass(frozen=True)
class SparseInputs:
    """The arrays of a case, and what the oracle says about them."""

    case: SparseCase
    q: Array = field(repr=False)
    kv: Array = field(repr=False)
    indices: Array = field(repr=False)
    dout: Array = field(repr=False)
    topk_length: Array | None = field(repr=False, default=None)
    attn_sink: Array | None = field(repr=False, default=None)
    cu_seqlens_q: Array | None = field(repr=False, default=None)
    cu_seqlens_kv: Array | None = field(repr=False, default=None)
    dlse: Array | None = field(repr=False, default=None)

    @property
    def arguments(self) -> tuple[Array, Array, Array]:
        """The positional arguments of `sparse_mla_forward`."""
        return self.q, self.kv, self.indices

    @property
    def backward_arguments(self) -> tuple[Array, Array, Array, Array, Array, Array]:
        """The positional arguments of `sparse_mla_backward`."""
        return self.q, self.kv, self.out, self.dout, self.lse, self.indices

    @property
    def scale(self) -> float:
        """Keeps scores of one size."""
        return float(self.case.d_qk**-0.5)

    @property
    def optional(self) -> dict[str, Array]:
        """The arrays that both operations take by name, where there are any."""
        names = ("topk_length", "attn_sink", "cu_seqlens_q", "cu_seqlens_kv")
        return {name: getattr(self, name) for name in names if getattr(self, name) is not None}

    @property
    def options(self) -> dict[str, Any]:
        """All that both operations take by name."""
        return {**self.optional, "scale": self.scale, "causal": self.case.causal}

    @property
    def backward_options(self) -> dict[str, Any]:
        """All that the backward takes by name."""
        return {**self.options, **({} if self.dlse is None else {"dlse": self.dlse})}

    @cached_property
    def rows(self) -> list[Array]:
        """The rows of each query, in the order of its slots."""
        return list(
            selected_rows(
                self.indices,
                len(self.kv),
                self.topk_length,
                self.case.causal,
                self.cu_seqlens_q,
                self.cu_seqlens_kv,
            )
        )

    @cached_property
    def exact(self) -> tuple[Array, Array, Array]:
        """out, lse and max_logits of the oracle."""
        return reference.sparse_mla_forward(*self.arguments, **self.options)

    @cached_property
    def rounded(self) -> tuple[Array, Array, Array]:
        """out, lse and max_logits of the oracle with the kernels' roundings."""
        return reference.sparse_mla_forward(*self.arguments, **self.options, rounding=self.case.dtype)

    @cached_property
    def out(self) -> Array:
        """The forward's `out` for the backward: the exact one, rounded as it is stored."""
        stored = poisoned(self.exact[0].shape, dtypes.numpy_dtype(self.case.dtype), self.case.strides)
        stored[...] = dtypes.round_to(self.exact[0], self.case.dtype)
        return stored

    @cached_property
    def lse(self) -> Array:
        """The forward's `lse` for the backward."""
        stored = poisoned(self.exact[1].shape, np.dtype(np.float32), self.case.strides)
        stored[...] = self.exact[1]
        return stored

    @cached_property
    def exact_gradients(self) -> tuple[Array, Array, Array | None]:
        """dq, dkv and d_sink of the oracle."""
        return reference.sparse_mla_backward(*self.backward_arguments, **self.backward_options)

    @cached_property
    def rounded_gradients(self) -> tuple[Array, Array, Array | None]:
        """dq, dkv and d_sink of the oracle with the kernels' roundings."""
        return reference.sparse_mla_backward(
            *self.backward_arguments, **self.backward_options, rounding=self.case.dtype
        )


def make(case: SparseCase) -> SparseInputs:
    """The inputs of a case."""
    rng = np.random.default_rng([case.seed, 2])
    dtype = dtypes.numpy_dtype(case.dtype)
    q = poisoned((case.s_q, case.h_q, case.d_qk), dtype, case.strides)
    q[...] = values(rng, q.shape, loud=(0.5, 1.0, 4.0))
    dout = poisoned((case.s_q, case.h_q, D_V), dtype, case.strides)
    dout[...] = values(rng, dout.shape, loud=(0.25, 1.0, 2.0))

    cu_seqlens_q, cu_seqlens_kv = _starts(case)
    topk_length = _vector(_lengths(rng, case), case.strides) if case.lengths else None
    attn_sink = _sink(rng, case.h_q) if case.sink else None
    indices = _indices(rng, case, cu_seqlens_q, cu_seqlens_kv, topk_length)

    kv = poisoned((case.s_kv, case.d_qk), dtype, case.strides)
    rows = selected_rows(indices, case.s_kv, topk_length, case.causal, cu_seqlens_q, cu_seqlens_kv)
    chosen = np.unique(np.concatenate([np.zeros(0, np.int64), *rows]))
    kv[chosen] = values(rng, (len(chosen), case.d_qk), loud=(1.0,) * 31 + (3.0,)).astype(dtype)
    if case.head_axis:
        kv, indices = kv[:, None], indices[:, None]
    dlse = _of_lse(rng, case) if case.dlse else None
    return SparseInputs(case, q, kv, indices, dout, topk_length, attn_sink, cu_seqlens_q, cu_seqlens_kv, dlse)


def lower_scores(inputs: SparseInputs) -> None:
    """Take 200 or so from every score, so that exp(-lse) is beyond float32; before anything is computed."""
    inputs.q[..., -1], inputs.kv[..., -1] = 64, -75


def _of_lse(rng: np.random.Generator, case: SparseCase) -> Array:
    """Its heads step by more than its queries, and backwards."""
    whole = np.full((2 * case.h_q, case.s_q + 3), np.nan, np.float32)
    dlse: Array = whole[::-2, : case.s_q].T
    dlse[...] = values(rng, dlse.shape, loud=(0.0, 1.0, 8.0))
    return dlse


def _starts(case: SparseCase) -> tuple[Array | None, Array | None]:
    """cu_seqlens_q and cu_seqlens_kv."""
    if not case.sequences:
        return None, None
    ends = np.cumsum([(0, 0), *case.sequences], axis=0, dtype=np.int32)
    return _vector(ends[:, 0], case.strides), _vector(ends[:, 1], case.strides)


def _lengths(rng: np.random.Generator, case: SparseCase) -> Array:
    lengths = rng.integers(0, case.topk + 1, case.s_q)
    lengths[:4] = [case.topk + 100, case.topk, 0, -5][: case.s_q]
    return lengths


def _sink(rng: np.random.Generator, h_q: int) -> Array:
    sink = 3 * rng.standard_normal(h_q, dtype=np.float32)
    sink[1::5], sink[2::5], sink[3::5] = -np.inf, np.inf, 30
    return sink


def _indices(
    rng: np.random.Generator, case: SparseCase, starts_q: Array | None, starts_kv: Array | None, lengths: Array | None
) -> Array:
    """Distinct rows as far as there are enough, but for some duplicates; and what does not count."""
    step = 2 if case.strides == "odd" else 1
    gap = 0 if case.strides == "dense" else 3
    whole = np.full((case.s_q, case.topk * step + gap), INT_MAX, np.int32)
    indices = whole[:, : case.topk * step : step]
    for i in range(case.s_q):
        length, limit = _reach(case, i, starts_q, starts_kv)
        rows = np.arange(length)
        never = rows % POISON_EVERY == POISON_EVERY // 2
        hostile = np.array([-1, -2, INT_MIN, INT_MAX, length, length + 1, limit], np.int64)
        candidates = rows[:limit][~never[:limit]]
        if len(candidates) == 0 or (i == 1 and case.s_q > 2):
            candidates = hostile
        slots = rng.choice(candidates, case.topk, replace=len(candidates) < case.topk)
        slots[1::9] = slots[::9][: len(slots[1::9])]
        bad = rng.random(case.topk) < case.invalid
        slots[bad] = rng.choice(hostile, int(bad.sum()))
        if lengths is not None:
            past = np.arange(case.topk) >= lengths[i]
            slots[past] = rng.choice(np.concatenate([rows[never], hostile]), int(past.sum()))
        indices[i] = slots
    return indices


def _reach(case: SparseCase, i: int, starts_q: Array | None, starts_kv: Array | None) -> tuple[int, int]:
    """The length of query i's sequence in kv, and how much of it the query may select."""
    if starts_q is None or starts_kv is None:
        return case.s_kv, max(0, case.s_kv - (case.s_q - 1 - i)) if case.causal else case.s_kv
    if i >= starts_q[-1]:
        return case.s_kv, 0
    n = int(np.searchsorted(starts_q, i, side="right")) - 1
    length = int(starts_kv[n + 1] - starts_kv[n])
    return length, max(0, length - int(starts_q[n + 1] - 1 - i)) if case.causal else length


def _vector(x: Array, strides: str) -> Array:
    """Equal numbers as int32; "odd": every second element of their array."""
    step = 2 if strides == "odd" else 1
    whole = np.full(len(x) * step, INT_MAX, np.int32)
    whole[::step] = x
    return whole[::step]
