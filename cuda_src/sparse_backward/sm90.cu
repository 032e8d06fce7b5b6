// Gradients of sparse MLA on Hopper: five products for each tile of 64 selected keys, all on chip.
//
//   P  = exp2(scale log2(e) Q K^T - lse2)          (64 heads x 64 keys), from the forward's lse
//   dS = P * (dO V^T - delta) * scale              V is K's first 512 columns
//   dQ += dS K                                     (64 x d_qk), in registers over all tiles of a query
//   dKV = dS^T Q + P^T dO                          (64 keys x d_qk; P^T dO to the first 512), added to global memory
//
// Work item: one query and 64 of its heads. The grid is persistent: block x does the items x, x + grid, ... One block
// per SM: Q, dO, one tile of K, P and dS fill its shared memory.
//
//   scores  | S = Q K^T     | P   |           | dQ[:, :256]     | gather the next tile
//   values  | dP = dO V^T   |     | dS        | dQ[:, 256:512]  | gather the next tile
//   reduce  | dKV of the tile before ...      | dQ[:, 512:]     | dKV, 64 dims at a time, added immediately ...
//
// Source: the five products and the recomputed P are FlashAttention's backward (Dao, 2022); the gather of selected rows
// is DeepSeek's sparse attention (2025). Here dKV is added directly from the accumulators to a workspace with permuted
// dims (sparse_backward/params.cuh), so that a quad's addition covers 64 bytes of a row; P^T is read into registers
// first, so that dS can overwrite P, two stages fit, and the next tile need not wait for the additions.
#include "common/limits.cuh"
#include "sparse_backward/delta.cuh"
#include "sparse_backward/dkv_adder.cuh"
#include "sparse_backward/pieces_params.cuh"
#include "sparse_backward/sm90.cuh"
#include "tile/huge_lse.cuh"
#include "tile/warp.cuh"

namespace mla::sparse_backward::sm90 {
// ---- Variant ---------------------------------------------------------------------------------------------------
using Element = MLA_DTYPE;
constexpr i32 kHeadDimQk = MLA_HEAD_DIM_QK;
constexpr bool kHasRope = kHeadDimQk > kHeadDimV;
constexpr bool kDeterministic = MLA_DETERMINISTIC;
constexpr i32 kMaxHeads = MLA_MAX_HEADS;  // of an item
#ifdef MLA_PIECES
constexpr bool kPieces = true;  // an item is a piece of a query's list, and has a part of dQ
#else
constexpr bool kPieces = false;
#endif
static_assert(is_head_dim_qk(kHeadDimQk), "with or without RoPE columns");
static_assert(kMaxHeads == kBlockHeads || kMaxHeads == kBlockHeads / 2, "all heads, or 17 to 32");
static_assert(!kPieces || (kMaxHeads == kBlockHeads && !kDeterministic), "the only such build");

// ---- Budget ----------------------------------------------------------------------------------------------------
// role     warps   regs   does
// scores   0..3    192    S, P; dQ[:, :256]; half of the gather, of Q and of dO; delta of the next item
// values   4..7    192    dP, dS; dQ[:, 256:512]; half of the gather, of Q and of dO
// reduce   8..11   120    dQ[:, 512:]; dKV and its additions
constexpr i32 kStagesP = 2;
constexpr i32 kRegsMath = 192;
constexpr i32 kRegsReduce = 120;
static_assert(2 * kRegsMath + kRegsReduce <= 3 * kRegsEntry, "what the block has at entry");

constexpr i32 kSwTilesQk = kHeadDimQk / kSw128Columns;
constexpr i32 kSwTilesV = kHeadDimV / kSw128Columns;
constexpr i32 kSwTilesHalf = kSwTilesV / 2;  // of dQ, one math warpgroup's share
constexpr i32 kRopeSwTile = kSwTilesV;

// ---- Storage ---------------------------------------------------------------------------------------------------
// barrier     arrives (count)              waits                first phase
// k_full      scores, values (256)         scores, values       blocked; of an item's first tile: Q and dO, too
// k_empty     all warps (12)               scores, values       blocked
// p_full      scores (128)                 values, reduce       blocked
// p_read      reduce warps (4)             values               blocked
// ds_full     values (128)                 all                  blocked
// p_empty[s]  reduce warps (4)             scores               free
// q_empty[i]  reduce warps (4)             scores, values       free: SW128 tile i of Q and dO, once per item
//
// Products of dKV are the last readers of Q and dO: dS of that tile was made from the last S and dP.
struct Storage {
    alignas(kSwizzleAtomBytes) u8 q[kSwTilesQk * kSw128Bytes];
    u8 dout[kSwTilesV * kSw128Bytes];
    u8 k[kSwTilesQk * kSw128Bytes];
    u8 p[kStagesP][kSw128Bytes];                // P, then dS in its place
    alignas(16) i32 rows[kStagesP][kTileKeys];  // rows of kv
    L2Lockstep lockstep;
    MBarrier k_full, k_empty, p_full, p_read, ds_full;
    MBarrier p_empty[kStagesP];
    MBarrier q_empty[kSwTilesQk];
};
static_assert(sizeof(Storage) <= kMaxDynamicSmem, "shared memory");

MLA_PIECES_FACTS();
MLA_FACT(threads, kThreads);
MLA_FACT(smem_bytes, sizeof(Storage));
MLA_FACT(block_heads, kBlockHeads);

MLA_DEVICE void init_storage(Storage& s) {
    s.lockstep.init();
    mbarrier_init(s.k_full, kGatherThreads);
    mbarrier_init(s.k_empty, kThreads / kWarpThreads);
    mbarrier_init(s.p_full, kWarpgroupThreads);
    mbarrier_init(s.p_read, kWarpgroupThreads / kWarpThreads);
    mbarrier_init(s.ds_full, kWarpgroupThreads);
    for (MBarrier& empty : s.p_empty) mbarrier_init(empty, kWarpgroupThreads / kWarpThreads);
    for (MBarrier& empty : s.q_empty) mbarrier_init(empty, kWarpgroupThreads / kWarpThreads);
    fence_mbarrier_init();
}

// A role's position in the pipeline. The barriers complete one phase per tile, P's stages one per two tiles.
struct PipelineState {
    u32 tiles = 0, items = 0;

