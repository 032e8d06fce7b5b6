"""The kernels of dense attention in the simulator, through the public call, against the oracle.

Keys and values that no query sees are NaN, and sequences end anywhere in a tile. Each case runs with
each kernel once; modes take turns.
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import mla_cupy
from tests.dense.runs import GENERIC, GPUS, HOPPER, KERNELS, run
from tests.support.dense_cases import DenseCase, make
from tests.support.flat import flat
from tests.support.sim_driver import simulated
from tests.support.sim_modes import parametrize_pairs

CASES = [
    DenseCase(((1, 1),), starts=False),
    DenseCase(((64, 64),), h_q=2),
    DenseCase(((129, 129),), starts=False),  # two tiles of queries, the second with one
    DenseCase(((65, 430),), h_q=2, h_kv=1, dtype="float16", q_pair=True),  # tiles that all queries see as a whole
    DenseCase(((63, 40), (1, 130), (2, 0), (0, 9), (5, 128)), h_q=5, around=(3, 2)),
    DenseCase(((40, 140), (3, 0), (7, 20)), h_q=2, state="float32", k_rope="per_head"),
    DenseCase(((33, 260),), causal=False, state="bfloat16"),
    DenseCase(((66, 386),), scale=1.0),  # maxima that rise; a warpgroup sees a tile less
    DenseCase(((30, 200),), d_qk=256, d_v=256, scale=1.0, dtype="float16"),
    DenseCase(((70, 3),), h_q=2, state="float16", dtype="float16"),  # most queries see nothing
    DenseCase(((20, 170), (90, 81)), d_qk=256, d_v=256),
    DenseCase(((9, 160),), d_qk=256, d_v=256, dtype="float16", k_rope="within", causal=False, q_pair=True),
    DenseCase(((17, 200), (64, 128)), d_qk=128, d_v=128, h_q=4, h_kv=2, k_rope="within", dtype="float16"),
    DenseCase(((5, 7),), d_qk=128, d_v=128, q_pair=True),
]
SMALL = (
    DenseCase(((3, 5), (0, 2), (2, 0), (4, 2)), h_q=2, h_kv=1, around=(1, 1), state="float32", q_pair=True),
    DenseCase(((2, 40),), d_qk=256, d_v=256, dtype="float16", causal=False, state="float16", k_rope="per_head"),
    DenseCase(((2, 3),), d_qk=128, d_v=128, k_rope="within", starts=False),
)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if metafunc.function is test_hopper_kernel:
        parametrize_pairs(metafunc, list(itertools.product(CASES, [HOPPER])))


@pytest.mark.one_in(8)
def test_hopper_kernel(case: DenseCase, kernel: str, mode: tuple[str, int], sm_count: int) -> None:
    run(make(case), kernel, sm_count, mode)


@pytest.mark.one_in(4)
@pytest.mark.parametrize(
    ("case", "cc"), [(SMALL[0], (7, 5)), (SMALL[1], (9, 0)), (SMALL[2], (10, 0))], ids=["merged", "wide", "narrow"]
)
def test_generic_kernel(case: DenseCase, cc: tuple[int, int]) -> None:
    run(make(case), GENERIC, 1, ("random", 3), cc)


@pytest.mark.one_in(4)
@pytest.mark.parametrize("kernel", KERNELS)
def test_results_in_float32(kernel: str) -> None:
    """They are not rounded to 16 bits on the way."""
    inputs = make(DenseCase(((5, 9),), h_q=2))
    with simulated(1, GPUS[kernel]):
        out, _ = flat(mla_cupy.mla_prefill)(*inputs.arguments, **inputs.options, kernel=kernel, out_dtype="float32")
    assert out.dtype == np.float32
    assert (out != out.astype(inputs.q.dtype).astype(np.float32)).mean() > 0.5
    np.testing.assert_allclose(out, inputs.exact[0], rtol=0, atol=0.02)


@pytest.mark.parametrize("kernel", KERNELS)
def test_what_one_query_sees_stays_with_it(kernel: str) -> None:
    """NaN and infinity in values and keys of the same tile that only later queries see, and in the next sequence's."""
    inputs = make(DenseCase(((6, 6), (3, 3))))
    inputs.v[4, 0, 7], inputs.v[5, 0, 9] = np.inf, np.nan
    inputs.k[5, 0, 3] = np.nan
    inputs.v[6:] = np.nan
    out, _ = run(inputs, kernel)
    out = out.astype(np.float32)
    assert np.isfinite(out[:4]).all()
    assert np.isinf(out[4, 0, 7])
    assert np.isnan(out[6:]).all()


