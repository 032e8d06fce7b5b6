// Attention to FP8 records on Hopper, 64 query rows per block: the seesaw over keys that a warpgroup dequantises.
//
// Stages of a tile, shared by the kernels that differ in where a request's tokens lie: in lists of slots
// (sparse_decode/sm90.cu) or in pages (decode/sm90_records_seesaw.cu). All rows of a block are of one query token, so
// all of them see the same tokens.
//
// Two warpgroups score tiles in turn (attention/sm90/turns.cuh). The third one reads rows into registers
// and writes 16-bit tiles; the fourth one finds the rows, a tile ahead:
//
//   left     S0_right | softmax 0 | O_L += P0 V0_L   | S0'_left | O_L += P1 V1_L | S0'_right | ...
//   right               S1_left | O_R += P0 V0_R   | S1_right | softmax 1 | O_R += P1 V1_R | ...
//   dequant  K1_left ->        K1_right ->       K0'_left ->           K0'_right ->
//   scouts   where the rows of K0' are             ... of K1'
#pragma once
#include "attention/record_tokens.cuh"
#include "attention/sm90/raised_weights.cuh"
#include "attention/sm90/record_query.cuh"
#include "attention/sm90/turns.cuh"
#include "common/limits.cuh"
#include "ptx/control.cuh"
#include "ptx/copy.cuh"
#include "tile/uniform.cuh"
#include "tile/warp.cuh"

namespace mla::attention::sm90 {
// ---- Storage ---------------------------------------------------------------------------------------------------
// A scout's result for a tile.
struct FoundTile {
    static constexpr u32 kRows = 0xffff, kFirst = 1u << 16, kLast = 1u << 17;
    u32 bits;   // present rows of the warp, and two flags
    i32 query;  // the query to store after the tile, or kNoQuery

    MLA_DEVICE bool first() const { return bits & kFirst; }  // of its work item: in stage 0
    MLA_DEVICE bool last() const { return bits & kLast; }    // of the split
};

struct RecordNotes {
    u64 present[kStagesKV];  // bit t: token t of the tile is there
};

template <class TokenRecord>
struct RecordExtra {
    float q_factors[kBlockM];
    // From each scout to the dequantising warp of the same rows: of the tile that is stored next ... Of two records the
    // dequantising warp reads scales while it stores, so that they have two places.
    static constexpr i32 kPlaces = kMixed<TokenRecord> ? 2 : 1;
    alignas(16) typename LaneScales<TokenRecord>::OfRow scales[kHasValueScale<TokenRecord> ? 1 : kPlaces * kTileTokens];
    FoundTile found[kWarpgroupWarps];
    // ... and of the one after it, which is loaded meanwhile.
    const u8* rows[kTileTokens];
    const u8* scales_at[kScalesApart<TokenRecord> ? kTileTokens : 1];  // for the scout itself
    MBarrier found_full[kWarpgroupWarps], found_empty[kWarpgroupWarps];
};

// ---- Variant ---------------------------------------------------------------------------------------------------
// Choices of a kernel. Tokens_ is one of attention/record_tokens.cuh. No SW128 tile of Q is kept in registers: they
// go to the dequantising warps.
template <class Element_, class TokenRecord_, class Tokens_>
struct SeesawRecords : RecordTile<TokenRecord_> {
    using Element = Element_;  // see PairTile of attention/sm90/two_warpgroups.cuh
    using TokenRecord = TokenRecord_;
    using Tokens = Tokens_;
    using Tile = RecordTile<TokenRecord>;
    using Work = typename Tokens::Work;
    using Latent = typename KeyFormats<TokenRecord, Element>::Latent;
    using Rope = typename KeyFormats<TokenRecord, Element>::Rope;
    static constexpr bool kValueScale = kHasValueScale<TokenRecord>;
    // The dequantising warps have loads in flight, for which a fence would most likely wait.
    static constexpr bool kFencedByConsumers = true;
    static constexpr i32 kResidentSwTile = kNothingResident;

    // Queries whose keys have another format are multiplied by a power of two each, see store_query_row of
    // attention/sm90/record_query.cuh; `q_factors` holds the inverses.
    static constexpr bool kScaledQueries = !kSameFormat<Element, Latent>;
    static constexpr i32 kRaisedLog2 = kRaisedWeights<Latent>;