    MLA_DEVICE u32 tile_parity() const { return tiles & 1; }
    MLA_DEVICE u32 stage() const { return tiles % kStagesP; }
    MLA_DEVICE u32 p_empty_parity() const { return (tiles / kStagesP & 1) ^ 1; }
    MLA_DEVICE u32 q_empty_parity() const { return (items & 1) ^ 1; }
};

// ---- Work ------------------------------------------------------------------------------------------------------
// Item number `pass` of the block is item blockIdx.x + pass * gridDim.x of all.
struct Block {
    const PiecesParams& p;
    Storage& s;
    i32 head_blocks, items;

    MLA_DEVICE Block(const PiecesParams& p, Storage& s)
        : p(p), s(s), head_blocks(kPieces ? 1 : ceil_div(p.h_q, kBlockHeads)), items(p.s_q * head_blocks) {
        if constexpr (kPieces) items = (p.s_q - p.first_query) * p.pieces;
    }

    MLA_DEVICE i32 item(const Cursor& at) const { return blockIdx.x + at.pass * gridDim.x; }
    MLA_DEVICE bool valid(const Cursor& at) const { return item(at) < items; }
    // Mostly there is one block of heads, and no need to wait for a division.
    MLA_DEVICE i32 query(const Cursor& at) const {
        if constexpr (kPieces) return p.first_query + item(at) / p.pieces;
        return head_blocks == 1 ? item(at) : item(at) / head_blocks;
    }
    MLA_DEVICE i32 head0(const Cursor& at) const { return head_blocks == 1 ? 0 : item(at) % head_blocks * kBlockHeads; }
    MLA_DEVICE i32 heads(const Cursor& at) const { return min(p.h_q - head0(at), kBlockHeads); }
    // The item's keys: how many, and the list of them.
    MLA_DEVICE i32 count(const Cursor& at) const {
        const i32 count = p.counts[query(at)];
        if constexpr (kPieces) return min(count - first_of_piece(at), p.piece_keys);
        return count;
    }
    MLA_DEVICE const i32* list(const Cursor& at) const {
        return p.rows + query(at) * p.rows_stride_elems + first_of_piece(at);
    }
    MLA_DEVICE i32 first_of_piece(const Cursor& at) const {
        if constexpr (kPieces) return item(at) % p.pieces * p.piece_keys;
        return 0;
    }
    // With pieces, each piece that computes delta has a place of its own.
    MLA_DEVICE float* delta(const Cursor& at, i32 row) const {
        const i64 place = kPieces && p.out != nullptr ? item(at) : query(at);
        return p.delta + (place * p.h_q + head0(at) + row);
    }
    // +Inf for a row without a key, or with a huge log-sum-exp.
    MLA_DEVICE float lse2(const Cursor& at, i32 row) const {
        const i64 elem = query(at) * p.lse2_stride_s_elems + (head0(at) + row) * p.lse2_stride_h_elems;
        return lse2_of_weights(p.lse2[elem] * p.lse2_factor);
    }
};

// ---- Gather ----------------------------------------------------------------------------------------------------
struct Gather {
    Cursor at;                 // the tile to be fetched next
    i32 rows[kRowsPerThread];  // this thread's rows

