// The ring of keys of the mma.sync kernels: cache rows, copied by cp.async, that are scored and then serve as values.
//
// A step is 16 or 32 tokens. The ring is divided into octets of 8 tokens, so that it can use all available shared
// memory. Every thread copies, with as many neighbouring threads per token as the step allows. Within each 128 bytes of
// a row, 16-byte chunk c lies at position c ^ (row % 8), so that ldmatrix, plain or transposed, has no bank conflicts.
#pragma once
#include "attention/mma/block.cuh"
#include "ptx/control.cuh"
#include "ptx/copy.cuh"
#include "tile/ring.cuh"

namespace mla::attention::mma {
constexpr i32 kOctetTokens = 8;
constexpr i32 kChunkBytes = 16;
constexpr i32 kChunkElems = 8;
constexpr i32 kSegmentBytes = 128;  // a swizzled segment is eight chunks
constexpr i32 kSegmentChunks = kSegmentBytes / kChunkBytes;

// Bytes of a row of `columns` elements, rounded up to whole segments.
MLA_DEVICE constexpr i32 padded_row_bytes(i32 columns) {
    return ceil_div(columns * (i32)sizeof(u16), kSegmentBytes) * kSegmentBytes;
}

template <i32 kHeadDim, i32 kOctets_, i32 kStepTokens_>
struct KeyRing {
    static constexpr i32 kOctets = kOctets_, kStepTokens = kStepTokens_;
    static constexpr i32 kRowBytes = padded_row_bytes(kHeadDim);
    static constexpr i32 kRowChunks = kHeadDim * (i32)sizeof(u16) / kChunkBytes;  // copied chunks of a row
    static constexpr i32 kPaddingChunks = kRowBytes / kChunkBytes - kRowChunks;
    static constexpr i32 kStepOctets = kStepTokens / kOctetTokens;
    static constexpr i32 kTokenThreads = kThreads / kStepTokens;      // threads that copy one token
    static constexpr i32 kWarpTokens = kWarpThreads / kTokenThreads;  // tokens of a step copied by a warp
    static constexpr i32 kOctetWarps = kOctetTokens / kWarpTokens;
    // The steps that the ring holds, if it is whole steps; otherwise parts of one more, and one that is read.
    static constexpr bool kWholeSteps = kOctets % kStepOctets == 0;
    static constexpr i32 kBarriers = kOctets / kStepOctets + (kWholeSteps ? 0 : 2);
    static_assert(kTokenThreads % kChunkElems == 0, "each round of copies is whole segments");
    static_assert(kTileTokens % kStepTokens == 0, "a tile is whole steps");
    static_assert(kOctets >= 2 * kStepOctets, "a step is read while the next one arrives");

    // Ring position of octet `octet` of the step that begins at octet `first`.
    MLA_DEVICE static i32 position(i32 first, i32 octet) {
        const i32 at = first + octet;
        return at >= kOctets ? at - kOctets : at;
    }
    // Ring position within one step: in a ring of whole steps, no octet of a step goes past the end.
    MLA_DEVICE static i32 within(i32 first, i32 octet) { return kWholeSteps ? first + octet : position(first, octet); }

