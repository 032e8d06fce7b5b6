// Sparse MLA decode from FP8 records on Hopper, 64 heads per block: the seesaw over keys that a warpgroup dequantises.
//
//   S = Q K^T * scale            (64 heads x d_qk) (d_qk x 64) per tile of 64 listed tokens
//   P = exp2(S log2(e) - m)      m: running row maximum
//   l = sum of P,  O = P V       V is K's first 512 columns
//   out = O / (l + exp2(sink - m)),   lse = ln 2 (m + log2 l)
//
// Grid: x = blocks of 64 heads, y = splits. To the schedule each query is a request whose tokens are its list
// (sparse_decode/lists.cu). One block per SM iterates over the work items of its split (attention/split_work.cuh). No
// cluster: blocks of one query dequantise for themselves.
//
// The mathematics are dense decode's seesaw (attention/sm90/seesaw.cuh). The third warpgroup reads rows into registers
// and writes 16-bit tiles:
//
//   left     | softmax 0 | O_L += P0 V0_L |          | O_L += P1 V1_L | S0 = Q K0'            | softmax 0'
//   right    |   S1      |  softmax 1     | O_R += P0 V0_R | O_R += P1 V1_R | S1 = Q K1'      | ...
//   dequant  |           |       K0'_left ->  K1'_left, K0'_right ->  K1'_right ->   ... and Q of the next query
//
// Source: FlashMLA's FP8 sparse decode (2025) also dequantises in a third warpgroup. What differs: both math warpgroups
// score, f16 where scales are no powers of two, and no exchange of dequantised keys between blocks.
#include "attention/record_tokens.cuh"
#include "attention/sm90/record_query.cuh"
#include "attention/sm90/seesaw.cuh"
#include "ptx/copy.cuh"
#include "tile/warp.cuh"

namespace mla::sparse_decode {
using namespace attention;
using namespace attention::sm90;

// ---- Variant ---------------------------------------------------------------------------------------------------
using TokenRecord = MLA_RECORD;

// Values of the record include the RoPE columns, or not.
constexpr bool kRopeIsValue = kKeyColumns<TokenRecord> == kHeadDimV;

// No SW128 tile of Q is kept in registers: they go to the dequantising warps.
struct Fp8 : RecordTile<TokenRecord> {
    using Element = MLA_DTYPE;
    using Latent = KeyFormats<TokenRecord, Element>::Latent;
    using Rope = KeyFormats<TokenRecord, Element>::Rope;
    static constexpr bool kSparse = true, kTree = false;
    static constexpr bool kWithRowMax = false;
    static constexpr bool kSkipsTokens = true;
    using Work = SelectedWork;
    // The dequantising warps have loads in flight, for which a fence would most likely wait.
    static constexpr bool kFencedByConsumers = true;
    static constexpr i32 kResidentSwTile = kNothingResident;

    static constexpr bool kScaledQueries = !kSameFormat<Element, Latent>;
    struct Extra {
        float q_factors[kBlockM];
        alignas(16) LaneScales<TokenRecord>::OfRow scales[kTileTokens];  // of the tile after that being stored
        i32 slots[kTileTokens];                                          // of the one after that
    };

    // The halves: SW128 tiles 0..3, and the others. RoPE columns are written last.
    static constexpr i32 kSwTilesLeft = kSwTilesHalf;
    MLA_DEVICE static constexpr i32 sw_tile_in_order(i32 i) { return i; }

