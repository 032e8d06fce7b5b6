// Dense MLA decode on Hopper: two warpgroups that take turns on the tensor cores ("seesaw").
//
//   S = Q K^T * scale            (64 x 576) (576 x 64) per tile of 64 tokens
//   P = exp2(S log2(e) - m)      m: running row maximum, shared by both warpgroups
//   l = sum of P,  O = P V       V is K's first 512 columns
//   out = O / l,   lse = ln 2 (m + log2 l)
//
// Grid: x = 64-row blocks of all KV heads (rows of one KV head = s_q * h_q / h_kv), y = parts of the schedule. One
// block stays on an SM and walks the fragments of its part (attention/split_work.cuh). No cluster.
//
// Tiles go in pairs: the left warpgroup scores the even tile, the right one the odd tile, and each multiplies both P's
// with its own half of the values, so that neither needs more than 64 x 256 accumulators. While one warpgroup is in
// its softmax, the other one has products to issue:
//
//   left    | softmax 0 | O_L += P0 V0_L |          | O_L += P1 V1_L | S0 = Q K0'            | softmax 0'
//   right   |   S1      |  softmax 1     | O_R += P0 V0_R | O_R += P1 V1_R | S1 = Q K1'      | ...
//   load    |           |       K0'_left ->  K1'_left, K0'_right ->  K1'_right ->
//
// Source: the two-warpgroup split of O and the shared maximum are FlashMLA's idea (its "seesaw" schedule, 2025).
// What differs: a producer warp of its own; one running maximum instead of exchanged scales; both warpgroups add
// tile 0 before tile 1, so P0 is written once and never re-scaled; the maximum moves only by more than 2^8, so O is
// almost never re-scaled; one page mechanism for every page size.
#include "attention/decode_output.cuh"
#include "attention/online_softmax.cuh"
#include "ptx/control.cuh"
#include "ptx/copy.cuh"
#include "ptx/matrix.cuh"
#include "tile/nonfinite.cuh"
#include "tile/panel.cuh"
#include "tile/ring.cuh"

// ---- Variant ---------------------------------------------------------------------------------------------------
#ifndef MLA_DTYPE
#error "MLA_DTYPE must be bfloat16 or float16"
#endif
using Element = MLA_DTYPE;

// ---- Budget ----------------------------------------------------------------------------------------------------
// role    warps    regs   does
// left    0..3     232    even tiles: S0, softmax; owns O[:, :256]
// right   4..7     232    odd tiles:  S1, softmax; owns O[:, 256:]
// load    8        40     KV tiles, page by page, into the two stages
// query   9..11    40     the query rows of each fragment
constexpr i32 kBlockM = 64;
constexpr i32 kStagesKV = 2;  // stage = tile parity within a fragment
constexpr i32 kMathThreads = 2 * kWarpgroupThreads;
constexpr i32 kQueryThreads = 3 * kWarpThreads;
constexpr i32 kThreads = 3 * kWarpgroupThreads;
constexpr i32 kRegsMath = 232;
constexpr i32 kRegsLoad = 40;
static_assert(2 * kRegsMath + kRegsLoad <= 3 * 168, "the register file is shared out at 168 a thread");

constexpr i32 kPanelsQk = kHeadDimQk / kPanelColumns;  // 9
constexpr i32 kPanelsHalf = kHeadDimV / 2 / kPanelColumns;  // 4: one half of the values
constexpr i32 kRopePanel = 8;
constexpr u32 kTileBytes = kPanelsQk * kPanelBytes;
constexpr u32 kLeftBytes = kPanelsHalf * kPanelBytes;    // panels 0..3
constexpr u32 kRightBytes = kTileBytes - kLeftBytes;  // panels 4..8

