// Gradients of sparse MLA on Blackwell: five products per tile of 32 selected keys, all sums in tensor memory.
//
//   P  = exp2(scale log2(e) Q K^T - lse2)          (64 heads x keys), from the forward's lse
//   dS = P * (dO V^T - delta) * scale              V is K's first 512 columns
//   dQ^T += K^T dS^T                               (d_qk x 64 heads), in tensor memory over all tiles
//   dKV^T = dO^T P^T + Q^T dS^T                    (d_qk x keys; the first product to 512 dims), added to global memory
//
// Grid: x = queries * blocks of 64 heads. One block per SM: it takes all of the tensor memory. No cluster.
//
//   gather    | Q, dO, K 0 | K 1 |         K 2            |          K 3           |
//   mma       |            | S 0 | dP 0 | dV 0 | dQ  | dK 0 | S 1 | dP 1 | dV 1 | dQ | ...
//   softmax   |                  | P 0  | dS 0 |                  | P 1  | dS 1 |      ...           | dQ
//   epilogue  |                                        | add dKV 0 ...           | add dKV 1 ...
//
// Sums are transposed (dims are rows), so that every product can read Q, dO, K, P^T and dS^T as they are in shared
// memory, and a warp's additions to a row of dkv cover 128 bytes. Roles and barriers: sparse_backward/sm100.cuh.
//
// Source: the five products and the recomputed P are FlashAttention's backward (Dao, 2022), the gather of selected rows
// DeepSeek's sparse attention (2025), dKV^T and dQ^T as products of M = 128 and two M = 64 sums in the halves of the
// lanes cudnn-frontend's (NVIDIA, 2025). The page lists the differences.
#include "common/limits.cuh"
#include "sparse_backward/dkv_adder.cuh"
#include "sparse_backward/sm100.cuh"

namespace mla::sparse_backward::sm100 {
// ---- Variant ---------------------------------------------------------------------------------------------------
using Element = MLA_DTYPE;
using C = Config<Element, MLA_HEAD_DIM_QK, MLA_DETERMINISTIC>;
using Adder = DkvAdder<C::kDeterministic, C::kHeadDimQk>;

// ---- Tensor memory ---------------------------------------------------------------------------------------------
// sum           product   lanes                    columns
// S             M = 64    0..15 of every 32        0..31
// dP            M = 64    16..31 of every 32       0..31
// dKV^T[t]      M = 128   all                      64 + 32 t .. + 31
// dQ^T[t]       M = 128   all                      192 + 64 t .. + 63
// dQ^T RoPE     M = 64    0..15 of every 32        448..511
// dKV^T RoPE    M = 64    16..31 of every 32       448..479
constexpr u32 kUpperLanes = 16;
constexpr u32 kColumnScores = 0;
constexpr u32 kColumnDkv = 64;
constexpr u32 kColumnDq = 192;
constexpr u32 kColumnRope = 448;
constexpr i32 kTileDims = 128;
constexpr i32 kDimTiles = kHeadDimV / kTileDims;
constexpr i32 kSwTilesPerDimTile = kTileDims / kSw128Columns;
static_assert(kSwTilesPerDimTile == kGroupSwTiles, "groups of K that dQ is done with");

struct Region {
    u32 halves;  // of every 32 lanes: 1 the lower 16, 2 the upper
    u32 begin, columns;
};
constexpr Region kRegions[] = {
    {1, kColumnScores, kTileKeys},           {2, kColumnScores, kTileKeys}, {3, kColumnDkv, kDimTiles * kTileKeys},
    {3, kColumnDq, kDimTiles * kBlockHeads}, {1, kColumnRope, kBlockHeads}, {2, kColumnRope, kTileKeys},
};
constexpr bool regions_are_disjoint() {
    for (const Region& a : kRegions) {
        if (a.begin + a.columns > kTmemColumns) return false;
        for (const Region& b : kRegions) {
            const bool apart = a.begin + a.columns <= b.begin || b.begin + b.columns <= a.begin;
            if (&a != &b && (a.halves & b.halves) != 0 && !apart) return false;
        }
    }
    return true;
}
static_assert(regions_are_disjoint(), "tensor memory");
constexpr u32 columns_used() {
    u32 columns = 0;
    for (const Region& region : kRegions) columns += region.halves == 2 ? 0 : region.columns;
    return columns;
}

using Shared = Storage<C, kDimTiles>;
static_assert(sizeof(Shared) <= kMaxDynamicSmem, "shared memory");
MLA_SM100_FACTS(C, Shared);
MLA_FACT(tmem_columns_used, columns_used());
// M, N and the number of K = 16 products per tile of keys and 64 heads: S, dP, dKV, its RoPE dims, dQ, its
// RoPE dims.
constexpr i32 kHeadSteps = kBlockHeads / kMmaK, kKeySteps = kTileKeys / kMmaK;
MLA_FACT_LIST(products, 64, kTileKeys, C::kSwTilesQk* kSw128MmaSteps, 64, kTileKeys, kSwTilesV* kSw128MmaSteps, 128,
              kTileKeys, 2 * kDimTiles * kHeadSteps, 64, kTileKeys, C::kHasRope* kHeadSteps, 128, kBlockHeads,
              kDimTiles* kKeySteps, 64, kBlockHeads, C::kHasRope* kKeySteps);

// ---- Plan ------------------------------------------------------------------------------------------------------
struct TransposedSums {
    using Config = C;
    static constexpr i32 kTiles = kDimTiles;

