# ruff: noqa: E501 (CUDA lines are kept whole)
"""Global memory: addresses of arrays and views, structs that hold addresses, forgetting arrays."""

from __future__ import annotations

import gc
import sys
import threading
import weakref

import numpy as np
import pytest

import ptxsim
from ptxsim.state import machine
from simtest import nvrtc
from simtest.single import HEADER

SOURCE = r"""
struct Args { float *x; long long n; const int *index; };
extern "C" __global__ void take(const __grid_constant__ Args a, float *y) {
    if (threadIdx.x < a.n) y[threadIdx.x] = a.x[a.index[threadIdx.x]];
}
"""


def test_addresses() -> None:
    memory = ptxsim.Memory()
    a, b = np.arange(10, dtype="f4"), np.zeros(4, "i4")
    first, second = memory.map(a), memory.map(b)
    assert first % 256 == second % 256 == 0
    assert memory.map(a) == first
    assert memory.map(a[2:5]) not in (first, second)
    assert memory.slice(first + 4, 4).view("f4")[0] == 1
    memory.slice(second, 4, write=True)[:] = 255
    assert b[0] == -1
    for address, size in ((first + 38, 4), (1 << 60, 1)):
        with pytest.raises(ptxsim.MemoryFault):
            memory.slice(address, size)


def test_strided_views_share_memory() -> None:
    memory = ptxsim.Memory()
    base = np.arange(40, dtype="f4").reshape(5, 8)
    view = base[1:4:2, 2:6]
    address = memory.map(view)
    assert memory.slice(address, 16).view("f4").tolist() == view[0].tolist()
    assert memory.slice(address + 64, 16).view("f4").tolist() == view[1].tolist()
    with pytest.raises(ptxsim.MemoryFault):
        memory.slice(address + 64, 20)


@pytest.mark.parametrize("order", ["F", "K"])
def test_arrays_in_other_orders_are_mapped_as_they_lie(order: str) -> None:
    numbers = np.arange(24, dtype=np.int32).reshape(2, 3, 4)
    array = np.moveaxis(numbers, 1, 2).copy(order=order)  # type: ignore[call-overload]
    memory = ptxsim.Memory()
    base = memory.map(array)
    for index in np.ndindex(*array.shape):
        place = base + int(np.dot(index, array.strides))
        assert memory.slice(place, 4).view(np.int32) == array[index]
    assert memory.map(array[1:]) == base + array.strides[0]


def test_views_by_strides_are_mapped_with_what_they_view() -> None:
    whole = np.arange(10, dtype=np.int32)
    view = np.lib.stride_tricks.as_strided(whole[3:], (2, 3), (16, 4))
    memory = ptxsim.Memory()
    assert memory.map(view) == memory.map(whole) + 12


def test_views_of_one_array_lie_as_they_do_on_the_host() -> None:
    memory = ptxsim.Memory()
    whole = np.arange(64, dtype="f4")
    first, second, third = memory.map(whole[4:12]), memory.map(whole[8:20]), memory.map(whole[40:44])
    assert (second - first, third - first) == (16, 144)
    memory.slice(second, 4, write=True).view("f4")[0] = -1
    assert memory.slice(first + 16, 4).view("f4")[0] == whole[8] == -1
    assert memory.find(first) is memory.find(second) is not memory.find(third)
    assert memory.slice(first, 64).view("f4").tolist() == whole[4:20].tolist()
    for address in (first - 4, first + 64, third - 4, third + 16):  # what no view has is out of bounds
        with pytest.raises(ptxsim.MemoryFault):
            memory.slice(address, 4)
    memory.unmap(second)
    assert memory.slice(first, 32).view("f4").tolist() == whole[4:12].tolist()
    with pytest.raises(ptxsim.MemoryFault):
        memory.slice(first + 32, 4)
    assert memory.map(whole) == first - 16


def test_a_view_that_may_be_written_makes_its_bytes_writable() -> None:
    memory = ptxsim.Memory()
    whole = np.zeros(16, "u1")
    fixed = whole[:8]
    fixed.flags.writeable = False
    address = memory.map(fixed)
    with pytest.raises(ptxsim.MemoryFault, match="read-only"):
        memory.slice(address, 1, write=True)
    memory.map(whole[4:12])
    memory.slice(address, 1, write=True)[:] = 7
    assert whole[0] == 7


def test_unmapped_addresses_are_used_again() -> None:
    memory = ptxsim.Memory()
    kept = memory.map(np.zeros(3))
    for _ in range(3000):
        memory.unmap(memory.map(np.zeros(2)))
    with pytest.raises(ptxsim.MemoryFault):
        memory.unmap(kept + 8)
    memory.unmap(kept)
    with pytest.raises(ptxsim.MemoryFault):
        memory.slice(kept, 1)


def test_struct_of_addresses_and_shared_memory_between_modules() -> None:
    memory = ptxsim.Memory()
    ptx = nvrtc.compile_ptx(SOURCE)
    first, second = ptxsim.Module(ptx, memory=memory), ptxsim.Module(ptx, memory=memory)
    x, index, y = np.arange(8, dtype="f4") * 3, np.array([5, 0, 7], "i4"), np.zeros(3, "f4")
    record = np.zeros((), [("x", "u8"), ("n", "i8"), ("index", "u8")])
    record["x"], record["n"], record["index"] = memory.map(x), 3, memory.map(index)
    assert first.parameter_sizes("take") == [24, 8]
    first.launch("take", 1, 32, [record, y])
    assert y.tolist() == [15, 0, 21]
    y[:] = 0
    second.launch("take", 1, 32, [record.tobytes(), memory.map(y)])
    assert y.tolist() == [15, 0, 21]
    index[1] = 8
    with pytest.raises(ptxsim.MemoryFault, match="out of bounds"):
        first.launch("take", 1, 32, [record, y])