// ---- Storage ---------------------------------------------------------------------------------------------------
// barrier            arrives (count)      carries       waits          first phase
// kv_full[s].left    load (1)             kLeftBytes    left, right    blocked
// kv_full[s].right   load (1)             kRightBytes   left, right    blocked
// kv_empty[s].left   left warps (4)       -             load           free
// kv_empty[s].right  right warps (4)      -             load           free
// q_full             query threads (96)   -             left, right    blocked
// q_empty            math warps (8)       -             query          free
//
// Named barriers (1..): a fact made true by the first, waited for by the second.
// Max0Ready   left -> right   m after tile 0 is in max0
// P0Ready     left -> right   P0 is in p0
// P1Ready     right -> left   m after tile 1 is in max1 and P1 is in p1
// SumsReady   left <-> right  both partial sums l are in sums
// LeftOnly, RightOnly         one warpgroup among itself
//
// p0 and p1 need no "free" barrier: a warpgroup overwrites its P only after a tile has arrived in the stage that the
// other one released after it had multiplied that P.
enum NamedBarrier : i32 { Max0Ready = 1, P0Ready, P1Ready, SumsReady, LeftOnly, RightOnly };

struct HalfBarriers {
    MBarrier left, right;
};

struct Storage {
    alignas(kSwizzleAtomBytes) u8 q[kTileBytes];  // panel 8 is kept in registers, and its place is P1
    u8 kv[kStagesKV][kTileBytes];
    u8 p0[kPanelBytes];
    float max0[kBlockM], max1[kBlockM];
    float sums[2][kBlockM];
    u64 present[kStagesKV];  // bit t: the page of token t of the tile is in the pool
    i32 unclean_request[2];  // left, right: the last request that clean_values took something out of
    HalfBarriers kv_full[kStagesKV], kv_empty[kStagesKV];
    MBarrier q_full, q_empty;

    MLA_DEVICE u8* p1() { return q + kRopePanel * kPanelBytes; }
};
static_assert(sizeof(Storage) <= 232448, "a block has 227 KB of shared memory");

MLA_DECODE_FACTS();
MLA_FACT(threads, kThreads);
MLA_FACT(smem_bytes, sizeof(Storage));
MLA_FACT(block_m, kBlockM);

// What every role knows.
struct Block {
    const DenseDecodeParams& p;
    const TensorMap& kv_map;
    Storage& s;
    i32 part, kv_head;
    i32 row0, rows;  // first row of the KV head in this block; rows of the KV head
};

// ---- Query role ------------------------------------------------------------------------------------------------
MLA_DEVICE void run_query_role(Block& block, i32 thread) {
    const DenseDecodeParams& p = block.p;
    const i32 group = p.h_q / p.h_kv, lane = thread % kWarpThreads;
    const SmemAddr q = smem_addr(block.s.q);
    Ring<1> ring;
    Fragment fragment;
    for (FragmentWalk walk(p, block.part); walk.next(p, fragment);) {
        if (fragment.tile_begin >= fragment.tile_end) continue;
        mbarrier_wait(block.s.q_empty, ring.empty_parity(0));
        for (i32 row = thread / kWarpThreads; row < kBlockM; row += kQueryThreads / kWarpThreads) {
            const i32 r = min(block.row0 + row, block.rows - 1);
            const bool present = block.row0 + row < block.rows;
            const u16* from = p.q + fragment.request * p.q_stride_b_elems + (r / group) * p.q_stride_s_elems +
                              (i64)(block.kv_head * group + r % group) * p.q_stride_h_elems;
            for (i32 chunk = lane; chunk < kPanelsQk * kPanelChunks; chunk += kWarpThreads) {
                const u32 panel = (u32)(chunk / kPanelChunks) * kPanelBytes;
                cp_async_16(q + (panel + panel_offset(row, chunk % kPanelChunks)), from + chunk * 8, present);
            }
        }
        cp_async_wait_all();
        fence_proxy_async();
        mbarrier_arrive(block.s.q_full);
        ring.advance(0);
    }
}

// ---- Load role -------------------------------------------------------------------------------------------------
// A tile of 64 tokens is fetched in boxes of `rows` = gcd(page_size, 64) tokens, each within one page; a lane looks up
// and fetches boxes lane and lane + 32. Past the sequence's end nothing is looked up, and a page outside the pool is
// not read: the box then lies outside the tensor, where TMA writes zeros.
struct TileBoxes {
    i32 page[2];    // -1: absent
    i32 offset[2];  // first token within the page
};

