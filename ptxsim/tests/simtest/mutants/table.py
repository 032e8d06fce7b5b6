# ruff: noqa: E501
"""Bugs planted in the test kernels: each is one replacement in a kernel's source."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Mutant:
    """A bug: ``old`` is replaced by ``new`` (the n-th occurrence) in a kernel's source.

    ``frozen`` tells which version of the detector was finished before the bug was written: 0 none, 1 the first one, 2 the
    one with global memory, fences and scopes.
    """

    kernel: str
    name: str
    old: str
    new: str
    nth: int = 0
    frozen: int = 0

    def apply(self, source: str) -> str:
        """Return the mutated source."""
        parts = source.split(self.old)
        if len(parts) < self.nth + 2:
            raise ValueError(f"mutant {self.name!r} does not apply")
        return self.old.join(parts[: self.nth + 1]) + self.new + self.old.join(parts[self.nth + 1 :])


G, C, R, B, X = "hopper_gemm", "cluster_exchange", "cp_async_ring", "blackwell_gemm", "global_exchange"
_AFTER = 'asm volatile("tcgen05.fence::after_thread_sync;" ::: "memory");\n'
_BEFORE = 'asm volatile("tcgen05.fence::before_thread_sync;" ::: "memory");\n'
_WAIT_LD = 'asm volatile("tcgen05.wait::ld.sync.aligned;" ::: "memory");\n'

MUTANTS = [
    Mutant(G, "no proxy fence before the TMA store", "    fence_async();\n", ""),
    Mutant(G, "no barrier before the TMA store", "    bar_sync(1, 128);\n", "    __syncwarp();\n"),
    Mutant(G, "no fence after mbarrier init", "        fence_mbar_init();\n", ""),
    Mutant(G, "no __syncthreads after mbarrier init", "    __syncthreads();\n", ""),
    Mutant(G, "consumer does not wait for the data", "        mbar_wait(full + 8 * s, round & 1);\n", ""),
    Mutant(G, "producer does not wait for the stage", "mbar_wait(empty + 8 * s, (round & 1) ^ 1);", ""),
    Mutant(G, "producer's parity flipped", "(round & 1) ^ 1", "(round & 1)"),
    Mutant(G, "consumer's parity flipped", "mbar_wait(full + 8 * s, round & 1)", "mbar_wait(full + 8 * s, ~round & 1)"),
    Mutant(G, "consumer's parity never flips", "mbar_wait(full + 8 * s, round & 1)", "mbar_wait(full + 8 * s, 0)"),
    Mutant(G, "arrival count half as large", "mbar_init(empty + 8 * s, 4)", "mbar_init(empty + 8 * s, 2)"),
    Mutant(G, "arrival count one too large", "mbar_init(empty + 8 * s, 4)", "mbar_init(empty + 8 * s, 5)"),
    Mutant(G, "expects half the bytes", "2 * kTile);", "kTile);"),
    Mutant(G, "no wgmma wait", "        wgmma_wait<0>();\n", ""),
    Mutant(G, "stage released before the wait", "        wgmma_wait<0>();\n        if (threadIdx.x % 32 == 0)\n            mbar_arrive(empty + 8 * s);\n",
           "        if (threadIdx.x % 32 == 0)\n            mbar_arrive(empty + 8 * s);\n        wgmma_wait<0>();\n"),
    Mutant(G, "one group may stay in flight", "wgmma_wait<0>", "wgmma_wait<1>"),
    Mutant(G, "no wgmma fence", "        wgmma_fence();\n", ""),
    Mutant(G, "no commit", "        wgmma_commit();\n", ""),
    Mutant(G, "LBO and SBO swapped", "16, 1024)", "1024, 16)"),
    Mutant(G, "wrong k step", "s * kTile + k * 32", "s * kTile + k * 64", 1),
    Mutant(G, "store not waited for", "        bulk_wait();\n", ""),
    Mutant(C, "no cluster barrier after init", "    cluster_sync();\n", "", 0),
    Mutant(C, "mail not waited for", "        mbar_wait_cluster(mail, i & 1);\n", ""),
    Mutant(C, "remote arrival goes to the own block", "mbar_arrive_remote(mapa(empty, 0))", "mbar_arrive_remote(mapa(empty, rank))"),
    Mutant(C, "expected mail bytes wrong", "mbar_expect(mail, 256)", "mbar_expect(mail, 128)"),
    Mutant(C, "multicast mask misses a block", "i * 64, 3)", "i * 64, 1)"),
    Mutant(C, "block exits before its peer is done", "    cluster_sync();\n}", "}"),
    Mutant(R, "ring slot not waited for", "                bar_sync(1 + s, 64);\n", "                __syncwarp();\n"),
    Mutant(R, "consumer does not wait", "            mbar_wait(smem_u32(&full[s]), (t >> 1) & 1);\n", ""),
    Mutant(R, "noinc dropped", "arrive.noinc", "arrive"),
    Mutant(R, "page out of bounds", "(t * 8 + r) * 128", "(t * 8 + r + 1) * 128"),
    Mutant(B, "accumulator read before the commit", "        mbar_wait(done, 0);\n", ""),
    Mutant(B, "no after_thread_sync before the loads", _AFTER, "", 2),
    Mutant(B, "loaded registers used before wait::ld", _WAIT_LD, ""),
    Mutant(B, "no before_thread_sync after the loads", _BEFORE, "", 1),
    Mutant(B, "TMEM quadrant wrong", "(warp << 21)", "((warp ^ 1) << 21)"),
    Mutant(B, "all warps read quadrant 0", "(warp << 21)", "0"),
    Mutant(B, "first MMA accumulates on undefined cells", "i + k > 0", "1"),
    Mutant(B, "every MMA overwrites", "i + k > 0", "0"),
    Mutant(B, "stage never committed", "                commit(empty + 8 * s);\n", ""),
    Mutant(B, "stage committed before its MMAs", "                for (int k = 0; k < 4; k++)\n", "                commit(empty + 8 * s);\n                for (int k = 0; k < 4; k++)\n"),
    Mutant(B, "tensor memory not freed", '        asm volatile("tcgen05.dealloc"', '        if (0) asm volatile("tcgen05.dealloc"'),
    Mutant(B, "descriptor version bits missing", "| (1ull << 46)", ""),
    Mutant(B, "64-byte swizzle code", "(2ull << 61)", "(4ull << 61)"),
    Mutant(B, "all lanes issue the MMA", "rank == 0 && elect()", "rank == 0"),
    Mutant(B, "instruction descriptor of half N", "((N >> 3) << 17)", "((N >> 4) << 17)"),
    Mutant(B, "no barrier after the allocation", "        __syncthreads();\n", "        __syncwarp();\n", 0),
    Mutant(R, "barrier count wrong", "bar_arrive(1 + s, 64)", "bar_arrive(1 + s, 32)"),
    # Written after the detector was frozen.
    Mutant(G, "epilogue starts before the last wait", "        wgmma_wait<0>();\n", "        if (i + 1 < k_tiles) wgmma_wait<0>();\n", 0, 1),
    Mutant(G, "empty barrier armed for one block of warps only", "if (threadIdx.x % 32 == 0)\n            mbar_arrive(empty", "if (threadIdx.x == 0)\n            mbar_arrive(empty", 0, 1),
    Mutant(G, "producer's phase taken from the wrong stage count", "round = i / kStages;\n                mbar_wait", "round = i / (kStages - 1);\n                mbar_wait", 0, 1),
    Mutant(G, "both tiles on neighbouring barriers", "tma_load(sB + s * kTile, &map_b, full + 8 * s,", "tma_load(sB + s * kTile, &map_b, full + 8 * ((s + 1) % kStages),", 0, 1),
    Mutant(G, "tile B lands on tile A's next stage", "tma_load(sB + s * kTile", "tma_load(sA + (s + 1) * kTile", 0, 1),
    Mutant(G, "swizzle of the output forgotten", "(col ^ ((row & 7) << 4))", "col", 0, 1),
    Mutant(G, "output barrier counts one warp less", "bar_sync(1, 128)", "bar_sync(1, 96)", 0, 1),
    Mutant(G, "proxy fence by one thread only", "    fence_async();\n", "    if (threadIdx.x == 0) fence_async();\n", 0, 1),
    Mutant(C, "empty barrier not waited for", "                mbar_wait_cluster(empty, (i & 1) ^ 1);\n", "", 0, 1),
    Mutant(C, "full parity stuck", "mbar_wait(full, i & 1)", "mbar_wait(full, 0)", 0, 1),
    Mutant(C, "empty counts only the own block", "mbar_init(empty, 4)", "mbar_init(empty, 2)", 0, 1),
    Mutant(C, "mail goes to the own box", "mapa(base + 8192 + row * 4, rank ^ 1)", "base + 8192 + row * 4", 0, 1),
    Mutant(C, "buffer released before it is read", "        mbar_wait(full, i & 1);\n", "        mbar_wait(full, i & 1);\n        if (threadIdx.x % 32 == 0) mbar_arrive_remote(mapa(empty, 0));\n", 0, 1),
    Mutant(R, "ring barrier of the other stage", "bar_sync(1 + s, 64)", "bar_sync(2 - s, 64)", 0, 1),
    Mutant(R, "data released before it is read", "            for (int r = 0; r < 8; r++) {\n", "            if (t + 2 < tiles) bar_arrive(1 + s, 64);\n            for (int r = 0; r < 8; r++) {\n", 0, 1),
    Mutant(R, "full barrier expects half a warp", "mbar_init(smem_u32(&full[0]), 32)", "mbar_init(smem_u32(&full[0]), 16)", 0, 1),
    Mutant(R, "no barrier after init", "    __syncthreads();\n", "", 0, 1),
    Mutant(B, "done committed once per tile", "                commit(empty + 8 * s);\n", "                commit(empty + 8 * s);\n                commit(done);\n", 0, 1),
    Mutant(B, "producer does not wait for the stage", "mbar_wait(empty + 8 * s, ((i / kStages) & 1) ^ 1);", "", 0, 1),
    Mutant(B, "MMA does not wait for the data", "                mbar_wait(full + 8 * s, (i / kStages) & 1);\n", "", 0, 1),
    Mutant(B, "columns beyond the allocation", "(warp << 21) + c)", "(warp << 21) + c + 32)", 0, 1),
    Mutant(B, "dealloc races with the loads", "        __syncthreads();\n    asm volatile(\"tcgen05.fence::after_thread_sync;\" ::: \"memory\");\n    if (warp == 5)", "        __syncwarp();\n    asm volatile(\"tcgen05.fence::after_thread_sync;\" ::: \"memory\");\n    if (warp == 5)", 0, 1),
    Mutant(B, "K-major stride of a Hopper panel pair", "smem_desc(addr + step * 32, 16, 1024)", "smem_desc(addr + step * 32, 16, 2048)", 0, 1),
    Mutant(B, "instruction descriptor says f16", "(1u << 7)", "(0u << 7)", 0, 1),
    Mutant(B, "M of the descriptor halved", "((M >> 4) << 24)", "((M >> 5) << 24)", 0, 1),
    # Written after global memory, fences and scopes were checked.
    Mutant(X, "no fence before the counter", "        __threadfence();\n        is_last", "        is_last", 0, 2),
    Mutant(X, "no fence after the counter", "blocks - 1;\n        __threadfence();\n", "blocks - 1;\n", 0, 2),
    Mutant(X, "fences of the block only", "__threadfence();", "__threadfence_block();", 0, 2),
    Mutant(X, "fence after the counter of the block only", "blocks - 1;\n        __threadfence();\n", "blocks - 1;\n        __threadfence_block();\n", 0, 2),
    Mutant(X, "no barrier after the counter", "        __threadfence();\n    }\n    __syncthreads();\n", "        __threadfence();\n    }\n    __syncwarp();\n", 0, 2),
    Mutant(X, "last block is one too early", "== blocks - 1;", "== blocks - 2;", 0, 2),
    Mutant(X, "counter not reset", "            *counter = 0;\n", "            ;\n", 0, 2),
    Mutant(X, "counter is not atomic", "atomicAdd(counter, 1) ==", "(*counter)++ ==", 0, 2),
    Mutant(X, "counter of the block's scope", "atomicAdd(counter, 1)", "atomicAdd_block(counter, 1)", 0, 2),
    Mutant(X, "sums not waited for", "        bulk_wait();\n", "", 0, 2),
    Mutant(X, "sums waited for as reads only", "        bulk_wait();\n", "        bulk_wait_read();\n", 0, 2),
    Mutant(X, "store not committed", "        bulk_commit();\n", "", 0, 2),
    Mutant(X, "no proxy fence before the store", "    fence_async();\n", "", 0, 2),
    Mutant(X, "proxy fence of one thread", "    fence_async();\n", "    if (t == 0)\n        fence_async();\n", 0, 2),
    Mutant(X, "parts overlap", "parts + block * 64", "parts + block * 60", 0, 2),
    Mutant(X, "one cp.async group stays in flight", "wait_group 0;\" ::: \"memory\"); }\nDI int", "wait_group 1;\" ::: \"memory\"); }\nDI int", 0, 2),
    Mutant(X, "copies waited for by few threads", "    cp_wait();\n", "    if (t < 16)\n        cp_wait();\n", 0, 2),
    Mutant(X, "second group not committed", "weights + t * 4);\n        cp_commit();\n", "weights + t * 4);\n", 0, 2),
    Mutant(X, "no barrier after the copies", "    cp_wait();\n    __syncthreads();\n", "    cp_wait();\n    __syncwarp();\n", 0, 2),
    Mutant(X, "relaxed flag read", "ld.acquire.gpu", "ld.relaxed.gpu", 0, 2),
    Mutant(X, "weak flag read", "ld.acquire.gpu", "ld.volatile", 0, 2),
    Mutant(X, "relaxed flag store", "st.release.gpu", "st.relaxed.gpu", 0, 2),
    Mutant(X, "flag released to the block only", "st.release.gpu", "st.release.cta", 0, 2),
    Mutant(X, "flag acquired by the block only", "ld.acquire.gpu", "ld.acquire.cta", 0, 2),
    Mutant(X, "flag set before the barrier", "    __syncthreads();\n    if (t == 0)\n        store_release", "    if (t == 0)\n        store_release", 0, 2),
    Mutant(X, "flag of the wrong block", "flags + block - 1)", "flags + max(block - 2, 0))", 0, 2),
    Mutant(X, "flag not waited for", "            while (load_acquire(flags + block - 1) == 0)\n                ;\n", "", 0, 2),
    Mutant(X, "no proxy fence before the load", "            fence_async_global();\n", "", 0, 2),
    Mutant(X, "proxy fence of shared memory only", "fence_async_global();\n            mbar", "fence_async();\n            mbar", 0, 2),
    Mutant(X, "proxy fence before the acquire", "            while (load_acquire(flags + block - 1) == 0)\n                ;\n            fence_async_global();\n", "            fence_async_global();\n            while (load_acquire(flags + block - 1) == 0)\n                ;\n", 0, 2),
    Mutant(X, "load not waited for", "        mbar_wait(smem_u32(&arrived), 0);\n", "", 0, 2),
    Mutant(X, "load waited for by one thread", "        mbar_wait(smem_u32(&arrived), 0);\n", "        if (t == 0)\n            mbar_wait(smem_u32(&arrived), 0);\n", 0, 2),
    Mutant(X, "running sum of the block before is rewritten", "chain[block * 64 + t] = running;", "chain[block * 64 + t] = running;\n    if (block > 1)\n        chain[(block - 2) * 64 + t] = running - mine;", 0, 2),
]  # fmt: skip
