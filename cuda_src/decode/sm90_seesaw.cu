// Dense MLA decode on Hopper: two warpgroups that alternate on the tensor cores ("seesaw").
//
//   S = Q K^T * scale            (64 x 576) (576 x 64) per tile of 64 tokens
//   P = exp2(S log2(e) - m)      m: running row maximum, shared by both warpgroups
//   l = sum of P,  O = P V       V is K's first 512 columns
//   out = O / l,   lse = ln 2 (m + log2 l)
//
// Grid: x = blocks of 64 of the s_q * h_q query rows of a request, y = splits. One block per SM iterates over the work
// items of its split (attention/split_work.cuh). No cluster. Even and odd tiles count from an item's first one.
//
// Tiles are processed in pairs: the left warpgroup scores the even tile, the right one the odd tile, and each
// multiplies both P's with its own half of the values, so that neither needs more than 64 x 256 accumulators. While one
// warpgroup is in its softmax, the other one has products to issue:
//
//   left    | softmax 0 | O_L += P0 V0_L |          | O_L += P1 V1_L | S0 = Q K0'            | softmax 0'
//   right   |   S1      |  softmax 1     | O_R += P0 V0_R | O_R += P1 V1_R | S1 = Q K1'      | ...
//   load    |           |       K0'_left, K0'_right ->  K1'_left, K1'_right ->
//
// Variants: a mask over drafts (decode/sm90_seesaw_tree.cuh), optional inputs (decode/sm90_seesaw_forms.cuh). They plug
// in where a call loads, masks and stores: see PlainCall.
//
// Source: the two-warpgroup split of O and the shared maximum are FlashMLA's idea (its "seesaw" schedule, 2025).
// Differences: separate loader warps and one mechanism for all page sizes; one running maximum instead of exchanged
// scales; both warpgroups add tile 0 before tile 1, so P0 is written once and never rescaled; the maximum moves only by
// more than 8, so O is almost never rescaled.
#include "attention/sm90/nonfinite_values.cuh"
#include "attention/sm90/two_warpgroups.cuh"
#include "common/limits.cuh"
#include "decode/sm90_huge_rows.cuh"
#include "decode/sm90_load.cuh"
#include "decode/split_rows.cuh"
#include "tile/warp.cuh"

#if defined(MLA_FORMS)
#include "decode/sm90_seesaw_forms.cuh"
#elif defined(MLA_TREE_MASK)
#include "decode/sm90_seesaw_tree.cuh"
#endif

// Keys have RoPE columns unless a variant says otherwise.
#ifndef MLA_HEAD_DIM_QK
#define MLA_HEAD_DIM_QK 576
#endif

namespace mla::decode {
// ---- Call ------------------------------------------------------------------------------------------------------
template <class Tile>
struct BoxKeys;

// A variant chooses: its work items and what rows see (Work), how keys arrive (Keys, Layout), data that comes with the
// query rows (load), the mask on scores and values (mask, Hidden), and a final step before the output is stored
// (store).
struct PlainCall : PlainRows {
    using Work = SplitQueryWork;
    using Hidden = HiddenTokens;
    using Layout = HalfLayout</*kRowsInTurn=*/true>;
    template <class Tile>
    using Keys = BoxKeys<Tile>;
    struct Extra {};  // in shared memory, from load to mask

    template <class Block>
    MLA_DEVICE static void load(Block&, const WorkItem&, i32) {}

    template <class Block>
    MLA_DEVICE static void mask(float (&scores)[kScoresPerThread], const Block& block, const WorkItem& item, i32 tile,
                                i32 row, u64 present, i32 thread) {
        mask_hidden_rows<Work>(scores, block.p, item, tile, row, present, thread);
    }

    template <class Block>
    MLA_DEVICE static void store(const Block&, const WorkItem&, Math&, i32) {}

