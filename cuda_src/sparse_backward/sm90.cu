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
// Source: the five products and the recomputed P are FlashAttention's backward (Dao, 2022); the gather of selected
// rows is DeepSeek's sparse attention (2025). What differs: dKV is added directly from the accumulators to a workspace
// whose dims are permuted (sparse_backward/params.cuh) so that a quad's addition covers 64 bytes of a row; P^T is read
// into registers first, so that dS can overwrite P, two stages fit, and the next tile need not wait for the additions.
#include "sparse_backward/dkv_adder.cuh"
#include "sparse_backward/sm90.cuh"
#include "tile/warp.cuh"

namespace mla::sparse_backward::sm90 {
// ---- Variant ---------------------------------------------------------------------------------------------------
using Element = MLA_DTYPE;
constexpr i32 kHeadDimQk = MLA_HEAD_DIM_QK;
constexpr bool kHasRope = kHeadDimQk > kHeadDimV;
constexpr bool kDeterministic = MLA_DETERMINISTIC;
constexpr i32 kMaxHeads = MLA_MAX_HEADS;  // of an item
static_assert(is_head_dim_qk(kHeadDimQk), "with or without RoPE columns");
static_assert(kMaxHeads == kBlockHeads || kMaxHeads == kBlockHeads / 2, "all heads, or 17 to 32");

// ---- Budget ----------------------------------------------------------------------------------------------------
// role     warps   regs   does
// scores   0..3    192    S, P; dQ[:, :256]; half of the gather
// values   4..7    192    dP, dS; dQ[:, 256:512]; half of the gather
// reduce   8..11   120    dQ[:, 512:]; dKV and its additions; Q and dO of each item
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
// q_full      reduce (128)                 all                  blocked
// k_full      scores, values (256)         scores, values       blocked
// k_empty     all warps (12)               scores, values       blocked
// p_full      scores (128)                 values, reduce       blocked
// p_read      reduce warps (4)             values               blocked
// ds_full     values (128)                 all                  blocked
// p_empty[s]  reduce warps (4)             scores               free
//
// Q and dO need no "empty": reduce refills them after its last product of an item, and dS of that tile was made from
// the last S and dP.
struct Storage {
    alignas(kSwizzleAtomBytes) u8 q[kSwTilesQk * kSw128Bytes];
    u8 dout[kSwTilesV * kSw128Bytes];
    u8 k[kSwTilesQk * kSw128Bytes];
    u8 p[kStagesP][kSw128Bytes];                // P, then dS in its place
    alignas(16) i32 rows[kStagesP][kTileKeys];  // which rows of kv
    L2Lockstep lockstep;
    MBarrier q_full, k_full, k_empty, p_full, p_read, ds_full;
    MBarrier p_empty[kStagesP];
};
static_assert(sizeof(Storage) <= kMaxDynamicSmem, "shared memory");

MLA_BACKWARD_FACTS();
MLA_FACT(threads, kThreads);
MLA_FACT(smem_bytes, sizeof(Storage));
MLA_FACT(block_heads, kBlockHeads);

MLA_DEVICE void init_storage(Storage& s) {
    s.lockstep.init();
    mbarrier_init(s.q_full, kWarpgroupThreads);
    mbarrier_init(s.k_full, kGatherThreads);
    mbarrier_init(s.k_empty, kThreads / kWarpThreads);
    mbarrier_init(s.p_full, kWarpgroupThreads);
    mbarrier_init(s.p_read, kWarpgroupThreads / kWarpThreads);
    mbarrier_init(s.ds_full, kWarpgroupThreads);
    for (MBarrier& empty : s.p_empty) mbarrier_init(empty, kWarpgroupThreads / kWarpThreads);
    fence_mbarrier_init();
}

// A role's position in the pipeline. The barriers complete one phase per tile, those of P's stages one per two tiles.
struct PipelineState {
    u32 tiles = 0, items = 0;

    MLA_DEVICE u32 tile_parity() const { return tiles & 1; }
    MLA_DEVICE u32 stage() const { return tiles % kStagesP; }
    MLA_DEVICE u32 p_empty_parity() const { return (tiles / kStagesP & 1) ^ 1; }
    MLA_DEVICE u32 item_parity() const { return items & 1; }
};

// ---- Work ------------------------------------------------------------------------------------------------------
// Item number `pass` of the block is item blockIdx.x + pass * gridDim.x of all.
struct Block {
    const BackwardParams& p;
    Storage& s;
    i32 head_blocks, items;