@pytest.mark.one_in(4)
@pytest.mark.parametrize("factor", [40.0, 1000.0])
@pytest.mark.parametrize(
    "case",
    [
        DenseCase(((70, 600),)),
        DenseCase(((20, 300),), d_qk=256, d_v=256, dtype="float16"),
        DenseCase(((40, 600),), mask=0.3),
        DenseCase(((40, 600),), mask=0.01),  # tiles without a key that the row sees
    ],
    ids=lambda case: case.id,
)
def test_a_tile_far_above_those_before(case: DenseCase, factor: float) -> None:
    """Tiles that do not look for maxima, with weights that are large, and infinite."""
    inputs = make(case)
    inputs.k[:30, :, :8] *= inputs.k.dtype.type(factor)
    run(inputs, HOPPER)


@pytest.mark.parametrize("kernel", KERNELS)
def test_results_stay_within_their_rows(kernel: str) -> None:
    """Memory between the rows of `out` and `lse`, and beyond a tile's last query, is not written."""
    inputs = make(DenseCase(((3, 4), (66, 5)), h_q=2))
    s_q, h_q, d_v = *inputs.q.shape[:2], inputs.v.shape[2]
    out, lse = np.full((s_q + 2, h_q + 1, d_v + 8), 7, inputs.q.dtype), np.full((s_q + 2, h_q + 3), 7, np.float32)
    run(inputs, kernel, out=out[1:-1, :h_q, :d_v], lse=lse[1:-1, :h_q])
    for array in (out, lse):
        array[1:-1, :h_q, ...][..., : d_v if array is out else None] = 7
        assert (array == 7).all()


@pytest.mark.parametrize("kernel", KERNELS)
def test_hostile_starts(kernel: str) -> None:
    """They are clamped, and never go down."""
    inputs = make(DenseCase(((9, 11),), starts=False))
    inputs.options["cu_seqlens_q"] = np.array([-(2**31), 4, 2, 2**31 - 1, 5], np.int32)
    inputs.options["cu_seqlens_kv"] = np.array([3, -1, 7, 6, 2**31 - 1], np.int32)
    run(inputs, kernel)


def test_many_sequences() -> None:
    """More than a warp has lanes; the longest are first, in bins."""
    sequences = tuple((1 + n % 3, n % 7) for n in range(40))
    run(make(DenseCase(sequences)), sm_count=3)


@pytest.mark.slow
def test_more_tiles_than_threads_of_the_schedule() -> None:
    """Without keys, so that only the schedule has work."""
    run(make(DenseCase(((128 * 513, 0),), state="float32")), sm_count=3)


@pytest.mark.parametrize("kernel", KERNELS)
def test_no_keys(kernel: str) -> None:
    inputs = make(DenseCase(((3, 0),), state="float32", starts=False))
    run(inputs, kernel)


@pytest.mark.parametrize("kernel", KERNELS)
def test_no_queries(kernel: str) -> None:
    """Nothing is launched."""
    inputs = make(DenseCase(((0, 3),), starts=False))
    with simulated(1, GPUS[kernel]) as target:
        out, lse = flat(mla_cupy.mla_prefill)(*inputs.arguments, **inputs.options, kernel=kernel)
    assert out.shape == (0, 1, 128)
    assert lse.shape == (0, 1)
    assert not target.launched


def test_odd_strides_fall_to_the_generic_kernel() -> None:
    inputs = make(DenseCase(((2, 3),)))
    odd = np.zeros((*inputs.k.shape[:2], inputs.k.shape[2] + 1), inputs.k.dtype)[..., 1:]
    odd[:] = inputs.k
    moved: dict[str, Any] = {"k": odd}
    run(replace(inputs, **moved), GENERIC)
    with simulated(1) as target:
        flat(mla_cupy.mla_prefill)(inputs.q, odd, inputs.v, **inputs.options)
    assert target.launched[-1] == f"mla_{GENERIC}"


@pytest.mark.one_in(8)
@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("state", ["float32", "bfloat16"])
def test_results_in_the_place_of_the_state(kernel: str, state: str) -> None:
    inputs = make(DenseCase(((66, 70), (3, 0)), h_q=2, state=state))
    out, lse = (inputs.options[name].copy() for name in ("state_out", "state_lse"))
    kept = inputs.exact, inputs.rounded
    inputs.options.update(state_out=out, state_lse=lse)
    assert kept[0] is inputs.exact
    got = run(inputs, kernel, out=out, lse=lse)
    assert got[0] is out
    assert got[1] is lse
