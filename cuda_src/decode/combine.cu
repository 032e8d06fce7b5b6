// Merges the partial results of split requests.
//
//   out = sum_j w_j out_j / sum_j w_j,   w_j = exp2(lse_j - max lse),   lse = max lse + log2 sum_j w_j
//
// With an attention sink, exp2(sink - max lse) is added to the denominator of `out`.
//
// Grid: as many blocks as fit on the GPU; they share out the rows of all split requests. Each block reads the schedule
// (attention/split_work.cuh) and lists the split requests: those whose first piece ends a part. A request with few
// pieces is merged by single warps, a row each; one with many by whole blocks, where each warp takes a share of the
// pieces of 128 columns, so that the pieces are read side by side instead of one after the other.
//
// Source: the log-sum-exp merge of flash-decoding. What differs from FlashMLA's: no walk over all splits by one warp.
#include "attention/decode_output.cuh"
#include "attention/dtype_variant.cuh"
#include "ptx/control.cuh"
#include "tile/warp.cuh"

// ---- Budget ----------------------------------------------------------------------------------------------------
constexpr i32 kThreads = 256;
constexpr i32 kWarps = kThreads / kWarpThreads;
constexpr i32 kMaxParts = 256;                           // of a schedule
constexpr i32 kWarpColumns = 4 * kWarpThreads;           // 16 bytes of fp32 a lane
constexpr i32 kColumnBlocks = kHeadDimV / kWarpColumns;  // 4
constexpr i32 kMostPiecesOfWarp = 8;                     // more are merged by a block
constexpr i32 kLoadsInFlight = 4;
static_assert(kThreads >= kMaxParts, "one thread looks at one part, or at one piece's lse");

MLA_DECODE_FACTS();
MLA_FACT(threads, kThreads);
MLA_FACT(max_parts, kMaxParts);

struct SplitRequest {
    i32 request, first_part, pieces;

    // Slot of piece j: the first piece ended its part, every other one began its part.
    MLA_DEVICE i32 slot(const DenseDecodeParams& p, i32 j) const {
        return j == 0 ? p.num_parts + first_part : first_part + j;
    }
};

struct Storage {
    SchedulePoint schedule[kMaxParts + 1];
    SplitRequest splits[kMaxParts];  // those with few pieces, then those with many
    i32 warp_counts[2][kWarps];
    float weights[kMaxParts];
    float warp_values[kWarps];
    float4 sums[kWarps][kWarpThreads];
};

// ---- The list of split requests --------------------------------------------------------------------------------
struct SplitCounts {
    i32 few, all;
};

// Fills s.splits, in the same order in every block.
MLA_DEVICE SplitCounts list_splits(const DenseDecodeParams& p, Storage& s) {
    const i32 thread = threadIdx.x, lane = thread % kWarpThreads, warp = thread / kWarpThreads;
    for (i32 i = thread; i <= p.num_parts; i += kThreads) s.schedule[i] = p.schedule[i];
    __syncthreads();
    bool few = false, many = false;
    SplitRequest split;
    if (thread < p.num_parts) {
        const SchedulePoint begin = s.schedule[thread], end = s.schedule[thread + 1];
        const bool starts_split = end.tile > 0 && !(begin.request == end.request && begin.tile > 0);
        // The request goes on until the first later part that begins beyond it.
        i32 low = thread + 1, high = p.num_parts;
        while (starts_split && low < high) {
            const i32 middle = (low + high) / 2;
            if (s.schedule[middle].request <= end.request) {
                low = middle + 1;
            } else {
                high = middle;
            }
        }
        split = SplitRequest{end.request, thread, low - thread};
        few = starts_split && split.pieces <= kMostPiecesOfWarp;
        many = starts_split && !few;
    }
    const u32 with_few = __ballot_sync(kFullWarp, few), with_many = __ballot_sync(kFullWarp, many);
    if (lane == 0) {
        s.warp_counts[0][warp] = __popc(with_few);
        s.warp_counts[1][warp] = __popc(with_many);
    }
    __syncthreads();
    i32 place[2] = {0, 0}, total[2] = {0, 0};
#pragma unroll
    for (i32 kind = 0; kind < 2; ++kind) {
        for (i32 i = 0; i < kWarps; ++i) {
            if (i < warp) place[kind] += s.warp_counts[kind][i];
            total[kind] += s.warp_counts[kind][i];
        }
    }
    const u32 lanes_before = (1u << lane) - 1;
    if (few) s.splits[place[0] + __popc(with_few & lanes_before)] = split;
    if (many) s.splits[total[0] + place[1] + __popc(with_many & lanes_before)] = split;
    __syncthreads();
    return SplitCounts{total[0], total[0] + total[1]};
}

