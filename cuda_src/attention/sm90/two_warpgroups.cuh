// Two warpgroups that share 64 query rows, in the attention kernels for Hopper: their shared memory, their products,
// and their messages.
//
//   S = Q K^T     (64 x d_qk) (d_qk x 64)   of a tile of 64 tokens, by the warpgroup that scores it
//   O += P V      (64 x 64) (64 x 256)      of every tile, by both: each owns half of the value columns
//
// A kernel puts these steps in order and decides how tiles arrive: decode/sm90_seesaw.cu, sparse_forward/sm90.cu, and
// for FP8 tokens attention/sm90/turns.cuh.
#pragma once
#include "attention/decode_output.cuh"
#include "attention/online_softmax.cuh"
#include "attention/sm90/tile.cuh"
#include "attention/split_work.cuh"
#include "common/limits.cuh"
#include "ptx/control.cuh"
#include "ptx/wgmma.cuh"
#include "tile/sw128.cuh"

namespace mla::attention::sm90 {
constexpr i32 kBlockM = 64;
constexpr i32 kMathThreads = 2 * kWarpgroupThreads;  // left: warps 0..3, O[:, :256]; right: warps 4..7, O[:, 256:]
constexpr i32 kThreads = 3 * kWarpgroupThreads;
constexpr i32 kRightWarp = kWarpgroupWarps, kLoaderWarp = 2 * kWarpgroupWarps;
constexpr i32 kRegsEntry = regs_at_entry(kThreads);

// Named barriers within one warpgroup. A kernel's own come after them.
enum SharedNamedBarrier : i32 { LeftOnly = 1, RightOnly, FirstFreeBarrier };

MLA_DEVICE constexpr i32 own_barrier(bool right) { return right ? RightOnly : LeftOnly; }

// ---- Operands --------------------------------------------------------------------------------------------------
constexpr i32 kNothingResident = -1;

// Element type and widths of the matmuls. Each kernel derives its own tile from it.
template <class Element_, i32 kHeadDimQk>
struct PairTile : KeyTile<kHeadDimQk> {
    using Element = Element_;  // of results
    using Latent = Element_;   // of P, and of the operands' latent columns
    using Rope = Element_;     // of their RoPE columns
    // The SW128 tile of Q that stays in registers during a work item: P overwrites it in shared memory.
    static constexpr i32 kResidentSwTile = KeyTile<kHeadDimQk>::kSwTilesQk - 1;
    // Tiles are written through the generic proxy by threads that do not wait for it: each consumer fences after its
    // wait, before WGMMA reads the tile. (Bulk copies need no fence.)
    static constexpr bool kFencedByConsumers = false;
    // Products with values in two instructions of 128 columns each: of blocks with more than kThreads threads.
    static constexpr bool kHalvedProducts = false;
};

// ---- Storage ---------------------------------------------------------------------------------------------------
// P of the tile in stage s goes to p(s). Notes are messages of a kernel's roles about tiles and rows; Extra holds the
// additions of a variant. (Both are members, as NVRTC checks a reference for null where a base has an offset.)
template <class Tile_, class Notes, class Extra, i32 kPBuffers = 1>
struct PairStorage {
    using Tile = Tile_;
    alignas(kSwizzleAtomBytes) u8 q[Tile::kTileBytes];  // the resident SW128 tile's place is p(1)
    u8 kv[kStagesKV][Tile::kTileBytes];
    u8 p_buffers[kPBuffers][kSw128Bytes];
    float running_max[kStagesKV][kBlockM];  // after the tile in that stage
    float sums[2][kBlockM];                 // left, right: their shares of l
    Notes notes;
    HalfBarriers kv_full[kStagesKV], kv_empty[kStagesKV];
    MBarrier q_full, q_empty;
    MBarrier sums_ready[2];  // left, right: the share of l is in sums
    Extra extra;

    MLA_DEVICE u8* q_resident() { return q + Tile::kResidentSwTile * kSw128Bytes; }
    MLA_DEVICE u8* p(i32 stage) { return stage == 0 ? p_buffers[0] : q_resident(); }

    // Called by one thread, before the block's first barrier.
    MLA_DEVICE void init(u32 kv_arrivals, u32 q_arrivals) {
        for (i32 stage = 0; stage < kStagesKV; ++stage) {
            mbarrier_init(kv_full[stage].left, kv_arrivals);
            mbarrier_init(kv_full[stage].right, kv_arrivals);
            mbarrier_init(kv_empty[stage].left, kWarpgroupWarps);
            mbarrier_init(kv_empty[stage].right, kWarpgroupWarps);
        }
        mbarrier_init(q_full, q_arrivals);
        for (MBarrier& ready : sums_ready) mbarrier_init(ready, kWarpgroupThreads);
        mbarrier_init(q_empty, kMathThreads / kWarpThreads);
        fence_mbarrier_init();
    }
};

// State that all roles share.
template <class Storage_, class Work>
struct PairBlock : RowBlock<kBlockM, Work> {
    using Storage = Storage_;
    using Tile = typename Storage::Tile;
    Storage& s;