constexpr i32 kAbsentPage = -1;

MLA_DEVICE TileBoxes look_up_boxes(const DenseDecodeParams& p, const Fragment& fragment, i32 tile, i32 rows, i32 lane) {
    TileBoxes boxes;
#pragma unroll
    for (i32 i = 0; i < 2; ++i) {
        const i32 box = lane + i * kWarpThreads;
        const i32 token = tile * kTileTokens + box * rows;
        boxes.page[i] = kAbsentPage;
        boxes.offset[i] = 0;
        if (box * rows < kTileTokens && token < fragment.tokens) {
            const i32 slot = token / p.page_size;
            const i32 page = p.block_table[fragment.request * p.table_stride_b_elems + slot * p.table_stride_page_elems];
            boxes.page[i] = (u32)page < (u32)p.num_pages ? page : kAbsentPage;
            boxes.offset[i] = token - slot * p.page_size;
        }
    }
    return boxes;
}

// Bit t says whether token t of the tile can be read. Tokens past the end do not matter: their scores are masked.
MLA_DEVICE u64 present_tokens(const TileBoxes& boxes, i32 rows, i32 boxes_used, i32 lane) {
    const u32 absent_low = __ballot_sync(kFullWarp, lane < boxes_used && boxes.page[0] == kAbsentPage);
    const u32 absent_high = __ballot_sync(kFullWarp, lane + 32 < boxes_used && boxes.page[1] == kAbsentPage);
    const u64 absent = (u64)absent_high << 32 | absent_low;
    if (absent == 0) return ~0ull;
    u64 present = 0;
    for (i32 token = 0; token < kTileTokens; ++token) present |= (u64)(((absent >> (token / rows)) & 1) == 0) << token;
    return present;
}

MLA_DEVICE void load_panels(Block& block, const TileBoxes& boxes, i32 stage, i32 rows, i32 lane, i32 first, i32 last,
                            MBarrier& full) {
    const SmemAddr tile = smem_addr(block.s.kv[stage]);
#pragma unroll
    for (i32 i = 0; i < 2; ++i) {
        const i32 box = lane + i * kWarpThreads;
        if (box * rows >= kTileTokens) break;
        for (i32 panel = first; panel < last; ++panel) {
            cp_async_bulk_tensor_4d(tile + (panel * kPanelBytes + box * rows * kPanelRowBytes), block.kv_map, full,
                                    panel * kPanelColumns, boxes.offset[i], block.kv_head, boxes.page[i], kEvictFirst);
        }
    }
}

MLA_DEVICE void run_load_role(Block& block, i32 lane) {
    const DenseDecodeParams& p = block.p;
    i32 rows = kTileTokens;  // gcd(page_size, 64): the largest power of two up to 64 that divides page_size
    while (p.page_size % rows != 0) rows /= 2;
    Ring<kStagesKV> ring;
    Fragment fragment;
    for (FragmentWalk walk(p, block.part); walk.next(p, fragment);) {
        if (fragment.tile_begin >= fragment.tile_end) continue;
        TileBoxes next = look_up_boxes(p, fragment, fragment.tile_begin, rows, lane);
        for (i32 tile = fragment.tile_begin; tile < fragment.tile_end; ++tile) {
            const i32 stage = (tile - fragment.tile_begin) % kStagesKV;
            const TileBoxes boxes = next;
            const u64 present = present_tokens(boxes, rows, kTileTokens / rows, lane);
            // The next tile's pages are looked up before this one's stage is free: the latency is hidden.
            if (tile + 1 < fragment.tile_end) next = look_up_boxes(p, fragment, tile + 1, rows, lane);

            mbarrier_wait(block.s.kv_empty[stage].left, ring.empty_parity(stage));
            if (lane == 0) {
                block.s.present[stage] = present;
                mbarrier_arrive_expect_tx(block.s.kv_full[stage].left, kLeftBytes);
            }
            __syncwarp();
            load_panels(block, boxes, stage, rows, lane, 0, kPanelsHalf, block.s.kv_full[stage].left);

            mbarrier_wait(block.s.kv_empty[stage].right, ring.empty_parity(stage));
            if (lane == 0) mbarrier_arrive_expect_tx(block.s.kv_full[stage].right, kRightBytes);
            __syncwarp();
            load_panels(block, boxes, stage, rows, lane, kPanelsHalf, kPanelsQk, block.s.kv_full[stage].right);
            ring.advance(stage);
        }
    }
}