    template <class Tile>
    MLA_DEVICE static float score(const DecodeParams& p, const WorkItem& item, i32 kv_head, i32 row, const u16* key) {
        return split_score<Tile>(p, split_query_row(p, item.request, 0, kv_head, row), key);
    }
};

// ---- Variant ---------------------------------------------------------------------------------------------------
#if defined(MLA_FORMS)
using Call = FormsCall;
using Params = DecodeFormParams;
MLA_DECODE_FORM_FACTS();
#elif defined(MLA_TREE_MASK)
using Call = TreeCall;
using Params = DecodeParams;
MLA_DECODE_FACTS();
#else
using Call = PlainCall;
using Params = DecodeRopeParams;
MLA_DECODE_ROPE_FACTS();
#endif

struct Tile : PairTile<MLA_DTYPE, MLA_HEAD_DIM_QK> {
    using Layout = Call::Layout;
};
using Work = Call::Work;
using Keys = Call::Keys<Tile>;

// ---- Budget ----------------------------------------------------------------------------------------------------
// role          warps    regs   does
// left          0..3     224    even tiles: S0, softmax; owns O[:, :256]
// right         4..7     224    odd tiles:  S1, softmax; owns O[:, 256:]
// load, query   8..11    56     warp 8: KV tiles by TMA, page by page; the others: query rows by cp.async
constexpr i32 kRegsMath = 224;
constexpr i32 kRegsLoad = 56;
static_assert(2 * kRegsMath + kRegsLoad <= 3 * kRegsEntry, "what the block has at entry");

// ---- Storage ---------------------------------------------------------------------------------------------------
// q, kv and p_buffers are 9 + 2 * 9 + 1 SW128 tiles of 8 KB, all but 3 KB of a block's shared memory. So P of the odd
// tile takes the place of Q's RoPE columns, which the math warpgroups keep in registers during a work item.
//
// barrier            arrives (count)      carries       waits          first phase
// kv_full[s].left    load (1)             kLeftBytes    side s         blocked
// kv_full[s].right   load (1)             kRightBytes   side s         blocked
// kv_empty[s].left   left warps (4)       -             load           free
// kv_empty[s].right  right warps (4)      -             load           free
// q_full             query threads (96)   -             left, right    blocked
// q_empty            math warps (8)       -             query          free
// sums_ready[side]   its threads (128)    -             the other side blocked
//
// A warpgroup waits for the tile that it scores; P0Ready or P1Ready tells it that the other tile and its P are ready.
// The right one stores P1 over Q's last columns after MaxReady: the left one has them in registers by then.
//
// P needs no "free" barrier: it is overwritten only after the next tile has arrived in its stage. For that, both
// warpgroups had to release the stage, and so had multiplied the previous P.
struct Notes {
    u32 huge_rows[2];          // a bit for each row that may have huge scores, see decode/sm90_huge_rows.cuh
    u64 present[kStagesKV];    // bit t: the page of token t of the tile was looked up, and is in the pool
    i32 nonfinite_request[2];  // left, right: the last request in which clean_values found NaN or Inf
};

using Storage = PairStorage<Tile, Notes, Call::Extra>;
static_assert(sizeof(Storage) <= kMaxDynamicSmem, "shared memory");

using Block = PairBlock<Storage, Work>;

// Named barriers: the first arrives, the second syncs.
// MaxReady    left -> right   the maximum after tile 0 is in running_max[0]
// P0Ready     left -> right   P0 is in p(0)
// P1Ready     right -> left   the maximum after tile 1 is in running_max[1], and P1 in p(1)
// AllStored   math -> query   at the end: all results are stored, and all huge rows known
enum NamedBarrier : i32 { MaxReady = FirstFreeBarrier, P0Ready, P1Ready, AllStored };
constexpr i32 kStoredThreads = kMathThreads + kQueryThreads;

MLA_FACT(threads, kThreads);
MLA_FACT(smem_bytes, sizeof(Storage));
MLA_FACT(block_m, kBlockM);

// ---- Load role -------------------------------------------------------------------------------------------------
// Pages of any number of tokens: a box has all four SW128 tiles of a half, and 8 rows of each of them
// lie in turn (HalfLayout<true>). With pages of 16 tokens a tile of 64 is 12 boxes instead of 36, with pages of 64 it
// is 3 instead of 9; one thread after the other issues them, while both warpgroups wait for the first half.
//
// The maps are of (64 columns, 8 tokens, SW128 tiles, groups of 8 tokens of a page, pages), with boxes of four SW128
// tiles and of one, which has the RoPE columns. Pages that are no multiples of 8 tokens come in boxes of one SW128 tile
// and up to 4 rows, by the maps of SwTileKeys.
template <class Tile>
struct BoxKeys {
    using Layout = typename Tile::Layout;
    const TensorMap &latent_map, &rope_map;
    bool in_groups;

