"""`mla_cupy.jax` on the CPU, by both roads: JAX's callback and our own handler."""

from __future__ import annotations

import importlib
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import mla_cupy
from mla_cupy import ArgumentError, DTypeError, MlaError, ShapeError
from tests.bindings.cases import (
    ONE_OF_EACH,
    SCALE,
    Array,
    BoundCall,
    append,
    as_tuple,
    backward,
    decode,
    decode_with_drafts,
    every_call_of_jax,
    forward,
    merge,
)
from tests.support.calls import assert_same
from tests.support.flat import flat

pytestmark = pytest.mark.usefixtures("_numpy_backend")

both_roads = pytest.mark.parametrize("exportable", [False, True], ids=["callback", "handler"])


def on_cpu(jax: Any, call: BoundCall) -> dict[str, Any]:
    return {name: jax.device_put(x, jax.devices("cpu")[0]) for name, x in call.arrays.items()}


def jitted(jax: Any, of_jax: Any, call: BoundCall, exportable: bool) -> Any:
    function = flat(getattr(of_jax, call.operation))
    return jax.jit(lambda arrays: function(**arrays, **call.options, exportable=exportable))


def check(got: Any, wanted: tuple[Array | None, ...]) -> None:
    got = as_tuple(got)
    assert len(got) == len(wanted)
    for x, expected in zip(got, wanted, strict=True):
        if expected is None:
            assert x is None
        else:
            assert_same(np.asarray(x), expected)


@pytest.mark.one_in(2)
@every_call_of_jax
@both_roads
def test_under_jit(jax: Any, of_jax: Any, call: BoundCall, exportable: bool) -> None:
    check(jitted(jax, of_jax, call, exportable)(on_cpu(jax, call)), call.eager())


@every_call_of_jax
def test_outside_jit(jax: Any, of_jax: Any, call: BoundCall) -> None:
    check(flat(getattr(of_jax, call.operation))(**on_cpu(jax, call), **call.options), call.eager())


@both_roads
def test_a_mask_of_drafts_has_64_bits(jax: Any, of_jax: Any, exportable: bool) -> None:
    call = decode_with_drafts()
    with pytest.raises(DTypeError, match=r"tree_mask\.dtype: got int32, expected uint64 or int64"):
        jitted(jax, of_jax, call, exportable)(on_cpu(jax, call))
    with jax.enable_x64(True):
        check(jitted(jax, of_jax, call, exportable)(on_cpu(jax, call)), call.eager())


@both_roads
def test_wide_integers(jax: Any, of_jax: Any, exportable: bool) -> None:
    call = decode()
    wide = {name: x.astype(np.int64) if x.dtype == np.int32 else x for name, x in call.arrays.items()}
    with jax.enable_x64(True):
        check(jitted(jax, of_jax, call, exportable)(on_cpu(jax, BoundCall("", call.operation, wide, {}))), call.eager())


@both_roads
def test_rows_without_rope(jax: Any, of_jax: Any, exportable: bool) -> None:
    jnp = jax.numpy
    write = jax.jit(lambda latent, cache, slots: of_jax.cache_append(latent, None, cache, slots, exportable=exportable))
    cache = write(jnp.ones((2, 512), jnp.bfloat16), jnp.zeros((2, 4, 512), jnp.bfloat16), jnp.array([3, -1]))
    assert cache.reshape(8, 512).sum(1).tolist() == [0, 0, 0, 512, 0, 0, 0, 0]


@both_roads
@pytest.mark.parametrize("donate", [False, True])
def test_a_cache_is_changed_in_place_if_it_is_donated(jax: Any, of_jax: Any, exportable: bool, donate: bool) -> None:
    """Otherwise the old one stays as it was."""
    call = append("v32")
    given = on_cpu(jax, call)
    cache = given.pop("cache") + jax.numpy.uint8(0)  # XLA's own memory, and not NumPy's
    before, place = np.array(cache), cache.unsafe_buffer_pointer()
    step = jax.jit(
        lambda cache, given: of_jax.cache_append(**given, cache=cache, kv_format="v32", exportable=exportable),
        donate_argnums=0 if donate else (),
    )
    made = step(cache, given)
    check(made, call.eager())
    assert cache.is_deleted() is donate
    if donate:
        assert made.unsafe_buffer_pointer() == place
    else:
        np.testing.assert_array_equal(np.asarray(cache), before)