def test_registered_arrays_keep_their_host_address() -> None:
    memory = ptxsim.Memory()
    module = ptxsim.Module(nvrtc.compile_ptx(SOURCE), memory=memory)
    x, index, y = np.arange(8, dtype="f4") * 3, np.array([5, 0, 7], "i4"), np.zeros(3, "f4")
    for array in (x, index, y):
        assert memory.register(array) == array.ctypes.data
    assert memory.register(x[2:4]) == x.ctypes.data + 8
    record = np.zeros((), [("x", "u8"), ("n", "i8"), ("index", "u8")])
    record["x"], record["n"], record["index"] = x.ctypes.data, 3, index.ctypes.data
    module.launch("take", 1, 32, [record, y.ctypes.data])
    assert y.tolist() == [15, 0, 21]
    index[0] = 8
    with pytest.raises(ptxsim.MemoryFault, match=r"out of bounds|in no array"):
        module.launch("take", 1, 32, [record, y.ctypes.data])
    whole = np.zeros(64, "u1")
    odd = whole[(-whole.ctypes.data) % 16 + 8 :][:16]
    assert memory.register(odd) == odd.ctypes.data
    assert memory.find(whole.ctypes.data) is memory.find(odd.ctypes.data)
    memory.unmap(y.ctypes.data)
    index[0] = 0
    with pytest.raises(ptxsim.MemoryFault):
        module.launch("take", 1, 32, [record, y.ctypes.data])


def test_lanes_in_different_arrays() -> None:
    text = r"""extern "C" __global__ void both(int *const *p, int *out) { out[threadIdx.x] = *p[threadIdx.x]; *p[threadIdx.x] = -1; atomicAdd(p[threadIdx.x], 3); }"""
    module = ptxsim.Module(nvrtc.compile_ptx(text))
    arrays = [np.array([10 * i], "i4") for i in range(8)]
    addresses = [module.memory.map(a) if i % 2 else module.memory.register(a) for i, a in enumerate(arrays)]
    out = np.zeros(8, "i4")
    module.launch("both", 1, 8, [np.array(addresses, "u8"), out])
    assert out.tolist() == [10 * i for i in range(8)]
    assert [int(a[0]) for a in arrays] == [2] * 8


NEIGHBOURS = r"""
extern "C" __global__ void neighbours(int *x) {
    __shared__ int shared[64];
    if (blockIdx.x == 1 && x[0] == 1) __trap();
    shared[threadIdx.x] = x[threadIdx.x];
    __syncthreads();
    x[threadIdx.x] = shared[threadIdx.x ^ 1];
}
"""


@pytest.mark.parametrize("fails", [False, True])
def test_blocks_memory_does_not_wait_for_the_collector(monkeypatch: pytest.MonkeyPatch, fails: bool) -> None:
    alive: list[weakref.ref[np.ndarray]] = []

    class Shared(machine.Shared):
        def __init__(self, size: int, rank: int) -> None:
            super().__init__(size, rank)
            alive.append(weakref.ref(self.bytes))

    monkeypatch.setattr(machine, "Shared", Shared)
    module = ptxsim.Module(nvrtc.compile_ptx(NEIGHBOURS))
    gc.disable()
    try:
        if fails:
            with pytest.raises(ptxsim.SimError):
                module.launch("neighbours", grid=2, block=64, args=[np.ones(64, np.int32)])
        else:
            module.launch("neighbours", grid=2, block=64, args=[np.zeros(64, np.int32)])
        assert len(alive) == 2
        assert not any(ref() is not None for ref in alive)
    finally:
        gc.enable()


def test_threads_share_a_module() -> None:
    """Launches of one module run one after another; each gets its own numbers."""
    code = (
        "mov.u32 %r1, %tid.x; mul.wide.u32 %rd2, %r1, 4; add.u64 %rd1, %rd1, %rd2;"
        "ld.global.u32 %r2, [%rd1]; add.u32 %r2, %r2, %r1; bar.sync 0; st.global.u32 [%rd1], %r2; ret;"
    )
    text = f"{HEADER}.visible .entry k(.param .u64 p)\n{{ .reg .b32 %r<4>; .reg .b64 %rd<4>; ld.param.u64 %rd1, [p]; {code} }}"
    module, wrong = ptxsim.Module(text), []

    def work(first: int) -> None:
        for each in range(first, first + 40):
            array = np.full(64, each, "u4")
            module.launch("k", 1, 64, [array])
            if array.tolist() != list(range(each, each + 64)):
                wrong.append(each)

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        threads = [threading.Thread(target=work, args=(1000 * i,)) for i in range(8)]
        for each in threads:
            each.start()
        for each in threads:
            each.join()
    finally:
        sys.setswitchinterval(before)
    assert not wrong


def test_text_that_ends_in_nul() -> None:
    assert ptxsim.Module(HEADER + ".visible .entry k() { ret; }\n\0").kernels == ["k"]