    MLA_DEVICE Block(const BackwardParams& p, Storage& s)
        : p(p), s(s), head_blocks(ceil_div(p.h_q, kBlockHeads)), items(p.s_q * head_blocks) {}

    MLA_DEVICE i32 item(const Cursor& at) const { return blockIdx.x + at.pass * gridDim.x; }
    MLA_DEVICE bool valid(const Cursor& at) const { return item(at) < items; }
    MLA_DEVICE i32 query(const Cursor& at) const { return item(at) / head_blocks; }
    MLA_DEVICE i32 head0(const Cursor& at) const { return item(at) % head_blocks * kBlockHeads; }
    MLA_DEVICE i32 heads(const Cursor& at) const { return min(p.h_q - head0(at), kBlockHeads); }
};

// ---- Gather ----------------------------------------------------------------------------------------------------
struct Gather {
    Cursor at;                 // the tile to be fetched next
    i32 rows[kRowsPerThread];  // its rows

    // Makes `first` the tile to be fetched next.
    MLA_DEVICE void begin(const Block& block, const Cursor& first, i32 thread) {
        at = first;
        if (block.valid(at)) look_up(rows, block, at, thread);
    }

    // Starts the copies of the tile, which is in `stage` of P, and looks up the rows of the one after it.
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
#pragma unroll
    for (i32 step = 0; step < kSw128MmaSteps; ++step) {
        const SmemDesc a = advance(ds, step * kKMajorStepBytes), b = advance(k, step * kMnMajorStepBytes);
        if constexpr (kCount == 128) {
            wgmma_m64n256k16<true>(Element{}, dq, a, b, true);
        } else {
            wgmma_m64n64k16<true>(Element{}, dq, a, b, true);
        }
    }
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

// Columns of dQ, from an accumulator.
template <i32 kCount>
MLA_DEVICE void store_dq(const Block& block, const Cursor& at, const float (&dq)[kCount], i32 column, i32 thread) {
#pragma unroll
    for (i32 r = 0; r < kFragmentRows; ++r) {
        const i32 row = fragment_row(thread) + 8 * r;
        const bool stored = row < block.heads(at);
        u16* to = dq_row(block.p, block.query(at), block.head0(at) + (stored ? row : 0)) + column;
        store_row(Element{}, to, dq, r, 1.f, stored, thread);
    }
}

// dQ of an item without a key.
struct StoreZeros {
    const Block& block;
    i32 thread;