    MLA_DEVICE PairBlock(const DecodeParams& p, Storage& s) : RowBlock<kBlockM, Work>(p), s(s) {}
};

// ---- Registers -------------------------------------------------------------------------------------------------
constexpr i32 kScoresPerThread = kBlockM * kTileTokens / kWarpgroupThreads;
constexpr i32 kOutPerThread = kBlockM * (kHeadDimV / 2) / kWarpgroupThreads;

// One warpgroup's share of the work: its tile's scores and softmax, its half of the output.
struct Math {
    float scores[kScoresPerThread];
    float out[kOutPerThread];
    u32 p_fragment[kSw128MmaSteps][4];
    u32 q_resident[kSw128MmaSteps][4];
    RowState rows;
    Ring<kStagesKV> ring;
    Ring<1> q_ring;
    Ring<1> sums_ring;

    MLA_DEVICE void reset(float first_max = kLowestMax) {
        rows.reset(first_max);
#pragma unroll
        for (i32 i = 0; i < kOutPerThread; ++i) out[i] = 0.f;
    }
};

template <class Tile>
MLA_DEVICE void fence_if_gathered() {
    if (Tile::kFencedByConsumers) fence_proxy_async();
}

// Waits for the query rows of a work item.
template <class Storage>
MLA_DEVICE void load_q_resident(Storage& s, Math& math, i32 thread) {
    using Tile = typename Storage::Tile;
    mbarrier_wait(s.q_full, math.q_ring.full_parity(0));
    math.q_ring.advance(0);
    fence_if_gathered<Tile>();
    if constexpr (Tile::kResidentSwTile != kNothingResident) load_sw128(math.q_resident, s.q_resident(), thread);
}

// ---- S = Q K^T -------------------------------------------------------------------------------------------------
// Q, and the keys in `stage`.
struct ScoreOperands {
    SmemDesc q, k;
    u32 parity;

