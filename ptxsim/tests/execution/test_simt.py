# ruff: noqa: E501 (lines of PTX and CUDA are kept whole)
"""Divergence, reconvergence, calls, spinning and collectives against plain Python."""

from __future__ import annotations

import numpy as np
import pytest

import ptxsim
from simtest import nvrtc
from simtest.branches import SOURCE
from simtest.single import program, run


@pytest.fixture(params=nvrtc.available(), name="module")
def _module(request: pytest.FixtureRequest) -> ptxsim.Module:
    return ptxsim.Module(nvrtc.compile_ptx(SOURCE, "sm_90a", request.param))


@pytest.mark.parametrize(("mode", "seed"), [("early", 0), ("random", 1), ("random", 2)])
def test_divergent_loops(module: ptxsim.Module, mode: str, seed: int) -> None:
    x = np.random.default_rng(seed).integers(0, 40, 64).astype("i4")
    y = np.zeros(64, "i4")
    module.launch("loops", 1, 64, [x, y], mode=mode, seed=seed)
    for i in range(64):
        v = 0
        for k in range(x[i]):
            if k == 5:
                continue
            if k > 20:
                break
            v += sum(j * i for j in range(k % 3)) + k
        assert y[i] == (-v if v % 7 == 0 else v)


def test_switch(module: ptxsim.Module) -> None:
    x = np.arange(64, dtype="i4") % 21
    y = np.zeros(64, "i4")
    module.launch("choose", 1, 64, [x, y])
    table = {0: 17, 1: 3, 2: 104, 3: 8, 5: -1, 7: 70, 9: 90, 12: 1200, 19: 5}
    assert y.tolist() == [i if v == 4 else table.get(v, 1000 + v) for i, v in enumerate(x.tolist())]


def test_two_lanes_of_a_warp_spin_on_each_other(module: ptxsim.Module) -> None:
    y = np.zeros(32, "i4")
    module.launch("ping_pong", 1, 32, [y], max_steps=100_000)
    assert y.tolist() == [20] * 32


def test_calls_with_structs_and_local_arrays(module: ptxsim.Module) -> None:
    y = np.zeros(64, "i4")
    module.launch("calls", 1, 64, [y])
    assert y.tolist() == [(t % 8) ** (t % 4) + t + 3 + (t + 1) * 3 for t in range(64)]


def test_block_sum(module: ptxsim.Module) -> None:
    x, y = np.random.default_rng(0).random(256).astype("f4"), np.zeros(1, "f4")
    module.launch("block_sum", 1, 256, [x, y])
    np.testing.assert_allclose(y[0], x.sum(), rtol=1e-6)


def test_constants_globals_and_relocations(module: ptxsim.Module) -> None:
    y = np.zeros(32, "i4")
    module.launch("symbols", 1, 32, [y])
    assert y.tolist() == [[3, 1, 4, 1][t & 3] + 5 for t in range(32)]
    module.launch("symbols", 1, 32, [y])
    assert y[0] == 3 + 5 + 32


def test_barrier_reductions(module: ptxsim.Module) -> None:
    y = np.zeros(96, "i4")
    module.launch("count", 1, 96, [y])
    assert y.tolist() == [32 * 2 + 1] * 96


def test_partial_masks_and_partial_warps(module: ptxsim.Module) -> None:
    y = np.zeros(32, "u4")
    module.launch("partial", 1, 32, [y])
    assert y[1] == sum(1 << i for i in range(9, 32, 2))
    assert y[0] == 0xFFFFFFFF
    x, short = np.arange(20, dtype="i4"), np.zeros(20, "i4")
    module.launch("choose", 1, 20, [x, short])
    assert short[6] == 1006


def shuffle(mode: str, lane: int, b: int, c: int) -> tuple[int, bool]:
    """Follow the pseudo-code of shfl.sync in the ISA, lane by lane."""
    bval, cval, mask = b & 31, c & 31, c >> 8 & 31
    top = (lane & mask) | (cval & ~mask)
    low = lane & mask
    j, p = {
        "up": (lane - bval, lane - bval >= top),
        "down": (lane + bval, lane + bval <= top),
        "bfly": (lane ^ bval, (lane ^ bval) <= top),
        "idx": (low | (bval & ~mask), (low | (bval & ~mask)) <= top),
    }[mode]
    return (j if p else lane), p


