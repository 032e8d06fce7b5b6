// Attention with joint products of a pair of SMs on Blackwell: S = Q K^T and O = P V by `cta_group::2`, M = 128, both
// sums in tensor memory.
//
// Each block of the pair owns 64 of 128 query rows that share keys (here called heads): their Q, their P, both sums and
// the softmax, which therefore needs no data from the other block. Of a tile of 128 keys a block fetches half of the
// keys whole, for the scores, and half of the value columns of all keys, for the values: a product reads half of the
// columns of its second operand from each block, at the same place in both. The first block of the pair, its leader,
// issues every product. This file holds the product and softmax roles, for kernels that differ in where keys come from.
// A kernel chooses with a type C:
//
//   kSwTilesQk    SW128 tiles of a key's columns
//   Element       format of Q, keys, P and the result
//   kWithRowMax   also return the largest score
//
// and its Storage is JointStorage. Work items consist of tiles of 64 keys, and a joint tile is two of them; if their
// number is odd, the second half of the last joint tile has no keys.
#pragma once
#include "attention/sm100/swapped.cuh"
#include "ptx/tcgen05_pair.cuh"

namespace mla::attention::sm100 {
// Scales scores to base 2 with rounding. The compiler must not fuse the product with a later subtraction.
template <i32 kCount>
MLA_DEVICE void to_base_2(float (&scores)[kCount], float scale_log2) {
#pragma unroll
    for (float& score : scores) score = __fmul_rn(score, scale_log2);
}

constexpr i32 kJointHeads = 64;  // of a block
constexpr i32 kHalves = 2;       // of a joint tile's keys, of a product's columns: one from each block
constexpr i32 kJointKeys = kHalves * kTileKeys;
constexpr i32 kBlockDims = kHeadDimV / kHalves;  // value columns that a block fetches: [kBlockDims * rank, ...)

// K and V come and go in groups of two SW128 tiles, as the products take them. Of V these are 128 dims of 64 keys:
// group 2 t + half has dims [128 t, + 128) of the block's, and keys [64 half, + 64).
constexpr i32 kJointGroupSwTiles = 2;
constexpr i32 kValueProducts = kBlockDims / kTileDims, kValueGroups = kValueProducts * kHalves;
template <class C>
constexpr i32 kKeyGroups = ceil_div(C::kSwTilesQk, kJointGroupSwTiles);

// ---- Tensor memory, of each block ------------------------------------------------------------------------------
// sum       product         lanes    columns
// S even    128 x 128       0..63 keys 0..63, 64..127 keys 64..127: 0..63
// S odd     128 x 128       the same: 64..127
// O[t]      128 x 256       0..63 the first block's dims, 64..127 the second's: 128 + 128 t ..
struct JointColumns {
    static constexpr u32 kScores = 0, kOut = kStages * kTileKeys;
    static constexpr u32 kUsed = kOut + kValueProducts * kTileDims, kAllocated = 512;
    static constexpr Region kRegions[] = {{3, kScores, kTileKeys},
                                          {3, kScores + kTileKeys, kTileKeys},
                                          {3, kOut, kTileDims},
                                          {3, kOut + kTileDims, kTileDims}};
    static_assert(sizeof(kRegions) / sizeof(Region) == kStages + kValueProducts, "every sum");

    static constexpr bool are_disjoint() {
        for (const Region& a : kRegions) {
            if (a.begin + a.columns > kAllocated) return false;
            for (const Region& b : kRegions) {
                if (&a != &b && a.begin < b.begin + b.columns && b.begin < a.begin + a.columns) return false;
            }
        }
        return true;
    }

