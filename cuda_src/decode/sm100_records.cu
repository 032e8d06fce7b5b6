// Dense MLA decode straight from FP8 records on Blackwell: warps that dequantise feed tcgen05 with swapped operands.
//
//   S^T = K Q^T * scale           (64 x d_qk) (d_qk x rows) per tile of 64 tokens
//   P^T = exp2(S^T log2(e) - m)   m: running maximum of each row
//   l = sum of P,  O^T = V^T P^T  (512 x 64) (64 x rows), in tensor memory; V is K's first 512 columns
//   out = O / l,   lse = ln 2 (m + log2 l)
//
// Grid: x = blocks of 32 or 64 query rows of all s_q tokens, y = splits. One block per SM iterates over the work items
// of its split (attention/split_work.cuh). The kernel is sparse decode's (sparse_decode/sm100.cu) with tokens from a
// block table; that page has the schedule. The roles are in attention/sm100/records.cuh.
//
// Source: as sparse_decode/sm100.cu.
#include "attention/sm100/records.cuh"
#include "decode/swapped_tile.cuh"

namespace mla::decode::sm100 {
using namespace attention::sm100;

// ---- Variant ---------------------------------------------------------------------------------------------------
struct C : RecordConfig<MLA_DTYPE, MLA_RECORD, PagedTokens, MLA_BLOCK_ROWS> {
    using Work = ScheduledWork;
};

MLA_DECODE_FACTS();
MLA_RECORDS_SM100_FACTS(C);

// ---- Masks -----------------------------------------------------------------------------------------------------
// Makes V finite where not every row of the block sees the token: the proxy fence after P covers these writes, too. A
// row that does see NaN in a latent has a score of NaN, and so is NaN as a whole: nothing needs to be restored.
MLA_DEVICE void sanitize_values(u8* keys, const WorkItem& item, i32 tile, i32 thread) {
    const i32 first = tile * kTileTokens;
    if (item.seen_by_all >= min(first + kTileTokens, item.tokens)) return;  // absent rows are zeros
    i32 found;
    sanitize_rows<C::Latent, attention::sm100::kSwTilesV>(keys, max(item.seen_by_all - first, 0), item.tokens - first,
                                                          found, item.request, thread);
}

// ---- Kernel ----------------------------------------------------------------------------------------------------
extern "C" __global__ void __launch_bounds__(kRecordThreads, 1)
    mla_decode_sm100_records(const __grid_constant__ DecodeParams p) {
    extern __shared__ __align__(kSwizzleAtomBytes) u8 smem[];
    auto& s = *reinterpret_cast<RecordStorage<C>*>(smem);
    run_records(p, s, [&](const auto& block, auto& scores, i32 stage, const WorkItem& item, i32 tile, i32 thread) {
        mask_tile<C>(block, scores, s.present[stage], item, tile, thread);
        sanitize_values(s.kv[stage], item, tile, thread);
    });
}
}  // namespace mla::decode::sm100
