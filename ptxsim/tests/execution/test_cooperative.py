"""Cooperative launches: every block is resident, and the driver's workspace holds a grid barrier."""

from __future__ import annotations

import numpy as np
import pytest

import ptxsim

# Each block adds its number to the sum, waits at the grid barrier as cooperative groups do, and stores the sum.
PTX = """
.version 8.6
.target sm_90a
.address_size 64
.visible .entry total(.param .u64 sum, .param .u64 out)
{
    .reg .pred %p<3>;
    .reg .b32 %r<12>;
    .reg .b64 %rd<6>;
    mov.u32 %r0, %envreg1;
    mov.u32 %r1, %envreg2;
    mov.b64 %rd0, {%r1, %r0};
    setp.eq.u64 %p2, %rd0, 0;
    @%p2 trap;
    ld.param.u64 %rd1, [sum];
    ld.param.u64 %rd2, [out];
    mov.u32 %r2, %ctaid.x;
    mov.u32 %r3, %tid.x;
    setp.ne.u32 %p0, %r3, 0;
    @%p0 bra DONE;
    red.global.add.u32 [%rd1], %r2;
    mov.u32 %r4, %nctaid.x;
    sub.u32 %r5, %r4, 1;
    sub.u32 %r6, 0x80000000, %r5;
    setp.eq.u32 %p1, %r2, 0;
    selp.u32 %r7, %r6, 1, %p1;
    atom.release.gpu.global.add.u32 %r8, [%rd0+4], %r7;
WAIT:
    ld.acquire.gpu.global.u32 %r9, [%rd0+4];
    xor.b32 %r10, %r9, %r8;
    setp.lt.s32 %p1, %r10, 0;
    @!%p1 bra WAIT;
    ld.global.u32 %r11, [%rd1];
    mad.wide.u32 %rd3, %r2, 4, %rd2;
    st.global.u32 [%rd3], %r11;
DONE:
    ret;
}
"""


@pytest.mark.parametrize(("mode", "seed"), [("early", 0), ("late", 0), ("random", 1)])
def test_grid_barrier(mode: str, seed: int) -> None:
    total, out = np.zeros(1, np.uint32), np.zeros(7, np.uint32)
    module = ptxsim.Module(PTX)
    args = [total, out]
    options = {"mode": mode, "seed": seed, "race_global": True}
    module.launch("total", 7, 64, args, cooperative=True, **options)
    assert out.tolist() == [21] * 7
    with pytest.raises(ptxsim.KernelTrap):
        module.launch("total", 7, 64, args, **options)
