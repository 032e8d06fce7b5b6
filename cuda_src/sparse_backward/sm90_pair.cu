// Gradients of sparse MLA on Hopper for 65 to 128 heads: a pair of blocks shares a query and splits the columns.
//
//   P  = exp2(scale log2(e) Q K^T - lse2)          (128 heads x 64 keys), from the forward's lse
//   dS = P * (dO V^T - delta) * scale              V is K's first 512 columns
//   dQ += dS K                                     (128 x d_qk), in registers over all tiles of a query
//   dKV = dS^T Q + P^T dO                          (64 keys x d_qk; P^T dO to the first 512), added to global memory
//
// Work item: one query. The grid is persistent: pair x does the items x, x + pairs, ... Block r of a pair holds, of Q,
// dO and K, the columns [256 r, 256 r + 256) and half of the RoPE columns. So each row of kv is fetched once for all
// heads, and dKV is added to it once for all heads. In exchange, Q K^T and dO V^T, sums over columns, are partial sums
// at first: block r finishes head block r (64 heads). It sends its partial sums of the peer's heads to the peer, and
// gets P and dS back.
//
//   scores  | S of the peer's heads  | send | S of its own | add, P, send |        | dQ of the peer's   | gather
//   values  | dP of the peer's heads | send | dP           | add  | dS, send | dQ of its own heads      | gather
//   reduce  | dKV of the tile before ...                                  | dKV, 32 dims at a time, added at once ...
//
// Source: the five products and the recomputed P are FlashAttention's backward (Dao, 2022); the gather of selected rows
// is DeepSeek's sparse attention (2025). What differs: a pair of blocks is split by columns instead of heads.
#include "common/limits.cuh"
#include "ptx/cluster.cuh"
#include "sparse_backward/dkv_adder.cuh"
#include "sparse_backward/sm90.cuh"
#include "tile/sw64.cuh"
#include "tile/warp.cuh"

