// Gradients of sparse MLA on Blackwell by weight-stationary products: everything in 464 columns of tensor memory.
//
//   P^T  = exp2(scale log2(e) K Q^T - lse2)        (32 keys x 64 heads), from the forward's lse
//   dS^T = P^T * (V dO^T - delta) * scale          V is K's first 512 columns
//   dQ  += dS K                                    (64 heads x d_qk), in tensor memory over all tiles
//   dKV  = P^T dO + dS^T Q                         (32 keys x d_qk; P^T dO to 512 dims), added to global memory
//
// Grid: x = queries * blocks of 64 heads. One block per SM: it takes all of the tensor memory. No cluster.
//
// Roles, barriers and time line are as in sparse_backward/sm100.cu (sparse_backward/sm100.cuh), but here the scores are
// transposed instead of the sums. A weight-stationary product spreads its columns over the groups of lanes that its 32
// or 64 rows leave free, so that no cell of tensor memory is wasted, and a thread reads a row of keys or heads.
//
// Source: as there; the map of columns is this project's first plan for Blackwell.
#include "common/limits.cuh"
#include "sparse_backward/dkv_adder.cuh"
#include "sparse_backward/sm100.cuh"

namespace mla::sparse_backward::sm100 {
// ---- Variant ---------------------------------------------------------------------------------------------------
using Element = MLA_DTYPE;
using C = Config<Element, MLA_HEAD_DIM_QK, MLA_DETERMINISTIC>;
using Adder = DkvAdder<C::kDeterministic, C::kHeadDimQk>;

// ---- Tensor memory ---------------------------------------------------------------------------------------------
// In each of four groups of 32 lanes (of dQ: two groups of 64):
//
// sum            rows       columns    lane of a row r        column c is
// P^T            32 keys    0..15      r of every group q     head 16 q + c
// dP^T           32 keys    16..31     the same               the same
// dKV[t]         32 keys    32 + 64 t  the same               dim 256 t + 64 q + c
// dKV RoPE       32 keys    160..175   the same               dim 512 + 16 q + c
// dQ[t]          64 heads   176 + 128 t   r of both groups q  dim 256 t + 128 q + c
// dQ RoPE        64 heads   432..463   the same               dim 512 + 32 q + c
constexpr i32 kTileDims = 256;
constexpr i32 kDimTiles = kHeadDimV / kTileDims;
constexpr i32 kSwTilesPerDimTile = kTileDims / kSw128Columns;
static_assert(kSwTilesPerDimTile == 2 * kGroupSwTiles, "groups of K that dQ is done with");
constexpr i32 kKeyGroups = 4, kHeadGroups = 2;  // of lanes
constexpr i32 kScoreColumns = kBlockHeads / kKeyGroups;
constexpr i32 kDkvColumns = kTileDims / kKeyGroups, kDkvRopeColumns = kSw128Columns / kKeyGroups;
constexpr i32 kDqColumns = kTileDims / kHeadGroups, kDqRopeColumns = kSw128Columns / kHeadGroups;

constexpr u32 kColumnP = 0;
constexpr u32 kColumnDp = kColumnP + kScoreColumns;
constexpr u32 kColumnDkv = kColumnDp + kScoreColumns;
constexpr u32 kColumnDkvRope = kColumnDkv + kDimTiles * kDkvColumns;
constexpr u32 kColumnDq = kColumnDkvRope + kDkvRopeColumns;
constexpr u32 kColumnDqRope = kColumnDq + kDimTiles * kDqColumns;
constexpr u32 kColumnsUsed = kColumnDqRope + kDqRopeColumns;
static_assert(kColumnDp == 16 && kColumnDkv == 32 && kColumnDq == 176 && kColumnsUsed == 464, "the plan");
static_assert(kColumnsUsed <= kTmemColumns, "tensor memory");

using Shared = Storage<C, kDimTiles>;
static_assert(sizeof(Shared) <= kMaxDynamicSmem, "shared memory");
MLA_SM100_FACTS(C, Shared);
MLA_FACT(tmem_columns_used, kColumnsUsed);
MLA_FACT(weight_stationary, 1);
constexpr i32 kHeadSteps = kBlockHeads / kMmaK, kKeySteps = kTileKeys / kMmaK;
MLA_FACT_LIST(products, kTileKeys, kBlockHeads, C::kSwTilesQk* kSw128MmaSteps, kTileKeys, kBlockHeads,
              kSwTilesV* kSw128MmaSteps, kTileKeys, kTileDims, 2 * kDimTiles * kHeadSteps, kTileKeys, kSw128Columns,
              C::kHasRope* kHeadSteps, kBlockHeads, kTileDims, kDimTiles* kKeySteps, kBlockHeads, kSw128Columns,
              C::kHasRope* kKeySteps);

// ---- Plan ------------------------------------------------------------------------------------------------------
struct TransposedScores {
    using Config = C;
    static constexpr i32 kTiles = kDimTiles;