    // Makes `first` the tile to be fetched next.
    MLA_DEVICE void begin(const Block& block, const Cursor& first, i32 thread) {
        at = first;
        if (block.valid(at)) look_up(rows, block, at, thread);
    }

    // Starts the copies of the tile, which is in `stage` of P, and looks up the rows of the next one.
    template <bool kInLockstep>
    MLA_DEVICE void start(const Block& block, u32 stage, i32 thread) {
        if (!block.valid(at)) return;
        if (kInLockstep && thread == 0 && block.p.progress != nullptr) {
            const i32 step = (i32)((i64)rows[0] * kSweepSteps / block.p.s_kv);
            block.s.lockstep.report(block.p.progress, at.steps(step));
        }
        const i32 chunk = thread % kSw128Chunks;
#pragma unroll
        for (i32 i = 0; i < kRowsPerThread; ++i) {
            const i32 to_row = tile_row(thread, i);
            const bool present = (u32)rows[i] < (u32)block.p.s_kv;
            const u16* from = block.p.kv + (present ? rows[i] : 0) * block.p.kv_stride_s_elems + chunk * 8;
            const SmemAddr to = smem_addr(block.s.k) + sw128_offset(to_row, chunk);
#pragma unroll
            for (i32 sw_tile = 0; sw_tile < kSwTilesQk; ++sw_tile) {
                cp_async_16(to + sw_tile * kSw128Bytes, from + sw_tile * kSw128Columns, present);
            }
            if (chunk == 0) block.s.rows[stage][to_row] = present ? rows[i] : kNoRow;
        }
        begin(block, next(block, at, Nothing{}), thread);
    }
};

// Starts the copies of Q and dO of an item, 64 columns at a time, each as soon as the previous item's are no longer
// read. Heads past the last one are 0, and so are those without a gradient, whatever they hold.
MLA_DEVICE void load_item(const Block& block, const Cursor& at, u32 q_empty_parity, i32 thread) {
    const BackwardParams& p = block.p;
    const i32 chunk = thread % kSw128Chunks;
    const u16 *q[kRowsPerThread], *dout[kRowsPerThread];
    bool present[kRowsPerThread];
#pragma unroll
    for (i32 i = 0; i < kRowsPerThread; ++i) {
        const i32 row = tile_row(thread, i);
        present[i] = row < block.heads(at) && block.lse2(at, row) != -negative_infinity();
        const i64 query = block.query(at), head = present[i] ? block.head0(at) + row : 0;
        q[i] = p.q + query * p.q_stride_s_elems + head * p.q_stride_h_elems + chunk * 8;
        dout[i] = p.dout + query * p.dout_stride_s_elems + head * p.dout_stride_h_elems + chunk * 8;
    }
#pragma unroll
    for (i32 sw_tile = 0; sw_tile < kSwTilesQk; ++sw_tile) {
        mbarrier_wait(block.s.q_empty[sw_tile], q_empty_parity);
#pragma unroll
        for (i32 i = 0; i < kRowsPerThread; ++i) {
            const u32 to = sw128_offset(tile_row(thread, i), chunk) + sw_tile * kSw128Bytes;
            const i32 column = sw_tile * kSw128Columns;
            cp_async_16(smem_addr(block.s.q) + to, q[i] + column, present[i]);
            if (sw_tile < kSwTilesV) cp_async_16(smem_addr(block.s.dout) + to, dout[i] + column, present[i]);
        }
    }
}

// ---- Math roles ------------------------------------------------------------------------------------------------
struct Math {
    float tile[kScoresPerThread];  // S, or dP
    float dq[128];
    Gather gather;
    PipelineState state;
};

// Starts tile = A B^T over `kSwTiles` SW128 tiles of both.
template <i32 kSwTiles>
MLA_DEVICE void start_scores(float (&tile)[kScoresPerThread], const u8* a_sw_tiles, const u8* b_sw_tiles) {
    multiply_sw_tiles<Element, kSwTiles>(tile, smem_addr(a_sw_tiles), smem_addr(b_sw_tiles));
    wgmma_commit_group();
}

// dq += dS K, of 64 columns for each SW128 tile.
template <i32 kCount>
MLA_DEVICE void start_dq(float (&dq)[kCount], const u8* ds_sw_tile, const u8* k_sw_tiles) {
    const SmemDesc ds = uniform(k_major_desc(smem_addr(ds_sw_tile)));
    const SmemDesc k = uniform(mn_major_desc(smem_addr(k_sw_tiles)));
    pin(dq);
    wgmma_fence();
    multiply_ab<kSw128MmaSteps>(Element{}, dq, ds, k, true);
    wgmma_commit_group();
}

// P of the tile.
MLA_DEVICE void make_p(const Block& block, Math& math, const Cursor& at, const float (&lse2)[kFragmentRows],
                       i32 thread) {
    u32 p_fragment[kSw128MmaSteps][4];
    make_weights<Element>(p_fragment, math.tile, at.count - at.first_key(), block.p.scale_log2, lse2, thread);
    const u32 stage = math.state.stage();
    mbarrier_wait(block.s.p_empty[stage], math.state.p_empty_parity());
    store_sw128(block.s.p[stage], p_fragment, thread);
    mbarrier_arrive(block.s.p_full);
}

// dS of the tile, from dP and from P in shared memory, which it overwrites.
MLA_DEVICE void make_ds(const Block& block, Math& math, const float (&delta)[kFragmentRows], i32 thread) {
    u8* sw_tile = block.s.p[math.state.stage()];
    mbarrier_wait(block.s.p_full, math.state.tile_parity());
    u32 fragment[kSw128MmaSteps][4];
    load_sw128(fragment, sw_tile, thread);
#pragma unroll
    for (i32 i = 0; i < 32; i += 2) {
        u32& pair = fragment[i / 8][(i % 8) / 2];
        pair = score_gradients<Element>(pair, math.tile + i, block.p.scale, delta[fragment_half(i)]);
    }
    mbarrier_wait(block.s.p_read, math.state.tile_parity());
    store_sw128(sw_tile, fragment, thread);
    mbarrier_arrive(block.s.ds_full);
}

// Columns of a piece's part of dQ, in float32.
template <i32 kCount>
MLA_DEVICE void store_dq_piece(const Block& block, const Cursor& at, const float (&dq)[kCount], i32 column,
                               i32 thread) {
    float* const to = reinterpret_cast<float*>(block.p.dq) + (i64)block.item(at) * block.p.h_q * kHeadDimQk + column;
#pragma unroll
    for (i32 i = 0; i < kCount; i += 2) {
        const i32 row = fragment_row(thread, i);
        if (row >= block.heads(at)) continue;
        *reinterpret_cast<float2*>(to + row * kHeadDimQk + fragment_column(thread, i)) = make_float2(dq[i], dq[i + 1]);
    }
}

// Columns of dQ, from an accumulator.
template <i32 kCount>
MLA_DEVICE void store_dq(const Block& block, const Cursor& at, const float (&dq)[kCount], i32 column, i32 thread) {
    if constexpr (kPieces) return store_dq_piece(block, at, dq, column, thread);
#pragma unroll
    for (i32 r = 0; r < kFragmentRows; ++r) {
        const i32 row = fragment_row(thread) + 8 * r;
        const bool stored = row < block.heads(at);
        u16* to = dq_row(block.p, block.query(at), block.head0(at) + (stored ? row : 0)) + column;
        store_row(Element{}, to, dq, r, 1.f, stored, thread);
    }
}

// dQ of an item without a key. Nobody reads a piece's.
struct StoreZeros {
    const Block& block;
    i32 thread;