    MLA_DEVICE static TmemAddr scores(TmemAddr tmem, u32 tile) {
        return tmem.column(kScores + tile % kStages * kTileKeys);
    }
    MLA_DEVICE static TmemAddr out(TmemAddr tmem, i32 t) { return tmem.column(kOut + t * kTileDims); }
};
static_assert(JointColumns::are_disjoint(), "tensor memory");

// ---- Storage ---------------------------------------------------------------------------------------------------
// Tile j, counted over all work items of the pair, is phase j of a barrier, unless it says otherwise. Where "leader"
// stands, only the first block's barrier is used, for both.
//
// barrier     arrives (count)              carries                   waits            first phase
// q_full      the kernel's                 Q                         mma              blocked, a phase per work item
// q_empty     products (1)                 -                         query            free, the same
// k_full[g]   load of the leader (1)       1 or 2 SW128 tiles of     mma, leader      blocked
//                                          each block
// k_empty[g]  products (1)                 -                         load             free
// v_full[g]   load of the leader (1)       2 SW128 tiles of each     mma, leader      blocked
//                                          block
// v_empty[g]  products (1)                 -                         load             free
// s_full[s]   products (1)                 -                         softmax          blocked, a phase per two tiles
// p_full      softmax warps of both (8)    -                         mma, leader      blocked
// out_full    products (1)                 -                         softmax          blocked
//
// "products" is a commit, which arrives in both blocks when everything issued before it is done. p_full of a tile also
// means that its scores have been read and, of a work item's first one, the last item's O; out_full that P may be
// overwritten, and O rescaled or read.
template <class C>
struct JointStorage {
    alignas(kSwizzleAtomBytes) u8 q[C::kSwTilesQk][kSw128Bytes];
    u8 k[C::kSwTilesQk][kSw128Bytes];                      // 64 keys
    u8 v[kValueGroups * kJointGroupSwTiles][kSw128Bytes];  // 128 keys x 256 dims
    u8 p[kHalves][kSw128Bytes];                            // 64 heads x 64 keys each
    float maxima[kStages][kHalves][kJointHeads], sums[kHalves][kJointHeads];
    MBarrier q_full, q_empty, k_full[kKeyGroups<C>], k_empty[kKeyGroups<C>];
    MBarrier v_full[kValueGroups], v_empty[kValueGroups], s_full[kStages], p_full, out_full;
    TmemAddr tmem;
};

template <class Storage>
MLA_DEVICE void init_joint_storage(Storage& s, u32 query_arrivals) {
    mbarrier_init(s.q_full, query_arrivals);
    mbarrier_init(s.q_empty, 1);
    for (MBarrier& barrier : s.k_full) mbarrier_init(barrier, 1);
    for (MBarrier& barrier : s.k_empty) mbarrier_init(barrier, 1);
    for (MBarrier& barrier : s.v_full) mbarrier_init(barrier, 1);
    for (MBarrier& barrier : s.v_empty) mbarrier_init(barrier, 1);
    for (MBarrier& barrier : s.s_full) mbarrier_init(barrier, 1);
    mbarrier_init(s.p_full, kPairBlocks * kWarpgroupWarps);
    mbarrier_init(s.out_full, 1);
    fence_mbarrier_init();
}

// ---- Loads -----------------------------------------------------------------------------------------------------
// The leader's barrier, which counts the fetches of both blocks.
MLA_DEVICE ClusterAddr of_leader(MBarrier& barrier) { return map_to_rank(smem_addr(&barrier), kPairLeader); }

// Called by one thread of each block before it fetches `bytes` of its own.
MLA_DEVICE void expect_of_both(MBarrier& full, u32 bytes, u32 rank) {
    if (rank == kPairLeader) mbarrier_arrive_expect_tx(full, kPairBlocks * bytes);
}

// ---- Products --------------------------------------------------------------------------------------------------
template <class Element, i32 kColumns, Major kMajorB>
struct JointProduct {
    TmemAddr d;

    MLA_DEVICE void operator()(MatrixDesc a, MatrixDesc b, bool accumulate) const {
        constexpr InstructionDesc kShape =
            make_instruction_desc<Element>(kPairBlocks * kJointHeads, kColumns, Major::K, kMajorB);
        tcgen05_pair_mma_f16(d, a, b, kShape, accumulate);
    }
};

// All in one thread of the leader: the scores of a tile, then the values of the tile before, which its softmax has had
// the time of the scores for. Columns are fetched anew as soon as they are multiplied.
template <class C, class Storage>
struct JointProducts {
    using Element = typename C::Element;

    Storage& s;
    TmemAddr tmem;

    // S, heads x keys: sums over columns.
    MLA_DEVICE void issue_scores(u32 tile) const {
        const auto ready = [&](i32 sw_tile) {
            if (sw_tile % kJointGroupSwTiles != 0) return;
            const i32 group = sw_tile / kJointGroupSwTiles;
            if (group > 0) tcgen05_pair_commit(s.k_empty[group - 1]);
            tmem_wait(s.k_full[group], tile % 2);
        };
        multiply_columns<C::kSwTilesQk>(
            k_major_matrix(smem_addr(s.q)), kSw128Bytes, k_major_matrix(smem_addr(s.k)), kSw128Bytes,
            JointProduct<Element, kJointKeys, Major::K>{JointColumns::scores(tmem, tile)}, ready);
        tcgen05_pair_commit(s.k_empty[kKeyGroups<C> - 1]);
        tcgen05_pair_commit(s.s_full[tile % kStages]);
    }

