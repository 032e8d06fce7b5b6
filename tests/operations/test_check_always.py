"""MLA_CUPY_CHECK=1 checks the values of every call that can be checked, as `checking` does for a block of code."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import mla_cupy
from mla_cupy import ArgumentError
from tests.operations.test_alike_everywhere import SCALE, batch
from tests.support.recorder import Recorder

REPOSITORY = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def _check(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLA_CUPY_CHECK", "1")


def refuses(q, cache, table, seqlens, call=mla_cupy.mla_decode):  # type: ignore[no-untyped-def]
    for _ in range(2):  # the second call is like the first one
        with pytest.raises(ArgumentError, match=r"block_table\[0, 1\]: got 99"):
            call(q, cache, table, seqlens, scale=SCALE)


@pytest.fixture
def _numpy_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLA_CUPY_BACKEND", "numpy")


@pytest.mark.usefixtures("_numpy_backend")
def test_on_the_cpu() -> None:
    arrays = batch()
    mla_cupy.mla_decode(*arrays, scale=SCALE)
    arrays[2][0, 1] = 99
    refuses(*arrays)


def test_calls_like_an_earlier_one(recorder: Recorder) -> None:
    """On a GPU they skip every check otherwise."""
    arrays = batch()
    mla_cupy.mla_decode(*arrays, scale=SCALE)
    recorder.launches.clear()
    arrays[2][0, 1] = 99
    refuses(*arrays)
    assert recorder.launches == []


def test_a_capture_is_not_waited_for(recorder: Recorder, monkeypatch: pytest.MonkeyPatch) -> None:
    arrays = batch()
    mla_cupy.mla_decode(*arrays, scale=SCALE)
    arrays[2][0, 1] = 99
    monkeypatch.setattr(recorder, "is_capturing", lambda stream: True)
    mla_cupy.mla_decode(*arrays, scale=SCALE)


@pytest.mark.usefixtures("_numpy_backend")
def test_in_pytorch() -> None:
    torch = pytest.importorskip("torch")
    import mla_cupy.torch as mla

    arrays = tuple(map(torch.from_numpy, batch()))
    mla.mla_decode(*arrays, scale=SCALE)
    arrays[2][0, 1] = 99
    refuses(*arrays, call=mla.mla_decode)
    refuses(*arrays, call=torch.compile(mla.mla_decode, backend="aot_eager", fullgraph=True))


IN_JAX = """
import os
import jax
import mla_cupy.jax as mla
from tests.operations.test_alike_everywhere import SCALE, batch

q, cache, table, seqlens = batch()
table[0, 1] = 99
try:
    jax.block_until_ready(jax.jit(lambda *arrays: mla.mla_decode(*arrays, scale=SCALE))(q, cache, table, seqlens))
except jax.errors.JaxRuntimeError as error:
    print("block_table[0, 1]: got 99" in str(error), flush=True)
os._exit(0)  # without JAX's own report of the same error
"""


@pytest.mark.usefixtures("_numpy_backend")
def test_in_jax() -> None:
    pytest.importorskip("jax")
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), "JAX_PLATFORMS": "cpu", "MLA_CUPY_JIT": "lazy"}
    done = subprocess.run([sys.executable, "-c", IN_JAX], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout == "True\n"
