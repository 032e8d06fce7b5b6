// Sparse MLA prefill on Hopper: each query attends to the rows of kv in its list.
//
//   S = Q K^T * scale            (64 heads x d_qk) (d_qk x 64 rows) per tile of 64 listed rows
//   P = exp2(S log2(e) - m)      m: running row maximum
//   l = sum of P,  O = P V       V is K's first 512 columns
//   out = O / (l + exp2(sink - m)),   lse = ln 2 (m + log2 l),   max_logits = max of S
//
// Grid: x = blocks of 64 heads, y = splits. To the schedule a query is a request, and its list a line of the block
// table, with one-token pages (attention/decode_params.cuh). One block per SM iterates over the queries of its split
// (attention/split_work.cuh). No cluster.
//
// The order of steps is dense decode's seesaw (decode/sm90_seesaw.cu). A whole warpgroup gathers the keys, row by row:
//
//   left    | softmax 0 | O_L += P0 V0_L |          | O_L += P1 V1_L | S0 = Q K0'            | softmax 0'
//   right   |   S1      |  softmax 1     | O_R += P0 V0_R | O_R += P1 V1_R | S1 = Q K1'      | ...
//   gather  |           |       K0'_left ->  K1'_left, K0'_right ->  K1'_right ->   ... and Q of the next query
//
// Source: FlashMLA's sparse prefill (2025) also gathers with one warpgroup and cp.async. What differs: the lists hold
// valid rows only and may have any length, so only a list's last tile is masked; the work is balanced for any lengths;
// Q is gathered like a tile of keys, while the previous result is stored.
#include "attention/sm90/two_warpgroups.cuh"
#include "common/limits.cuh"
#include "sparse_forward/sm90_gather_role.cuh"
#include "tile/warp.cuh"

namespace mla::sparse_forward {
// ---- Variant ---------------------------------------------------------------------------------------------------
struct Tile : PairTile<MLA_DTYPE, MLA_HEAD_DIM_QK> {
    static constexpr bool kFencedByConsumers = true;  // gathered by cp.async
};

// ---- Budget ----------------------------------------------------------------------------------------------------
// role          warps    regs   does
// left          0..3     224    even tiles: S0, softmax
// right         4..7     224    odd tiles:  S1, softmax
// gather        8..11    56     tiles of listed rows, and Q
constexpr i32 kRegsMath = 224;
constexpr i32 kRegsGather = 56;
static_assert(2 * kRegsMath + kRegsGather <= 3 * kRegsEntry, "what the block has at entry");
static_assert(kTileTokens == kSw128Rows && kBlockM == kSw128Rows, "a tile is 64 rows, of kv and of Q");

// ---- Storage ---------------------------------------------------------------------------------------------------
// barrier            arrives (count)      waits          first phase
// kv_full[s].left    gather (129)         left, right    blocked
// kv_full[s].right   gather (129)         left, right    blocked
// kv_empty[s].left   left warps (4)       gather         free
// kv_empty[s].right  right warps (4)      gather         free
// q_full             gather (129)         left, right    blocked
// q_empty            math warps (8)       gather         free
// sums_ready[side]   its threads (128)    the other side blocked
struct RowMaxima {
    float right_row_max[kBlockM];  // the largest scores of the right warpgroup
};

struct NoExtra {};
using Storage = PairStorage<Tile, RowMaxima, NoExtra>;
static_assert(sizeof(Storage) <= kMaxDynamicSmem, "shared memory");

using Block = PairBlock<Storage, ScheduledWork>;

// Named barriers, as in decode/sm90_seesaw.cu: the first arrives, the second syncs.
// MaxReady    left -> right   the maximum after tile 0 is in running_max[0]
// P0Ready     left -> right   P0 is in p(0)
// P1Ready     right -> left   the maximum after tile 1 is in running_max[1], and P1 in p(1)
enum NamedBarrier : i32 { MaxReady = FirstFreeBarrier, P0Ready, P1Ready };

MLA_DECODE_FACTS();
MLA_FACT(threads, kThreads);
MLA_FACT(smem_bytes, sizeof(Storage));
MLA_FACT(block_m, kBlockM);

// ---- Gather role -----------------------------------------------------------------------------------------------
// The block's heads of a query are gathered like a tile of keys; those past the last one become zeros.
struct QueryGather {
    const Block& block;