namespace mla::sparse_backward::sm90 {
// ---- Variant ---------------------------------------------------------------------------------------------------
using Element = MLA_DTYPE;
constexpr i32 kHeadDimQk = MLA_HEAD_DIM_QK;
constexpr bool kHasRope = kHeadDimQk > kHeadDimV;
constexpr bool kDeterministic = MLA_DETERMINISTIC;
static_assert(is_head_dim_qk(kHeadDimQk), "with or without RoPE columns");

// ---- Budget ----------------------------------------------------------------------------------------------------
// role     warps   regs   does
// scores   0..3    208    S, P; dQ of the peer's heads; half of the gather
// values   4..7    208    dP, dS; dQ of its own heads; half of the gather
// reduce   8..11   88     dKV and its additions; Q and dO of each item
constexpr i32 kClusterBlocks = 2;
constexpr i32 kHeadBlocks = kClusterBlocks;
constexpr i32 kRegsMath = 208;
constexpr i32 kRegsReduce = 88;
static_assert(2 * kRegsMath + kRegsReduce <= 3 * kRegsEntry, "what the block has at entry");

// A block's columns: four SW128 tiles, then an SW64 tile of half of the RoPE columns.
constexpr i32 kColumns = kHeadDimV / kClusterBlocks;
constexpr i32 kSwTiles = kColumns / kSw128Columns;
constexpr u32 kRopeAt = kSwTiles * kSw128Bytes;
constexpr u32 kBytesV = kRopeAt;  // of 64 rows
constexpr u32 kBytesQk = kRopeAt + (kHasRope ? kSw64Bytes : 0);
static_assert(kHeadDimQk - kHeadDimV == (kHasRope ? kClusterBlocks * kSw64Columns : 0), "RoPE columns");

// One step of dKV covers 16 heads of P^T and dS^T. Reduce holds P^T of the first kHeldSteps steps in registers, so that
// the next S may overwrite P there while dKV is still computed; for the other steps S has a separate buffer, s_rest.
constexpr i32 kHeadSteps = kHeadBlocks * kSw128MmaSteps;
constexpr i32 kHeldSteps = kDeterministic ? 6 : 7;
constexpr u32 kStepBytes = kSw128Bytes / kSw128MmaSteps;

constexpr u32 kTileBytes = kWarpgroupThreads * 32 * sizeof(float);  // of an accumulator of 64 heads x 64 keys
constexpr i32 kTilePieces = 8;                                      // of 16 bytes, of each thread
static_assert(kTileBytes == kHeadBlocks * kSw128Bytes, "it has the size of two SW128 tiles");

// ---- Storage ---------------------------------------------------------------------------------------------------
// "peer": the other block of the pair. All complete one phase per tile, q_full one per item.
//
// barrier        arrives (count)                        carries       waits            first phase
// q_full         reduce (128)                           -             all              blocked
// k_full         scores, values (256)                   -             scores, values   blocked
// k_empty        warps of scores, values (8)            -             scores, values   blocked
// s_full         scores (1)                             kTileBytes    scores           blocked
// s_read         warps of the peer's scores (4)         -             scores           blocked
// s_empty        warps of reduce, of both blocks (8)    -             scores           free
// dp_full        values (1)                             kTileBytes    values           blocked
// dp_empty       warps of the peer's values (4)         -             values           free
// p_full         scores (128)                           -             values, reduce   blocked
// peer_p_full    scores (1)                             kSw128Bytes   reduce           blocked
// ds_full        values (128)                           -             reduce           blocked
// peer_ds_full   scores (1)                             kSw128Bytes   scores, reduce   blocked
// ds_empty       warps of reduce, of both blocks, and   -             values           free
//                of the peer's scores (12)
//
// s_empty and dp_empty are about the peer's buffers, to which this block sends; ds_empty is about both blocks'.
// Q and dO need no "empty": reduce refills them after its last product of an item, and dS of that tile was made from
// the last scores.
struct Storage {
    alignas(kSwizzleAtomBytes) u8 q[kHeadBlocks][kBytesQk];
    u8 dout[kHeadBlocks][kBytesV];
    u8 k[kBytesQk];
    u8 p[kHeadBlocks][kSw128Bytes];                     // S from the peer, then P of each head block
    u8 s_rest[(kHeadSteps - kHeldSteps) * kStepBytes];  // the rest of S from the peer
    u8 ds[kHeadBlocks][kSw128Bytes];
    u8 dp[kTileBytes];                   // dP from the peer
    alignas(16) i32 rows[2][kTileKeys];  // rows of kv
    L2Lockstep lockstep;
    MBarrier q_full, k_full, k_empty, s_full, s_read, s_empty, dp_full, dp_empty, p_full, peer_p_full;
    MBarrier ds_full, peer_ds_full, ds_empty;
};
static_assert(sizeof(Storage) <= kMaxDynamicSmem, "shared memory");

MLA_BACKWARD_FACTS();
MLA_FACT(threads, kThreads);
MLA_FACT(smem_bytes, sizeof(Storage));
MLA_FACT(block_heads, kHeadBlocks* kBlockHeads);
MLA_FACT(cluster, kClusterBlocks);

MLA_DEVICE void init_storage(Storage& s) {
    s.lockstep.init();
    mbarrier_init(s.q_full, kWarpgroupThreads);
    mbarrier_init(s.k_full, kGatherThreads);
    mbarrier_init(s.k_empty, 2 * kWarpgroupWarps);
    mbarrier_init(s.s_full, 1);
    mbarrier_init(s.s_read, kWarpgroupWarps);
    mbarrier_init(s.s_empty, 2 * kWarpgroupWarps);
    mbarrier_init(s.dp_full, 1);
    mbarrier_init(s.dp_empty, kWarpgroupWarps);
    mbarrier_init(s.p_full, kWarpgroupThreads);
    mbarrier_init(s.peer_p_full, 1);
    mbarrier_init(s.ds_full, kWarpgroupThreads);
    mbarrier_init(s.peer_ds_full, 1);
    mbarrier_init(s.ds_empty, 3 * kWarpgroupWarps);
    fence_mbarrier_init();
}

// A role's position in the pipeline: the parities of its tile and its item.
struct PipelineState {
    u32 bits = 0;

    MLA_DEVICE u32 full_parity() const { return bits & 1; }
    MLA_DEVICE u32 empty_parity() const { return full_parity() ^ 1; }
    MLA_DEVICE u32 item_parity() const { return bits >> 1; }
    MLA_DEVICE void next_tile() { bits ^= 1; }
    MLA_DEVICE void next_item() { bits ^= 2; }
};

// ---- Work ------------------------------------------------------------------------------------------------------
// Item number `pass` of a pair is query number pair + pass * pairs.
struct Block {
    const BackwardParams& p;
    Storage& s;

    MLA_DEVICE Block(const BackwardParams& p, Storage& s) : p(p), s(s) {}

    MLA_DEVICE i32 rank() const { return cluster_rank(); }
    MLA_DEVICE ClusterAddr peer(SmemAddr here) const { return map_to_rank(here, 1 - rank()); }
    MLA_DEVICE ClusterAddr peer(const void* here) const { return peer(smem_addr(here)); }

