# ruff: noqa: E501 (lines of PTX are kept whole)
"""Golden cases of asynchronous copies, clusters and mbarriers: PTX written out for a list of forms, with fresh data."""

from __future__ import annotations

from collections.abc import Iterator

import ml_dtypes
import numpy as np

from simtest.branches import SOURCE
from simtest.golden.case import Case, Map
from simtest.golden.matrices import entry

SIZE = 16384
SETUP = (
    f".shared .align 1024 .b8 s[{SIZE}]; .shared .align 8 .b8 m[8]; mov.u32 %r1, %tid.x; mov.u32 %r2, s; mov.u32 %r3, m;"
    "setp.eq.u32 %p1, %r1, 0; @%p1 mbarrier.init.shared::cta.b64 [%r3], 1; @%p1 fence.mbarrier_init.release.cluster;"
)
WAIT = "W{n}: mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 %p2, [%r3], {n}; @!%p2 bra W{n};"


def loop(label: str, size: int, body: str) -> str:
    """Return a loop of a warp over ``size`` bytes of shared memory: %r5 is the byte offset, %r6 the shared address."""
    return (
        f"shl.b32 %r5, %r1, 4; {label}: add.u32 %r6, %r2, %r5; cvt.u64.u32 %d8, %r5; {body} add.u32 %r5, %r5, 512;"
        f"setp.lt.u32 %p3, %r5, {size}; @%p3 bra {label};"
    )


def spoil(size: int) -> str:
    """Return code that fills shared memory with a pattern, so that bytes that a copy leaves alone show."""
    return loop("F", size, "st.shared.v4.u32 [%r6], {0xA5A5A5A5, 0xA5A5A5A5, 0xA5A5A5A5, 0xA5A5A5A5};")


def fetch(size: int, param: str = "image") -> str:
    """Return code that copies an array to shared memory."""
    move = "add.u64 %d8, %d8, %d7; ld.global.v4.u32 {%r10, %r11, %r12, %r13}, [%d8]; st.shared.v4.u32 [%r6], {%r10, %r11, %r12, %r13};"
    return f"ld.param.u64 %d7, [{param}];" + loop("G", size, move)


def dump(size: int) -> str:
    """Return code that copies shared memory to the array ``out``."""
    move = "add.u64 %d8, %d8, %d9; ld.shared.v4.u32 {%r10, %r11, %r12, %r13}, [%r6]; st.global.v4.u32 [%d8], {%r10, %r11, %r12, %r13};"
    return "ld.param.u64 %d9, [out];" + loop("D", size, move)


READY = "fence.proxy.async; bar.warp.sync -1;"
FLUSH = "cp.async.bulk.commit_group; cp.async.bulk.wait_group 0;"
EXPECT = "@%p1 mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r3], {0};"

# ---- tensor maps ---------------------------------------------------------------------------------------------------
ITEMS = {
    0: "u1",
    1: "u2",
    2: "u4",
    3: "i4",
    4: "u8",
    5: "i8",
    6: "f2",
    7: "f4",
    8: "f8",
    9: "u2",
    10: "f4",
    11: "f4",
    12: "f4",
}
#: Element type, extents, box, corner, swizzle, element strides, NaN fill.
TILES = [
    (1, [40], [16], [5], 0, None, 0), (1, [40], [32], [30], 0, None, 0), (9, [40], [32], [-9], 0, None, 1),
    (6, [40, 9], [16, 4], [-8, 3], 1, None, 0), (6, [64, 20], [32, 8], [32, 15], 2, None, 1),
    (9, [72, 20], [64, 8], [8, -3], 3, None, 1), (6, [16, 5, 4], [8, 3, 2], [8, 4, -1], 0, None, 0),
    (9, [64, 4, 3, 2], [64, 2, 3, 1], [0, 3, 0, 1], 3, None, 0), (6, [16, 3, 3, 2, 2], [16, 2, 2, 2, 1], [0, 1, 2, 0, 1], 1, None, 0),
    (0, [128, 12], [128, 9], [-16, 2], 3, None, 0), (0, [64, 6], [32, 5], [48, 0], 1, None, 0), (2, [32, 10], [16, 6], [20, 6], 2, None, 0),
    (7, [32, 10], [32, 6], [4, -2], 3, None, 1), (8, [16, 10], [8, 6], [12, 6], 2, None, 1), (4, [16, 4], [16, 3], [-3, 2], 3, None, 0),
    (9, [64, 20], [64, 16], [0, 1], 3, [1, 2], 0), (9, [64, 12, 6], [32, 9, 5], [16, -2, 1], 0, [1, 3, 2], 0),
    (10, [32, 10], [32, 8], [0, 0], 3, None, 0), (11, [32, 10], [32, 8], [0, 3], 3, None, 0), (12, [32, 10], [32, 8], [0, 0], 0, None, 1),
]  # fmt: skip
STORES = [(dtype, *rest) for dtype, *rest in TILES if dtype < 10 and rest[4] is None]
REDUCTIONS = [
    *((op, dtype) for op in ("add", "min", "max") for dtype in (2, 3, 4, 6, 9)), ("add", 7), ("min", 5), ("max", 5), ("inc", 2), ("dec", 2),
    *((op, dtype) for op in ("and", "or", "xor") for dtype in (2, 4)),
]  # fmt: skip


