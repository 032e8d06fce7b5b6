"""`mla_cupy.jax` on the GPU: right, in XLA's stream, and inside of its CUDA graphs without Python in between."""

from __future__ import annotations

import functools
import threading
import time
from typing import Any

import numpy as np
import pytest

import mla_cupy
from mla_cupy.ops.bind import Launcher
from tests.bindings.cases import BoundCall, append, as_tuple, every_call_of_jax, sparse_inputs
from tests.interop.test_jax import put
from tests.support import cases
from tests.support.calls import assert_same
from tests.support.flat import flat
from tests.support.gpu import upload
from tests.support.tolerance import check

pytestmark = pytest.mark.gpu

both_roads = pytest.mark.parametrize("exportable", [False, True], ids=["callback", "handler"])
CASE = cases.DecodeCase(b=4, s_q=2, h_q=32, seqlens="ragged-700", strides="dense")


@pytest.fixture
def entries(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """The operation and the stream of every call that Python has enqueued for XLA."""
    seen: list[tuple[str, int]] = []
    enqueue = Launcher.enqueue

    def count(self: Launcher, ordinal: int, addresses: Any, stream: int) -> None:
        seen.append((self._operation.name, stream))
        enqueue(self, ordinal, addresses, stream)

    monkeypatch.setattr(Launcher, "enqueue", count)
    return seen


def on_gpu(jax: Any, call: BoundCall) -> dict[str, Any]:
    return dict(zip(call.arrays, put(jax, tuple(call.arrays.values()), "gpu"), strict=True))


@every_call_of_jax
@both_roads
def test_under_jit(
    jax_gpu: Any, of_jax: Any, call: BoundCall, exportable: bool, entries: list[tuple[str, int]]
) -> None:
    """The bits equal the public call's, for dkv only if deterministic; else dkv is within the error of its
    additions.
    """
    run = jax_gpu.jit(lambda x: flat(getattr(of_jax, call.operation))(**x, **call.options, exportable=exportable))
    got = jax_gpu.block_until_ready(run(on_gpu(jax_gpu, call)))
    given = {name: upload(x) for name, x in call.arrays.items()}
    wanted = as_tuple(flat(getattr(mla_cupy, call.operation))(**given, **call.options))
    wanted = (*wanted, *(given.get(name) for name in call.changed))
    assert {name for name, _ in entries} == {call.operation}
    for name, x, expected in zip((*call.outputs, *call.changed), as_tuple(got), wanted, strict=True):
        if expected is None:
            assert x is None
        elif name == "dkv" and not call.options.get("deterministic"):
            a, b = np.asarray(x).astype(np.float64), expected.get().astype(np.float64)
            assert np.abs(a - b).max() <= 0.01 * np.abs(b).max()
        else:
            assert_same(np.asarray(x), expected.get())


@both_roads
def test_steps_that_append_to_a_donated_cache(jax_gpu: Any, of_jax: Any, exportable: bool) -> None:
    """Each step finds what the earlier ones have written, in the same memory."""
    jax, jnp = jax_gpu, jax_gpu.numpy
    steps, latent = 6, append("v32")
    case = latent.arrays

    @functools.partial(jax.jit, donate_argnums=0)
    def step(cache: Any, slots: Any, scale: Any) -> Any:
        rows = (jnp.asarray(case["latent"]) * scale, jnp.asarray(case["rope"]))
        cache = of_jax.cache_append(*rows, cache, slots, exportable=exportable)
        return cache, of_jax.cache_gather(cache, jnp.arange(20), exportable=exportable)

    (cache,) = put(jax, (np.zeros((5, 4, 656), np.uint8),), "gpu")
    expected = np.zeros((5, 4, 656), np.uint8)
    place = cache.unsafe_buffer_pointer()
    for i in range(steps):
        slots, scale = (case["slots"] + i) % 20, 1 + i
        cache, rows = step(cache, slots, jnp.bfloat16(scale))
        mla_cupy.reference.cache_append(
            case["latent"] * case["latent"].dtype.type(scale), case["rope"], expected, slots
        )
        assert cache.unsafe_buffer_pointer() == place
    np.testing.assert_array_equal(np.asarray(cache), expected)
    assert_same(np.asarray(rows), mla_cupy.reference.cache_gather(expected, np.arange(20))[0].astype(rows.dtype))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_decode_against_the_oracle(jax_gpu: Any, of_jax: Any, dtype: str) -> None:
    inputs = cases.make(cases.DecodeCase(b=4, s_q=2, h_q=128, seqlens="ragged-700", strides="dense", dtype=dtype))
    out, lse = jax_gpu.jit(flat(of_jax.mla_decode))(*put(jax_gpu, inputs.arguments, "gpu"))
    check((np.asarray(out), np.asarray(lse)), inputs.exact, inputs.rounded, dtype)


def test_two_shapes(jax_gpu: Any, of_jax: Any) -> None:
    """One function, traced twice; then both again, in turn."""
    run = jax_gpu.jit(flat(of_jax.mla_decode))
    sizes = ({"b": 2, "h_q": 16}, {"b": 5, "h_q": 64})
    made = [cases.make(cases.DecodeCase(seqlens="ragged-300", strides="dense", **size)) for size in sizes]
    for _ in range(3):
        for inputs in made:
            out, lse = run(*put(jax_gpu, inputs.arguments, "gpu"))
            check((np.asarray(out), np.asarray(lse)), inputs.exact, inputs.rounded, "bfloat16")


@pytest.mark.parametrize("changes", [{"h_q": 64, "topk": 64}, {"h_q": 16, "topk": 100, "sink": True}], ids=str)
def test_gradients(jax_gpu: Any, of_jax: Any, changes: dict[str, Any]) -> None:
    """Results equal the public calls', one after the other, bit by bit."""
    jax, inputs = jax_gpu, sparse_inputs(s_q=30, s_kv=300, **changes)
    arrays = {"q": inputs.q, "kv": inputs.kv, "indices": inputs.indices, **inputs.optional}
    given = dict(zip(arrays, put(jax, tuple(arrays.values()), "gpu"), strict=True))
    (dout,) = put(jax, (inputs.dout,), "gpu")
    leaves = {name: given.pop(name) for name in ("q", "kv", "attn_sink") if name in given}

    @jax.jit
    def gradients(leaves: Any, given: Any, dout: Any) -> Any:
        options = {"scale": inputs.scale, "deterministic": True}
        _, pull_back = jax.vjp(lambda x: of_jax.sparse_mla_forward(**x, **given, **options)[0], leaves)
        return pull_back(dout)[0]

    got = gradients(leaves, given, dout)
    uploaded = {name: upload(x) for name, x in arrays.items()}
    out, lse, _ = mla_cupy.sparse_mla_forward(**uploaded, scale=inputs.scale)
    dq, dkv, d_sink = mla_cupy.sparse_mla_backward(
        **uploaded, out=out, lse=lse, dout=upload(inputs.dout), scale=inputs.scale, deterministic=True
    )
    wanted = {"q": dq, "kv": dkv, "attn_sink": d_sink}
    for name, x in got.items():
        assert_same(np.asarray(x), wanted[name].get())


LAYERS, STEPS, SETTLED = 8, 40, 15


@both_roads
def test_graph_replay_without_python(
    jax_gpu: Any, of_jax: Any, exportable: bool, entries: list[tuple[str, int]]
) -> None:
    """A decode step of several layers, everything donated: once XLA has its graph, Python is not entered any more."""
    jax, inputs = jax_gpu, cases.make(CASE)
    q, kv_cache, table, seqlens = put(jax, inputs.arguments, "gpu")

    def layers(q: Any, kv_cache: Any, table: Any, seqlens: Any, state: Any) -> Any:
        made = []
        for out, lse in state:
            made.append(flat(of_jax.mla_decode)(q, kv_cache, table, seqlens, out=out, lse=lse, exportable=exportable))
        return made

    step = jax.jit(layers, donate_argnums=4)
    shapes = (4, 2, 32, 512), (4, 32, 2)
    state = [(jax.numpy.zeros(shapes[0], q.dtype), jax.numpy.zeros(shapes[1])) for _ in range(LAYERS)]
    state = jax.device_put(state, jax.devices("gpu")[0])
    per_step = []
    for _ in range(STEPS):
        before = len(entries)
        state = jax.block_until_ready(step(q, kv_cache, table, seqlens, state))
        per_step.append(len(entries) - before)
    print("callbacks of each step:", per_step)
    assert per_step[0] >= LAYERS
    assert sum(per_step[-SETTLED:]) == 0, f"Python was entered in the last {SETTLED} steps: {per_step}"
    for out, lse in state:
        check((np.asarray(out), np.asarray(lse)), inputs.exact, inputs.rounded, "bfloat16")
    # A replay reads the current values.
    shorter = np.minimum(inputs.seqlens, 64)
    (fewer,) = put(jax, (shorter,), "gpu")
    state = step(q, kv_cache, table, fewer, state)
    exact = mla_cupy.reference.mla_decode(*inputs.arguments[:3], shorter)
    rounded = mla_cupy.reference.mla_decode(*inputs.arguments[:3], shorter, rounding="bfloat16")
    for out, lse in state:
        check((np.asarray(out), np.asarray(lse)), exact, rounded, "bfloat16")


@both_roads
def test_a_thousand_calls_beside_a_busy_thread(jax_gpu: Any, of_jax: Any, exportable: bool) -> None:
    """A thread that holds the GIL for long stretches delays the callback, but neither stops nor spoils it."""
    jax, inputs = jax_gpu, cases.make(cases.DecodeCase(b=2, h_q=16, seqlens=100, strides="dense"))
    arguments = put(jax, inputs.arguments, "gpu")
    run = jax.jit(lambda *x: flat(of_jax.mla_decode)(*x, exportable=exportable))
    first = [np.asarray(x) for x in run(*arguments)]
    stop = threading.Event()

    def keep_busy() -> None:
        while not stop.is_set():
            sum(range(20_000))

    thread = threading.Thread(target=keep_busy, daemon=True)
    thread.start()
    try:
        start = time.monotonic()
        results = [run(*arguments) for _ in range(1000)]
        jax.block_until_ready(results)
        seconds = time.monotonic() - start
    finally:
        stop.set()
        thread.join(timeout=30)
    print(f"1000 calls beside a busy thread: {seconds:.2f} s")
    assert seconds < 60
    for result in results[::100]:
        for x, expected in zip(result, first, strict=True):
            assert_same(np.asarray(x), expected)


def test_nothing_is_allocated_or_loaded_in_the_callback(jax_gpu: Any, of_jax: Any, monkeypatch: Any) -> None:
    import cupy

    from mla_cupy.runtime import cuda_driver, loader

    jax, inputs = jax_gpu, cases.make(CASE)
    arguments = put(jax, inputs.arguments, "gpu")
    run = jax.jit(lambda *x: flat(of_jax.mla_decode)(*x)).lower(*arguments).compile()

    def refuse(*arguments: Any, **options: Any) -> Any:
        raise AssertionError("not in the callback")

    for owner, name in ((cuda_driver.CudaDriver, "load"), (loader, "obtain")):
        monkeypatch.setattr(owner, name, refuse)
    with cupy.cuda.using_allocator(refuse):
        out, lse = jax.block_until_ready(run(*arguments))
    check((np.asarray(out), np.asarray(lse)), inputs.exact, inputs.rounded, "bfloat16")


def test_work_before_and_after_is_ordered(jax_gpu: Any, of_jax: Any) -> None:
    jax, jnp, inputs = jax_gpu, jax_gpu.numpy, cases.make(CASE)
    q, kv_cache, table, seqlens = put(jax, inputs.arguments, "gpu")
    work = jnp.ones((4096, 4096), jnp.float32)

    @jax.jit
    def late(q: Any, work: Any) -> Any:
        slow = (0 * (work @ work @ work).sum()).astype(q.dtype)
        out, _ = flat(of_jax.mla_decode)(q + slow, kv_cache, table, seqlens)
        return out.astype(jnp.float32) * 2

    expected = 2 * np.asarray(flat(of_jax.mla_decode)(q, kv_cache, table, seqlens)[0]).astype(np.float32)
    for _ in range(5):
        np.testing.assert_array_equal(np.asarray(late(q, work)), expected)


def test_the_choice_of_the_platform_is_gone_at_run_time(jax_gpu: Any, of_jax: Any) -> None:
    arguments = put(jax_gpu, cases.make(CASE).arguments, "gpu")
    text = jax_gpu.jit(flat(of_jax.mla_decode)).lower(*arguments).compile().as_text()
    assert "conditional" not in text


@both_roads
def test_donated_memory(jax_gpu: Any, of_jax: Any, exportable: bool) -> None:
    jax, inputs = jax_gpu, cases.make(CASE)
    arguments = put(jax, inputs.arguments, "gpu")
    out, lse = put(jax, (np.zeros((4, 2, 32, 512), inputs.q.dtype), np.zeros((4, 32, 2), np.float32)), "gpu")
    places = out.unsafe_buffer_pointer(), lse.unsafe_buffer_pointer()
    step = jax.jit(
        lambda x, out, lse: flat(of_jax.mla_decode)(*x, out=out, lse=lse, exportable=exportable), donate_argnums=(1, 2)
    )
    got = step(arguments, out, lse)
    assert (got[0].unsafe_buffer_pointer(), got[1].unsafe_buffer_pointer()) == places
    check((np.asarray(got[0]), np.asarray(got[1])), inputs.exact, inputs.rounded, "bfloat16")


def test_shard_map_over_gpus(jax_gpu: Any, of_jax: Any) -> None:
    jax = jax_gpu
    devices = jax.devices("gpu")
    if len(devices) < 2:
        pytest.skip("needs two GPUs")
    inputs = cases.make(cases.DecodeCase(b=4, h_q=32, seqlens="ragged-700", strides="dense"))
    spec, mesh = jax.sharding.PartitionSpec, jax.sharding.Mesh(np.array(devices[:2]), ("heads",))
    heads = spec(None, None, "heads")
    sharded = jax.shard_map(
        flat(of_jax.mla_decode),
        mesh=mesh,
        in_specs=(heads, spec(), spec(), spec()),
        out_specs=(heads, spec(None, "heads")),
    )
    for _ in range(20):
        out, lse = jax.jit(sharded)(*[np.ascontiguousarray(x) for x in inputs.arguments])
    check((np.asarray(out), np.asarray(lse)), inputs.exact, inputs.rounded, "bfloat16")


def part_on(device: Any, array: Any) -> Any:
    """A device's part of a divided array."""
    (part,) = (shard.data for shard in array.addressable_shards if shard.device == device)
    return part


@pytest.mark.parametrize(("kind", "exportable"), [("Auto", False), ("Explicit", False), ("Explicit", True)])
@pytest.mark.parametrize("axis", ["sequences", "heads"])
def test_sharded_over_gpus(jax_gpu: Any, of_jax: Any, kind: str, exportable: bool, axis: str) -> None:
    """A plain `jit` moves nothing between GPUs; each has the bits of a call for its part alone."""
    jax, spec = jax_gpu, jax_gpu.sharding.PartitionSpec
    devices = jax.devices("gpu")
    if len(devices) < 2:
        pytest.skip("needs two GPUs")
    inputs = cases.make(cases.DecodeCase(b=4, h_q=32, seqlens="ragged-700", strides="dense"))
    kinds = (getattr(jax.sharding.AxisType, kind),)
    mesh = jax.sharding.Mesh(np.array(devices[:2]), ("x",), axis_types=kinds)
    batch = spec("x") if axis == "sequences" else spec()
    specs = (batch if axis == "sequences" else spec(None, None, "x"), spec(), batch, batch)
    given = [
        jax.device_put(np.ascontiguousarray(x), jax.sharding.NamedSharding(mesh, each))
        for x, each in zip(inputs.arguments, specs, strict=True)
    ]
    step = jax.jit(functools.partial(flat(of_jax.mla_decode), exportable=exportable))
    text = step.lower(*given).compile().as_text()
    assert not any(word in text for word in ("all-gather", "all-to-all", "collective-permute", "all-reduce"))
    for _ in range(20):
        out, lse = step(*given)
    part = list(out.shape)
    part[0 if axis == "sequences" else 2] //= 2
    assert out.sharding.shard_shape(out.shape) == tuple(part)
    for device in devices[:2]:
        alone = flat(of_jax.mla_decode)(*(part_on(device, x) for x in given))
        for got, wanted in zip((out, lse), alone, strict=True):
            assert np.asarray(part_on(device, got)).tobytes() == np.asarray(wanted).tobytes()
    check((np.asarray(out), np.asarray(lse)), inputs.exact, inputs.rounded, "bfloat16")


def test_an_exported_program(jax_gpu: Any, of_jax: Any) -> None:
    pytest.importorskip("flatbuffers")
    jax, inputs = jax_gpu, cases.make(CASE)
    arguments = put(jax, inputs.arguments, "gpu")
    step = jax.jit(lambda *x: flat(of_jax.mla_decode)(*x, exportable=True))
    from jax import export

    stored = export.export(step, platforms=["cuda"], disabled_checks=of_jax.disabled_checks())(*arguments).serialize()
    out, lse = export.deserialize(stored).call(*arguments)
    check((np.asarray(out), np.asarray(lse)), inputs.exact, inputs.rounded, "bfloat16")


def test_wrong_arrays_are_said(jax_gpu: Any, of_jax: Any) -> None:
    q, kv_cache, table, seqlens = put(jax_gpu, cases.make(CASE).arguments, "gpu")
    with pytest.raises(mla_cupy.DTypeError, match=r"seqlens\.dtype: got float32, expected int32"):
        jax_gpu.jit(flat(of_jax.mla_decode))(q, kv_cache, table, seqlens.astype("float32"))


def test_errors_while_running_keep_their_text(jax_gpu: Any, of_jax: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = put(jax_gpu, cases.make(CASE).arguments, "gpu")
    run = jax_gpu.jit(lambda *x: flat(of_jax.mla_decode)(*x)).lower(*arguments).compile()

    def fail(*arguments: Any) -> None:
        raise mla_cupy.MlaError("q: got bad luck, expected good luck")

    monkeypatch.setattr(Launcher, "enqueue", fail)
    with pytest.raises((jax_gpu.errors.JaxRuntimeError, ValueError), match="MlaError: q: got bad luck"):
        jax_gpu.block_until_ready(run(*arguments))


def test_a_program_for_the_cpu(jax_gpu: Any, of_jax: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """XLA picks the branch of the platform that it compiles for, even in a process with a GPU."""
    monkeypatch.setenv("MLA_CUPY_BACKEND", "numpy")
    inputs = cases.make(cases.DecodeCase(h_q=4, seqlens=70, strides="dense"))
    for run in (jax_gpu.jit(flat(of_jax.mla_decode)), flat(of_jax.mla_decode)):
        out, lse = run(*put(jax_gpu, inputs.arguments, "cpu"))
        assert {device.platform for device in out.devices()} == {"cpu"}
        check((np.asarray(out), np.asarray(lse)), inputs.exact, inputs.rounded, "bfloat16")