// ---- Math roles ------------------------------------------------------------------------------------------------
// One warpgroup's share of the work: its tile's scores and softmax, its half of the output.
struct Math {
    float scores[32];
    float out[128];
    u32 p_fragment[kPanelMmaSteps][4];
    u32 q_rope[kPanelMmaSteps][4];
    RowState rows;
    Ring<kStagesKV> ring;
    Ring<1> q_ring;
};

template <bool kRight>
MLA_DEVICE u8* value_panels(Storage& s, i32 stage) {
    return s.kv[stage] + (kRight ? kLeftBytes : 0);
}

// The address at which this lane's row of a 16x16 block stands, for ldmatrix and stmatrix of a panel.
MLA_DEVICE u32 matrix_offset(i32 thread, i32 step) {
    const i32 row = (thread / kWarpThreads) * 16 + thread % 16;
    return panel_offset(row, step * 2 + (thread % kWarpThreads) / 16);
}

MLA_DEVICE void load_q_rope(Storage& s, Math& math, i32 thread) {
    mbarrier_wait(s.q_full, math.q_ring.full_parity(0));
    math.q_ring.advance(0);
    const SmemAddr panel = smem_addr(s.p1());
#pragma unroll
    for (i32 step = 0; step < kPanelMmaSteps; ++step) ldmatrix_x4(math.q_rope[step], panel + matrix_offset(thread, step));
}

// Starts S = Q K^T of the tile in `kStage` as soon as each half of it has arrived, and waits for the result.
template <i32 kStage>
MLA_DEVICE void compute_scores(Storage& s, Math& math) {
    SmemDesc q = k_major_desc(smem_addr(s.q)), k = k_major_desc(smem_addr(s.kv[kStage]));
    opaque(q.bits);  // else the compiler keeps all 64 sums of address and step in registers across the loop
    opaque(k.bits);
    pin(math.scores);
    mbarrier_wait(s.kv_full[kStage].left, math.ring.full_parity(kStage));
    wgmma_fence();
#pragma unroll
    for (i32 panel = 0; panel < kRopePanel; ++panel) {
        if (panel == kPanelsHalf) {
            mbarrier_wait(s.kv_full[kStage].right, math.ring.full_parity(kStage));
            wgmma_fence();
        }
#pragma unroll
        for (i32 step = 0; step < kPanelMmaSteps; ++step) {
            const u32 bytes = panel * kPanelBytes + step * kKMajorStepBytes;
            wgmma_m64n64k16<false>(Element{}, math.scores, advance(q, bytes), advance(k, bytes), panel + step > 0);
        }
    }
#pragma unroll
    for (i32 step = 0; step < kPanelMmaSteps; ++step) {
        const u32 bytes = kRopePanel * kPanelBytes + step * kKMajorStepBytes;
        wgmma_m64n64k16<false>(Element{}, math.scores, math.q_rope[step], advance(k, bytes), true);
    }
    wgmma_commit_group();
    wgmma_wait_group<0>();
    pin(math.scores);
}

// Starts O += P V with P in registers (this warpgroup's own tile) ...
template <bool kRight, i32 kStage>
MLA_DEVICE void start_own_product(Storage& s, Math& math) {
    SmemDesc v = mn_major_desc(smem_addr(value_panels<kRight>(s, kStage)));
    opaque(v.bits);
    pin(math.out);
    wgmma_fence();
#pragma unroll
    for (i32 step = 0; step < kPanelMmaSteps; ++step) {
        wgmma_m64n256k16<true>(Element{}, math.out, math.p_fragment[step], advance(v, step * kMnMajorStepBytes), true);
    }
    wgmma_commit_group();
}

