// A thread block of attention in FP8 on Hopper: up to 64 query rows, tiles of 64 tokens of e4m3, in a ring.
//
// A tile is four SW128 tiles of 128 latent columns and the RoPE columns. These lie in a half SW128 tile, unless pages
// have an odd number of tokens: then a box of one token would begin at no multiple of 128 bytes, and they get an SW128
// tile, half of it zeros, and the ring a stage less.
#pragma once
#include "attention/decode_output.cuh"
#include "attention/fp8_scales.cuh"
#include "attention/split_work.cuh"
#include "attention/tree_mask.cuh"
#include "common/limits.cuh"
#include "tile/byte_fragments.cuh"
#include "tile/ring.cuh"
#include "tile/uniform.cuh"

namespace mla::attention::sm90 {
// ---- Sizes -----------------------------------------------------------------------------------------------------
constexpr i32 kFp8MmaRows = 64;                                   // of Q in a product, whatever the block's rows
constexpr i32 kFp8Panels = kHeadDimV / kSw128ByteColumns;         // 4: SW128 tiles of latent columns
constexpr i32 kFp8PanelsOfSide = kFp8Panels / 2;                  // each warpgroup owns half of the values
constexpr u32 kFp8LatentBytes = kFp8Panels * kSw128Bytes;         // 32 KB
constexpr u32 kFp8TileBytes = kFp8LatentBytes + kSw64Bytes;       // 36 KB
constexpr u32 kFp8QueryBytes = kFp8TileBytes;                     // of one term
constexpr u32 kFp8WideTileBytes = kFp8LatentBytes + kSw128Bytes;  // 40 KB: with RoPE columns in an SW128 tile
constexpr i32 kFp8Stages = 5, kFp8FewerStages = 4;                // of the ring
constexpr i32 kFp8FewestStages = 3;                               // wide tiles, queries in two terms
constexpr i32 kFp8MathThreads = 2 * kWarpgroupThreads;
static_assert(kHeadDimRope == kSw64ByteColumns, "RoPE columns are a half SW128 tile");
static_assert(kFp8FewerStages * kFp8WideTileBytes <= kFp8Stages * kFp8TileBytes, "fit in its place");

constexpr u32 kE4m3Ones = 0x38383838;  // four
constexpr u64 kNoSwizzle = 0;          // layout type of a WGMMA descriptor
// P = 2^8 at a tile's largest score: e4m3 has no more than 448.
constexpr float kFp8WeightLog2 = 8.f;
// References of sums follow a tile's maximum when that is more than 2^64 larger, which float32 bears: a rescale is
// rare.
constexpr float kFp8ReferenceLog2 = 64.f;

// Which ring a launch has.
struct Fp8Ring {
    i32 stages;
    u32 tile_bytes;
    u64 rope_desc;  // the descriptor of RoPE columns without their address

    MLA_DEVICE i32 next(i32 stage) const { return stage + 1 == stages ? 0 : stage + 1; }

    MLA_DEVICE static Fp8Ring of_rows() { return {kFp8Stages, kFp8TileBytes, sw64_desc(SmemAddr{0}).bits}; }

    // Beside queries in two terms there is room for four tiles, or three wide ones.
    template <i32 kQueryTerms>
    MLA_DEVICE static Fp8Ring of(const DecodeParams& p, bool spare_a_stage) {
        constexpr i32 kLess = kQueryTerms - 1;
        const bool wide = p.page_size % 2 != 0;
        return {(wide || spare_a_stage ? kFp8FewerStages : kFp8Stages) - kLess,
                wide ? kFp8WideTileBytes : kFp8TileBytes,
                wide ? k_major_desc(SmemAddr{0}).bits : sw64_desc(SmemAddr{0}).bits};
    }
};

// ---- Storage ---------------------------------------------------------------------------------------------------
// barrier          arrives (count)       carries   waits            first phase
// kv_full[s]       load (1)              a tile    left, right      blocked
// kv_empty[s]      math warps (8)        -         load             free
// p_full[side]     warps of the side (4) -         left, right      blocked
// p_empty[side]    math warps (8)        -         the side         free
//
// The side that scores a tile stores P and the tile's maxima. A second term of P goes into the tile's RoPE columns,
// which nobody reads any more.
template <i32 kRows>
struct Fp8Stats {
    float reference[kRows];  // base 2
    float sum[kRows];        // of weights before they are rounded, and after
    float rounded_sum[kRows];
    float factor[kRows];  // factor from the sum of weighted values to the result
};

template <bool kTree, i32 kRows>
struct Fp8TreeWords {};
template <i32 kRows>
struct Fp8TreeWords<true, kRows> {
    u64 of_tile[2][kRows];  // bit t: the row sees token t; the first tile contains the first draft
};

// With kListed_, tiles are rows of a list, which all rows of the block see and threads gather, and the results include
// the rows' maxima. Weights and queries are sums of kWeightTerms_ and kQueryTerms_ terms in e4m3: the second term of
// weights overwrites its tile's RoPE columns, the second term of queries takes a stage.
template <i32 kRows_, bool kTree_, bool kListed_ = false, i32 kWeightTerms_ = 1, i32 kQueryTerms_ = 1>
struct Fp8Storage {
    static constexpr i32 kRows = kRows_;
    static constexpr bool kTree = kTree_, kListed = kListed_;
    static constexpr i32 kWeightTerms = kWeightTerms_, kQueryTerms = kQueryTerms_;
    static constexpr i32 kStages = kTree || kQueryTerms > 1 ? kFp8FewerStages : kFp8Stages;
    static constexpr u32 kRingBytes = kTree ? kFp8FewerStages * kFp8WideTileBytes : kStages * kFp8TileBytes;
    static_assert(kWeightTerms == 1 || kRows == kFp8MmaRows && !kTree && !kListed, "P fills the RoPE columns' place");
    static_assert(kQueryTerms <= kWeightTerms && kWeightTerms <= 2, "forms that are built");
    static_assert(kQueryTerms == 1 || kFp8FewestStages * kFp8WideTileBytes <= kRingBytes, "fit in their place");