    MLA_DEVICE i32 column() const { return rank() * kColumns; }
    MLA_DEVICE i32 rope_column() const { return kHeadDimV + rank() * kSw64Columns; }
    MLA_DEVICE i32 heads(i32 head_block) const { return min(p.h_q - head_block * kBlockHeads, kBlockHeads); }
    MLA_DEVICE i32 query(const Cursor& at) const { return (blockIdx.x + at.pass * gridDim.x) / kClusterBlocks; }
    MLA_DEVICE bool valid(const Cursor& at) const { return query(at) < p.s_q; }
    MLA_DEVICE i32 count(const Cursor& at) const { return p.counts[query(at)]; }
    MLA_DEVICE const i32* list(const Cursor& at) const { return p.rows + query(at) * p.rows_stride_elems; }
};

// Each warp releases a buffer of the peer.
MLA_DEVICE void release(ClusterAddr empty, i32 thread) {
    __syncwarp();
    if (thread % kWarpThreads == 0) mbarrier_arrive(empty);
}

// Offset of a thread's piece of a tile that the peer sends. A warp's pieces lie where it will store P.
template <bool kScores>
MLA_DEVICE u32 piece_offset(i32 thread, i32 piece) {
    constexpr i32 kPieces = kTilePieces / 2;
    i32 step = piece / kPieces * kSw128MmaSteps + thread / kWarpThreads;
    if (kScores && piece / kPieces * kSw128MmaSteps + kSw128MmaSteps > kHeldSteps) {
        if (step >= kHeldSteps) step += kHeadSteps - kHeldSteps;
    }
    return step * kStepBytes + (piece % kPieces * kWarpThreads + thread % kWarpThreads) * 16;
}

// ---- Gather ----------------------------------------------------------------------------------------------------
static_assert(kRowsPerThread == 2,
              "of a thread's rows, four threads fetch the RoPE columns of one row, and four of the other");

struct Gather {
    Cursor at;                 // the tile to be fetched
    i32 rows[kRowsPerThread];  // this thread's rows

    MLA_DEVICE Gather(const Block& block, const Cursor& at, i32 thread) : at(at), rows{} {
        if (block.valid(at)) look_up(rows, block, at, thread);
    }