// ... and with P in shared memory (the other warpgroup's tile).
template <bool kRight, i32 kStage>
MLA_DEVICE void start_other_product(Storage& s, Math& math, const u8* p_panel) {
    SmemDesc v = mn_major_desc(smem_addr(value_panels<kRight>(s, kStage))), p = k_major_desc(smem_addr(p_panel));
    opaque(v.bits);
    opaque(p.bits);
    pin(math.out);
    wgmma_fence();
#pragma unroll
    for (i32 step = 0; step < kPanelMmaSteps; ++step) {
        wgmma_m64n256k16<true>(Element{}, math.out, advance(p, step * kKMajorStepBytes),
                               advance(v, step * kMnMajorStepBytes), true);
    }
    wgmma_commit_group();
}

// Waits until at most kInFlight products are in flight. Only then may P, V and the accumulator be touched.
template <i32 kInFlight>
MLA_DEVICE void finish_products(Math& math) {
    wgmma_wait_group<kInFlight>();
    pin(math.out);
}

// Each warp releases what it has waited for.
MLA_DEVICE void release(MBarrier& empty, i32 thread) {
    if (thread % kWarpThreads == 0) mbarrier_arrive(empty);
}

// 0 * NaN is not 0: before V is multiplied, this warpgroup makes its half of the values finite where not every row of
// the block sees them. Slots past the sequence's end become 0. A token that only later queries see keeps its finite
// values; the others become 0, and restore_nonfinite adds them to the rows that do see them.
template <bool kRight, i32 kStage>
MLA_DEVICE void clean_values(Block& block, const Fragment& fragment, i32 tile, i32 thread) {
    const i32 seen_by_all = visible_tokens(block.p, block.row0, fragment.tokens) - tile * kTileTokens;
    const i32 end = fragment.tokens - tile * kTileTokens;
    if (seen_by_all >= kTileTokens) return;
    u8* panels = value_panels<kRight>(block.s, kStage);
    const i32 first = max(seen_by_all, 0);
    for (i32 i = thread; i < (kTileTokens - first) * kPanelChunks; i += kWarpgroupThreads) {
        const i32 row = first + i / kPanelChunks;
#pragma unroll
        for (i32 panel = 0; panel < kPanelsHalf; ++panel) {
            uint4& chunk = *reinterpret_cast<uint4*>(panels + panel * kPanelBytes + panel_offset(row, i % kPanelChunks));
            uint4 clean = make_uint4(0, 0, 0, 0);
            if (row < end && zero_nonfinite<Element>(clean = chunk)) block.s.unclean_request[kRight] = fragment.request;
            chunk = clean;
        }
    }
    fence_proxy_async();
    bar_sync(kRight ? RightOnly : LeftOnly, kWarpgroupThreads);
}

// P of this warpgroup's tile, from registers to shared memory for the other one.
MLA_DEVICE void store_p(Math& math, u8* p_panel, i32 thread) {
#pragma unroll
    for (i32 step = 0; step < kPanelMmaSteps; ++step) {
        stmatrix_x4(smem_addr(p_panel) + matrix_offset(thread, step), math.p_fragment[step]);
    }
    fence_proxy_async();
}

// Masks the scores of `tile`, which lies in `stage`.
MLA_DEVICE void mask_tile(const Block& block, Math& math, const Fragment& fragment, i32 tile, i32 stage, i32 thread) {
    const i32 row = block.row0 + fragment_row(thread);
    TileMask mask;
    mask.present = block.s.present[stage];
#pragma unroll
    for (i32 r = 0; r < kFragmentRows; ++r) {
        const i32 visible = visible_tokens(block.p, row + 8 * r, fragment.tokens);
        mask.visible[r] = min(visible, fragment.tokens) - tile * kTileTokens;
    }
    mask_scores(math.scores, mask, thread);
}