    // Over pages, scouts walk on while scales arrive, and request v4's scales a tile ahead. Over lists of slots that
    // build would spill 16 bytes.
    static constexpr bool kScoutsWalkOn = Tokens::kMasked;

    // The halves: SW128 tiles 0..3, and the others. RoPE columns are written last.
    static constexpr i32 kSwTilesLeft = kSwTilesHalf;
    MLA_DEVICE static constexpr i32 sw_tile_in_order(i32 i) { return i; }

    static constexpr bool kHalvedProducts = true;  // for ptxas, a block of 512 threads has no 192 registers at entry

    static constexpr bool kRopeIsValue = kKeyColumns<TokenRecord> == kHeadDimV;
    static constexpr i32 kPBuffers = kRopeIsValue ? 2 : 1;
};

template <class C>
struct RecordStorage : PairStorage<C, RecordNotes, RecordExtra<typename C::TokenRecord>, C::kPBuffers> {
    // P of an odd tile overwrites its RoPE columns, unless these are values. Only the right warpgroup scores the tile,
    // and all of its warps synchronise between the scores and P. Before the tile is overwritten, both warpgroups have
    // released the stage.
    MLA_DEVICE u8* p(i32 stage) {
        if (stage == 0) return this->p_buffers[0];
        return C::kRopeIsValue ? this->p_buffers[C::kPBuffers - 1] : this->kv[1] + C::kRopeSwTile * kSw128Bytes;
    }
};

template <class C>
using RecordBlock = PairBlock<RecordStorage<C>, typename C::Work>;

// ---- Budget ----------------------------------------------------------------------------------------------------
// role          warps    regs   does
// left          0..3     192    even tiles: S0, softmax
// right         4..7     192    odd tiles:  S1, softmax
// dequant       8..11    104    16 rows of each tile per warp; query rows      96 of v41 and v32_nope
// scouts        12..15    24    find those rows                                32 of v41 and v32_nope
constexpr i32 kRegsMath = 192;
// Without bf16 RoPE columns, a row has fewer pieces to hold.
template <class C>
constexpr i32 kRegsDequant = C::kRowPieces > 8 ? 104 : 96;
template <class C>
constexpr i32 kRegsScout = C::kRowPieces > 8 ? 24 : 32;
constexpr i32 kSeesawThreads = kThreads + kWarpgroupThreads;
constexpr i32 kScoutWarp = kLoaderWarp + kWarpgroupWarps;
constexpr i32 kRegsOfOthers = 128;  // dequant and scouts
static_assert(2 * kRegsMath + kRegsOfOthers <= kRegsOfLane, "what the SM has");
static_assert(kTileTokens == kSw128Rows && kBlockM == kSw128Rows, "a tile is 64 rows, of keys and of Q");
constexpr i32 kDequantWarps = kWarpgroupWarps;
constexpr i32 kRowsOfLane = 2;
constexpr i32 kRowStep = kWarpThreads / kPieceLanes;  // from a lane's first row to its second
constexpr i32 kRowsOfWarp = kRowsOfLane * kRowStep;
static_assert(kDequantWarps * kRowsOfWarp == kTileTokens, "each row has its four lanes");

template <class Record>
constexpr i32 kTokenBytes = Record::kRopeOffset + kRopePieces<Record> * kPieceBytes;  // RoPE columns come last
constexpr i32 kNoQuery = -1;

// The first of the 16 query rows of a warp; others follow head by head.
template <class C>
MLA_DEVICE auto first_query_row(const RecordBlock<C>& block, i32 request, i32 warp) {
    i32 row = block.row0 + warp * kRowsOfWarp;
    if constexpr (C::Work::kForms) opaque(row);  // values derived from it would be kept from query to query
    return C::Tokens::query_row(block.p, request, block.kv_head, row);
}

// How many of them there are; below 0 where not even the first one is.
template <class C>
MLA_DEVICE i32 query_rows_of_warp(const RecordBlock<C>& block, i32 warp) {
    return min(block.rows - block.row0 - warp * kRowsOfWarp, kRowsOfWarp);
}

// ---- Scouts ----------------------------------------------------------------------------------------------------
// A scout's state of its dequantising warp's query rows, and its requests for them. With optional inputs this, the walk
// and TileBefore are kept in the lanes' words: attention/sm90/seesaw_records_forms.cuh.
template <class C, class Walk = SlimTileWalk<typename C::Work>>
struct ScoutedQuery {
    MLA_DEVICE static void remember(Walk&, const RecordBlock<C>&, i32) {}
    MLA_DEVICE static void prefetch(const Walk& walk, const RecordBlock<C>& block, i32 warp) {
        const i32 lane = own_lane();
#pragma unroll 1
        for (i32 i = 0; i < kRowsOfWarp; ++i) {
            const i32 row = block.row0 + warp * kRowsOfWarp + i;
            const u16* from =
                row < block.rows ? C::Tokens::query_row(block.p, walk.request, block.kv_head, row) : nullptr;
            if (from != nullptr && lane < C::kSwTilesQk) prefetch_global_l2(from + lane * kSw128Columns);
        }
    }
};

// Finds the 16 rows of each tile that one dequantising warp reads, one per lane (the upper lanes repeat that).
template <class C>
struct Scout {
    using TokenRecord = typename C::TokenRecord;
    using Tokens = typename C::Tokens;
    RecordBlock<C>& block;
    i32 warp;
    SlimTileWalk<typename C::Work> walk;
    bool exists;                   // the tile that the walk is at
    typename Tokens::Place place;  // of the lane's row of that tile