    // O, heads x dims: sums over keys.
    MLA_DEVICE void issue_values(u32 tile, bool accumulate) const {
        mbarrier_wait_cluster(s.p_full, tile % 2);
        tcgen05_fence_after_thread_sync();
#pragma unroll 1  // four products take longer than an iteration of the loop
        for (i32 group = 0; group < kValueGroups; ++group) {
            const i32 half = group % kHalves;
            tmem_wait(s.v_full[group], tile % 2);
            multiply_steps(
                k_major_matrix(smem_addr(s.p[half])), kKMajorStepBytes,
                mn_major_matrix(smem_addr(s.v[group * kJointGroupSwTiles]), kSw128Bytes), kMnMajorStepBytes,
                kTileKeys / kMmaK, accumulate || half > 0,
                JointProduct<Element, kHalves * kTileDims, Major::MN>{JointColumns::out(tmem, group / kHalves)});
            tcgen05_pair_commit(s.v_empty[group]);
        }
        tcgen05_pair_commit(s.out_full);
    }
};

// Called by a warp of the leader; `begin` waits until both blocks have Q of a work item.
template <class C, class Work, class Storage, class Begin>
MLA_DEVICE void run_joint_mma_role(const DecodeParams& p, i32 split, Storage& s, TmemAddr tmem, Begin begin) {
    if (!elect_issuer()) return;
    const JointProducts<C, Storage> products{s, tmem};
    u32 tiles = 0;            // scored
    bool accumulate = false;  // the last tile's values are added to O
    for_items<Work>(p, split, [&](const WorkItem& item) {
        begin();
        for (i32 tile = item.tile_begin; tile < item.tile_end; tile += kHalves) {
            products.issue_scores(tiles);
            if (tile + kHalves >= item.tile_end) tcgen05_pair_commit(s.q_empty);
            if (tiles > 0) products.issue_values(tiles - 1, accumulate);
            accumulate = tile > item.tile_begin;
            ++tiles;
        }
    });
    if (tiles > 0) products.issue_values(tiles - 1, accumulate);
}

// ---- Softmax ---------------------------------------------------------------------------------------------------
enum JointBarrier : i32 { RowsLower = 1, RowsUpper = 2 };  // of the two warps that share heads

// A thread has a head's scores of half of the keys, and half of its result. So two threads share a head: the same lane
// of warps w and w + 2.
template <class C, class Storage>
struct JointSoftmax {
    static constexpr i32 kPiece = 32;  // columns of tensor memory at a time
    using Element = typename C::Element;

    const DecodeParams& p;
    Storage& s;
    TmemAddr lanes;  // of the warp
    ClusterAddr p_full;
    i32 thread, head, half;
    float max, sum, row_max;  // `sum`: of this thread's keys
    u32 tiles = 0;

    MLA_DEVICE JointSoftmax(const DecodeParams& p, Storage& s, TmemAddr tmem, i32 thread)
        : p(p),
          s(s),
          lanes(own_lanes(tmem, thread)),
          p_full(of_leader(s.p_full)),
          thread(thread),
          head(thread % kJointHeads),
          half(thread / kJointHeads) {}

    MLA_DEVICE void reset() {
        max = kLowestMax;
        sum = 0.f;
        row_max = negative_infinity();
    }

    MLA_DEVICE void sync_heads() const {
        bar_sync(thread / kWarpThreads % 2 == 0 ? RowsLower : RowsUpper, kWarpgroupThreads / 2);
    }

    // Values of all tiles before this one are multiplied.
    MLA_DEVICE void wait_for_out() const { tmem_wait(s.out_full, (tiles - 1) % 2); }

    MLA_DEVICE void load(float (&x)[kPiece], TmemAddr from) const {
        tcgen05_ld_32x32b(x, from);
        tcgen05_wait_ld();
        pin_loaded(x);
    }