    MLA_DEVICE BoxKeys(const DecodeParams& p, const TensorMap& latent_map, const TensorMap& rope_map, i32)
        : latent_map(latent_map), rope_map(rope_map), in_groups(p.page_size % Layout::kRowsInAtom == 0) {}

    MLA_DEVICE void prefetch_maps() const {
        prefetch_tensormap(latent_map);
        if constexpr (Tile::kSwTilesRope > 0) prefetch_tensormap(rope_map);
    }
    MLA_DEVICE i32 most_tokens() const { return in_groups ? kTileTokens : Layout::kRowsInAtom; }

    // The left half comes with the RoPE columns.
    template <bool kRight>
    MLA_DEVICE void fetch_half(const TileBoxes& boxes, SmemAddr to, MBarrier& full) const {
#pragma unroll
        for (i32 i = 0; i < 2; ++i) {
            if (!boxes.contains(boxes.box(i))) continue;
            const i32 first = boxes.box(i) * boxes.rows, page = boxes.batch.page[i], token = boxes.batch.offset[i];
            if (in_groups) {
                fetch_groups<kRight>(boxes, to, full, first, page, token / Layout::kRowsInAtom);
            } else {
                fetch_rows<kRight>(boxes, to, full, first, page, token);
            }
        }
    }

    template <bool kRight>
    MLA_DEVICE void fetch_groups(const TileBoxes& boxes, SmemAddr to, MBarrier& full, i32 first, i32 page,
                                 i32 group) const {
        if constexpr (!kRight && Tile::kSwTilesRope > 0) {
            cp_async_bulk_tensor_5d(to + (Layout::sw_tile_offset(kSwTilesV) + first * kSw128RowBytes), rope_map, full,
                                    0, 0, kSwTilesV, group, page, boxes.l2_policy);
        }
        const u32 rows = first / Layout::kRowsInAtom * Layout::kNextRows;
        cp_async_bulk_tensor_5d(to + ((kRight ? kHalfBytes : 0) + rows), latent_map, full, 0, 0,
                                kRight ? kSwTilesHalf : 0, group, page, boxes.l2_policy);
    }

    template <bool kRight>
    MLA_DEVICE void fetch_rows(const TileBoxes& boxes, SmemAddr to, MBarrier& full, i32 first, i32 page,
                               i32 token) const {
        constexpr i32 kBegin = kRight ? Tile::kSwTilesLeft : 0;
        constexpr i32 kEnd = kRight ? Tile::kSwTilesQk : Tile::kSwTilesLeft;
#pragma unroll 1
        for (i32 k = kBegin; k < kEnd; ++k) {
            const i32 sw_tile = Tile::sw_tile_in_order(k);
            const u32 rows = sw_tile == kSwTilesV ? first * kSw128RowBytes
                                                  : first / Layout::kRowsInAtom * Layout::kNextRows +
                                                        first % Layout::kRowsInAtom * kSw128RowBytes;
            cp_async_bulk_tensor_4d(to + (Layout::sw_tile_offset(sw_tile) + rows), latent_map, full,
                                    sw_tile * kSw128Columns, token, 0, page, boxes.l2_policy);
        }
    }
};

// Both halves of a tile, each as soon as its place is free.
struct TileLoader {
    Storage& s;
    const Keys& keys;
    Ring<kStagesKV> ring;