    MLA_DEVICE Scout(RecordBlock<C>& block, i32 warp)
        : block(block),
          warp(warp),
          walk(block.p, block.split, Tokens::kMasked ? block.hidden : 0),
          exists(true),
          place(Tokens::nowhere()) {
        ScoutedQuery<C>::remember(walk, block, warp);
    }

    MLA_DEVICE i32 row() const { return warp * kRowsOfWarp + own_lane() % kRowsOfWarp; }
    MLA_DEVICE i32 token() const { return walk.at() * kTileTokens + row(); }

    // The next tile, if there is one. The places of its rows are asked for.
    MLA_DEVICE void advance() {
        exists = in_uniform(walk.next(block.p));
        walk.make_uniform();
        place = exists ? Tokens::place(block.p, walk.item(), token()) : Tokens::nowhere();
    }

    // Before the first tile: the tile before has rows of zeros.
    MLA_DEVICE void reset() const {
        if (own_lane() >= kRowsOfWarp) return;
        block.s.extra.rows[row()] = kZeroRow;
        if constexpr (kScalesApart<TokenRecord>) block.s.extra.scales_at[row()] = kZeroRow;
    }

    MLA_DEVICE TokenBytes find() const { return find_token<TokenRecord, Tokens>(block.p, walk, token(), place); }

    MLA_DEVICE void prefetch_query() const { ScoutedQuery<C>::prefetch(walk, block, warp); }

    // Loads that are in flight for half a tile hide an L2's latency, not a memory's.
    // PERF(H200, 2026-11-22, 134 to 116 us with 64 heads and a batch of 128)
    MLA_DEVICE void prefetch_rows(const u8* row) const {
        constexpr i32 kBytes = kTokenBytes<TokenRecord>, kLineBytes = 128, kLines = ceil_div(kBytes, kLineBytes);
        const i32 lane = own_lane();
        const u64 all = reinterpret_cast<u64>(row);
        constexpr i32 kSideBySide = C::Work::kForms ? 1 : kRowsOfLane;
#pragma unroll kSideBySide
        for (i32 r = 0; r < kRowsOfLane; ++r) {
            const u64 from = __shfl_sync(kFullWarp, all, lane / kPieceLanes + r * kRowStep);
            const bool compact = kMixed<TokenRecord> && is_compact_row(reinterpret_cast<const u8*>(from));
#pragma unroll
            for (i32 line = 0; line < kLines; line += kPieceLanes) {
                const i32 at = (line + lane % kPieceLanes) * kLineBytes;
                if (at < (compact ? kBytes / 2 : kBytes)) prefetch_global_l2(reinterpret_cast<const u8*>(from) + at);
            }
        }
    }