    MLA_DEVICE RowSources heads(i32 query, i32 thread) const {
        const DecodeParams& p = block.p;
        RowNumbers numbers;
#pragma unroll
        for (i32 i = 0; i < kRowsPerThread; ++i) numbers.of[i] = block.row0 + first_row_of(thread) + i;
        return rows_by_number(p.q + query * p.q_stride_b_elems, p.q_stride_h_elems, p.h_q, numbers, thread);
    }

    MLA_DEVICE void prefetch(i32 query, i32 thread) const {
        prefetch_rows(heads(query, thread), Tile::kSwTilesQk, thread);
    }

    MLA_DEVICE void gather(i32 query, i32 thread) const {
        const RowSources rows = heads(query, thread);
#pragma unroll
        for (i32 i = 0; i < Tile::kSwTilesQk; ++i) {
            gather_sw_tile(smem_addr(block.s.q), rows, Tile::sw_tile_in_order(i), kQueryPolicy, thread);
        }
    }
};

// ---- A pair of tiles -------------------------------------------------------------------------------------------
// All rows see the same tokens, and past a list's end there are zeros: values need no cleaning.

// S of the tile in `stage`: `tile_maxima` are its rows' maxima.
MLA_DEVICE void score_tile(Block& block, Math& math, float (&tile_maxima)[kFragmentRows],
                           float (&scale_log2)[kFragmentRows], const WorkItem& item, i32 tile, i32 stage, i32 thread) {
    start_scores(block.s, math, stage);
    finish(math);
    if (!ScheduledWork::all_rows_see(item, tile)) {  // a list's last tile
        i32 row = block.row0 + fragment_row(thread);
        opaque(row);
        mask_hidden_rows<ScheduledWork>(math.scores, block.p, item, tile, row, ~0ull, thread);
    }
    scale_log2[0] = scale_log2[1] = block.p.scale_log2;
    tile_max(tile_maxima, math.scores, scale_log2);  // not fused with the scale: that spills (NVRTC 12.9)
}

// P of the tile in `stage`, which becomes the other warpgroup's too.
MLA_DEVICE void weigh_tile(Storage& s, Math& math, const float (&scale_log2)[kFragmentRows], i32 stage, i32 thread) {
    exponentiate<Tile::Latent>(math.p_fragment, math.rows, math.scores, scale_log2);
    store_sw128(s.p(stage), math.p_fragment, thread);
    bar_arrive(stage == 0 ? P0Ready : P1Ready, kMathThreads);
}

// O += P V of the own tile, and of the other warpgroup's; then the stage is free.
template <bool kRight>
MLA_DEVICE void add_own_tile(Storage& s, Math& math, const RowScale& scale, i32 stage, i32 thread) {
    rescale(math.out, scale);
    start_own_product<kRight>(s, math, stage);
    finish(math);
    release(kRight ? s.kv_empty[stage].right : s.kv_empty[stage].left, thread);
    math.ring.advance(stage);
}
template <bool kRight>
MLA_DEVICE void add_other_tile(Storage& s, Math& math, const RowScale& scale, i32 stage, i32 thread) {
    rescale(math.out, scale);
    start_other_product<kRight>(s, math, stage);
    finish(math);
    release(kRight ? s.kv_empty[stage].right : s.kv_empty[stage].left, thread);
    math.ring.advance(stage);
}

// Waits for `ready`; the maximum after the tile in `stage` becomes this warpgroup's.
MLA_DEVICE RowScale take_max(Storage& s, Math& math, NamedBarrier ready, i32 stage, i32 thread) {
    float maxima[kFragmentRows];
    bar_sync(ready, kMathThreads);
    load_rows(maxima, s.running_max[stage], thread);
    return math.rows.move_max(maxima);
}

// The left warpgroup's share of tiles `tile` and `tile + 1`.
MLA_DEVICE void left_pair(Block& block, Math& math, const WorkItem& item, i32 tile, i32 thread) {
    Storage& s = block.s;
    float scale_log2[kFragmentRows], tile_maxima[kFragmentRows], maxima[kFragmentRows];
    score_tile(block, math, tile_maxima, scale_log2, item, tile, 0, thread);
    lazy_max(maxima, math.rows, tile_maxima);
    store_rows(s.running_max[0], maxima, thread);
    bar_arrive(MaxReady, kMathThreads);
    const RowScale even_scale = math.rows.move_max(maxima);
    weigh_tile(s, math, scale_log2, 0, thread);
    add_own_tile<false>(s, math, even_scale, 0, thread);
    if (tile + 1 == item.tile_end) return;
    const RowScale odd_scale = take_max(s, math, P1Ready, 1, thread);
    add_other_tile<false>(s, math, odd_scale, 1, thread);
}

// The right warpgroup's share of the same tiles if both exist ...
MLA_DEVICE void right_pair(Block& block, Math& math, const WorkItem& item, i32 tile, i32 thread) {
    Storage& s = block.s;
    float scale_log2[kFragmentRows], tile_maxima[kFragmentRows], maxima[kFragmentRows];
    score_tile(block, math, tile_maxima, scale_log2, item, tile + 1, 1, thread);
    const RowScale even_scale = take_max(s, math, MaxReady, 0, thread);
    lazy_max(maxima, math.rows, tile_maxima);
    store_rows(s.running_max[1], maxima, thread);
    const RowScale odd_scale = math.rows.move_max(maxima);
    weigh_tile(s, math, scale_log2, 1, thread);
    bar_sync(P0Ready, kMathThreads);
    add_other_tile<true>(s, math, even_scale, 0, thread);
    add_own_tile<true>(s, math, odd_scale, 1, thread);
}

// ... and if only the even one does.
MLA_DEVICE void right_last(Block& block, Math& math, i32 thread) {
    const RowScale even_scale = take_max(block.s, math, MaxReady, 0, thread);
    bar_sync(P0Ready, kMathThreads);
    add_other_tile<true>(block.s, math, even_scale, 0, thread);
}

// ---- Math roles ------------------------------------------------------------------------------------------------
template <bool kRight>
MLA_DEVICE void add_tiles(Block& block, Math& math, const WorkItem& item, i32 thread) {
    i32 tile = item.tile_begin;
    if constexpr (!kRight) {
#pragma unroll 1
        for (; tile < item.tile_end; tile += 2) left_pair(block, math, item, tile, thread);
    } else {
#pragma unroll 1
        for (; tile + 1 < item.tile_end; tile += 2) right_pair(block, math, item, tile, thread);
        if (tile < item.tile_end) right_last(block, math, thread);
    }
}

template <bool kRight>
MLA_DEVICE void run_math_role(Block& block, i32 thread) {
    Math math;
    WorkItem item;
    for (WorkIterator walk(block.p, block.split, block.hidden); walk.next(block.p, item);) {
        math.reset();
        float sums[kFragmentRows] = {0.f, 0.f};
        if (item.tile_begin < item.tile_end) {
            load_q_resident(block.s, math, thread);
            add_tiles<kRight>(block, math, item, thread);
            total_sums<kRight, /*kWithRowMax=*/true>(sums, block.s, math, thread);
            release(block.s.q_empty, thread);  // not earlier: the next work item may overwrite data that was read above
        }
        store_result<kRight, /*kWithRowMax=*/true>(block, item, math, sums, block.row0, thread);
    }
}

// ---- Kernel ----------------------------------------------------------------------------------------------------
extern "C" __global__ void __launch_bounds__(kThreads, 1)
    mla_sparse_forward_sm90(const __grid_constant__ DecodeParams p) {
    extern __shared__ __align__(kSwizzleAtomBytes) u8 smem[];
    Storage& s = *reinterpret_cast<Storage*>(smem);
    Block block(p, s);
    if (threadIdx.x == 0) s.init(kGatherArrivals, kGatherArrivals);
    __syncthreads();
    griddepcontrol_wait();  // before the first read of anything that an earlier kernel may have written

    const i32 warp = uniform_warp();
    const i32 thread = threadIdx.x % kWarpgroupThreads;
    if (warp < kRightWarp) {
        setmaxnreg_inc<kRegsMath>();
        run_math_role<false>(block, thread);
    } else if (warp < kLoaderWarp) {
        setmaxnreg_inc<kRegsMath>();
        run_math_role<true>(block, thread);
    } else {
        setmaxnreg_dec<kRegsGather>();
        run_gather_role<Tile>(p, s, block.split, QueryGather{block}, thread);
    }
    griddepcontrol_launch_dependents();
}
}  // namespace mla::sparse_forward