// ---- Merging ---------------------------------------------------------------------------------------------------
MLA_DEVICE const float* partial_row(const DenseDecodeParams& p, i32 slot, i32 row) {
    return p.partial_out + ((i64)slot * p.s_q * p.h_q + row) * kHeadDimV;
}

MLA_DEVICE float partial_lse(const DenseDecodeParams& p, i32 slot, i32 row) {
    return p.partial_lse[(i64)slot * p.s_q * p.h_q + row];
}

MLA_DEVICE float partial_max(const DenseDecodeParams& p, i32 slot, i32 row) {
    return p.partial_max[(i64)slot * p.s_q * p.h_q + row];
}

// exp2(lse - max), where no piece (both -Inf) weighs nothing. A NaN stays one.
MLA_DEVICE float weight(float lse, float max_lse) { return lse == negative_infinity() ? 0.f : exp2f(lse - max_lse); }

MLA_DEVICE void add_weighted(float4& sum, const float4& x, float weight) {
    sum.x += weight * x.x;
    sum.y += weight * x.y;
    sum.z += weight * x.z;
    sum.w += weight * x.w;
}

// `row` counts the slot's rows: kv_head * rows + row of that head.
MLA_DEVICE void store_columns(const DenseDecodeParams& p, i32 request, i32 row, i32 column, const float4& x) {
    const i32 rows = query_rows(p);
    const i64 at = out_offset(p, request, row / rows, row % rows) + column;
    if (p.out_is_fp32) {
        *reinterpret_cast<float4*>(static_cast<float*>(p.out) + at) = x;
    } else {
        u16 values[4] = {Element::from_float(x.x), Element::from_float(x.y), Element::from_float(x.z),
                         Element::from_float(x.w)};
        *reinterpret_cast<ushort4*>(static_cast<u16*>(p.out) + at) =
            make_ushort4(values[0], values[1], values[2], values[3]);
    }
}

MLA_DEVICE void store_lse(const DenseDecodeParams& p, i32 request, i32 row, float max_lse, float sum) {
    const i32 rows = query_rows(p);
    const float lse2 = sum == 0.f ? negative_infinity() : max_lse + log2f(sum);
    p.lse[lse_offset(p, request, row / rows, row % rows)] = final_lse(p, lse2);
}

// By a warp: the largest score of all pieces.
MLA_DEVICE void merge_max(const DenseDecodeParams& p, const SplitRequest& split, i32 row, float sum) {
    if (p.max_logits == nullptr) return;
    const i32 lane = threadIdx.x % kWarpThreads, rows = query_rows(p);
    float top = negative_infinity();
    for (i32 j = lane; j < split.pieces; j += kWarpThreads) top = fmaxf(top, partial_max(p, split.slot(p, j), row));
    top = with_nan_of(sum, warp_max(top)) * kLn2;
    if (lane == 0) p.max_logits[max_offset(p, split.request, row / rows, row % rows)] = top;
}

// A few pieces, by one warp: all 512 columns of a row.
MLA_DEVICE void merge_row_by_warp(const DenseDecodeParams& p, const SplitRequest& split, i32 row) {
    const i32 lane = threadIdx.x % kWarpThreads;
    const bool mine = lane < split.pieces;
    const float lse = mine ? partial_lse(p, split.slot(p, lane), row) : negative_infinity();
    const float max_lse = warp_max(lse);
    const float my_weight = weight(lse, max_lse);
    const float sum = warp_sum(my_weight);
    const float factor = final_factor(p, row / query_rows(p), row % query_rows(p), max_lse, sum);
    float4 columns[kColumnBlocks];
#pragma unroll
    for (i32 c = 0; c < kColumnBlocks; ++c) columns[c] = make_float4(0.f, 0.f, 0.f, 0.f);
    for (i32 j = 0; j < split.pieces; ++j) {
        const float w = __shfl_sync(kFullWarp, my_weight, j) * factor;
        const float* piece = partial_row(p, split.slot(p, j), row) + 4 * lane;
        float4 loaded[kColumnBlocks];
#pragma unroll
        for (i32 c = 0; c < kColumnBlocks; ++c) loaded[c] = *reinterpret_cast<const float4*>(piece + c * kWarpColumns);
#pragma unroll
        for (i32 c = 0; c < kColumnBlocks; ++c) add_weighted(columns[c], loaded[c], w);
    }
#pragma unroll
    for (i32 c = 0; c < kColumnBlocks; ++c)
        store_columns(p, split.request, row, c * kWarpColumns + 4 * lane, columns[c]);
    if (lane == 0) store_lse(p, split.request, row, max_lse, sum);
    merge_max(p, split, row, sum);
}