    MLA_DEVICE void operator()(const TileBoxes& boxes, const WorkItem& item, i32 tile) {
        const i32 stage = stage_of(item, tile);
        const u32 empty_parity = ring.empty_parity(stage);
        const SmemAddr to = smem_addr(s.kv[stage]);
        const u64 present = boxes.present_tokens();
        mbarrier_wait(s.kv_empty[stage].left, empty_parity);
        if (boxes.lane == 0) {
            s.notes.present[stage] = present;
            mbarrier_arrive_expect_tx(s.kv_full[stage].left, Tile::kLeftBytes);
        }
        __syncwarp();
        keys.fetch_half<false>(boxes, to, s.kv_full[stage].left);

        mbarrier_wait(s.kv_empty[stage].right, empty_parity);
        if (boxes.lane == 0) mbarrier_arrive_expect_tx(s.kv_full[stage].right, Tile::kRightBytes);
        __syncwarp();
        keys.fetch_half<true>(boxes, to, s.kv_full[stage].right);
        ring.advance(stage);
    }
};

// ---- What rows do not see --------------------------------------------------------------------------------------
// Masks the scores of `tile`, which lies in `stage`. Most tiles hide nothing.
MLA_DEVICE void mask_tile(const Block& block, Math& math, const WorkItem& item, i32 tile, i32 stage, i32 thread) {
    const u64 present = block.s.notes.present[stage];
    if (Work::all_rows_see(item, tile) && present == ~0ull) return;
    i32 row = block.row0 + fragment_row(thread);
    opaque(row);
    Call::mask(math.scores, block, item, tile, row, present, thread);
}

// Makes this warpgroup's half of V finite where not every row of the block sees the token: 0 * NaN is not 0.
template <bool kRight>
MLA_DEVICE void clean_values(Block& block, const WorkItem& item, i32 tile, i32 stage, i32 thread) {
    const Call::Hidden hidden(item, tile);
    if (!hidden.any()) return;
    bar_sync(own_barrier(kRight), kWarpgroupThreads);  // the other warps' scores are done too: they read these rows
    hidden.clean<Tile>(v_sw_tiles<kRight>(block.s, stage), item, tile, block.s.notes.nonfinite_request[kRight], thread);
    fence_proxy_async();
    bar_sync(own_barrier(kRight), kWarpgroupThreads);
}

// ---- A pair of tiles -------------------------------------------------------------------------------------------
// S of the tile in `stage`: `tile_maxima` are its rows' maxima.
MLA_DEVICE void score_tile(Block& block, Math& math, float (&tile_maxima)[kFragmentRows],
                           float (&scale_log2)[kFragmentRows], const WorkItem& item, i32 tile, i32 stage, i32 thread) {
    start_scores(block.s, math, stage);
    finish(math);
    mask_tile(block, math, item, tile, stage, thread);
    scale_log2[0] = scale_log2[1] = block.p.scale_log2;
    tile_max(tile_maxima, math.scores, scale_log2);  // not fused with the scale: that spills (NVRTC 12.9)
}

// P of the tile in `stage`, for this warpgroup in registers and for the other one in p(stage).
MLA_DEVICE void weigh_tile(Storage& s, Math& math, const float (&scale_log2)[kFragmentRows], i32 stage, i32 thread) {
    exponentiate<Tile::Latent, /*kRoundsHuge=*/false>(math.p_fragment, math.rows, math.scores, scale_log2);
    store_sw128(s.p(stage), math.p_fragment, thread);
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
    bar_arrive(P0Ready, kMathThreads);

    // O_L += P0 V0_L
    rescale(math.out, even_scale);
    clean_values<false>(block, item, tile, 0, thread);
    start_own_product<false>(s, math, 0);
    finish(math);
    release(s.kv_empty[0].left, thread);
    math.ring.advance(0);

    // O_L += P1 V1_L
    if (tile + 1 == item.tile_end) return;
    bar_sync(P1Ready, kMathThreads);
    load_rows(maxima, s.running_max[1], thread);
    rescale(math.out, math.rows.move_max(maxima));
    clean_values<false>(block, item, tile + 1, 1, thread);
    start_other_product<false>(s, math, 1);
    finish(math);
    release(s.kv_empty[1].left, thread);
    math.ring.advance(1);
}

// The maximum after the even tile becomes the right warpgroup's.
MLA_DEVICE RowScale take_even_max(Storage& s, Math& math, i32 thread) {
    float maxima[kFragmentRows];
    bar_sync(MaxReady, kMathThreads);
    load_rows(maxima, s.running_max[0], thread);
    return math.rows.move_max(maxima);
}

// O_R += P0 V0_R.
MLA_DEVICE void add_even_to_right(Block& block, Math& math, const WorkItem& item, i32 tile, const RowScale& scale,
                                  i32 thread) {
    bar_sync(P0Ready, kMathThreads);
    rescale(math.out, scale);
    clean_values<true>(block, item, tile, 0, thread);
    start_other_product<true>(block.s, math, 0);
    finish(math);
    release(block.s.kv_empty[0].right, thread);
    math.ring.advance(0);
}

// The right warpgroup's share of the same tiles if both exist ...
MLA_DEVICE void right_pair(Block& block, Math& math, const WorkItem& item, i32 tile, i32 thread) {
    Storage& s = block.s;
    float scale_log2[kFragmentRows], tile_maxima[kFragmentRows], maxima[kFragmentRows];

    score_tile(block, math, tile_maxima, scale_log2, item, tile + 1, 1, thread);
    const RowScale even_scale = take_even_max(s, math, thread);
    lazy_max(maxima, math.rows, tile_maxima);
    store_rows(s.running_max[1], maxima, thread);
    const RowScale odd_scale = math.rows.move_max(maxima);
    weigh_tile(s, math, scale_log2, 1, thread);
    bar_arrive(P1Ready, kMathThreads);

    add_even_to_right(block, math, item, tile, even_scale, thread);

    // O_R += P1 V1_R
    rescale(math.out, odd_scale);
    clean_values<true>(block, item, tile + 1, 1, thread);
    start_own_product<true>(s, math, 1);
    finish(math);
    release(s.kv_empty[1].right, thread);
    math.ring.advance(1);
}

// ... and if only the even one does.
MLA_DEVICE void right_last(Block& block, Math& math, const WorkItem& item, i32 tile, i32 thread) {
    const RowScale scale = take_even_max(block.s, math, thread);
    add_even_to_right(block, math, item, tile, scale, thread);
}

// ---- Rows with huge scores -------------------------------------------------------------------------------------
// The loops over tiles have no instruction to spare for them (decode/sm90_huge_rows.cuh): the left warpgroup notes
// them, and the query warps, which have nothing left to do, compute them again.
MLA_DEVICE void note_huge_rows(Storage& s, const RowState& rows, i32 thread) {
#pragma unroll
    for (i32 r = 0; r < kFragmentRows; ++r) {
        const i32 row = fragment_row(thread) + 8 * r;
        if (is_huge(rows.max[r])) atomicOr(&s.notes.huge_rows[row / kWarpThreads], 1u << row % kWarpThreads);
    }
}

// The block's item of this number; false if there are fewer. Walks from the first: a walk that goes on between them
// would have to stay in registers.
MLA_DEVICE bool find_item(const Block& block, i32 number, Work::HeldItem& item) {
    auto walk = block.items();
    bool found = true;
#pragma unroll 1
    for (i32 i = 0; i <= number && found; ++i) found = walk.next(block.p, item);
    return found;
}

// At the end, on the query warps. The whole block waits for them, so usually one look shows that no row was huge. A row
// that was huge in one of the block's work items is checked in all of them.
MLA_DEVICE void redo_huge_rows(const Block& block, i32 thread) {
    const u32(&huge_rows)[2] = block.s.notes.huge_rows;
    if ((huge_rows[0] | huge_rows[1]) == 0) return;
    const i32 lane = thread % kWarpThreads;
#pragma unroll 1
    for (i32 row = thread / kWarpThreads; row < kBlockM; row += kQueryWarps) {
        if ((huge_rows[row / kWarpThreads] >> row % kWarpThreads & 1) == 0) continue;
        Work::HeldItem item;
#pragma unroll 1
        for (i32 number = 0; find_item(block, number, item); ++number) {
            if (block.row0 + row >= block.rows_of(item)) continue;
#pragma unroll 1
            for (i32 column = 2 * lane; column < kHeadDimV; column += kColumnsAtOnce) {
                redo_columns<Call>(block, item, block.row0 + row, column, lane);
            }
        }
    }
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
        if (tile < item.tile_end) right_last(block, math, item, tile, thread);
    }
}

