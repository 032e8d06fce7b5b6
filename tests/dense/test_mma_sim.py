"""Dense attention by mma.sync in the simulator, from the PTX of the GPUs that it is for, against the oracle.

What every kernel of the forward has to do is in `test_sim` and `test_mask`, for this one by name.
"""

from __future__ import annotations

import pytest

import mla_cupy
from tests.dense.runs import BY_NAME, GENERIC, MMA, MMA_ON, run
from tests.dense.test_mask import ENDS, LARGE, LONG, in_place, make_finite
from tests.dense.test_sim import CASES
from tests.support.dense_cases import DenseCase, make
from tests.support.flat import flat
from tests.support.sim_driver import simulated

#: Cases that it supports: wider values do not fit into the registers.
NARROW = [case for case in CASES if case.d_v == 128]
#: Two tiles of each group, so that a slot is used again; a group without a tile; one warp of a tile without a query.
HARD = DenseCase(((40, 270), (97, 60), (2, 0)), h_q=2, h_kv=1, around=(1, 2), state="float32", q_pair=True)
F16 = DenseCase(((130, 33),), k_rope="per_head", dtype="float16", state="float16")
ORDINARY = [
    (HARD, (8, 0), ("random", 5)),
    (HARD, (8, 9), ("random", 5)),
    (HARD, (12, 0), ("late", 0)),
    (DenseCase(((66, 386),), scale=1.0), (8, 0), ("early", 0)),  # maxima that rise
    (DenseCase(((66, 386),), scale=1.0, causal=False), (8, 9), ("late", 0)),
    (DenseCase(((17, 200), (64, 128)), d_qk=128, h_q=4, h_kv=2, k_rope="within"), (8, 9), ("random", 1)),
]


def _mode(mode: tuple[str, int]) -> str:
    return f"{mode[0]}{mode[1]}"


@pytest.mark.one_in(8)
@pytest.mark.parametrize(("case", "cc", "mode"), ORDINARY, ids=lambda x: x.id if hasattr(x, "id") else str(x))
def test_ordinary_choice(case: DenseCase, cc: tuple[int, int], mode: tuple[str, int]) -> None:
    run(make(case), MMA, 1, mode, cc)


@pytest.mark.parametrize(
    ("cc", "case"), [((8, 9), LONG), pytest.param((8, 0), ENDS, marks=pytest.mark.slow)], ids=["long", "ends"]
)
def test_masks(cc: tuple[int, int], case: DenseCase) -> None:
    """Tiles of 48 keys, whose bits fill no whole words, and of 64; results overwrite the state."""
    inputs = make_finite(case)
    run(inputs, MMA, 1, ("late", 0), cc, **(in_place(inputs) if case.state else {}))


@pytest.mark.slow
@pytest.mark.parametrize("mode", [("early", 0), ("late", 0), ("random", 1)], ids=_mode)
@pytest.mark.parametrize(
    "case", [*NARROW, F16, HARD, *(case for case in LARGE if case.d_v == 128)], ids=lambda case: case.id
)
@pytest.mark.parametrize("cc", MMA_ON, ids=str)
def test_all_pairs(cc: tuple[int, int], case: DenseCase, mode: tuple[str, int]) -> None:
    run(make(case), MMA, 2, mode, cc)


def test_what_it_does_not_take() -> None:
    """Wide values go to the plain kernel."""
    wide = make(DenseCase(((2, 3),), d_qk=256, d_v=256))
    with simulated(1, (8, 0)) as target:
        flat(mla_cupy.mla_prefill)(*wide.arguments, **wide.options)
    assert target.launched[-1] == BY_NAME[GENERIC].entry
    with simulated(1, (8, 0)), pytest.raises(mla_cupy.UnsupportedDeviceError, match="up to 128 columns"):
        flat(mla_cupy.mla_prefill)(*wide.arguments, **wide.options, kernel=MMA)
