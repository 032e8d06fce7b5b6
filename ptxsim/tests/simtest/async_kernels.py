# ruff: noqa: E501 (lines of PTX are kept whole)
"""Small kernels of every asynchronous operation, right as they stand, with each step of their synchronisation marked.

A step is written ``<<name|code>>``: a bug is the kernel without it. ``<<name|code|other name|other code>>`` has a second bug
that puts other code in its place; ``name!Error/Other`` tells which errors the bugs raise, a RaceError if not told. Each
kernel is for one side of its operation: what it reads (then somebody overwrites it) or what it writes (then somebody reads
it).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

import ptxsim
from simtest.single import HEADER
from simtest.umma import idesc

_STEP = re.compile(r"<<([^|>]+)\|([^|]*?)(?:\|([^|>]+)\|([^|]*?))?>>")


@dataclass(frozen=True)
class Bug:
    """A step of the synchronisation that is missing or wrong, the errors it may raise, and the code without it."""

    step: str
    errors: tuple[type[ptxsim.SimError], ...]
    code: str


@dataclass(frozen=True)
class Kernel:
    """An operation, the side of it that is checked, marked code, and the words that each lane stores."""

    operation: str
    side: str
    code: str
    out: tuple[int, ...] = ()
    threads: int = 64
    cluster: int = 1
    grid: int = 0
    count: int = 1

    def bugs(self) -> Iterator[Bug]:
        """Yield the kernel with one step dropped or replaced at a time."""
        for step in _STEP.finditer(self.code):
            name, _, errors = step[1].partition("!")
            kinds = tuple(getattr(ptxsim, error) for error in (errors or "RaceError").split("/"))
            for bug, code in ((name, ""), (step[3], step[4])):
                if bug is not None:
                    broken = self.code[: step.start()] + code + self.code[step.end() :]
                    yield Bug(bug, kinds, _STEP.sub(r"\2", broken))

    @property
    def fine(self) -> str:
        """The code with every step in place."""
        return _STEP.sub(r"\2", self.code)


def run(kernel: Kernel, code: str, mode: str, seed: int) -> list[list[int]]:
    """Run code of a kernel and return the words that each of 32 lanes has stored at ``%gout``, ``%gout`` + 128, ..."""
    data, out = np.full(32, 3, "u4"), np.zeros((4, 32), "u4")
    module = ptxsim.Module(HEADER + _FRAME.replace("{count}", str(kernel.count)).replace("{code}", code))
    tmaps = [ptxsim.encode_tiled("uint32", module.memory.map(a), [8, 4], [32], [8, 4]) for a in (data, out.reshape(-1))]
    module.launch(
        "k", kernel.grid or kernel.cluster, kernel.threads, [*tmaps, data, out], cluster=kernel.cluster, mode=mode,
        seed=seed, race_global=True, max_steps=100_000,
    )  # fmt: skip
    return out[: len(kernel.out)].tolist()


SYNC = "barrier.cluster.arrive; barrier.cluster.wait;"
_FRAME = f"""
.visible .entry k(.param .align 64 .b8 map_in[128], .param .align 64 .b8 map_out[128], .param .u64 in, .param .u64 out)
{{
.reg .b32 %r<40>; .reg .b64 %rd<9>; .reg .f32 %f<9>; .reg .pred %p<9>; .reg .b16 %both;
.reg .b32 %t; .reg .b32 %w; .reg .b32 %lane; .reg .b32 %rank; .reg .b32 %s; .reg .b32 %m; .reg .b32 %word; .reg .b32 %far; .reg .b32 %farword; .reg .b32 %farm;
.reg .b64 %in; .reg .b64 %out; .reg .b64 %gin; .reg .b64 %gout; .reg .b64 %mapin; .reg .b64 %mapout;
.reg .pred %lead; .reg .pred %first; .reg .pred %user; .reg .pred %group; .reg .pred %second; .reg .pred %nearlead; .reg .pred %nearuser; .reg .pred %near; .reg .pred %faruser; .reg .pred %no; .reg .pred %yes; .reg .pred %ulead;
.shared .align 1024 .b8 s[8192]; .shared .align 8 .b8 m[8]; .shared .align 4 .b8 slot[4];
mov.u32 %t, %tid.x; shr.u32 %w, %t, 5; and.b32 %lane, %t, 31; mov.u32 %rank, %cluster_ctarank; mov.u32 %s, s; mov.u32 %m, m; mov.b16 %both, 3;
ld.param.u64 %in, [in]; ld.param.u64 %out, [out]; mad.wide.u32 %gin, %lane, 4, %in; mad.wide.u32 %gout, %lane, 4, %out; mad.lo.u32 %word, %lane, 4, %s;
mov.b64 %mapin, map_in; cvta.param.u64 %mapin, %mapin; mov.b64 %mapout, map_out; cvta.param.u64 %mapout, %mapout;
setp.eq.u32 %lead, %t, 0; setp.eq.u32 %first, %w, 0; setp.lt.u32 %group, %w, 4; mov.u32 %r0, %ntid.x; shr.u32 %r0, %r0, 5; sub.u32 %r0, %r0, 1; setp.eq.u32 %user, %w, %r0;
setp.eq.and.u32 %ulead, %lane, 0, %user; setp.eq.u32 %near, %rank, 0; setp.eq.u32 %second, %rank, 1; setp.eq.and.u32 %nearlead, %rank, 0, %lead; setp.eq.and.u32 %nearuser, %rank, 0, %user;
setp.eq.and.u32 %faruser, %rank, 1, %user; setp.ne.u32 %no, %t, %t; setp.eq.u32 %yes, %t, %t; mov.u32 %r1, 1; mov.u32 %r7, 7; mov.u32 %r8, 0;
mov.u32 %r0, %cluster_nctarank; sub.u32 %r0, %r0, 1; mapa.shared::cluster.u32 %far, %s, %r0; mapa.shared::cluster.u32 %farword, %word, %r0; mapa.shared::cluster.u32 %farm, %m, %r0;
@%lead mbarrier.init.shared::cta.b64 [%m], {{count}}; fence.mbarrier_init.release.cluster; {SYNC}
{{code}}
ret;
}}
"""
"""%lead: the first thread; %first, %user: the first and last warp; %near, %second: the block; %far...: in the last block."""


def wait(label: str, parity: int = 0) -> str:
    """Return a wait for a phase of the mbarrier."""
    return f"{label}: mbarrier.try_wait.parity.shared::cta.b64 %p0, [%m], {parity}; @!%p0 bra {label};"


def expect(size: int, who: str = "%lead") -> str:
    """Return an arrival that expects bytes."""
    return f"@{who} mbarrier.arrive.expect_tx.shared::cta.b64 _, [%m], {size};"


BAR = "bar.sync 0;"
FENCE = "<<fence|fence.proxy.async.shared::cta;>>"
GLOBAL_FENCE = "<<fence|fence.proxy.async.global;|of shared memory only|fence.proxy.async.shared::cta;>>"
READY = f"<<barrier|{BAR}>>"
FILLED_FIRST = f"<<barrier!RaceError/PoisonError|{BAR}>>"
"""Without it the operation may find its source undefined."""
RELEASE = f"<<release|{BAR}>>"
NEXT = f"<<release!RaceError/DeadlockError|{BAR}>>"
"""Without it a warp may also miss a phase of the mbarrier."""


def store_out(row: int, register: str = "%r9", who: str = "%user") -> str:
    """Return a store of a register to a row of the output."""
    return f"@{who} st.global.u32 [%gout+{128 * row}], {register};"


def loads() -> Iterator[Kernel]:
    """cp.async.bulk(.tensor) into shared memory."""
    for name, load in (
        ("bulk load", "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%s], [%in], 128, [%m];"),
        (
            "tensor load",
            "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%s], [%mapin, {0, 0}], [%m];",
        ),
    ):
        issue = f"<<expect!DeadlockError|{expect(128)}>> @%lead {load}"
        yield Kernel(
            name,
            "reads",
            f"@%user st.global.u32 [%gin], 7; {GLOBAL_FENCE} {READY} {issue} <<wait|{wait('A')}>> @%user st.global.u32 [%gin], 8;",
        )
        again = f"{NEXT} {expect(128)} @%lead {load} <<second wait|{wait('B', 1)}|wrong parity|{wait('B', 0)}>> @%user ld.shared.u32 %r9, [%word]; {store_out(1)}"
        start = f"@%user st.shared.u32 [%word], 1; {FENCE} {READY} {issue} <<wait|{wait('A')}>> @%user ld.shared.u32 %r9, [%word]; {store_out(0)}"
        yield Kernel(name, "writes", start + again, (3, 3))
    multicast = "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%s], [%in], 128, [%m], %both;"
    yield Kernel(
        "multicast load", "reads",
        f"@%faruser st.global.u32 [%gin], 7; {GLOBAL_FENCE} <<barrier|{SYNC}>> {expect(128)} @%nearlead {multicast} <<wait|{wait('A')}|one block waits|@%near bra N; {wait('A')} N:>> <<release|{SYNC}>> @%faruser st.global.u32 [%gin], 8; {SYNC}",
        cluster=2,
    )  # fmt: skip
    yield Kernel(
        "multicast load", "writes",
        f"@%faruser st.shared.u32 [%word], 1; {FENCE} <<barrier|{SYNC}>> {expect(128)} @%nearlead {multicast} <<wait|{wait('A')}|one block waits|@%second bra N; {wait('A')} N:>> @%faruser ld.shared.u32 %r9, [%word]; {store_out(0, who='%faruser')} {SYNC}",
        (3,), cluster=2,
    )  # fmt: skip


STORES = {
    "bulk store": ("cp.async.bulk.global.shared::cta.bulk_group [%out], [%s], 128;", 7),
    "tensor store": ("cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%mapout, {0, 0}], [%s];", 7),
    "bulk reduction": ("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.u32 [%out], [%s], 128;", 8),
    "tensor reduction": (
        "cp.reduce.async.bulk.tensor.2d.global.shared::cta.add.bulk_group [%mapout, {0, 0}], [%s];",
        8,
    ),
}
COMMIT = "<<commit|@%lead cp.async.bulk.commit_group;>>"
FLUSH = "cp.async.bulk.commit_group; cp.async.bulk.wait_group 0;"


def stores() -> Iterator[Kernel]:
    """cp.async.bulk(.tensor) and cp.reduce out of shared memory."""
    for name, (store, result) in STORES.items():
        yield Kernel(
            name, "reads",
            f"@%user st.shared.u32 [%word], 7; {FENCE} {FILLED_FIRST} @%lead {store} {COMMIT} <<wait|@%lead cp.async.bulk.wait_group.read 0;|one group stays|@%lead cp.async.bulk.wait_group.read 1;>> {RELEASE} @%user st.shared.u32 [%word], 8; @%lead cp.async.bulk.wait_group 0;",
        )  # fmt: skip
        yield Kernel(
            name, "writes",
            f"@%first st.shared.u32 [%word], 7; fence.proxy.async.shared::cta; @%user st.global.u32 [%gout], 1; {GLOBAL_FENCE} {READY} @%lead {store} {COMMIT} <<wait|@%lead cp.async.bulk.wait_group 0;|waits for the reads only|@%lead cp.async.bulk.wait_group.read 0;>> {RELEASE} @%user ld.global.u32 %r9, [%gout]; {store_out(1)} @%lead cp.async.bulk.wait_group 0;",
            (result, result),
        )  # fmt: skip


def between_blocks() -> Iterator[Kernel]:
    """Copies, stores and reductions into shared memory of another block of the cluster."""
    near = "@%nearuser st.shared.u32 [%word], 7;"
    far = "@%faruser st.shared.u32 [%word+128], 1;"
    arrived = f"<<wait|@%near bra N; {wait('A')} N:>>"
    show = f"@%faruser ld.shared.u32 %r9, [%word+128]; {store_out(0, who='%faruser')} {SYNC}"
    due = f"<<expect!DeadlockError|and.pred %p1, %second, %lead; {expect(128, '%p1')}>>"
    tail = "shared::cluster.shared::cta.mbarrier::complete_tx::bytes"
    for name, copy, result in (
        ("copy to a block", f"cp.async.bulk.{tail}", 7),
        ("reduction to a block", f"cp.reduce.async.bulk.{tail}.add.u32", 8),
    ):
        issue, place = f"@%nearlead {copy} [%r10], [%s], 128, [%farm];", "add.u32 %r10, %far, 128;"
        full = far + "fence.proxy.async.shared::cta;" + SYNC
        yield Kernel(
            name,
            "reads",
            f"{place} {full} {near} {FENCE} {READY} {due} {issue} {arrived} <<release|{SYNC}>> @%nearuser st.shared.u32 [%word], 8; {SYNC}",
            cluster=2,
        )
        ready = f"{near} fence.proxy.async.shared::cta; {BAR} {place} {far}"
        yield Kernel(
            name, "writes", f"{ready} {FENCE} <<barrier|{SYNC}>> {due} {issue} {arrived} {show}", (result,), cluster=2
        )
    tail = "shared::cluster.mbarrier::complete_tx::bytes"
    for name, store, result in (
        ("st.async", f"st.async.{tail}.u32", 7),
        ("red.async", f"red.async.relaxed.cluster.{tail}.add.u32", 8),
    ):
        issue = f"and.pred %p1, %near, %first; @%p1 {store} [%farword+128], %r7, [%farm];"
        yield Kernel(name, "writes", f"{far} <<barrier|{SYNC}>> {due} {issue} {arrived} {show}", (result,), cluster=2)
    # st.async writes through the generic proxy: what overwrites it asynchronously needs a fence.
    first = f"and.pred %p1, %second, %lead; {expect(128, '%p1')} and.pred %p1, %near, %first; @%p1 st.async.{tail}.u32 [%farword], %r7, [%farm]; @%near bra N;"
    load = "@%lead cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%s], [%in], 128, [%m];"
    after = f"<<wait!RaceError/SyncError/DeadlockError|{wait('A')}>> {FENCE} {BAR} {expect(128)} {load} {wait('B', 1)} @%user ld.shared.u32 %r9, [%word]; {store_out(0)} N: {SYNC}"
    yield Kernel("st.async, then bulk load", "writes", f"{first} {after}", (3,), cluster=2)


def small_copies() -> Iterator[Kernel]:
    """cp.async, waited for by groups, by wait_all and by an mbarrier."""
    copy = "@%first cp.async.ca.shared.global [%word], [%gin], 4;"
    for name, finish, count in (
        (
            "cp.async",
            f"<<commit|@%first cp.async.commit_group;>> <<wait|@%first cp.async.wait_group 0;|one group stays|@%first cp.async.wait_group 1;>> {RELEASE}",
            1,
        ),
        ("cp.async, wait_all", f"<<wait|@%first cp.async.wait_all;>> {RELEASE}", 1),
        (
            "cp.async, mbarrier",
            f"<<arrive!DeadlockError|@%first cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%m];>> <<wait|{wait('A')}>>",
            32,
        ),
    ):
        yield Kernel(
            name,
            "reads",
            f"@%user st.global.u32 [%gin], 7; {READY} {copy} {finish} @%user st.global.u32 [%gin], 8;",
            count=count,
        )
        yield Kernel(
            name,
            "writes",
            f"@%user st.shared.u32 [%word], 1; {READY} {copy} {finish} @%user ld.shared.u32 %r9, [%word]; {store_out(0)}",
            (3,),
            count=count,
        )
    # The copy writes through the generic proxy: what reads it asynchronously needs a fence.
    store = STORES["bulk store"][0]
    yield Kernel(
        "cp.async, then bulk store",
        "writes",
        f"{copy} <<wait|@%first cp.async.wait_all;>> {FENCE} {FILLED_FIRST} @%ulead {store} @%ulead {FLUSH.replace('; ', '; @%ulead ')}",
        (3,),
    )


def fill(chunks: int) -> str:
    """Return stores of bf16 ones by the user's warp: ``chunks`` times 512 bytes."""
    code = "mov.u32 %r11, 0x3F803F80; mad.lo.u32 %r12, %lane, 16, %s;"
    return code + "".join(
        f"@%user st.shared.v4.u32 [%r12+{512 * i}], {{%r11, %r11, %r11, %r11}};" for i in range(chunks)
    )


