"""Masks of `mla_prefill`, and `prefill_mask`, which makes them of indices: in the simulator, against the oracle."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import mla_cupy
from mla_cupy import ShapeError, reference
from tests.dense.runs import HOPPER, KERNELS, run
from tests.support.dense_cases import DenseCase, DenseInputs, make
from tests.support.flat import flat
from tests.support.sim_driver import simulated

ENDS = DenseCase(((3, 5), (4, 4)), mask=0.5, h_q=2)
#: One tile that all queries see as a whole, and the end.
LONG = DenseCase(((3, 140),), mask=0.5, state="float32")
#: A second tile with bits that fill no whole words.
WIDE = DenseCase(((2, 90),), d_qk=256, d_v=256, mask=0.5)


def in_place(inputs: DenseInputs) -> dict[str, Any]:
    """Results in the place of the state, which a second merge would change."""
    state = {name: inputs.options[name].copy() for name in ("state_out", "state_lse")}
    assert inputs.exact
    assert inputs.rounded
    inputs.options.update(state)
    return {"out": state["state_out"], "lse": state["state_lse"]}


def make_finite(case: DenseCase) -> DenseInputs:
    """Without NaN in hidden values, so that no item has to come again."""
    inputs = make(case)
    inputs.v[np.isnan(inputs.v.astype(np.float32))] = 1
    return inputs


#: Cases like those without a mask: tiles that end anywhere, heads that share keys, operands in pieces.
LARGE = [
    DenseCase(((1, 1), (63, 140), (65, 3)), h_q=4, h_kv=2, mask=0.3, q_pair=True, state="bfloat16", around=(2, 3)),
    DenseCase(((129, 300),), mask=0.5, k_rope="per_head", dtype="float16"),
    DenseCase(((66, 400),), mask=0.02, scale=1.0, causal=False),  # rows and tiles that see nothing
    DenseCase(((30, 270), (70, 3)), d_qk=256, d_v=256, mask=0.4, dtype="float16", state="float16"),
    DenseCase(((17, 200), (64, 128)), d_qk=128, d_v=128, h_q=4, h_kv=2, k_rope="within", mask=0.9),
]


@pytest.mark.slow
@pytest.mark.parametrize("mode", [("early", 0), ("random", 1)], ids=["early", "random"])
@pytest.mark.parametrize("case", LARGE, ids=lambda case: case.id)
def test_large_cases(case: DenseCase, mode: tuple[str, int]) -> None:
    """NaN is in every element that no query sees."""
    run(make(case), HOPPER, 3, mode)


@pytest.mark.one_in(4)
@pytest.mark.parametrize("case", [ENDS, LONG, WIDE], ids=["ends", "long", "wide"])
def test_mask(case: DenseCase) -> None:
    """No item comes again."""
    run(make_finite(case), HOPPER, 1, ("late", 0))


@pytest.mark.one_in(8)
@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("case", [ENDS, LONG], ids=["ends", "long"])
def test_hidden_values_never_show(case: DenseCase, kernel: str) -> None:
    """NaN and infinity in keys and values that some queries see; on Hopper the item comes again, values cleaned."""
    inputs = make(case)
    seen = np.unpackbits(inputs.options["mask"], axis=1, bitorder="little")
    seen[:3, :3] = [[1, 0, 0], [0, 1, 0], [0, 0, 1]]  # the keys that the first query does not see are not finite
    inputs.options["mask"][:] = np.packbits(seen, axis=1, bitorder="little")
    inputs.k[:3], inputs.v[:3] = 1, 1
    inputs.v[1, 0, 5], inputs.v[2, 0, 7] = np.inf, np.nan
    out, _ = run(inputs, kernel, mode=("random", 1), **(in_place(inputs) if case.state else {}))
    out = out.astype(np.float32)
    assert np.isfinite(out[0]).all()
    assert np.isinf(out[1, 0, 5]) or np.isnan(inputs.exact[0][1, 0, 5])
    assert np.isnan(out[2, 0, 7])


def test_only_who_waited_stores_again() -> None:
    """A key that is not a number makes its own query wait for the second time; the others' rows are merged once."""
    inputs = make_finite(DenseCase(((20, 30),), mask=0.9, state="float32"))
    seen = np.unpackbits(inputs.options["mask"], axis=1, bitorder="little")
    seen[:, 2] = np.arange(20) == 3
    inputs.options["mask"][:] = np.packbits(seen, axis=1, bitorder="little")
    inputs.k[2] = np.nan
    out, _ = run(inputs, HOPPER, **in_place(inputs))
    assert np.isnan(out[3]).all()
    assert np.isfinite(out[:3]).all()
    assert np.isfinite(out[4:]).all()