@pytest.mark.parametrize("mode", ["up", "down", "bfly", "idx"])
@pytest.mark.parametrize("c", [31, 0, 0x181F, 0x1807, 0x0810 | 15])
@pytest.mark.parametrize("b", [0, 1, 5, 16, 31])
def test_shuffle(mode: str, b: int, c: int) -> None:
    a = np.arange(32, dtype="u4") * 7 + 1
    code = f"shfl.sync.{mode}.b32 %d|%p1, %a, {b}, {c}, -1; @%p1 add.u32 %d, %d, 0x10000;"
    got = run(code, [a], np.zeros(32, "u4"))
    want = []
    for lane in range(32):
        j, p = shuffle(mode, lane, b, c)
        want.append(int(a[j]) + 0x10000 * p)
    assert got.tolist() == want


def test_votes_match_redux_elect() -> None:
    a = np.arange(32, dtype="u4") % 5
    ballot = run("setp.eq.u32 %p1, %a, 2; vote.sync.ballot.b32 %d, %p1, -1;", [a], np.zeros(32, "u4"))
    assert ballot.tolist() == [sum(1 << i for i in range(32) if a[i] == 2)] * 32
    match = run("match.any.sync.b32 %d, %a, -1;", [a], np.zeros(32, "u4"))
    assert match.tolist() == [sum(1 << j for j in range(32) if a[j] == a[i]) for i in range(32)]
    assert run("redux.sync.add.u32 %d, %a, -1;", [a], np.zeros(32, "u4"))[3] == a.sum()
    assert run("redux.sync.max.s32 %d, %a, -1;", [a], np.zeros(32, "u4"))[3] == 4
    elected = run("elect.sync %t1|%p1, -1; selp.b32 %d, 1, 0, %p1;", [a], np.zeros(32, "u4"))
    assert elected.tolist() == [1] + [0] * 31


def test_lanes_with_several_member_masks() -> None:
    """Groups of one converged warp, as `cg::labeled_partition` makes them, do not see one another."""
    a = np.arange(32, dtype="u4") * 7 % 5
    groups = [[j for j in range(32) if a[j] == a[i]] for i in range(32)]
    mask = "match.any.sync.b32 %t1, %a, -1;"

    def of_groups(code: str) -> list[int]:
        found: list[int] = run(f"{mask} {code}", [a], np.zeros(32, "u4")).tolist()
        return found

    assert of_groups("redux.sync.add.u32 %d, %t0, %t1;") == [sum(group) for group in groups]
    assert of_groups("redux.sync.max.u32 %d, %t0, %t1;") == [max(group) for group in groups]
    odd = "and.b32 %t2, %t0, 1; setp.ne.u32 %p1, %t2, 0;"
    ballot = of_groups(f"{odd} vote.sync.ballot.b32 %d, %p1, %t1;")
    assert ballot == [sum(1 << j for j in group if j % 2) for group in groups]
    any_above = of_groups("setp.gt.u32 %p1, %t0, 29; vote.sync.any.pred %p2, %p1, %t1; selp.b32 %d, 1, 0, %p2;")
    assert any_above == [int(max(group) > 29) for group in groups]
    equal = of_groups("and.b32 %t2, %t0, 3; match.any.sync.b32 %d, %t2, %t1;")
    assert equal == [sum(1 << j for j in groups[i] if j % 4 == i % 4) for i in range(32)]
    assert of_groups("elect.sync %d|%p1, %t1;") == [min(group) for group in groups]


def test_lanes_of_one_member_mask_pass_one_mask() -> None:
    a = np.full(32, 0xFFFFFFFF, "u4")
    a[5] = 1 << 5
    with pytest.raises(ptxsim.SyncError, match="another's member mask has another mask"):
        run("redux.sync.add.u32 %d, %a, %a;", [a], np.zeros(32, "u4"))


