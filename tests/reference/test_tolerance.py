"""The tolerance rule passes what rounding explains and nothing else."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from mla_cupy import reference
from tests.support import tolerance
from tests.support.cases import DecodeCase, DecodeInputs, make

DTYPES = ("bfloat16", "float16")


def inputs_of(dtype: str) -> DecodeInputs:
    return make(DecodeCase(h_q=8, s_q=2, seqlens=(300, 1, 64), dtype=dtype))


def copy_of(inputs: DecodeInputs) -> tuple[np.ndarray, np.ndarray]:
    out, lse = inputs.rounded
    return out.copy(), lse.copy()


@pytest.mark.parametrize("dtype", DTYPES)
def test_passes_the_rounded_oracle_and_other_orders_of_summing(dtype: str) -> None:
    inputs = inputs_of(dtype)
    tolerance.check(copy_of(inputs), inputs.exact, inputs.rounded, dtype)

    # Two splits, each with its own roundings, merged: what the split kernels do.
    q, cache, table, seqlens = inputs.arguments
    half = np.minimum(seqlens, 128)
    options = {"causal": False, "rounding": dtype}
    first = reference.mla_decode(q.astype(np.float32), cache, table, half, **options)
    rest = reference.mla_decode(q.astype(np.float32), cache, table[:, 2:], seqlens - half, **options)
    out, lse = reference.merge_states(np.stack([first[0], rest[0]]), np.stack([first[1], rest[1]]))
    exact = reference.mla_decode(*inputs.arguments, causal=False)
    rounded = reference.mla_decode(*inputs.arguments, causal=False, rounding=dtype)
    tolerance.check((out.astype(q.dtype), lse.astype(np.float32)), exact, rounded, dtype)


def bias_out(out: np.ndarray, lse: np.ndarray) -> None:
    out *= 1.02


def drop_a_key(out: np.ndarray, lse: np.ndarray) -> None:
    out[0, 0, 3] = out[0, 0, 4]


def one_element(out: np.ndarray, lse: np.ndarray) -> None:
    out[0, 1, 2, 3] += 0.05 * np.abs(out[0, 1, 2]).max()


def a_small_row(out: np.ndarray, lse: np.ndarray) -> None:
    smallest = np.unravel_index(np.argmin(np.abs(out).max(axis=-1) + (np.abs(out).max(axis=-1) == 0)), out.shape[:3])
    out[smallest] *= 1.1


def an_empty_row(out: np.ndarray, lse: np.ndarray) -> None:
    assert np.all(out[1, 0] == 0)  # one token for two queries
    out[1, 0, 0, 7] = 1e-3


def lse_off(out: np.ndarray, lse: np.ndarray) -> None:
    lse[0, 2, 1] += 2e-4


def lse_sign(out: np.ndarray, lse: np.ndarray) -> None:
    lse[np.isneginf(lse)] = np.inf


def lse_nan(out: np.ndarray, lse: np.ndarray) -> None:
    lse[0, 0, 0] = np.nan


def out_nan(out: np.ndarray, lse: np.ndarray) -> None:
    out[2, 1, 7, 511] = np.nan


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "damage",
    [bias_out, drop_a_key, one_element, a_small_row, an_empty_row, lse_off, lse_sign, lse_nan, out_nan],
)
def test_refuses(damage: Callable[[np.ndarray, np.ndarray], None], dtype: str) -> None:
    inputs = inputs_of(dtype)
    got = copy_of(inputs)
    damage(*got)
    with pytest.raises(AssertionError, match="lse" if "lse" in damage.__name__ else "out"):
        tolerance.check(got, inputs.exact, inputs.rounded, dtype)


def test_the_message_names_the_worst_coordinate() -> None:
    inputs = inputs_of("bfloat16")
    out, _ = copy_of(inputs)
    out[0, 1, 2, 3] += 100
    with pytest.raises(AssertionError, match=r"at \(0, 1, 2, 3\), got .* exact"):
        tolerance.check_out(out, inputs.exact[0], inputs.rounded[0], "bfloat16")
    out[0, 1, 2, 4] = np.inf
    with pytest.raises(AssertionError, match=r"infinity or NaN .* at \(0, 1, 2, 4\)"):
        tolerance.check_out(out, inputs.exact[0], inputs.rounded[0], "bfloat16")
    with pytest.raises(AssertionError, match="shape"):
        tolerance.check_out(out[0], inputs.exact[0], inputs.rounded[0], "bfloat16")


def test_many_small_errors_fail_by_direction() -> None:
    exact = np.random.default_rng(0).standard_normal((1, 1, 4, 512))
    rounded = exact.copy()
    rounded[..., :2] *= 1 + 2**-6  # few and large: the bound on single errors is wide
    got = exact * np.where(np.arange(512) % 2, 1 + 2**-6, 1 - 2**-6)
    with pytest.raises(AssertionError, match="cosine"):
        tolerance.check_out(got, exact, rounded, "float16", budget=1.0)


def test_a_direction_may_be_off_by_a_given_angle() -> None:
    exact = np.random.default_rng(0).standard_normal((1, 1, 4, 512))
    got = exact * np.where(np.arange(512) % 2, 1 + 1e-5, 1 - 1e-5)
    with pytest.raises(AssertionError, match="cosine"):
        tolerance.check_out(got, exact, exact, "float32", budget=1.0, direction=1e-6)
    tolerance.check_out(got, exact, exact, "float32", budget=1.0, direction=1e-5)


def test_nan_where_it_belongs_passes() -> None:
    inputs = inputs_of("float16")
    (out, lse), (exact, exact_lse) = copy_of(inputs), inputs.exact
    exact, exact_lse = exact.copy(), exact_lse.copy()
    for array in (out, exact):
        array[0, 0, 0] = np.nan
    for array in (lse, exact_lse):
        array[0, 0, 0] = np.nan
    tolerance.check((out, lse), (exact, exact_lse), inputs.rounded, "float16")


def test_other_seeds_widen_the_budget() -> None:
    exact = np.ones((1, 1, 1, 512))
    rounded, got = exact.copy(), exact + 1e-3
    with pytest.raises(AssertionError, match="rounded oracle"):
        tolerance.check_out(got, exact, rounded, "float32")
    tolerance.check_out(got, exact, rounded, "float32", budget=tolerance.error_of(exact + 6e-4, exact))