    // Byte offset of a chunk of row `row` of an octet.
    MLA_DEVICE static u32 offset(i32 row, i32 chunk) {
        return row * kRowBytes + (chunk & ~7) * kChunkBytes + ((chunk ^ row) & 7) * kChunkBytes;
    }
};

// The ring in shared memory.
template <class Ring>
struct KeySlots {
    alignas(kSegmentBytes) u8 octets[Ring::kOctets][kOctetTokens * Ring::kRowBytes];
    MBarrier full[Ring::kBarriers];  // all threads arrive, with their copies; the first phase blocks
    alignas(8) u8 present[Ring::kOctets][kOctetTokens];  // 1 if the token's page is in the pool, or 0
};

template <class Ring>
MLA_DEVICE void init_keys(KeySlots<Ring>& keys) {
    for (i32 i = 0; i < Ring::kBarriers; ++i) mbarrier_init(keys.full[i], kThreads);
}

// Called once by all threads. Padding columns are multiplied by zeros of the queries, so they must be finite.
template <class Ring>
MLA_DEVICE void clear_padding(KeySlots<Ring>& keys) {
    constexpr i32 kChunks = Ring::kPaddingChunks;
    if constexpr (kChunks > 0) {
#pragma unroll 1
        for (i32 i = threadIdx.x; i < Ring::kOctets * kOctetTokens * kChunks; i += kThreads) {
            const i32 row = i / kChunks;
            u8* const octet = keys.octets[row / kOctetTokens];
            const u32 at = Ring::offset(row % kOctetTokens, Ring::kRowChunks + i % kChunks);
            *reinterpret_cast<uint4*>(octet + at) = make_uint4(0, 0, 0, 0);
        }
    }
}

// A position in the ring, step by step.
template <class Ring, bool kWholeSteps = Ring::kWholeSteps>
struct RingCursor {
    i32 first = 0;   // octet where the step begins
    u32 parity = 0;  // of its barrier

    MLA_DEVICE MBarrier& full(KeySlots<Ring>& s) const { return s.full[(u32)first / Ring::kStepOctets]; }
    MLA_DEVICE i32 previous() const { return (first == 0 ? Ring::kOctets : first) - Ring::kStepOctets; }
    MLA_DEVICE void advance() {
        first = Ring::position(first, Ring::kStepOctets);
        parity ^= first == 0;
    }
};

// A ring whose end may lie inside a step.
template <class Ring>
struct RingCursor<Ring, false> {
    i32 first = 0, barrier = 0;
    u32 parity = 0;

    MLA_DEVICE MBarrier& full(KeySlots<Ring>& s) const { return s.full[barrier]; }
    MLA_DEVICE void advance() {
        first = Ring::position(first, Ring::kStepOctets);
        barrier = barrier + 1 == Ring::kBarriers ? 0 : barrier + 1;
        parity ^= barrier == 0;
    }
};

// One thread's share of loading.
template <class Ring>
struct KeyLoader {
    RingCursor<Ring> at;  // of the next step to ask for
    i32 asked;            // steps of the item
    // This thread's token of that step: its block-table entry, the page read ahead from it, the token's place in the
    // page, and the item's remaining tokens from it on.
    const i32* entry;
    i32 page, offset, left;
    const u16* keys;  // this thread's first chunk of the pool's first row
    SmemAddr octets;  // the same of the ring's first octet
    // Pages and tokens per step. Costs one division per block and one per item.
    i32 step_pages, step_tokens;

    template <class Block>
    MLA_DEVICE KeyLoader(const Block& block, KeySlots<Ring>& s) {
        const DecodeParams& p = block.p;
        const i32 chunk = (i32)threadIdx.x % Ring::kTokenThreads;
        step_pages = Ring::kStepTokens / p.page_size;
        step_tokens = Ring::kStepTokens - step_pages * p.page_size;
        u64 from = reinterpret_cast<u64>(p.kv + block.kv_head * p.kv_stride_h_elems + chunk * kChunkElems);
        opaque(from);  // not to be computed again in each step
        keys = reinterpret_cast<const u16*>(from);
        octets = held(smem_addr(s.octets[0]) + Ring::offset(mine() % kOctetTokens, chunk));
    }

    MLA_DEVICE static i32 mine() { return (i32)threadIdx.x / Ring::kTokenThreads; }  // token of each step
    MLA_DEVICE static i32 octet() { return mine() / kOctetTokens; }

    template <class Block>
    MLA_DEVICE void begin(const Block& block) {
        const DecodeParams& p = block.p;
        const i32 token = block.begin() + mine(), index = token / p.page_size;
        asked = 0, offset = token - index * p.page_size, left = block.end() - token;
        entry = p.block_table + block.item().request * p.table_stride_b_elems + index * p.table_stride_page_elems;
        look_up();
    }

    // Asks for all of the item's `steps` that the ring has room for.
    template <class Block>
    MLA_DEVICE void fill(const Block& block, KeySlots<Ring>& s, i32 steps) {
#pragma unroll 1
        while (may_ask(steps, 0)) {
            ask_step(block, s);
            look_up();
        }
    }