    // Passes on the rows of a tile, and requests the scales of the tile before. Absent rows become rows of zeros with
    // scales of zero.
    MLA_DEVICE void pass_on(const TokenBytes& bytes, u32 parity) const {
        auto& e = block.s.extra;
        if (own_lane() >= kRowsOfWarp) return;
        const i32 at = row();
        const bool present = bytes.data != nullptr;
        const u8* scales;
        if constexpr (kScalesApart<TokenRecord>) {
            scales = e.scales_at[at];
            e.scales_at[at] = present ? bytes.scales : kZeroRow;
            if constexpr (C::kScoutsWalkOn) prefetch_global_l2(e.scales_at[at]);
        } else {
            scales = e.rows[at] + TokenRecord::kLatentChunks * kRecordChunk;
        }
        e.rows[at] = present ? bytes.data : kZeroRow;
        if constexpr (kMixed<TokenRecord>) {
            const bool compact = is_compact_row(scales);
            const SmemAddr to = smem_addr(&e.scales[at + parity * kTileTokens]);
            cp_async_16(to, scales - compact, true);
            if (compact) cp_async_16(to + 16, scales - compact + 16, true);
        } else if constexpr (!kHasValueScale<TokenRecord>) {
            cp_async<sizeof(typename LaneScales<TokenRecord>::OfRow)>(smem_addr(&e.scales[at]), scales, true);
        }
    }
};

// A scout's result for a tile, kept until it has found the next one.
template <class Walk>
struct TileBefore {
    u32 bits = 0;
    i32 query = kNoQuery;
    const i32 first_query;  // comes before all tiles
    bool second = false;    // tile of its work item

    MLA_DEVICE TileBefore(const Walk& walk) : first_query(walk.queries()) {}

    // The ring's phase stays in a register; with optional inputs it is one of the lanes' words.
    MLA_DEVICE void recall(Ring<1>&, const Walk&) const {}
    MLA_DEVICE void keep(const Ring<1>&, Walk&) const {}
    MLA_DEVICE void say(FoundTile& to, const Walk&, bool last) const {
        if (own_lane() == 0) to = {bits | (last ? FoundTile::kLast : 0), query};
    }
    MLA_DEVICE void remember(Walk& walk, u32 present) {
        // Q's buffer becomes free only when the previous query is done, later than both stages: the first tiles of a
        // query come before its Q.
        static_assert(kStagesKV == 2, "after the second tile, or the only one");
        const bool with_query = walk.first ? walk.ends() : second;
        bits = (present & FoundTile::kRows) | (walk.first ? FoundTile::kFirst : 0);
        query = with_query && walk.queries() != first_query ? walk.queries() : kNoQuery;
        second = walk.first;
    }
};

// While a tile is stored and the next one is loaded, the one after it is found.
template <class C>
MLA_DEVICE void run_scout_role(RecordBlock<C>& block, i32 warp) {
    auto& e = block.s.extra;
    Scout<C> scout(block, warp);
    scout.advance();
    if (!scout.exists) return;
    scout.reset();
    Ring<1> ring;
    TileBefore<SlimTileWalk<typename C::Work>> before(scout.walk);
#pragma unroll 1
    while (true) {
        const TokenBytes bytes = scout.find();
        const bool present = bytes.data != nullptr;
        before.recall(ring, scout.walk);
        mbarrier_wait(e.found_empty[warp], ring.empty_parity(0));
        ring.advance(0);
        before.keep(ring, scout.walk);
        scout.prefetch_rows(present ? bytes.data : kZeroRow);  // no earlier: PERF(H200, 2026-11-22, 336.6 not 345.1 us)
        scout.pass_on(bytes, ring.full_parity(0));             // the parity counts where there are two records
        before.say(e.found[warp], scout.walk, !scout.exists);
        const bool last = !scout.exists;
        if constexpr (C::kScoutsWalkOn) {
            cp_async_commit_group();  // of the scales alone
            if (!last) {
                before.remember(scout.walk, __ballot_sync(kFullWarp, present));
                scout.advance();
            }
            cp_async_wait_group<0>();
        } else {
            cp_async_wait_all();
        }
        release(e.found_full[warp], own_lane());
        if (last) break;

        if constexpr (!C::kScoutsWalkOn) {
            before.remember(scout.walk, __ballot_sync(kFullWarp, present));
            scout.advance();
        }
        if (scout.exists && scout.walk.first) scout.prefetch_query();
    }
}

// ---- Dequant role ----------------------------------------------------------------------------------------------
// A lane's pieces of a tile in order: the left half's of both rows, then the right half's.
template <class C>
struct PieceOrder {
    static constexpr i32 kLeft = C::kSwTilesLeft, kRight = C::kRowPieces - kLeft;
    static constexpr i32 kOfTile = kRowsOfLane * C::kRowPieces;
    // Pieces that are converted, and then reloaded. Two of "v32_nope" would spill 4 bytes over pages.
    static constexpr i32 kBatch = kRopePieces<typename C::TokenRecord> > 0 ? 2 : 1;

