"""Exported modules on a GPU: bit-equal with the package's calls, every operation; in CUDA graphs and on two streams."""

from __future__ import annotations

import ctypes
import random
import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mla_cupy
from mla_cupy import cli
from mla_cupy.export.operations import subject_of
from mla_cupy.export.subject import Subject
from mla_cupy.runtime.device import DeviceInfo
from tests.export import contents, modules
from tests.export.library import RealLibrary, filled
from tests.export.package import Call
from tests.export.test_operations import CASES
from tests.support.flat import mla_decode

pytestmark = pytest.mark.gpu
CALLS = 50
_HEADS, _PAGE = 16, 64


@pytest.fixture(autouse=True, scope="module")
def context(hopper: DeviceInfo) -> None:
    """CUDA's context, which a C program has made current before it opens a module."""
    import cupy as cp

    cp.cuda.Device().use()
    cp.cuda.Device().synchronize()
    cp.empty(1)


@pytest.fixture(scope="module")
def library(hopper: DeviceInfo, tmp_path_factory: pytest.TempPathFactory) -> RealLibrary:
    """Dense decode, exported by the command line, with the GPU's driver."""
    folder = tmp_path_factory.mktemp("gpu") / "decode"
    sizes = ("--h-q", str(_HEADS), "--page-size", str(_PAGE))
    assert cli.main(["export", "--op", "decode", *sizes, "--arch", "sm_90a", "--out", str(folder)]) == 0
    return RealLibrary(folder, modules.decode().subject)


class Batch:
    """A random batch on the GPU, with the results and the workspace of a call."""

    def __init__(self, rng: Any) -> None:
        import cupy as cp

        self.b, self.max_pages, self.num_pages = (int(rng.integers(1, most)) for most in (40, 60, 400))
        tokens = self.max_pages * _PAGE
        self.q = cp.asarray(rng.standard_normal((self.b, 1, _HEADS, 576), np.float32)).astype(cp.float16)
        self.cache = cp.asarray(rng.standard_normal((self.num_pages, _PAGE, 576), np.float32)).astype(cp.float16)
        self.table = cp.asarray(rng.integers(0, self.num_pages, (self.b, self.max_pages)).astype(np.int32))
        self.seqlens = cp.asarray(rng.integers(0, tokens + 1, self.b).astype(np.int32))
        self.out = cp.full((self.b, 1, _HEADS, 512), np.nan, cp.float16)
        self.lse = cp.full((self.b, _HEADS, 1), np.nan, cp.float32)
        self.workspace = cp.full(64 << 20, 0xFF, cp.uint8)

    def args(self, library: RealLibrary) -> Any:
        """The struct of a call."""
        args = library.Args()
        library.function("defaults")(ctypes.byref(args))
        args.scale = 576**-0.5
        args.b, args.num_pages, args.max_pages = self.b, self.num_pages, self.max_pages
        arrays = {"q": self.q, "kv_cache": self.cache, "block_table": self.table, "seqlens": self.seqlens}
        for name, array in {**arrays, "out": self.out, "lse": self.lse, "workspace": self.workspace}.items():
            setattr(args, name, array.data.ptr)
        args.workspace_bytes = self.workspace.nbytes
        library.function("contiguous")(ctypes.byref(args))
        return args

    def expected(self) -> tuple[Any, Any]:
        """The package's result."""
        return mla_decode(self.q, self.cache, self.table, self.seqlens)

    def check(self) -> None:
        """The results are the package's, bit by bit."""
        import cupy as cp

        for got, expected in zip((self.out, self.lse), self.expected(), strict=True):
            assert cp.array_equal(got.view(cp.uint8), expected.view(cp.uint8))


@pytest.fixture(scope="module")
def half(hopper: DeviceInfo, tmp_path_factory: pytest.TempPathFactory) -> RealLibrary:
    """A float16 copy, which CuPy supports."""
    folder = tmp_path_factory.mktemp("gpu") / "half"
    sizes = ("--h-q", str(_HEADS), "--page-size", str(_PAGE), "--dtype", "float16")
    assert cli.main(["export", "--op", "decode", *sizes, "--arch", "sm_90a", "--out", str(folder)]) == 0
    subject: Subject = modules.made("decode", ("sm_90a",), h_q=_HEADS, page_size=_PAGE, dtype="float16").subject
    return RealLibrary(folder, subject)