    MLA_DEVICE void operator()(const Cursor& at) const {
        constexpr i32 kChunks = kHeadDimQk / 8;
        for (i32 i = thread; i < block.heads(at) * kChunks; i += kWarpgroupThreads) {
            u16* to = dq_row(block.p, block.query(at), block.head0(at) + i / kChunks) + i % kChunks * 8;
            *reinterpret_cast<uint4*>(to) = make_uint4(0, 0, 0, 0);
        }
    }
};

// A per-head value of the item, for this thread's two rows. Rows past the last head get `absent`.
MLA_DEVICE void load_rows(float (&to)[kFragmentRows], const Block& block, const float* values, const Cursor& at,
                          float absent, i32 thread) {
    const i64 first = (i64)block.query(at) * block.p.h_q + block.head0(at);
#pragma unroll
    for (i32 r = 0; r < kFragmentRows; ++r) {
        const i32 row = fragment_row(thread) + 8 * r;
        to[r] = row < block.heads(at) ? values[first + row] : absent;
    }
}

template <bool kValues, class Skipped>
MLA_DEVICE void run_math_role(Block& block, i32 thread, i32 gather_thread, Skipped skipped) {
    Storage& s = block.s;
    Math math;
    math.gather.begin(block, seek(block, 0, Nothing{}), gather_thread);
    math.gather.template start<!kValues>(block, math.state.stage(), gather_thread);
    float per_row[kFragmentRows];  // lse2, or delta * scale
    for (Cursor at = seek(block, 0, skipped); block.valid(at);) {
        if (at.first()) {
            load_rows(per_row, block, kValues ? block.p.delta : block.p.lse2, at, kValues ? 0.f : -negative_infinity(),
                      thread);
            if (kValues) {
                per_row[0] *= block.p.scale;
                per_row[1] *= block.p.scale;
            }
#pragma unroll
            for (i32 i = 0; i < 128; ++i) math.dq[i] = 0.f;
            mbarrier_wait(s.q_full, math.state.item_parity());
            ++math.state.items;
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
        mbarrier_wait(s.ds_full, math.state.tile_parity());
        start_dq(math.dq, s.p[math.state.stage()], s.k + (kValues ? kSwTilesHalf * kSw128Bytes : 0));
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
struct Reduce {
    float dkv[32];  // 64 keys x 64 dims
    float dq_rope[32];
    u32 p[kMaxHeads / kMmaK][4];  // P^T: 64 keys x the heads
    PipelineState state;
};

// Q and dO of an item. Heads past the last one are 0, and so are those without a gradient, whatever they hold.
MLA_DEVICE void load_item(const Block& block, const Cursor& at, i32 thread) {
    const BackwardParams& p = block.p;
    const u16* q = p.q + block.query(at) * p.q_stride_s_elems;
    const u16* dout = p.dout + block.query(at) * p.dout_stride_s_elems;
    const float* lse2 = p.lse2 + (i64)block.query(at) * p.h_q + block.head0(at);
    const i32 chunk = thread % kSw128Chunks;
#pragma unroll 1
    for (i32 row = thread / kSw128Chunks; row < kBlockHeads; row += kWarpgroupThreads / kSw128Chunks) {
        const bool present = row < block.heads(at) && lse2[row] != -negative_infinity();
        const i64 head = present ? block.head0(at) + row : 0;
        const u16* q_from = q + head * p.q_stride_h_elems + chunk * 8;
        const u16* dout_from = dout + head * p.dout_stride_h_elems + chunk * 8;
        const u32 to = sw128_offset(row, chunk);
#pragma unroll
        for (i32 sw_tile = 0; sw_tile < kSwTilesQk; ++sw_tile) {
            cp_async_16(smem_addr(block.s.q) + (to + sw_tile * kSw128Bytes), q_from + sw_tile * kSw128Columns, present);
        }
#pragma unroll
        for (i32 sw_tile = 0; sw_tile < kSwTilesV; ++sw_tile) {
            cp_async_16(smem_addr(block.s.dout) + (to + sw_tile * kSw128Bytes), dout_from + sw_tile * kSw128Columns,
                        present);
        }
    }
    arrive_with_copies(block.s.q_full);
}

// dKV of 64 dims: dS^T Q, and P^T dO but for the RoPE dims. Heads from 16 kHeadSteps on are all absent.
template <i32 kHeadSteps, bool kRope>
MLA_DEVICE void make_dkv(Reduce& reduce, Storage& s, const u8* ds_sw_tile, i32 sw_tile) {
    const SmemDesc ds = uniform(mn_major_desc(smem_addr(ds_sw_tile)));
    const SmemDesc q = uniform(mn_major_desc(smem_addr(s.q) + sw_tile * kSw128Bytes));
    const SmemDesc dout = uniform(mn_major_desc(smem_addr(s.dout) + sw_tile * kSw128Bytes));
    pin(reduce.dkv);
    wgmma_fence();
#pragma unroll
    for (i32 step = 0; step < kHeadSteps; ++step) {
        wgmma_m64n64k16<true, true>(Element{}, reduce.dkv, advance(ds, step * kMnMajorStepBytes),
                                    advance(q, step * kMnMajorStepBytes), step > 0);
    }
#pragma unroll
    for (i32 step = 0; !kRope && step < kHeadSteps; ++step) {
        wgmma_m64n64k16<true>(Element{}, reduce.dkv, reduce.p[step], advance(dout, step * kMnMajorStepBytes), true);
    }
    wgmma_commit_group();
    wgmma_wait_group<0>();
    pin(reduce.dkv);
}

using Adder = DkvAdder<kDeterministic, kHeadDimQk>;

// Where a thread adds. The four threads of a quad hold 64 bytes of a key at a time. Two quads exchange halves, so that
// one instruction adds 128 bytes to each of four rows: the L2 processes wider pieces faster.
struct Targets {
    Adder adder;
    float* rows[kFragmentRows][2];  // at this thread's position in the first 32 dims
    i32 present[kFragmentRows][2];
    i32 extractors[kFragmentRows][2];

    MLA_DEVICE Targets(const BackwardParams& p, const i32* tile_rows, i32 thread) : adder(p) {
        const i32 g = thread % kWarpThreads / 4;
        const i32 position = g % 2 * 16 + thread % 4 * 4;  // dkv_position
#pragma unroll
        for (i32 r = 0; r < kFragmentRows; ++r) {
            const i32 first = thread / kWarpThreads * 16 + g / 2 * 2 + 8 * r;
#pragma unroll
            for (i32 i = 0; i < 2; ++i) {
                const i32 row = tile_rows[first + i];
                rows[r][i] = adder.at(row, position);
                present[r][i] = row >= 0;
                extractors[r][i] = adder.extractor(row);
            }
        }
    }

    // Adds four numbers to the row, from dim `dim` of this thread's position on.
    MLA_DEVICE void add(i32 r, i32 i, i32 dim, float (&x)[4]) const {
        adder.add(rows[r][i] + dim, extractors[r][i], x, present[r][i]);
    }
};

// Adds 32 dims, from `dim` on, of the tile's keys.
MLA_DEVICE void add_dkv(const float* dkv, const Targets& to, i32 dim, i32 thread) {
    float x[kFragmentRows][2][4];  // of the even and the odd key
    exchange_quads(x, dkv, thread & 4);
#pragma unroll
    for (i32 r = 0; r < kFragmentRows; ++r) {
        to.add(r, 0, dim, x[r][0]);
        to.add(r, 1, dim, x[r][1]);
    }
}

// dKV of the tile. `multiplied` is called after the last product.
template <i32 kHeadSteps, class Multiplied>
MLA_DEVICE void reduce_tile(Reduce& reduce, Storage& s, i32 stage, const Targets& to, i32 thread,
                            Multiplied multiplied) {
#pragma unroll
    for (i32 sw_tile = 0; sw_tile < kSwTilesQk; ++sw_tile) {
        if (sw_tile < kSwTilesV) {
            make_dkv<kHeadSteps, false>(reduce, s, s.p[stage], sw_tile);
        } else {
            make_dkv<kHeadSteps, true>(reduce, s, s.p[stage], sw_tile);
        }
        if (sw_tile == kSwTilesQk - 1) multiplied();
        add_dkv(reduce.dkv, to, sw_tile * kSw128Columns, thread);
        add_dkv(reduce.dkv + 16, to, sw_tile * kSw128Columns + kSw128Columns / 2, thread);
    }
}

template <i32 kHeadSteps>
MLA_DEVICE void run_reduce_role(Block& block, i32 thread) {
    Storage& s = block.s;
    Reduce reduce;
    for (Cursor at = seek(block, 0, Nothing{}); block.valid(at); at = next(block, at, Nothing{})) {
        if (at.first()) {
            bar_sync(ItemMultiplied, kWarpgroupThreads);
            load_item(block, at, thread);
            mbarrier_wait(s.q_full, reduce.state.item_parity());
            ++reduce.state.items;
#pragma unroll
            for (i32 i = 0; kHasRope && i < 32; ++i) reduce.dq_rope[i] = 0.f;
        }
        const u32 stage = reduce.state.stage(), parity = reduce.state.tile_parity();
        mbarrier_wait(s.p_full, parity);
        load_sw128_transposed(reduce.p, s.p[stage], thread);
        release(s.p_read, thread);
        const Targets to(block.p, s.rows[stage], thread);
        mbarrier_wait(s.ds_full, parity);
        if (kHasRope) {
            start_dq(reduce.dq_rope, s.p[stage], s.k + kRopeSwTile * kSw128Bytes);
            wgmma_wait_group<0>();
            pin(reduce.dq_rope);
        }
        release(s.k_empty, thread);
        reduce_tile<kHeadSteps>(reduce, s, stage, to, thread, [&] { release(s.p_empty[stage], thread); });
        ++reduce.state.tiles;
        if (kHasRope && at.last()) store_dq(block, at, reduce.dq_rope, kHeadDimV, thread);
    }
}

// ---- Kernel ----------------------------------------------------------------------------------------------------
extern "C" __global__ void __launch_bounds__(kThreads, 1)
    mla_sparse_backward_sm90(const __grid_constant__ BackwardParams p) {
    extern __shared__ __align__(kSwizzleAtomBytes) u8 smem[];
    Storage& s = *reinterpret_cast<Storage*>(smem);
    if (threadIdx.x == 0) init_storage(s);
    __syncthreads();
    griddepcontrol_wait();  // before the first read of anything that an earlier kernel may have written
    Block block(p, s);

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
        // Products of dKV with more heads would only add zeros. 17 to 32 heads have a build of their own, as three of
        // these roles in one spill. PERF(H200, 2026-11-23, -8 % with 32 heads; half of that with the choice in a loop)
        if (kMaxHeads == kBlockHeads && p.h_q <= kMmaK) {
            run_reduce_role<1>(block, thread);
        } else {
            run_reduce_role<kMaxHeads / kMmaK>(block, thread);
        }
    }
    griddepcontrol_launch_dependents();
}
}  // namespace mla::sparse_backward::sm90
