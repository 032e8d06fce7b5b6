"""The quick start's first example: a barrier too few before wgmma reads what all warps have written."""

from __future__ import annotations

import re
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

import ptxsim
from simtest import nvrtc
from simtest.runners import MODES

HOUSE = Path(__file__).resolve().parents[2]
TILES = 3


def attend(defines: tuple[str, ...], mode: str, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Run the example; return its result and NumPy's."""
    rng = np.random.default_rng(seed)
    scores = rng.standard_normal((TILES, 64, 64)).astype("f4")
    values = rng.standard_normal((TILES, 64, 64)).astype(ml_dtypes.bfloat16)
    out = np.zeros((64, 64), "f4")
    source = (HOUSE / "examples" / "missing_barrier.cu").read_text()
    module = ptxsim.Module(nvrtc.compile_ptx(source, "sm_90a", None, defines))
    module.launch("attend", 1, 128, [scores, values, out, TILES], mode=mode, seed=seed)
    weights = np.exp2(scores).astype(ml_dtypes.bfloat16).astype("f4")
    return out, np.einsum("tkd,thk->dh", values.astype("f4"), weights)


@pytest.mark.parametrize(("mode", "seed"), MODES)
def test_a_missing_barrier_is_found_in_every_mode(mode: str, seed: int) -> None:
    with pytest.raises(ptxsim.RaceError, match="without synchronisation") as caught:
        attend((), mode, seed)
    assert caught.value.finding.at.text.startswith("wgmma.mma_async")
    assert caught.value.finding.other_at.text.startswith("st.shared")
    np.testing.assert_allclose(*attend(("FIXED",), mode, seed), rtol=1e-5, atol=1e-4)


def test_the_quick_start_names_the_lines_of_the_example() -> None:
    lines = (HOUSE / "examples" / "missing_barrier.cu").read_text().splitlines()
    text = (HOUSE / "QUICKSTART.md").read_text()
    product, store = (int(re.search(r"Line (\d+) multiplies, line (\d+)", text)[k]) for k in (1, 2))
    assert "multiply(d" in lines[product - 1]
    assert "pack(exp2f" in lines[store - 1]
    assert text.count(f"missing_barrier.cu:{product})") == text.count(f"missing_barrier.cu:{store})") == 1
