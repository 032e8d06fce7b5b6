"""Problems for dense attention: operands as projections leave them, poison where nobody may look."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from mla_cupy import dtypes
from mla_cupy.kernels.dense.problem import D_ROPE
from mla_cupy.reference import mla_prefill
from mla_cupy.reference.prefill import seen_keys

Array = np.ndarray[Any, Any]
#: Bytes between two rows of heads that belong to somebody else.
_GAP_BYTES = 16
#: Bytes between two rows of a mask.
_MASK_GAP = 16


@dataclass(frozen=True)
class DenseCase:
    """A problem. `sequences` are (queries, keys) of each, one after another; those before and after belong to nobody.

    Attributes
    ----------
    q_pair : bool
        Whether the queries' last columns are an array of their own.
    k_rope : str
        "shared", "per_head", or "within": part of the keys.
    state : str
        The dtype of an earlier state, or "".
    scale : float
        Of the scores; 0 for the default, with which maxima hardly rise from tile to tile.
    mask : float
        Of the keys, the share that the mask leaves; 0 for no mask.
    dtype : str
        "float8_e4m3fn" and "uint8" are e4m3 codes.
    scales : str
        Of e4m3 codes, those that there are: some of "qkv".
    mean : float
        Of the values; they deviate by 1.
    """

    sequences: tuple[tuple[int, int], ...]
    h_q: int = 1
    h_kv: int = 0  # 0: h_q
    d_qk: int = 192
    d_v: int = 128
    dtype: str = "bfloat16"
    causal: bool = True
    q_pair: bool = False
    k_rope: str = "shared"
    state: str = ""
    around: tuple[int, int] = (0, 0)
    starts: bool = True
    scale: float = 0.0
    mask: float = 0.0
    scales: str = ""
    mean: float = 0.0
    seed: int = 0

    @property
    def id(self) -> str:
        lengths = "_".join(f"{queries}x{keys}" for queries, keys in self.sequences)
        flags = ("causal" if self.causal else "full") + ("-pair" if self.q_pair else "") + f"-{self.k_rope}"
        state = (f"-state_{self.state}" if self.state else "") + (f"-scale{self.scale:g}" if self.scale else "")
        mask = f"-mask{self.mask:g}" if self.mask else ""
        more = (f"-scales_{self.scales}" if self.scales else "") + (f"-mean{self.mean:g}" if self.mean else "")
        return f"{lengths}-h{self.h_q}_{self.heads_kv}-{self.d_qk}_{self.d_v}-{self.dtype}-{flags}{state}{mask}{more}"

    @property
    def heads_kv(self) -> int:
        return self.h_kv or self.h_q

    @property
    def totals(self) -> tuple[int, int]:
        """All queries and all keys."""
        before, after = self.around
        queries, keys = map(sum, zip(*self.sequences, strict=True))
        return before + queries + after, before + keys + after


@dataclass(frozen=True, eq=False)
class DenseInputs:
    """The arrays of a call."""

    case: DenseCase
    q: Array
    k: Array
    v: Array
    options: dict[str, Any] = field(repr=False)

    @property
    def arguments(self) -> tuple[Array, Array, Array]:
        return self.q, self.k, self.v

    @cached_property
    def exact(self) -> tuple[Array, Array]:
        return mla_prefill(*self.arguments, **self.options)

    @cached_property
    def rounded(self) -> tuple[Array, Array]:
        return mla_prefill(*self.arguments, **self.options, rounding=self.case.dtype)


def make(case: DenseCase) -> DenseInputs:
    """The arrays of a case: keys and values are views of one, and what no query sees is NaN."""
    rng = np.random.default_rng(case.seed)
    s_q, s_kv = case.totals
    narrow, whole = case.d_qk - D_ROPE, case.k_rope == "within"
    kind = dtypes.numpy_dtype("float8_e4m3fn" if case.dtype == "uint8" else case.dtype)

    def normal(*shape: int) -> Array:
        return rng.standard_normal(shape, np.float32).astype(kind)

    d_k = case.d_qk if whole else narrow
    both = normal(s_kv, case.heads_kv, d_k + case.d_v + _GAP_BYTES // kind.itemsize)
    both[..., d_k + case.d_v :] = np.nan
    if case.mean:
        values = both[..., d_k : d_k + case.d_v]
        values[:] = (values.astype(np.float32) + case.mean).astype(kind)
    k, v = both[..., :d_k], both[..., d_k : d_k + case.d_v]
    q = normal(s_q, case.h_q, case.d_qk)
    options: dict[str, Any] = {"causal": case.causal}
    if case.scale:
        options["scale"] = case.scale
    if case.q_pair:
        q, options["q_rope"] = np.ascontiguousarray(q[..., :narrow]), np.ascontiguousarray(q[..., narrow:])
    if not whole:
        options["k_rope"] = normal(s_kv, *([case.heads_kv] if case.k_rope == "per_head" else []), D_ROPE)
    if case.starts:
        before = case.around[0]
        ends = np.cumsum([(0, 0), *case.sequences], axis=0).astype(np.int32) + before
        options["cu_seqlens_q"], options["cu_seqlens_kv"] = ends[:, 0].copy(), ends[:, 1].copy()
    if case.state:
        options["state_out"] = rng.standard_normal((s_q, case.h_q, case.d_v), np.float32).astype(
            dtypes.numpy_dtype(case.state)
        )
        lse = rng.normal(3.0, 2.0, (s_q, case.h_q)).astype(np.float32)
        empty = rng.random(lse.shape) < 0.3
        options["state_lse"] = np.where(empty, np.float32(-np.inf), lse)
        options["state_out"][empty] = np.nan
    if case.mask:
        options["mask"] = make_mask(case, rng)
    unseen = np.ones(s_kv, bool)
    for row in seen_keys(s_q, s_kv, options.get("cu_seqlens_q"), options.get("cu_seqlens_kv"), case.causal):
        unseen[row.keys(options.get("mask"))] = False
    both[unseen] = np.nan
    if not whole:
        options["k_rope"][unseen] = np.nan
    for name in case.scales:  # of each sequence and head; a broadcast number of the values
        shape = (len(case.sequences) if case.starts else 1, case.heads_kv)
        scales = rng.uniform(0.25, 2.0, shape).astype(np.float32)
        options[f"{name}_scales"] = np.broadcast_to(scales[:1, :1], shape) if name == "v" else scales
    if case.dtype == "uint8":
        q, k, v = (x.view(np.uint8) for x in (q, k, v))
        ropes = {name: x.view(np.uint8) for name, x in options.items() if name in ("q_rope", "k_rope")}
        options.update(ropes)
    return DenseInputs(case, q, k, v, options)


def make_mask(case: DenseCase, rng: np.random.Generator) -> Array:
    """Some keys are hidden from all queries, some queries see nothing, and what lies beyond a sequence is set."""
    (s_q, _), longest = case.totals, max(keys for _, keys in case.sequences)
    nbytes = -(-longest // 128) * 16
    seen = rng.random((s_q, 8 * nbytes)) < case.mask
    seen[:, rng.random(8 * nbytes) < 0.2] = False
    seen[rng.random(s_q) < 0.1] = False
    seen[:, longest:] = True
    memory = np.full((s_q, nbytes + _MASK_GAP), 255, np.uint8)
    mask = memory[:, :nbytes]
    mask[:] = np.packbits(seen, axis=1, bitorder="little")
    return mask