@pytest.mark.parametrize("kernel", KERNELS)
def test_narrow_and_wide_masks(kernel: str) -> None:
    """Keys beyond the mask are hidden; beyond the sequence its bits mean nothing."""
    inputs = make(DenseCase(((2, 140),), causal=False))
    for nbytes in (16, 48):
        inputs.options["mask"] = np.full((2, nbytes), 255, np.uint8)
        _, lse = run(DenseInputs(inputs.case, *inputs.arguments, inputs.options), kernel)
        options = {"k_rope": inputs.options["k_rope"][: 8 * nbytes], "causal": False}
        wanted = reference.mla_prefill(inputs.q, inputs.k[: 8 * nbytes], inputs.v[: 8 * nbytes], **options)[1]
        np.testing.assert_allclose(lse, wanted, atol=1e-2)


BAD_MASKS = {
    "a bit for each key, and no more": (np.ones((3, 25), np.uint8), r"mask\.strides.*multiples of 16"),
    "odd": (np.ones((3, 48), np.uint8)[:, :25], r"mask\.shape\[1\].*multiple of 16"),
    "too narrow": (np.ones((3, 16), np.uint8), "at least 25 bytes"),
    "other queries": (np.ones((4, 32), np.uint8), r"mask\.shape\[0\]"),
    "steps": (np.ones((3, 40), np.uint8)[:, :32], r"mask\.strides.*multiples of 16"),
    "starts": (np.ones(3 * 32 + 1, np.uint8)[1:].reshape(3, 32), r"mask\.strides.*multiples of 16"),
    "backwards": (np.ones((3, 32), np.uint8)[::-1], "strides"),
}


@pytest.mark.parametrize("name", BAD_MASKS)
def test_bad_masks(name: str) -> None:
    """They are errors before anything is launched."""
    inputs, (mask, message) = make(DenseCase(((3, 200),), starts=False)), BAD_MASKS[name]
    with simulated(1) as target, pytest.raises(ShapeError, match=message):
        flat(mla_cupy.mla_prefill)(*inputs.arguments, **inputs.options, mask=mask)
    assert not target.launched


# ---- The mask that indices make -----------------------------------------------------------------------------------


#: top-k, keys, starts, and whether indices are relative.
SELECTIONS: list[Any] = [
    (5, 20, None, False),
    (7, 300, ((0, 2, 2, 5), (0, 10, 40, 300)), False),
    (8, 128, ((1, 3, 2, 99), (-5, 4, 3, 2**31 - 1)), True),  # starts that are clamped, and never go down
    (6, 40, ((4, -3, 6), (7, 9, 0)), False),
    (300, 70_000, None, True),  # more than a window
    (0, 5, None, False),
]


@pytest.mark.parametrize(("topk", "max_keys", "starts", "relative"), SELECTIONS)
@pytest.mark.parametrize("reversed_", [False, True])
def test_mask_of_indices(topk: int, max_keys: int, starts: Any, relative: bool, reversed_: bool) -> None:
    """Whatever the indices are."""
    rng = np.random.default_rng(topk)
    indices = rng.integers(-3, max_keys + 20, (6, topk)).astype(np.int32)
    for hostile in (-(2**31), 2**31 - 1):
        indices[rng.random(indices.shape) < 0.1] = hostile
    indices = indices[:, ::-1] if reversed_ else np.sort(indices, axis=1)
    options: dict[str, Any] = {"relative": relative}
    if starts:
        names = "cu_seqlens_q", "cu_seqlens_kv"
        options |= {name: np.array(ends, np.int32) for name, ends in zip(names, starts, strict=True)}
    with simulated(1):
        mask = flat(mla_cupy.prefill_mask)(indices, max_keys, **options)
    np.testing.assert_array_equal(mask, reference.prefill_mask(indices, max_keys, **options)[0])


def test_oracle_of_the_mask() -> None:
    """The mask compared with sets."""
    indices = np.array([[0, 3, -1], [4, 4, 9], [6, 5, 300], [8, 7, 0]])
    starts = {"cu_seqlens_q": [0, 2, 3], "cu_seqlens_kv": [0, 5, 8]}
    for relative, wanted in ((False, [{0, 3}, {4}, {1, 0}, set()]), (True, [{0, 3}, {4}, set(), set()])):
        (mask,) = reference.prefill_mask(indices, 5, **starts, relative=relative)
        bits = np.unpackbits(mask, axis=1, bitorder="little")
        assert [set(np.flatnonzero(row)) for row in bits] == wanted


def test_same_attention_as_sparse() -> None:
    """The keys that indices select, through the mask and by hand."""
    rng = np.random.default_rng(3)
    inputs = make(DenseCase(((4, 6),), starts=False, causal=False))
    indices = np.argsort(rng.random((4, 6)))[:, :3].astype(np.int32)
    (mask,) = reference.prefill_mask(indices, 6)
    out, lse = reference.mla_prefill(*inputs.arguments, **inputs.options, mask=mask)
    for i, keys in enumerate(indices):
        keys = np.sort(keys)
        options = {"k_rope": inputs.options["k_rope"][keys], "causal": False}
        one = reference.mla_prefill(inputs.q[i : i + 1], inputs.k[keys], inputs.v[keys], **options)
        np.testing.assert_allclose(out[i], one[0][0], rtol=1e-12)
        np.testing.assert_allclose(lse[i], one[1][0], rtol=1e-12)