    MLA_DEVICE void rescale_out(float scale) const {
#pragma unroll 1
        for (i32 column = 0; column < kBlockDims; column += kPiece) {
            const TmemAddr at = JointColumns::out(lanes, 0).column(column);
            float x[kPiece];
            load(x, at);
#pragma unroll
            for (float& v : x) v *= scale;
            tcgen05_st_32x32b(at, x);
        }
        tcgen05_wait_st();
    }

    // The factor by which the new maximum rescales what was summed under the old one.
    MLA_DEVICE float move_max(float tile) {
        row_max = fmaxf(row_max, tile);
        const float to = is_far_above(tile, max) ? tile : max;
        const float scale = ex2_approx(max - to);
        sum *= scale;
        max = to;
        return scale;
    }

    // P of the piece in 16 bits, to [head][key] in shared memory.
    MLA_DEVICE void exponentiate(u32 (&words)[kTileKeys / 2], float (&scores)[kTileKeys]) {
        float scale_log2 = p.scale_log2;
        if (any_huge(max)) to_base_2(scores, scale_log2), scale_log2 = 1.f;
#pragma unroll
        for (i32 i = 0; i < kTileKeys; i += 2) {
            const float p0 = ex2_approx(fmaf(scores[i], scale_log2, -max));
            const float p1 = ex2_approx(fmaf(scores[i + 1], scale_log2, -max));
            sum += p0 + p1;
            words[i / 2] = cvt_x2(Element{}, p0, p1);
        }
    }

    MLA_DEVICE void store_p(const u32 (&words)[kTileKeys / 2]) const {
#pragma unroll
        for (i32 chunk = 0; chunk < kSw128Chunks; ++chunk) {
            const u32* const w = words + 4 * chunk;
            *reinterpret_cast<uint4*>(s.p[half] + sw128_offset(head, chunk)) = make_uint4(w[0], w[1], w[2], w[3]);
        }
        fence_proxy_async();
    }

    // `first` of the work item; `mask(scores, half)` hides absent and unseen tokens, and `mend()` may change the tile's
    // values.
    template <class Mask, class Mend>
    MLA_DEVICE void tile(bool first, Mask mask, Mend mend) {
        const u32 stage = tiles % kStages;
        float scores[kTileKeys];
        tmem_wait(s.s_full[stage], tiles / kStages % 2);
        const TmemAddr at = JointColumns::scores(lanes, tiles);
        tcgen05_ld_32x32b(reinterpret_cast<float (&)[kPiece]>(scores[0]), at);
        tcgen05_ld_32x32b(reinterpret_cast<float (&)[kPiece]>(scores[kPiece]), at.column(kPiece));
        tcgen05_wait_ld();
        pin_loaded(scores);
        mask(scores, half);
        float largest = scores[0];
#pragma unroll
        for (i32 i = 1; i < kTileKeys; ++i) largest = fmaxf(largest, scores[i]);
        s.maxima[stage][half][head] = largest;
        sync_heads();
        const float scale = move_max(fmaxf(largest, s.maxima[stage][half ^ 1][head]) * p.scale_log2);
        u32 words[kTileKeys / 2];
        exponentiate(words, scores);
        if (!first) {
            wait_for_out();
            if (__any_sync(kFullWarp, scale != 1.f)) rescale_out(scale);
        }
        mend();
        store_p(words);
        tcgen05_fence_before_thread_sync();
        __syncwarp();
        if (thread % kWarpThreads == 0) mbarrier_arrive_cluster(p_full);
        ++tiles;
    }

    // Statistics of the result, and the factor that makes a sum of weighted values one.
    MLA_DEVICE float finish(const WorkItem& item, const BlockHeads& heads, float total) const {
        const i32 row = heads.row0 + head;
        if (row >= heads.rows) return 0.f;
        if (half == 0) {
            store_row_lse(p, item, heads.kv_head, row, row_lse2(max, total));
            if (C::kWithRowMax) store_row_max(p, item, heads.kv_head, row, with_nan_of(total, row_max));
        }
        return output_factor(p, item, heads.kv_head, row, max, total);
    }