    // Returns true if there is a step left to request whose slot is free, given that all threads have read `done`
    // steps.
    MLA_DEVICE bool may_ask(i32 steps, i32 done) const {
        return asked < steps && Ring::kStepOctets * asked + octet() < Ring::kStepOctets * done + Ring::kOctets;
    }

    // The place of the step's token must have been looked up.
    template <class Block>
    MLA_DEVICE void ask_step(const Block& block, KeySlots<Ring>& s) {
        copy_token(block.p, s);
        cp_async_mbarrier_arrive_noinc(at.full(s));
        at.advance();
        ++asked;
        const i32 next = offset + step_tokens, more = next >= block.p.page_size;
        offset = more ? next - block.p.page_size : next;
        entry += (step_pages + more) * block.p.table_stride_page_elems;
        left -= Ring::kStepTokens;
    }

    // Loads the page of the next step to request. Call it where nobody waits for the load.
    MLA_DEVICE void look_up() { page = left > 0 ? *entry : -1; }

   private:
    MLA_DEVICE void copy_token(const DecodeParams& p, KeySlots<Ring>& s) {
        const i32 octet_at = Ring::within(at.first, octet()), chunk = (i32)threadIdx.x % Ring::kTokenThreads;
        const bool present = (u32)page < (u32)p.num_pages;
        if (chunk == 0) s.present[octet_at][mine() % kOctetTokens] = present;
        const u16* from = keys;
        if (present) from += page * p.kv_stride_page_elems + offset * p.kv_stride_token_elems;
        const SmemAddr to = octets + (u32)octet_at * (u32)sizeof(s.octets[0]);
#pragma unroll
        for (i32 i = 0; i < ceil_div(Ring::kRowChunks, Ring::kTokenThreads); ++i) {
            const i32 ahead = i * Ring::kTokenThreads;
            if (ahead + Ring::kTokenThreads > Ring::kRowChunks && ahead + chunk >= Ring::kRowChunks) break;
            cp_async_16(to + ahead * kChunkBytes, from + ahead * kChunkElems, present);
        }
    }
};

// Which of kTokens tokens, from token `token` of the step at `first` on, can be read: a bit each.
template <i32 kTokens, class Ring>
MLA_DEVICE u32 present_bits(const KeySlots<Ring>& s, i32 first, i32 token) {
    static_assert(kTokens == 2 || kTokens == 4, "read at once");
    const u8* from = &s.present[Ring::within(first, token / kOctetTokens)][token % kOctetTokens];
    if constexpr (kTokens == 2) {
        const u32 bytes = *reinterpret_cast<const u16*>(from);
        return (bytes | bytes >> 7) & 3;
    }
    const u32 bytes = *reinterpret_cast<const u32*>(from);
    return (bytes | bytes >> 7 | bytes >> 14 | bytes >> 21) & 15;
}

// Called by all threads. 0 * NaN is not 0: non-finite values become 0 in tokens of the step that not every row sees.
// Returns true if this thread found one. `token` is the step's first.
template <class Element, class Ring, i32 kColumns = kHeadDimV, class Keys>
MLA_DEVICE bool clean_values(Keys& s, i32 first, i32 token, i32 seen_by_all) {
    i32 thread = threadIdx.x;
    opaque(thread);  // cold: nothing of it is worth a register across the steps
    const i32 mine = thread / Ring::kTokenThreads;
    if (token + mine < seen_by_all) return false;
    u8* octet = s.octets[Ring::position(first, mine / kOctetTokens)];
    bool found = false;
#pragma unroll 1
    for (i32 chunk = thread % Ring::kTokenThreads; chunk < kColumns / kChunkElems; chunk += Ring::kTokenThreads) {
        found |= zero_nonfinite<Element>(*reinterpret_cast<uint4*>(octet + Ring::offset(mine % kOctetTokens, chunk)));
    }
    return found;
}
}  // namespace mla::attention::mma
