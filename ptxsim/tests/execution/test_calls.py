# ruff: noqa: E501 (lines of PTX and CUDA are kept whole)
"""Calls, jump tables, printf and assertions."""

from __future__ import annotations

import numpy as np
import pytest

import ptxsim
from simtest import nvrtc
from simtest.single import HEADER

REGS = ".reg .b32 %r<20>; .reg .b64 %rd<9>; .reg .pred %p<4>;"


def module(functions: str, code: str) -> ptxsim.Module:
    """Return a module with some functions and a kernel ``k`` that stores %r9 per thread; %r0 is the thread."""
    text = f".visible .entry k(.param .u64 out)\n{{ {REGS} mov.u32 %r0, %tid.x; {code} ld.param.u64 %rd1, [out]; mad.wide.u32 %rd1, %r0, 4, %rd1; st.global.u32 [%rd1], %r9; ret; }}\n"
    return ptxsim.Module(HEADER + functions + text)


def run(functions: str, code: str, mode: str = "early") -> list[int]:
    """Run a kernel on 32 threads and return what they stored."""
    out = np.zeros(32, "u4")
    module(functions, code).launch("k", 1, 32, [out], mode=mode)
    return out.tolist()


AFFINE = ".func (.reg .b32 %y) affine(.reg .b32 %x, .reg .b32 %a) { .reg .b32 %z; mad.lo.u32 %z, %x, %a, 7; mov.b32 %y, %z; ret; }\n"
STACK = ".func (.param .b32 y) affine(.param .b32 x, .param .b32 a) { .reg .b32 %z<3>; ld.param.b32 %z0, [x]; ld.param.b32 %z1, [a]; mad.lo.u32 %z2, %z0, %z1, 7; st.param.b32 [y], %z2; ret; }\n"
SPACES = ".param .b32 x; .param .b32 a; .param .b32 y; st.param.b32 [x], %r0; st.param.b32 [a], 3; call.uni (y), affine, (x, a); ld.param.b32 %r9, [y];"


@pytest.mark.parametrize("function", [AFFINE, STACK], ids=["registers", "stack"])
@pytest.mark.parametrize("call", ["call (%r9), affine, (%r0, 3);", SPACES], ids=["registers", "stack"])
def test_arguments_in_registers_and_on_the_stack(function: str, call: str) -> None:
    assert run(function, call) == [3 * t + 7 for t in range(32)]


def test_a_guarded_call_and_a_call_of_a_call() -> None:
    outer = (
        ".func (.reg .b32 %y) outer(.reg .b32 %x) { call (%y), affine, (%x, 2); call (%y), affine, (%y, 10); ret; }\n"
    )
    code = "mov.b32 %r9, 1; setp.gt.u32 %p1, %r0, 20; @%p1 call (%r9), outer, (%r0);"
    assert run(AFFINE + outer, code) == [(2 * t + 7) * 10 + 7 if t > 20 else 1 for t in range(32)]


@pytest.mark.parametrize(
    ("functions", "code", "why"),
    [
        (".func f() { call f; ret; }\n", "call f; mov.b32 %r9, 0;", "recursive calls"),
        (".extern .func g();\n", "call g; mov.b32 %r9, 0;", "'g' has no body"),
        (AFFINE, "call (%r9), affine, (%r0);", "argument count"),
    ],
)  # fmt: skip
def test_calls_that_are_refused_name_their_line(functions: str, code: str, why: str) -> None:
    with pytest.raises(ptxsim.UnknownInstruction, match=rf"kernel k, line \d+: .*{why}"):
        module(functions, code).program("k")


VIRTUAL = r"""
struct Shape { __device__ virtual int size(int) const = 0; };
struct Scaled : Shape { int by; __device__ Scaled(int by) : by(by) {} __device__ int size(int x) const override { return x * by; } };
struct Shifted : Shape { __device__ int size(int x) const override { return x + 100; } };
typedef int (*Function)(int);
__device__ int twice(int x) { return 2 * x; }
__device__ int thrice(int x) { return 3 * x; }
__device__ Function table[2] = {twice, thrice};
extern "C" __global__ void k(int *out) {
    Scaled scaled(7);
    Shifted shifted;
    const Shape *shape = threadIdx.x % 3 == 0 ? (const Shape *)&scaled : (const Shape *)&shifted;
    out[threadIdx.x] = shape->size(threadIdx.x) + table[threadIdx.x & 1](threadIdx.x);
}
"""