def products() -> Iterator[Kernel]:
    """wgmma of ones: A has 64 rows at s, B eight at s + 2048, K = 16."""
    descriptors = f"shr.u32 %r13, %s, 4; cvt.u64.u32 %rd1, %r13; add.u64 %rd1, %rd1, {8 << 16 | 16 << 32}; add.u64 %rd2, %rd1, 128; mov.f32 %f0, 0f3F800000; mov.f32 %f1, %f0; mov.f32 %f2, %f0; mov.f32 %f3, %f0; mov.u32 %r14, %r11; mov.u32 %r15, %r11; mov.u32 %r16, %r11; mov.u32 %r17, %r11;"
    groups = "{commit} {wait} U:"
    for name, a in (("wgmma", "%rd1"), ("wgmma, A in registers", "{%r14, %r15, %r16, %r17}")):
        form = (
            "wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {%f0, %f1, %f2, %f3}, "
            + a
            + ", %rd2, %yes, 1, 1"
            + (", 0, 0;" if a == "%rd1" else ", 0;")
        )
        start = f"{fill(5)} {descriptors} {FENCE} {READY} @!%group bra U; <<wgmma.fence!SyncError|wgmma.fence.sync.aligned;>> {form}"
        reads = groups.replace("{commit}", "<<commit|wgmma.commit_group.sync.aligned;>>").replace(
            "{wait}",
            "<<wait|wgmma.wait_group.sync.aligned 0;|one group stays|wgmma.wait_group.sync.aligned 1;>>",
        )
        yield Kernel(name, "reads", f"{start} {reads} {RELEASE} @%user st.shared.u32 [%word+2048], 8;", threads=160)
        writes = groups.replace("{commit}", "<<commit!PoisonError|wgmma.commit_group.sync.aligned;>>").replace(
            "{wait}",
            "<<wait!PoisonError|wgmma.wait_group.sync.aligned 0;|one group stays|wgmma.wait_group.sync.aligned 1;>> mov.b32 %r9, %f2; @%first st.global.u32 [%gout], %r9;",
        )
        yield Kernel(name, "writes", f"{start} {writes}", (0x41880000,), threads=160)  # 1 + 16 ones