// The left warpgroup's part of tiles `tile` and `tile + 1`.
MLA_DEVICE void left_pair(Block& block, Math& math, const Fragment& fragment, i32 tile, i32 thread) {
    Storage& s = block.s;
    const float scale_log2 = block.p.scale_log2;
    float tile_maxima[kFragmentRows], maxima[kFragmentRows];

    compute_scores<0>(s, math);
    mask_tile(block, math, fragment, tile, 0, thread);
    tile_max(tile_maxima, math.scores, scale_log2);
    lazy_max(maxima, math.rows, tile_maxima);
    store_rows(s.max0, maxima, thread);
    bar_arrive(Max0Ready, kMathThreads);
    const RowScale even_scale = math.rows.move_max(maxima);
    exponentiate<Element>(math.p_fragment, math.rows, math.scores, scale_log2);
    store_p(math, s.p0, thread);
    bar_arrive(P0Ready, kMathThreads);

    rescale(math.out, even_scale);
    clean_values<false, 0>(block, fragment, tile, thread);
    start_own_product<false, 0>(s, math);
    finish_products<0>(math);
    release(s.kv_empty[0].left, thread);
    math.ring.advance(0);

    if (tile + 1 == fragment.tile_end) return;
    bar_sync(P1Ready, kMathThreads);
    load_rows(maxima, s.max1, thread);
    rescale(math.out, math.rows.move_max(maxima));
    clean_values<false, 1>(block, fragment, tile + 1, thread);
    start_other_product<false, 1>(s, math, s.p1());
    finish_products<0>(math);
    release(s.kv_empty[1].left, thread);
    math.ring.advance(1);
}

// The right warpgroup's part of the same tiles, where both are there ...
MLA_DEVICE void right_pair(Block& block, Math& math, const Fragment& fragment, i32 tile, i32 thread) {
    Storage& s = block.s;
    const float scale_log2 = block.p.scale_log2;
    float tile_maxima[kFragmentRows], maxima[kFragmentRows];

    compute_scores<1>(s, math);
    mask_tile(block, math, fragment, tile + 1, 1, thread);
    tile_max(tile_maxima, math.scores, scale_log2);
    bar_sync(Max0Ready, kMathThreads);
    load_rows(maxima, s.max0, thread);
    const RowScale even_scale = math.rows.move_max(maxima);
    lazy_max(maxima, math.rows, tile_maxima);
    store_rows(s.max1, maxima, thread);
    const RowScale odd_scale = math.rows.move_max(maxima);
    exponentiate<Element>(math.p_fragment, math.rows, math.scores, scale_log2);
    store_p(math, s.p1(), thread);
    bar_arrive(P1Ready, kMathThreads);

    bar_sync(P0Ready, kMathThreads);
    rescale(math.out, even_scale);
    clean_values<true, 1>(block, fragment, tile + 1, thread);
    start_other_product<true, 0>(s, math, s.p0);
    if (odd_scale.any()) {
        finish_products<0>(math);
        rescale(math.out, odd_scale);
    }
    start_own_product<true, 1>(s, math);
    finish_products<1>(math);
    release(s.kv_empty[0].right, thread);
    math.ring.advance(0);
    finish_products<0>(math);
    release(s.kv_empty[1].right, thread);
    math.ring.advance(1);
}

// ... and where only the even one is.
MLA_DEVICE void right_last(Block& block, Math& math, const Fragment& fragment, i32 tile, i32 thread) {
    Storage& s = block.s;
    float maxima[kFragmentRows];
    bar_sync(Max0Ready, kMathThreads);
    load_rows(maxima, s.max0, thread);
    rescale(math.out, math.rows.move_max(maxima));
    bar_sync(P0Ready, kMathThreads);
    clean_values<true, 0>(block, fragment, tile, thread);
    start_other_product<true, 0>(s, math, s.p0);
    finish_products<0>(math);
    release(s.kv_empty[0].right, thread);
    math.ring.advance(0);
}

// Adds up both warpgroups' sums and returns the whole row's: P of the even tiles went into the left one's.
template <bool kRight>
MLA_DEVICE void total_sums(float (&sums)[kFragmentRows], Storage& s, const RowState& rows, i32 thread) {
#pragma unroll
    for (i32 r = 0; r < kFragmentRows; ++r) sums[r] = quad_sum(rows.sum[r]);
    store_rows(s.sums[kRight], sums, thread);
    bar_sync(SumsReady, kMathThreads);
    float other[kFragmentRows];
    load_rows(other, s.sums[!kRight], thread);
#pragma unroll
    for (i32 r = 0; r < kFragmentRows; ++r) sums[r] += other[r];
}

