// Dense MLA decode on Hopper for few query rows: memory-bound, so a tile of keys is held as briefly as possible.
//
//   S^T = K Q^T * scale           (64 x 576) (576 x rows) per tile of 64 tokens
//   P^T = exp2(S^T log2(e) - m)   m: running maximum of each row
//   l = sum of P,  O^T = V^T P^T  (512 x 64) (64 x rows); V is K's first 512 columns
//   out = O / l,   lse = ln 2 (m + log2 l)
//
// Grid: x = KV heads (up to 32 rows each: s_q * h_q / h_kv), y = splits. One block per SM iterates over the work items
// of its split (attention/split_work.cuh).
//
// One warpgroup does all the math, one warp keeps two tiles of keys in flight, and the query rows of the next work item
// are loaded while the current one is processed. A tile arrives in three groups of SW128 tiles, each scored as soon as
// it is there, and is released as a whole:
//
//   math    | S^T group 0, 1, 2 | max, P | O^T += V^T P^T | S'^T group 0, 1, 2 | ...
//   load    |        K' groups 0, 1, 2 ->                 | K'' groups 0, 1, 2 ->
//   query   |              Q of the next work item
//
// Source: swapped operands for few query rows are FlashMLA-ETAP's idea (2025). What differs: a single math warpgroup,
// and V^T is read from the tile of keys without a transpose.
#include "attention/sm90/nonfinite_values.cuh"
#include "attention/sm90/swapped.cuh"
#include "decode/sm90_load.cuh"
#include "ptx/control.cuh"
#include "tile/warp.cuh"

namespace mla::decode {
// ---- Variant ---------------------------------------------------------------------------------------------------
using Element = MLA_DTYPE;
constexpr i32 kBlockRows = MLA_BLOCK_ROWS;

// SW128 tiles arrive in the order of their columns, in groups.
struct Tile : KeyTile<kMaxHeadDimQk> {
    static constexpr i32 kGroupSwTiles = 3;
    static constexpr i32 kGroups = kSwTilesQk / kGroupSwTiles;
    static constexpr u32 kGroupBytes = kGroupSwTiles * kSw128Bytes;
    static_assert(kSwTilesQk % kGroupSwTiles == 0, "groups of one size");

    MLA_DEVICE static constexpr i32 sw_tile_in_order(i32 i) { return i; }
};

// ---- Budget ----------------------------------------------------------------------------------------------------
// role     warps    does
// math     0..3     S^T, softmax, O^T
// load     4        KV tiles:   decode/sm90_load.cuh
// query    5..7     query rows: the same
constexpr i32 kLoadWarp = kWarpgroupWarps, kQueryWarp = kLoadWarp + 1;
constexpr i32 kThreads = kWarpgroupThreads + kWarpThreads + kQueryThreads;
constexpr i32 kStagesQ = 2;
constexpr u32 kQSwTileBytes = kHeadSwTileBytes<kBlockRows>;
static_assert(kTileTokens == kSw128Rows, "a tile is 64 tokens");

// ---- Storage ---------------------------------------------------------------------------------------------------
// barrier           arrives (count)       carries        waits    first phase
// kv_full[s][g]     load (1)              kGroupBytes    math     blocked
// kv_empty[s]       math warps (4)        -              load     free
// q_full[s]         query threads (96)    -              math     blocked
// q_empty[s]        math warps (4)        -              query    free
//
// P needs no barrier of its own: it is overwritten after the next tile's maxima have been exchanged, before which every
// warp has finished with the product that read it.
struct Storage {
    alignas(kSwizzleAtomBytes) u8 kv[kStagesKV][Tile::kTileBytes];
    u8 q[kStagesQ][Tile::kSwTilesQk][kQSwTileBytes];
    u8 p[kQSwTileBytes];                             // [row][token]
    float warp_values[kWarpgroupWarps][kBlockRows];  // maxima, then sums, of each warp's tokens
    HeadStats<kBlockRows> stats;
    u64 present[kStagesKV];  // bit t: the page of token t of the tile is in the pool
    i32 nonfinite_request;   // the last request in which sanitize_rows found NaN or Inf
    MBarrier kv_full[kStagesKV][Tile::kGroups], kv_empty[kStagesKV];
    MBarrier q_full[kStagesQ], q_empty[kStagesQ];
};
static_assert(sizeof(Storage) <= kMaxDynamicSmem, "shared memory");

MLA_DECODE_FACTS();
MLA_FACT(threads, kThreads);
MLA_FACT(smem_bytes, sizeof(Storage));
MLA_FACT(block_rows, kBlockRows);

// MathOnly: within the math warpgroup.
enum NamedBarrier : i32 { MathOnly = 1 };

struct Block : RowBlock<kBlockRows> {
    Storage& s;