    // ---- Products
    // S and dP, heads x keys: sums over columns.
    template <i32 kSwTiles, class Ready>
    MLA_DEVICE static void issue_scores(TmemAddr d, const u8* heads, const u8* keys, Ready ready) {
        multiply_columns<kSwTiles>(k_major_matrix(smem_addr(heads)), kSw128Bytes, k_major_matrix(smem_addr(keys)),
                                   kKeySwTileBytes,
                                   Product<Element, false, kBlockHeads, kTileKeys, Major::K, Major::K>{d}, ready);
    }
    template <class Ready>
    MLA_DEVICE static void issue_s(Shared& s, TmemAddr tmem, i32 stage, Ready ready) {
        issue_scores<C::kSwTilesQk>(tmem.column(kColumnScores), s.q, s.k[stage], ready);
    }
    MLA_DEVICE static void issue_dp(Shared& s, TmemAddr tmem, i32 stage) {
        issue_scores<kSwTilesV>(tmem.lane(kUpperLanes).column(kColumnScores), s.dout, s.k[stage], [](i32) {});
    }

    // kDims dims of dKV^T, from dO or Q, and P^T or dS^T: sums over heads.
    template <i32 kDims>
    MLA_DEVICE static void issue_dkv(TmemAddr d, const u8* dims, const u8* scores, i32 head_steps, bool accumulate) {
        multiply_steps(mn_major_matrix(smem_addr(dims), kSw128Bytes), kMnMajorStepBytes,
                       k_major_matrix(smem_addr(scores)), kKMajorStepBytes, head_steps, accumulate,
                       Product<Element, false, kDims, kTileKeys, Major::MN, Major::K>{d});
    }
    MLA_DEVICE static TmemAddr dkv(TmemAddr tmem, i32 t) { return tmem.column(kColumnDkv + t * kTileKeys); }
    MLA_DEVICE static TmemAddr dkv_rope(TmemAddr tmem) { return tmem.lane(kUpperLanes).column(kColumnRope); }
    MLA_DEVICE static void issue_dv(Shared& s, TmemAddr tmem, i32 t, i32 head_steps) {
        issue_dkv<kTileDims>(dkv(tmem, t), s.dout + t * kSwTilesPerDimTile * kSw128Bytes, s.p, head_steps, false);
    }
    MLA_DEVICE static void issue_dk(Shared& s, TmemAddr tmem, i32 t, i32 head_steps) {
        issue_dkv<kTileDims>(dkv(tmem, t), s.q + t * kSwTilesPerDimTile * kSw128Bytes, s.ds, head_steps, true);
    }
    MLA_DEVICE static void issue_dk_rope(Shared& s, TmemAddr tmem, i32 head_steps) {
        issue_dkv<kSw128Columns>(dkv_rope(tmem), s.q + kRopeSwTile * kSw128Bytes, s.ds, head_steps, false);
    }

    // kDims dims of dQ^T: sums over keys.
    template <i32 kDims>
    MLA_DEVICE static void issue_dq(TmemAddr d, const u8* keys, const u8* ds, bool accumulate) {
        multiply_steps(mn_major_matrix(smem_addr(keys), kKeySwTileBytes), kMnMajorStepBytes,
                       mn_major_matrix(smem_addr(ds), kKeySwTileBytes), kMnMajorStepBytes, kKeySteps, accumulate,
                       Product<Element, false, kDims, kBlockHeads, Major::MN, Major::MN>{d});
    }
    template <class Done>
    MLA_DEVICE static void issue_dq(Shared& s, TmemAddr tmem, i32 stage, bool accumulate, Done done) {
        const u8* k = s.k[stage];
        for (i32 t = 0; t < kDimTiles; ++t) {
            issue_dq<kTileDims>(tmem.column(kColumnDq + t * kBlockHeads), k + t * kSwTilesPerDimTile * kKeySwTileBytes,
                                s.ds, accumulate);
            done(t);
        }
        if (C::kHasRope) {
            issue_dq<kSw128Columns>(tmem.column(kColumnRope), k + kRopeSwTile * kKeySwTileBytes, s.ds, accumulate);
            done(kRopeGroup);
        }
    }