// Many pieces, by a block: 128 columns of a row, each warp every eighth piece.
MLA_DEVICE void merge_columns_by_block(const DenseDecodeParams& p, Storage& s, const SplitRequest& split, i32 row,
                                       i32 column_block) {
    const i32 lane = threadIdx.x % kWarpThreads, warp = threadIdx.x / kWarpThreads;
    const bool mine = (i32)threadIdx.x < split.pieces;
    const float lse = mine ? partial_lse(p, split.slot(p, threadIdx.x), row) : negative_infinity();
    __syncthreads();  // the last row's use of the storage is over
    const float warp_lse = warp_max(lse);
    if (lane == 0) s.warp_values[warp] = warp_lse;
    __syncthreads();
    float max_lse = negative_infinity();
#pragma unroll
    for (i32 i = 0; i < kWarps; ++i) max_lse = fmaxf(max_lse, s.warp_values[i]);
    if (mine) s.weights[threadIdx.x] = weight(lse, max_lse);
    __syncthreads();

    const float* columns = partial_row(p, 0, row) + column_block * kWarpColumns + 4 * lane;
    const i64 slot_floats = (i64)p.s_q * p.h_q * kHeadDimV;
    float4 part = make_float4(0.f, 0.f, 0.f, 0.f);
    float weight_sum = 0.f;
    for (i32 first = warp; first < split.pieces; first += kWarps * kLoadsInFlight) {
        float4 loaded[kLoadsInFlight];
#pragma unroll
        for (i32 i = 0; i < kLoadsInFlight; ++i) {
            const i32 j = min(first + i * kWarps, split.pieces - 1);
            loaded[i] = *reinterpret_cast<const float4*>(columns + split.slot(p, j) * slot_floats);
        }
#pragma unroll
        for (i32 i = 0; i < kLoadsInFlight; ++i) {
            const i32 j = first + i * kWarps;
            if (j >= split.pieces) break;
            add_weighted(part, loaded[i], s.weights[j]);
            weight_sum += s.weights[j];
        }
    }
    s.sums[warp][lane] = part;
    if (lane == 0) s.warp_values[warp] = weight_sum;
    __syncthreads();
    if (warp != 0) return;
    float4 whole = make_float4(0.f, 0.f, 0.f, 0.f);
    float sum = 0.f;
#pragma unroll
    for (i32 i = 0; i < kWarps; ++i) {
        add_weighted(whole, s.sums[i][lane], 1.f);
        sum += s.warp_values[i];
    }
    const float factor = final_factor(p, row / query_rows(p), row % query_rows(p), max_lse, sum);
    store_columns(p, split.request, row, column_block * kWarpColumns + 4 * lane,
                  make_float4(whole.x * factor, whole.y * factor, whole.z * factor, whole.w * factor));
    if (column_block != 0) return;
    if (lane == 0) store_lse(p, split.request, row, max_lse, sum);
    merge_max(p, split, row, sum);
}

// Three blocks an SM: left to itself, the compiler aims at four and spills on some targets.
extern "C" __global__ void __launch_bounds__(kThreads, 3)
    mla_split_combine(const __grid_constant__ DenseDecodeParams p) {
    __shared__ Storage s;
    griddepcontrol_wait();
    const SplitCounts splits = list_splits(p, s);
    const i32 rows = p.s_q * p.h_q;
    const i32 warp = blockIdx.x * kWarps + threadIdx.x / kWarpThreads;
    for (i32 unit = warp; unit < splits.few * rows; unit += gridDim.x * kWarps) {
        merge_row_by_warp(p, s.splits[unit / rows], unit % rows);
    }
    const i32 units = rows * kColumnBlocks;
    for (i32 unit = blockIdx.x; unit < (splits.all - splits.few) * units; unit += gridDim.x) {
        const i32 within = unit % units;
        merge_columns_by_block(p, s, s.splits[splits.few + unit / units], within / kColumnBlocks,
                               within % kColumnBlocks);
    }
}