    MLA_DEVICE void start(const Block& block, u32 buffer, i32 thread) const {
        if (!block.valid(at)) return;
        const i32 chunk = thread % kSw128Chunks;
#pragma unroll
        for (i32 i = 0; i < kRowsPerThread; ++i) {
            const i32 to_row = tile_row(thread, i);
            const bool present = (u32)rows[i] < (u32)block.p.s_kv;
            const u16* from = block.p.kv + (present ? rows[i] : 0) * block.p.kv_stride_s_elems;
            const u16* columns = from + block.column() + chunk * 8;
            const SmemAddr to = smem_addr(block.s.k) + sw128_offset(to_row, chunk);
#pragma unroll
            for (i32 sw_tile = 0; sw_tile < kSwTiles; ++sw_tile) {
                cp_async_16(to + sw_tile * kSw128Bytes, columns + sw_tile * kSw128Columns, present);
            }
            if (kHasRope && chunk / kSw64Chunks == i) {
                const i32 rope_chunk = chunk % kSw64Chunks;
                cp_async_16(smem_addr(block.s.k) + (kRopeAt + sw64_offset(to_row, rope_chunk)),
                            from + block.rope_column() + rope_chunk * 8, present);
            }
            if (chunk == 0) block.s.rows[buffer][to_row] = present ? rows[i] : kNoRow;
        }
    }
};

// ---- Math roles ------------------------------------------------------------------------------------------------
struct Math {
    float tile[kScoresPerThread];  // S, or dP
    float dq[128];
    float dq_rope[16];
    PipelineState state;
};

// Starts tile = A B^T over the block's columns of 64 rows of each.
template <bool kRope>
MLA_DEVICE void start_scores(float (&tile)[kScoresPerThread], SmemAddr a_rows, SmemAddr b_rows) {
    multiply_sw_tiles<Element, kSwTiles>(tile, a_rows, b_rows);
    if (kRope) {
        const SmemDesc a_rope = uniform(sw64_desc(a_rows + kRopeAt));
        const SmemDesc b_rope = uniform(sw64_desc(b_rows + kRopeAt));
        multiply_abt<kSw64MmaSteps>(Element{}, tile, a_rope, b_rope, true);
    }
    wgmma_commit_group();
}

// dQ += dS K, where `a(step)` is dS for 16 keys, as an operand of wgmma.
template <class Operand>
MLA_DEVICE void start_dq(Math& math, const u8* k_rows, Operand a) {
    const SmemDesc k = uniform(mn_major_desc(smem_addr(k_rows)));
    const SmemDesc k_rope = uniform(sw64_desc(smem_addr(k_rows) + kRopeAt));
    pin(math.dq);
    if (kHasRope) pin(math.dq_rope);
    wgmma_fence();
#pragma unroll
    for (i32 step = 0; step < kSw128MmaSteps; ++step) {
        wgmma_mma_async<Major::K, Major::MN>(Element{}, math.dq, a(step), advance(k, step * kMnMajorStepBytes), true);
        if (kHasRope) {
            wgmma_mma_async<Major::K, Major::MN>(Element{}, math.dq_rope, a(step),
                                                 advance(k_rope, step * kSw64MnMajorStepBytes), true);
        }
    }
    wgmma_commit_group();
}

// Sends the tile to the peer.
template <bool kScores>
MLA_DEVICE void send_tile(const Block& block, const float (&tile)[kScoresPerThread], const u8* buffer, MBarrier& full,
                          i32 thread) {
    const ClusterAddr to = block.peer(buffer), barrier = block.peer(&full);
#pragma unroll
    for (i32 i = 0; i < kTilePieces; ++i) {
        st_async_v4(to + piece_offset<kScores>(thread, i), tile[4 * i], tile[4 * i + 1], tile[4 * i + 2],
                    tile[4 * i + 3], barrier);
    }
}

// Adds the peer's partial sums.
template <bool kScores>
MLA_DEVICE void add_sent(float (&tile)[kScoresPerThread], const u8* buffer, i32 thread) {
#pragma unroll
    for (i32 i = 0; i < kTilePieces; ++i) {
        const float4 piece = *reinterpret_cast<const float4*>(buffer + piece_offset<kScores>(thread, i));
        tile[4 * i] += piece.x;
        tile[4 * i + 1] += piece.y;
        tile[4 * i + 2] += piece.z;
        tile[4 * i + 3] += piece.w;
    }
}

// Copies the rows of an SW128 tile that this warp has stored to the peer.
MLA_DEVICE void send_rows(const Block& block, const u8* sw_tile, MBarrier& sent, i32 thread) {
    constexpr u32 kWarpBytes = kSw128Bytes / kWarpgroupWarps;
    __syncwarp();
    if (thread % kWarpThreads == 0) {
        const SmemAddr from = smem_addr(sw_tile) + thread / kWarpThreads * kWarpBytes;
        cp_async_bulk_to_cluster(block.peer(from), from, kWarpBytes, block.peer(&sent));
    }
}

// P of the tile.
MLA_DEVICE void make_p(const Block& block, Math& math, const Cursor& at, const float (&lse2)[kFragmentRows],
                       i32 thread) {
    Storage& s = block.s;
    u32 fragment[kSw128MmaSteps][4];
    make_weights<Element>(fragment, math.tile, at.count - at.first_key(), block.p.scale_log2, lse2, thread);
    mbarrier_wait(s.ds_empty, math.state.empty_parity());
    store_sw128(s.p[block.rank()], fragment, thread);
    mbarrier_arrive(s.p_full);
    mbarrier_wait(s.s_read, math.state.full_parity());
    send_rows(block, s.p[block.rank()], s.peer_p_full, thread);
}

// dS of the tile, from dP and from P in shared memory.
MLA_DEVICE void make_ds(const Block& block, Math& math, const float (&delta)[kFragmentRows],
                        u32 (&fragment)[kSw128MmaSteps][4], i32 thread) {
    Storage& s = block.s;
    mbarrier_wait(s.p_full, math.state.full_parity());
#pragma unroll
    for (i32 step = 0; step < kSw128MmaSteps; ++step) {
        ldmatrix_x4(fragment[step], smem_addr(s.p[block.rank()]) + matrix_offset(thread, step));
#pragma unroll
        for (i32 i = 0; i < 4; ++i) {
            u32& pair = fragment[step][i];
            pair = score_gradients<Element>(pair, math.tile + 8 * step + 2 * i, block.p.scale, delta[i % 2]);
        }
    }
    mbarrier_wait(s.ds_empty, math.state.empty_parity());
    store_sw128(s.ds[block.rank()], fragment, thread);
    mbarrier_arrive(s.ds_full);
    send_rows(block, s.ds[block.rank()], s.peer_ds_full, thread);
}

// Columns of dQ, from an accumulator.
template <i32 kCount>
MLA_DEVICE void store_dq(const Block& block, const Cursor& at, const float (&dq)[kCount], i32 head_block, i32 column,
                         i32 thread) {
#pragma unroll
    for (i32 r = 0; r < kFragmentRows; ++r) {
        const i32 head = head_block * kBlockHeads + fragment_row(thread) + 8 * r;
        const bool stored = head < block.p.h_q;
        u16* to = dq_row(block.p, block.query(at), stored ? head : 0) + column;
        store_row(Element{}, to, dq, r, 1.f, stored, thread);
    }
}

// dQ of an item without a key, the block's columns of it.
struct StoreZeros {
    const Block& block;
    i32 thread;

