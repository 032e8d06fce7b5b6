// A block of decode on Hopper: 64 query rows, 64-token tiles of the latent cache, roles by warp. The kernels in sm90/
// differ in how tiles arrive and in the order in which their two math warpgroups take the products; what they share is
// here.
//
// Before it includes this, a kernel says `constexpr bool kSparse`: a query's keys are a list of rows (of which all can
// be read) instead of pages, and its largest scores are wanted.
#pragma once
#include "attention/decode_output.cuh"
#include "attention/decode_tile_sm90.cuh"
#include "attention/dtype_variant.cuh"

// ---- Budget ----------------------------------------------------------------------------------------------------
// role    warps    does
// left    0..3     owns O[:, :256]
// right   4..7     owns O[:, 256:]
// others  8..11    bring query rows and KV tiles: decode_load_sm90.cuh, or gather_role_sm90.cuh
constexpr i32 kBlockM = 64;
constexpr i32 kMathThreads = 2 * kWarpgroupThreads;
constexpr i32 kThreads = 3 * kWarpgroupThreads;
constexpr i32 kRegsEntry = 168;  // 65536 / 384, in eights

// The panel of Q that is kept in registers while a fragment lasts: its place is taken by P.
constexpr i32 kResidentPanel = kPanelsQk - 1;

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
// arrived in stage s, for which both warpgroups had to release that stage, and so had multiplied the P before.
struct Storage {
    alignas(kSwizzleAtomBytes) u8 q[kTileBytes];  // the place of the resident panel is p(1)
    u8 kv[kStagesKV][kTileBytes];
    u8 p0[kPanelBytes];
    float row_max[kStagesKV][kBlockM];  // the running maximum after the tile in that stage
    float sums[2][kBlockM];             // left, right: their shares of l
    float right_top[kBlockM];           // the largest scores that the right warpgroup has seen; sparse only
    u64 present[kStagesKV];             // bit t: the page of token t of the tile is in the pool; dense only
    i32 unclean_request[2];             // left, right: the last one that clean_values took something out of; dense only
    HalfBarriers kv_full[kStagesKV], kv_empty[kStagesKV];
    MBarrier q_full, q_empty;
    MBarrier sums_ready[2];  // left, right: the share of l is in sums

    MLA_DEVICE u8* q_resident() { return q + kResidentPanel * kPanelBytes; }
    MLA_DEVICE u8* p(i32 stage) { return stage == 0 ? p0 : q_resident(); }
};
static_assert(sizeof(Storage) <= 232448, "a block has 227 KB of shared memory");

MLA_DECODE_FACTS();
MLA_FACT(threads, kThreads);
MLA_FACT(smem_bytes, sizeof(Storage));
MLA_FACT(block_m, kBlockM);

// What every role knows.
struct Block {
    const DenseDecodeParams& p;
    Storage& s;
    i32 part, kv_head;
    i32 row0, rows;  // first row of the KV head in this block; rows of the KV head
    i32 hidden;      // tokens at a request's end that the block's first row does not see

    MLA_DEVICE Block(const DenseDecodeParams& p, Storage& s) : p(p), s(s), part(blockIdx.y), rows(query_rows(p)) {
        const i32 row_blocks = ceil_div(rows, kBlockM);
        kv_head = blockIdx.x / row_blocks;
        row0 = blockIdx.x % row_blocks * kBlockM;
        hidden = -visible_tokens(p, row0, 0);
    }

    // First token of a request that not every row of the block sees. (A division a tile would cost more than it.)
    MLA_DEVICE i32 seen_by_all(const Fragment& fragment) const { return fragment.tokens - hidden; }
};

// By one thread, before the block's first barrier.
MLA_DEVICE void init_storage(Storage& s, u32 kv_arrivals, u32 q_arrivals) {
    for (i32 stage = 0; stage < kStagesKV; ++stage) {
        mbarrier_init(s.kv_full[stage].left, kv_arrivals);
        mbarrier_init(s.kv_full[stage].right, kv_arrivals);
        mbarrier_init(s.kv_empty[stage].left, kWarpgroupThreads / kWarpThreads);
        mbarrier_init(s.kv_empty[stage].right, kWarpgroupThreads / kWarpThreads);
    }
    mbarrier_init(s.q_full, q_arrivals);
    for (MBarrier& ready : s.sums_ready) mbarrier_init(ready, kWarpgroupThreads);
    mbarrier_init(s.q_empty, kMathThreads / kWarpThreads);
    fence_mbarrier_init();
    s.unclean_request[0] = s.unclean_request[1] = -1;
}
