// Loads of the kernel for many rows, whose ring is whole steps of 16 tokens.
//
// Where a token lies takes a division and a load from the block table. A warp finds that out for 32 tokens, a span, in
// two parts that are a step apart, so that it never waits for the load; warps take turns, so each has this work once in
// 16 steps. All threads read the row's address when they copy.
#pragma once
#include "attention/mma/key_ring.cuh"

namespace mla::attention::mma {
constexpr i32 kSpanTokens = kWarpThreads;
constexpr i32 kSpans = kWarps;  // that are kept

struct TokenRows {
    const u16* rows[kSpans][kSpanTokens];  // null: the token's page is not in the pool, or it is past the end
    u16 present[kSpans][2];                // bit = token of each step: whether it has a row
};

template <class Ring>
struct StepLoader {
    static constexpr i32 kSteps = Ring::kOctets / Ring::kStepOctets;  // of the ring
    static constexpr i32 kSpanSteps = kSpanTokens / Ring::kStepTokens;
    static_assert(Ring::kWholeSteps && kSpanSteps == 2, "spans and the ring are whole steps");
    static_assert(kSteps + 2 * kSpanSteps <= kSpans * kSpanSteps, "a span is kept until its last step is masked");

    RingCursor<Ring> at;  // of the next step to ask for
    i32 page;             // of this lane's token, in the span that the warp is looking up

    // Asks for the first of the item's `steps`, as many as the ring has room for.
    template <class Block>
    MLA_DEVICE void begin(const Block& block, KeySlots<Ring>& s, TokenRows& table, i32 steps) {
        const i32 warp = uniform_warp();
        if (warp <= kSteps / kSpanSteps) page = page_of(block, warp);
        if (warp < ceil_div(kSteps, kSpanSteps)) keep_rows(block, table, warp);
        __syncthreads();
#pragma unroll 1
        for (i32 step = 0; step < min(steps, kSteps); ++step) ask(block, s, table, step);
    }

    // Asks for the step that takes the place of step `done` - 1, which all threads have read.
    template <class Block>
    MLA_DEVICE void advance(const Block& block, KeySlots<Ring>& s, TokenRows& table, i32 done, i32 steps, i32 warp) {
        const i32 step = done + kSteps - 1;
        if (done > 0 && step < steps) ask(block, s, table, step);
        const i32 span = (step + 2) / kSpanSteps;
        if (span % kWarps != warp) return;
        if (step % kSpanSteps == 0) {
            page = page_of(block, span);
        } else {
            keep_rows(block, table, span);
        }
    }

   private:
    // As the block table says; below 0 past the end.
    template <class Block>
    MLA_DEVICE static i32 page_of(const Block& block, i32 span) {
        const DecodeParams& p = block.p;
        const i32 token = block.begin() + span * kSpanTokens + (i32)threadIdx.x % kWarpThreads;
        if (token >= block.end()) return -1;
        return p.block_table[block.item().request * p.table_stride_b_elems +
                             token / p.page_size * p.table_stride_page_elems];
    }

    template <class Block>
    MLA_DEVICE void keep_rows(const Block& block, TokenRows& table, i32 span) const {
        const DecodeParams& p = block.p;
        const i32 lane = threadIdx.x % kWarpThreads, token = block.begin() + span * kSpanTokens + lane;
        const bool present = (u32)page < (u32)p.num_pages;
        const u16* row = p.kv + block.kv_head * p.kv_stride_h_elems + page * p.kv_stride_page_elems +
                         token % p.page_size * p.kv_stride_token_elems;
        table.rows[span % kSpans][lane] = present ? row : nullptr;
        const u32 all = __ballot_sync(kFullWarp, present);
        if (lane % Ring::kStepTokens == 0) {
            table.present[span % kSpans][lane / Ring::kStepTokens] = (u16)(all >> lane);
        }
    }

    template <class Block>
    MLA_DEVICE void ask(const Block& block, KeySlots<Ring>& s, const TokenRows& table, i32 step) {
        const i32 thread = threadIdx.x, mine = thread / Ring::kTokenThreads, chunk = thread % Ring::kTokenThreads;
        const i32 span = step / kSpanSteps % kSpans, token = step % kSpanSteps * Ring::kStepTokens + mine;
        const u16* row = table.rows[span][token];
        const bool present = row != nullptr;
        const u16* from = (present ? row : block.p.kv) + chunk * kChunkElems;
        const SmemAddr to = smem_addr(s.octets[at.first]) + (u32)(mine / kOctetTokens * sizeof(s.octets[0])) +
                            Ring::offset(mine % kOctetTokens, chunk);
#pragma unroll
        for (i32 i = 0; i < ceil_div(Ring::kRowChunks, Ring::kTokenThreads); ++i) {
            const i32 ahead = i * Ring::kTokenThreads;
            if (ahead + Ring::kTokenThreads > Ring::kRowChunks && ahead + chunk >= Ring::kRowChunks) break;
            cp_async_16(to + ahead * kChunkBytes, from + ahead * kChunkElems, present);
        }
        cp_async_mbarrier_arrive_noinc(at.full(s));
        at.advance();
    }
};

// Of the tokens of step `step`, those that have a row: bit = token.
MLA_DEVICE u32 present_bits(const TokenRows& table, i32 step) { return table.present[step / 2 % kSpans][step % 2]; }
constexpr u32 kAllPresent = 0xffff;
}  // namespace mla::attention::mma
