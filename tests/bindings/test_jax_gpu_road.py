"""The GPU's road of `mla_cupy.jax` without a GPU: JAX's buffers on the CPU pass for a GPU's."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import mla_cupy
from mla_cupy.arrays import HOST
from mla_cupy.ops.bind import Launcher
from mla_cupy.simulation import simulated
from tests.bindings.cases import decode, forward, merge
from tests.bindings.test_jax import on_cpu
from tests.support.flat import flat
from tests.support.recorder import Recorder

STREAM = 77


def forget() -> None:
    importlib.import_module("mla_cupy.jax.devices").launcher.cache_clear()


@pytest.fixture
def pretend(jax: Any, of_jax: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[int], None]]:
    """`pretend(ordinal)`: there is such a GPU, XLA compiles for it, and gives its stream to callbacks."""
    lowering = importlib.import_module("mla_cupy.jax.lowering")
    if lowering.buffer_callback is None:
        pytest.skip("this JAX has no buffer callbacks")
    original = lowering._on_gpu

    def on_gpu(ready: Launcher, context: Any, results: Any, *operands: Any) -> None:
        original(ready, SimpleNamespace(stream=STREAM), results, *operands)

    def start(ordinal: int) -> None:
        monkeypatch.setattr(lowering, "gpu_ordinals", lambda: (ordinal,))
        monkeypatch.setattr(lowering, "_on_gpu", on_gpu)
        monkeypatch.setattr(jax.lax, "platform_dependent", lambda *operands, cpu, cuda: cuda(*operands))

    forget()
    yield start
    forget()


def test_the_platform_is_chosen_when_xla_compiles(
    jax: Any, of_jax: Any, recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A program for the CPU stays on the CPU in a process with a GPU; the kernels are loaded all the same."""
    lowering = importlib.import_module("mla_cupy.jax.lowering")
    forget()
    monkeypatch.setattr(lowering, "gpu_ordinals", lambda: (HOST,))
    call = merge()
    made: list[int] = []
    prepare = Launcher._prepare

    def count(self: Launcher, ordinal: int) -> Any:
        made.append(ordinal)
        return prepare(self, ordinal)

    monkeypatch.setattr(Launcher, "_prepare", count)
    step = jax.jit(lambda x, out: of_jax.merge_states(**x, out=out), donate_argnums=1)
    out = jax.numpy.zeros(call.arrays["outs"].shape[1:])
    place = out.unsafe_buffer_pointer()
    run = step.lower(on_cpu(jax, call), out).compile()
    assert "conditional" not in run.as_text(), "the choice is still there at run time"
    assert made == [HOST]
    assert recorder.launches == []
    # Past this point NumPy arrays must be the host's again.
    monkeypatch.setattr(mla_cupy.arrays.NumpyFamily, "on_gpu", False)
    monkeypatch.setattr(importlib.import_module("mla_cupy.ops.backend"), "use_gpu", lambda: False)
    got = run(on_cpu(jax, call), out)
    assert got[0].unsafe_buffer_pointer() == place
    for results in (got, of_jax.merge_states(**on_cpu(jax, call))):  # compiled, and at once
        for x, wanted in zip(results, mla_cupy.reference.merge_states(**call.arrays), strict=True):
            np.testing.assert_array_equal(np.asarray(x), wanted.astype(np.float32))
    assert recorder.launches == []
    forget()


@pytest.mark.parametrize("make", [decode, forward, merge], ids=["decode", "forward", "merge"])
def test_buffers_and_stream_arrive(
    jax: Any,
    of_jax: Any,
    recorder: Recorder,
    pretend: Callable[[int], None],
    make: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The addresses in the kernels' parameters are XLA's buffers; the callback allocates nothing."""
    buffers = importlib.import_module("mla_cupy.jax.lowering")
    places: list[list[int]] = []
    locate = buffers.locate

    def note(found: Any) -> tuple[int, list[int]]:
        ordinal, addresses = locate(found)
        assert ordinal == 0  # of the CPU
        assert addresses == [np.asarray(x).__array_interface__["data"][0] for x in found]
        places.append(addresses)
        # XLA aligns to 64 bytes on the CPU, and to 256 on a GPU.
        return HOST, [*addresses[:-1], addresses[-1] // 256 * 256]

    monkeypatch.setattr(buffers, "locate", note)
    pretend(HOST)
    call = make()
    run = (
        jax.jit(lambda x: flat(getattr(of_jax, call.operation))(**x, **call.options)).lower(on_cpu(jax, call)).compile()
    )
    assert recorder.launches == []
    recorder.allocations.clear()
    arrays = on_cpu(jax, call)
    got = run(arrays)
    jax.block_until_ready(got)
    assert recorder.allocations == []
    assert {launch.stream for launch in recorder.launches} == {STREAM}
    (addresses,) = places
    names = dict(zip(call.arrays, addresses, strict=False))
    main = recorder.launches[-1]
    checked = {"decode": ("q", "kv_cache"), "forward": ("q", "kv"), "merge": ("outs", "lses")}[call.id.split("-")[0]]
    for name in checked:
        member = "kv" if name == "kv_cache" else name
        assert int(main.params[member]) == names[name] == arrays[name].unsafe_buffer_pointer()
    assert int(main.params["out"]) == addresses[len(call.arrays)]


def test_in_the_simulator(
    jax: Any, of_jax: Any, pretend: Callable[[int], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """jit, callback, kernel, result: the whole way, with numbers."""
    lowering = importlib.import_module("mla_cupy.jax.lowering")
    call = merge(lse_base="2")
    with simulated() as gpu:
        pretend(0)
        monkeypatch.setattr(lowering, "locate", lambda found: (0, [gpu.memory.map(np.asarray(x)) for x in found]))
        run = jax.jit(lambda x: of_jax.merge_states(**x, lse_base="2"))
        out, lse = jax.block_until_ready(run(on_cpu(jax, call)))
        assert gpu.launched == ["mla_merge_states"]
    wanted = mla_cupy.reference.merge_states(**call.arrays, lse_base="2")
    np.testing.assert_allclose(np.asarray(out), wanted[0], rtol=0, atol=4e-6)
    np.testing.assert_allclose(np.asarray(lse), wanted[1], rtol=1e-6, atol=1e-6)