    alignas(kSwizzleAtomBytes) u8 q[kQueryTerms * kFp8QueryBytes];
    alignas(kSwizzleAtomBytes) u8 kv[kRingBytes];
    alignas(kSwizzleAtomBytes) u8 p[2][kRows * kSw64RowBytes];
    // The first of eight columns that P is multiplied by, for its sums: 16 ones per 16 tokens. The other seven columns
    // are the memory that follows, and only produce further columns: there is no room for more ones.
    alignas(16) u8 ones[kRows < 32 ? 64 : 16];
    float q_factors[kRows];
    float tile_max[2][kRows];  // of the tile of each side's P, base 2
    union Shared {
        float factors[kWarpgroupWarps][kRows];  // per warp: factors for adding a tile's sums
        Fp8Stats<kRows> stats;                  // at the end of a work item
    } side[2];
    u64 present[kStages];  // bit t: token t of the tile is there
    MBarrier kv_full[kStages], kv_empty[kStages];
    MBarrier p_full[2], p_empty[2];
    i32 rows;  // of the KV head: math warpgroups have no register for them
    Fp8TreeWords<kTree, kRows> tree;

    MLA_DEVICE SmemAddr tile(const Fp8Ring& ring, i32 stage) const { return smem_addr(kv) + stage * ring.tile_bytes; }
};

template <class Storage>
MLA_DEVICE void init_fp8_storage(Storage& s, i32 rows, i32 load_arrivals = 1) {
    s.rows = rows;
#pragma unroll
    for (i32 i = 0; i < sizeof(s.ones) / sizeof(u32); ++i) reinterpret_cast<u32*>(s.ones)[i] = kE4m3Ones;
    init_ring(s.kv_full, s.kv_empty, load_arrivals, 2 * kWarpgroupWarps);
    init_ring(s.p_full, s.p_empty, kWarpgroupWarps, 2 * kWarpgroupWarps);
    fence_mbarrier_init();
    fence_proxy_async();  // for the ones; the same thread's fence for the queries would do, too
}

// Work as the schedule has it, in uniform registers: others are short.
struct Fp8Work : ScheduledWork {
    MLA_DEVICE static SchedulePoint begin(const DecodeParams& p, i32 split) {
        const SchedulePoint at = ScheduledWork::begin(p, split);
        return {in_uniform(at.request), in_uniform(at.tile)};
    }
    MLA_DEVICE static RequestLength length(const DecodeParams& p, i32 request) {
        const RequestLength found = ScheduledWork::length(p, request);
        return {in_uniform(found.tokens), in_uniform(found.behind_last)};
    }
};

struct Fp8WorkIterator : WorkIteratorOf<Fp8Work> {
    using WorkIteratorOf<Fp8Work>::WorkIteratorOf;

    // Returns true if there is another item, whose request is known before its length.
    MLA_DEVICE bool goes_on(const DecodeParams& p) const {
        return !(request >= p.b || request > end.request || (request == end.request && end.tile == 0));
    }
    MLA_DEVICE void take(const DecodeParams& p, WorkItem& item) {
        if (!next(p, item)) __builtin_unreachable();
    }
};

// State shared by all roles.
template <class Memory_>
struct Fp8Block : RowBlock<Memory_::kRows, typename MaskedWork<Memory_::kTree, ScheduledWork>::Type> {
    using Rows = RowBlock<Memory_::kRows, typename MaskedWork<Memory_::kTree, ScheduledWork>::Type>;
    using Memory = Memory_;
    Memory& s;
    Fp8Ring ring;

    MLA_DEVICE Fp8Block(const DecodeFp8Params& p, Memory& s)
        : Rows(p),
          s(s),
          ring(Memory::kListed ? Fp8Ring::of_rows() : Fp8Ring::of<Memory::kQueryTerms>(p, Memory::kTree)) {
        this->kv_head = in_uniform(this->kv_head), this->row0 = in_uniform(this->row0);
        this->hidden = in_uniform(this->hidden);
        if (Memory::kListed) this->kv_head = this->hidden = 0;  // one KV head, and requests of one token
    }

    MLA_DEVICE const DecodeFp8Params& params() const { return static_cast<const DecodeFp8Params&>(this->p); }

    MLA_DEVICE Fp8WorkIterator items() const { return Fp8WorkIterator(this->p, this->split); }
};

// Named barriers: one per side, and one for both.
enum Fp8NamedBarrier : i32 { Fp8LeftOnly = 1, Fp8RightOnly, Fp8BothSides };
}  // namespace mla::attention::sm90
