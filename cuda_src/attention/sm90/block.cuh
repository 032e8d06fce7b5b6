// A thread block of the attention kernels for Hopper: 64 query rows, 64-token tiles of the latent cache,
// warp-specialised roles. The kernels differ in how tiles arrive (decode/sm90_load.cuh,
// sparse_forward/sm90_gather_role.cuh).
#pragma once
#include "attention/decode_output.cuh"
#include "attention/row_block.cuh"
#include "attention/sm90/tile.cuh"
#include "common/limits.cuh"

namespace mla::attention::sm90 {
// What a kernel chooses. With kSparse_ a query's keys are a list of rows, all of them readable, instead of pages, and
// its largest score is wanted, too. With kTree_ a mask says which drafts a query sees. Work_ is what a split holds.
template <class Element_, i32 kHeadDimQk_, bool kSparse_, bool kTree_ = false, class Work_ = ScheduledWork>
struct Config : KeyTile<kHeadDimQk_> {
    using Element = Element_;
    static constexpr bool kSparse = kSparse_;
    static constexpr bool kTree = kTree_;
    static constexpr bool kWithRowMax = kSparse_;
    static constexpr bool kRedoesHugeRows = !kSparse_ && !Work_::kForms;  // see decode/sm90_huge_rows.cuh
    static constexpr bool kSkipsTokens = false;  // of a list, entries that are no tokens: see `present`
    using Work = Work_;
    // Tiles are written by cp.async, whose threads do not wait for it: the fence before WGMMA is the consumers'.
    static constexpr bool kFencedByConsumers = kSparse_;
    // The SW128 tile of Q that is kept in registers during a work item: P takes its place in shared memory.
    static constexpr i32 kResidentSwTile = KeyTile<kHeadDimQk_>::kSwTilesQk - 1;

    // Formats of the operands: of RoPE columns, and of all others and P.
    using Rope = Element_;
    using Latent = Element_;
    // Queries beside keys of another format have been multiplied by a power of two each, see store_query_row of
    // attention/sm90/record_query.cuh; then `Extra` has the inverses, `q_factors`.
    static constexpr bool kScaledQueries = false;
    static constexpr bool kValueScale = false;  // one for all values, in the parameters
    struct Extra {};
    static constexpr i32 kRaisedLog2 = 0;  // of weights: see attention/sm90/raised_weights.cuh

    // Products with values in two instructions of 128 columns each.
    static constexpr bool kHalvedProducts = false;

    static constexpr i32 kPBuffers = 1;
    template <class Storage>
    MLA_DEVICE static u8* second_p(Storage& s) {
        return s.q_resident();
    }
};

constexpr i32 kNothingResident = -1;

// ---- Budget ----------------------------------------------------------------------------------------------------
// role      warps    does
// left      0..3     owns O[:, :256]
// right     4..7     owns O[:, 256:]
// loaders   8..11    bring query rows and KV tiles
constexpr i32 kBlockM = 64;
constexpr i32 kMathThreads = 2 * kWarpgroupThreads;
constexpr i32 kThreads = 3 * kWarpgroupThreads;
constexpr i32 kRightWarp = kWarpgroupWarps, kLoaderWarp = 2 * kWarpgroupWarps;
constexpr i32 kRegsEntry = regs_at_entry(kThreads);

// ---- Storage ---------------------------------------------------------------------------------------------------
// barrier            arrives (count)      carries       waits          first phase
// kv_full[s].left    load (1)             kLeftBytes    left, right    blocked
//          or sparse gather (129)         -
// kv_full[s].right   load (1)             kRightBytes   left, right    blocked
//          or sparse gather (129)         -
// kv_empty[s].left   left warps (4)       -             load, gather   free
// kv_empty[s].right  right warps (4)      -             load, gather   free
// q_full             query threads (96)   -             left, right    blocked
//          or sparse gather (129)
// q_empty            math warps (8)       -             query, gather  free
// sums_ready[side]   its threads (128)    -             the other side blocked
//
// P of the tile in stage s goes to p(s). It needs no "free" barrier: it is overwritten only after the next tile has
// arrived in stage s, for which both warpgroups had to release that stage, and so had multiplied the previous P.
//
// What rows see of the two tiles that may have drafts comes with Q: the math warpgroups have no registers to compute
// it.
template <bool kTree>
struct TreeWords {};
template <>
struct TreeWords<true> {
    u64 of_tile[2][kBlockM];  // bit t: the row sees token t; first tile: that of the first draft
};

template <class C>
struct Storage {
    alignas(kSwizzleAtomBytes) u8 q[C::kTileBytes];  // the resident SW128 tile's place is p(1)
    u8 kv[kStagesKV][C::kTileBytes];
    u8 p_buffers[C::kPBuffers][kSw128Bytes];
    float running_max[kStagesKV][kBlockM];              // after the tile in that stage
    float sums[2][kBlockM];                             // left, right: their shares of l
    float right_row_max[C::kWithRowMax ? kBlockM : 1];  // the largest scores of the right warpgroup; sparse only
    u64 present[kStagesKV];    // bit t: token t of the tile is there; dense, or of lists with other entries
    i32 nonfinite_request[2];  // left, right: the last request in which sanitize_v found NaN or Inf
    HalfBarriers kv_full[kStagesKV], kv_empty[kStagesKV];
    MBarrier q_full, q_empty;
    MBarrier sums_ready[2];  // left, right: the share of l is in sums
    TreeWords<C::kTree> tree;
    u32 huge_rows[2];  // a bit for each row that has had huge scores, see decode/sm90_huge_rows.cuh
    typename C::Extra extra;

    MLA_DEVICE u8* q_resident() { return q + C::kResidentSwTile * kSw128Bytes; }
    MLA_DEVICE u8* p(i32 stage) { return stage == 0 ? p_buffers[0] : C::second_p(*this); }
};

// What every role knows.
template <class C>
struct Block : RowBlock<kBlockM, C::kTree, typename C::Work> {
    using Rows = RowBlock<kBlockM, C::kTree, typename C::Work>;
    Storage<C>& s;

    MLA_DEVICE Block(const DecodeParams& p, Storage<C>& s) : Rows(p), s(s) {}
};

// By one thread, before the block's first barrier.
template <class C>
MLA_DEVICE void init_storage(Storage<C>& s, u32 kv_arrivals, u32 q_arrivals) {
    for (i32 stage = 0; stage < kStagesKV; ++stage) {
        mbarrier_init(s.kv_full[stage].left, kv_arrivals);
        mbarrier_init(s.kv_full[stage].right, kv_arrivals);
        mbarrier_init(s.kv_empty[stage].left, kWarpgroupWarps);
        mbarrier_init(s.kv_empty[stage].right, kWarpgroupWarps);
    }
    mbarrier_init(s.q_full, q_arrivals);
    for (MBarrier& ready : s.sums_ready) mbarrier_init(ready, kWarpgroupThreads);
    mbarrier_init(s.q_empty, kMathThreads / kWarpThreads);
    fence_mbarrier_init();
    s.nonfinite_request[0] = s.nonfinite_request[1] = -1;
    if constexpr (C::kRedoesHugeRows) s.huge_rows[0] = s.huge_rows[1] = 0;
}
}  // namespace mla::attention::sm90