    // P of an odd tile takes the place of its RoPE columns, if those are no values. Only the right warpgroup scores the
    // tile, and MaxReady, on which all of its warps sync, comes between its scores and P. Before the place is written
    // again, both warpgroups have released the stage.
    static constexpr i32 kPBuffers = kRopeIsValue ? 2 : 1;
    template <class S>
    MLA_DEVICE static u8* second_p(S& s) {
        return kRopeIsValue ? s.p_buffers[kPBuffers - 1] : s.kv[1] + kRopeSwTile * kSw128Bytes;
    }
};

// ---- Budget ----------------------------------------------------------------------------------------------------
// role          warps    regs   does
// left          0..3     192    even tiles: S0, softmax
// right         4..7     192    odd tiles:  S1, softmax
// dequant       8..11    120    16 rows of each tile per warp; query rows
constexpr i32 kRegsMath = 192;
constexpr i32 kRegsDequant = 120;
static_assert(2 * kRegsMath + kRegsDequant <= 3 * kRegsEntry, "what the block has at entry");
static_assert(kTileTokens == kSw128Rows && kBlockM == kSw128Rows, "a tile is 64 rows, of keys and of Q");
static_assert(sizeof(Storage<Fp8>) <= kMaxDynamicSmem, "shared memory");
constexpr i32 kDequantWarps = kWarpgroupWarps;
constexpr i32 kRowsOfLane = 2;
constexpr i32 kRowStep = kWarpThreads / kPieceLanes;  // from a lane's first row to its second
constexpr i32 kRowsOfWarp = kRowsOfLane * kRowStep;
static_assert(kDequantWarps * kRowsOfWarp == kTileTokens, "each row has its four lanes");

MLA_SPARSE_DECODE_FACTS();
MLA_FACT(threads, kThreads);
MLA_FACT(smem_bytes, sizeof(Storage<Fp8>));
MLA_FACT(block_m, kBlockM);
MLA_RECORD_FACT(TokenRecord);

// ---- Dequant role ----------------------------------------------------------------------------------------------
// A lane's pieces of a tile in order: the left half's of both rows, then the right half's.
struct Pieces {
    static constexpr i32 kLeft = Fp8::kSwTilesLeft, kRight = Fp8::kRowPieces - kLeft;
    static constexpr i32 kOfTile = kRowsOfLane * Fp8::kRowPieces;
    static constexpr i32 kBatch = 2;  // are converted, and then reloaded

    MLA_DEVICE static constexpr bool is_left(i32 i) { return i < kRowsOfLane * kLeft; }
    MLA_DEVICE static constexpr i32 row(i32 i) { return is_left(i) ? i / kLeft : (i - kRowsOfLane * kLeft) / kRight; }
    MLA_DEVICE static constexpr i32 piece(i32 i) {
        return is_left(i) ? i % kLeft : kLeft + (i - kRowsOfLane * kLeft) % kRight;
    }
};

constexpr i32 kTokenBytes = TokenRecord::kRopeOffset + 2 * kHeadDimRope;  // RoPE columns come last
constexpr i32 kNoQuery = -1;
constexpr i32 kTilesBeforeQuery = kStagesKV;

// A tile whose slots have been asked for.
struct ListedTile {
    i32 tag;  // packed to save registers: see below

    MLA_DEVICE bool exists() const { return tag != 0; }
    MLA_DEVICE bool first() const { return tag & 2; }        // of its work item: in stage 0
    MLA_DEVICE i32 query() const { return (tag >> 2) - 1; }  // whose rows are stored after the tile, or kNoQuery
    MLA_DEVICE void set(bool first, i32 query) { tag = (query + 1) << 2 | (first ? 2 : 0) | 1; }
};

struct Dequantiser {
    Block<Fp8>& block;
    i32 warp, lane;
    Ring<kStagesKV> ring;
    Ring<1> q_ring;

    // A lane's first row of each tile. (Of the addresses, it has that of row `lane`, and asks other lanes for its own.)
    MLA_DEVICE i32 row0() const { return warp * kRowsOfWarp + lane / kPieceLanes; }

    // The address of head `i` of the warp's heads; null past the last one.
    MLA_DEVICE const u16* query_row(i32 query, i32 i) const {
        const i32 head = block.row0 + warp * kRowsOfWarp + i;
        const DecodeParams& p = block.p;
        return head < block.rows ? p.q + query * p.q_stride_b_elems + head * p.q_stride_h_elems : nullptr;
    }

