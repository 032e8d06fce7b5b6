"""Driver calls of `merge_states`."""

from __future__ import annotations

import math

import numpy as np
import pytest

import mla_cupy
from tests.support.recorder import Recorder, address, elements


@pytest.mark.parametrize("lse_base", ["e", "2"])
@pytest.mark.parametrize(("dtype", "out_dtype"), [("float32", "float16"), ("float16", "float32"), ("float16", None)])
def test_merge(recorder: Recorder, lse_base: str, dtype: str, out_dtype: str | None) -> None:
    outs = np.zeros((5, 2, 3, 8, 70), dtype)[:, :, :, ::2, :64]
    lses = np.zeros((5, 2, 4, 6), np.float32)[..., ::2]
    out, lse = mla_cupy.merge_states(outs, lses, lse_base=lse_base, out_dtype=out_dtype, empty_lse=2.0, stream=3)
    (launch,) = recorder.launches
    p = launch.params
    assert out.dtype.name == (out_dtype or dtype)
    assert (out.shape, lse.shape) == ((2, 3, 4, 64), (2, 4, 3))
    assert [p[name] for name in ("outs", "lses", "out", "lse")] == [address(x) for x in (outs, lses, out, lse)]
    assert [p[f"outs_stride_{axis}_elems"] for axis in "nbsh"] == elements(outs, 4)
    assert [p[f"lses_stride_{axis}_elems"] for axis in "nbhs"] == elements(lses, 4)
    assert [p[f"out_stride_{axis}_elems"] for axis in "bsh"] == elements(out, 3)
    assert [p[f"lse_stride_{axis}_elems"] for axis in "bhs"] == elements(lse, 3)
    assert [p[name] for name in ("n", "b", "s_q", "h_q", "d")] == [5, 2, 3, 4, 64]
    assert (p["outs_are_fp32"], p["out_is_fp32"]) == (dtype == "float32", out.dtype == np.float32)
    assert p["to_log2"] == pytest.approx(1 / math.log(2) if lse_base == "e" else 1)
    assert p["factor"] * p["to_log2"] == pytest.approx(1)
    assert (p["empty"], launch.stream) == (2.0, 3)
    assert p["row_lanes"] == 8  # of eight columns each
    assert launch.grid == (-(-2 * 3 * 4 * 8 // 128), 1, 1)


@pytest.mark.parametrize(
    ("d", "lanes"), [(1, 1), (8, 1), (9, 2), (24, 4), (128, 16), (512, 64), (1024, 128), (4096, 128)]
)
def test_lanes_of_a_row(recorder: Recorder, d: int, lanes: int) -> None:
    """A power of two, enough for eight columns each, or a block's; the grid covers all rows."""
    mla_cupy.merge_states(np.zeros((2, 1, 5, 7, d), np.float32), np.zeros((2, 1, 7, 5), np.float32))
    (launch,) = recorder.launches
    assert launch.params["row_lanes"] == lanes
    assert (launch.grid[0] - 1) * 128 < 35 * lanes <= launch.grid[0] * 128
