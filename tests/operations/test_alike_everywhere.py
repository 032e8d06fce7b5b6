"""Plans, `workspace=` and `kernel=` behave on a machine without a GPU as on one with it."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
import pytest

import mla_cupy
from mla_cupy import simulation
from mla_cupy.errors import ArgumentError, ShapeError, UnsupportedDeviceError
from mla_cupy.kernels import choice
from tests.support.flat import cascade_decode, plan_cascade, plan_decode

SHAPE: dict[str, Any] = {"max_b": 2, "s_q": 1, "h_q": 16, "max_pages": 2, "page_size": 64, "dtype": "float16"}
SCALE = 192**-0.5


@pytest.fixture
def _numpy_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLA_CUPY_BACKEND", "numpy")


def batch() -> tuple[np.ndarray[Any, Any], ...]:
    rng = np.random.default_rng(0)
    q = rng.standard_normal((2, 1, 16, 576)).astype(np.float16)
    cache = rng.standard_normal((4, 64, 1, 576)).astype(np.float16)
    return q, cache, np.array([[3, 1], [0, 2]], np.int32), np.array([70, 5], np.int32)


@pytest.mark.usefixtures("_numpy_backend")
def test_plans_accept_the_cpu() -> None:
    plan = plan_decode(**SHAPE, device="cpu")
    plan.update(batch()[3])
    out, _ = mla_cupy.mla_decode(*batch(), scale=SCALE, plan=plan)
    assert np.array_equal(out, mla_cupy.mla_decode(*batch(), scale=SCALE)[0])
    sizes = {"b": 2, "h_q": 16, "max_pages": 2, "page_size": 64, "dtype": "float16"}
    plan_cascade((mla_cupy.PrefixGroup(0, 2, 1),), **sizes, device="cpu")
    with pytest.raises(ArgumentError, match="device: got 'cuda', expected a CUDA ordinal, \"cpu\" or None"):
        plan_decode(**SHAPE, device="cuda")


@pytest.mark.usefixtures("_numpy_backend")
def test_plans_take_and_ignore_a_workspace() -> None:
    assert plan_decode(**SHAPE, workspace=np.empty(0, np.uint8)).workspace_bytes == 0


def test_plans_in_the_simulator_need_no_device() -> None:
    with simulation.simulated() as gpu:
        plan = plan_decode(**SHAPE)
        plan.update(batch()[3])
        mla_cupy.mla_decode(*batch(), scale=SCALE, plan=plan)
    assert any("decode" in name for name in gpu.launched)


@pytest.mark.usefixtures("_numpy_backend")
@pytest.mark.parametrize("nbytes", [0, 1000])
def test_workspaces_are_accepted(nbytes: int) -> None:
    mla_cupy.mla_decode(*batch(), scale=SCALE, workspace=np.empty(nbytes, np.uint8))


@pytest.mark.usefixtures("_numpy_backend")
def test_workspaces_are_checked() -> None:
    with pytest.raises(ShapeError, match="workspace: got float32"):
        mla_cupy.mla_decode(*batch(), scale=SCALE, workspace=np.empty(4, np.float32))


@pytest.mark.usefixtures("_numpy_backend")
def test_kernels_are_checked(caplog: pytest.LogCaptureFixture) -> None:
    """Kernel names are checked against every GPU; the log says that they do not run."""
    choice._say_not_run.cache_clear()
    with pytest.raises(ArgumentError, match=r"did you mean 'decode_sm90_seesaw'\?"):
        mla_cupy.mla_decode(*batch(), scale=SCALE, kernel="decode_sm90_sesaw")
    with pytest.raises(UnsupportedDeviceError, match="decode_sm90_records"):
        mla_cupy.mla_decode(*batch(), scale=SCALE, kernel="decode_sm90_records")
    with pytest.raises(UnsupportedDeviceError, match="decode_sm90_records"):
        plan_decode(**SHAPE, device="cpu", kernel="decode_sm90_records")
    with caplog.at_level(logging.WARNING, "mla_cupy"):
        mla_cupy.mla_decode(*batch(), scale=SCALE, kernel="decode_sm90_small")
        mla_cupy.mla_decode(*batch(), scale=SCALE, kernel="decode_sm90_small")
    assert [record.getMessage() for record in caplog.records] == [
        "mla_decode does not run decode_sm90_small: there is no GPU, and the NumPy backend computes"
    ]


@pytest.mark.usefixtures("_numpy_backend")
def test_kernels_of_stages_are_checked() -> None:
    groups = (mla_cupy.PrefixGroup(0, 2, 1),)
    q, cache, table, seqlens = batch()
    table = np.array([[3, 1], [3, 2]], np.int32)
    arrays = (q, cache[:, :, 0], table, seqlens)
    cascade_decode(*arrays, groups, kernel="decode_sm90_small")
    with pytest.raises(ArgumentError, match=r"did you mean 'decode_sm90_small'\?"):
        cascade_decode(*arrays, groups, kernel="decode_sm90_smaller")
    with pytest.raises(UnsupportedDeviceError, match="decode_sm90_records"):
        cascade_decode(*arrays, groups, kernel="decode_sm90_records")
