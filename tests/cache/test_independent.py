"""`independent=True` in the simulator, which runs launches one after another: where each kernel waits, and results."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest

import mla_cupy
import ptxsim
from tests.cache import absorbed_runs, prepare_runs
from tests.cache.absorbed_runs import AbsorbedCase
from tests.cache.inputs import Array
from tests.cache.prepare_runs import PrepareCase
from tests.support.sim_driver import instead_of_waiting, simulated

MARK = 7
PREPARE = PrepareCase(n=11, h=2, d=64, record="v32", hostile=False, return_rope=True)
CODES = PrepareCase(n=3, h=2, quantise=True, hostile=False)
ABSORBED = AbsorbedCase(n=19, h=1, d_nope=64, return_rope=True)
CASES = {"prepare": PREPARE, "codes": CODES, "absorbed": ABSORBED, "absorb": None}


def run(name: str, independent: bool) -> dict[str, Array]:
    """One call in the simulator: everything that it writes."""
    case = CASES[name]
    if isinstance(case, PrepareCase):
        inputs = prepare_runs.make(case)
        arrays, options, width = inputs.arrays, inputs.options, case.d
    else:
        arrays, options = absorbed_runs.make(ABSORBED)
        width = 576
    if case is None:
        arrays, options, width = {"q_nope": arrays["q"][..., :64], "w_uk": arrays["w_uk"]}, {}, 512
    first = arrays["q_nope" if case is None else "q"]
    coded = bool(options.get("quantise"))
    written = {"out": np.full((*first.shape[:2], width), MARK, np.uint8 if coded else first.dtype)}
    written |= {"q_scales": np.full(first.shape[:2], MARK, np.float32)} if coded else {}
    if options.get("return_rope"):
        written["rope_out"] = np.full((len(first), 64), MARK, first.dtype)
    function: Any = mla_cupy.absorb if case is None else mla_cupy.mla_prepare
    with simulated(2):
        function(**arrays, **options, **written, independent=independent)
    return written | {key: x for key, x in arrays.items() if key == "cache"}


def same(a: dict[str, Array], b: dict[str, Array]) -> bool:
    return all(a[name].tobytes() == b[name].tobytes() for name in a)


@pytest.mark.parametrize("name", CASES)
def test_the_wait_comes_first_or_last(name: str) -> None:
    wanted = run(name, independent=False)
    assert same(run(name, independent=True), wanted)
    with instead_of_waiting("exit;"):
        untouched, made = run(name, independent=False), run(name, independent=True)
    assert all((untouched[key] == MARK).all() for key in untouched if key != "cache")
    assert same(made, wanted)
    for independent in (False, True):
        with instead_of_waiting("trap;"), pytest.raises(ptxsim.SimError, match="trap"):
            run(name, independent)


@pytest.mark.parametrize(
    ("options", "missing"),
    [({}, "out"), ({"quantise": True, "theta": 1e4}, "q_scales"), ({"return_rope": True, "theta": 1e4}, "rope_out")],
)
def test_results_are_memory_of_the_caller(options: dict[str, Any], missing: str) -> None:
    """New memory may be what the previous call, which still runs, has given back."""
    q, rope = np.ones((3, 2, 64), np.float16), np.ones((3, 64), np.float16)
    given: dict[str, Any] = {"positions": np.arange(3)} if options else {}
    if missing != "out":
        given["out"] = np.empty((3, 2, 64), np.uint8 if missing == "q_scales" else np.float16)
    if missing == "rope_out":
        given["rope"] = rope
    expected = f"{missing}: got None, expected an array with independent; allocate it before the previous call"
    with simulated(1) as target, pytest.raises(mla_cupy.ArgumentError, match=re.escape(expected)):
        mla_cupy.mla_prepare(q, **given, **options, independent=True)
    assert target.launched == []


def test_on_the_host() -> None:
    q_nope, w_uk = np.ones((2, 4, 128), np.float16), np.ones((4, 128, 512), np.float16)
    out = np.empty((2, 4, 512), np.float16)
    assert mla_cupy.absorb(q_nope, w_uk, independent=True, out=out) is out
    assert (out == 128).all()
    with pytest.raises(mla_cupy.ArgumentError, match="out: got None"):
        mla_cupy.absorb(q_nope, w_uk, independent=True)
    with pytest.raises(mla_cupy.ArgumentError, match="independent: got 2, expected True or False"):
        mla_cupy.absorb(q_nope, w_uk, independent=2, out=out)  # type: ignore[arg-type]
