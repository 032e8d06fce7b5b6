"""Streams, threads, and a pool whose memory is handed out again all the time."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import numpy as np
import pytest

import mla_cupy
from mla_cupy.kernels.decode.problem import DecodeProblem
from mla_cupy.runtime.device import DeviceInfo
from tests.support.calls import ALL_KERNELS, Array, assert_same, need, on_host, plan_of
from tests.support.cases import DecodeCase, DecodeInputs, make
from tests.support.flat import mla_decode
from tests.support.gpu import uploaded
from tests.support.kernels import DECODE_KERNELS, in_both_sizes
from tests.support.tolerance import check

pytestmark = pytest.mark.gpu

MANY_HEADS = DecodeCase(b=3, h_q=128, seqlens=(2500, 64, 700))
FEW_HEADS = DecodeCase(b=3, h_q=32, seqlens=(2500, 64, 700))
OTHER = DecodeCase(b=9, h_q=16, s_q=2, seqlens="ragged-600", page_size=16, seed=1)


@pytest.fixture(params=in_both_sizes(ALL_KERNELS))
def kernel(request: pytest.FixtureRequest, gpu: DeviceInfo) -> str:
    need(request.param, gpu)
    return str(request.param)


@cache
def on_gpu(case: DecodeCase) -> tuple[DecodeInputs, tuple[Any, ...]]:
    import cupy

    inputs = make(case)
    arguments = uploaded(inputs)
    cupy.cuda.Device().synchronize()
    return inputs, arguments


@pytest.fixture
def prepared(kernel: str, gpu: DeviceInfo) -> list[tuple[DecodeInputs, tuple[Any, ...]]]:
    """Two cases that the kernel takes: of many heads, if it can."""
    many = DecodeProblem(MANY_HEADS.s_q, MANY_HEADS.h_q, MANY_HEADS.dtype)
    first = FEW_HEADS if DECODE_KERNELS[kernel].unsupported(many, gpu) else MANY_HEADS
    return [on_gpu(first), on_gpu(OTHER)]


def expected_of(arguments: tuple[Any, ...], inputs: DecodeInputs, kernel: str) -> tuple[Array, Array]:
    """The result of a lone call, once it is known to be correct."""
    got = on_host(mla_decode(*arguments, kernel=kernel))
    check(got, inputs.exact, inputs.rounded, inputs.case.dtype)
    return got


def churn(rng: np.random.Generator) -> None:
    """Take memory of the current stream's arena, spoil it, give it back."""
    import cupy

    for nbytes in rng.integers(1, 1 << 23, 3).tolist():
        block = cupy.cuda.alloc(nbytes)
        block.memset_async(0x7F, nbytes)
        del block


@pytest.mark.parametrize("how", ["current", "argument"])
def test_two_streams_and_a_pool_churner(
    kernel: str, prepared: list[tuple[DecodeInputs, tuple[Any, ...]]], how: str
) -> None:
    """Temporaries come from the stream's arena: the next user of their memory runs after them."""
    import cupy

    expected = [expected_of(arguments, inputs, kernel) for inputs, arguments in prepared]
    streams = [cupy.cuda.Stream(non_blocking=True) for _ in prepared]
    rng = np.random.default_rng(0)
    results: list[list[Any]] = [[] for _ in prepared]
    for _ in range(60):
        for i, (stream, (_, arguments)) in enumerate(zip(streams, prepared, strict=True)):
            if how == "current":
                with stream:
                    results[i].append(mla_decode(*arguments, kernel=kernel))
                    churn(rng)
            else:
                results[i].append(mla_decode(*arguments, kernel=kernel, stream=stream))
                with stream:
                    churn(rng)
                churn(rng)  # of the default stream, which knows nothing of that work
    cupy.cuda.Device().synchronize()
    for wanted, got in zip(expected, results, strict=True):
        for result in got:
            out, lse = on_host(result)
            assert_same(out, wanted[0])
            assert_same(lse, wanted[1])


def in_threads(work: list[Callable[[], None]]) -> None:
    """Run them at the same time; the first failure is raised here."""
    failures: list[BaseException] = []
    barrier = threading.Barrier(len(work))

    def run(function: Callable[[], None]) -> None:
        try:
            barrier.wait()
            function()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=run, args=(function,)) for function in work]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]