    // kPiece columns of the result from `column` of the thread's on.
    MLA_DEVICE void store_piece(const WorkItem& item, i64 offset, i32 column, const float (&x)[kPiece],
                                float factor) const {
        const bool whole = item.partial_index == kNotSplit;
        const i64 at = offset + half * kBlockDims + column;
        if (!whole || p.out_is_fp32) {
            float* const to = (whole ? static_cast<float*>(p.out) : p.partial_out) + at;
#pragma unroll
            for (i32 i = 0; i < kPiece; i += 4) {
                *reinterpret_cast<float4*>(to + i) =
                    make_float4(x[i] * factor, x[i + 1] * factor, x[i + 2] * factor, x[i + 3] * factor);
            }
            return;
        }
        u16* const to = static_cast<u16*>(p.out) + at;
#pragma unroll
        for (i32 i = 0; i < kPiece; i += 8) {
            u32 words[4];
#pragma unroll
            for (i32 j = 0; j < 4; ++j) {
                words[j] = cvt_x2(Element{}, x[i + 2 * j] * factor, x[i + 2 * j + 1] * factor);
            }
            *reinterpret_cast<uint4*>(to + i) = make_uint4(words[0], words[1], words[2], words[3]);
        }
    }

    // Stores a work item; `with`: it has at least one tile.
    MLA_DEVICE void store(const WorkItem& item, const BlockHeads& heads, bool with) {
        float total = 0.f;
        if (with) {
            s.sums[half][head] = sum;
            sync_heads();
            total = s.sums[0][head] + s.sums[1][head];
            wait_for_out();
        }
        const float factor = finish(item, heads, total);
        const i32 row = heads.row0 + head;
        const bool present = row < heads.rows;
        const i64 offset = item.partial_index == kNotSplit
                               ? item_out_offset<ScheduledWork>(p, item, heads.kv_head, present ? row : heads.row0)
                               : workspace_row(p, item.partial_index, heads.kv_head, row) * kHeadDimV;
#pragma unroll 1
        for (i32 column = 0; column < kBlockDims; column += kPiece) {
            float x[kPiece] = {};
            if (with) load(x, JointColumns::out(lanes, 0).column(column));
            if (present) store_piece(item, offset, column, x, factor);
        }
    }
};

// `mask(scores, item, tile)`: of half a joint tile, which is tile `tile` of the work item's or behind its last one.
template <class C, class Work, class Storage, class Mask>
MLA_DEVICE void run_joint_softmax_role(const DecodeParams& p, i32 split, const BlockHeads& heads, Storage& s,
                                       TmemAddr tmem, i32 thread, Mask mask) {
    JointSoftmax<C, Storage> softmax(p, s, tmem, thread);
    for_items<Work>(
        p, split,
        [&](const WorkItem& item) {
            softmax.reset();
            for (i32 tile = item.tile_begin; tile < item.tile_end; tile += kHalves) {
                softmax.tile(
                    tile == item.tile_begin, [&](auto& scores, i32 half) { mask(scores, item, tile + half); }, [] {});
            }
            softmax.store(item, heads, true);
        },
        [&](const WorkItem& item) {
            softmax.reset();
            softmax.store(item, heads, false);
        });
}

// Masks the keys of half a joint tile from `visible` on.
MLA_DEVICE void mask_keys_from(float (&scores)[kTileKeys], i32 visible) {
    if (visible >= kTileKeys) return;
#pragma unroll
    for (i32 i = 0; i < kTileKeys; ++i) {
        if (i >= visible) scores[i] = negative_infinity();
    }
}

// ---- Kernel ----------------------------------------------------------------------------------------------------
// Calls roles(warp, tensor memory) in every thread of both blocks, after `init` in one of each, which initialises the
// barriers; all roles reach the end.
template <class Storage, class Init, class Roles>
MLA_DEVICE void run_with_joint_memory(Storage& s, i32 mma_warp, Init init, Roles roles) {
    const i32 warp = uniform_warp();
    if (threadIdx.x == 0) init();
    if (warp == mma_warp) {
        tcgen05_pair_alloc<JointColumns::kAllocated>(s.tmem);
        tcgen05_pair_relinquish_alloc_permit();
    }
    tcgen05_fence_before_thread_sync();
    cluster_sync();
    tcgen05_fence_after_thread_sync();
    griddepcontrol_wait();  // before the first read of anything that an earlier kernel may have written
    const TmemAddr tmem = s.tmem;
    roles(warp, tmem);
    __syncwarp();
    tcgen05_fence_before_thread_sync();
    cluster_sync();  // the peer may still send to this block, and read it
    if (warp == mma_warp) {
        tcgen05_fence_after_thread_sync();
        tcgen05_pair_dealloc<JointColumns::kAllocated>(tmem);
    }
    griddepcontrol_launch_dependents();
}
}  // namespace mla::attention::sm100
