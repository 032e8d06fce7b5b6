// What a math warpgroup of a decode block on Hopper does: scores, softmax, its half of the output. The kernels in sm90/
// put these steps in order.
#pragma once
#include "attention/decode_block_sm90.cuh"
#include "attention/online_softmax.cuh"
#include "ptx/control.cuh"
#include "tile/nonfinite.cuh"
#include "tile/panel_matrix.cuh"

// Named barriers of one warpgroup among itself. A kernel's own ones come after them.
enum SharedNamedBarrier : i32 { LeftOnly = 1, RightOnly, FirstFreeBarrier };

MLA_DEVICE constexpr i32 own_barrier(bool right) { return right ? RightOnly : LeftOnly; }

// ---- Math roles ------------------------------------------------------------------------------------------------
// One warpgroup's share of the work: its tile's scores and softmax, its half of the output.
struct Math {
    float scores[32];
    float out[128];
    u32 p_fragment[kPanelMmaSteps][4];
    u32 q_resident[kPanelMmaSteps][4];
    RowState rows;
    Ring<kStagesKV> ring;
    Ring<1> q_ring;
    Ring<1> sums_ring;
};

template <bool kRight>
MLA_DEVICE u8* value_panels(Storage& s, i32 stage) {
    return s.kv[stage] + (kRight ? kHalfBytes : 0);
}

// A gathered tile is written by ordinary copies: whoever has waited for it makes it visible to WGMMA. (Bulk copies need
// no fence.)
MLA_DEVICE void fence_gathered() {
    if (kSparse) fence_proxy_async();
}

MLA_DEVICE void load_q_resident(Storage& s, Math& math, i32 thread) {
    mbarrier_wait(s.q_full, math.q_ring.full_parity(0));
    math.q_ring.advance(0);
    fence_gathered();
    load_panel(math.q_resident, s.q_resident(), thread);
}

// Starts S = Q K^T of the tile in `stage`, each half as soon as it has arrived.
MLA_DEVICE void start_scores(Storage& s, Math& math, i32 stage) {
    SmemDesc q = k_major_desc(smem_addr(s.q)), k = k_major_desc(smem_addr(s.kv[stage]));
    opaque(q.bits);  // else the compiler keeps all 64 sums of address and step in registers across the loop
    opaque(k.bits);
    const u32 parity = math.ring.full_parity(stage);
    pin(math.scores);
#pragma unroll
    for (i32 i = 0; i < kPanelsQk; ++i) {
        if (i == 0 || i == kPanelsLeft) {
            mbarrier_wait(i == 0 ? s.kv_full[stage].left : s.kv_full[stage].right, parity);
            fence_gathered();
            wgmma_fence();
        }
        const i32 panel = panel_in_order(i);
#pragma unroll
        for (i32 step = 0; step < kPanelMmaSteps; ++step) {
            const u32 bytes = panel * kPanelBytes + step * kKMajorStepBytes;
            const bool accumulate = i > 0 || step > 0;
            if (panel == kResidentPanel) {
                wgmma_m64n64k16<false>(Element{}, math.scores, math.q_resident[step], advance(k, bytes), accumulate);
            } else {
                wgmma_m64n64k16<false>(Element{}, math.scores, advance(q, bytes), advance(k, bytes), accumulate);
            }
        }
    }
    wgmma_commit_group();
}

