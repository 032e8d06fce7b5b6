# ruff: noqa: E501 (lines of PTX are kept whole)
"""Multicast tensor and bulk copies: who gets the data, and whose mbarrier is signalled (ISA 9.7.9.27.1.2)."""

from __future__ import annotations

import numpy as np
import pytest

import ptxsim
from simtest.single import HEADER

SYNC = "barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;"
ROW = 64


def launch(copy: str, mask: int, waiters: int, tx: int, mode: str, box: int = 4) -> np.ndarray:
    """Block 2 of four issues ``copy``; blocks of ``waiters`` expect ``tx`` bytes and wait; return every block's tile."""
    text = (
        HEADER
        + f"""
.visible .entry k(.param .align 64 .b8 tm[128], .param .u64 data, .param .u64 out)
{{
.reg .b32 %r<30>; .reg .b64 %rd<20>; .reg .pred %p<9>; .reg .b16 %mask;
.shared .align 1024 .b8 s[512]; .shared .align 8 .b8 m[8];
mov.u32 %r0, %tid.x; mov.u32 %r1, s; mov.u32 %r2, m; mov.u32 %r3, %cluster_ctarank; mov.b16 %mask, {mask};
setp.eq.u32 %p1, %r0, 0; setp.eq.u32 %p2, %r3, 2; and.pred %p2, %p1, %p2; mov.u32 %r4, {waiters}; shr.u32 %r4, %r4, %r3; and.b32 %r4, %r4, 1;
setp.eq.u32 %p3, %r4, 1; and.pred %p4, %p1, %p3;
@%p1 mbarrier.init.shared::cta.b64 [%r2], 1; fence.mbarrier_init.release.cluster;
shl.b32 %r5, %r0, 4; add.u32 %r6, %r1, %r5; st.shared.v4.u32 [%r6], {{0, 0, 0, 0}}; fence.proxy.async.shared::cta; {SYNC}
@%p4 mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r2], {tx};
mov.b64 %rd1, tm; cvta.param.u64 %rd1, %rd1; ld.param.u64 %rd2, [data]; mapa.shared::cluster.u32 %r7, %r2, 1;
@!%p2 bra J; {copy}
J: bar.warp.sync -1; @!%p3 bra E;
W: mbarrier.try_wait.parity.shared::cta.b64 %p5, [%r2], 0; @!%p5 bra W;
E: bar.warp.sync -1; {SYNC}
ld.shared.v4.u32 {{%r10, %r11, %r12, %r13}}, [%r6]; ld.param.u64 %rd3, [out]; mad.lo.u32 %r8, %r3, 512, %r5;
cvt.u64.u32 %rd4, %r8; add.u64 %rd3, %rd3, %rd4; st.global.v4.u32 [%rd3], {{%r10, %r11, %r12, %r13}};
{SYNC}
ret;
}}
"""
    )
    module = ptxsim.Module(text)
    out = np.zeros((4, 4, ROW), "u2")
    tmap = ptxsim.encode_tiled("uint16", module.memory.map(DATA), [ROW, 8], [2 * ROW], [ROW, box])
    module.launch("k", 4, 32, [tmap, DATA, out], cluster=4, mode=mode)
    return out


DATA = np.arange(1, 8 * ROW + 1).astype("u2").reshape(8, ROW)
TILE = "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster{group} [%r1], [%rd1, {{0, 3}}], [{bar}], %mask;"
GATHER = "cp.async.bulk.tensor.2d.shared::cluster.global.tile::gather4.mbarrier::complete_tx::bytes.multicast::cluster{group} [%r1], [%rd1, {{0, 3, 4, 5, 6}}], [{bar}], %mask;"
LINEAR = "add.u64 %rd2, %rd2, 384; cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%r1], [%rd2], 512, [{bar}], %mask;"


def check(out: np.ndarray, mask: int) -> None:
    """Blocks of the mask hold rows 3 to 6, the others nothing."""
    for rank in range(4):
        want = DATA[3:7] if mask >> rank & 1 else np.zeros((4, ROW), "u2")
        assert out[rank].tolist() == want.tolist()


@pytest.mark.parametrize("mode", ["early", "late"])
@pytest.mark.parametrize("mask", [0b0001, 0b1011, 0b1111])
@pytest.mark.parametrize("copy", [TILE, GATHER, LINEAR], ids=["tile", "gather4", "linear"])
def test_each_destination_s_own_barrier(copy: str, mask: int, mode: str) -> None:
    box = 1 if copy is GATHER else 4
    check(launch(copy.format(group="", bar="%r2"), mask, mask, 512, mode, box), mask)


@pytest.mark.parametrize("mode", ["early", "late"])
@pytest.mark.parametrize(("bar", "parity"), [("%r2", 0), ("%r7", 1)])
def test_pairs_signal_the_side_of_the_barrier(bar: str, parity: int, mode: str) -> None:
    """With .cta_group::2, even (or odd) blocks' mbarriers count what their pair received: the side where mbar lies."""
    mask = 0b1011
    # Pair 0 receives in both blocks, pair 1 in its odd block only; the waiting side of pair 1 gets half the bytes.
    with pytest.raises((ptxsim.SyncError, ptxsim.DeadlockError)):
        launch(TILE.format(group=".cta_group::2", bar=bar), mask, 0b0101 << parity, 1024, mode)
    check(launch(TILE.format(group=".cta_group::2", bar=bar), 0b1111, 0b0101 << parity, 1024, mode), 0b1111)


def test_mask_beyond_the_cluster() -> None:
    with pytest.raises(ptxsim.MemoryFault, match="names blocks that do not exist"):
        launch(TILE.format(group="", bar="%r2"), 0b10001, 0b0001, 512, "early")


def test_a_single_copy_may_not_signal_another_block() -> None:
    plain = TILE.replace(".multicast::cluster", "").replace(", %mask", "").format(group="", bar="%r7")
    with pytest.raises(ptxsim.MemoryFault, match="different blocks"):
        launch(plain, 0, 0b0010, 512, "early")