    // Q's buffer becomes free only when the previous query is done, later than both stages: the first tiles of a query
    // come before its Q. Of the split's first query it comes before all: nothing of that item is `second`.
    MLA_DEVICE ListedTile list_next(SlimTileWalk<SelectedWork>& walk, bool second) const {
        ListedTile listed{0};
        if (!walk.next(block.p)) return listed;
        const i32* entry = SelectedTokens::entry_of(block.p, walk, token_of_lane(walk));
        const bool present = entry != nullptr;
        if (lane < kRowsOfWarp) cp_async<4>(smem_addr(&slot()), present ? entry : block.p.block_table, present);
        static_assert(kTilesBeforeQuery == 2, "after the second tile, or the only one");
        const bool with_query = walk.first ? walk.tile + 1 == walk.tile_end : second;
        listed.set(walk.first, with_query ? walk.request : kNoQuery);
        if (walk.first) prefetch_query(walk.request);
        return listed;
    }

    MLA_DEVICE i32 token_of_lane(const SlimTileWalk<SelectedWork>& walk) const {
        return walk.tile * kTileTokens + warp * kRowsOfWarp + lane % kRowsOfWarp;
    }

    MLA_DEVICE i32& slot() const { return block.s.extra.slots[warp * kRowsOfWarp + lane % kRowsOfWarp]; }

    // Where row `lane` of the tile that was read last is. Its scales are asked for.
    MLA_DEVICE const u8* find(const SlimTileWalk<SelectedWork>& walk, const ListedTile& listed) const {
        const i32 token = token_of_lane(walk);
        const i32 slot = listed.exists() && token < walk.tokens ? this->slot() : SelectedTokens::kNoSlot;
        const TokenBytes bytes = SelectedTokens::bytes<TokenRecord>(block.p, walk, token, slot);
        const bool present = bytes.data != nullptr;
        __syncwarp();
        if (lane < kRowsOfWarp) {
            const SmemAddr to = smem_addr(&block.s.extra.scales[warp * kRowsOfWarp + lane]);
            cp_async<sizeof(LaneScales<TokenRecord>::OfRow)>(to, present ? bytes.scales : kZeroRow, present);
        }
        return present ? bytes.data : kZeroRow;
    }

    // Where the lane's row r is.
    MLA_DEVICE const u8* row_of_lane(const u8* of_lane, i32 r) const {
        const u64 all = reinterpret_cast<u64>(of_lane);
        return reinterpret_cast<const u8*>(__shfl_sync(kFullWarp, all, lane / kPieceLanes + r * kRowStep));
    }

    MLA_DEVICE RowScales<TokenRecord, Fp8::Latent> scales_of(i32 r) const {
        const auto& row = block.s.extra.scales[row0() + r * kRowStep];
        return RowScales<TokenRecord, Fp8::Latent>(LaneScales<TokenRecord>::of_row(row, lane));
    }

    MLA_DEVICE void prefetch_query(i32 query) const {
#pragma unroll 1
        for (i32 i = 0; i < kRowsOfWarp; ++i) {
            const u16* from = query_row(query, i);
            if (from != nullptr && lane < Fp8::kSwTilesQk) prefetch_global_l2(from + lane * kSw128Columns);
        }
    }

    // Copies the warp's query rows ...
    MLA_DEVICE void start_query(i32 query) {
        Storage<Fp8>& s = block.s;
        mbarrier_wait(s.q_empty, q_ring.empty_parity(0));
        q_ring.advance(0);
        constexpr i32 kChunks = Fp8::kSwTilesQk * kSw128Chunks, kSwTilesOfStep = kWarpThreads / kSw128Chunks;
        const i32 first = warp * kRowsOfWarp;
        const DecodeParams& p = block.p;
        const u16* row =
            p.q + query * p.q_stride_b_elems + (block.row0 + first) * p.q_stride_h_elems + lane * kChunkElems;
        const SmemAddr tiles = smem_addr(s.q) + lane / kSw128Chunks * kSw128Bytes;
#pragma unroll 2
        for (i32 i = 0; i < kRowsOfWarp; ++i, row += p.q_stride_h_elems) {
            const bool present = block.row0 + first + i < block.rows;
            const u16* from = present ? row : p.q;
            const SmemAddr to = tiles + sw128_offset(first + i, lane % kSw128Chunks);
#pragma unroll
            for (i32 step = 0; step < ceil_div(kChunks, kWarpThreads); ++step) {
                if (lane + step * kWarpThreads >= kChunks) continue;
                cp_async_16(to + step * kSwTilesOfStep * kSw128Bytes,
                            from + (present ? step * kWarpThreads * kChunkElems : 0), present);
            }
        }
    }

