"""Inputs of the indexer's warm-up loss: random, with NaN in keys that no query sees, and the rule for its results."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import ml_dtypes
import numpy as np

from mla_cupy import reference
from mla_cupy.kernels.indexer.loss import heuristics
from mla_cupy.reference.sparse import selected_rows
from mla_cupy.shapes import D_ROPE
from tests.support.flat import flat

Array = np.ndarray[Any, Any]
FIELDS = reference.WarmupLoss._fields
#: Sums in float32, in another order; a logarithm by an approximation. In units of the largest value of the array.
FLOAT32_ERROR = 1e-5
#: Tensor cores cut off bits, and what they multiply for the gradients is rounded to bfloat16.
TENSOR_CORE_ERROR = 4e-3
E4M3_NAN = 0x7F
#: Half a unit in the last place of bfloat16.
BF16_ERROR = 2.0**-8


@dataclass(frozen=True)
class LossCase:
    """`sequences` are (queries, keys) of each; s_q and s_kv are their sums plus what belongs to none. `h_kv` is 0 for
    keys without a head axis. `pairs` says which have their last columns in an array of their own: "q", "k" with
    columns that all heads share, "K" with those of each. `codes` is the dtype of e4m3 index queries and keys, or "".
    """

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
    h_kv: int = 0
    pairs: str = ""
    codes: str = ""

    @property
    def id(self) -> str:
        options = (
            ("-causal" if self.causal else "") + ("-lse" if self.lse else "") + (f"-v{self.d_v}" if self.d_v else "")
        )
        more = f"-b{len(self.sequences)}" if self.sequences else ""
        more += "-bf16" if self.weights == "bfloat16" else ""
        more += (f"-hkv{self.h_kv}" if self.h_kv else "") + (f"-pair_{self.pairs}" if self.pairs else "")
        more += f"-{self.codes}" if self.codes else ""
        return f"{self.target}-q{self.s_q}-kv{self.s_kv}-{self.h}x{self.d}-{self.h_i}x{self.d_i}{options}{more}"

    @property
    def problem(self) -> dict[str, Any]:
        """Members of a `LossProblem` other than the sizes."""
        return {
            "per_head": self.target == "per_head",
            "needs_lse": self.target == "head_sum" and not self.lse,
            "kv_heads": self.h_kv or 1,
            "pairs": bool(self.pairs),
            "codes": bool(self.codes),
            "aligned": (self.d % 8 == 0) or self.s_q == 1,
        }

    @property
    def options(self) -> dict[str, Any]:
        """Options of the call."""
        return {"target": self.target, "causal": self.causal, "target_scale": self.target_scale}


def loss_inputs(case: LossCase) -> dict[str, Array]:
    """The arrays of a call, by name."""
    rng = np.random.default_rng([case.seed, case.s_q, case.s_kv, case.h])

    def normal(*shape: int, spread: float = 1.0) -> Array:
        return (spread * rng.standard_normal(shape)).astype(ml_dtypes.bfloat16)

    of_keys = (case.s_kv, case.h_kv) if case.h_kv else (case.s_kv,)
    inputs: dict[str, Array] = {
        "q": normal(case.s_q, case.h, case.d, spread=case.spread),
        "k": normal(*of_keys, case.d),
        "index_q": normal(case.s_q, case.h_i, case.d_i),
        "index_k": normal(case.s_kv, case.d_i),
        "weights": rng.standard_normal((case.s_q, case.h_i), np.float32).astype(case.weights),
    }
    if case.codes:
        inputs |= index_codes(inputs, case.codes, rng)
    if case.d_v:
        inputs["v"] = normal(*of_keys, case.d_v)
    if "k" in case.pairs and case.h_kv:
        inputs["k"][..., -D_ROPE:] = inputs["k"][:, :1, -D_ROPE:]
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
    poison(inputs, ("k", "index_k", "k_scale", "v"), unseen)
    blind = [t for t, seen in enumerate(rows) if len(seen) == 0]
    poison(inputs, ("q", "index_q", "weights", "row_weights"), blind)
    return split(inputs, case.pairs)


def poison(inputs: dict[str, Array], names: tuple[str, ...], rows: Any) -> None:
    """NaN in some rows of arrays, where there are such arrays."""
    for name in names:
        if name in inputs:
            inputs[name][rows] = E4M3_NAN if inputs[name].dtype == np.uint8 else np.nan


def index_codes(inputs: dict[str, Array], dtype: str, rng: np.random.Generator) -> dict[str, Array]:
    """e4m3 codes in place of index queries and keys, weights with the scales of queries, and the scales."""
    k_scale = np.exp2(rng.integers(-7, -4, len(inputs["index_k"]))).astype(np.float32)
    k_scale[::2] *= np.float32(1.3)
    q_scale = np.asarray(rng.uniform(0.01, 0.02, inputs["weights"].shape), np.float32)
    codes = {"index_q": inputs["index_q"] / q_scale[..., None], "index_k": inputs["index_k"] / k_scale[:, None]}
    h_i, d_i = inputs["index_q"].shape[1:]
    folded = inputs["weights"].astype(np.float32) * np.float32((h_i * d_i) ** -0.5) * q_scale
    made = {name: np.clip(x, -448, 448).astype(ml_dtypes.float8_e4m3fn).view(dtype) for name, x in codes.items()}
    return {**made, "weights": folded.astype(inputs["weights"].dtype), "k_scale": k_scale, "q_scale": q_scale}


def split(inputs: dict[str, Array], pairs: str) -> dict[str, Array]:
    """Queries and keys with their last columns in arrays of their own: views, as of a projection's output."""
    made = dict(inputs)
    for name in ("q", "k"):
        if name in pairs.lower():
            made[name], made[f"{name}_rope"] = inputs[name][..., :-D_ROPE], inputs[name][..., -D_ROPE:]
    if "k" in pairs and inputs["k"].ndim == 3:
        made["k_rope"] = made["k_rope"][:, 0]
    return made


