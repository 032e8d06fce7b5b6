"""MLA_CUPY_CHECK=1 checks the values of every call that can be checked, as `checking` does for a block of code."""

from __future__ import annotations

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
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
    """On a GPU repeated calls skip every check otherwise."""
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


# ---- For a block of code -----------------------------------------------------------------------------------------


@pytest.fixture
def _not_always(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MLA_CUPY_CHECK")


@pytest.mark.usefixtures("_not_always", "_numpy_backend")
def test_a_block_is_checked_and_what_follows_is_not() -> None:
    arrays = batch()
    arrays[2][0, 1] = 99
    mla_cupy.mla_decode(*arrays, scale=SCALE)
    with mla_cupy.checking():
        refuses(*arrays)
        with mla_cupy.checking(False):
            mla_cupy.mla_decode(*arrays, scale=SCALE)
        refuses(*arrays)
    mla_cupy.mla_decode(*arrays, scale=SCALE)


@pytest.mark.usefixtures("_not_always")
def test_a_block_checks_a_call_that_is_known(recorder: Recorder) -> None:
    arrays = batch()
    mla_cupy.mla_decode(*arrays, scale=SCALE)
    arrays[2][0, 1] = 99
    recorder.launches.clear()
    with mla_cupy.checking():
        refuses(*arrays)
    assert recorder.launches == []
    mla_cupy.mla_decode(*arrays, scale=SCALE)
    assert recorder.launches


@pytest.mark.usefixtures("_not_always", "_numpy_backend")
def test_a_block_is_of_one_thread() -> None:
    arrays = batch()
    arrays[2][0, 1] = 99
    with ThreadPoolExecutor(1) as threads, mla_cupy.checking():
        threads.submit(mla_cupy.mla_decode, *arrays, scale=SCALE).result()
        refuses(*arrays)


@pytest.mark.usefixtures("_not_always", "_numpy_backend")
def test_a_block_checks_compiled_functions_and_their_gradients() -> None:
    """The gradient runs in a thread that has not entered the block."""
    torch = pytest.importorskip("torch")
    import mla_cupy.torch as mla

    arrays = tuple(map(torch.from_numpy, batch()))
    arrays[2][0, 1] = 99
    with mla_cupy.checking():
        refuses(*arrays, call=torch.compile(mla.mla_decode, backend="aot_eager", fullgraph=True))

    q, kv = torch.ones(1, 2, 576).half().requires_grad_(), torch.ones(4, 576).half()
    indices = torch.zeros(1, 3, dtype=torch.int32)
    for checked in (False, True):
        with mla_cupy.checking(checked):
            out, _, _ = mla.sparse_mla_forward(q, kv, indices, scale=SCALE)
        bad = out.float().sum()
        with torch.no_grad():
            indices.data[0, 0] = 99  # behind autograd's back
        with ThreadPoolExecutor(1) as threads:
            backward = threads.submit(bad.backward)
            if checked:
                with pytest.raises(ArgumentError, match=r"indices\[0, 0\]: got 99"):
                    backward.result()
            else:
                backward.result()
        indices.data[0, 0] = 0