    // ... and then scales and converts them where they are.
    MLA_DEVICE void finish_query() const {
        Storage<Fp8>& s = block.s;
        cp_async_wait_all();
        __syncwarp();
        if constexpr (Fp8::kScaledQueries) {
#pragma unroll 2
            for (i32 i = 0; i < kRowsOfWarp; ++i) {
                const i32 at = warp * kRowsOfWarp + i;
                QueryRow<Fp8> row;
                row.load_stored(s.q, kSw128Bytes, at, lane);
                const float factor = store_query_row<Fp8, Fp8::Element, Fp8::Latent>(s.q, kSw128Bytes, row, at, lane);
                if (lane == 0) s.extra.q_factors[at] = factor;
            }
        }
        release(s.q_full, lane);
    }

    // Half a tile in flight hides an L2's latency, not a memory's: rows are brought into L2 half a tile earlier.
    // PERF(H200, 2026-11-22, 134 to 116 us with 64 heads and a batch of 128)
    MLA_DEVICE void prefetch_rows(const u8* data) const {
        constexpr i32 kLineBytes = 128, kLines = ceil_div(kTokenBytes, kLineBytes);
#pragma unroll
        for (i32 r = 0; r < kRowsOfLane; ++r) {
            const u8* from = row_of_lane(data, r);
#pragma unroll
            for (i32 line = 0; line < kLines; line += kPieceLanes) {
                const i32 at = (line + lane % kPieceLanes) * kLineBytes;
                if (at < kTokenBytes) prefetch_global_l2(from + at);
            }
        }
    }

    // Which of the warp's rows are there, as bits.
    MLA_DEVICE u32 present_rows(const u8* data) const { return __ballot_sync(kFullWarp, data != kZeroRow); }