// Writes this warpgroup's 256 columns of a row, 32 bytes of fp32 or 64 bytes of 16 bits a quad at a time.
template <bool kRight>
MLA_DEVICE void store_out_row(const Block& block, const Fragment& fragment, const Math& math, i32 r, float factor,
                              i32 row, i32 thread) {
    const DenseDecodeParams& p = block.p;
    const bool whole = fragment.slot == kWholeRequest, stored = row < block.rows;
    constexpr i32 kFirstColumn = kRight ? kHeadDimV / 2 : 0;
    const i64 offset = !stored ? 0
                       : whole ? out_offset(p, fragment.request, block.kv_head, row)
                               : workspace_row(p, fragment.slot, block.kv_head, row) * kHeadDimV;
    if (!whole || p.out_is_fp32) {
        float* to = (whole ? static_cast<float*>(p.out) : p.partial_out) + offset + kFirstColumn;
#pragma unroll
        for (i32 i = 0; i < 32; ++i) {
            const float2 pair = make_float2(math.out[4 * i + 2 * r] * factor, math.out[4 * i + 2 * r + 1] * factor);
            if (stored) *reinterpret_cast<float2*>(to + 8 * i + fragment_column(thread)) = pair;
        }
    } else {
        u16* to = static_cast<u16*>(p.out) + offset + kFirstColumn;
#pragma unroll
        for (i32 i = 0; i < 32; i += 4) {
            u32 words[4];
#pragma unroll
            for (i32 j = 0; j < 4; ++j) {
                const i32 d = 4 * (i + j) + 2 * r;
                words[j] = cvt_x2(Element{}, math.out[d] * factor, math.out[d + 1] * factor);
            }
            quad_transpose(words, thread % 4);
            if (stored) {
                *reinterpret_cast<uint4*>(to + 8 * (i + thread % 4)) = make_uint4(words[0], words[1], words[2], words[3]);
            }
        }
    }
}

template <bool kRight>
MLA_DEVICE void store_result(const Block& block, const Fragment& fragment, const Math& math,
                             const float (&sums)[kFragmentRows], i32 thread) {
#pragma unroll
    for (i32 r = 0; r < kFragmentRows; ++r) {
        const i32 row = block.row0 + fragment_row(thread) + 8 * r;
        const float factor = sums[r] == 0.f ? 0.f : 1.f / sums[r];
        store_out_row<kRight>(block, fragment, math, r, factor, row, thread);
        if (!kRight && thread % 4 == 0 && row < block.rows) {
            store_row_lse(block.p, fragment, block.kv_head, row, row_lse2(math.rows.max[r], sums[r]));
        }
    }
}

// Any share of an infinite value is infinite: what clean_values took out is added, as it is, to the stored results of
// the rows that see it. Nobody is in a hurry here.
template <bool kRight>
MLA_DEVICE void restore_nonfinite(const Block& block, const Fragment& fragment, i32 thread) {
    const DenseDecodeParams& p = block.p;
    bar_sync(kRight ? RightOnly : LeftOnly, kWarpgroupThreads);  // the results are stored
    const i32 first = max(visible_tokens(p, block.row0, fragment.tokens), fragment.tile_begin * kTileTokens);
    const i32 last = min(fragment.tokens, fragment.tile_end * kTileTokens);
#pragma unroll 1
    for (i32 token = max(first, 0); token < last; ++token) {
        const u16* values = cached_row(p, fragment.request, block.kv_head, token);
        if (values == nullptr) continue;
#pragma unroll 1
        for (i32 i = 0; i < 2; ++i) {
            const i32 column = (kRight ? kHeadDimV / 2 : 0) + thread + i * kWarpgroupThreads;
            const float value = Element::to_float(values[column]);
            if (fabsf(value) <= kLargestFloat) continue;
#pragma unroll 1
            for (i32 row = block.row0; row < min(block.row0 + kBlockM, block.rows); ++row) {
                if (token < visible_tokens(p, row, fragment.tokens)) {
                    add_to_output<Element>(p, fragment, block.kv_head, row, column, value);
                }
            }
        }
    }
}

