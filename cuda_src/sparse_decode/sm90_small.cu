// Sparse MLA decode from FP8 records on Hopper, for few heads: warps that dequantise feed a warpgroup that multiplies.
//
//   S^T = K Q^T * scale           (64 x d_qk) (d_qk x heads) per tile of 64 listed tokens
//   P^T = exp2(S^T log2(e) - m)   m: running maximum of each head
//   l = sum of P,  O^T = V^T P^T  (512 x 64) (64 x heads); V is K's first 512 columns
//   out = O / (l + exp2(sink - m)),   lse = ln 2 (m + log2 l)
//
// Grid: x = blocks of heads, y = splits. To the schedule each query is a request whose tokens are its list
// (sparse_decode/lists.cu). One block per SM iterates over the work items of its split (attention/split_work.cuh).
//
// Eight warps read rows straight into registers, convert them to 16 bits (sparse_decode/sm90_keys.cuh) and write SW128
// tiles of two stages. Each register is refilled from the next tile as soon as it has been converted, across work
// items, too: a whole tile is in flight all the time. A stage has three groups of SW128 tiles, passed on one by one:
//
//   math     |   S^T group 0, 1, 2   | max, P | O^T += V^T P^T, group 0, 1, 2 | S'^T ...
//   dequant  |        K' groups 0, 1, 2 ->          wait for a group, K'' ->
//   loads    |  K''  ...                              K''' ...
//
// Source: swapped operands for few query rows are FlashMLA-ETAP's idea (2025). Dequantising warps beside WGMMA are in
// FlashMLA's FP8 kernel (2025). What differs: f16 instead of bf16 where scales are no powers of two, loads that roll on
// over the end of a tile, any number of heads without padding to 64, and any length of the lists.
#include "attention/row_block.cuh"
#include "attention/sm90/swapped.cuh"
#include "ptx/control.cuh"
#include "ptx/copy.cuh"
#include "sparse_decode/sm90_query.cuh"
#include "tile/warp.cuh"

namespace mla::sparse_decode {
// ---- Variant ---------------------------------------------------------------------------------------------------
using Element = MLA_DTYPE;
using TokenRecord = MLA_RECORD;
constexpr i32 kBlockRows = MLA_BLOCK_ROWS;
using Latent = KeyFormats<TokenRecord, Element>::Latent;  // also of P
using Rope = KeyFormats<TokenRecord, Element>::Rope;

struct Tile : RecordTile<TokenRecord> {
    static constexpr i32 kGroupSwTiles = 3;
    static constexpr i32 kGroups = ceil_div(kSwTilesQk, kGroupSwTiles);

    MLA_DEVICE static constexpr i32 group_of(i32 sw_tile) { return sw_tile / kGroupSwTiles; }
    // The pieces of a group: [first_piece(group), first_piece(group + 1)).
    MLA_DEVICE static constexpr i32 first_piece(i32 group) {
        return group < kGroups ? group * kGroupSwTiles : kRowPieces;
    }
};

// ---- Budget ----------------------------------------------------------------------------------------------------
// role      warps    regs   does
// math      0..3     240    S^T, softmax, O^T
// dequant   4..11    128    eight rows of each tile per warp; query rows
constexpr i32 kDequantWarps = 8;
constexpr i32 kRowsOfWarp = kWarpThreads / kPieceLanes;
constexpr i32 kThreads = kWarpgroupThreads + kDequantWarps * kWarpThreads;
constexpr i32 kRegsEntry = 168;  // 65536 / 384, rounded down to a multiple of 8
constexpr i32 kRegsMath = 240, kRegsDequant = 128;
static_assert(kRegsMath + 2 * kRegsDequant <= 3 * kRegsEntry, "what the block has at entry");
static_assert(kDequantWarps * kRowsOfWarp == kTileTokens && kTileTokens == kSw128Rows, "each row has its four lanes");
// The fence between ordinary writes and WGMMA makes a thread wait for its loads, which are to stay in flight. So the math
// warps have it, but for 32 heads, where they have no time to spare.
constexpr bool kFencedByMath = kBlockRows < 32;
constexpr i32 kStagesQ = 2;
constexpr u32 kQSwTileBytes = kHeadSwTileBytes<kBlockRows>;
constexpr i32 kQueryRowsOfWarp = kBlockRows / kDequantWarps;

// ---- Storage ---------------------------------------------------------------------------------------------------
// barrier           arrives (count)       waits      first phase
// kv_full[s][g]     dequant warps (8)     math       blocked
// kv_empty[s][g]    math warps (4)        dequant    free
// q_empty[s]        math warps (4)        dequant    free
//
// A query comes with group 0 of its first tile: it is written before, and the barrier of the group and the fence after it
// cover it, too. P needs no barrier of its own: it is overwritten after the next tile's maxima have been exchanged, before
// which every warp has finished with the product that read it.
struct Storage {
    alignas(kSwizzleAtomBytes) u8 kv[kStagesKV][Tile::kTileBytes];
    u8 q[kStagesQ][Tile::kSwTilesQk][kQSwTileBytes];
    u8 p[kQSwTileBytes];                             // [head][token]
    float q_factors[kStagesQ][kBlockRows];           // of the scores of each head
    float warp_values[kWarpgroupWarps][kBlockRows];  // maxima, then sums, of each warp's tokens
    HeadStats<kBlockRows> stats;
    MBarrier kv_full[kStagesKV][Tile::kGroups], kv_empty[kStagesKV][Tile::kGroups];
    MBarrier q_empty[kStagesQ];
};
static_assert(sizeof(Storage) <= kMaxDynamicSmem, "shared memory");

MLA_DECODE_FACTS();
MLA_FACT(threads, kThreads);
MLA_FACT(smem_bytes, sizeof(Storage));
MLA_FACT(block_rows, kBlockRows);
MLA_RECORD_FACT(TokenRecord);

// MathOnly: within the math warpgroup.
enum NamedBarrier : i32 { MathOnly = 1 };

struct Block : RowBlock<kBlockRows> {
    Storage& s;