    MLA_DEVICE void operator()(const Cursor& at) const {
        if (kPieces) return;
        constexpr i32 kChunks = kHeadDimQk / 8;
        for (i32 i = thread; i < block.heads(at) * kChunks; i += kWarpgroupThreads) {
            u16* to = dq_row(block.p, block.query(at), block.head0(at) + i / kChunks) + i % kChunks * 8;
            *reinterpret_cast<uint4*>(to) = make_uint4(0, 0, 0, 0);
        }
    }
};

// lse2, or delta * scale, of this thread's two rows. Rows past the last head have no weights.
template <bool kValues>
MLA_DEVICE void load_rows(float (&to)[kFragmentRows], const Block& block, const Cursor& at, i32 thread) {
#pragma unroll
    for (i32 r = 0; r < kFragmentRows; ++r) {
        const i32 row = fragment_row(thread) + 8 * r;
        if (kValues) {
            to[r] = row < block.heads(at) ? *block.delta(at, row) * block.p.scale : 0.f;
        } else {
            to[r] = row < block.heads(at) ? block.lse2(at, row) : -negative_infinity();
        }
    }
}

// ---- delta -----------------------------------------------------------------------------------------------------
// If nothing else needs delta (`p.out` is set), the scores role computes it one item ahead, a share of the heads with
// each tile, while it waits for dS and dQ. The values role reads it when the item begins, after k_empty of every tile
// before. The main kernel has bandwidth to spare for out, and finds dO in L2 when the item begins.
constexpr bool kMayMakeDelta = !kDeterministic;

// One head's delta, computed by a warp.
struct HeadDelta {
    DeltaLoads loads;
    float lse2;