template <bool kRight>
MLA_DEVICE void run_math_role(Block& block, i32 thread) {
    Storage& s = block.s;
    Math math;
    Fragment fragment;
    for (FragmentWalk walk(block.p, block.part); walk.next(block.p, fragment);) {
        math.rows.reset();
#pragma unroll
        for (i32 i = 0; i < 128; ++i) math.out[i] = 0.f;
        float sums[kFragmentRows] = {0.f, 0.f};
        bool unclean = false;
        if (fragment.tile_begin < fragment.tile_end) {
            load_q_rope(s, math, thread);
#pragma unroll 1
            for (i32 tile = fragment.tile_begin; tile < fragment.tile_end; tile += 2) {
                if (!kRight) {
                    left_pair(block, math, fragment, tile, thread);
                } else if (tile + 1 < fragment.tile_end) {
                    right_pair(block, math, fragment, tile, thread);
                } else {
                    right_last(block, math, fragment, tile, thread);
                }
            }
            total_sums<kRight>(sums, s, math.rows, thread);
            unclean = s.unclean_request[kRight] == fragment.request;
            release(s.q_empty, thread);  // only now: the next fragment may change what was read above
        }
        store_result<kRight>(block, fragment, math, sums, thread);
        if (unclean) restore_nonfinite<kRight>(block, fragment, thread);
    }
}

// ---- Kernel ----------------------------------------------------------------------------------------------------
MLA_DEVICE void init_barriers(Storage& s) {
    for (i32 stage = 0; stage < kStagesKV; ++stage) {
        mbarrier_init(s.kv_full[stage].left, 1);
        mbarrier_init(s.kv_full[stage].right, 1);
        mbarrier_init(s.kv_empty[stage].left, kWarpgroupThreads / kWarpThreads);
        mbarrier_init(s.kv_empty[stage].right, kWarpgroupThreads / kWarpThreads);
    }
    mbarrier_init(s.q_full, kQueryThreads);
    mbarrier_init(s.q_empty, kMathThreads / kWarpThreads);
    fence_mbarrier_init();
}

extern "C" __global__ void __launch_bounds__(kThreads, 1)
    mla_dense_decode_sm90_seesaw(const __grid_constant__ DenseDecodeParams p, const __grid_constant__ TensorMap kv_map) {
    extern __shared__ __align__(kSwizzleAtomBytes) u8 smem[];
    Storage& s = *reinterpret_cast<Storage*>(smem);
    const i32 rows = query_rows(p), row_blocks = ceil_div(rows, kBlockM);
    const i32 row_block = blockIdx.x % row_blocks;
    Block block{p, kv_map, s, (i32)blockIdx.y, (i32)blockIdx.x / row_blocks, row_block * kBlockM, rows};

    if (threadIdx.x == 0) {
        prefetch_tensormap(kv_map);
        init_barriers(s);
        s.unclean_request[0] = s.unclean_request[1] = -1;
    }
    __syncthreads();
    griddepcontrol_wait();  // before the first read of anything that an earlier kernel may have written

    // The same in all lanes, and known to be so: role dispatch must not look divergent to the compiler.
    const i32 warp = __shfl_sync(kFullWarp, threadIdx.x / kWarpThreads, 0);
    const i32 thread = threadIdx.x % kWarpgroupThreads;
    if (warp < 4) {
        setmaxnreg_inc<kRegsMath>();
        run_math_role<false>(block, thread);
    } else if (warp < 8) {
        setmaxnreg_inc<kRegsMath>();
        run_math_role<true>(block, thread);
    } else {
        setmaxnreg_dec<kRegsLoad>();
        if (warp == 8) {
            run_load_role(block, thread);
        } else {
            run_query_role(block, thread - kWarpThreads);
        }
    }
    griddepcontrol_launch_dependents();
}