    MLA_DEVICE Block(const DecodeParams& p, Storage& s) : RowBlock<kBlockRows>(p), s(s) {}
};

// By one thread, before the block's first barrier.
MLA_DEVICE void init_storage(Storage& s) {
    for (i32 stage = 0; stage < kStagesKV; ++stage) {
        for (MBarrier& full : s.kv_full[stage]) mbarrier_init(full, kDequantWarps);
        for (MBarrier& empty : s.kv_empty[stage]) mbarrier_init(empty, kWarpgroupWarps);
    }
    for (MBarrier& empty : s.q_empty) mbarrier_init(empty, kWarpgroupWarps);
}

// ---- Dequant role ----------------------------------------------------------------------------------------------
constexpr i32 kNoQuery = -1;

// A tile whose list entries have been asked for.
struct ListedTile {
    bool exists;
    i32 query;  // where the tile is the first of a work item, else kNoQuery
    TokenBytes token;
};

// A tile on its way: a lane's bytes of its row.
struct FetchedTile {
    uint4 piece[Tile::kRowPieces];
    LaneScales<TokenRecord> scales;
};

struct Dequantiser {
    Block& block;
    i32 warp, lane, row;  // row of each tile
    i32 stage, q_stage;
    Ring<kStagesKV> ring;
    Ring<kStagesQ> q_ring;

    // The warp's i-th query row of the block; null past the last head.
    MLA_DEVICE const u16* query_row(i32 query, i32 i) const {
        const i32 head = block.row0 + warp + i * kDequantWarps;
        return head < block.rows ? block.p.q + query * block.p.q_stride_b_elems + head * block.p.q_stride_h_elems
                                 : nullptr;
    }

    // Reads on, and brings the rows of a query that comes up into L2.
    MLA_DEVICE ListedTile list_next(TileWalk& walk) const {
        ListedTile listed{walk.next(block.p), kNoQuery, {nullptr, nullptr}};
        if (!listed.exists) return listed;
        listed.token = walk.entry(block.p, row);
        if (!walk.first) return listed;
        listed.query = walk.item.request;
#pragma unroll
        for (i32 i = 0; i < kQueryRowsOfWarp; ++i) {
            const u16* from = query_row(listed.query, i);
            if (from != nullptr && lane < Tile::kSwTilesQk) prefetch_global_l2(from + lane * kSw128Columns);
        }
        return listed;
    }

    MLA_DEVICE void store_query(i32 query) {
        Storage& s = block.s;
        mbarrier_wait(s.q_empty[q_stage], q_ring.empty_parity(q_stage));
#pragma unroll 2
        for (i32 i = 0; i < kQueryRowsOfWarp; ++i) {
            const i32 at = warp + i * kDequantWarps;
            QueryRow<Tile> from;
            from.load(query_row(query, i), lane);
            const float factor = store_query_row<Tile, Element, Latent>(s.q[q_stage][0], kQSwTileBytes, from, at, lane);
            if (lane == 0) s.q_factors[q_stage][at] = factor;
        }
        q_ring.advance(q_stage);
        q_stage ^= 1;
    }