    MLA_DEVICE Block(const DecodeParams& p, Storage& s) : RowBlock<kBlockRows>(p), s(s) {}
};

// By one thread, before the block's first barrier.
MLA_DEVICE void init_storage(Storage& s) {
    for (i32 stage = 0; stage < kStagesKV; ++stage) {
        for (MBarrier& full : s.kv_full[stage]) mbarrier_init(full, kLoadArrivals);
        mbarrier_init(s.kv_empty[stage], kWarpgroupWarps);
    }
    for (i32 stage = 0; stage < kStagesQ; ++stage) {
        mbarrier_init(s.q_full[stage], kQueryThreads);
        mbarrier_init(s.q_empty[stage], kWarpgroupWarps);
    }
    fence_mbarrier_init();
    s.nonfinite_request = -1;
}

// ---- Load role -------------------------------------------------------------------------------------------------
struct GroupLoader {
    Block& block;
    const TensorMap& kv_map;
    i32 stage;
    Ring<kStagesKV> ring;

    MLA_DEVICE void operator()(const TileBoxes& boxes, const WorkItem&, i32) {
        Storage& s = block.s;
        const u64 present = boxes.present_tokens();
        mbarrier_wait(s.kv_empty[stage], ring.empty_parity(stage));
        if (boxes.lane == 0) {
            s.present[stage] = present;
            for (MBarrier& full : s.kv_full[stage]) mbarrier_arrive_expect_tx(full, Tile::kGroupBytes);
        }
        __syncwarp();
        for (i32 group = 0; group < Tile::kGroups; ++group) {
            const i32 first = group * Tile::kGroupSwTiles;
            boxes.load<Tile>(smem_addr(s.kv[stage]), kv_map, s.kv_full[stage][group], block.kv_head, first,
                             first + Tile::kGroupSwTiles);
        }
        ring.advance(stage);
        stage ^= 1;
    }
};

// ---- Math role -------------------------------------------------------------------------------------------------
struct Math : SwappedMath<kBlockRows, kSwTilesV> {
    i32 stage, q_stage;
    Ring<kStagesKV> ring;
    Ring<kStagesQ> q_ring;
};

// S^T of the tile in the current stage, each group as soon as it has arrived.
MLA_DEVICE void score(Storage& s, Math& math) {
    const SmemDesc k = uniform(k_major_desc(smem_addr(s.kv[math.stage])));
    const SmemDesc q = uniform(k_major_desc(smem_addr(s.q[math.q_stage])));
    const u32 parity = math.ring.full_parity(math.stage);
    pin(math.scores);
#pragma unroll
    for (i32 i = 0; i < Tile::kSwTilesQk; ++i) {
        if (i % Tile::kGroupSwTiles == 0) {
            mbarrier_wait(s.kv_full[math.stage][i / Tile::kGroupSwTiles], parity);
            wgmma_fence();
        }
        add_scores(Element{}, math.scores, advance(k, i * kSw128Bytes), advance(q, i * kQSwTileBytes), i > 0);
    }
    wgmma_commit_group();
    wgmma_wait_group<0>();
    pin(math.scores);
}

// Most tiles hide nothing.
MLA_DEVICE void mask_tile(const Block& block, Math& math, const WorkItem& item, i32 tile, i32 thread) {
    const u64 present = block.s.present[math.stage];
    if ((tile + 1) * kTileTokens <= item.seen_by_all && present == ~0ull) return;
    i32 row0 = block.row0;
    opaque(row0);  // otherwise the divisions below are hoisted, and their results occupy registers in the loop
    KeyMask<kBlockRows> mask;
    mask.present = present;
#pragma unroll
    for (i32 k = 0; k < kHeadsOfThread<kBlockRows>; ++k) {
        const i32 visible = visible_tokens(block.p, item, row0 + kth_head(k, thread));
        mask.visible[k] = min(visible, item.tokens) - tile * kTileTokens;
    }
    mask_keys(math.scores, mask, thread);
}

// Makes V finite where not every row of the block sees the token; all scores of the tile must be done. The proxy fence
// after P covers these writes, too.
MLA_DEVICE void sanitize_v(const Block& block, const Math& math, const WorkItem& item, i32 tile, i32 thread) {
    const i32 seen_by_all = item.seen_by_all - tile * kTileTokens;
    if (seen_by_all >= kTileTokens) return;
    sanitize_rows<Element, kSwTilesV>(block.s.kv[math.stage], max(seen_by_all, 0), item.tokens - tile * kTileTokens,
                                      block.s.nonfinite_request, item.request, thread);
}

MLA_DEVICE void process_tile(Block& block, Math& math, const WorkItem& item, i32 tile, i32 thread) {
    Storage& s = block.s;
    const float scale_log2 = block.p.scale_log2;
    score(s, math);
    if (tile + 1 == item.tile_end) release(s.q_empty[math.q_stage], thread);
    mask_tile(block, math, item, tile, thread);
    update_maxima(math, s.warp_values, scale_log2, MathOnly, thread);
    sanitize_v(block, math, item, tile, thread);
    store_p(Element{}, math, smem_addr(s.p), scale_log2, thread);
    bar_sync(MathOnly, kWarpgroupThreads);
    add_values(Element{}, math.out, uniform(mn_major_desc(smem_addr(s.kv[math.stage]))),
               uniform(k_major_desc(smem_addr(s.p))));
    release(s.kv_empty[math.stage], thread);
    math.ring.advance(math.stage);
    math.stage ^= 1;
}

MLA_DEVICE void run_math_role(Block& block, i32 thread) {
    const DecodeParams& p = block.p;
    Storage& s = block.s;
    const BlockHeads rows{block.kv_head, block.row0, block.rows};
    Math math;
    math.stage = math.q_stage = 0;
    WorkItem item;
    for (WorkIterator walk(p, block.split, block.hidden); walk.next(p, item);) {
        math.reset();
        if (item.tile_begin < item.tile_end) {
            mbarrier_wait(s.q_full[math.q_stage], math.q_ring.full_parity(math.q_stage));
#pragma unroll 1
            for (i32 tile = item.tile_begin; tile < item.tile_end; ++tile) {
                process_tile(block, math, item, tile, thread);
            }
            math.q_ring.advance(math.q_stage);
            math.q_stage ^= 1;
        }
        store_result</*kWithRowMax=*/false>(Element{}, p, item, rows, math, s.warp_values, s.stats, 0, true, MathOnly,
                                            thread);
        if (s.nonfinite_request == item.request) fixup_nonfinite<Element, kHeadDimV>(block, item, 0, thread);
    }
}

// ---- Kernel ----------------------------------------------------------------------------------------------------
extern "C" __global__ void __launch_bounds__(kThreads, 1)
    mla_decode_sm90_small(const __grid_constant__ DecodeParams p, const __grid_constant__ TensorMap kv_map) {
    extern __shared__ __align__(kSwizzleAtomBytes) u8 smem[];
    Storage& s = *reinterpret_cast<Storage*>(smem);
    Block block(p, s);
    if (threadIdx.x == 0) {
        prefetch_tensormap(kv_map);
        init_storage(s);
    }
    __syncthreads();
    griddepcontrol_wait();  // before the first read of anything that an earlier kernel may have written

    const i32 warp = uniform_warp();
    if (warp < kLoadWarp) {
        run_math_role(block, threadIdx.x);
    } else if (warp == kLoadWarp) {
        run_load_role(block, threadIdx.x % kWarpThreads, GroupLoader{block, kv_map, 0});
    } else {
        const QueryStages<kStagesQ> stages{s.q[0][0], s.q_full, s.q_empty};
        run_query_role<Tile>(block, stages, threadIdx.x - kQueryWarp * kWarpThreads);
    }
    griddepcontrol_launch_dependents();
}
}  // namespace mla::decode
