"""The forms that the losses' operands have: keys of all heads or each, whole or in pairs, codes with scales."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

import mla_cupy
from mla_cupy import DTypeError, ShapeError, reference
from tests.support.loss_cases import LossCase, check_loss, loss_inputs, run_loss

CASE = LossCase(h=4, d=72, h_kv=2, pairs="qk", lse=True)


@pytest.fixture(autouse=True)
def _numpy_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLA_CUPY_BACKEND", "numpy")


def zeros(*shape: int, dtype: Any = ml_dtypes.bfloat16) -> Any:
    return np.zeros(shape, dtype)


def test_forms_agree() -> None:
    """Equal numbers: whole and in pairs, last columns of all heads and of each, one KV head and no head axis."""
    inputs = loss_inputs(LossCase(h=4, d=72, h_kv=2, pairs="k", lse=True))
    exact = run_loss(mla_cupy.indexer_warmup_loss, **inputs)
    q, k, k_rope = inputs["q"], inputs["k"], inputs["k_rope"]
    both = np.stack([k_rope, k_rope], axis=1)
    whole = np.concatenate([k, both], axis=2)
    changes: list[dict[str, Any]] = [
        {"q": q[..., :8], "q_rope": q[..., 8:]},
        {"k_rope": k_rope[:, None]},
        {"k_rope": both},
        {"k": whole, "k_rope": None},
        {"k": np.repeat(whole, 2, axis=1), "k_rope": None},
    ]
    for change in changes:
        got = run_loss(mla_cupy.indexer_warmup_loss, **{**inputs, **change})
        for x, y in zip(got[:6], exact[:6], strict=True):
            np.testing.assert_array_equal(x, y)
    shared = loss_inputs(LossCase(h=3, lse=True))
    check_loss(
        run_loss(mla_cupy.indexer_warmup_loss, **{**shared, "k": shared["k"][:, None]}),
        reference.indexer_warmup_loss(**shared),
    )


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"k": zeros(9, 2, 5)}, ShapeError, "width of k: got 69, expected 72, like q.*q_rope and k_rope"),
        ({"k_rope": None}, ShapeError, "width of k: got 8, expected 72"),
        ({"k": zeros(9, 3, 8)}, ShapeError, "q.shape.1.: got 4, expected a multiple of h_kv=3"),
        ({"k": zeros(9, 8), "k_rope": zeros(9, 4, 64)}, ShapeError, "k_rope.shape.1.: got 4, expected 1, as k has no"),
        ({"k_rope": zeros(9, 4, 64)}, ShapeError, "k_rope.shape.1.: got 4, expected 1 or h_kv=2"),
        ({"k_rope": zeros(9, 32)}, ShapeError, "k_rope.shape.-1.: got 32, expected d_rope=64"),
        ({"v": zeros(9, 16)}, ShapeError, "v.shape.1.: got 1, expected h_kv=2, like k"),
        ({"v": zeros(9, 4, 16)}, ShapeError, "v.shape.1.: got 4, expected h_kv=2, like k"),
        ({"v": zeros(9, 2, 513)}, ShapeError, "d_v: got 513, expected at most 512"),
        ({"q": zeros(5, 4, 520), "k": zeros(9, 2, 520)}, ShapeError, "d: got 584, expected at most 576"),
        ({"index_q": zeros(5, 2, 32, dtype=np.uint8)}, DTypeError, "index_k.dtype: got bfloat16, expected uint8, like"),
        (
            {"index_q": zeros(5, 2, 32, dtype=np.float16)},
            DTypeError,
            "index_q.dtype: got float16, expected bfloat16, l",
        ),
    ],
)
def test_mistakes(changes: dict[str, Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        run_loss(mla_cupy.indexer_warmup_loss, **{**loss_inputs(CASE), **changes})
