// Brings the device's block table up to date with the host's, gathers the rows of a step in the caller's order, and
// computes the positions and slots of the step's tokens.
//
//   table[row] gets its changes, seqlens[row] its length;   step_table[i] = table[row], step_seqlens[i] = its length
//   for row i's new tokens, its last ones:   position;   slot = page * page_size + position % page_size
//
// Everything that changes in a step arrives in one upload of 32-bit words:
//
//   header: rows of the step, all rows | row[max_rows] | length[max_rows] | first change[max_rows + 1]
//   | first token[max_rows + 1] | (column, page)...
//
// Grid: x = rows of the upload. The step's rows come first; the others only change.
#include "common/facts.cuh"
#include "common/types.cuh"
#include "ptx/control.cuh"

namespace mla::cache {
constexpr i32 kThreads = 128;
constexpr i32 kHeaderWords = 8;

// ---- Params ----------------------------------------------------------------------------------------------------
struct CacheUpdateParams {
    const i32* packed;
    i32* table;         // (max_rows, max_pages)
    i32* seqlens;       // (max_rows,)
    i32* step_table;    // (max_rows, max_pages)
    i32* step_seqlens;  // (max_rows,)
    i32* slots;         // (max_tokens,)
    i32* positions;     // (max_tokens,)
    i64 table_stride_elems, step_table_stride_elems;
    i32 max_rows, max_pages, page_size, changes_at, max_changes, max_tokens;
};

MLA_FACT_LIST(params_layout, MLA_OFFSET(CacheUpdateParams, table_stride_elems), MLA_OFFSET(CacheUpdateParams, max_rows),
              (int)sizeof(CacheUpdateParams));
MLA_FACT(threads, kThreads);
MLA_FACT(header_words, kHeaderWords);

// ---- Parts -----------------------------------------------------------------------------------------------------
// Writes tokens `first` to `end` of the step, the last ones of a sequence with table row `row`.
MLA_DEVICE void write_tokens(const CacheUpdateParams& p, const i32* row, i32 length, i32 first, i32 end) {
    const i32 last = min(end, p.max_tokens);
    for (i32 token = max(0, first) + (i32)threadIdx.x; token < last; token += kThreads) {
        const i64 position = (i64)length - end + token, column = position / p.page_size;
        const bool exists = position >= 0 && column < p.max_pages;
        p.slots[token] = exists ? (i32)(row[column] * (i64)p.page_size + position % p.page_size) : -1;
        p.positions[token] = exists ? (i32)position : -1;
    }
}

// ---- Kernel ----------------------------------------------------------------------------------------------------
extern "C" __global__ void __launch_bounds__(kThreads) mla_cache_update(const __grid_constant__ CacheUpdateParams p) {
    griddepcontrol_wait();
    const i32 i = blockIdx.x;
    const i32 in_step = min(p.packed[0], p.max_rows), all = min(p.packed[1], p.max_rows);
    if (i >= all) return;
    const i32* rows = p.packed + kHeaderWords;
    const i32 row = rows[i], length = rows[p.max_rows + i];
    if ((u32)row >= (u32)p.max_rows) return;
    const i32* first = rows + 2 * p.max_rows;
    const i32 begin = max(0, first[i]), end = min(first[i + 1], p.max_changes);
    const i32 *tokens = first + p.max_rows + 1, *changes = p.packed + p.changes_at;
    i32* table = p.table + row * p.table_stride_elems;
    i32* step = p.step_table + i * p.step_table_stride_elems;

    if (i < in_step) {
        const i64 columns = min((i64)p.max_pages, ((i64)max(0, length) + p.page_size - 1) / p.page_size);
        for (i32 column = threadIdx.x; column < columns; column += kThreads) step[column] = table[column];
    }
    __syncthreads();
    for (i32 change = begin + threadIdx.x; change < end; change += kThreads) {
        const i32 column = changes[2 * change], page = changes[2 * change + 1];
        if ((u32)column >= (u32)p.max_pages) continue;
        table[column] = page;
        if (i < in_step) step[column] = page;
    }
    if (threadIdx.x == 0) {
        p.seqlens[row] = length;
        if (i < in_step) p.step_seqlens[i] = length;
    }
    if (i >= in_step) return;
    __syncthreads();
    write_tokens(p, step, length, tokens[i], tokens[i + 1]);
}
}  // namespace mla::cache