    // ---- Products
    // S^T and dP^T, keys x heads: sums over columns.
    template <i32 kSwTiles, class Ready>
    MLA_DEVICE static void issue_scores(TmemAddr d, const u8* keys, const u8* heads, Ready ready) {
        multiply_columns<kSwTiles>(k_major_matrix(smem_addr(keys)), kKeySwTileBytes, k_major_matrix(smem_addr(heads)),
                                   kSw128Bytes, Product<Element, true, kTileKeys, kBlockHeads, Major::K, Major::K>{d},
                                   ready);
    }
    template <class Ready>
    MLA_DEVICE static void issue_s(Shared& s, TmemAddr tmem, i32 stage, Ready ready) {
        issue_scores<C::kSwTilesQk>(tmem.column(kColumnP), s.k[stage], s.q, ready);
    }
    MLA_DEVICE static void issue_dp(Shared& s, TmemAddr tmem, i32 stage) {
        issue_scores<kSwTilesV>(tmem.column(kColumnDp), s.k[stage], s.dout, [](i32) {});
    }

    // kDims dims of dKV, from P^T or dS^T, and dO or Q: sums over heads.
    template <i32 kDims>
    MLA_DEVICE static void issue_dkv(TmemAddr d, const u8* scores, const u8* dims, i32 head_steps, bool accumulate) {
        multiply_steps(k_major_matrix(smem_addr(scores)), kKMajorStepBytes,
                       mn_major_matrix(smem_addr(dims), kSw128Bytes), kMnMajorStepBytes, head_steps, accumulate,
                       Product<Element, true, kTileKeys, kDims, Major::K, Major::MN>{d});
    }
    MLA_DEVICE static TmemAddr dkv(TmemAddr tmem, i32 t) { return tmem.column(kColumnDkv + t * kDkvColumns); }
    MLA_DEVICE static void issue_dv(Shared& s, TmemAddr tmem, i32 t, i32 head_steps) {
        issue_dkv<kTileDims>(dkv(tmem, t), s.p, s.dout + t * kSwTilesPerDimTile * kSw128Bytes, head_steps, false);
    }
    MLA_DEVICE static void issue_dk(Shared& s, TmemAddr tmem, i32 t, i32 head_steps) {
        issue_dkv<kTileDims>(dkv(tmem, t), s.ds, s.q + t * kSwTilesPerDimTile * kSw128Bytes, head_steps, true);
    }
    MLA_DEVICE static void issue_dk_rope(Shared& s, TmemAddr tmem, i32 head_steps) {
        issue_dkv<kSw128Columns>(tmem.column(kColumnDkvRope), s.ds, s.q + kRopeSwTile * kSw128Bytes, head_steps, false);
    }

    // kDims dims of dQ: sums over keys.
    template <i32 kDims>
    MLA_DEVICE static void issue_dq(TmemAddr d, const u8* ds, const u8* keys, bool accumulate) {
        multiply_steps(mn_major_matrix(smem_addr(ds), kKeySwTileBytes), kMnMajorStepBytes,
                       mn_major_matrix(smem_addr(keys), kKeySwTileBytes), kMnMajorStepBytes, kKeySteps, accumulate,
                       Product<Element, true, kBlockHeads, kDims, Major::MN, Major::MN>{d});
    }
    template <class Done>
    MLA_DEVICE static void issue_dq(Shared& s, TmemAddr tmem, i32 stage, bool accumulate, Done done) {
        const u8* k = s.k[stage];
        for (i32 t = 0; t < kDimTiles; ++t) {
            issue_dq<kTileDims>(tmem.column(kColumnDq + t * kDqColumns), s.ds,
                                k + t * kSwTilesPerDimTile * kKeySwTileBytes, accumulate);
            done(2 * t);
            done(2 * t + 1);
        }
        if (C::kHasRope) {
            issue_dq<kSw128Columns>(tmem.column(kColumnDqRope), s.ds, k + kRopeSwTile * kKeySwTileBytes, accumulate);
            done(kRopeGroup);
        }
    }