    // Stores a tile, and refills its registers from the next one. The loads come after the warp's barrier, which keeps the
    // compiler from moving them up: they would need other registers, and be waited for at the tile's end.
    MLA_DEVICE void store_tile(FetchedTile& tile, const ListedTile& next) {
        Storage& s = block.s;
        const RowScales<TokenRecord, Latent> scales(tile.scales);
        tile.scales = LaneScales<TokenRecord>::load(next.token, lane);
#pragma unroll
        for (i32 group = 0; group < Tile::kGroups; ++group) {
            mbarrier_wait(s.kv_empty[stage][group], ring.empty_parity(stage));
#pragma unroll
            for (i32 piece = Tile::first_piece(group); piece < Tile::first_piece(group + 1); ++piece) {
                u8* to = s.kv[stage] + Tile::sw_tile_of(piece) * kSw128Bytes;
                if (piece < Tile::kLatentSwTiles) {
                    store_latent<Latent>(to, tile.piece[piece], scales.of_piece(piece, lane), row, lane);
                } else {
                    store_rope<Rope>(to, tile.piece[piece], piece - Tile::kLatentSwTiles, row, lane);
                }
            }
            if (!kFencedByMath) fence_proxy_async();
            release(s.kv_full[stage][group], lane);
#pragma unroll
            for (i32 piece = Tile::first_piece(group); piece < Tile::first_piece(group + 1); ++piece) {
                tile.piece[piece] = load_piece<TokenRecord>(next.token, piece, lane);
            }
        }
        ring.advance(stage);
        stage ^= 1;
    }
};

// While a tile is stored, the next one is loaded, and the list entries of the one after it.
MLA_DEVICE void run_dequant_role(Block& block, i32 warp, i32 lane) {
    Dequantiser dequantiser{block, warp, lane, warp * kRowsOfWarp + lane / kPieceLanes, 0, 0};
    TileWalk walk(block.p, block.split);
    ListedTile current = dequantiser.list_next(walk);
    if (!current.exists) return;
    ListedTile next = dequantiser.list_next(walk);
    FetchedTile tile;
    tile.scales = LaneScales<TokenRecord>::load(current.token, lane);
#pragma unroll
    for (i32 piece = 0; piece < Tile::kRowPieces; ++piece) {
        tile.piece[piece] = load_piece<TokenRecord>(current.token, piece, lane);
    }
#pragma unroll 1
    while (true) {
        const ListedTile after = dequantiser.list_next(walk);
        if (current.query != kNoQuery) dequantiser.store_query(current.query);
        dequantiser.store_tile(tile, next);
        if (!next.exists) break;
        current = next;
        next = after;
    }
}

// ---- Math role -------------------------------------------------------------------------------------------------
struct Math : SwappedMath<kBlockRows, kSwTilesV> {
    i32 stage, q_stage;
    Ring<kStagesKV> ring;
};

// S^T of the tile in the current stage, each group as soon as it is there.
MLA_DEVICE void score(Storage& s, Math& math, i32 thread) {
    const SmemDesc k = uniform(k_major_desc(smem_addr(s.kv[math.stage])));
    const SmemDesc q = uniform(k_major_desc(smem_addr(s.q[math.q_stage])));
    const u32 parity = math.ring.full_parity(math.stage);
    pin(math.scores);
#pragma unroll
    for (i32 i = 0; i < Tile::kSwTilesQk; ++i) {
        if (i % Tile::kGroupSwTiles == 0) {
            mbarrier_wait(s.kv_full[math.stage][Tile::group_of(i)], parity);
            if (kFencedByMath) fence_proxy_async();
            wgmma_fence();
        }
        const SmemDesc a = advance(k, i * kSw128Bytes), b = advance(q, i * kQSwTileBytes);
        if (i == Tile::kRopeSwTile) {
            add_scores(Rope{}, math.scores, a, b, true);
        } else {
            add_scores(Latent{}, math.scores, a, b, i > 0);
        }
    }
    wgmma_commit_group();
    wgmma_wait_group<0>();
    pin(math.scores);
    if constexpr (!kSameFormat<Element, Latent>) {
        HeadValues<kBlockRows> factors;
#pragma unroll
        for (i32 k = 0; k < kHeadsOfThread<kBlockRows>; ++k) {
            factors.value[k] = s.q_factors[math.q_stage][kth_head(k, thread)];
        }
        factors.multiply(math.scores);
    }
}

// O^T += V^T P^T; each group of the stage is released as soon as it has been multiplied.
MLA_DEVICE void add_values(Storage& s, Math& math, i32 thread) {
    const SmemDesc v = uniform(mn_major_desc(smem_addr(s.kv[math.stage])));
    const SmemDesc p = uniform(k_major_desc(smem_addr(s.p)));
#pragma unroll
    for (auto& columns : math.out) pin(columns);
    wgmma_fence();
#pragma unroll
    for (i32 sw_tile = 0; sw_tile < kSwTilesV; ++sw_tile) {
#pragma unroll
        for (i32 step = 0; step < kSw128MmaSteps; ++step) {
            multiply_by_heads<true>(Latent{}, math.out[sw_tile],
                                    advance(v, sw_tile * kSw128Bytes + step * kMnMajorStepBytes),
                                    advance(p, step * kKMajorStepBytes), true);
        }
        if (sw_tile + 1 == kSwTilesV || Tile::group_of(sw_tile + 1) != Tile::group_of(sw_tile)) wgmma_commit_group();
    }
    static_assert(Tile::kGroups == 3, "as many groups are committed");
    wgmma_wait_group<2>();
    release(s.kv_empty[math.stage][0], thread);
    wgmma_wait_group<1>();
    release(s.kv_empty[math.stage][1], thread);
    wgmma_wait_group<0>();
    release(s.kv_empty[math.stage][2], thread);
#pragma unroll
    for (auto& columns : math.out) pin(columns);
}

MLA_DEVICE void process_tile(Block& block, Math& math, const WorkItem& item, i32 tile, i32 thread) {
    Storage& s = block.s;
    const float scale_log2 = block.p.scale_log2;
    score(s, math, thread);
    if (tile + 1 == item.tile_end) release(s.q_empty[math.q_stage], thread);
    mask_rows(math.scores, item.tokens - tile * kTileTokens, thread);
    update_maxima(math, s.warp_values, scale_log2, MathOnly, thread);
    store_p(Latent{}, math, smem_addr(s.p), scale_log2, thread);
    bar_sync(MathOnly, kWarpgroupThreads);
    add_values(s, math, thread);
    math.ring.advance(math.stage);
    math.stage ^= 1;
}

MLA_DEVICE void run_math_role(Block& block, i32 thread) {
    const DecodeParams& p = block.p;
    Storage& s = block.s;
    const BlockHeads heads{block.kv_head, block.row0, block.rows};
    Math math;
    math.stage = math.q_stage = 0;
    WorkItem item;
    for (WorkIterator walk(p, block.split); walk.next(p, item);) {
        math.reset();
        if (item.tile_begin < item.tile_end) {
#pragma unroll 1
            for (i32 tile = item.tile_begin; tile < item.tile_end; ++tile) {
                process_tile(block, math, item, tile, thread);
            }
            math.q_stage ^= 1;
        }
        store_result</*kWithRowMax=*/false>(Element{}, p, item, heads, math, s.warp_values, s.stats, 0, true, MathOnly,
                                            thread);
    }
}

// ---- Kernel ----------------------------------------------------------------------------------------------------
extern "C" __global__ void __launch_bounds__(kThreads, 1)
    mla_sparse_decode_sm90_small(const __grid_constant__ DecodeParams p) {
    extern __shared__ __align__(kSwizzleAtomBytes) u8 smem[];
    Storage& s = *reinterpret_cast<Storage*>(smem);
    Block block(p, s);
    if (threadIdx.x == 0) init_storage(s);
    __syncthreads();
    griddepcontrol_wait();  // before the first read of anything that an earlier kernel may have written

    const i32 warp = uniform_warp();
    if (warp < kWarpgroupWarps) {
        setmaxnreg_inc<kRegsMath>();
        run_math_role(block, threadIdx.x);
    } else {
        setmaxnreg_dec<kRegsDequant>();
        run_dequant_role(block, warp - kWarpgroupWarps, threadIdx.x % kWarpThreads);
    }
    griddepcontrol_launch_dependents();
}
}  // namespace mla::sparse_decode