    MLA_DEVICE void operator()(const Cursor& at) const {
        constexpr i32 kChunksV = kColumns / 8, kChunks = kChunksV + (kHasRope ? kSw64Chunks : 0);
        for (i32 i = thread; i < block.p.h_q * kChunks; i += kWarpgroupThreads) {
            const i32 chunk = i % kChunks;
            const i32 column =
                chunk < kChunksV ? block.column() + chunk * 8 : block.rope_column() + (chunk - kChunksV) * 8;
            u16* to = dq_row(block.p, block.query(at), i / kChunks) + column;
            *reinterpret_cast<uint4*>(to) = make_uint4(0, 0, 0, 0);
        }
    }
};

// A per-head value of the block's heads, for this thread's two rows. Heads past the last one and those without a
// gradient get `absent`.
MLA_DEVICE void load_rows(float (&to)[kFragmentRows], const Block& block, const float* values, const Cursor& at,
                          float absent, i32 thread) {
    const i64 first = (i64)block.query(at) * block.p.h_q + block.rank() * kBlockHeads;
#pragma unroll
    for (i32 r = 0; r < kFragmentRows; ++r) {
        const i32 row = fragment_row(thread) + 8 * r;
        to[r] = row < block.heads(block.rank()) && block.p.lse2[first + row] < -negative_infinity()
                    ? values[first + row]
                    : absent;
    }
}

template <bool kValues>
MLA_DEVICE void start_item(const Block& block, Math& math, const Cursor& at, float (&per_row)[kFragmentRows],
                           i32 thread) {
    load_rows(per_row, block, kValues ? block.p.delta : block.p.lse2, at, kValues ? 0.f : -negative_infinity(), thread);
    if (kValues) {
        per_row[0] *= block.p.scale;
        per_row[1] *= block.p.scale;
    }
#pragma unroll
    for (i32 i = 0; i < 128; ++i) math.dq[i] = 0.f;
#pragma unroll
    for (i32 i = 0; i < 16; ++i) math.dq_rope[i] = 0.f;
    mbarrier_wait(block.s.q_full, math.state.item_parity());
    math.state.next_item();
}

// S or dP of the block's columns: first of the peer's heads, to be sent, then of its own.
template <bool kValues>
MLA_DEVICE void multiply_scores(const Block& block, Math& math, i32 thread) {
    Storage& s = block.s;
    const auto multiply = [&](i32 head_block) {
        if (kValues) {
            start_scores<false>(math.tile, smem_addr(s.dout) + head_block * kBytesV, smem_addr(s.k));
        } else {
            start_scores<kHasRope>(math.tile, smem_addr(s.q) + head_block * kBytesQk, smem_addr(s.k));
        }
        wgmma_wait_group<0>();
        pin(math.tile);
    };
    u8* buffer = kValues ? s.dp : s.p[0];
    MBarrier& full = kValues ? s.dp_full : s.s_full;
    multiply(1 - block.rank());
    mbarrier_wait(kValues ? s.dp_empty : s.s_empty, math.state.empty_parity());
    if (thread == 0) {
        mbarrier_arrive_expect_tx(full, kTileBytes);
        if (!kValues) {
            mbarrier_arrive_expect_tx(s.peer_p_full, kSw128Bytes);
            mbarrier_arrive_expect_tx(s.peer_ds_full, kSw128Bytes);
        }
    }
    send_tile<!kValues>(block, math.tile, buffer, full, thread);
    multiply(block.rank());
    mbarrier_wait(full, math.state.full_parity());
    add_sent<!kValues>(math.tile, buffer, thread);
    if (!kValues) fence_proxy_async();  // the peer's P arrives in the same buffer
    release(block.peer(kValues ? &s.dp_empty : &s.s_read), thread);
}

template <bool kValues, class Skipped>
MLA_DEVICE void run_math_role(Block& block, i32 thread, Skipped skipped) {
    Storage& s = block.s;
    const i32 head_block = kValues ? block.rank() : 1 - block.rank();  // of dQ
    Math math;
    Cursor at = seek(block, 0, skipped);
    const i32 t0 = thread + kValues * kWarpgroupThreads;
    Gather(block, at, t0).start(block, 0, t0);
    float per_row[kFragmentRows];  // lse2, or delta * scale
    while (block.valid(at)) {
        opaque(thread);  // otherwise the compiler keeps all addresses in registers across the loop
        const i32 gather_thread = thread + kValues * kWarpgroupThreads;
        if (at.first()) start_item<kValues>(block, math, at, per_row, thread);
        arrive_with_copies(s.k_full);
        mbarrier_wait(s.k_full, math.state.full_parity());
        multiply_scores<kValues>(block, math, thread);
        if (kValues) {
            u32 ds[kSw128MmaSteps][4];
            make_ds(block, math, per_row, ds, thread);
            start_dq(math, s.k, [&](i32 step) -> const u32(&)[4] { return ds[step]; });
        } else {
            make_p(block, math, at, per_row, thread);
            mbarrier_wait(s.peer_ds_full, math.state.full_parity());
            const SmemDesc ds = uniform(k_major_desc(smem_addr(s.ds) + head_block * kSw128Bytes));
            start_dq(math, s.k, [&](i32 step) { return advance(ds, step * kKMajorStepBytes); });
        }
        const Gather gather(block, next(block, at, skipped), gather_thread);
        wgmma_wait_group<0>();
        pin(math.dq);
        pin(math.dq_rope);
        if (!kValues) release(block.peer(&s.ds_empty), thread);
        release(s.k_empty, thread);
        mbarrier_wait(s.k_empty, math.state.full_parity());
        math.state.next_tile();
        gather.start(block, math.state.full_parity(), gather_thread);
        if (at.last()) {
            store_dq(block, at, math.dq, head_block, block.column(), thread);
            if (kHasRope) store_dq(block, at, math.dq_rope, head_block, block.rope_column(), thread);
        }
        at = gather.at;
    }
}

// ---- Reduce role -----------------------------------------------------------------------------------------------
struct Reduce {
    float dkv[32];         // 64 keys x 64 dims
    u32 p[kHeldSteps][4];  // P^T: 64 keys x the first heads
    PipelineState state;
};

// The block's columns of Q and dO of an item. Heads past the last one become 0, as do heads without a key, which have
// no gradient whatever their dO is.
MLA_DEVICE void load_item(const Block& block, const Cursor& at, i32 thread) {
    constexpr i32 kRowStep = kWarpgroupThreads / kSw128Chunks, kRowsEach = kHeadBlocks * kBlockHeads / kRowStep;
    const BackwardParams& p = block.p;
    const i32 chunk = thread % kSw128Chunks;
    const float* lse2 = p.lse2 + (i64)block.query(at) * p.h_q;
    u32 presence = 0;
#pragma unroll
    for (i32 i = 0; i < kRowsEach; ++i) {
        const i32 head = thread / kSw128Chunks + i * kRowStep;
        const bool present = head < p.h_q && lse2[min(head, p.h_q - 1)] < -negative_infinity();
        presence |= (u32)present << i;
    }
#pragma unroll 1
    for (i32 i = 0; i < kRowsEach; ++i) {
        const bool present = presence >> i & 1;
        const i32 head = thread / kSw128Chunks + i * kRowStep;
        const i32 head_block = head / kBlockHeads, row = head % kBlockHeads;
        const i64 from_head = present ? head : 0;
        const u16* q = p.q + block.query(at) * p.q_stride_s_elems + from_head * p.q_stride_h_elems;
        const u16* dout = p.dout + block.query(at) * p.dout_stride_s_elems + from_head * p.dout_stride_h_elems;
        const SmemAddr q_to = smem_addr(block.s.q[head_block]), dout_to = smem_addr(block.s.dout[head_block]);
        const u32 to = sw128_offset(row, chunk);
        const i32 column = block.column() + chunk * 8;
#pragma unroll
        for (i32 sw_tile = 0; sw_tile < kSwTiles; ++sw_tile) {
            cp_async_16(q_to + (to + sw_tile * kSw128Bytes), q + column + sw_tile * kSw128Columns, present);
            cp_async_16(dout_to + (to + sw_tile * kSw128Bytes), dout + column + sw_tile * kSw128Columns, present);
        }
        if (kHasRope && chunk < kSw64Chunks) {
            cp_async_16(q_to + (kRopeAt + sw64_offset(row, chunk)), q + block.rope_column() + chunk * 8, present);
        }
    }
    arrive_with_copies(block.s.q_full);
}

// dKV of an SW128 tile's 64 dims: P^T dO + dS^T Q.
MLA_DEVICE void multiply_dkv(Reduce& reduce, Storage& s, i32 sw_tile) {
    const SmemDesc ds = uniform(mn_major_desc(smem_addr(s.ds)));
    const SmemDesc q = uniform(mn_major_desc(smem_addr(s.q) + sw_tile * kSw128Bytes));
    const SmemDesc p = uniform(mn_major_desc(smem_addr(s.p)));
    const SmemDesc dout = uniform(mn_major_desc(smem_addr(s.dout) + sw_tile * kSw128Bytes));
    pin(reduce.dkv);
    wgmma_fence();
#pragma unroll
    for (i32 step = 0; step < kHeadSteps; ++step) {
        const u32 bytes = step / kSw128MmaSteps * kBytesV + step % kSw128MmaSteps * kMnMajorStepBytes;
        if (step < kHeldSteps) {
            wgmma_mma_async<Major::K, Major::MN>(Element{}, reduce.dkv, reduce.p[step], advance(dout, bytes), step > 0);
        } else {
            wgmma_mma_async<Major::MN, Major::MN>(Element{}, reduce.dkv, advance(p, step * kMnMajorStepBytes),
                                                  advance(dout, bytes), true);
        }
    }
    multiply_atb<kHeadSteps, kSw128Bytes, kBytesQk>(Element{}, reduce.dkv, ds, q, true);
    wgmma_commit_group();
    wgmma_wait_group<0>();
    pin(reduce.dkv);
}

// dKV of the 32 RoPE dims: dS^T Q.
MLA_DEVICE void multiply_dkv_rope(float (&dkv)[16], Storage& s) {
    const SmemDesc ds = uniform(mn_major_desc(smem_addr(s.ds)));
    const SmemDesc q = uniform(sw64_desc(smem_addr(s.q) + kRopeAt));
    pin(dkv);
    wgmma_fence();
#pragma unroll
    for (i32 step = 0; step < kHeadSteps; ++step) {
        const u32 bytes = step / kSw128MmaSteps * kBytesQk + step % kSw128MmaSteps * kSw64MnMajorStepBytes;
        wgmma_mma_async<Major::MN, Major::MN>(Element{}, dkv, advance(ds, step * kMnMajorStepBytes), advance(q, bytes),
                                              step > 0);
    }
    wgmma_commit_group();
    wgmma_wait_group<0>();
    pin(dkv);
}

using Adder = DkvAdder<kDeterministic, kHeadDimQk>;

// Rows that a thread adds to: an even quad's, and its odd neighbour's.
struct Targets {
    i32 rows[kFragmentRows][2];
    i32 extractors[kFragmentRows][2];