def test_any_lane_may_be_elected_but_always_the_same_one() -> None:
    code = "elect.sync %t1|%p1, -1; elect.sync %t2|%p2, -1; xor.b32 %t3, %t1, %t2; mad.lo.u32 %d, %t3, 1000, %t1; @%p1 add.u32 %d, %d, 100;"
    text = program(code, [], np.zeros(32, "u4"))
    module, seen = ptxsim.Module(text), set()
    for seed in range(12):
        out = np.zeros(64, "u4")
        module.launch("k", 1, 32, [out[:32]], mode="random", seed=seed, elect="random")
        leader = int(out[0]) % 100
        assert out[:32].tolist() == [leader + 100 * (lane == leader) for lane in range(32)]
        seen.add(leader)
    assert len(seen) > 3
    partial = "and.b32 %t1, %t0, 4; setp.ne.u32 %p1, %t1, 0; mov.b32 %d, 99; @%p1 elect.sync %d|%p2, 0xF0F0F0F0;"
    module = ptxsim.Module(program(partial, [], np.zeros(32, "u4")))
    for seed in range(6):
        out = np.zeros(32, "u4")
        module.launch("k", 1, 32, [out], mode="random", seed=seed, elect="random")
        assert {int(v) for v in out if v != 99} <= {lane for lane in range(32) if lane & 4}
    for mode in ("early", "random"):
        module.launch("k", 1, 32, [out], mode=mode, seed=3)
        assert out[4] == 4


def test_a_shuffle_from_an_absent_lane_is_poison() -> None:
    a = np.arange(32, dtype="u4")
    code = (
        "mov.b32 %d, 0; and.b32 %t1, %a, 1; setp.eq.u32 %p1, %t1, 0; @%p1 bra E; bra F;"
        "E: shfl.sync.bfly.b32 %d, %a, 1, 31, 0x55555555; F:"
    )
    with pytest.raises(ptxsim.PoisonError):
        run(code, [a], np.zeros(32, "u4"))


def test_atomics_count_every_lane() -> None:
    text = r"""
extern "C" __global__ void atoms(int *n, unsigned *old, float *f, unsigned *c) {
    old[threadIdx.x] = atomicAdd(n, 2); atomicAdd(f, 0.5f); atomicMax(c, threadIdx.x * 3); atomicInc(c + 1, 9); atomicCAS(c + 2, 7u, threadIdx.x);
    asm volatile("red.global.add.v4.f32 [%0], {%1, %1, %1, %1};" ::"l"(f + 4), "f"(1.0f) : "memory");
}"""
    n, old, f = np.zeros(1, "i4"), np.zeros(64, "u4"), np.zeros(8, "f4")
    c = np.array([5, 0, 7], "u4")
    ptxsim.Module(nvrtc.compile_ptx(text)).launch("atoms", 1, 64, [n, old, f, c], mode="random", seed=3)
    assert n[0] == 128
    assert sorted(old.tolist()) == list(range(0, 128, 2))
    assert f.tolist() == [32.0, 0, 0, 0, 64.0, 64.0, 64.0, 64.0]
    assert c[:2].tolist() == [189, 64 % 10]
    assert c[2] in range(64)
    assert c[2] != 7 or old is not None


def test_blocks_that_wait_for_each_other_need_residency() -> None:
    text = r"""
extern "C" __global__ void relay(volatile int *flag, int *out) {
    if (threadIdx.x == 0) {
        if (blockIdx.x == 0) { while (flag[0] == 0) ; out[0] = flag[0]; }
        else { __threadfence(); flag[0] = 42; }
    }
}"""
    module = ptxsim.Module(nvrtc.compile_ptx(text))
    flag, out = np.zeros(1, "i4"), np.zeros(1, "i4")
    with pytest.raises(ptxsim.StepLimitError, match=r"1 clusters have not begun.*resident=2"):
        module.launch("relay", 2, 32, [flag, out], max_steps=5000)
    flag[0] = 0
    module.launch("relay", 2, 32, [flag, out], resident=2, max_steps=50_000)
    assert out[0] == 42