    MLA_DEVICE void start(const Block& block, const Cursor& at, i32 row, i32 lane) {
        const BackwardParams& p = block.p;
        const i64 query = block.query(at), head = block.head0(at) + row;
        loads.start(p.out + query * p.out_stride_s_elems + head * p.out_stride_h_elems,
                    p.dout + query * p.dout_stride_s_elems + head * p.dout_stride_h_elems, lane);
        lse2 = block.lse2(at, row);
    }

    MLA_DEVICE void finish(const Block& block, const Cursor& at, i32 row, i32 lane) const {
        const float delta = warp_sum(loads.dot<Element>());
        if (lane == 0) *block.delta(at, row) = lse2 != -negative_infinity() ? delta : 0.f;
    }
};

MLA_DEVICE void make_delta(const Block& block, const Cursor& at, i32 row, i32 lane) {
    HeadDelta delta;
    delta.start(block, at, row, lane);
    delta.finish(block, at, row, lane);
}

// Called by all warps: the deltas of the block's first item.
MLA_DEVICE void make_first_deltas(const Block& block) {
    const Cursor at = seek(block, 0, Nothing{});
    if (!block.valid(at)) return;
    const i32 warp = threadIdx.x / kWarpThreads, lane = threadIdx.x % kWarpThreads;
#pragma unroll 2
    for (i32 row = warp; row < block.heads(at); row += kThreads / kWarpThreads) make_delta(block, at, row, lane);
}

// A warp's share of the next item's heads that falls to a tile of this one: every fourth from `row` on. One head, as
// in lists of 1,024 keys and more, is loaded while dS and dQ are made; the few tiles of shorter lists make several one
// by one, before dQ.
struct DeltasAhead {
    HeadDelta one = {};  // Zeros, or its registers would be taken in the whole loop: a condition guards both its uses.
    i32 row = 0, count = 0;

    MLA_DEVICE void start(const Block& block, const Cursor& at, const Cursor& item, i32 thread) {
        const i32 tiles = ceil_div(at.count, kTileKeys), lane = thread % kWarpThreads;
        const i32 share = max(1, kBlockHeads / kWarpgroupWarps >> (31 - __clz(tiles)));  // times tiles: all heads
        row = at.tile * share * kWarpgroupWarps + thread / kWarpThreads;
        const i32 left = block.valid(item) ? ceil_div(block.heads(item) - row, kWarpgroupWarps) : 0;
        count = min(share, left);
        if (count == 1) one.start(block, item, row, lane);
#pragma unroll 1
        for (i32 i = 0; count > 1 && i < count; ++i) make_delta(block, item, row + i * kWarpgroupWarps, lane);
    }

