// A thread block of the mma.sync kernels: its query rows, its work items, and its share of the output in registers.
//
// All warps do the same: each owns 64 columns of the output of all rows. What is needed once an item lies in shared
// memory, since registers are what these kernels are short of.
#pragma once
#include "attention/decode_output.cuh"
#include "attention/tree_mask.cuh"
#include "ptx/mma.cuh"
#include "tile/elements.cuh"
#include "tile/warp.cuh"

namespace mla::attention::mma {
constexpr i32 kThreads = 256;
constexpr i32 kWarps = kThreads / kWarpThreads;
constexpr i32 kMmaRows = 16;  // of one product
constexpr i32 kMmaColumns = 8;
constexpr i32 kMmaDepth = 16;
constexpr i32 kWarpColumns = kHeadDimV / kWarps;
constexpr i32 kValueTiles = kWarpColumns / kMmaColumns;

// The work items of a block; one thread steps on.
template <class Work>
struct ItemsOf {
    WorkItem item;
    WorkIteratorOf<Work> walk;
    i32 more;
};
using Items = ItemsOf<ScheduledWork>;

// Up to kRows query rows of one KV head, in one split.
template <i32 kRows, class Work = ScheduledWork>
struct Block {
    const DecodeParams& p;
    ItemsOf<Work>& items;
    i32 kv_head, row0, rows;  // first row of the KV head in this block; rows of the KV head

    MLA_DEVICE Block(const DecodeParams& p, ItemsOf<Work>& items) : p(p), items(items), rows(query_rows(p)) {
        const i32 row_blocks = ceil_div(rows, kRows);
        kv_head = blockIdx.x / row_blocks;
        row0 = blockIdx.x % row_blocks * kRows;
        if (threadIdx.x != 0) return;
        items.walk = WorkIteratorOf<Work>(p, blockIdx.y, p.tree_mask != nullptr ? p.s_q : hidden_from(p, row0));
    }

    // Called by all threads. Also a barrier: the last item's shared memory may be overwritten afterwards.
    MLA_DEVICE bool next() const {
        __syncthreads();
        if (threadIdx.x == 0) items.more = items.walk.next(p, items.item);
        __syncthreads();
        return items.more;
    }
    MLA_DEVICE const WorkItem& item() const { return items.item; }
    MLA_DEVICE i32 begin() const { return item().tile_begin * kTileTokens; }
    MLA_DEVICE i32 end() const { return min(item().tile_end * kTileTokens, item().tokens); }
    MLA_DEVICE bool sees(i32 row, i32 token) const { return seen_tokens(p, item(), row0 + row).contain(token); }

    // Columns of row `row` of the block from `column` on, as words: those past the KV head's last row do not matter.
    MLA_DEVICE const u16* query(i32 row, i32 column) const {
        const i32 group = p.h_q / p.h_kv, r = min(row0 + row, rows - 1);
        return p.q + item().request * p.q_stride_b_elems + (r / group) * p.q_stride_s_elems +
               (i64)(kv_head * group + r % group) * p.q_stride_h_elems + column;
    }
};

// A warp's share of the kColumns columns of the output of all rows, in accumulators of mma_m16n8k16.
template <class Element, i32 kRowTiles, i32 kColumns = kHeadDimV>
struct Output {
    static constexpr i32 kWarpColumns = kColumns / kWarps, kValueTiles = kWarpColumns / kMmaColumns;
    static constexpr i32 kHalves = 2 * kRowTiles;  // a lane's rows: 8 i + lane / 4
    float x[kRowTiles][kValueTiles][4];

    MLA_DEVICE void clear() {
#pragma unroll
        for (i32 i = 0; i < kRowTiles * kValueTiles * 4; ++i) (&x[0][0][0])[i] = 0.f;
    }

    // Multiplies each row by its factor.
    MLA_DEVICE void rescale(const float* factors, i32 lane) {
#pragma unroll
        for (i32 i = 0; i < kHalves; ++i) {
            const float factor = factors[8 * i + lane / 4];
#pragma unroll
            for (i32 n = 0; n < kValueTiles; ++n) {
                x[i / 2][n][2 * (i % 2)] *= factor;
                x[i / 2][n][2 * (i % 2) + 1] *= factor;
            }
        }
    }