def test_calls_are_bit_equal(half: RealLibrary) -> None:
    import cupy as cp

    handle, rng = half.open(), np.random.default_rng(34)
    for _ in range(CALLS):
        batch = Batch(rng)
        assert half.call("call", handle, batch.args(half), cp.cuda.get_current_stream().ptr) == 0, half.why()
        batch.check()
    half.function("close")(handle)


def test_graphs(half: RealLibrary) -> None:
    """A captured plan, update and call, replayed for other lengths."""
    import cupy as cp

    handle, rng = half.open(), np.random.default_rng(35)
    for _ in range(5):
        batch = Batch(rng)
        plan = filled(half.Plan, {"max_b": batch.b, "max_pages": batch.max_pages, "cp_world": 1, "cp_rank": 0})
        plan.workspace, plan.workspace_bytes = batch.workspace.data.ptr, batch.workspace.nbytes
        lengths = half.Lengths(ctypes.sizeof(half.Lengths), batch.b, batch.seqlens.data.ptr, (ctypes.c_int64 * 1)(1))
        assert half.call("plan_make", handle, plan) == 0, half.why()
        stream = cp.cuda.Stream(non_blocking=True)
        cp.cuda.Device().synchronize()
        with stream:
            stream.begin_capture()
            assert half.call("plan_update", handle, plan, lengths, stream.ptr) == 0, half.why()
            assert half.call("call_planned", handle, batch.args(half), plan, stream.ptr) == 0, half.why()
            graph = stream.end_capture()
            for step in range(3):
                batch.seqlens[:] = cp.minimum(batch.seqlens + step, batch.max_pages * _PAGE)
                graph.launch(stream)
                stream.synchronize()
                planned = mla_cupy.plan_decode(
                    max_b=batch.b,
                    s_q=1,
                    h_q=_HEADS,
                    max_pages=batch.max_pages,
                    page_size=_PAGE,
                    dtype="float16",
                )
                planned.update(batch.seqlens)
                out, lse = mla_decode(batch.q, batch.cache, batch.table, batch.seqlens, plan=planned)
                stream.synchronize()
                assert cp.array_equal(batch.out.view(cp.uint8), out.view(cp.uint8))
                assert cp.array_equal(batch.lse.view(cp.uint8), lse.view(cp.uint8))
    half.function("close")(handle)


def test_two_streams(half: RealLibrary) -> None:
    """Calls in flight at once, each with a workspace of its own."""
    import cupy as cp

    handle, rng = half.open(), np.random.default_rng(36)
    streams = [cp.cuda.Stream(non_blocking=True) for _ in range(2)]
    batches = [[Batch(rng) for _ in range(10)] for _ in streams]
    cp.cuda.Device().synchronize()
    for pair in zip(*batches, strict=True):
        for batch, stream in zip(pair, streams, strict=True):
            assert half.call("call", handle, batch.args(half), stream.ptr) == 0, half.why()
    cp.cuda.Device().synchronize()
    for each in batches:
        for batch in each:
            batch.check()
    half.function("close")(handle)


@pytest.mark.perf
def test_host_time(half: RealLibrary) -> None:
    """A planned call, which is two launches, costs no more than two empty ones of CuPy; the package's beside it."""
    import cupy as cp

    handle, batch = half.open(), Batch(np.random.default_rng(39))
    plan = filled(half.Plan, {"max_b": batch.b, "max_pages": batch.max_pages, "cp_world": 1, "cp_rank": 0})
    plan.workspace, plan.workspace_bytes = batch.workspace.data.ptr, batch.workspace.nbytes
    lengths = half.Lengths(ctypes.sizeof(half.Lengths), batch.b, batch.seqlens.data.ptr, (ctypes.c_int64 * 1)(1))
    stream = cp.cuda.get_current_stream().ptr
    assert half.call("plan_make", handle, plan) == 0, half.why()
    assert half.call("plan_update", handle, plan, lengths, stream) == 0, half.why()
    function, args = half.function("call_planned"), batch.args(half)
    given = handle, ctypes.byref(args), ctypes.byref(plan), ctypes.c_void_p(stream)
    planned = mla_cupy.plan_decode(
        max_b=batch.b, s_q=1, h_q=_HEADS, max_pages=batch.max_pages, page_size=_PAGE, dtype="float16"
    )
    planned.update(batch.seqlens)
    arrays, results = (batch.q, batch.cache, batch.table, batch.seqlens), {"out": batch.out, "lse": batch.lse}
    empty = cp.RawKernel('extern "C" __global__ void empty() {}', "empty")
    exported = enqueued(lambda: function(*given))
    own = enqueued(lambda: mla_decode(*arrays, **results, plan=planned))
    launch = enqueued(lambda: empty((1,), (32,), ()))
    print(f"host us of a planned call: exported {exported:.2f}, the package's {own:.2f}; an empty launch {launch:.2f}")
    assert exported <= 2 * launch
    half.function("close")(handle)