// Starts O += P V with P in registers (this warpgroup's own tile) ...
template <bool kRight>
MLA_DEVICE void start_own_product(Storage& s, Math& math, i32 stage) {
    SmemDesc v = mn_major_desc(smem_addr(value_panels<kRight>(s, stage)));
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
template <bool kRight>
MLA_DEVICE void start_other_product(Storage& s, Math& math, i32 stage) {
    SmemDesc v = mn_major_desc(smem_addr(value_panels<kRight>(s, stage))), p = k_major_desc(smem_addr(s.p(stage)));
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

// Waits until at most kInFlight groups are in flight. Only then may operands and accumulators be touched.
template <i32 kInFlight>
MLA_DEVICE void finish(Math& math) {
    wgmma_wait_group<kInFlight>();
    if (kInFlight == 0) pin(math.scores);
    pin(math.out);
}

// 0 * NaN is not 0: before V is multiplied, this warpgroup makes its half of the values finite where not every row of
// the block sees them. Slots past the sequence's end become 0. A token that only later queries see keeps its finite
// values; the others become 0, and restore_nonfinite adds them to the rows that do see them.
//
// A sparse tile has nothing to clean: all rows of the block see its tokens, and past the list's end there are zeros.
template <bool kRight>
MLA_DEVICE void clean_values(Block& block, const Fragment& fragment, i32 tile, i32 stage, i32 thread) {
    if (kSparse) return;
    const i32 seen_by_all = block.seen_by_all(fragment) - tile * kTileTokens;
    const i32 end = fragment.tokens - tile * kTileTokens;
    if (seen_by_all >= kTileTokens) return;
    bar_sync(own_barrier(kRight), kWarpgroupThreads);  // the other warps' scores are done too: they read these rows
    u8* panels = value_panels<kRight>(block.s, stage);
    const i32 first = max(seen_by_all, 0);
    for (i32 i = thread; i < (kTileTokens - first) * kPanelChunks; i += kWarpgroupThreads) {
        const i32 row = first + i / kPanelChunks;
#pragma unroll
        for (i32 panel = 0; panel < kPanelsHalf; ++panel) {
            uint4& chunk =
                *reinterpret_cast<uint4*>(panels + panel * kPanelBytes + panel_offset(row, i % kPanelChunks));
            uint4 clean = make_uint4(0, 0, 0, 0);
            if (row < end && zero_nonfinite<Element>(clean = chunk)) block.s.unclean_request[kRight] = fragment.request;
            chunk = clean;
        }
    }
    fence_proxy_async();
    bar_sync(own_barrier(kRight), kWarpgroupThreads);
}

// Masks the scores of `tile`, which lies in `stage`. Most tiles hide nothing.
MLA_DEVICE void mask_tile(const Block& block, Math& math, const Fragment& fragment, i32 tile, i32 stage, i32 thread) {
    const u64 present = kSparse ? ~0ull : block.s.present[stage];
    if ((tile + 1) * kTileTokens <= block.seen_by_all(fragment) && present == ~0ull) return;
    i32 row = block.row0 + fragment_row(thread);
    opaque(row);
    TileMask mask;
    mask.present = present;
#pragma unroll
    for (i32 r = 0; r < kFragmentRows; ++r) {
        const i32 visible = visible_tokens(block.p, row + 8 * r, fragment.tokens);
        mask.visible[r] = min(visible, fragment.tokens) - tile * kTileTokens;
    }
    mask_scores(math.scores, mask, thread);
}

// Adds up both warpgroups' shares of the sums. The left one, which reports them, also gets the largest scores of both.
template <bool kRight>
MLA_DEVICE void total_sums(float (&sums)[kFragmentRows], Storage& s, Math& math, i32 thread) {
#pragma unroll
    for (i32 r = 0; r < kFragmentRows; ++r) sums[r] = quad_sum(math.rows.sum[r]);
    store_rows(s.sums[kRight], sums, thread);
    if (kSparse && kRight) store_rows(s.right_top, math.rows.top, thread);
    mbarrier_arrive(s.sums_ready[kRight]);
    mbarrier_wait(s.sums_ready[!kRight], math.sums_ring.full_parity(0));
    math.sums_ring.advance(0);
    float other[kFragmentRows];
    load_rows(other, s.sums[!kRight], thread);
#pragma unroll
    for (i32 r = 0; r < kFragmentRows; ++r) sums[r] += other[r];
    if (kSparse && !kRight) {
        load_rows(other, s.right_top, thread);
#pragma unroll
        for (i32 r = 0; r < kFragmentRows; ++r) math.rows.top[r] = fmaxf(math.rows.top[r], other[r]);
    }
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
        store_row(Element{}, to, math.out, r, factor, stored, thread);
    }
}

template <bool kRight>
MLA_DEVICE void store_result(const Block& block, const Fragment& fragment, const Math& math,
                             const float (&sums)[kFragmentRows], i32 thread) {
#pragma unroll
    for (i32 r = 0; r < kFragmentRows; ++r) {
        const i32 row = block.row0 + fragment_row(thread) + 8 * r;
        float factor = sums[r] == 0.f ? 0.f : 1.f / sums[r];
        if (kSparse) {
            const i32 head_row = min(row, block.rows - 1);
            factor = output_factor(block.p, fragment, block.kv_head, head_row, math.rows.max[r], sums[r]);
        }
        store_out_row<kRight>(block, fragment, math, r, factor, row, thread);
        if (!kRight && thread % 4 == 0 && row < block.rows) {
            store_row_lse(block.p, fragment, block.kv_head, row, row_lse2(math.rows.max[r], sums[r]));
            if (kSparse) {
                store_row_max(block.p, fragment, block.kv_head, row, with_nan_of(sums[r], math.rows.top[r]));
            }
        }
    }
}

// Any share of an infinite value is infinite: what clean_values took out is added, as it is, to the stored results of
// the rows that see it. Nobody is in a hurry here.
template <bool kRight>
MLA_DEVICE void restore_nonfinite(const Block& block, const Fragment& fragment, i32 thread) {
    const DenseDecodeParams& p = block.p;
    bar_sync(own_barrier(kRight), kWarpgroupThreads);  // the results are stored
    const i32 first = max(block.seen_by_all(fragment), fragment.tile_begin * kTileTokens);
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

// One math warpgroup. `tiles` is what it does with the tiles of a fragment, the kernel's own part; kScores says whether
// that includes scores. (One that does not need the query must not read it: its place is given to P.)
template <bool kRight, bool kScores, class Tiles>
MLA_DEVICE void run_math_role(Block& block, i32 thread, Tiles tiles) {
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
            if (kScores) load_q_resident(s, math, thread);
            tiles(math, fragment);
            total_sums<kRight>(sums, s, math, thread);
            unclean = !kSparse && s.unclean_request[kRight] == fragment.request;
            release(s.q_empty, thread);  // only now: the next fragment may change what was read above
        }
        store_result<kRight>(block, fragment, math, sums, thread);
        if (unclean) restore_nonfinite<kRight>(block, fragment, thread);
    }
}