    MLA_DEVICE static constexpr bool is_left(i32 i) { return i < kRowsOfLane * kLeft; }
    MLA_DEVICE static constexpr i32 row(i32 i) { return is_left(i) ? i / kLeft : (i - kRowsOfLane * kLeft) / kRight; }
    MLA_DEVICE static constexpr i32 piece(i32 i) {
        return is_left(i) ? i % kLeft : kLeft + (i - kRowsOfLane * kLeft) % kRight;
    }
};

// Scales read from shared memory, for kernels short of registers: mixed records.
template <class Latent>
struct StoredScales {
    const u8* row;
    bool compact;

    MLA_DEVICE u32 of_piece(i32 piece, i32 lane) const {
        const i32 chunk = lane % kPieceLanes;
        const u32 code = row[compact ? piece * kPieceLanes + chunk : piece * 2 + chunk / 2];
        const float scale = compact ? cvt_f32_x2_e4m3(code).x : e8m0_value(code);
        return cvt_x2(Latent{}, scale, scale);
    }
};
template <class C, bool kStored>
struct SeesawScales {
    using Type = RowScales<typename C::TokenRecord, typename C::Latent>;
};
template <class C>
struct SeesawScales<C, true> {
    using Type = StoredScales<typename C::Latent>;
};

template <class C>
constexpr i32 kQuerySteps = ceil_div(C::kSwTilesQk * kSw128Chunks, kWarpThreads);
template <class C, class Work = typename C::Work>
struct QueryStart;

template <class C>
struct Dequantiser {
    using TokenRecord = typename C::TokenRecord;
    using Pieces = PieceOrder<C>;
    static constexpr bool kOfTwo = kMixed<TokenRecord>;
    using Scales = typename SeesawScales<C, kOfTwo>::Type;
    RecordBlock<C>& block;
    i32 warp, lane;
    Ring<kStagesKV + 2> ring;  // phases of kv_empty, and after them of q_empty and found_full
    static constexpr i32 kQ = kStagesKV, kFound = kStagesKV + 1;

    // A lane's first row of each tile.
    MLA_DEVICE i32 row0() const { return warp * kRowsOfWarp + lane / kPieceLanes; }

    // Address of the lane's bytes of its row r; tagged if the row is compact.
    MLA_DEVICE const u8* bytes_of_row(i32 r) const {
        if constexpr (kOfTwo) {
            const u8* from = block.s.extra.rows[row0() + r * kRowStep];
            return from + (is_compact_row(from) ? lane % kPieceLanes / 2 : lane % kPieceLanes) * 16;
        }
        return block.s.extra.rows[row0() + r * kRowStep] + lane % kPieceLanes * 16;
    }

    MLA_DEVICE uint4 load(const u8* bytes, i32 piece) const {
        if constexpr (kOfTwo) {
            const i32 compact = is_compact_row(bytes);
            return ld_global_16(bytes + (piece * kPieceBytes - compact * (piece * kPieceBytes / 2 + 1)));
        }
        if (piece < C::kLatentSwTiles || kRopePieces<TokenRecord> == 1) {
            return ld_global_16(bytes + piece * kPieceBytes);
        }
        const i32 odd_row = lane / kPieceLanes & 1;
        const i32 half = (piece - C::kLatentSwTiles) ^ odd_row;
        return ld_global_16(bytes + half * kPieceBytes + TokenRecord::kRopeOffset);
    }