@pytest.mark.parametrize("mode", ["early", "random"])
@pytest.mark.parametrize("major", nvrtc.available())
def test_virtual_functions_and_tables_of_functions(major: int, mode: str) -> None:
    """Lanes of one warp call different functions, by addresses in tables of the module."""
    out, t = np.zeros(32, "i4"), np.arange(32)
    ptxsim.Module(nvrtc.compile_ptx(VIRTUAL, "sm_90a", major)).launch("k", 1, 32, [out], mode=mode)
    assert (out == np.where(t % 3 == 0, 7 * t, t + 100) + np.where(t & 1, 3 * t, 2 * t)).all()


PROTOTYPE = "P: .callprototype (.reg .b32 _) _ (.reg .b32 _, .reg .b32 _);"


@pytest.mark.parametrize("function", [AFFINE, STACK], ids=["registers", "stack"])
def test_a_call_by_an_address_in_a_register(function: str) -> None:
    other = AFFINE.replace("affine", "other").replace("7", "9")
    code = f"{PROTOTYPE} mov.u64 %rd2, affine; mov.u64 %rd3, other; setp.gt.u32 %p1, %r0, 20; selp.u64 %rd2, %rd2, %rd3, %p1; call (%r9), %rd2, (%r0, %r0), P;"
    assert run(function + other, code) == [t * t + (7 if t > 20 else 9) for t in range(32)]


@pytest.mark.parametrize(
    ("functions", "code", "why"),
    [
        (AFFINE, "mov.u64 %rd2, affine; add.u64 %rd2, %rd2, 8; call (%r9), %rd2, (%r0, %r0), P;", "no function of this prototype"),
        (AFFINE + ".func one(.reg .b32 %x) { ret; }\n", "mov.u64 %rd3, affine; mov.u64 %rd2, one; call (%r9), %rd2, (%r0, %r0), P;", "no function of this prototype"),
        (".func (.reg .b32 %y) again(.reg .b32 %x, .reg .b32 %a) { .reg .b64 %z; mov.u64 %z, again; call (%y), %z, (%x, %a); ret; }\n",
         "call (%r9), again, (%r0, %r0);", "recursion is not modelled"),
    ],
)  # fmt: skip
def test_indirect_calls_of_what_cannot_be_called(functions: str, code: str, why: str) -> None:
    with pytest.raises(ptxsim.KernelTrap, match=why):
        run(functions, PROTOTYPE + code)


TABLE = "and.b32 %r1, %r0, {mask}; T: .branchtargets A, B, A, C; brx.idx %r1, T; A: add.u32 %r9, %r0, 100; bra E; B: add.u32 %r9, %r0, 200; bra E; C: add.u32 %r9, %r0, 300; E:"


@pytest.mark.parametrize("mode", ["early", "random"])
def test_jump_table(mode: str) -> None:
    assert run("", TABLE.replace("{mask}", "3"), mode) == [t + (100, 200, 100, 300)[t % 4] for t in range(32)]


def test_jump_table_with_a_guard_and_one_target() -> None:
    code = "mov.b32 %r9, 5; mov.b32 %r1, 1; setp.lt.u32 %p1, %r0, 8; T: .branchtargets A, B; @%p1 brx.idx.uni %r1, T; bra E; A: mov.b32 %r9, 6; bra E; B: mov.b32 %r9, 7; E:"
    assert run("", code) == [7] * 8 + [5] * 24


def test_jump_beyond_the_table() -> None:
    with pytest.raises(ptxsim.MemoryFault, match="branch index 7 exceeds the table of 4"):
        run("", TABLE.replace("{mask}", "7"))