@pytest.mark.parametrize("with_plan", [True, False])
@pytest.mark.parametrize("same_case", [True, False])
def test_two_threads(
    kernel: str, prepared: list[tuple[DecodeInputs, tuple[Any, ...]]], with_plan: bool, same_case: bool
) -> None:
    """Launch state is each thread's own, also where both run the very same kernels."""
    import cupy

    chosen = [prepared[0]] * 2 if same_case else prepared
    expected = [expected_of(arguments, inputs, kernel) for inputs, arguments in chosen]

    def work(inputs: DecodeInputs, arguments: tuple[Any, ...], wanted: tuple[Array, Array]) -> Callable[[], None]:
        def repeat() -> None:
            with cupy.cuda.Stream(non_blocking=True):
                plan = plan_of(inputs, kernel=kernel) if with_plan else None
                options = {"plan": plan} if plan else {"kernel": kernel}
                for _ in range(100):
                    if plan:
                        plan.update(arguments[3])
                    out, lse = on_host(mla_decode(*arguments, **options))
                    assert_same(out, wanted[0])
                    assert_same(lse, wanted[1])

        return repeat

    in_threads([work(inputs, arguments, want) for (inputs, arguments), want in zip(chosen, expected, strict=True)])


def test_one_plan_in_two_threads_by_turns(kernel: str, prepared: list[tuple[DecodeInputs, tuple[Any, ...]]]) -> None:
    """Two threads on one stream, one after the other: each remembers its own last call."""
    inputs, arguments = prepared[0]
    wanted = expected_of(arguments, inputs, kernel)
    plan = plan_of(inputs, kernel=kernel)
    plan.update(arguments[3])
    turn = threading.Lock()

    def work() -> None:
        for _ in range(50):
            with turn:
                out, lse = on_host(mla_decode(*arguments, plan=plan))
            assert_same(out, wanted[0])
            assert_same(lse, wanted[1])

    in_threads([work, work])


def test_inputs_written_on_the_stream_before_the_call_are_seen(
    kernel: str, prepared: list[tuple[DecodeInputs, tuple[Any, ...]]], block_stream: Callable[[Any, float], None]
) -> None:
    """The call is in order with its stream: what is written late is read, though the call returned long before."""
    import cupy

    inputs, arguments = prepared[0]
    wanted = expected_of(arguments, inputs, kernel)
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        late = tuple(cupy.zeros_like(x) for x in arguments)
        for target, source in zip(late, arguments, strict=True):
            target[...] = source  # compiles CuPy's own kernels
            target.fill(0)
        block_stream(stream, 0.5)
        for target, source in zip(late, arguments, strict=True):
            target[...] = source
        result = mla_decode(*late, kernel=kernel)
        assert not stream.done
    stream.synchronize()
    assert_same(on_host(result)[0], wanted[0])


def calls(inputs: DecodeInputs, arguments: tuple[Any, ...], kernel: str) -> Iterator[tuple[str, Callable[[], Any]]]:
    plan = plan_of(inputs, kernel=kernel)
    plan.update(arguments[3])
    out, lse = mla_decode(*arguments, plan=plan)
    import cupy

    outs, lses = cupy.stack([out, out]), cupy.stack([lse, lse])
    yield "update", lambda: plan.update(arguments[3])
    yield "planned", lambda: mla_decode(*arguments, plan=plan, out=out, lse=lse)
    yield "planned, allocating", lambda: mla_decode(*arguments, plan=plan)
    yield "plain", lambda: mla_decode(*arguments, kernel=kernel)
    yield "merge", lambda: mla_cupy.merge_states(outs, lses)


def test_no_call_synchronises(
    kernel: str, prepared: list[tuple[DecodeInputs, tuple[Any, ...]]], block_stream: Callable[[Any, float], None]
) -> None:
    import cupy

    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        for name, call in calls(*prepared[0], kernel):
            call()
            stream.synchronize()
            block_stream(stream, 0.2)
            start = time.perf_counter()
            call()
            seconds = time.perf_counter() - start
            assert not stream.done, f"{name} waited for the GPU"
            assert seconds < 0.1, f"{name} took {seconds:.3f} s on the host"
            stream.synchronize()


def test_each_call_waits_for_the_one_before(kernel: str, prepared: list[tuple[DecodeInputs, tuple[Any, ...]]]) -> None:
    """Dependent launches start early and wait in the kernel: here each call reads what the last one wrote."""
    import cupy

    q, kv_cache, table, seqlens = prepared[0][1]

    def chain(wait: bool) -> Array:
        tokens, following = q.copy(), q.copy()
        for _ in range(10):
            mla_decode(tokens, kv_cache, table, seqlens, kernel=kernel, out=following[..., :512])
            tokens, following = following, tokens
            if wait:
                cupy.cuda.get_current_stream().synchronize()
        host: Array = tokens.get()
        return host

    assert_same(chain(wait=False), chain(wait=True))