    MLA_DEVICE Targets(const BackwardParams& p, const i32* tile_rows, i32 thread) {
        tile_rows += thread / kWarpThreads * 16 + thread % kWarpThreads / 8 * 2;
#pragma unroll
        for (i32 r = 0; r < kFragmentRows; ++r) {
            const int2 pair = *reinterpret_cast<const int2*>(tile_rows + 8 * r);
            rows[r][0] = pair.x;
            rows[r][1] = pair.y;
#pragma unroll
            for (i32 i = 0; i < 2; ++i) extractors[r][i] = Adder(p).extractor(rows[r][i]);
        }
    }

    // Adds four numbers to the row, from `position` on. The adder is rebuilt each time: there are no registers to keep
    // it.
    MLA_DEVICE void add(const BackwardParams& p, i32 r, i32 i, i32 position, float x, float y, float z, float w) const {
        const Adder adder(p);
        float four[4] = {x, y, z, w};
        adder.add(adder.at(rows[r][i], position), extractors[r][i], four, rows[r][i] >= 0);
    }
};

// Adds 32 dims, from `dim` on, of the tile's keys. The four threads of a quad hold 64 bytes of a key at a time. Two
// quads exchange halves, so that one instruction adds 128 bytes to each of four rows: the L2 processes wider pieces
// faster.
MLA_DEVICE void add_dkv(const BackwardParams& p, float* dkv, const Targets& to, i32 dim, i32 thread) {
    const bool odd = thread & 4;
    const i32 position = dim + thread % 8 / 4 * 16 + thread % 4 * 4;  // dkv_position
#pragma unroll
    for (i32 r = 0; r < kFragmentRows; ++r) {
        float* d = dkv + 2 * r;
#pragma unroll
        for (i32 i = 0; i < 4; ++i) {  // exchange_quads, in place: the form that was measured
            float &low = d[i % 2 + i / 2 * 4], &high = d[i % 2 + i / 2 * 4 + 8];
            const float received = __shfl_xor_sync(kFullWarp, odd ? low : high, 4);
            (odd ? low : high) = received;
        }
        to.add(p, r, 0, position, d[0], d[1], d[4], d[5]);
        to.add(p, r, 1, position, d[8], d[9], d[12], d[13]);
    }
}

// dKV of the tile. `multiplied` is called after the last product.
template <class Multiplied>
MLA_DEVICE void reduce_tile(Reduce& reduce, const Block& block, const i32* rows, i32 thread, Multiplied multiplied) {
#pragma unroll
    for (i32 sw_tile = 0; sw_tile < kSwTiles; ++sw_tile) {
        multiply_dkv(reduce, block.s, sw_tile);
        const Targets to(block.p, rows, thread);
        if (!kHasRope && sw_tile == kSwTiles - 1) multiplied();
        const i32 dim = block.column() + sw_tile * kSw128Columns;
        add_dkv(block.p, reduce.dkv, to, dim, thread);
        add_dkv(block.p, reduce.dkv + 16, to, dim + kSw128Columns / 2, thread);
    }
    if (kHasRope) {
        float rope[16];
        multiply_dkv_rope(rope, block.s);
        const Targets to(block.p, rows, thread);
        multiplied();
        add_dkv(block.p, rope, to, block.rope_column(), thread);
    }
}

MLA_DEVICE void run_reduce_role(Block& block, i32 thread) {
    Storage& s = block.s;
    const bool in_lockstep = thread == 0 && block.p.progress != nullptr;
    Reduce reduce;
    for (Cursor at = seek(block, 0, Nothing{}); block.valid(at); at = next(block, at, Nothing{})) {
        opaque(thread);
        if (at.first()) {
            bar_sync(ItemMultiplied, kWarpgroupThreads);
            load_item(block, at, thread);
            mbarrier_wait(s.q_full, reduce.state.item_parity());
            reduce.state.next_item();
        }
        const u32 parity = reduce.state.full_parity();
        mbarrier_wait(s.p_full, parity);
        if (in_lockstep) {
            const float steps = __fdividef((float)s.rows[parity][0] * kSweepSteps, (float)block.p.s_kv);
            s.lockstep.report(block.p.progress, at.steps(min((i32)steps, kSweepSteps - 1)));
        }
        mbarrier_wait(s.peer_p_full, parity);
        load_sw128_transposed(reduce.p, s.p[0], thread);
        mbarrier_wait(s.ds_full, parity);
        release(s.s_empty, thread);
        release(block.peer(&s.s_empty), thread);
        mbarrier_wait(s.peer_ds_full, parity);
        reduce_tile(reduce, block, s.rows[parity], thread, [&] {
            release(s.ds_empty, thread);
            release(block.peer(&s.ds_empty), thread);
        });
        reduce.state.next_tile();
    }
    if (in_lockstep) L2Lockstep::finish(block.p.progress);
}

// ---- Kernel ----------------------------------------------------------------------------------------------------
extern "C" __global__ void __launch_bounds__(kThreads, 1)
    mla_sparse_backward_sm90_pair(const __grid_constant__ BackwardParams p) {
    extern __shared__ __align__(kSwizzleAtomBytes) u8 smem[];
    Storage& s = *reinterpret_cast<Storage*>(smem);
    if (threadIdx.x == 0) init_storage(s);
    __syncthreads();
    cluster_sync();
    griddepcontrol_wait();  // before the first read of anything that an earlier kernel may have written
    Block block(p, s);

    const i32 warp = uniform_warp();
    const i32 thread = threadIdx.x % kWarpgroupThreads;
    if (warp < kValuesWarp) {
        setmaxnreg_inc<kRegsMath>();
        run_math_role<false>(block, thread, StoreZeros{block, thread});
    } else if (warp < kReduceWarp) {
        setmaxnreg_inc<kRegsMath>();
        run_math_role<true>(block, thread, Nothing{});
    } else {
        setmaxnreg_dec<kRegsReduce>();
        run_reduce_role(block, thread);
    }
    griddepcontrol_launch_dependents();
    cluster_sync();  // the peer may still send to this block
}
}  // namespace mla::sparse_backward::sm90