    // Stores pieces [begin, end) of a tile, and refills their registers with those of the next tile. The loads come
    // after the warp's barrier, which keeps the compiler from moving them up: they would need other registers, and be
    // waited for when they are copied back.
    template <i32 kBegin, i32 kEnd>
    MLA_DEVICE void store_pieces(u8* tile, uint4 (&held)[Pieces::kOfTile],
                                 const RowScales<TokenRecord, Fp8::Latent> (&scales)[kRowsOfLane],
                                 const u8* next) const {
#pragma unroll
        for (i32 batch = kBegin; batch < kEnd; batch += Pieces::kBatch) {
#pragma unroll
            for (i32 i = batch; i < min(batch + Pieces::kBatch, kEnd); ++i) {
                const i32 r = Pieces::row(i), piece = Pieces::piece(i), row = row0() + r * kRowStep;
                u8* to = tile + Fp8::sw_tile_of(piece) * kSw128Bytes;
                if (piece < Fp8::kLatentSwTiles) {
                    store_latent<Fp8::Latent>(to, held[i], scales[r].of_piece(piece, lane), row, lane);
                } else {
                    store_rope<Fp8::Rope>(to, held[i], piece - Fp8::kLatentSwTiles, row, lane);
                }
            }
            __syncwarp();
            const u8* const rows[kRowsOfLane] = {row_of_lane(next, 0), row_of_lane(next, 1)};
#pragma unroll
            for (i32 i = batch; i < min(batch + Pieces::kBatch, kEnd); ++i) {
                held[i] = load_piece<TokenRecord>(rows[Pieces::row(i)], Pieces::piece(i), lane);
            }
        }
    }
};

// While a tile is stored, the next one is loaded, and the slots of the one after it.
MLA_DEVICE void run_dequant_role(Block<Fp8>& block, i32 warp, i32 lane) {
    Storage<Fp8>& s = block.s;
    Dequantiser dequantiser{block, warp, lane};
    SlimTileWalk<SelectedWork> walk(block.p, block.split);
    ListedTile current = dequantiser.list_next(walk, false);
    if (!current.exists()) return;
    current.set(true, kNoQuery);
    cp_async_commit_group();
    dequantiser.start_query(walk.request);
    cp_async_wait_group<0>();  // not for the query
    __syncwarp();
    const u8* token = dequantiser.find(walk, current);
    ListedTile next = dequantiser.list_next(walk, false);
    uint4 held[Pieces::kOfTile];
#pragma unroll
    for (i32 i = 0; i < Pieces::kOfTile; ++i) {
        const u8* row = dequantiser.row_of_lane(token, Pieces::row(i));
        held[i] = load_piece<TokenRecord>(row, Pieces::piece(i), lane);
    }
    dequantiser.finish_query();
    i32 stage = 0;
#pragma unroll 1
    while (true) {
        opaque(dequantiser.lane);  // derived values are not worth registers across the loop
        const u32 present = dequantiser.present_rows(token);
        cp_async_wait_group<0>();
        __syncwarp();
        const RowScales<TokenRecord, Fp8::Latent> scales[kRowsOfLane] = {dequantiser.scales_of(0),
                                                                         dequantiser.scales_of(1)};
        token = dequantiser.find(walk, next);
        dequantiser.prefetch_rows(token);
        if (current.first()) stage = 0;
        const ListedTile after = dequantiser.list_next(walk, next.first());
        cp_async_commit_group();
        constexpr i32 kLeftPieces = kRowsOfLane * Pieces::kLeft;
        mbarrier_wait(s.kv_empty[stage].left, dequantiser.ring.empty_parity(stage));
        if (lane == 0) reinterpret_cast<u16*>(&s.present[stage])[warp] = (u16)present;
        dequantiser.store_pieces<0, kLeftPieces>(s.kv[stage], held, scales, token);
        release(s.kv_full[stage].left, lane);
        opaque(reinterpret_cast<i32&>(dequantiser.ring.phases));  // the parity again: NVRTC 13.0 would spill one kept
        mbarrier_wait(s.kv_empty[stage].right, dequantiser.ring.empty_parity(stage));
        dequantiser.store_pieces<kLeftPieces, Pieces::kOfTile>(s.kv[stage], held, scales, token);
        release(s.kv_full[stage].right, lane);
        dequantiser.ring.advance(stage);
        stage ^= 1;
        if (current.query() != kNoQuery) {
            dequantiser.start_query(current.query());
            dequantiser.finish_query();
        }
        if (!next.exists()) break;
        current = next;
        next = after;
    }
}

// ---- Kernel ----------------------------------------------------------------------------------------------------
extern "C" __global__ void __launch_bounds__(kThreads, 1)
    mla_sparse_decode_sm90(const __grid_constant__ SparseDecodeParams p) {
    extern __shared__ __align__(kSwizzleAtomBytes) u8 smem[];
    auto& s = *reinterpret_cast<Storage<Fp8>*>(smem);
    Block<Fp8> block(p, s);
    if (threadIdx.x == 0) init_storage(s, kDequantWarps, kDequantWarps);
    __syncthreads();
    griddepcontrol_wait();  // before the first read of anything that an earlier kernel may have written

    const i32 warp = uniform_warp();
    const i32 thread = threadIdx.x % kWarpgroupThreads;
    if (warp < kRightWarp) {
        setmaxnreg_inc<kRegsMath>();
        run_left_role(block, thread);
    } else if (warp < kLoaderWarp) {
        setmaxnreg_inc<kRegsMath>();
        run_right_role(block, thread);
    } else {
        setmaxnreg_dec<kRegsDequant>();
        run_dequant_role(block, warp - kLoaderWarp, thread % kWarpThreads);
    }
    griddepcontrol_launch_dependents();
}
}  // namespace mla::sparse_decode