def registers(count: int) -> str:
    """Return a vector of the registers that hold 1.0."""
    return "{" + ", ".join(f"%r{20 + i}" for i in range(count)) + "}"


def cells_in(column: int, count: int) -> str:
    """Return a store of registers to a warp's lanes of tensor memory."""
    return f"tcgen05.st.sync.aligned.32x32b.x{count}.b32 [%r6+{column}], {registers(count)};"


def cells_out(column: int, count: int) -> str:
    """Return a load of a warp's lanes of tensor memory."""
    return f"tcgen05.ld.sync.aligned.32x32b.x{count}.b32 {registers(count)}, [%r6+{column}];"


def mma(a: str, accumulate: bool) -> str:
    """Return a tcgen05.mma of the first thread into the columns from 0 on."""
    return f"@%lead tcgen05.mma.cta_group::1.kind::f16 [%r5], {a}, %rd2, %r18, {'%yes' if accumulate else '%no'};"


BEFORE, AFTER = "tcgen05.fence::before_thread_sync;", "tcgen05.fence::after_thread_sync;"
WAIT_ST = "tcgen05.wait::st.sync.aligned;"
GROUP = "@!%group bra U;"
PUBLISH = f"<<wait::st|{WAIT_ST}>> <<before|{BEFORE}>> U: <<barrier|{BAR}>> <<after|{AFTER}>>"
PUBLISHED = f"{WAIT_ST} {BEFORE} U: {BAR} {AFTER}"
COMMITTED = "@%lead tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [%m];"
DONE = f"<<commit!DeadlockError|{COMMITTED}>> <<wait|{wait('W')}>>"
SEEN = f"{DONE} <<after the wait|{AFTER}>>"
SHOW = (
    "<<wait::ld!PoisonError|tcgen05.wait::ld.sync.aligned;>> setp.eq.u32 %p1, %w, 1; @%p1 st.global.u32 [%gout], %r20;"
)
FILLED = f"{fill(9)} fence.proxy.async.shared::cta; {BAR}"
OPERAND = cells_in(32, 8)
ONE = 0x3F800000
SETUP = (
    "mov.u32 %r4, slot; @%first tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r4], 64; @%first tcgen05.relinquish_alloc_permit.cta_group::1.sync.aligned;"
    f"{BEFORE} {BAR} {AFTER} ld.shared.u32 %r5, [%r4]; shl.b32 %r6, %w, 21; add.u32 %r6, %r6, %r5; add.u32 %r19, %r5, 32; mov.u32 %r18, {idesc('bf16', 'bf16', 'f32', 128, 16):#x};"
    f"shr.u32 %r13, %s, 4; cvt.u64.u32 %rd1, %r13; add.u64 %rd1, %rd1, {8 << 16 | 16 << 32 | 1 << 46}; add.u64 %rd2, %rd1, 256;"
    + "".join(f"mov.u32 %r{20 + i}, {ONE:#x};" for i in range(16))
)
END = f"{BEFORE} {BAR} {AFTER} @%first tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r5, 64;"


