"""Inputs of the indexer's warm-up loss: random, with NaN in keys that no query sees, and the rule for its results."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import ml_dtypes
import numpy as np

from mla_cupy import reference
from mla_cupy.kernels.indexer.loss import heuristics
from mla_cupy.reference.sparse import selected_rows

Array = np.ndarray[Any, Any]
FIELDS = reference.WarmupLoss._fields
#: Sums in float32, in another order; a logarithm by an approximation. In units of the largest value of the array.
FLOAT32_ERROR = 1e-5
#: Tensor cores cut off bits, and what they multiply for the gradients is rounded to bfloat16.
TENSOR_CORE_ERROR = 4e-3
#: Half a unit in the last place of bfloat16.
BF16_ERROR = 2.0**-8


@dataclass(frozen=True)
class LossCase:
    """`sequences` are (queries, keys) of each; s_q and s_kv are their sums plus what belongs to none."""

    s_q: int = 5
    s_kv: int = 9
    h: int = 3
    h_i: int = 2
    d: int = 40
    d_i: int = 32
    d_v: int = 0
    target: str = "head_sum"
    causal: bool = True
    lse: bool = False
    row_weights: bool = True
    sequences: tuple[tuple[int, int], ...] = ()
    target_scale: float = 1.0
    spread: float = 1.0
    weights: str = "float32"
    seed: int = 0

    @property
    def id(self) -> str:
        options = (
            ("-causal" if self.causal else "") + ("-lse" if self.lse else "") + (f"-v{self.d_v}" if self.d_v else "")
        )
        more = f"-b{len(self.sequences)}" if self.sequences else ""
        more += "-bf16" if self.weights == "bfloat16" else ""
        return f"{self.target}-q{self.s_q}-kv{self.s_kv}-{self.h}x{self.d}-{self.h_i}x{self.d_i}{options}{more}"

    @property
    def options(self) -> dict[str, Any]:
        """Of the call."""
        return {"target": self.target, "causal": self.causal, "target_scale": self.target_scale}


def loss_inputs(case: LossCase) -> dict[str, Array]:
    """The arrays of a call, by name."""
    rng = np.random.default_rng([case.seed, case.s_q, case.s_kv, case.h])

    def normal(*shape: int, spread: float = 1.0) -> Array:
        return (spread * rng.standard_normal(shape)).astype(ml_dtypes.bfloat16)

    inputs: dict[str, Array] = {
        "q": normal(case.s_q, case.h, case.d, spread=case.spread),
        "k": normal(case.s_kv, case.d),
        "index_q": normal(case.s_q, case.h_i, case.d_i),
        "index_k": normal(case.s_kv, case.d_i),
        "weights": rng.standard_normal((case.s_q, case.h_i), np.float32).astype(case.weights),
    }
    if case.d_v:
        inputs["v"] = normal(case.s_kv, case.d_v)
    if case.row_weights:
        inputs["row_weights"] = rng.uniform(-0.5, 2, case.s_q).astype(np.float32)
        inputs["row_weights"][:1] = 0
    if case.sequences:
        for name, lengths in zip(("cu_seqlens_q", "cu_seqlens_kv"), zip(*case.sequences, strict=True), strict=True):
            inputs[name] = np.cumsum([0, *lengths]).astype(np.int32)
    starts = (inputs.get("cu_seqlens_q"), inputs.get("cu_seqlens_kv"))
    every = np.broadcast_to(np.arange(case.s_kv), (case.s_q, case.s_kv))
    rows = list(selected_rows(every, case.s_kv, None, case.causal, *starts))
    if case.lse:
        inputs["lse"] = external_lse(inputs, rows, rng)
    unseen = np.setdiff1d(np.arange(case.s_kv), np.concatenate([np.zeros(0, int), *rows]))
    for name in ("k", "index_k", "v"):
        if name in inputs:
            inputs[name][unseen] = np.nan
    blind = [t for t, seen in enumerate(rows) if len(seen) == 0]
    for name in ("q", "index_q", "weights", "row_weights"):
        if name in inputs:
            inputs[name][blind] = np.nan
    return inputs


def external_lse(inputs: dict[str, Array], rows: list[Array], rng: np.random.Generator) -> Array:
    """The attention's, larger by mass elsewhere; one head without a part, of both infinities."""
    q, k = (inputs[name].astype(np.float64) for name in ("q", "k"))
    lse = np.full(q.shape[:2], -np.inf)
    for t, seen in enumerate(rows):
        if len(seen):
            lse[t] = np.log(np.exp(q[t] @ k[seen].T * q.shape[2] ** -0.5).sum(axis=1))
    lse += rng.uniform(0, 1, lse.shape)
    if lse.shape[1] > 1:
        lse[::3, 1], lse[1::3, 0] = np.inf, -np.inf
    return lse.astype(np.float32)


@contextmanager
def splits_of(tokens: int, most: int = 16) -> Iterator[None]:
    """While it lasts, the Hopper kernels divide the tokens that see a tile of keys even where they are few."""
    with (
        mock.patch.object(heuristics, "MIN_SPLIT_TOKENS", tokens),
        mock.patch.object(heuristics, "MAX_KEY_SPLITS", most),
    ):
        yield


def shares(inputs: dict[str, Array], ranks: int) -> list[dict[str, Array]]:
    """What each rank of tensor parallelism has of the main attention: some heads of q and lse, and all of the rest."""
    names = ("k", "indices", "topk_length", "cu_seqlens_q", "cu_seqlens_kv")
    common = {name: inputs[name] for name in names if name in inputs}
    heads = np.array_split(np.arange(inputs["q"].shape[1]), ranks)
    split = [{name: inputs[name][:, mine] for name in ("q", "lse") if name in inputs} for mine in heads]
    return [{**common, **mine} for mine in split]


def of_one_rank(inputs: dict[str, Array], ranks: int, rank: int) -> dict[str, Array]:
    """What a rank gives the loss beside the sums: its own queries, which have no part in it."""
    return {**{name: x for name, x in inputs.items() if name != "lse"}, "q": shares(inputs, ranks)[rank]["q"]}


def check_loss(got: tuple[Any, ...], exact: reference.WarmupLoss, error: float = FLOAT32_ERROR) -> None:
    """Every result within `error` of its array's largest value, or of 1, and its dtype's rounding."""
    for name, x, wanted in zip(FIELDS, got, exact, strict=True):
        if wanted is None:
            assert x is None, name
            continue
        assert x.shape == wanted.shape, name
        finite = np.isfinite(wanted)
        values = np.asarray(x).astype(np.float64)
        np.testing.assert_array_equal(values[~finite], wanted[~finite], name)
        unit = max(1.0 if x.dtype == np.float32 and name[0] != "d" else 1e-2, np.abs(wanted[finite]).max(initial=0))
        rounding = BF16_ERROR if x.dtype == ml_dtypes.bfloat16 else 0.0
        allowed = error * unit + rounding * np.abs(wanted[finite])
        excess = np.abs(values[finite] - wanted[finite]) - allowed
        if not (excess <= 0).all():
            at = int(np.argmax(np.where(np.isnan(excess), np.inf, excess)))
            raise AssertionError(f"{name}: got {values[finite][at]}, exact {wanted[finite][at]}, {allowed[at]:.2e} off")