template <bool kRight>
MLA_DEVICE void run_math_role(Block& block, i32 thread) {
    Storage& s = block.s;
    Math math;
    Work::HeldItem item;
    for (WorkIteratorOf<Work> walk(block.p, block.split, block.hidden); walk.next(block.p, item);) {
        // Not at the lowest number: a score below -kHugeMax then has no weight, so no tile leaves sums that are
        // infinite, and would become NaN where a later tile scales them by 0.
        math.reset(-kHugeMax);
        float sums[kFragmentRows] = {0.f, 0.f};
        bool has_nonfinite = false;
        if (item.tile_begin < item.tile_end) {
            load_q_resident(s, math, thread);
            add_tiles<kRight>(block, math, item, thread);
            total_sums<kRight>(sums, s, math, thread);
            if constexpr (!kRight) note_huge_rows(s, math.rows, thread);
            has_nonfinite = s.notes.nonfinite_request[kRight] == item.request;
            release(s.q_empty, thread);  // not earlier: the next work item may overwrite data that was read above
        }
        if constexpr (kRight) Call::store(block, item, math, thread);
        store_result<kRight>(block, item, math, sums, block.row0, thread);
        if (has_nonfinite) {
            bar_sync(own_barrier(kRight), kWarpgroupThreads);  // the results are stored
            fixup_nonfinite<Tile::Element, kHeadDimV / 2>(block, item, kRight ? kHeadDimV / 2 : 0, thread);
        }
    }
    bar_arrive(AllStored, kStoredThreads);
}