    MLA_DEVICE static i32 column(i32 n, i32 warp, i32 lane) {
        return warp * kWarpColumns + n * kMmaColumns + lane % 4 * 2;
    }

    // Cold: what `zero_nonfinite` has taken out of the values, for the rows that see it. Any multiple of an infinity is
    // infinite.
    template <class Block>
    MLA_DEVICE void add_nonfinite(const Block& block, i32 warp, i32 lane) {
#pragma unroll 1
        for (i32 token = max(max(block.item().seen_by_all, block.begin()), 0); token < block.end(); ++token) {
            const u16* values = cached_row(block.p, block.item().request, block.kv_head, token);
            if (values == nullptr) continue;
#pragma unroll
            for (i32 i = 0; i < kHalves; ++i) {
                const i32 row = 8 * i + lane / 4;
                if (block.row0 + row >= block.rows || !block.sees(row, token)) continue;
#pragma unroll
                for (i32 k = 0; k < 2 * kValueTiles; ++k) {
                    const float value = Element::to_float(values[column(k / 2, warp, lane) + k % 2]);
                    if (!(fabsf(value) <= kMaxFloat)) x[i / 2][k / 2][2 * (i % 2) + k % 2] += value;
                }
            }
        }
    }

    // Times a factor of each row; 0 means a row without a token, whatever was multiplied.
    template <class Block>
    MLA_DEVICE void store(const Block& block, const float* factors, i32 warp, i32 lane) {
        store(block, factors, warp, lane,
              [&](i32 row) { return out_offset(block.p, block.item().request, block.kv_head, block.row0 + row); });
    }

    // `out_at` maps a row of the block to its place in the output.
    template <class Block, class OutAt>
    MLA_DEVICE void store(const Block& block, const float* factors, i32 warp, i32 lane, const OutAt& out_at) {
#pragma unroll
        for (i32 tile = 0; tile < kRowTiles; ++tile) {
#pragma unroll
            for (i32 r = 0; r < 2; ++r) {
                const i32 row = tile * kMmaRows + 8 * r + lane / 4;
                const float factor = factors[row];
                float of_row[2 * kValueTiles];
#pragma unroll
                for (i32 i = 0; i < 2 * kValueTiles; ++i) {
                    of_row[i] = factor == 0.f ? 0.f : x[tile][i / 2][2 * r + i % 2] * factor;
                }
                if (block.row0 + row < block.rows) store_row(block, row, column(0, warp, lane), of_row, out_at);
            }
        }
    }

   private:
    template <class Block, class OutAt>
    MLA_DEVICE static void store_row(const Block& block, i32 row, i32 column, const float (&of_row)[2 * kValueTiles],
                                     const OutAt& out_at) {
        const DecodeParams& p = block.p;
        const i32 partial = block.item().partial_index;
        const bool split = partial != kNotSplit;
        const i64 at =
            (split ? workspace_row(p, partial, block.kv_head, block.row0 + row) * kHeadDimV : out_at(row)) + column;
        if (split || p.out_is_fp32) {
            float* to = (split ? p.partial_out : static_cast<float*>(p.out)) + at;
#pragma unroll
            for (i32 n = 0; n < kValueTiles; ++n) {
                *reinterpret_cast<float2*>(to + n * kMmaColumns) = make_float2(of_row[2 * n], of_row[2 * n + 1]);
            }
        } else {
            u16* to = static_cast<u16*>(p.out) + at;
#pragma unroll
            for (i32 n = 0; n < kValueTiles; ++n) {
                *reinterpret_cast<u32*>(to + n * kMmaColumns) = cvt_x2(Element{}, of_row[2 * n], of_row[2 * n + 1]);
            }
        }
    }
};

// Called by one thread: stores a row's statistics and returns the factor of the output.
template <class Block>
MLA_DEVICE float store_statistics(const Block& block, i32 row, float max, float sum, float row_max) {
    const i32 r = block.row0 + row;
    if (r >= block.rows) return 0.f;
    store_row_lse(block.p, block.item(), block.kv_head, r, row_lse2(max, sum));
    store_row_max(block.p, block.item(), block.kv_head, r, with_nan_of(sum, row_max));
    return output_factor(block.p, block.item(), block.kv_head, r, max, sum);
}
}  // namespace mla::attention::mma
