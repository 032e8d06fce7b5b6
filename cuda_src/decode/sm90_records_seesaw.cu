// Dense MLA decode straight from FP8 records on Hopper, 64 query rows per block.
//
//   S = Q K^T * scale            (64 x d_qk) (d_qk x 64) per tile of 64 tokens
//   P = exp2(S log2(e) - m)      m: running row maximum
//   l = sum of P,  O = P V       V is K's first 512 columns
//   out = O / l,   lse = ln 2 (m + log2 l)
//
// Grid: x = blocks of 64 query rows of one token, y = splits. One block per SM iterates over the work items of its
// split (attention/split_work.cuh). No cluster: each block dequantises for itself. The kernel is sparse decode's for
// many heads, with tokens from a block table; tokens hidden from the block's query are not read. The roles are in
// attention/sm90/seesaw_records.cuh.
//
// Variants: optional inputs (attention/sm90/seesaw_records_forms.cuh).
//
// Source: as sparse_decode/sm90.cu.
#include "attention/sm90/seesaw_records.cuh"

#ifdef MLA_FORMS
#include "attention/sm90/seesaw_records_forms.cuh"
#endif

namespace mla::decode {
using namespace attention;
using namespace attention::sm90;

// ---- Variant ---------------------------------------------------------------------------------------------------
#ifdef MLA_FORMS
using Params = DecodeFormParams;
using Tokens = ShiftedTokens;
MLA_DECODE_FORM_FACTS();
#else
using Params = DecodeParams;
using Tokens = PagedTokens;
MLA_DECODE_FACTS();
#endif

using Records = SeesawRecords<MLA_DTYPE, MLA_RECORD, Tokens>;
MLA_SEESAW_RECORDS_FACTS(Records);

// ---- Kernel ----------------------------------------------------------------------------------------------------
extern "C" __global__ void __launch_bounds__(kSeesawThreads, 1)
    mla_decode_sm90_records_seesaw(const __grid_constant__ Params p) {
    extern __shared__ __align__(kSwizzleAtomBytes) u8 smem[];
    run_seesaw_records<Records>(p, smem);
}
}  // namespace mla::decode
