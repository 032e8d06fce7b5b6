# ruff: noqa: E501 (lines of PTX are kept whole)
"""More golden cases of asynchronous copies, mbarriers and matrices: cache hints, ranks, scopes that copies.py leaves out."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from simtest.golden.case import Case
from simtest.golden.copies import (
    CLUSTER,
    EXPECT,
    FLUSH,
    OWN,
    PEER,
    READY,
    SETUP,
    WAIT,
    dump,
    edit_case,
    exchange,
    fetch,
    load_case,
    spoil,
    store_case,
    tensor,
)
from simtest.golden.matrices import B_AT, descriptor, entry, mma, operand, wgmma_case

HINT = "createpolicy.fractional.L2::evict_last.b64 %d11;"
BYTES = "mbarrier::complete_tx::bytes"


def plain(name: str, rng: np.random.Generator, code: str, count: int = 1) -> Case:
    """Return a case of one warp with an mbarrier of ``count`` arrivals: ``image`` comes in, shared memory goes out."""
    data = [rng.integers(0, 256, 1024).astype("u1"), np.zeros(512, "u1")]
    setup = SETUP.replace("[%r3], 1;", f"[%r3], {count};")
    start = "ld.param.u64 %d1, [image]; mad.wide.u32 %d2, %r1, 16, %d1; mad.lo.u32 %r4, %r1, 16, %r2;"
    text = entry(".param .u64 image, .param .u64 out", setup + spoil(512) + READY + HINT + start + code + dump(512))
    return Case(f"more {name}", text, "k", 1, 32, [("array", 0), ("array", 1)], data, outputs=[1])


def small_copies(rng: np.random.Generator) -> Iterator[Case]:
    """Yield cp.async with prefetch sizes and cache hints."""
    done = "cp.async.wait_all; bar.warp.sync -1;"
    for size in (64, 128, 256):
        form = f"cp.async.cg.shared::cta.global.L2::{size}B [%r4], [%d2], 16;"
        yield plain(f"cp.async, prefetch of {size}", rng, form + done)
    yield plain("cp.async, hint", rng, "cp.async.cg.shared.global.L2::cache_hint [%r4], [%d2], 16, %d11;" + done)
    part = "and.b32 %r7, %r1, 15; cp.async.ca.shared.global.L2::cache_hint.L2::128B [%r4], [%d2], 16, %r7, %d11;"
    yield plain("cp.async, hint and zero fill", rng, part + done)


def linear(rng: np.random.Generator) -> Iterator[Case]:
    """Yield bulk copies with cache hints, prefetches, and to the own block."""
    arrive = EXPECT.format(128)
    load = f"@%p1 cp.async.bulk.shared::cluster.global.{BYTES}.L2::cache_hint [%r2], [%d1], 128, [%r3], %d11;"
    yield plain("bulk load, hint", rng, arrive + load + WAIT.format(n=0))
    load = f"@%p1 cp.async.bulk.shared::cta.global.{BYTES} [%r2], [%d1+16], 128, [%r3];"
    yield plain("bulk load to the own block", rng, arrive + load + WAIT.format(n=0))
    ahead = "@%p1 cp.async.bulk.prefetch.L2.global [%d1], 256; @%p1 cp.async.bulk.prefetch.L2.global.L2::cache_hint [%d1+256], 256, %d11;"
    yield plain("bulk prefetch", rng, ahead + arrive + load + WAIT.format(n=0))
    stores = {
        "store": "cp.async.bulk.global.shared::cta.bulk_group.L2::cache_hint [%d1+32], [%r2+16], 960, %d11;",
        "add f32": "cp.reduce.async.bulk.global.shared::cta.bulk_group.L2::cache_hint.add.f32 [%d1+32], [%r2+16], 960, %d11;",
    }
    for name, verb in stores.items():
        image, out = (rng.standard_normal(256).astype("f4") for _ in range(2))
        flush = FLUSH.replace("wait_group 0", "wait_group.read 0") + "cp.async.bulk.wait_group 0;"
        code = SETUP + fetch(1024) + READY + HINT + f"@!%p1 bra E; ld.param.u64 %d1, [out]; {verb} {flush} E:"
        text = entry(".param .u64 image, .param .u64 out", code)
        yield Case(f"more bulk {name}, hint", text, "k", 1, 32, [("array", 0), ("array", 1)], [image, out], outputs=[1])


def tiles(rng: np.random.Generator) -> Iterator[Case]:
    """Yield tile copies with cache hints, of every rank to several blocks, and prefetches."""
    for rank, dims, box, at in ((1, [40], [16], [8]), (3, [16, 5, 4], [8, 3, 2], [8, 2, 1])):
        case = load_case(rng, f"more tile load {rank}d, hint", 6, dims, box, at, 0, None, 0)
        old, new = f"global.tile.{BYTES} [%r2], [%d1, {{", f"global.{BYTES} [%r2], [%d1, {{"
        if rank == 3:
            new = new.replace(f"{BYTES} ", f"{BYTES}.L2::cache_hint ")
            case.ptx = case.ptx.replace("shared::cluster.global.tile", "shared::cta.global.tile").replace(
                "}], [%r3];", "}], [%r3], %d11;"
            )
            case.ptx = case.ptx.replace("@%p1 cp.async", f"{HINT} @%p1 cp.async")
        case.ptx = case.ptx.replace(old, new)
        yield case
    case = load_case(rng, "more tile prefetch", 6, [64, 20], [32, 8], [32, 3], 2, None, 0)
    ahead = (
        "prefetch.tensormap [%d1]; @%p1 cp.async.bulk.prefetch.tensor.2d.L2.global.tile [%d1, {32, 3}];"
        f"{HINT} @%p1 cp.async.bulk.prefetch.tensor.2d.L2.global.tile.L2::cache_hint [%d1, {{0, 3}}], %d11;"
    )
    case.ptx = case.ptx.replace("@%p1 mbarrier.arrive.expect_tx", ahead + "@%p1 mbarrier.arrive.expect_tx", 1)
    yield case
    for name, op in (("store", ""), ("add", "add")):
        case = store_case(rng, f"more tile {name}, hint", op, 2, [16, 5, 4], [8, 3, 2], [4, 2, 1], 0)
        case.ptx = case.ptx.replace(
            ".tile.bulk_group", ".tile.bulk_group.L2::cache_hint" if not op else ".bulk_group.L2::cache_hint"
        )
        case.ptx = case.ptx.replace("}], [%r2];", "}], [%r2], %d11;").replace("@!%p1 bra E;", HINT + "@!%p1 bra E;")
        yield case


def shared_tiles(rng: np.random.Generator) -> Iterator[Case]:
    """Yield tiles of four and five dimensions that one block loads into both of a cluster."""
    for dims, box, hint in (([16, 3, 3, 4], [16, 2, 2, 2], False), ([16, 3, 3, 2, 2], [16, 2, 2, 2, 1], True)):
        rank = len(dims)
        array, tmap, size = tensor(rng, 6, dims, box, 0, None, 0)
        more, policy = (".L2::cache_hint", ", %d11") if hint else ("", "")
        load = (
            f"setp.eq.and.u32 %p4, %r4, 0, %p1; mov.u16 %h1, 3; @%p4 cp.async.bulk.tensor.{rank}d.shared::cluster.global.{BYTES}"
            f".multicast::cluster{more} [%r2], [%d1, {{{', '.join('0' * rank)}}}], [%r3], %h1{policy};"
        )
        address = "mov.b64 %d1, tm; cvta.param.u64 %d1, %d1;" + HINT
        text = (
            SETUP + spoil(1024) + READY + address + EXPECT.format(size) + PEER + load + WAIT.format(n=0) + OWN
            + dump(1024).replace("ld.param.u64 %d9, [out];", "") + CLUSTER
        )  # fmt: skip
        ptx = entry(".param .align 64 .b8 tm[128], .param .u64 out", text)
        data = [array, np.zeros(2048, "u1")]
        yield Case(f"more tile {rank}d for two blocks", ptx, "k", 2, 32, [tmap, ("array", 1)], data, 0, 2, outputs=[1])


def edits(rng: np.random.Generator) -> Iterator[Case]:
    """Yield loads through a map whose fields the kernel replaced in global memory."""
    fields = {
        "extent": ("global_dim.global.b1024.b32 [%d1], 0, 5; global_dim.global.b1024.b32 [%d1], 1, 3", 0, 384),
        "box": ("box_dim.global.b1024.b32 [%d1], 0, 8", 4, 192),
        "type": ("elemtype.global.b1024.b32 [%d1], 2", 0, 384),
        "swizzle": ("swizzle_mode.global.b1024.b32 [%d1], 1; box_dim.global.b1024.b32 [%d1], 0, 8", 0, 192),
        "rank": ("rank.global.b1024.b32 [%d1], 1", 0, 384),
        "address": ("global_address.global.b1024.b64 [%d1], %d2", 0, 384),
    }
    for name, (text, x, size) in fields.items():
        case = edit_case(rng, f"more edited map: {name}", text, x, size)
        first = case.ptx.index("@%p1 tensormap.replace")
        last = case.ptx.index("bar.warp.sync -1; tensormap.cp_fenceproxy")
        edit, publish = case.ptx[first:last], "fence.proxy.tensormap::generic.acquire.gpu [%d1], 128;"
        again = "fence.proxy.tensormap::generic.release.gpu;"
        case.ptx = case.ptx.replace(edit, "", 1).replace(
            publish, f"{publish} {edit} {again} bar.warp.sync -1; {publish}"
        )
        yield case


def barriers(rng: np.random.Generator) -> Iterator[Case]:
    """Yield mbarrier operations with scopes, and those on the barrier of the other block."""
    wait = WAIT.format(n=0)
    once = "@%p1 mbarrier.arrive.noComplete.release.cta.shared::cta.b64 %d4, [%r3], 1; @%p1 mbarrier.pending_count.b64 %r20, %d4;"
    last = "@%p1 mbarrier.arrive.release.cta.shared::cta.b64 %d5, [%r3]; bar.warp.sync -1;"
    told = "@%p1 st.shared.u32 [%r2], %r20;"
    yield plain("mbarrier, one arrival left", rng, once + last + wait + told + "bar.warp.sync -1;", 2)
    drop = "@%p1 mbarrier.arrive_drop.noComplete.shared.b64 %d4, [%r3], 1; @%p1 mbarrier.pending_count.b64 %r20, %d4;"
    again = "@%p1 mbarrier.arrive.shared.b64 %d6, [%r3]; bar.warp.sync -1;" + WAIT.format(n=1)
    yield plain("mbarrier, dropped", rng, drop + last + wait + again + told + "bar.warp.sync -1;", 2)
    token = "@%p1 mbarrier.arrive_drop.expect_tx.release.cta.shared::cta.b64 %d4, [%r3], 64; @%p1 mbarrier.pending_count.b64 %r20, %d4;"
    done = "@%p1 mbarrier.complete_tx.relaxed.cta.shared::cta.b64 [%r3], 64; bar.warp.sync -1;"
    yield plain("mbarrier, dropped with bytes", rng, token + last + done + wait + told + "bar.warp.sync -1;", 2)
    for scope in ("cta.shared::cta", "cluster.shared::cta", "cluster.shared::cluster"):
        expect = f"@%p1 mbarrier.expect_tx.relaxed.{scope}.b64 [%r3], 64;"
        code = (
            expect
            + last
            + "mbarrier.test_wait.parity.shared.b64 %p2, [%r3], 0; selp.b32 %r20, 1, 2, %p2; bar.warp.sync -1;"
        )
        yield plain(f"mbarrier, bytes of {scope}", rng, code + done + wait + told + "bar.warp.sync -1;")
    for form in ("b64 %p2, [%r3], %d5", "shared.b64 %p2, [%r3], %d5", "acquire.cluster.shared::cta.b64 %p2, [%r3], %d5",
                 "shared::cta.b64 %p2, [%r3], %d5, %r21", "parity.relaxed.cta.shared::cta.b64 %p2, [%r3], 0, %r21"):  # fmt: skip
        place = form.replace("[%r3]", "[%d6]") if form.startswith("b64") else form
        generic = "cvt.u64.u32 %d6, %r3; cvta.shared.u64 %d6, %d6; mov.u32 %r21, 1000;"
        code = f"{generic} mbarrier.arrive.shared.b64 %d5, [%r3]; X: mbarrier.try_wait.{place}; @!%p2 bra X; selp.b32 %r20, 1, 2, %p2; {told}"
        yield plain(f"mbarrier.try_wait.{form.split()[0]}{form.count(',')}", rng, code + "bar.warp.sync -1;", 32)
    remote = {
        "release": ("mbarrier.arrive.expect_tx.release.cluster.shared::cluster.b64 _, [%r9], 64;", "arrive"),
        "default": ("mbarrier.arrive.expect_tx.shared::cluster.b64 _, [%r9], 64;", "arrive"),
        "relaxed": ("mbarrier.arrive.expect_tx.relaxed.cluster.shared::cluster.b64 _, [%r9], 64;", "arrive"),
        "dropped": ("mbarrier.arrive_drop.release.cluster.shared::cluster.b64 _, [%r9];", "drop"),
    }
    for name, (code, kind) in remote.items():
        tell = "@%p1 mbarrier.complete_tx.relaxed.cluster.shared::cta.b64 [%r3], 64;" if kind == "arrive" else ""
        case = exchange(f"more arrival from the other block, {name}", rng, 0, f"@%p1 {code} {CLUSTER} {tell}")
        case.ptx = case.ptx.replace(EXPECT.format(0), "")
        yield case
    for kind, value in (("u64", "%d4"), ("f64", "%d4")):
        place = "mad.lo.u32 %r6, %r1, 16, %r8; mad.lo.u32 %r20, %r4, 1000, %r1; cvt.u64.u32 %d4, %r20;"
        yield exchange(
            f"more st.async {kind}", rng, 256, f"{place} st.async.shared::cluster.{BYTES}.{kind} [%r6], {value}, [%r9];"
        )


#: Types of mma.sync, as in matrices.MMA.
MMA = [
    *(("m16n8k16", f"f32.{a}.{b}.f32", 2, 1, 4) for a, b in (("e4m3", "e4m3"), ("e4m3", "e5m2"), ("e5m2", "e5m2"))),
    *(("m16n8k32", f"f32.{a}.{b}.f32", 4, 2, 4) for a, b in (("e4m3", "e4m3"), ("e5m2", "e4m3"), ("e5m2", "e5m2"))),
    ("m16n8k32", "f16.e5m2.e4m3.f16", 4, 2, 2),
    *(("m16n8k16", f"s32.{a}.{b}.s32", 2, 1, 4) for a, b in (("s8", "s8"), ("s8", "u8"), ("u8", "u8"))),
    *(("m16n8k32", f"s32.{a}.{b}.s32", 4, 2, 4) for a, b in (("s8", "s8"), ("u8", "s8"), ("u8", "u8"))),
    ("m8n8k16", "s32.u8.u8.s32", 1, 1, 2),
]  # fmt: skip


def matrices(rng: np.random.Generator) -> Iterator[Case]:
    """Yield matrix products in more types, the smallest wgmma in every type."""
    yield from mma(rng, MMA)
    saturated = next(iter(mma(rng, [("m16n8k32", "s32.s8.s8.s32", 4, 2, 4)])))
    saturated.name, saturated.ptx = (
        f"{saturated.name} satfinite",
        saturated.ptx.replace("row.col.s32", "row.col.satfinite.s32"),
    )
    saturated.data[0].view("i4")[:, -4:] = np.array([2**31 - 1, -(2**31), 2**31 - 5, 7])
    yield saturated
    for kinds, bits, out in (
        ("f16.f16", 16, "f16"), ("bf16.bf16", 16, "f32"), ("tf32.tf32", 32, "f32"), ("s8.s8", 8, "s32"), ("s8.u8", 8, "s32"),
        ("u8.s8", 8, "s32"), ("u8.u8", 8, "s32"), *((f"{a}.{b}", 8, "f32") for a in ("e4m3", "e5m2") for b in ("e4m3", "e5m2")),
    ):  # fmt: skip
        depth = 256 // bits
        left, right = operand(64, bits, depth, 128, False), operand(8, bits, depth, 128, False)
        a, b = [descriptor(0, *left[:2], 128)], [descriptor(B_AT, *right[:2], 128)]
        tail = "" if out == "s32" else ", 1, 1, 0, 0" if bits == 16 else ", 1, 1"
        yield wgmma_case(f"n8 {kinds} {out}", rng, kinds, 8, depth, a, b, out=out, tail=tail, scale_d=True)
        if kinds in ("bf16.bf16", "e4m3.e5m2"):
            kept = "f32" if bits == 16 else "f16"
            yield wgmma_case(
                f"n8 {kinds} RS",
                rng,
                kinds,
                8,
                depth,
                None,
                b,
                out=kept,
                tail=tail.removesuffix(", 0") if bits == 16 else tail,
            )
        if kinds == "s8.s8":
            yield wgmma_case(
                "n8 s8 satfinite", rng, kinds, 8, depth, a, b, out=out, tail="", scale_d=True, form=".satfinite"
            )


def cases() -> Iterator[Case]:
    """Yield the cases."""
    rng = np.random.default_rng(9)
    yield from small_copies(rng)
    yield from linear(rng)
    yield from tiles(rng)
    yield from shared_tiles(rng)
    yield from edits(rng)
    yield from barriers(rng)
    yield from matrices(rng)