SOURCE = r"""
#include <assert.h>
extern "C" int printf(const char *, ...);
extern "C" __global__ void talk(int *x) {
    int t = threadIdx.x;
    if (t % 2) printf("lane %d: %5.2f %s 0x%llx %c%%\n", t, t * 0.5, t > 2 ? "big" : "small", 0x123456789aULL + t, 'a' + t);
    x[t] = printf("%u-%-3d|%03d|%ld\n", 4000000000u, -t, t, -5000000000L);
}
"""
ASSERT = r"""
extern "C" __device__ void __assertfail(const char *, const char *, unsigned, const char *, size_t);
extern "C" __global__ void check(int *x) { if (x[threadIdx.x] < 0) __assertfail("x >= 0", "file.cu", 12, "check", 1); }
"""


@pytest.mark.parametrize("major", nvrtc.available())
def test_printf(major: int, capsys: pytest.CaptureFixture) -> None:
    x = np.zeros(4, "i4")
    source = SOURCE.replace("#include <assert.h>\n", "").replace('extern "C" int printf(const char *, ...);\n', "")
    ptxsim.Module(nvrtc.compile_ptx(source, "sm_90a", major)).launch("talk", 1, 4, [x])
    odd = [
        f"lane {t}: {t * 0.5:5.2f} {'big' if t > 2 else 'small'} 0x{0x123456789A + t:x} {chr(97 + t)}%\n"
        for t in (1, 3)
    ]
    rest = [f"4000000000-{-t:<3d}|{t:03d}|-5000000000\n" for t in range(4)]
    assert capsys.readouterr().out == "".join(odd + rest)
    assert x.all()


@pytest.mark.parametrize("major", nvrtc.available())
def test_assertion(major: int) -> None:
    kernel = ptxsim.Module(nvrtc.compile_ptx(ASSERT, "sm_90a", major))
    kernel.launch("check", 1, 32, [np.ones(32, "i4")])
    with pytest.raises(ptxsim.KernelTrap, match=r"lanes \[5\].*\n.*assertion `x >= 0` failed at file.cu:12 in check"):
        kernel.launch("check", 1, 32, [np.where(np.arange(32) == 5, -1, 1).astype("i4")])


HEAP = ".extern .func (.param .b64 r) malloc(.param .b64 n);\n.extern .func free(.param .b64 p);\n"
ALLOCATE = ".param .b64 n; .param .b64 r; .param .b64 p; mul.wide.u32 %rd2, %r0, 8; add.u64 %rd2, %rd2, 4; st.param.b64 [n], %rd2; call.uni (r), malloc, (n); ld.param.b64 %rd3, [r]; "
LAST = "add.u64 %rd4, %rd3, %rd2; st.global.u32 [%rd4+-4], %r0; "
FREE = "st.param.b64 [p], %rd3; call.uni free, (p); "


def test_memory_that_a_kernel_allocates_is_the_threads_own() -> None:
    assert run(HEAP, ALLOCATE + LAST + "ld.global.u32 %r9, [%rd4+-4]; " + FREE) == list(range(32))


def test_null_may_be_freed() -> None:
    assert run(HEAP, ".param .b64 p; mov.u64 %rd3, 0; mov.u32 %r9, 5; " + FREE) == [5] * 32


@pytest.mark.parametrize(
    ("code", "why"),
    [
        (ALLOCATE + LAST + "st.global.u32 [%rd4], %r0; mov.u32 %r9, 0;", "malloc of 4 bytes"),
        (ALLOCATE + FREE + "ld.global.u32 %r9, [%rd3];", "in no array"),
        (ALLOCATE + FREE + FREE + "mov.u32 %r9, 0;", "free already"),
        (".param .b64 p; ld.param.u64 %rd3, [out]; mov.u32 %r9, 0; " + FREE, "malloc has not returned"),
    ],
    ids=["beyond the end", "after it is free", "free twice", "free of an argument"],
)
def test_misuse_of_the_kernels_heap(code: str, why: str) -> None:
    with pytest.raises(ptxsim.MemoryFault, match=why):
        run(HEAP, code)