// ---- Query role ------------------------------------------------------------------------------------------------
// The query rows of each work item (decode/sm90_load.cuh).
MLA_DEVICE void run_query_role(Block& block, i32 thread) {
    const QueryStages<1> stages{block.s.q, &block.s.q_full, &block.s.q_empty};
    run_query_role<Tile>(block, stages, thread, [&](const WorkItem& item) { Call::load(block, item, thread); });
    griddepcontrol_launch_dependents();  // before the wait, or the combine kernel starts 1 us later
    bar_sync(AllStored, kStoredThreads);
    redo_huge_rows(block, thread);
}

// ---- Kernel ----------------------------------------------------------------------------------------------------
MLA_DEVICE void init_storage(Storage& s) {
    s.init(kLoadArrivals, kQueryThreads);
    s.notes.nonfinite_request[0] = s.notes.nonfinite_request[1] = -1;
    s.notes.huge_rows[0] = s.notes.huge_rows[1] = 0;
}

extern "C" __global__ void __launch_bounds__(kThreads, 1)
    mla_decode_sm90_seesaw(const __grid_constant__ Params p, const __grid_constant__ TensorMap latent_map,
                           const __grid_constant__ TensorMap rope_map) {
    extern __shared__ __align__(kSwizzleAtomBytes) u8 smem[];
    Storage& s = *reinterpret_cast<Storage*>(smem);
    Block block(p, s);
    const Keys keys(p, latent_map, rope_map, block.kv_head);
    if (threadIdx.x == 0) {
        keys.prefetch_maps();
        init_storage(s);
    }
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
        setmaxnreg_dec<kRegsLoad>();
        if (warp == kLoaderWarp) {
            run_load_role(block, thread, TileLoader{s, keys}, keys.most_tokens());
        } else {
            run_query_role(block, thread - kWarpThreads);
        }
    }
    griddepcontrol_launch_dependents();
}
}  // namespace mla::decode