    // ---- Scores: a thread has two heads, eight apart, and two keys of every eight
    static constexpr i32 kScores = kTileKeys / 2;

    struct Heads {
        float lse2_of[kFragmentRows], delta_of[kFragmentRows];

        MLA_DEVICE Heads(const Item<C>& item, i32 thread) {
#pragma unroll
            for (i32 r = 0; r < kFragmentRows; ++r) {
                lse2_of[r] = item.lse2(fragment_row(thread) + 8 * r);
                delta_of[r] = item.delta(fragment_row(thread) + 8 * r) * item.p.scale;
            }
        }
        MLA_DEVICE float lse2(i32 i) const { return lse2_of[fragment_half(i)]; }
        MLA_DEVICE float delta(i32 i) const { return delta_of[fragment_half(i)]; }
        MLA_DEVICE bool present(i32 i) const { return lse2(i) != -negative_infinity(); }
    };

    MLA_DEVICE static i32 key(i32 i, i32 thread) { return fragment_column(thread, i); }
    MLA_DEVICE static u32 lanes_of_warp(i32 thread) { return thread / kWarpThreads * kWarpThreads; }

    MLA_DEVICE static void load_s(float (&x)[kScores], TmemAddr tmem, i32 thread) {
        tcgen05_ld_16x256b(x, tmem.lane(lanes_of_warp(thread)).column(kColumnScores));
        tcgen05_wait_ld();
        pin_loaded(x);
    }
    MLA_DEVICE static void load_dp(float (&x)[kScores], TmemAddr tmem, i32 thread) {
        tcgen05_ld_16x256b(x, tmem.lane(lanes_of_warp(thread) + kUpperLanes).column(kColumnScores));
        tcgen05_wait_ld();
        pin_loaded(x);
    }
    // To an SW128 tile with a row for each key: transposed, 8 keys x 8 heads at a time.
    MLA_DEVICE static void store_scores(u8* sw_tile, const float (&x)[kScores], i32 thread) {
        const i32 matrix = thread % kWarpThreads / 8, chunk = thread / kWarpThreads * 2 + matrix % 2;
#pragma unroll
        for (i32 i = 0; i < kScores; i += 8) {
            const u32 words[4] = {cvt_x2(Element{}, x[i], x[i + 1]), cvt_x2(Element{}, x[i + 2], x[i + 3]),
                                  cvt_x2(Element{}, x[i + 4], x[i + 5]), cvt_x2(Element{}, x[i + 6], x[i + 7])};
            const i32 row = 2 * i + matrix / 2 * 8 + thread % 8;
            stmatrix_x4_trans(smem_addr(sw_tile) + sw128_offset(row, chunk), words);
        }
    }

    // ---- dQ: to SW128 tiles with a row for each head, 8 heads x 32 dims at a time
    MLA_DEVICE static void store_dq_dims(u8* sw_tile, i32 chunk0, TmemAddr from) {
        float x[2][kBlockHeads / 2];  // dims 0 to 15 of 32, and 16 to 31
        tcgen05_ld_16x256b(x[0], from);
        tcgen05_ld_16x256b(x[1], from.lane(kUpperLanes));
        tcgen05_wait_ld();
        pin_loaded(x[0]);
        pin_loaded(x[1]);
        const i32 lane = threadIdx.x % kWarpThreads;
#pragma unroll
        for (i32 i = 0; i < kBlockHeads / 2; i += 4) {
            const u32 words[4] = {cvt_x2(Element{}, x[0][i], x[0][i + 1]), cvt_x2(Element{}, x[0][i + 2], x[0][i + 3]),
                                  cvt_x2(Element{}, x[1][i], x[1][i + 1]), cvt_x2(Element{}, x[1][i + 2], x[1][i + 3])};
            stmatrix_x4_trans(smem_addr(sw_tile) + sw128_offset(2 * i + lane % 8, chunk0 + lane / 8), words);
        }
    }
    // The RoPE dims: 16 per warp.
    MLA_DEVICE static void store_dq_rope(u8* sw_tile, i32 chunk0, TmemAddr from) {
        float x[kBlockHeads / 2];
        tcgen05_ld_16x256b(x, from);
        tcgen05_wait_ld();
        pin_loaded(x);
        const i32 lane = threadIdx.x % kWarpThreads;
#pragma unroll
        for (i32 i = 0; i < kBlockHeads / 2; i += 8) {
            const u32 words[4] = {cvt_x2(Element{}, x[i], x[i + 1]), cvt_x2(Element{}, x[i + 2], x[i + 3]),
                                  cvt_x2(Element{}, x[i + 4], x[i + 5]), cvt_x2(Element{}, x[i + 6], x[i + 7])};
            const i32 row = 2 * i + lane / 16 * 8 + lane % 8;
            stmatrix_x4_trans(smem_addr(sw_tile) + sw128_offset(row, chunk0 + lane / 8 % 2), words);
        }
    }
    MLA_DEVICE static void store_dq(u8* sw_tiles, TmemAddr tmem, i32 thread) {
        const i32 warp = thread / kWarpThreads;
        const TmemAddr lanes = tmem.lane(lanes_of_warp(thread));
#pragma unroll 1
        for (i32 t = 0; t < kDimTiles; ++t) {
            store_dq_dims(sw_tiles + (2 * t + warp / 2) * kSw128Bytes, warp % 2 * 4,
                          lanes.column(kColumnDq + t * kBlockHeads));
        }
        if (C::kHasRope) store_dq_rope(sw_tiles + kRopeSwTile * kSw128Bytes, 2 * warp, lanes.column(kColumnRope));
    }

