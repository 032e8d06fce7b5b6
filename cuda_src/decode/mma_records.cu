// Dense MLA decode straight from FP8 records with mma.sync, for every GPU since Ampere: blocks of up to 32 query rows.
//
//   S = Q K^T * scale             (rows x d_qk) (d_qk x 32) per step of 32 tokens
//   P = exp2(S log2(e) - m)       m: running maximum of each row
//   l = sum of P,  O = P V        (rows x 32) (32 x 512); V is K's first 512 columns
//   out = O / l,   lse = ln 2 (m + log2 l)
//
// Grid: x = blocks of query rows, y = splits (attention/split_work.cuh). One block per SM iterates over the work items
// of its split. What a step goes through is in attention/mma/records.cuh.
#include "attention/mma/codes.cuh"

namespace mla::decode {
using namespace attention;

// ---- Variant ---------------------------------------------------------------------------------------------------
using Records = mma::MmaRecords<MLA_DTYPE, MLA_RECORD, PagedTokens, MLA_BLOCK_ROWS, MLA_SMEM_KB * 1024>;

MLA_DECODE_FACTS();
MLA_MMA_RECORDS_FACTS(Records);

// ---- Kernel ----------------------------------------------------------------------------------------------------
extern "C" __global__ void __launch_bounds__(mma::kThreads, 1)
    mla_decode_mma_records(const __grid_constant__ DecodeParams p) {
    extern __shared__ __align__(mma::kSegmentBytes) u8 smem[];
    mma::run_records<Records>(p, smem);
}
}  // namespace mla::decode
