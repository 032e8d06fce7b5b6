// A block of dense decode on Hopper: 64 query rows, 64-token tiles of the latent cache, roles by warp. The kernels in
// sm90/ differ in the order in which their two math warpgroups take the products; what they share is here.
#pragma once
#include "attention/decode_output.cuh"
#include "ptx/copy.cuh"
#include "tile/panel.cuh"
#include "tile/ring.cuh"

using Element = MLA_DTYPE;

// ---- Budget ----------------------------------------------------------------------------------------------------
// role    warps    does
// left    0..3     owns O[:, :256]
// right   4..7     owns O[:, 256:]
// load    8        KV tiles, page by page, into the two stages
// query   9..11    the query rows of each fragment
constexpr i32 kBlockM = 64;
constexpr i32 kStagesKV = 2;
constexpr i32 kMathThreads = 2 * kWarpgroupThreads;
constexpr i32 kQueryThreads = 3 * kWarpThreads;
constexpr i32 kThreads = 3 * kWarpgroupThreads;
constexpr i32 kRegsEntry = 168;  // 65536 / 384, in eights

constexpr i32 kPanelsQk = kHeadDimQk / kPanelColumns;       // 9
constexpr i32 kPanelsHalf = kHeadDimV / 2 / kPanelColumns;  // 4: one half of the values
constexpr i32 kRopePanel = 8;
constexpr u32 kTileBytes = kPanelsQk * kPanelBytes;
// A tile arrives, and is released, in two halves: what a warpgroup multiplies P with; the rope panel comes with the
// left one, which is scored first.
constexpr u32 kHalfBytes = kPanelsHalf * kPanelBytes;
constexpr u32 kLeftBytes = kHalfBytes + kPanelBytes;  // panels 8, 0..3
constexpr u32 kRightBytes = kHalfBytes;               // panels 4..7
static_assert(kLeftBytes + kRightBytes == kTileBytes, "the halves are the tile");

// Every fragment starts at stage 0.
MLA_DEVICE i32 stage_of(const Fragment& fragment, i32 tile) { return (tile - fragment.tile_begin) & (kStagesKV - 1); }

// ---- Storage ---------------------------------------------------------------------------------------------------
// barrier            arrives (count)      carries       waits          first phase
// kv_full[s].left    load (1)             kLeftBytes    left, right    blocked
// kv_full[s].right   load (1)             kRightBytes   left, right    blocked
// kv_empty[s].left   left warps (4)       -             load           free
// kv_empty[s].right  right warps (4)      -             load           free
// q_full             query threads (96)   -             left, right    blocked
// q_empty            math warps (8)       -             query          free
//
// P of the tile in stage s goes to p(s). It needs no "free" barrier: it is overwritten only after the next tile has
// arrived in stage s, for which both warpgroups had to release that stage, and so had multiplied the P before.
struct HalfBarriers {
    MBarrier left, right;
};

struct Storage {
    alignas(kSwizzleAtomBytes) u8 q[kTileBytes];  // panel 8 is kept in registers, and its place is p(1)
    u8 kv[kStagesKV][kTileBytes];
    u8 p0[kPanelBytes];
    float row_max[kStagesKV][kBlockM];  // the running maximum after the tile in that stage
    float sums[2][kBlockM];             // left, right: their shares of l
    u64 present[kStagesKV];             // bit t: the page of token t of the tile is in the pool
    i32 unclean_request[2];             // left, right: the last request that clean_values took something out of
    HalfBarriers kv_full[kStagesKV], kv_empty[kStagesKV];
    MBarrier q_full, q_empty;

    MLA_DEVICE u8* q_rope() { return q + kRopePanel * kPanelBytes; }
    MLA_DEVICE u8* p(i32 stage) { return stage == 0 ? p0 : q_rope(); }
};
static_assert(sizeof(Storage) <= 232448, "a block has 227 KB of shared memory");

MLA_DECODE_FACTS();
MLA_FACT(threads, kThreads);
MLA_FACT(smem_bytes, sizeof(Storage));
MLA_FACT(block_m, kBlockM);

// What every role knows.
struct Block {
    const DenseDecodeParams& p;
    const TensorMap& kv_map;
    Storage& s;
    i32 part, kv_head;
    i32 row0, rows;  // first row of the KV head in this block; rows of the KV head
    i32 hidden;      // tokens at a request's end that the block's first row does not see

    MLA_DEVICE Block(const DenseDecodeParams& p, const TensorMap& kv_map, Storage& s)
        : p(p), kv_map(kv_map), s(s), part(blockIdx.y), rows(query_rows(p)) {
        const i32 row_blocks = ceil_div(rows, kBlockM);
        kv_head = blockIdx.x / row_blocks;
        row0 = blockIdx.x % row_blocks * kBlockM;
        hidden = -visible_tokens(p, row0, 0);
    }

    // First token of a request that not every row of the block sees. (A division a tile would cost more than it.)
    MLA_DEVICE i32 seen_by_all(const Fragment& fragment) const { return fragment.tokens - hidden; }
};

// By one thread, before the block's first barrier.
MLA_DEVICE void init_storage(Storage& s, const TensorMap& kv_map) {
    prefetch_tensormap(kv_map);
    for (i32 stage = 0; stage < kStagesKV; ++stage) {
        mbarrier_init(s.kv_full[stage].left, 1);
        mbarrier_init(s.kv_full[stage].right, 1);
        mbarrier_init(s.kv_empty[stage].left, kWarpgroupThreads / kWarpThreads);
        mbarrier_init(s.kv_empty[stage].right, kWarpgroupThreads / kWarpThreads);
    }
    mbarrier_init(s.q_full, kQueryThreads);
    mbarrier_init(s.q_empty, kMathThreads / kWarpThreads);
    fence_mbarrier_init();
    s.unclean_request[0] = s.unclean_request[1] = -1;
}
