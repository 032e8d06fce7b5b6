"""Host time of a repeated call: the time until it returns, with an idle queue.

The limits are for a host where CuPy launches an empty kernel within 4 us; on a slower one they scale with that launch,
which is timed in the same run.
"""

from __future__ import annotations

import gc
import statistics
import time
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import pytest

import mla_cupy
from mla_cupy.ops import OPERATIONS, POOL_OPERATIONS
from mla_cupy.ops import call as calling
from mla_cupy.runtime.device import DeviceInfo
from tests.support.calls import plan_of
from tests.support.cases import DecodeCase, make
from tests.support.dense_cases import DenseCase
from tests.support.dense_gradients import make_gradients
from tests.support.gpu import empty_launch, slowness_of_host
from tests.support.sparse_cases import SparseCase
from tests.support.sparse_cases import make as make_sparse

pytestmark = [pytest.mark.gpu, pytest.mark.perf]

CALLS, TURNS = 50, 8
SCALE = 576**-0.5
EMPTY = "empty"
LIMITS = {"mla_decode, planned": 13.0, "mla_decode": 30.0, "sparse_mla_forward": 35.0, "sparse_mla_backward": 60.0}
LIMITS |= {"mla_prefill": 20.0, "mla_prefill_backward": 30.0, "mla_prefill_backward, deterministic": 30.0}
LIMITS |= {"mla_decode, project": 18.0, "mla_prepare, w_uk": 15.0}
"""Microseconds, outputs given."""


class Timed(NamedTuple):
    """A kind of call, and the same with results that it must allocate."""

    name: str
    given: Callable[[], object]
    allocating: Callable[[], object]


def measure(calls: dict[str, Callable[[], object]]) -> dict[str, list[float]]:
    """Quartiles of the host's microseconds. The calls take turns, so that a slow moment is everybody's."""
    import cupy

    found: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(TURNS + 1):
        for name, call in calls.items():
            for _ in range(CALLS):
                cupy.cuda.runtime.deviceSynchronize()  # an idle queue: a full one makes the driver wait
                start = time.perf_counter_ns()
                call()
                if turn > 0:  # the first turn warms up
                    found[name].append((time.perf_counter_ns() - start) / 1e3)
    return {name: statistics.quantiles(microseconds, n=4) for name, microseconds in found.items()}


def of_library(library: str) -> Callable[[Any], Any]:
    """Function that makes the library's GPU array from NumPy's."""
    import cupy

    if library == "cupy":
        return lambda x: cupy.asarray(x)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch = pytest.importorskip("torch")

    def tensor(x: Any) -> Any:
        x = np.ascontiguousarray(x)
        if x.dtype == ml_dtypes.bfloat16:
            return torch.from_numpy(x.view(np.int16)).cuda().view(torch.bfloat16)
        return torch.from_numpy(x).cuda()

    return tensor


def timed_calls(move: Callable[[Any], Any]) -> Iterator[Timed]:
    """Every operation on small arrays."""
    inputs = make(DecodeCase(b=2, h_q=16, seqlens=64))
    arguments = [move(x) for x in inputs.arguments]
    plan = plan_of(inputs)
    plan.update(arguments[3])
    out, lse = mla_cupy.mla_decode(*arguments, scale=SCALE)
    for name, options in (("mla_decode, planned", {"plan": plan}), ("mla_decode", {})):
        yield Timed(
            name,
            lambda options=options: mla_cupy.mla_decode(*arguments, scale=SCALE, out=out, lse=lse, **options),  # type: ignore[misc]
            lambda options=options: mla_cupy.mla_decode(*arguments, scale=SCALE, **options),  # type: ignore[misc]
        )
    yield from _calls_around_attention(move, arguments)
    sparse = make_sparse(SparseCase(h_q=64, topk=128))
    q, kv, indices = (move(x) for x in sparse.arguments)
    results = mla_cupy.sparse_mla_forward(q, kv, indices, scale=SCALE)
    named = dict(zip(("out", "lse", "max_logits"), results, strict=True))
    yield Timed(
        "sparse_mla_forward",
        lambda: mla_cupy.sparse_mla_forward(q, kv, indices, scale=SCALE, **named),
        lambda: mla_cupy.sparse_mla_forward(q, kv, indices, scale=SCALE),
    )
    backward = (q, kv, results[0], results[0], results[1], indices)
    dq, dkv, _ = mla_cupy.sparse_mla_backward(*backward, scale=SCALE)
    yield Timed(
        "sparse_mla_backward",
        lambda: mla_cupy.sparse_mla_backward(*backward, dq=dq, dkv=dkv, scale=SCALE),
        lambda: mla_cupy.sparse_mla_backward(*backward, scale=SCALE),
    )
    yield from _dense_calls(move)


