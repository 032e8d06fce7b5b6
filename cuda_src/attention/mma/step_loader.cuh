// Loads for the kernel for many rows, with a ring of whole steps of 16 tokens.
//
// Finding a token's row takes a division and a load from the block table. A warp copies two tokens per step and looks
// up its tokens of 16 steps at once, one per lane. The lookup has two halves, one step apart, so that the warp never
// waits for the load. All warps look up in the same steps: if they took turns, every step would wait for one of them.
#pragma once
#include "attention/mma/key_ring.cuh"
#include "ptx/control.cuh"

namespace mla::attention::mma {
constexpr i32 kRowSteps = 16;  // steps whose rows a warp looks up at once
constexpr i32 kRowTables = 2;  // tables: one for the steps being requested, one for the next ones

struct TokenRows {
    // One row per lane. Null: the token's page is outside the pool, or the token is past the end.
    const u16* rows[kWarps][kRowTables * kWarpThreads];
    alignas(8) u8 present[kRowTables * kRowSteps][kWarps];  // bit = token of a warp: whether it has a row
};

// A position in the ring, step by step.
template <class Ring>
struct StepCursor {
    i32 first = 0;   // octet where the step begins
    u32 parity = 0;  // of its barrier

    // The octet `steps` steps further. A step back by n is a step ahead by a round less n.
    MLA_DEVICE i32 ahead(i32 steps) const {
        const i32 at = first + steps * Ring::kStepOctets;
        if constexpr ((Ring::kOctets & (Ring::kOctets - 1)) == 0) return at & (Ring::kOctets - 1);
        return at >= Ring::kOctets ? at - Ring::kOctets : at;
    }
    MLA_DEVICE i32 back(i32 steps) const { return ahead(Ring::kOctets / Ring::kStepOctets - steps); }
    MLA_DEVICE void advance() {
        first = ahead(1);
        parity ^= first == 0;
    }
};

template <class Ring>
MLA_DEVICE MBarrier& step_barrier(KeySlots<Ring>& s, i32 first) {
    __builtin_assume((u32)first % Ring::kStepOctets == 0);
    return s.full[(u32)first / Ring::kStepOctets];
}

// The next step to copy.
struct StepCopies {
    const u16* from;
    SmemAddr to;
    i32 chunk;  // of the row, this thread's first one
    bool present, due;
};

template <class Ring>
struct StepLoader {
    static constexpr i32 kSteps = Ring::kOctets / Ring::kStepOctets;  // of the ring
    static constexpr i32 kLookUp = kRowSteps / 2;                     // step of a table that looks up the next table
    static constexpr i32 kRounds = ceil_div(Ring::kRowChunks, Ring::kTokenThreads);  // of copies of a step
    static_assert(Ring::kWholeSteps && Ring::kWarpTokens * kRowSteps == kWarpThreads, "a lane for each token");
    static_assert(Ring::kTokenThreads == 2 * kSegmentChunks, "chunks of a round keep their segment when swizzled");
    static_assert(kSteps <= kLookUp, "a table is kept until its last step is masked");

    i32 page;  // of this lane's token, in the table that is being looked up

    // Requests as many of the item's first `steps` as the ring holds, from `at` on.
    template <class Block>
    MLA_DEVICE void begin(const Block& block, KeySlots<Ring>& s, TokenRows& table, StepCursor<Ring> at, i32 steps) {
        const i32 warp = uniform_warp();
        page = page_of(block, 0, warp);
        keep_rows(block, table, 0, warp);
#pragma unroll 1
        for (i32 step = 0; step < min(steps, kSteps); ++step) {
            const StepCopies copies = next(block, s, table, threadIdx.x, at.first, step, true);
#pragma unroll
            for (i32 round = 0; round < kRounds; ++round) copy(copies, round);
            finish(s, at.first);
            at.advance();
        }
        __syncthreads();  // all threads know the present tokens
    }

    // The step that takes the place of step `done` - 1, at octet `first`, which all threads have read.
    template <class Block>
    MLA_DEVICE static StepCopies after(const Block& block, KeySlots<Ring>& s, const TokenRows& table, i32 thread,
                                       i32 first, i32 done, i32 steps) {
        const i32 step = done + kSteps - 1;
        return next(block, s, table, thread, first, step, (done > 0) & (step < steps));
    }