def external_lse(inputs: dict[str, Array], rows: list[Array], rng: np.random.Generator) -> Array:
    """The attention's, larger by mass elsewhere; one head without a part, of both infinities."""
    q, k = (inputs[name].astype(np.float64) for name in ("q", "k"))
    k = k if k.ndim == 3 else k[:, None]
    queries = q.reshape(len(q), k.shape[1], -1, q.shape[2])  # of each KV head
    lse = np.full(q.shape[:2], -np.inf)
    for t, seen in enumerate(rows):
        if len(seen):
            logits = queries[t] @ k[seen].transpose(1, 2, 0) * q.shape[2] ** -0.5
            lse[t] = np.log(np.exp(logits).sum(axis=2)).reshape(-1)
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
    """Each rank's share of the main attention: some heads of q and lse, and everything else."""
    (_, h, _), of_keys = (
        inputs["q"].shape,
        [name for name in ("k", "k_rope") if inputs.get(name, inputs["q"]).ndim == 3],
    )
    of_keys = [name for name in of_keys if name in inputs]
    units = inputs["k"].shape[1] if of_keys else h  # what is divided: KV heads, with the heads that they serve
    names = ("k", "k_rope", "indices", "topk_length", "cu_seqlens_q", "cu_seqlens_kv")
    common = {name: inputs[name] for name in names if name in inputs and name not in of_keys}
    made = []
    for mine in np.array_split(np.arange(units), ranks):
        heads = np.arange(h).reshape(units, -1)[mine].reshape(-1)
        of_heads = {name: inputs[name][:, heads] for name in ("q", "q_rope", "lse") if name in inputs}
        made.append(common | of_heads | {name: inputs[name][:, mine] for name in of_keys})
    return made


def of_one_rank(inputs: dict[str, Array], ranks: int, rank: int) -> dict[str, Array]:
    """A rank's arguments of the loss in addition to the sums: its own queries, which are ignored."""
    mine = shares(inputs, ranks)[rank]
    return {name: mine.get(name, x) for name, x in inputs.items() if name != "lse"}


def run_loss(function: Callable[..., Any], **given: Any) -> Any:
    """A loss or `indexer_head_sums`, public or of a binding, with the arguments and defaults of the oracle."""
    width = given["q"].shape[-1] + (0 if given.get("q_rope") is None else D_ROPE)
    return flat(function)(**{"scale": width**-0.5, **given})


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