    MLA_DEVICE Scales scales_of(i32 r, bool compact) const {
        if constexpr (kOfTwo) {
            const i32 at = row0() + r * kRowStep + ring.full_parity(kFound) * kTileTokens;
            return Scales{reinterpret_cast<const u8*>(&block.s.extra.scales[at]), compact};
        } else if constexpr (kHasValueScale<TokenRecord>) {
            return Scales({});
        } else {
            const auto& row = block.s.extra.scales[row0() + r * kRowStep];
            return Scales(LaneScales<TokenRecord>::of_row(row, lane));
        }
    }

    // The warp's query rows where cp.async cannot copy them: their addresses are no multiples of 16.
    MLA_DEVICE void copy_query(const u16* from) const {
        using Element = typename C::Element;
        const i32 rows = query_rows_of_warp(block, warp);
#pragma unroll 1
        for (i32 i = 0; i < kRowsOfWarp; ++i, from += block.p.q_stride_h_elems) {
            QueryRow<C> row;
            row.load(i < rows ? from : nullptr, lane);
            store_query_row<C, Element, Element>(block.s.q, kSw128Bytes, row, warp * kRowsOfWarp + i, lane);
        }
    }

    // Copies the warp's query rows ...
    MLA_DEVICE void start_query(i32 query) {
        RecordStorage<C>& s = block.s;
        mbarrier_wait(s.q_empty, ring.empty_parity(kQ));
        ring.advance(kQ);
        QueryStart<C>::run(*this, query);
    }

    // ... in steps [kBegin, kEnd) of each row, a chunk per lane ...
    template <i32 kBegin, i32 kEnd>
    MLA_DEVICE void start_steps(const u16* row, i64 stride) const {
        RecordStorage<C>& s = block.s;
        constexpr i32 kChunks = C::kSwTilesQk * kSw128Chunks, kSwTilesOfStep = kWarpThreads / kSw128Chunks;
        const i32 first = warp * kRowsOfWarp;
        row += lane * kChunkElems;
        const SmemAddr tiles = smem_addr(s.q) + lane / kSw128Chunks * kSw128Bytes;
        constexpr i32 kSideBySide = C::Work::kForms ? 1 : 2;
#pragma unroll kSideBySide
        for (i32 i = 0; i < kRowsOfWarp; ++i, row += stride) {
            const bool present = block.row0 + first + i < block.rows;
            const u16* from = present ? row : block.p.q;
            const SmemAddr to = tiles + sw128_offset(first + i, lane % kSw128Chunks);
#pragma unroll
            for (i32 step = kBegin; step < kEnd; ++step) {
                if (lane + step * kWarpThreads >= kChunks) continue;
                cp_async_16(to + step * kSwTilesOfStep * kSw128Bytes,
                            from + (present ? step * kWarpThreads * kChunkElems : 0), present);
            }
        }
    }

    // ... and then scales and converts them where they are.
    MLA_DEVICE void finish_query() const {
        RecordStorage<C>& s = block.s;
        cp_async_wait_all();
        __syncwarp();
        if constexpr (C::kScaledQueries) {
            constexpr i32 kSideBySide = kHasValueScale<TokenRecord> ? 1 : 2;  // NVRTC 13.0 would spill two of "fp8"
#pragma unroll kSideBySide
            for (i32 i = 0; i < kRowsOfWarp; ++i) {
                const i32 at = warp * kRowsOfWarp + i;
                QueryRow<C> row;
                row.load_stored(s.q, kSw128Bytes, at, lane);
                const float factor =
                    store_query_row<C, typename C::Element, typename C::Latent>(s.q, kSw128Bytes, row, at, lane);
                if (lane == 0) s.extra.q_factors[at] = factor;
            }
        }
        release(s.q_full, lane);
    }