def tensor(operation: str, side: str, code: str, out: tuple[int, ...] = ()) -> Kernel:
    """Return a kernel with tensor memory: D in its first 16 columns; A, or what is copied and shifted, at column 32."""
    return Kernel(operation, side, f"{SETUP} {code} {END}", out, threads=160)


def tensor_cores() -> Iterator[Kernel]:
    """tcgen05.mma, cp and shift; A of 128 rows at s and B of 16 rows at s + 4096 are ones, K = 16."""
    ready = f"{fill(9)} {FENCE} {READY}"
    overwrite, rewrite = "@%user st.shared.u32 [%word], 0;", f"@!%group bra V; {OPERAND} {WAIT_ST} V:"
    copy, shift = (
        "@%lead tcgen05.cp.cta_group::1.128x256b [%r19], %rd1;",
        "add.u32 %r19, %r19, 0x200000; @%lead tcgen05.shift.cta_group::1.down [%r19];",
    )
    show_d, show_a = (f"@!%group bra V; {cells_out(*where)} {SHOW} V:" for where in ((0, 16), (32, 8)))
    start_d, start_a = (f"{FILLED} {GROUP} {cells} {PUBLISH}" for cells in (cells_in(0, 16), OPERAND))
    yield tensor("tcgen05.mma", "reads", f"{ready} {mma('%rd1', False)} {DONE} {overwrite}")
    yield tensor("tcgen05.mma", "writes", f"{start_d} {mma('%rd1', True)} {SEEN} {show_d}", (0x41880000,))
    yield tensor("tcgen05.mma, A in tensor memory", "reads", f"{start_a} {mma('[%r19]', False)} {SEEN} {rewrite}")
    yield tensor("tcgen05.cp", "reads", f"{ready} {copy} {DONE} {overwrite}")
    yield tensor("tcgen05.cp", "writes", f"{start_a} {copy} {SEEN} {show_a}", (0x3F803F80,))
    yield tensor("tcgen05.shift", "reads", f"{start_a} {shift} {SEEN} {rewrite}")
    yield tensor("tcgen05.shift", "writes", f"{start_a} {shift} {SEEN} {show_a}", (ONE,))


