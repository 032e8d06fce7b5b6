"""Inputs of the indexer's loss of the sparse stage: lists with holes, duplicates and numbers that are no key."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

from mla_cupy import reference
from mla_cupy.reference.sparse import selected_rows
from tests.support.loss_cases import FLOAT32_ERROR, check_loss, external_lse, index_codes, poison

Array = np.ndarray[Any, Any]
HOSTILE = (-1, -(2**31), 2**31 - 1)


@dataclass(frozen=True)
class SparseLossCase:
    """`sequences` are (queries, keys) of each."""

    s_q: int = 5
    s_kv: int = 12
    topk: int = 7
    h: int = 3
    h_i: int = 2
    d: int = 40
    d_i: int = 32
    causal: bool = False
    lse: bool = False
    lengths: bool = False
    row_weights: bool = True
    sequences: tuple[tuple[int, int], ...] = ()
    weights: str = "float32"
    seed: int = 0
    codes: str = ""

    @property
    def id(self) -> str:
        flags = [name for name in ("causal", "lse", "lengths") if getattr(self, name)]
        more = [f"b{len(self.sequences)}"] if self.sequences else []
        more += ["bf16"] if self.weights == "bfloat16" else []
        more += [self.codes] if self.codes else []
        sizes = f"q{self.s_q}-kv{self.s_kv}-k{self.topk}-{self.h}x{self.d}-{self.h_i}x{self.d_i}"
        return "-".join([sizes, *flags, *more])


def sparse_loss_inputs(case: SparseLossCase) -> dict[str, Array]:
    """The arrays of a call, by name; NaN in the keys that nobody selects."""
    rng = np.random.default_rng([case.seed, case.s_q, case.s_kv, case.topk])

    def normal(*shape: int) -> Array:
        return rng.standard_normal(shape).astype(ml_dtypes.bfloat16)

    inputs: dict[str, Array] = {
        "q": normal(case.s_q, case.h, case.d),
        "k": normal(case.s_kv, case.d),
        "index_q": normal(case.s_q, case.h_i, case.d_i),
        "index_k": normal(case.s_kv, case.d_i),
        "weights": rng.standard_normal((case.s_q, case.h_i), np.float32).astype(case.weights),
        "indices": rng.integers(0, max(1, case.s_kv - 2), (case.s_q, case.topk)).astype(np.int32),
    }
    if case.codes:
        inputs |= index_codes(inputs, case.codes, rng)
    holes = np.asarray(rng.random(inputs["indices"].shape) < 0.2)
    inputs["indices"][holes] = rng.choice(np.array(HOSTILE, np.int32), holes.sum())
    if case.s_q > 2:
        inputs["indices"][2] = -1  # a token that selects nothing
    if case.row_weights:
        inputs["row_weights"] = rng.uniform(-0.5, 2, case.s_q).astype(np.float32)
        inputs["row_weights"][:1] = 0
    if case.lengths:
        inputs["topk_length"] = rng.integers(-2, case.topk + 3, case.s_q).astype(np.int32)
    if case.sequences:
        for name, sizes in zip(("cu_seqlens_q", "cu_seqlens_kv"), zip(*case.sequences, strict=True), strict=True):
            inputs[name] = np.cumsum([0, *sizes]).astype(np.int32)
    starts = (inputs.get("cu_seqlens_q"), inputs.get("cu_seqlens_kv"))
    length = inputs.get("topk_length")
    rows = list(selected_rows(inputs["indices"], case.s_kv, length, case.causal, *starts))
    if case.lse:
        inputs["lse"] = external_lse(inputs, rows, rng)
    unseen = np.setdiff1d(np.arange(case.s_kv), np.concatenate([np.zeros(0, int), *rows]))
    poison(inputs, ("k", "index_k", "k_scale"), unseen)
    return inputs


def check_sparse_loss(got: tuple[Any, ...], exact: reference.SparseLoss, error: float = FLOAT32_ERROR) -> None:
    """Check with the rule of the warm-up loss."""
    check_loss((*got, None, None), reference.WarmupLoss(*exact, None, None), error)