    template <class Storage>
    MLA_DEVICE ScoreOperands(Storage& s, const Math& math, i32 stage)
        : q(uniform(k_major_desc(smem_addr(s.q)))),
          k(uniform(k_major_desc(smem_addr(s.kv[stage]), Storage::Tile::Layout::kNextRows))),
          parity(math.ring.full_parity(stage)) {}
};

// Issues the part of S from one half of the keys in `stage`, as soon as it has arrived.
template <bool kRightHalf, class Storage>
MLA_DEVICE void issue_scores(Storage& s, Math& math, i32 stage, const ScoreOperands& of) {
    using Tile = typename Storage::Tile;
    constexpr i32 kBegin = kRightHalf ? Tile::kSwTilesLeft : 0;
    constexpr i32 kEnd = kRightHalf ? Tile::kSwTilesQk : Tile::kSwTilesLeft;
    mbarrier_wait(kRightHalf ? s.kv_full[stage].right : s.kv_full[stage].left, of.parity);
    fence_if_gathered<Tile>();
    wgmma_fence();
#pragma unroll
    for (i32 i = kBegin; i < kEnd; ++i) {
        const i32 sw_tile = Tile::sw_tile_in_order(i);
#pragma unroll
        for (i32 step = 0; step < kSw128MmaSteps; ++step) {
            const u32 bytes = sw_tile * kSw128Bytes + step * kKMajorStepBytes;
            const SmemDesc keys = Tile::Layout::keys_desc(of.k, sw_tile);
            const u32 key_bytes = Tile::Layout::sw_tile_offset(sw_tile) + step * kKMajorStepBytes;
            const bool accumulate = i > 0 || step > 0;
            if (sw_tile == Tile::kResidentSwTile) {
                wgmma_mma_async(typename Tile::Rope{}, math.scores, math.q_resident[step], advance(keys, key_bytes),
                                accumulate);
            } else if (sw_tile == Tile::kSwTilesQk - 1) {
                wgmma_mma_async(typename Tile::Rope{}, math.scores, advance(of.q, bytes), advance(keys, key_bytes),
                                accumulate);
            } else {
                wgmma_mma_async(typename Tile::Latent{}, math.scores, advance(of.q, bytes), advance(keys, key_bytes),
                                accumulate);
            }
        }
    }
}

// Starts S = Q K^T of the tile in `stage`.
template <class Storage>
MLA_DEVICE void start_scores(Storage& s, Math& math, i32 stage) {
    const ScoreOperands operands(s, math, stage);
    pin(math.scores);
    issue_scores<false>(s, math, stage, operands);
    issue_scores<true>(s, math, stage, operands);
    wgmma_commit_group();
}

// Masks the tokens of a tile that rows do not see at a sequence's end, and those that are not `present`. `row` is the
// first of the thread's rows.
template <class Work>
MLA_DEVICE void mask_hidden_rows(float (&scores)[kScoresPerThread], const DecodeParams& p, const WorkItem& item,
                                 i32 tile, i32 row, u64 present, i32 thread) {
    TileMask mask;
    mask.present = present;
#pragma unroll
    for (i32 r = 0; r < kFragmentRows; ++r) {
        mask.visible[r] = min(Work::visible(p, item, row + 8 * r), item.tokens) - tile * kTileTokens;
    }
    mask_scores(scores, mask, thread);
}

// ---- O += P V --------------------------------------------------------------------------------------------------
template <bool kRight, class Storage>
MLA_DEVICE u8* v_sw_tiles(Storage& s, i32 stage) {
    return s.kv[stage] + (kRight ? kHalfBytes : 0);
}

// From a step of 16 tokens to the next.
template <class Tile>
constexpr u32 kValueStepBytes = kMmaK / Tile::Layout::kRowsInAtom * Tile::Layout::kNextRows;

// One step.
template <class Tile, class Operand>
MLA_DEVICE void add_product(Math& math, const Operand& p, SmemDesc v) {
    if constexpr (!Tile::kHalvedProducts) {
        wgmma_mma_async<Major::K, Major::MN>(typename Tile::Latent{}, math.out, p, v, true);
    } else {
#pragma unroll
        for (i32 half = 0; half < 2; ++half) {
            auto& columns = reinterpret_cast<float (&)[kOutPerThread / 2]>(math.out[half * kOutPerThread / 2]);
            wgmma_mma_async<Major::K, Major::MN>(typename Tile::Latent{}, columns, p,
                                                 advance(v, half * 2 * Tile::Layout::kNextSwTile), true);
        }
    }
}

// The descriptor of V is written out in both: as a function it made the kernels with the plain layout 8 instructions
// longer (NVRTC 12.9).

// Starts O += P V with P in registers (this warpgroup's own tile) ...
template <bool kRight, class Storage>
MLA_DEVICE void start_own_product(Storage& s, Math& math, i32 stage) {
    using Tile = typename Storage::Tile;
    const SmemDesc v = uniform(
        mn_major_desc(smem_addr(v_sw_tiles<kRight>(s, stage)), Tile::Layout::kNextSwTile, Tile::Layout::kNextRows));
    pin(math.out);
    wgmma_fence();
#pragma unroll
    for (i32 step = 0; step < kSw128MmaSteps; ++step) {
        add_product<Tile>(math, math.p_fragment[step], advance(v, step * kValueStepBytes<Tile>));
    }
    wgmma_commit_group();
}

// ... and with P in shared memory (the other warpgroup's tile).
template <bool kRight, class Storage>
MLA_DEVICE void start_other_product(Storage& s, Math& math, i32 stage) {
    using Tile = typename Storage::Tile;
    const SmemDesc v = uniform(
        mn_major_desc(smem_addr(v_sw_tiles<kRight>(s, stage)), Tile::Layout::kNextSwTile, Tile::Layout::kNextRows));
    const SmemDesc p = uniform(k_major_desc(smem_addr(s.p(stage))));
    pin(math.out);
    wgmma_fence();
#pragma unroll
    for (i32 step = 0; step < kSw128MmaSteps; ++step) {
        add_product<Tile>(math, advance(p, step * kKMajorStepBytes), advance(v, step * kValueStepBytes<Tile>));
    }
    wgmma_commit_group();
}

// Waits for all products in flight. Only then may operands and accumulators be touched.
MLA_DEVICE void finish(Math& math) {
    wgmma_wait_group<0>();
    pin(math.scores);
    pin(math.out);
}

// ---- Results ---------------------------------------------------------------------------------------------------
// Adds up both warpgroups' shares of the sums. With kWithRowMax the left one, which reports them, also gets the largest
// scores of both.
template <bool kRight, bool kWithRowMax = false, class Storage>
MLA_DEVICE void total_sums(float (&sums)[kFragmentRows], Storage& s, Math& math, i32 thread) {
#pragma unroll
    for (i32 r = 0; r < kFragmentRows; ++r) sums[r] = quad_sum(math.rows.sum[r]);
    store_rows(s.sums[kRight], sums, thread);
    if constexpr (kWithRowMax && kRight) store_rows(s.notes.right_row_max, math.rows.row_max, thread);
    mbarrier_arrive(s.sums_ready[kRight]);
    mbarrier_wait(s.sums_ready[!kRight], math.sums_ring.full_parity(0));
    math.sums_ring.advance(0);
    float other[kFragmentRows];
    load_rows(other, s.sums[!kRight], thread);
#pragma unroll
    for (i32 r = 0; r < kFragmentRows; ++r) sums[r] += other[r];
    if constexpr (kWithRowMax && !kRight) {
        load_rows(other, s.notes.right_row_max, thread);
#pragma unroll
        for (i32 r = 0; r < kFragmentRows; ++r) math.rows.row_max[r] = fmaxf(math.rows.row_max[r], other[r]);
    }
}

// The epilogue runs once per work item, so its instructions are rarely in the cache. Divisions are done once per row,
// by lane i for row i of the warp's 16 (the upper lanes repeat them), and the results are shuffled.
constexpr i32 kRowsPerWarp = kBlockM / kWarpgroupWarps;

// From the fragment's rows to a lane per row ...
MLA_DEVICE float of_my_row(const float (&values)[kFragmentRows], i32 lane) {
    const float low = __shfl_sync(kFullWarp, values[0], lane % 8 * 4);
    const float high = __shfl_sync(kFullWarp, values[1], lane % 8 * 4);
    return lane % kRowsPerWarp < 8 ? low : high;
}

// ... and back: the lane that knows fragment row r.
MLA_DEVICE i32 lane_of_row(i32 r, i32 lane) { return lane / 4 + 8 * r; }

// Writes this warpgroup's 256 columns of the rows, in pieces of 32 bytes (fp32) or 64 bytes (16 bits) per quad.
template <bool kRight, class Block>
MLA_DEVICE void store_out(const Block& block, const WorkItem& item, const Math& math, float my_factor, i32 row0,
                          i32 my_row, i32 thread) {
    const DecodeParams& p = block.p;
    const bool whole = item.partial_index == kNotSplit;
    const i32 lane = thread % kWarpThreads;
    const i64 my_offset = whole ? item_out_offset<typename Block::Work>(p, item, block.kv_head, my_row)
                                : workspace_row(p, item.partial_index, block.kv_head, my_row) * kHeadDimV;
    constexpr i32 kFirstColumn = kRight ? kHeadDimV / 2 : 0;
#pragma unroll
    for (i32 r = 0; r < kFragmentRows; ++r) {
        const i64 offset = __shfl_sync(kFullWarp, my_offset, lane_of_row(r, lane)) + kFirstColumn;
        const float factor = __shfl_sync(kFullWarp, my_factor, lane_of_row(r, lane));
        const bool stored = row0 + fragment_row(thread) + 8 * r < block.rows_of(item);
        if (!whole || p.out_is_fp32) {
            float* const to = (whole ? static_cast<float*>(p.out) : p.partial_out) + offset + fragment_column(thread);
            if (!stored) continue;
#pragma unroll
            for (i32 i = 0; i < kOutPerThread / 4; ++i) {
                *reinterpret_cast<float2*>(to + 8 * i) =
                    make_float2(math.out[4 * i + 2 * r] * factor, math.out[4 * i + 2 * r + 1] * factor);
            }
        } else {
            store_row(typename Block::Tile::Element{}, static_cast<u16*>(p.out) + offset, math.out, r, factor, stored,
                      thread);
        }
    }
}

// `row0` is the block's. Values have another factor where `value_scale` is one.
template <bool kRight, bool kWithRowMax = false, class Block>
MLA_DEVICE void store_result(const Block& block, const WorkItem& item, const Math& math,
                             const float (&sums)[kFragmentRows], i32 row0, i32 thread, float value_scale = 1.f) {
    const DecodeParams& p = block.p;
    const i32 lane = thread % kWarpThreads;
    const i32 row = row0 + thread / kWarpThreads * kRowsPerWarp + lane % kRowsPerWarp;
    const i32 my_row = min(row, block.rows_of(item) - 1);
    const float my_max = of_my_row(math.rows.max, lane), my_sum = of_my_row(sums, lane);
    const float my_row_max = kWithRowMax && !kRight ? of_my_row(math.rows.row_max, lane) : 0.f;
    if (!kRight && lane < kRowsPerWarp && row < block.rows_of(item)) {
        store_row_lse<typename Block::Work>(p, item, block.kv_head, row, row_lse2(my_max, my_sum));
        if (kWithRowMax) store_row_max(p, item, block.kv_head, row, with_nan_of(my_sum, my_row_max));
    }
    const float factor = output_factor(p, item, block.kv_head, my_row, my_max, my_sum) * value_scale;
    store_out<kRight>(block, item, math, factor, row0, my_row, thread);
}
}  // namespace mla::attention::sm90