    // ---- dKV: a thread has two keys of every eight, and dims 8 apart
    struct DkvStore {
        static constexpr i32 kKeys = kTileKeys / 4;
        Adder adder;
        i32 rows[kKeys], extractors[kKeys];
        i32 warp, dims0;  // dims0: the first of a thread's, in the workspace's order

        MLA_DEVICE DkvStore(const Item<C>& item, i32 tile, i32 thread)
            : adder(item.p), warp(thread / kWarpThreads), dims0(thread % kWarpThreads / 4) {
            const i32* list = item.rows(tile) + fragment_column(thread);
#pragma unroll
            for (i32 i = 0; i < kKeys; i += 2) {
                const int2 pair = *reinterpret_cast<const int2*>(list + 4 * i);
                rows[i] = pair.x;
                rows[i + 1] = pair.y;
            }
#pragma unroll
            for (i32 i = 0; i < kKeys; ++i) extractors[i] = adder.extractor(rows[i]);
        }

        // `loaded` is called when the sums are in registers.
        template <class Loaded>
        MLA_DEVICE void add_tile(TmemAddr tmem, i32 t, Loaded loaded) const {
            const TmemAddr from = dkv(tmem, t).lane(warp * kWarpThreads);
            const i32 position = t * kTileDims + warp * 32 + dims0 * 4;
            float x[2][2 * kKeys];
            tcgen05_ld_16x256b(x[0], from);
            tcgen05_ld_16x256b(x[1], from.lane(kUpperLanes));
            tcgen05_wait_ld();
            pin_loaded(x[0]);
            pin_loaded(x[1]);
            loaded();
#pragma unroll
            for (i32 i = 0; i < kKeys; ++i) {
                const i32 at = i / 2 * 4 + i % 2;
                float dims[4] = {x[0][at], x[0][at + 2], x[1][at], x[1][at + 2]};
                adder.add(adder.at(rows[i], position), extractors[i], dims, rows[i] >= 0);
            }
        }

        // Each group adds half of the keys.
        template <class Loaded>
        MLA_DEVICE void add_rope(TmemAddr tmem, i32 group, Loaded loaded) const {
            float x[kTileKeys / 4];
            tcgen05_ld_16x256b(x, dkv_rope(tmem).lane(warp * kWarpThreads).column(group * (kTileKeys / 2)));
            tcgen05_wait_ld();
            pin_loaded(x);
            loaded();
            const i32 position = kHeadDimV + warp * 16 + dims0 * 2;
#pragma unroll
            for (i32 i = 0; i < kKeys / 2; ++i) {
                const i32 at = i / 2 * 4 + i % 2;
                float dims[2] = {x[at], x[at + 2]};
                const i32 row = group ? rows[i + kKeys / 2] : rows[i];
                const i32 extractor = group ? extractors[i + kKeys / 2] : extractors[i];
                adder.add(adder.at(row, position), extractor, dims, row >= 0);
            }
        }
    };
};
static_assert(dkv_position_sm100(8) == dkv_position_sm100(0) + 1 && dkv_position_sm100(520) == 513, "a thread's dims");

// ---- Kernel ----------------------------------------------------------------------------------------------------
extern "C" __global__ void __launch_bounds__(kThreads, 1)
    mla_sparse_backward_sm100(const __grid_constant__ BackwardParams p, const __grid_constant__ TensorMap kv_map,
                              const __grid_constant__ TensorMap q_map, const __grid_constant__ TensorMap dout_map,
                              const __grid_constant__ TensorMap dq_map) {
    extern __shared__ __align__(kSwizzleAtomBytes) u8 smem[];
    run_block<TransposedSums>(p, Maps{kv_map, q_map, dout_map, dq_map}, *reinterpret_cast<Shared*>(smem));
}
}  // namespace mla::sparse_backward::sm100