    // ---- Scores: a thread has one key, a warp 16 heads
    static constexpr i32 kScores = kScoreColumns;

    struct Heads {
        float lse2_of[kScores], delta_of[kScores];

        MLA_DEVICE Heads(const Item<C>& item, i32 thread) {
#pragma unroll
            for (i32 i = 0; i < kScores; ++i) {
                const i32 head = thread / kWarpThreads * kScores + i;
                lse2_of[i] = item.lse2(head);
                delta_of[i] = item.delta(head) * item.p.scale;
            }
        }
        MLA_DEVICE float lse2(i32 i) const { return lse2_of[i]; }
        MLA_DEVICE float delta(i32 i) const { return delta_of[i]; }
        MLA_DEVICE bool present(i32 i) const { return lse2_of[i] != -negative_infinity(); }
    };

    MLA_DEVICE static i32 key(i32 i, i32 thread) { return thread % kWarpThreads; }
    MLA_DEVICE static TmemAddr lanes_of_warp(TmemAddr tmem, i32 thread) {
        return tmem.lane(thread / kWarpThreads * kWarpThreads);
    }

    MLA_DEVICE static void load_s(float (&x)[kScores], TmemAddr tmem, i32 thread) {
        tcgen05_ld_32x32b(x, lanes_of_warp(tmem, thread).column(kColumnP));
        tcgen05_wait_ld();
        pin_loaded(x);
    }
    MLA_DEVICE static void load_dp(float (&x)[kScores], TmemAddr tmem, i32 thread) {
        tcgen05_ld_32x32b(x, lanes_of_warp(tmem, thread).column(kColumnDp));
        tcgen05_wait_ld();
        pin_loaded(x);
    }
    // Eight numbers of a row of an SW128 tile, in 16 bits.
    MLA_DEVICE static void store_chunk(u8* sw_tile, i32 row, i32 chunk, const float* x) {
        *reinterpret_cast<uint4*>(sw_tile + sw128_offset(row, chunk)) =
            make_uint4(cvt_x2(Element{}, x[0], x[1]), cvt_x2(Element{}, x[2], x[3]), cvt_x2(Element{}, x[4], x[5]),
                       cvt_x2(Element{}, x[6], x[7]));
    }
    MLA_DEVICE static void store_scores(u8* sw_tile, const float (&x)[kScores], i32 thread) {
        const i32 chunk = thread / kWarpThreads * (kScores / 8);
        store_chunk(sw_tile, thread % kWarpThreads, chunk, x);
        store_chunk(sw_tile, thread % kWarpThreads, chunk + 1, x + 8);
    }

    // ---- dQ: a thread has one head; 32 dims from dim `dim` on to SW128 tiles with a row for each head
    MLA_DEVICE static void store_dq_dims(u8* sw_tiles, TmemAddr from, i32 dim, i32 thread) {
        float x[32];
        tcgen05_ld_32x32b(x, from);
        tcgen05_wait_ld();
        pin_loaded(x);
        const i32 head = thread % kBlockHeads;
        u8* sw_tile = sw_tiles + dim / kSw128Columns * kSw128Bytes;
#pragma unroll
        for (i32 i = 0; i < 4; ++i) store_chunk(sw_tile, head, dim % kSw128Columns / 8 + i, x + 8 * i);
    }
    MLA_DEVICE static void store_dq(u8* sw_tiles, TmemAddr tmem, i32 thread) {
        const TmemAddr lanes = lanes_of_warp(tmem, thread);
        const i32 group = thread / kBlockHeads;
#pragma unroll 1
        for (i32 column = 0; column < kDimTiles * kDqColumns; column += 32) {
            const i32 dim = column / kDqColumns * kTileDims + group * kDqColumns + column % kDqColumns;
            store_dq_dims(sw_tiles, lanes.column(kColumnDq + column), dim, thread);
        }
        if (C::kHasRope) {
            store_dq_dims(sw_tiles, lanes.column(kColumnDqRope), kHeadDimV + group * kDqRopeColumns, thread);
        }
    }

