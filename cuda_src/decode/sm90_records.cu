// Dense MLA decode straight from FP8 records on Hopper.
//
//   S^T = K Q^T * scale           (64 x 576) (576 x rows) per tile of 64 tokens
//   P^T = exp2(S^T log2(e) - m)   m: running maximum of each row
//   l = sum of P,  O^T = V^T P^T  (512 x 64) (64 x rows); V is K's first 512 columns
//   out = O / l,   lse = ln 2 (m + log2 l)
//
// Grid: x = blocks of query rows, y = splits. One block per SM iterates over the work items of its split
// (attention/split_work.cuh). The kernel is sparse decode's for few heads, with tokens from a block table and rows of
// all s_q tokens. The roles are in attention/sm90/small_records.cuh.
//
// Variants: a mask over drafts, optional inputs (attention/query_groups.cuh). With optional inputs a split holds groups
// of queries instead of requests, masks begin where the windows of rows do, and query rows are in two arrays.
//
// Source: as sparse_decode/sm90_small.cu.
#include "attention/sm90/small_records.cuh"

// A mask says which drafts a query sees, if a variant says so.
#ifndef MLA_TREE_MASK
#define MLA_TREE_MASK 0
#endif

namespace mla::decode {
using namespace attention;
using namespace attention::sm90;

// ---- Variant ---------------------------------------------------------------------------------------------------
#ifdef MLA_FORMS
using Params = DecodeFormParams;
using Tokens = GroupedTokens;
MLA_DECODE_FORM_FACTS();
#else
using Params = DecodeParams;
using Tokens = PagedTokens;
MLA_DECODE_FACTS();
#endif

using Small = SmallRecords<MLA_DTYPE, MLA_RECORD, Tokens, MLA_BLOCK_ROWS, MLA_TREE_MASK>;
MLA_SMALL_RECORDS_FACTS(Small);

// ---- Kernel ----------------------------------------------------------------------------------------------------
extern "C" __global__ void __launch_bounds__(Small::kThreads, 1)
    mla_decode_sm90_records(const __grid_constant__ Params p) {
    extern __shared__ __align__(kSwizzleAtomBytes) u8 smem[];
    run_small_records<Small>(p, smem);
}
}  // namespace mla::decode