    // Stores pieces [begin, end) of a tile, and refills their registers from the next tile. The loads come after the
    // warp's barrier, which keeps the compiler from moving them up: there they would need other registers, and the copy
    // back would wait for them.
    template <i32 kBegin, i32 kEnd>
    MLA_DEVICE void store_pieces(u8* tile, uint4 (&held)[Pieces::kOfTile], const Scales (&scales)[kRowsOfLane],
                                 const u8* const (&next)[kRowsOfLane]) const {
#pragma unroll
        for (i32 batch = kBegin; batch < kEnd; batch += Pieces::kBatch) {
#pragma unroll
            for (i32 i = batch; i < min(batch + Pieces::kBatch, kEnd); ++i) {
                const i32 r = Pieces::row(i), piece = Pieces::piece(i);
                u8* to = tile + C::sw_tile_of(piece) * kSw128Bytes + r * kRowStep * kSw128RowBytes;
                if constexpr (kOfTwo) {
                    store_latent<typename C::Latent>(to, unpacked_piece(held[i], scales[r].compact, lane),
                                                     scales[r].of_piece(piece, lane), row0(), lane);
                } else if (piece < C::kLatentSwTiles || kScaledRope<TokenRecord>) {
                    store_latent<typename C::Latent>(to, held[i], scales[r].of_piece(piece, lane), row0(), lane);
                } else {
                    store_rope_piece<TokenRecord, typename C::Rope>(to, held[i], piece - C::kLatentSwTiles, row0(),
                                                                    lane);
                }
            }
            __syncwarp();
#pragma unroll
            for (i32 i = batch; i < min(batch + Pieces::kBatch, kEnd); ++i) {
                held[i] = load(next[Pieces::row(i)], Pieces::piece(i));
            }
        }
    }
};

// Copies a query's rows, in one array.
template <class C, class Work>
struct QueryStart {
    MLA_DEVICE static void run(const Dequantiser<C>& to, i32 query) {
        const i64 stride = to.block.p.q_stride_h_elems;
        const u16* row = first_query_row(to.block, query, to.warp);
        if constexpr (C::Tokens::kQueriesAnywhere) {
            if (((reinterpret_cast<u64>(row) | 2 * stride) & 15) != 0) return to.copy_query(row);
        }
        to.template start_steps<0, kQuerySteps<C>>(row, stride);
    }
};

// While a tile is stored, the next one is loaded.
template <class C>
MLA_DEVICE void run_dequant_role(RecordBlock<C>& block, i32 warp, i32 lane) {
    using Pieces = PieceOrder<C>;
    using Queue = Dequantiser<C>;
    RecordStorage<C>& s = block.s;
    auto& e = s.extra;
    Dequantiser<C> dequantiser{block, warp, lane};
    {
        SlimTileWalk<typename C::Work> walk(block.p, block.split);
        if (!walk.next(block.p)) return;
        dequantiser.start_query(walk.queries());
    }
    uint4 held[Pieces::kOfTile];
    bool compact[kRowsOfLane] = {};  // what is held
    {
        mbarrier_wait(e.found_full[warp], dequantiser.ring.full_parity(Queue::kFound));
        dequantiser.ring.advance(Queue::kFound);
        const u8* const rows[kRowsOfLane] = {dequantiser.bytes_of_row(0), dequantiser.bytes_of_row(1)};
        release(e.found_empty[warp], lane);
        if (Queue::kOfTwo) compact[0] = is_compact_row(rows[0]), compact[1] = is_compact_row(rows[1]);
#pragma unroll
        for (i32 i = 0; i < Pieces::kOfTile; ++i) {
            held[i] = dequantiser.load(rows[Pieces::row(i)], Pieces::piece(i));
        }
    }
    dequantiser.finish_query();
    i32 stage = 0;
#pragma unroll 1
    while (true) {
        lane = dequantiser.lane = own_lane();
        mbarrier_wait(e.found_full[warp], dequantiser.ring.full_parity(Queue::kFound));
        dequantiser.ring.advance(Queue::kFound);
        const FoundTile found = e.found[warp];
        i32 at_end = found.query * 2 + found.last();  // in one register
        if constexpr (C::Work::kForms) opaque(at_end);
        const u8* const next[kRowsOfLane] = {dequantiser.bytes_of_row(0), dequantiser.bytes_of_row(1)};
        const typename Queue::Scales scales[kRowsOfLane] = {dequantiser.scales_of(0, compact[0]),
                                                            dequantiser.scales_of(1, compact[1])};
        if (Queue::kOfTwo) compact[0] = is_compact_row(next[0]), compact[1] = is_compact_row(next[1]);
        release(e.found_empty[warp], lane);
        if (found.first()) stage = 0;
        constexpr i32 kLeftPieces = kRowsOfLane * Pieces::kLeft;
        mbarrier_wait(s.kv_empty[stage].left, dequantiser.ring.empty_parity(stage));
        if (lane == 0) reinterpret_cast<u16*>(&s.notes.present[stage])[warp] = (u16)found.bits;
        dequantiser.template store_pieces<0, kLeftPieces>(s.kv[stage], held, scales, next);
        release(s.kv_full[stage].left, lane);
        lane = dequantiser.lane = own_lane();
        opaque(reinterpret_cast<i32&>(dequantiser.ring.phases));  // the parity again: NVRTC 13.0 would spill one kept
        mbarrier_wait(s.kv_empty[stage].right, dequantiser.ring.empty_parity(stage));
        dequantiser.template store_pieces<kLeftPieces, Pieces::kOfTile>(s.kv[stage], held, scales, next);
        release(s.kv_full[stage].right, lane);
        dequantiser.ring.advance(stage);
        stage ^= 1;
        const i32 query = C::Work::kForms ? at_end >> 1 : found.query;
        if (query != kNoQuery) {
            dequantiser.start_query(query);
            dequantiser.finish_query();
        }
        if (C::Work::kForms ? at_end & 1 : found.last()) break;
    }
}

// ---- Kernel ----------------------------------------------------------------------------------------------------
// All of it, in the block's dynamic shared memory.
template <class C>
MLA_DEVICE void run_seesaw_records(const DecodeParams& p, u8* smem) {
    static_assert(sizeof(RecordStorage<C>) <= kMaxDynamicSmem, "shared memory");
    RecordStorage<C>& s = *reinterpret_cast<RecordStorage<C>*>(smem);
    RecordBlock<C> block(p, s);
    if (threadIdx.x == 0) {
        init_ring(s.extra.found_full, s.extra.found_empty, 1, 1);
        s.init(kDequantWarps, kDequantWarps);
    }
    __syncthreads();
    griddepcontrol_wait();  // before the first read of anything that an earlier kernel may have written

    const i32 warp = uniform_warp();
    const i32 thread = threadIdx.x % kWarpgroupThreads;
    static_assert(kRegsDequant<C> + kRegsScout<C> <= kRegsOfOthers, "what is left of the SM");
    const auto scouts = [&] {
        setmaxnreg_dec<kRegsScout<C>>();
        run_scout_role(block, warp - kScoutWarp);
    };
    const auto dequant = [&] {
        setmaxnreg_dec<kRegsDequant<C>>();
        run_dequant_role(block, warp - kLoaderWarp, thread % kWarpThreads);
    };
    // In the other order registers are spilled: of the scouts of "fp8" by NVRTC 12.9, of "v4" with forms by 13.0.
    if constexpr (C::kValueScale || C::Work::kForms) {
        if (warp >= kScoutWarp) {
            scouts();
        } else if (warp >= kLoaderWarp) {
            dequant();
        } else {
            setmaxnreg_inc<kRegsMath>();
            if (warp < kRightWarp) {
                run_math_in_turns<false>(block, thread);
            } else {
                run_math_in_turns<true>(block, thread);
            }
        }
    } else if (warp < kRightWarp) {
        setmaxnreg_inc<kRegsMath>();
        run_math_in_turns<false>(block, thread);
    } else if (warp < kLoaderWarp) {
        setmaxnreg_inc<kRegsMath>();
        run_math_in_turns<true>(block, thread);
    } else if (warp >= kScoutWarp) {
        scouts();
    } else {
        dequant();
    }
    griddepcontrol_launch_dependents();
}
}  // namespace mla::attention::sm90

// Facts of a kernel with these roles, in addition to the layout of its parameters.
#define MLA_SEESAW_RECORDS_FACTS(C)                                       \
    MLA_FACT(threads, mla::attention::sm90::kSeesawThreads);              \
    MLA_FACT(smem_bytes, sizeof(mla::attention::sm90::RecordStorage<C>)); \
    MLA_FACT(block_m, mla::attention::sm90::kBlockM);                     \
    MLA_RECORD_FACT(C::TokenRecord)