def tensor_loads_and_stores() -> Iterator[Kernel]:
    """tcgen05.ld and st, ordered with the tensor core's operations and with one another."""
    d, load = cells_in(0, 16), cells_out(0, 16)
    loaded = f"@!%group bra V; {load} <<wait::ld|tcgen05.wait::ld.sync.aligned;>>"
    published = f"<<before|{BEFORE}>> V: <<barrier|{BAR}>> <<after|{AFTER}>>"
    finished = COMMITTED + wait("W")
    yield tensor(
        "tcgen05.ld", "reads", f"{FILLED} {GROUP} {d} {PUBLISHED} {loaded} {published} {mma('%rd1', False)} {finished}"
    )
    yield tensor(
        "tcgen05.ld, then st",
        "reads",
        f"{GROUP} {d} {PUBLISHED} {loaded} {d} {WAIT_ST} tcgen05.wait::ld.sync.aligned; V:",
    )
    yield tensor("tcgen05.ld", "writes", f"{GROUP} {d} {PUBLISHED} @!%group bra V; {load} {SHOW} V:", (ONE,))
    yield tensor("tcgen05.st, then ld", "writes", f"{GROUP} {d} <<wait::st|{WAIT_ST}>> {load} {SHOW} U:", (ONE,))
    yield tensor("tcgen05.st", "writes", f"{FILLED} {GROUP} {d} {PUBLISH} {mma('%rd1', True)} {finished}")


def cancels() -> Iterator[Kernel]:
    """clusterlaunchcontrol.try_cancel: the first block takes the place of the second, then there is none left."""
    cancel = "@%lead clusterlaunchcontrol.try_cancel.async.shared::cta.mbarrier::complete_tx::bytes.b128 [%s], [%m];"
    read = "@%user ld.shared.v4.u32 {{%r9, %r10, %r11, %r12}}, [%s]; {a} {b}"
    first = read.format(a=store_out(0), b=store_out(1, "%r12"))
    yield Kernel(
        "try_cancel", "writes",
        f"@%user st.shared.u32 [%word], 1; {FENCE} {READY} <<expect!DeadlockError|{expect(16)}>> {cancel} <<wait|{wait('A')}>> {first} {NEXT} {expect(16)} {cancel} <<second wait|{wait('B', 1)}>> {read.format(a='', b=store_out(2, '%r12'))}",
        (1, 1, 0), grid=2,
    )  # fmt: skip


KERNELS = [
    *loads(),
    *stores(),
    *between_blocks(),
    *small_copies(),
    *products(),
    *tensor_cores(),
    *tensor_loads_and_stores(),
    *cancels(),
]