    MLA_DEVICE void finish(const Block& block, const Cursor& item, i32 thread) const {
        if (count == 1) one.finish(block, item, row, thread % kWarpThreads);
    }
};

template <bool kValues, class Skipped>
MLA_DEVICE void run_math_role(Block& block, i32 thread, i32 gather_thread, Skipped skipped) {
    Storage& s = block.s;
    Math math;
    math.gather.begin(block, seek(block, 0, Nothing{}), gather_thread);
    math.gather.template start<!kValues>(block, math.state.stage(), gather_thread);
    float per_row[kFragmentRows];  // lse2, or delta * scale
    const bool makes_delta = kMayMakeDelta && !kValues && block.p.out != nullptr;
    i32 next_pass = 0;  // of the next item
    for (Cursor at = seek(block, 0, skipped); block.valid(at);) {
        if (at.first()) {
            load_item(block, at, math.state.q_empty_parity(), gather_thread);
            ++math.state.items;
            load_rows<kValues>(per_row, block, at, thread);
            if (makes_delta) next_pass = seek(block, at.pass + 1, Nothing{}).pass;
#pragma unroll
            for (i32 i = 0; i < 128; ++i) math.dq[i] = 0.f;
        }
        arrive_with_copies(s.k_full);
        mbarrier_wait(s.k_full, math.state.tile_parity());
        if (kValues) {
            start_scores<kSwTilesV>(math.tile, s.dout, s.k);
        } else {
            start_scores<kSwTilesQk>(math.tile, s.q, s.k);
        }
        wgmma_wait_group<0>();
        pin(math.tile);
        if (kValues) {
            make_ds(block, math, per_row, thread);
        } else {
            make_p(block, math, at, per_row, thread);
        }
        DeltasAhead deltas;
        const Cursor next_item{next_pass, 0, 0};
        if (makes_delta) deltas.start(block, at, next_item, thread);
        mbarrier_wait(s.ds_full, math.state.tile_parity());
        start_dq(math.dq, s.p[math.state.stage()], s.k + (kValues ? kSwTilesHalf * kSw128Bytes : 0));
        if (makes_delta) deltas.finish(block, next_item, thread);
        wgmma_wait_group<0>();
        pin(math.dq);
        release(s.k_empty, thread);
        mbarrier_wait(s.k_empty, math.state.tile_parity());
        ++math.state.tiles;
        math.gather.template start<!kValues>(block, math.state.stage(), gather_thread);
        if (at.last()) store_dq(block, at, math.dq, kValues ? kHeadDimV / 2 : 0, thread);
        at = next(block, at, skipped);
    }
    if (!kValues && thread == 0 && block.p.progress != nullptr) L2Lockstep::finish(block.p.progress);
}

// ---- Reduce role -----------------------------------------------------------------------------------------------
// The first three steps of dS^T are multiplied from registers, which spares shared memory 7 % of its traffic. There is
// no room for a fourth. PERF(H200, 2026-11-23, -1 to -2 % under load)
constexpr i32 kStepsInRegs = kMaxHeads == kBlockHeads ? (kPieces ? 2 : 3) : kMaxHeads / kMmaK;

struct Reduce {
    float dkv[32];  // 64 keys x 64 dims
    float dq_rope[32];
    u32 p[kMaxHeads / kMmaK][4];  // P^T: 64 keys x the heads
    u32 ds[kStepsInRegs][4];      // dS^T, the first of them
    PipelineState state;
};

// dKV of 64 dims: dS^T Q, plus P^T dO except for the RoPE dims. Heads from 16 kHeadSteps on are all absent.
template <i32 kHeadSteps, bool kRope>
MLA_DEVICE void make_dkv(Reduce& reduce, SmemDesc ds, SmemDesc q, SmemDesc dout) {
    pin(reduce.dkv);
    wgmma_fence();
#pragma unroll
    for (i32 step = 0; step < kHeadSteps; ++step) {
        const SmemDesc b = advance(q, step * kMnMajorStepBytes);
        if (step < kStepsInRegs) {
            wgmma_mma_async<Major::K, Major::MN>(Element{}, reduce.dkv, reduce.ds[step % kStepsInRegs], b, step > 0);
        } else {
            wgmma_mma_async<Major::MN, Major::MN>(Element{}, reduce.dkv, advance(ds, step * kMnMajorStepBytes), b,
                                                  step > 0);
        }
    }
#pragma unroll
    for (i32 step = 0; !kRope && step < kHeadSteps; ++step) {
        wgmma_mma_async<Major::K, Major::MN>(Element{}, reduce.dkv, reduce.p[step],
                                             advance(dout, step * kMnMajorStepBytes), true);
    }
    wgmma_commit_group();
    wgmma_wait_group<0>();
    pin(reduce.dkv);
}

using Adder = DkvAdder<kDeterministic, kHeadDimQk>;

// Destination of a thread's additions. The four threads of a quad hold 64 bytes of a key at a time. Two quads exchange
// halves, so that one instruction adds 128 bytes to each of four rows: the L2 processes wider pieces faster.
struct Places {
    Adder adder;
    float* base;  // this thread's position in the first 32 dims of row 0
    i32 rows[kFragmentRows][2];

    MLA_DEVICE Places(const BackwardParams& p, const i32* tile_rows, i32 thread) : adder(p) {
        const i32 g = thread % kWarpThreads / 4;
        base = adder.at(0, g % 2 * 16 + thread % 4 * 4);  // dkv_position
#pragma unroll
        for (i32 r = 0; r < kFragmentRows; ++r) {
            const i32 first = thread / kWarpThreads * 16 + g / 2 * 2 + 8 * r;
#pragma unroll
            for (i32 i = 0; i < 2; ++i) rows[r][i] = tile_rows[first + i];
        }
    }

    MLA_DEVICE float* at(i32 row, i32 dim) const { return base + (i64)row * kHeadDimQk + dim; }
};

// The usual additions; each four numbers share a bin.
struct Targets : Places {
    i32 extractors[kFragmentRows][2];

