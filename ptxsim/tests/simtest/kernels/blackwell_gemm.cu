// One tile D[M, N] = A[M, K] B[N, K]^T in tensor memory, dumped cell by cell: out[block][lane][column].
// Warps 0..3 read tensor memory, warp 4 loads by TMA, warp 5 allocates and multiplies.
// -DM= -DN= -DGROUP=1|2 -DWS=0|1 -DA_MN=0|1 -DB_MN=0|1 -DHALF=0|16 (lane half of an M=64 accumulator)
#include "ptx.cuh"
#define STR2(x) #x
#define STR(x) STR2(x)
#define CG ".cta_group::" STR(GROUP)
constexpr int kStages = 2, kRowsA = M / GROUP, kRowsB = N / GROUP, kColumns = WS && M < 128 ? N * M / 128 : (GROUP == 2 && M == 128 ? N / 2 : N);
constexpr int kBytesA = kRowsA * 128, kBytesB = kRowsB * 128, kAlloc = kColumns <= 32 ? 32 : kColumns <= 64 ? 64 : kColumns <= 128 ? 128 : 256;
constexpr u32 kInstruction = (1u << 4) | (1u << 7) | (1u << 10) | (A_MN << 15) | (B_MN << 16) | ((N >> 3) << 17) | ((M >> 4) << 24);

DI u64 smem_desc(u32 addr, u32 lbo, u32 sbo) {
    return (u64)((addr & 0x3FFFF) >> 4) | ((u64)(lbo >> 4) << 16) | ((u64)(sbo >> 4) << 32) | (1ull << 46) | (2ull << 61);
}
DI void load(u32 dst, const TensorMap *map, u32 bar, int x, int y) {
#if GROUP == 2
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.cta_group::2 [%0], [%1, {%3, %4}], [%2];" ::"r"(dst),
                 "l"(map), "r"(bar), "r"(x), "r"(y)
                 : "memory");
#else
    tma_load(dst, map, bar, x, y);
#endif
}
DI void commit(u32 bar) {
#if GROUP == 2
    asm volatile("tcgen05.commit.cta_group::2.mbarrier::arrive::one.shared::cluster.multicast::cluster.b64 [%0], %1;" ::"r"(bar), "h"((u16)3) : "memory");
#else
    asm volatile("tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [%0];" ::"r"(bar) : "memory");
#endif
}
DI void mma(u32 d, u64 a, u64 b, u32 accumulate) {
#if WS
    asm volatile("{\n .reg .pred p;\n setp.ne.b32 p, %4, 0;\n tcgen05.mma.ws" CG ".kind::f16 [%0], %1, %2, %3, p;\n}" ::"r"(d), "l"(a), "l"(b),
                 "r"(kInstruction), "r"(accumulate)
                 : "memory");
#else
    asm volatile("{\n .reg .pred p;\n setp.ne.b32 p, %4, 0;\n tcgen05.mma" CG ".kind::f16 [%0], %1, %2, %3, p;\n}" ::"r"(d), "l"(a), "l"(b),
                 "r"(kInstruction), "r"(accumulate)
                 : "memory");
#endif
}
// A tile of `rows` rows: K-major [rows][64 k], or MN-major slabs [64 k][64 rows].
DI void load_operand(u32 dst, const TensorMap *map, u32 bar, int k, int row, int rows, bool mn) {
    if (mn)
        for (int slab = 0; slab < rows / 64; slab++)
            load(dst + slab * 8192, map, bar, row + slab * 64, k);
    else
        load(dst, map, bar, k, row);
}
DI u64 operand_desc(u32 addr, int step, bool mn) { return mn ? smem_desc(addr + step * 2048, 8192, 1024) : smem_desc(addr + step * 32, 16, 1024); }