@both_roads
def test_two_shapes_in_one_program(jax: Any, of_jax: Any, exportable: bool) -> None:
    small, large = decode(h_q=2), decode(h_q=6)
    both = jax.jit(
        lambda first, second: [flat(of_jax.mla_decode)(**x, exportable=exportable) for x in (first, second, first)]
    )
    for got, call in zip(both(on_cpu(jax, small), on_cpu(jax, large)), (small, large, small), strict=True):
        check(got, call.eager())


@both_roads
def test_an_empty_batch(jax: Any, of_jax: Any, exportable: bool) -> None:
    arrays = {name: x[:0] if name != "kv_cache" else x for name, x in decode().arrays.items()}
    call = BoundCall("empty", "mla_decode", arrays, {})
    check(jitted(jax, of_jax, call, exportable)(on_cpu(jax, call)), call.eager())


# ---- Gradients ---------------------------------------------------------------------------------------------------


def loss(jax: Any, of_jax: Any, call: BoundCall, weights: Array, exportable: bool, **options: Any) -> Any:
    """A function of the differentiable arrays: the sum of out, weighted, and of lse where there is one."""
    rest = {name: x for name, x in on_cpu(jax, call).items() if name not in ("q", "kv", "attn_sink")}
    jnp = jax.numpy

    def value(leaves: dict[str, Any]) -> Any:
        out, lse, _ = flat(of_jax.sparse_mla_forward)(
            **leaves, **rest, **call.options, **options, exportable=exportable
        )
        return (out.astype(jnp.float32) * weights).sum() + jnp.where(jnp.isfinite(lse), lse, 0).sum()

    return value


@pytest.mark.parametrize("changes", [{}, {"sink": True, "lengths": True, "causal": True}, {"head_axis": True}], ids=str)
@both_roads
def test_gradients(jax: Any, of_jax: Any, changes: dict[str, Any], exportable: bool) -> None:
    """They are the public backward's."""
    call, whole = forward(changes), backward(changes)
    weights = whole.arrays["dout"].astype(np.float32)
    leaves = {name: x for name, x in on_cpu(jax, call).items() if name in ("q", "kv", "attn_sink")}
    got = jax.jit(jax.grad(loss(jax, of_jax, call, weights, exportable)))(leaves)
    out, lse, _ = call.eager()
    arrays = {**call.arrays, "out": out, "lse": lse, "dout": whole.arrays["dout"]}
    dlse = np.isfinite(lse).astype(np.float32)
    dq, dkv, d_sink = flat(mla_cupy.sparse_mla_backward)(**arrays, dlse=dlse, **call.options)
    wanted = {"q": dq, "kv": dkv, "attn_sink": d_sink}
    for name, gradient in got.items():
        assert_same(np.asarray(gradient), wanted[name])