    MLA_DEVICE Targets(const BackwardParams& p, const i32* tile_rows, i32 thread) : Places(p, tile_rows, thread) {
#pragma unroll
        for (i32 r = 0; r < kFragmentRows; ++r) {
#pragma unroll
            for (i32 i = 0; i < 2; ++i) extractors[r][i] = adder.extractor(rows[r][i]);
        }
    }

    MLA_DEVICE void choose_bins(const float (&)[32], i32) const {}

    // Adds four numbers to the row, from dim `dim` of this thread's position on.
    MLA_DEVICE void add(i32 r, i32 i, i32 dim, float (&x)[4]) const {
        i32 row = rows[r][i];
        opaque(row);  // four pointers and four flags would cost four more registers
        adder.add(at(row, dim), extractors[r][i], x, row - kNoRow);
    }
};

// A number below 256 for each of a thread's four keys, [r][i], in one register.
struct OfKeys {
    u32 packed = 0;

    MLA_DEVICE void set(i32 r, i32 i, u32 number) { packed |= number << (16 * r + 8 * i); }
    MLA_DEVICE i32 get(i32 r, i32 i) const {
        i32 all = (i32)packed;
        opaque(all);  // otherwise all four would have a register each
        return (u32)all >> (16 * r + 8 * i) & 0xFF;
    }
};

// Additions where the bins do not fit the L2: 64 dims of a key go to one bin, so that pieces of 128 bytes stay whole.
// PERF(H200, 2026-11-26, -32 % of the call at s_kv = 32768; with 32 dims at a time +8 % at 8192)
struct WideTargets : Places {
    OfKeys extractors;  // their exponents, in which alone they differ
    OfKeys bins;

    MLA_DEVICE WideTargets(const BackwardParams& p, const i32* tile_rows, i32 thread) : Places(p, tile_rows, thread) {
#pragma unroll
        for (i32 r = 0; r < kFragmentRows; ++r) {
#pragma unroll
            for (i32 i = 0; i < 2; ++i) extractors.set(r, i, (u32)adder.extractor(rows[r][i]) >> kMantissaBits);
        }
    }

    // Chooses bins for 64 dims: `dkv` is the accumulator before quads exchange halves.
    MLA_DEVICE void choose_bins(const float (&dkv)[32], i32 thread) {
        const bool odd = thread & 4;
        bins.packed = 0;
#pragma unroll
        for (i32 r = 0; r < kFragmentRows; ++r) {
            float mine = 0.f;
#pragma unroll
            for (i32 i = 2 * r; i < 32; i += 4) mine = fmaxf(mine, fmaxf(fabsf(dkv[i]), fabsf(dkv[i + 1])));
            mine = quad_max(mine);
            const float other = __shfl_xor_sync(kFullWarp, mine, 4);
            const Bins of_all{adder.bound, 0};  // a number's bin does not depend on the row
            bins.set(r, 0, of_all.index(odd ? other : mine));
            bins.set(r, 1, of_all.index(odd ? mine : other));
        }
    }