extern "C" __global__ void __launch_bounds__(192, 1)
    blackwell_gemm(const __grid_constant__ TensorMap map_a, const __grid_constant__ TensorMap map_b, float *out, int k_tiles) {
    extern __shared__ __align__(1024) u8 smem[];
    __shared__ __align__(8) u64 bars[2 * kStages + 1];
    __shared__ u32 tmem_slot;
    const u32 sA = smem_u32(smem), sB = sA + kStages * kBytesA, full = smem_u32(bars), empty = full + 8 * kStages, done = empty + 8 * kStages;
    const int warp = threadIdx.x / 32, rank = GROUP == 2 ? cluster_rank() : 0;
    const u32 leader = 0xFEFFFFFF;
    if (threadIdx.x == 0) {
        for (int s = 0; s < kStages; s++) {
            mbar_init(full + 8 * s, 1);
            mbar_init(empty + 8 * s, 1);
        }
        mbar_init(done, 1);
        fence_mbar_init();
    }
    if (warp == 5)
        asm volatile("tcgen05.alloc" CG ".sync.aligned.shared::cta.b32 [%0], %1;" ::"r"(smem_u32(&tmem_slot)), "r"(kAlloc) : "memory");
    asm volatile("tcgen05.fence::before_thread_sync;" ::: "memory");
    if (GROUP == 2)
        cluster_sync();
    else
        __syncthreads();
    asm volatile("tcgen05.fence::after_thread_sync;" ::: "memory");
    const u32 tmem = tmem_slot;
    if (warp == 4) {
        if (elect())
            for (int i = 0; i < k_tiles; i++) {
                const int s = i % kStages;
                mbar_wait(empty + 8 * s, ((i / kStages) & 1) ^ 1);
                if (rank == 0)
                    mbar_expect(full + 8 * s, GROUP * (kBytesA + kBytesB));
                const u32 bar = GROUP == 2 ? (full + 8 * s) & leader : full + 8 * s;
                load_operand(sA + s * kBytesA, &map_a, bar, i * 64, rank * kRowsA, kRowsA, A_MN);
                load_operand(sB + s * kBytesB, &map_b, bar, i * 64, rank * kRowsB, kRowsB, B_MN);
            }
    } else if (warp == 5) {
        if (rank == 0 && elect()) {
            for (int i = 0; i < k_tiles; i++) {
                const int s = i % kStages;
                mbar_wait(full + 8 * s, (i / kStages) & 1);
                asm volatile("tcgen05.fence::after_thread_sync;" ::: "memory");
                for (int k = 0; k < 4; k++)
                    mma(tmem + (HALF << 16), operand_desc(sA + s * kBytesA, k, A_MN), operand_desc(sB + s * kBytesB, k, B_MN), i + k > 0);
                commit(empty + 8 * s);
            }
            commit(done);
        }
    } else {
        mbar_wait(done, 0);
        asm volatile("tcgen05.fence::after_thread_sync;" ::: "memory");
        const int lane = threadIdx.x;
        const bool valid = WS || M / GROUP == 128 || GROUP == 2 || (lane % 32) / 16 == HALF / 16;
        for (int c = 0; c < kColumns; c += 8) {
            u32 r[8];
            asm volatile("tcgen05.ld.sync.aligned.32x32b.x8.b32 {%0, %1, %2, %3, %4, %5, %6, %7}, [%8];"
                         : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]), "=r"(r[4]), "=r"(r[5]), "=r"(r[6]), "=r"(r[7])
                         : "r"(tmem + (warp << 21) + c));
            asm volatile("tcgen05.wait::ld.sync.aligned;" ::: "memory");
            for (int j = 0; j < 8; j++)
                if (valid)
                    out[(rank * 128 + lane) * 256 + c + j] = __uint_as_float(r[j]);
        }
        asm volatile("tcgen05.fence::before_thread_sync;" ::: "memory");
    }
    __syncwarp();
    if (GROUP == 2)
        cluster_sync();
    else
        __syncthreads();
    asm volatile("tcgen05.fence::after_thread_sync;" ::: "memory");
    if (warp == 5) {
        asm volatile("tcgen05.dealloc" CG ".sync.aligned.b32 %0, %1;" ::"r"(tmem), "r"(kAlloc));
        asm volatile("tcgen05.relinquish_alloc_permit" CG ".sync.aligned;");
    }
}