def values(rng: np.random.Generator, dtype: int, shape: list[int]) -> np.ndarray:
    """Return a tensor of random bits, or of random numbers for floats (with subnormals and infinities)."""
    code = np.dtype(ITEMS[dtype])
    if code.kind == "f" or dtype == 9:
        numbers = rng.standard_normal(shape) * np.exp2(rng.integers(-8, 8, shape))
        numbers.reshape(-1)[::7] *= 2.0**-12 if code.itemsize == 2 and dtype == 6 else 2.0**-130
        numbers.reshape(-1)[5] = np.inf
        numbers = numbers.astype("f4" if dtype == 9 else code)
        return numbers.astype(ml_dtypes.bfloat16).view("u2") if dtype == 9 else numbers
    return rng.integers(0, 256, (*shape, code.itemsize), dtype="u1").view(code)[..., 0]


def tensor(rng: np.random.Generator, dtype: int, dims: list[int], box: list[int], swizzle: int, steps: list[int] | None,
           fill: int) -> tuple[np.ndarray, Map, int]:  # fmt: skip
    """Return a tensor with padded rows, its map, and the bytes of a tile."""
    item = np.dtype(ITEMS[dtype]).itemsize
    shape = [*reversed(dims)]
    shape[-1] = -(-shape[-1] * item // 16) * 16 // item
    array = values(rng, dtype, shape)
    strides = [array.strides[-1 - i] for i in range(1, len(dims))]
    counts = [-(-b // s) for b, s in zip(box, steps or [1] * len(box), strict=True)]
    return array, Map(0, dtype, dims, strides, box, swizzle, steps, fill), item * int(np.prod(counts))


def tiles(rng: np.random.Generator) -> Iterator[Case]:
    """Yield tile loads, stores and reductions through tensor maps."""
    for number, (dtype, dims, box, at, swizzle, steps, fill) in enumerate(TILES):
        yield load_case(
            rng, f"tile load {number} type {dtype} {len(dims)}d", dtype, dims, box, at, swizzle, steps, fill
        )
    for number, (dtype, dims, box, at, swizzle, *_) in enumerate(STORES):
        yield store_case(rng, f"tile store {number}", "", dtype, dims, box, at, swizzle)
    for number, (op, dtype) in enumerate(REDUCTIONS):
        item = np.dtype(ITEMS[dtype]).itemsize
        dims, box, at = [64 // item, 9], [64 // item, 8], [-8 // item * (number % 2), 3]
        yield store_case(rng, f"tile {op} type {dtype}", op, dtype, dims, box, at, 2)


def load_case(rng: np.random.Generator, name: str, dtype: int, dims: list[int], box: list[int], at: list[int], swizzle: int,
              steps: list[int] | None, fill: int) -> Case:  # fmt: skip
    """Return one tile load."""
    array, tmap, size = tensor(rng, dtype, dims, box, swizzle, steps, fill)
    rank, coords = len(dims), ", ".join(map(str, at))
    load = f"@%p1 cp.async.bulk.tensor.{rank}d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%r2], [%d1, {{{coords}}}], [%r3];"
    whole = -(-room(tmap, size, array.itemsize) // 512) * 512
    address = "mov.b64 %d1, tm; cvta.param.u64 %d1, %d1;"
    code = SETUP + spoil(whole) + READY + address + EXPECT.format(size) + load + WAIT.format(n=0) + dump(whole)
    text = entry(".param .align 64 .b8 tm[128], .param .u64 out", code)
    data = [array, np.zeros(whole, "u1")]
    return Case(name, text, "k", 1, 32, [tmap, ("array", 1)], data, outputs=[1])


def room(tmap: Map, size: int, item: int) -> int:
    """Return the shared bytes of a tile: rows shorter than the swizzle's span begin at multiples of the span."""
    row = item * tmap.box[0]
    return size // row * max(row, (0, 32, 64, 128)[tmap.swizzle])


def store_case(rng: np.random.Generator, name: str, reduction: str, dtype: int, dims: list[int], box: list[int], at: list[int],
               swizzle: int) -> Case:  # fmt: skip
    """Return one tile store or reduction."""
    array, tmap, size = tensor(rng, dtype, dims, box, swizzle, None, 0)
    whole = -(-room(tmap, size, array.itemsize) // 512) * 512
    image = values(rng, dtype, [whole // array.itemsize])
    coords, rank = ", ".join(map(str, at)), len(dims)
    prefix, suffix = ("cp.reduce.async", "." + reduction) if reduction else ("cp.async", "")
    store = f"{prefix}.bulk.tensor.{rank}d.global.shared::cta{suffix}.tile.bulk_group [%d1, {{{coords}}}], [%r2];"
    code = SETUP + fetch(whole) + READY + f"@!%p1 bra E; mov.b64 %d1, tm; cvta.param.u64 %d1, %d1; {store} {FLUSH} E:"
    text = entry(".param .align 64 .b8 tm[128], .param .u64 image", code)
    return Case(name, text, "k", 1, 32, [tmap, ("array", 1)], [array, image], outputs=[0])


#: Replacements by a kernel in a map of 32-bit floats of 32 x 10: fields, and the first coordinate of the tile it loads.
EDITS = {
    "address": ("global_address.shared::cta.b1024.b64 [%r15], %d2", 0),
    "extent": ("global_dim.shared::cta.b1024.b32 [%r15], 0, 5; global_dim.shared::cta.b1024.b32 [%r15], 1, 3", 0),
    "stride": ("global_stride.shared::cta.b1024.b64 [%r15], 0, 64", 0),
    "box": ("box_dim.shared::cta.b1024.b32 [%r15], 0, 8", 4),
    "step": ("element_stride.shared::cta.b1024.b32 [%r15], 1, 2", 0),
    "swizzle": ("swizzle_mode.shared::cta.b1024.b32 [%r15], 1", 0),
    "fill": ("fill_mode.shared::cta.b1024.b32 [%r15], 1", -4),
    "rank": ("rank.shared::cta.b1024.b32 [%r15], 1", 0),
    **{f"type {n}": (f"elemtype.shared::cta.b1024.b32 [%r15], {n}", 0) for n in (2, 8, 10, 11, 12)},
}  # fmt: skip


def edits(rng: np.random.Generator) -> Iterator[Case]:
    """Yield loads through a map that the kernel has edited in shared memory and published in global memory."""
    for name, (fields, x) in EDITS.items():
        size = {"box": 192, "step": 192, "type 10": 192}.get(name, 384)
        yield edit_case(rng, f"edited map: {name}", fields, x, size)


def edit_case(rng: np.random.Generator, name: str, fields: str, x: int, size: int) -> Case:
    """Return a load of ``size`` bytes through an edited map."""
    array, tmap, _ = tensor(rng, 7, [32, 10], [16, 6], 2, None, 0)
    copy = "".join(f"ld.param.b32 %r20, [tm+{4 * i}]; st.shared.b32 [%r15+{4 * i}], %r20;" for i in range(32))
    edit = "".join(f"@%p1 tensormap.replace.tile.{field.strip()};" for field in fields.split(";"))
    publish = (
        "bar.warp.sync -1; tensormap.cp_fenceproxy.global.shared::cta.tensormap::generic.release.gpu.sync.aligned [%d1], [%r15], 128;"
        "fence.proxy.tensormap::generic.acquire.gpu [%d1], 128;"
    )
    load = f"@%p1 cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%r2], [%d1, {{{x}, 2}}], [%r3];"
    start = f".shared .align 128 .b8 e[128]; mov.u32 %r15, e; ld.param.u64 %d1, [place]; ld.param.u64 %d2, [array]; add.u64 %d2, %d2, 256; @!%p1 bra J; {copy} J:"
    code = (
        SETUP + spoil(512) + READY + start + edit + publish + EXPECT.format(size) + load + WAIT.format(n=0) + dump(512)
    )
    text = entry(".param .align 64 .b8 tm[128], .param .u64 place, .param .u64 array, .param .u64 out", code)
    data = [array, np.zeros(128, "u1"), np.zeros(512, "u1")]
    return Case(name, text, "k", 1, 32, [tmap, ("array", 1), ("array", 0), ("array", 2)], data, outputs=[2])


# Open in the ISA: first coordinates that are no multiple of 16 bytes, negative ones, rows below the swizzle's span.
CORNERS = [
    (1, [40], [16], [8], 0), (1, [40], [16], [-8], 0), (1, [40, 8], [16, 4], [1, 0], 0), (7, [32, 8], [16, 4], [-1, 0], 0),
    (7, [32, 8], [32, 4], [1, 1], 3), (0, [64, 8], [32, 4], [3, 0], 0), (4, [16, 8], [8, 4], [1, 0], 0), (1, [40, 8], [16, 4], [4, 2], 0),
    (1, [40, 12], [16, 10], [8, 1], 2), (1, [40, 12], [16, 10], [8, 1], 3), (1, [40, 12], [8, 10], [8, 1], 3), (1, [24, 5, 4], [16, 4, 3], [8, 2, 0], 3),
    (0, [64, 12], [16, 9], [0, 0], 1),
]  # fmt: skip
CORNER_STORES = [
    (1, [40], [16], [8], 0), (1, [40], [16], [5], 0), (1, [40, 8], [16, 4], [1, 0], 0), (7, [32, 8], [16, 4], [1, 1], 0),
    (1, [40, 8], [16, 4], [-8, 0], 0), (1, [40, 8], [16, 4], [0, -1], 0), (1, [40, 8], [16, 4], [4, 2], 0), (4, [16, 8], [8, 4], [1, 0], 0),
    (1, [40, 12], [16, 10], [8, 1], 3), (1, [40, 12], [8, 10], [8, 1], 2), (1, [24, 5, 4], [16, 4, 3], [8, 2, 0], 3),
]  # fmt: skip


def corners(rng: np.random.Generator) -> Iterator[Case]:
    """Yield tiles at corners of the rules."""
    for number, (dtype, dims, box, at, swizzle) in enumerate(CORNERS):
        yield load_case(rng, f"corner load {number}", dtype, dims, box, at, swizzle, None, 0)
    for number, (dtype, dims, box, at, swizzle) in enumerate(CORNER_STORES):
        yield store_case(rng, f"corner store {number}", "", dtype, dims, box, at, swizzle)
    for number, at in enumerate(([1, 0], [-4, 0], [4, -1], [4, 1])):
        yield store_case(rng, f"corner add {number}", "add", 7, [32, 8], [16, 4], at, 2)
    for number, at in enumerate(([4, 1], [4, 6])):
        yield store_case(rng, f"corner min {number}", "min", 2, [32, 8], [8, 4], at, 3)
    for name, fields in (("swizzle", "swizzle_mode.shared::cta.b1024.b32 [%r15], 1; box_dim.shared::cta.b1024.b32 [%r15], 0, 8"),
                         ("step", "element_stride.shared::cta.b1024.b32 [%r15], 0, 2")):  # fmt: skip
        yield edit_case(rng, f"corner {name}", fields, 0, 192 if name == "swizzle" else 384)


# ---- linear copies -------------------------------------------------------------------------------------------------
#: Reduction and its type in global memory, then in another block's shared memory.
GLOBAL = [
    *((op, t) for op in ("add", "min", "max") for t in ("u32", "s32", "u64")), ("min", "s64"), ("max", "s64"), ("inc", "u32"), ("dec", "u32"),
    *((op, t) for op in ("and", "or", "xor") for t in ("b32", "b64")), ("add", "f32"), ("add", "f64"), ("add", "noftz.f16"),
    ("add", "noftz.bf16"), *((op, t) for op in ("min", "max") for t in ("f16", "bf16")),
]  # fmt: skip
SHARED = [("and", "b32"), ("or", "b32"), ("xor", "b32"), *((op, "u32") for op in ("add", "inc", "dec", "min", "max")),
          *((op, "s32") for op in ("add", "min", "max")), ("add", "u64")]  # fmt: skip
CODES = {"u32": 2, "s32": 3, "u64": 4, "s64": 5, "b32": 2, "b64": 4, "f16": 6, "f32": 7, "f64": 8, "bf16": 9}


def linear(rng: np.random.Generator) -> Iterator[Case]:
    """Yield bulk copies and reductions without a tensor map."""
    load = "ld.param.u64 %d1, [image]; @%p1 cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r2+48], [%d1+16], 976, [%r3];"
    code = SETUP + spoil(1024) + READY + EXPECT.format(976) + load + WAIT.format(n=0) + dump(1024)
    data = [rng.integers(0, 256, 1024).astype("u1"), np.zeros(1024, "u1")]
    text = entry(".param .u64 image, .param .u64 out", code)
    yield Case("bulk load", text, "k", 1, 32, [("array", 0), ("array", 1)], data, outputs=[1])
    for op, kind in [("", "b8"), *GLOBAL]:
        dtype = CODES.get(kind.split(".")[-1], 0)
        image, out = (values(rng, dtype, [1024 // np.dtype(ITEMS[dtype]).itemsize]) for _ in range(2))
        verb = (
            f"cp.reduce.async.bulk.global.shared::cta.bulk_group.{op}.{kind}"
            if op
            else "cp.async.bulk.global.shared::cta.bulk_group"
        )
        code = (
            SETUP
            + fetch(1024)
            + READY
            + f"@!%p1 bra E; ld.param.u64 %d1, [out]; {verb} [%d1+32], [%r2+16], 960; {FLUSH} E:"
        )
        text = entry(".param .u64 image, .param .u64 out", code)
        yield Case(f"bulk store {op} {kind}", text, "k", 1, 32, [("array", 0), ("array", 1)], [image, out], outputs=[1])


CLUSTER = "barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;"
PEER = (
    CLUSTER
    + "mov.u32 %r4, %cluster_ctarank; xor.b32 %r7, %r4, 1; mapa.shared::cluster.u32 %r8, %r2, %r7; mapa.shared::cluster.u32 %r9, %r3, %r7;"
)
OWN = "ld.param.u64 %d9, [out]; mov.u32 %r4, %cluster_ctarank; mul.wide.u32 %d10, %r4, 1024; add.u64 %d9, %d9, %d10;"


def exchange(name: str, rng: np.random.Generator, size: int, code: str) -> Case:
    """Return a case of two blocks: each fetches an image, runs the code (which sends to its peer), waits and dumps."""
    image = rng.integers(0, 1 << 32, 256, dtype="u8").astype("u4")
    image[::5] &= 7
    text = (
        SETUP + fetch(1024) + READY + EXPECT.format(size) + PEER + code + WAIT.format(n=0) + OWN
        + dump(1024).replace("ld.param.u64 %d9, [out];", "") + CLUSTER
    )  # fmt: skip
    ptx = entry(".param .u64 image, .param .u64 out", text)
    return Case(name, ptx, "k", 2, 32, [("array", 0), ("array", 1)], [image, np.zeros(512, "u4")], 0, 2, outputs=[1])


def clusters(rng: np.random.Generator) -> Iterator[Case]:
    """Yield what blocks of a cluster send to each other."""
    copy = "cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%r8], [%r6], 256, [%r9];"
    yield exchange("bulk copy to the peer", rng, 256, f"add.u32 %r6, %r2, 512; @%p1 {copy}")
    for op, kind in SHARED:
        verb = f"cp.reduce.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes.{op}.{kind}"
        yield exchange(
            f"bulk {op} {kind} to the peer", rng, 256, f"add.u32 %r6, %r2, 512; @%p1 {verb} [%r8], [%r6], 256, [%r9];"
        )
    store = "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes"
    place = (
        "mad.lo.u32 %r6, %r1, 16, %r8; mad.lo.u32 %r20, %r4, 1000, %r1; add.u32 %r21, %r20, 7; cvt.u64.u32 %d4, %r20;"
    )
    yield exchange("st.async b32", rng, 128, f"{place} {store}.b32 [%r6], %r20, [%r9];")
    yield exchange("st.async b64", rng, 256, f"{place} {store}.b64 [%r6], %d4, [%r9];")
    yield exchange("st.async v2.b32", rng, 256, f"{place} {store}.v2.b32 [%r6], {{%r20, %r21}}, [%r9];")
    yield exchange("st.async v4.b32", rng, 512, f"{place} {store}.v4.b32 [%r6], {{%r20, %r21, %r1, %r4}}, [%r9];")
    yield exchange("st.async v2.b64", rng, 512, f"{place} {store}.v2.b64 [%r6], {{%d4, %d4}}, [%r9];")
    red = "red.async.relaxed.cluster.shared::cluster.mbarrier::complete_tx::bytes"
    for kind in (
        "add.u32",
        "add.s32",
        "min.u32",
        "max.s32",
        "inc.u32",
        "dec.u32",
        "and.b32",
        "or.b32",
        "xor.b32",
        "add.u64",
    ):
        value, size = ("%d4", 256) if "64" in kind else ("%r20", 128)
        yield exchange(f"red.async {kind}", rng, size, f"{place} {red}.{kind} [%r6], {value}, [%r9];")
    same = "add.u32 %r6, %r8, 64; mad.lo.u32 %r20, %r4, 1000, %r1;"
    yield exchange("red.async of all lanes", rng, 128, f"{same} {red}.add.u32 [%r6], %r20, [%r9];")
    done = "@%p1 mbarrier.complete_tx.relaxed.cluster.shared::cta.b64 [%r3], 64;"
    remote = f"{place} st.shared::cluster.v2.u32 [%r6], {{%r20, %r21}}; atom.shared::cluster.add.u32 %r22, [%r8+1000], 3; {CLUSTER} ld.shared::cluster.u32 %r23, [%r8+1000];"
    yield exchange(
        "remote store, load, atomic",
        rng,
        64,
        f"{remote} {CLUSTER} mad.lo.u32 %r6, %r1, 4, %r2; st.shared.u32 [%r6+640], %r23; bar.warp.sync -1; {done}",
    )
    generic = "cvt.u64.u32 %d2, %r2; cvta.shared.u64 %d2, %d2; mapa.u64 %d3, %d2, %r7; getctarank.u64 %r20, %d3; getctarank.shared::cluster.u32 %r21, %r2; ld.u32 %r22, [%d3+4];"
    yield exchange(
        "generic addresses of the peer",
        rng,
        64,
        f"{generic} mad.lo.u32 %r6, %r1, 16, %r2; {CLUSTER} st.shared.v4.u32 [%r6], {{%r20, %r21, %r22, %r7}}; bar.warp.sync -1; {done}",
    )
    cast = "setp.eq.and.u32 %p4, %r4, 0, %p1; mov.u16 %h1, 3; @%p4 cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%r2+256], [%d7+512], 128, [%r3], %h1;"
    yield exchange("multicast", rng, 128, cast)


# ---- cp.async and mbarriers ----------------------------------------------------------------------------------------
def small_copies(rng: np.random.Generator) -> Iterator[Case]:
    """Yield cp.async in every size, with zero fill, and an mbarrier's tokens."""
    address = "ld.param.u64 %d1, [image]; mad.wide.u32 %d2, %r1, 16, %d1; mad.lo.u32 %r4, %r1, 16, %r2; and.b32 %r7, %r1, 15; setp.lt.u32 %p4, %r7, 6;"
    forms = ["cp.async.ca.shared.global [%r4], [%d2], 4;", "cp.async.ca.shared.global [%r4], [%d2], 8;", "cp.async.cg.shared.global [%r4], [%d2], 16;",
             "cp.async.ca.shared.global [%r4], [%d2], 16, %r7;", "cp.async.cg.shared.global [%r4], [%d2], 16, %p4;",
             "min.u32 %r7, %r7, 4; cp.async.ca.shared.global.L2::128B [%r4], [%d2], 4, %r7;"]  # fmt: skip
    for number, form in enumerate(forms):
        finish = "cp.async.commit_group; cp.async.wait_group 0; bar.warp.sync -1;"
        if number % 2:
            finish = "cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%r3];" + WAIT.format(n=0)
        code = (
            SETUP.replace("[%r3], 1;", "[%r3], 32;")
            + spoil(512)
            + "bar.warp.sync -1;"
            + address
            + form
            + finish
            + dump(512)
        )
        data = [rng.integers(0, 256, 1024).astype("u1"), np.zeros(512, "u1")]
        text = entry(".param .u64 image, .param .u64 out", code)
        yield Case(f"cp.async {number}", text, "k", 1, 32, [("array", 0), ("array", 1)], data, outputs=[1])
    steps = (
        "mbarrier.arrive.shared::cta.b64 %d1, [%r3]; mbarrier.pending_count.b64 %r10, %d1;"
        "mbarrier.arrive.noComplete.shared.b64 %d2, [%r3], 2; mbarrier.pending_count.b64 %r11, %d2;"
        "mbarrier.test_wait.shared.b64 %p2, [%r3], %d1; selp.b32 %r12, 1, 2, %p2; mbarrier.test_wait.parity.shared.b64 %p2, [%r3], 1; selp.b32 %r13, 1, 2, %p2;"
        "mbarrier.arrive.expect_tx.shared::cta.b64 %d3, [%r3], 64; mbarrier.pending_count.b64 %r14, %d3; mbarrier.test_wait.parity.shared.b64 %p2, [%r3], 0; selp.b32 %r15, 1, 2, %p2;"
        "mbarrier.complete_tx.relaxed.cta.shared::cta.b64 [%r3], 64; mbarrier.test_wait.parity.shared.b64 %p2, [%r3], 0; selp.b32 %r16, 1, 2, %p2;"
        "mbarrier.arrive_drop.shared.b64 %d4, [%r3]; mbarrier.pending_count.b64 %r17, %d4; mbarrier.arrive.shared.b64 %d5, [%r3], 3; mbarrier.pending_count.b64 %r18, %d5;"
        "mbarrier.arrive.shared.b64 %d6, [%r3]; mbarrier.pending_count.b64 %r19, %d6; mbarrier.test_wait.shared.b64 %p2, [%r3], %d5; selp.b32 %r20, 1, 2, %p2;"
        "mbarrier.inval.shared.b64 [%r3];"
    )
    stores = "ld.param.u64 %d9, [out];" + "".join(f"st.global.u32 [%d9+{4 * i}], %r{10 + i};" for i in range(11))
    code = SETUP.replace("[%r3], 1;", "[%r3], 4;") + "@!%p1 bra E;" + steps + stores + "E:"
    yield Case(
        "mbarrier tokens", entry(".param .u64 out", code), "k", 1, 32, [("array", 0)], [np.zeros(11, "u4")], outputs=[0]
    )


def divergence() -> Iterator[Case]:
    """Yield the branching kernels of the tests, and atomics that collide."""
    x = np.random.default_rng(0).integers(0, 40, 64).astype("i4")
    for name in ("loops", "choose"):
        yield Case(
            f"branches {name}", SOURCE, name, 1, 64, [("array", 0), ("array", 1)], [x, np.zeros(64, "i4")], outputs=[1]
        )
    for name, threads in (("calls", 64), ("partial", 32), ("count", 96), ("ping_pong", 32)):
        yield Case(f"branches {name}", SOURCE, name, 1, threads, [("array", 0)], [np.zeros(threads, "i4")], outputs=[0])


def cases() -> Iterator[Case]:
    """Yield the cases of copies and clusters."""
    rng = np.random.default_rng(6)
    yield from tiles(rng)
    yield from linear(rng)
    yield from clusters(rng)
    yield from small_copies(rng)
    yield from edits(rng)
    yield from divergence()
    yield from corners(np.random.default_rng(7))