def test_a_gradient_can_be_deterministic(jax: Any, of_jax: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    sparse = importlib.import_module("mla_cupy.jax.gradients.sparse_forward")

    def call(operation: Any, given: Any, options: Any, exportable: bool) -> Any:
        seen.append((operation.name, dict(options), set(given)))
        return original(operation, given, options, exportable)

    original = sparse.call
    monkeypatch.setattr(sparse, "call", call)
    case = forward()
    leaves = {name: x for name, x in on_cpu(jax, case).items() if name in ("q", "kv")}
    jax.grad(loss(jax, of_jax, case, np.float32(1), False, deterministic=True))(leaves)
    assert [name for name, *_ in seen] == ["sparse_mla_forward", "sparse_mla_backward"]
    assert seen[1][1]["deterministic"] is True
    assert "dlse" in seen[1][2]
    rest = {name: x for name, x in on_cpu(jax, case).items() if name != "q"}
    jax.grad(lambda q: of_jax.sparse_mla_forward(q, **rest, scale=SCALE)[0].astype(np.float32).sum())(leaves["q"])
    assert "dlse" not in seen[-1][2]  # who does not use lse pays nothing


def test_float32_results_have_gradients_too(jax: Any, of_jax: Any) -> None:
    call = forward(out_dtype="float32")
    leaves = {name: x for name, x in on_cpu(jax, call).items() if name in ("q", "kv")}
    got = jax.grad(loss(jax, of_jax, call, np.float32(1), False))(leaves)
    assert got["q"].dtype == leaves["q"].dtype
    assert float(abs(got["kv"].astype("float32")).max()) > 0


# ---- Transformations ---------------------------------------------------------------------------------------------


@both_roads
def test_vmap(jax: Any, of_jax: Any, exportable: bool) -> None:
    calls = [merge(), merge()]
    calls[1].arrays["outs"][...] = calls[1].arrays["outs"] * 2 + 1
    stacked = {name: np.stack([call.arrays[name] for call in calls]) for name in calls[0].arrays}
    got = jax.jit(jax.vmap(lambda x: of_jax.merge_states(**x, exportable=exportable)))(stacked)
    wanted = [call.eager() for call in calls]
    for x, *each in zip(got, *wanted, strict=True):
        assert_same(np.asarray(x), np.stack(each))


@both_roads
def test_vmap_of_gradients(jax: Any, of_jax: Any, exportable: bool) -> None:
    """Over the queries alone: kv is not batched, and gets one gradient per element of the batch."""
    call = forward({"sink": True})
    leaves = {name: x for name, x in on_cpu(jax, call).items() if name in ("q", "kv", "attn_sink")}
    gradient = jax.grad(loss(jax, of_jax, call, np.float32(0.5), exportable))
    q = jax.numpy.stack([leaves["q"], -leaves["q"]])
    got = jax.jit(jax.vmap(lambda q: gradient({**leaves, "q": q})))(q)
    for i in range(2):
        alone = gradient({**leaves, "q": q[i]})
        for name, x in got.items():
            assert_same(np.asarray(x[i]), np.asarray(alone[name]))


@both_roads
def test_shard_map(jax: Any, of_jax: Any, exportable: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Heads over two devices; the gradient of kv is the sum over both."""
    devices = jax.devices("cpu")
    if len(devices) < 2:
        pytest.skip("JAX has been started with one CPU device")
    shard_map = getattr(jax, "shard_map", None)
    if shard_map is None:
        from jax.experimental.shard_map import shard_map
    spec, mesh = jax.sharding.PartitionSpec, jax.sharding.Mesh(np.array(devices[:2]), ("heads",))
    call = forward()
    seen: list[tuple[int, ...]] = []
    forwarded = mla_cupy.reference.sparse_mla_forward

    def count(q: Array, *rest: Any, **options: Any) -> Any:
        seen.append(q.shape)
        return forwarded(q, *rest, **options)

    monkeypatch.setattr(mla_cupy.reference, "sparse_mla_forward", count)
    heads = spec(None, "heads")
    sharded = shard_map(
        lambda q, kv, indices: of_jax.sparse_mla_forward(q, kv, indices, exportable=exportable, scale=576**-0.5),
        mesh=mesh,
        in_specs=(heads, spec(), spec()),
        out_specs=(heads, heads, heads),
    )
    got = jax.block_until_ready(jax.jit(sharded)(call.arrays["q"], call.arrays["kv"], call.arrays["indices"]))
    s_q, h_q, d_qk = call.arrays["q"].shape
    assert seen == [(s_q, h_q // 2, d_qk)] * 2
    check(got, call.eager())


# ---- Memory ------------------------------------------------------------------------------------------------------


@both_roads
def test_results_take_over_donated_memory(jax: Any, of_jax: Any, exportable: bool) -> None:
    call = decode(out_dtype="float32")
    arrays = on_cpu(jax, call)
    wanted = call.eager()
    step = jax.jit(
        lambda arrays, out, lse: flat(of_jax.mla_decode)(
            **arrays, **call.options, out=out, lse=lse, exportable=exportable
        ),
        donate_argnums=(1, 2),
    )
    out, lse = (jax.numpy.full(x.shape, 7, x.dtype) for x in wanted)
    places = out.unsafe_buffer_pointer(), lse.unsafe_buffer_pointer()
    got = step(arrays, out, lse)
    assert out.is_deleted()
    assert lse.is_deleted()
    assert (got[0].unsafe_buffer_pointer(), got[1].unsafe_buffer_pointer()) == places
    check(got, wanted)


@both_roads
def test_memory_that_is_still_needed_is_copied(jax: Any, of_jax: Any, exportable: bool) -> None:
    call = merge()
    kept = jax.numpy.full(call.arrays["outs"].shape[1:], 7.0)

    def step(arrays: Any, kept: Any) -> Any:
        out, _ = of_jax.merge_states(**arrays, out=kept, exportable=exportable)
        return out, kept + 1

    out, more = jax.jit(step)(on_cpu(jax, call), kept)
    assert_same(np.asarray(out), call.eager()[0])
    assert (np.asarray(more) == 8).all()
    assert (np.asarray(kept) == 7).all()


@both_roads
def test_a_donated_cache_is_written_in_place(jax: Any, of_jax: Any, exportable: bool) -> None:
    """A decode step: append a token to the cache, attend to all; the cache stays where it is."""
    call = decode()
    arrays = on_cpu(jax, call)
    token = np.asarray(arrays["kv_cache"])[0, 0] * 0 + 1
    page = int(call.arrays["block_table"][0, 0])

    def step(cache: Any, q: Any, block_table: Any, seqlens: Any) -> Any:
        cache = cache.at[page, 0].set(token)
        return cache, flat(of_jax.mla_decode)(q, cache, block_table, seqlens, exportable=exportable)

    cache = jax.numpy.copy(arrays.pop("kv_cache"))
    place = cache.unsafe_buffer_pointer()
    cache, got = jax.jit(step, donate_argnums=0)(cache, *(arrays[name] for name in ("q", "block_table", "seqlens")))
    assert cache.unsafe_buffer_pointer() == place
    written = call.arrays["kv_cache"].copy()
    written[page, 0] = token
    changed = BoundCall("changed", "mla_decode", {**call.arrays, "kv_cache": written}, {})
    check(got, changed.eager())


# ---- Errors ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "kind", "text"),
    [
        ({"q": np.zeros((3, 2, 4, 500), ml_dtypes.bfloat16)}, ShapeError, r"q.shape\[-1\]: got 500, expected 576"),
        ({"seqlens": np.zeros(3, np.float32)}, DTypeError, "seqlens.dtype: got float32, expected int32"),
        ({"out": np.zeros((3, 2, 4, 100), np.float32)}, ShapeError, "out.shape: got"),
        ({"lse": [1, 2, 3]}, DTypeError, "lse: got a list, expected an array"),
        ({"scale": -1.0}, ArgumentError, "scale: got -1.0"),
        ({"no_such_option": 1}, TypeError, "no_such_option"),
    ],
    ids=["width", "dtype", "out", "list", "scale", "option"],
)
def test_what_does_not_fit_is_said_while_tracing(
    jax: Any, of_jax: Any, change: dict[str, Any], kind: type[Exception], text: str
) -> None:
    with pytest.raises(kind, match=text):
        jax.jit(lambda q: flat(of_jax.mla_decode)(**{**on_cpu(jax, decode()), "q": q, **change}))(
            on_cpu(jax, decode())["q"]
        )


@both_roads
def test_errors_while_running_keep_their_text(
    jax: Any, of_jax: Any, exportable: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    call = merge()
    run = jitted(jax, of_jax, call, exportable)
    check(run(on_cpu(jax, call)), call.eager())

    def fail(*inputs: Any, **options: Any) -> Any:
        raise MlaError("outs: got bad luck, expected good luck")

    with monkeypatch.context() as patch:
        patch.setattr(mla_cupy.reference, "merge_states", fail)
        # JAX's own quick path for repeated calls turns them into a ValueError in some versions.
        kinds = (jax.errors.JaxRuntimeError, ValueError)
        with pytest.raises(kinds, match="MlaError: outs: got bad luck, expected good luck"):
            jax.block_until_ready(run(on_cpu(jax, call)))
    check(run(on_cpu(jax, call)), call.eager())


@pytest.mark.parametrize("transform", ["jit", "grad", "vmap"])
def test_public_calls_point_to_the_binding(jax: Any, transform: str) -> None:
    outs, lses = jax.numpy.ones((2, 1, 1, 1, 8)), jax.numpy.zeros((2, 1, 1, 1))
    wrapped = getattr(jax, transform)(lambda x: mla_cupy.merge_states(x, lses)[0].sum())
    with pytest.raises(DTypeError, match=r"outs: got a \w*Tracer.*call mla_cupy\.jax's function of this name"):
        wrapped(outs)


def test_arrays_of_numpy(jax: Any, of_jax: Any) -> None:
    """Taken as JAX would, but that no number is cut to 32 bits."""
    call = append("v32")
    wide = {**call.arrays, "slots": call.arrays["slots"].astype(np.int64)}
    check(of_jax.cache_append(**wide, **call.options), call.eager())
    wide["slots"][1] = 2**32 + 9
    with pytest.raises(ArgumentError, match=r"slots\[1\]: got 4294967305, expected an integer of 32 bits"):
        of_jax.cache_append(**wide, **call.options)


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"q": None}, "q: got None"),
        ({"q": [1.0]}, "q: got a list, expected an array of JAX or NumPy"),
        ({"kv": np.zeros((3, 576))}, "kv.dtype: got float64, expected one that JAX has"),
        ({"kv": np.zeros((3, 576), object)}, "kv.dtype: got object"),
        ({"kv": np.ma.zeros((3, 576), np.float32)}, "kv: got a masked array"),
        ({"kv": np.zeros(2, [("a", "i4")])}, "kv.dtype: got"),
        ({"exportable": "yes"}, "exportable: got 'yes'"),
        ({"deterministic": np.array([1, 2])}, "deterministic: got array"),
        ({"scale": []}, r"scale: got \[\]"),
    ],
)
def test_arguments_of_other_kinds(jax: Any, of_jax: Any, changes: dict[str, Any], match: str) -> None:
    with pytest.raises(MlaError, match=f"^{match}"):
        of_jax.sparse_mla_forward(**{**on_cpu(jax, forward()), "scale": SCALE, **changes})


@pytest.mark.parametrize("call", ONE_OF_EACH, ids=lambda call: call.operation)
def test_structured_dtypes(jax: Any, of_jax: Any, call: BoundCall) -> None:
    """Structured dtypes of NumPy, which JAX lacks: the error names the argument, whichever it is."""
    given = {name: x for name, x in on_cpu(jax, call).items() if call.arrays[name].dtype != np.int64}
    for name in call.record.names:
        with pytest.raises(DTypeError, match=f"^{name}.dtype: got"):
            flat(getattr(of_jax, call.operation))(**{**given, **call.options, name: np.zeros(2, [("a", "i4")])})


def test_unknown_options(jax: Any, of_jax: Any) -> None:
    with pytest.raises(TypeError, match=r"merge_states\(\) got an unexpected keyword argument 'base'"):
        of_jax.merge_states(**on_cpu(jax, merge()), base=2)