    MLA_DEVICE void add(i32 r, i32 i, i32 dim, float (&x)[4]) const {
        i32 row = rows[r][i];
        opaque(row);
        const i32 bin = bins.get(r, i);
        const Bins of_row{adder.bound, extractors.get(r, i) << kMantissaBits | 1 << (kMantissaBits - 1)};  // 1.5 * 2^n
#pragma unroll
        for (float& number : x) number = of_row.round(number, bin);
        red_add_v4(at(row, dim) + bin * adder.bin_elems, x[0], x[1], x[2], x[3], row - kNoRow);
    }
};

// Adds 32 dims, from `dim` on, of the tile's keys.
template <class To>
MLA_DEVICE void add_dkv(const float* dkv, const To& to, i32 dim, i32 thread) {
    float x[kFragmentRows][2][4];  // of the even and the odd key
    exchange_quads(x, dkv, thread & 4);
#pragma unroll
    for (i32 r = 0; r < kFragmentRows; ++r) {
        to.add(r, 0, dim, x[r][0]);
        to.add(r, 1, dim, x[r][1]);
    }
}

// dKV of the tile. `multiplied` is called after the products of each SW128 tile.
template <i32 kHeadSteps, class To, class Multiplied>
MLA_DEVICE void reduce_tile(Reduce& reduce, Storage& s, i32 stage, To& to, i32 thread, Multiplied multiplied) {
    // Once per tile, not with every product. PERF(H200, 2026-11-23, -1 to -2 %)
    const SmemDesc ds = uniform(mn_major_desc(smem_addr(s.p[stage])));
    const SmemDesc q0 = uniform(mn_major_desc(smem_addr(s.q)));
    const SmemDesc dout0 = uniform(mn_major_desc(smem_addr(s.dout)));
#pragma unroll
    for (i32 sw_tile = 0; sw_tile < kSwTilesQk; ++sw_tile) {
        const SmemDesc q = advance(q0, sw_tile * kSw128Bytes);
        if (sw_tile < kSwTilesV) {
            make_dkv<kHeadSteps, false>(reduce, ds, q, advance(dout0, sw_tile * kSw128Bytes));
        } else {
            make_dkv<kHeadSteps, true>(reduce, ds, q, dout0);
        }
        multiplied(sw_tile);
        to.choose_bins(reduce.dkv, thread);
        add_dkv(reduce.dkv, to, sw_tile * kSw128Columns, thread);
        add_dkv(reduce.dkv + 16, to, sw_tile * kSw128Columns + kSw128Columns / 2, thread);
    }
}

template <i32 kHeadSteps, class To = Targets>
MLA_DEVICE void run_reduce_role(Block& block, i32 thread) {
    Storage& s = block.s;
    Reduce reduce;
    for (Cursor at = seek(block, 0, Nothing{}); block.valid(at); at = next(block, at, Nothing{})) {
        opaque(thread);  // values derived from it have no register from one tile to the next
        if (at.first()) {
#pragma unroll
            for (i32 i = 0; kHasRope && i < 32; ++i) reduce.dq_rope[i] = 0.f;
        }
        const u32 stage = reduce.state.stage(), parity = reduce.state.tile_parity();
        mbarrier_wait(s.p_full, parity);
        load_sw128_transposed(reduce.p, s.p[stage], thread);
        release(s.p_read, thread);
        To to(block.p, s.rows[stage], thread);
        mbarrier_wait(s.ds_full, parity);
        if (kHasRope) {
            start_dq(reduce.dq_rope, s.p[stage], s.k + kRopeSwTile * kSw128Bytes);
        }
        load_sw128_transposed(reduce.ds, s.p[stage], thread);
        if (kHasRope) {
            wgmma_wait_group<0>();
            pin(reduce.dq_rope);
        }
        release(s.k_empty, thread);
        reduce_tile<kHeadSteps>(reduce, s, stage, to, thread, [&](i32 sw_tile) {
            if (sw_tile == kSwTilesQk - 1) release(s.p_empty[stage], thread);
            if (at.last()) release(s.q_empty[sw_tile], thread);
        });
        ++reduce.state.tiles;
        if (kHasRope && at.last()) store_dq(block, at, reduce.dq_rope, kHeadDimV, thread);
    }
}

// ---- Kernel ----------------------------------------------------------------------------------------------------
extern "C" __global__ void __launch_bounds__(kThreads, 1)
    mla_sparse_backward_sm90(const __grid_constant__ PiecesParams p) {
    extern __shared__ __align__(kSwizzleAtomBytes) u8 smem[];
    Storage& s = *reinterpret_cast<Storage*>(smem);
    if (threadIdx.x == 0) init_storage(s);
    __syncthreads();
    // Pieces follow the kernel for all other queries, which waited for everything that both read, and begin when its
    // first blocks end.
    if (!kPieces) griddepcontrol_wait();  // before the first read of anything that an earlier kernel may have written
    if (!kPieces) griddepcontrol_launch_dependents();
    Block block(p, s);
    if (kMayMakeDelta && p.out != nullptr) {
        make_first_deltas(block);
        __syncthreads();
    }

    const i32 warp = uniform_warp();
    const i32 thread = threadIdx.x % kWarpgroupThreads;
    if (warp < kValuesWarp) {
        setmaxnreg_inc<kRegsMath>();
        run_math_role<false>(block, thread, threadIdx.x, StoreZeros{block, thread});
    } else if (warp < kReduceWarp) {
        setmaxnreg_inc<kRegsMath>();
        run_math_role<true>(block, thread, threadIdx.x, Nothing{});
    } else {
        setmaxnreg_dec<kRegsReduce>();
        // Further heads would only add zeros to the products of dKV. 17 to 32 heads have a separate build, as three of
        // these roles in one spill. PERF(H200, 2026-11-23, -8 % with 32 heads; half of that with the choice in a loop)
        if (kMaxHeads == kBlockHeads && p.h_q <= kMmaK) {
            run_reduce_role<1>(block, thread);
        } else if (kDeterministic && p.progress != nullptr) {
            run_reduce_role<kMaxHeads / kMmaK, WideTargets>(block, thread);
        } else {
            run_reduce_role<kMaxHeads / kMmaK>(block, thread);
        }
    }
    if (kPieces) griddepcontrol_wait();  // the code from here on waits for the pieces alone
}
}  // namespace mla::sparse_backward::sm90