def _calls_around_attention(move: Callable[[Any], Any], arguments: list[Any]) -> Iterator[Timed]:
    """Calls with the halves of one kv_b_proj, as in a layer, and decode with a plan."""
    kind = ml_dtypes.bfloat16
    kv_b_proj, cache, seqlens = move(np.ones((16, 256, 512), kind)), arguments[1], arguments[3]
    plan = plan_of(make(DecodeCase(b=2, h_q=16, seqlens=64)), d_head=128)
    plan.update(seqlens)
    projecting: dict[str, Any] = {"scale": SCALE, "project": mla_cupy.Project(kv_b_proj[:, 128:]), "plan": plan}
    out, lse = mla_cupy.mla_decode(*arguments, **projecting)
    call = partial(mla_cupy.mla_decode, *arguments, **projecting)
    yield Timed("mla_decode, project", partial(call, out=out, lse=lse), call)
    q, latent, rope = (move(np.ones((2, *rest), kind)) for rest in ((16, 192), (512,), (64,)))
    turns = {"positions": move(np.array([3, 4], np.int32)), "theta": 10000.0, "w_uk": kv_b_proj[:, :128]}
    slots = move(np.array([0, 1], np.int32))
    call = partial(mla_cupy.mla_prepare, q, latent, rope, cache, slots, **turns)
    made, _, _ = call()
    yield Timed("mla_prepare, w_uk", partial(call, out=made), call)


def _dense_calls(move: Callable[[Any], Any]) -> Iterator[Timed]:
    """Calls as in a layer: keys and values, and their gradients, are views of one array each."""
    inputs = make_gradients(DenseCase(((40, 60),), h_q=4))
    q, dout, k_rope, *starts = (
        move(x) for x in (inputs.forward.q, inputs.dout, *(inputs.options[name] for name in _DENSE_OPTIONS))
    )
    kv = move(np.ones((60, 4, 256), inputs.dout.dtype))
    options = {"k_rope": k_rope, "packed": mla_cupy.Packed(*starts)}
    arrays = q, kv[..., :128], kv[..., 128:]
    out, lse = mla_cupy.mla_prefill(*arrays, **options)
    yield Timed(
        "mla_prefill",
        lambda: mla_cupy.mla_prefill(*arrays, **options, out=out, lse=lse),
        lambda: mla_cupy.mla_prefill(*arrays, **options),
    )
    dkv = move(np.zeros((60, 4, 256), inputs.dout.dtype))
    made = mla_cupy.mla_prefill_backward(*arrays, out, dout, lse, **options)
    results = {"dq": made[0], "dk": dkv[..., :128], "dv": dkv[..., 128:], "dk_rope": made[4]}
    for name, exactly in (("", False), (", deterministic", True)):
        call = partial(mla_cupy.mla_prefill_backward, *arrays, out, dout, lse, **options, deterministic=exactly)
        yield Timed(f"mla_prefill_backward{name}", partial(call, **results), call)


_DENSE_OPTIONS = ("k_rope", "cu_seqlens_q", "cu_seqlens_kv")


def without_launches(name: str, call: Callable[[], object]) -> float:
    """Median microseconds of a repeated call whose launches are left out: what is Python's own."""
    call()
    operation = (OPERATIONS | POOL_OPERATIONS)[name.partition(",")[0]]
    prepared = calling._thread.recent.last[operation].prepared
    launches, prepared._launches = prepared._launches, []
    try:
        return measure({name: call})[name][1]
    finally:
        prepared._launches = launches


@pytest.mark.parametrize("library", ["cupy", "torch"])
def test_host_time_of_repeated_calls(gpu: DeviceInfo, library: str, capsys: pytest.CaptureFixture[str]) -> None:
    timed = list(timed_calls(of_library(library)))
    gc.disable()
    try:
        found = measure(
            {
                EMPTY: empty_launch(),
                **{call.name: call.given for call in timed},
                **{f"{call.name}, allocating": call.allocating for call in timed},
            }
        )
    finally:
        gc.enable()
    own = {call.name: without_launches(call.name, call.given) for call in timed}
    launch = found[EMPTY]
    slowness = slowness_of_host(launch[1])
    limits = {name: limit * slowness for name, limit in LIMITS.items()}
    limits["mla_decode, planned"] = max(LIMITS["mla_decode, planned"], 3 * launch[1])
    with capsys.disabled():
        print(f"\nus of the host, arrays of {library}; CuPy's launch of an empty kernel: median {launch[1]:.1f}")
        for name, limit in limits.items():
            low, median, high = found[name]
            allocating = found[f"{name}, allocating"][1]
            print(
                f"{name:20} median {median:5.1f} (quartiles {low:.1f} and {high:.1f}), limit {limit:.1f}; "
                f"allocating its results {allocating:.1f}; without its launches {own[name]:.1f}"
            )
    assert {name: found[name][1] for name, limit in limits.items() if found[name][1] > limit} == {}