    // One of kRounds of its copies, by this thread.
    MLA_DEVICE static void copy(const StepCopies& copies, i32 round) {
        const i32 ahead = round * Ring::kTokenThreads;
        const bool whole = ahead + Ring::kTokenThreads <= Ring::kRowChunks;
        cp_async_16_if(copies.due & (whole | (ahead + copies.chunk < Ring::kRowChunks)),
                       copies.to + ahead * kChunkBytes, copies.from + ahead * kChunkElems, copies.present);
    }

    // After the last round of copies that are due.
    MLA_DEVICE static void finish(KeySlots<Ring>& s, i32 first) {
        cp_async_mbarrier_arrive_noinc(step_barrier(s, first));
    }

    // Returns true if `look_up` does work during step `done`.
    MLA_DEVICE static bool looks_up(i32 done) {
        static_assert(kLookUp % 2 == 0, "two steps that differ in the last bit");
        return ((done + kSteps - 1) % kRowSteps | 1) == kLookUp + 1;
    }

    // Looks up, if it is time, during the step that took the place of step `done` - 1.
    template <class Block>
    MLA_DEVICE void look_up(const Block& block, TokenRows& table, i32 done, i32 warp) {
        const i32 step = done + kSteps - 1, at = (u32)step % kRowSteps;
        if (at == kLookUp) page = page_of(block, step / kRowSteps + 1, warp);
        if (at == kLookUp + 1) keep_rows(block, table, step / kRowSteps + 1, warp);
    }

   private:
    MLA_DEVICE static i32 token_of_lane(i32 index, i32 warp) {
        const i32 lane = threadIdx.x % kWarpThreads;
        return (index * kRowSteps + lane / Ring::kWarpTokens) * Ring::kStepTokens + warp * Ring::kWarpTokens +
               lane % Ring::kWarpTokens;
    }

    // The page in the block table; negative past the end.
    template <class Block>
    MLA_DEVICE static i32 page_of(const Block& block, i32 index, i32 warp) {
        const DecodeParams& p = block.p;
        const i32 token = block.begin() + token_of_lane(index, warp);
        if (token >= block.end()) return -1;
        return p.block_table[block.item().request * p.table_stride_b_elems +
                             token / p.page_size * p.table_stride_page_elems];
    }

    template <class Block>
    MLA_DEVICE void keep_rows(const Block& block, TokenRows& table, i32 index, i32 warp) const {
        const DecodeParams& p = block.p;
        const i32 lane = threadIdx.x % kWarpThreads, token = block.begin() + token_of_lane(index, warp);
        const bool present = (u32)page < (u32)p.num_pages;
        const u16* row = p.kv + block.kv_head * p.kv_stride_h_elems + page * p.kv_stride_page_elems +
                         token % p.page_size * p.kv_stride_token_elems;
        table.rows[warp][index % kRowTables * kWarpThreads + lane] = present ? row : nullptr;
        const u32 all = __ballot_sync(kFullWarp, present);
        if (lane < kRowSteps) {
            table.present[index % kRowTables * kRowSteps + lane][warp] =
                (u8)(all >> lane * Ring::kWarpTokens & ((1 << Ring::kWarpTokens) - 1));
        }
        __syncwarp();
    }

    template <class Block>
    MLA_DEVICE static StepCopies next(const Block& block, KeySlots<Ring>& s, const TokenRows& table, i32 opaque_thread,
                                      i32 first, i32 step, bool due) {
        opaque(opaque_thread);  // values derived from it are not worth registers across the loop
        const u32 thread = opaque_thread, mine = thread / Ring::kTokenThreads, chunk = thread % Ring::kTokenThreads;
        const u32 lane = (u32)step * Ring::kWarpTokens % (kRowTables * kWarpThreads) + mine % Ring::kWarpTokens;
        const u16* row = table.rows[thread / kWarpThreads][lane];
        const bool present = row != nullptr;
        // Octets follow each other: so do the step's rows.
        const u32 at = mine * Ring::kRowBytes + (chunk ^ mine % kOctetTokens) * kChunkBytes;
        return StepCopies{(present ? row : block.p.kv) + chunk * kChunkElems, smem_addr(s.octets[first]) + at,
                          (i32)chunk, present, due};
    }
};

// One bit per token of step `step` that has a row, one byte per warp.
MLA_DEVICE u64 present_bits(const TokenRows& table, i32 step) {
    return *reinterpret_cast<const u64*>(table.present[(u32)step % (kRowTables * kRowSteps)]);
}
constexpr u64 kAllPresent = 0x0303030303030303;
}  // namespace mla::attention::mma