def enqueued(call: Any, calls: int = 20, batches: int = 50) -> float:
    """Microseconds of host time of a call: the median over batches that the launch queue has room for."""
    import cupy as cp

    found = []
    for _ in range(batches):
        cp.cuda.Device().synchronize()
        begun = time.perf_counter()
        for _ in range(calls):
            call()
        found.append(1e6 * (time.perf_counter() - begun) / calls)
    return statistics.median(found)


def test_refusals_launch_nothing(library: RealLibrary, tmp_path: Path) -> None:
    handle = library.open()
    batch = Batch(np.random.default_rng(37))
    args = batch.args(library)
    args.lse = 0
    assert library.call("call", handle, args, 0) == -1
    assert library.why() == "lse: got NULL, expected an address"
    assert np.isnan(batch.out.get()).all()
    library.function("close")(handle)


# ---- Every operation -------------------------------------------------------------------------------------------
class OnGpu:
    """A random call with its arrays on the GPU. What it writes is as it was before each run."""

    def __init__(self, drawn: Call, rng: np.random.Generator) -> None:
        import cupy as cp

        self.before, self.arrays, given = dict[str, Any](), dict[str, Any](), dict(drawn.values)
        for array in drawn.subject.arrays:
            found = contents.contents(drawn, array, rng).view(np.uint8).reshape(-1)
            if array.written and array.name != "cache":
                found = np.full_like(found, 0xFF)
            self.arrays[array.name] = cp.asarray(np.concatenate([found, np.zeros(256, np.uint8)]))
            given[array.name] = self.arrays[array.name].data.ptr
            if array.written:
                self.before[array.name] = self.arrays[array.name].copy()
        self.workspace = cp.full(64 << 20, 0xFF, cp.uint8)
        given |= {"workspace": self.workspace.data.ptr, "workspace_bytes": self.workspace.nbytes}
        self.call = Call(drawn.subject, given)

    def results(self) -> dict[str, Any]:
        """Results written since, which are then undone."""
        found = {name: self.arrays[name].copy() for name in self.before}
        for name, before in self.before.items():
            self.arrays[name][:] = before
        self.workspace[:] = 0xFF
        return found


@pytest.mark.parametrize("case", CASES)
def test_every_operation_is_bit_equal(case: str, hopper: DeviceInfo, tmp_path: Path) -> None:
    import cupy as cp

    operation, given = CASES[case]
    options = {name: value for name, value in given.items() if name != "arrays"}
    flags = [word for name, value in options.items() for word in ("--" + name.replace("_", "-"), str(value))]
    flags += [word for name in given.get("arrays", ()) for word in ("--with", name)]
    folder = tmp_path / "module"
    assert cli.main(["export", "--op", operation, *flags, "--arch", "sm_90a", "--out", str(folder)]) == 0
    subject = subject_of(operation, options, given.get("arrays", ()))
    library, draw, rng = RealLibrary(folder, subject), random.Random(38), np.random.default_rng(38)
    handle, streams = library.open(), [cp.cuda.Stream(non_blocking=True) for _ in range(2)]
    for number in range(CALLS):
        pair = [OnGpu(contents.call_of(subject, draw), rng) for _ in streams]
        cp.cuda.Device().synchronize()
        graphs = [  # both in flight at once
            enqueue(library, handle, made, stream, captured=number % 2 == 1)
            for made, stream in zip(pair, streams, strict=True)
        ]
        cp.cuda.Device().synchronize()
        del graphs
        for made in pair:
            found = made.results()
            made.call.run(hopper, cp.cuda.get_current_stream().ptr)
            for name, expected in made.results().items():
                assert cp.array_equal(found[name], expected), (name, made.call.values)
    library.function("close")(handle)


def enqueue(library: RealLibrary, handle: Any, made: OnGpu, stream: Any, *, captured: bool) -> Any:
    """Call a module on a stream, or replay a graph that has the call, and return that."""
    args = filled(library.Args, made.call.values)
    with stream:
        if captured:
            stream.begin_capture()
        assert library.call("call", handle, args, stream.ptr) == 0, library.why()
        graph = stream.end_capture() if captured else None
        if graph is not None:
            graph.launch(stream)
    return graph
