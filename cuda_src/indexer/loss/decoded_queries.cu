// A copy of a chunk's index queries for the gradients on tensor cores, in bf16, of e4m3 codes: as numbers, without
// scales. All are exact.
//
// Grid: a thread for every 16 codes, 256 threads per block; blocks take turns. Rows start at multiples of 16 bytes.
#include "indexer/loss/params.cuh"
#include "ptx/control.cuh"

namespace mla::indexer::loss {
// ---- Budget ----------------------------------------------------------------------------------------------------
constexpr i32 kThreads = 256, kChunk = 16;

MLA_LOSS_FACTS();
MLA_FACT(threads, kThreads);
MLA_FACT(block_elems, kThreads* kChunk);

// Two codes as two bf16 numbers: bf16 is the upper half of a float, and the lower half is zero here.
MLA_DEVICE u32 decode_pair(u32 codes) {
    const u32 low = __float_as_uint(float8_e4m3fn::to_float(codes & 0xff));
    return low >> 16 | (__float_as_uint(float8_e4m3fn::to_float(codes >> 8 & 0xff)) & 0xffff0000u);
}

MLA_DEVICE uint4 decode_half(u32 low, u32 high) {
    return make_uint4(decode_pair(low), decode_pair(low >> 16), decode_pair(high), decode_pair(high >> 16));
}

extern "C" __global__ void __launch_bounds__(kThreads)
    mla_indexer_loss_decoded_queries(const __grid_constant__ LossParams p) {
    griddepcontrol_wait();
    const i32 chunks = p.index_dim / kChunk;
    const i64 count = (i64)p.num_tokens * p.index_heads * chunks;
    for (i64 i = (i64)blockIdx.x * kThreads + threadIdx.x; i < count; i += (i64)gridDim.x * kThreads) {
        const i64 row = i / chunks;
        const i64 at = index_query_at(p, p.first_token + (i32)(row / p.index_heads), (i32)(row % p.index_heads));
        const u8* codes = static_cast<const u8*>(p.index_q) + at + i % chunks * kChunk;
        const uint4 x = *reinterpret_cast<const uint4*>(codes);
        uint4* to = reinterpret_cast<uint4*>(p.decoded_queries + i * kChunk);
        to[0] = decode_half(x.x, x.y);
        to[1] = decode_half(x.z, x.w);
    }
    griddepcontrol_launch_dependents();
}
}  // namespace mla::indexer::loss