    // ---- dKV: fragments of 16 keys x 32 dims; two quads exchange halves, so that they add 128 bytes to a row
    struct DkvStore {
        static constexpr i32 kKeyHalves = 2;
        Adder adder;
        const i32* list;
        i32 rows[kKeyHalves][kFragmentRows][2], extractors[kKeyHalves][kFragmentRows][2];
        i32 warp, lane;

        MLA_DEVICE DkvStore(const Item<C>& item, i32 tile, i32 thread)
            : adder(item.p), list(item.rows(tile)), warp(thread / kWarpThreads), lane(thread % kWarpThreads) {
#pragma unroll
            for (i32 half = 0; half < kKeyHalves; ++half) {
#pragma unroll
                for (i32 r = 0; r < kFragmentRows; ++r) {
                    const int2 pair = *reinterpret_cast<const int2*>(list + (16 * half + 8 * r + lane / 8 * 2));
                    rows[half][r][0] = pair.x;
                    rows[half][r][1] = pair.y;
                    extractors[half][r][0] = adder.extractor(pair.x);
                    extractors[half][r][1] = adder.extractor(pair.y);
                }
            }
        }

        template <class Loaded>
        MLA_DEVICE void add_tile(TmemAddr tmem, i32 t, Loaded loaded) const {
            const TmemAddr from = dkv(tmem, t).lane(warp * kWarpThreads);
            float x[kKeyHalves][2][16];  // 32 dims, and 32 more
#pragma unroll
            for (i32 i = 0; i < 4; ++i) tcgen05_ld_16x256b(x[i / 2][i % 2], from.lane(i / 2 * 16).column(i % 2 * 32));
            tcgen05_wait_ld();
#pragma unroll
            for (i32 i = 0; i < 4; ++i) pin_loaded(x[i / 2][i % 2]);
            loaded();
            const bool odd = lane & 4;
#pragma unroll
            for (i32 i = 0; i < 4; ++i) {
                const i32 half = i / 2;
                const i32 position = t * kTileDims + warp * kDkvColumns + i % 2 * 32 + odd * 16 + lane % 4 * 4;
                float keys[kFragmentRows][2][4];
                exchange_quads(keys, x[half][i % 2], odd);
#pragma unroll
                for (i32 key = 0; key < 4; ++key) {
                    const i32 row = rows[half][key / 2][key % 2];
                    adder.add(adder.at(row, position), extractors[half][key / 2][key % 2], keys[key / 2][key % 2],
                              row >= 0);
                }
            }
        }

        // Each group adds half of the keys, 64 bytes to a row.
        template <class Loaded>
        MLA_DEVICE void add_rope(TmemAddr tmem, i32 group, Loaded loaded) const {
            float x[8];
            tcgen05_ld_16x256b(x, tmem.lane(warp * kWarpThreads + group * 16).column(kColumnDkvRope));
            tcgen05_wait_ld();
            pin_loaded(x);
            loaded();
            const i32 position = kHeadDimV + warp * kDkvRopeColumns + lane % 4 * 4;
#pragma unroll
            for (i32 r = 0; r < kFragmentRows; ++r) {
                const i32 row = list[16 * group + 8 * r + lane / 4];
                float dims[4] = {x[2 * r], x[2 * r + 1], x[2 * r + 4], x[2 * r + 5]};
                adder.add(adder.at(row, position), adder.extractor(row), dims, row >= 0);
            }
        }
    };
};

// ---- Kernel ----------------------------------------------------------------------------------------------------
extern "C" __global__ void __launch_bounds__(kThreads, 1)
    mla_sparse_backward_sm100_ws(const __grid_constant__ BackwardParams p, const __grid_constant__ TensorMap kv_map,
                                 const __grid_constant__ TensorMap q_map, const __grid_constant__ TensorMap dout_map,
                                 const __grid_constant__ TensorMap dq_map) {
    extern __shared__ __align__(kSwizzleAtomBytes) u8 smem[];
    run_block<TransposedScores>(p, Maps{kv_map, q_map, dout_map, dq_map}, *reinterpret_cast<Shared*>(smem));
}
}  // namespace mla::sparse_backward::sm100
