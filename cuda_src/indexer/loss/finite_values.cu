// A copy of the attention's values for the tensor cores, with zeros for non-finite elements; and the tiles of keys with
// such elements.
//
// A key that a token does not see is multiplied by a probability of 0 all the same, and 0 * NaN is NaN. The tokens that
// do see it get the non-finite elements afterwards.
//
// Grid: one block per tile of keys.
#include "indexer/loss/params.cuh"
#include "ptx/control.cuh"
#include "tile/elements.cuh"

namespace mla::indexer::loss {
// ---- Budget ----------------------------------------------------------------------------------------------------
constexpr i32 kThreads = 256;
constexpr i32 kTileKeys = 128;

MLA_LOSS_FACTS();
MLA_FACT(threads, kThreads);
MLA_FACT(block_keys, kTileKeys);

// Element by element, for any address and width. Returns whether anything was not finite.
MLA_DEVICE bool copy_elements(const LossParams& p, i32 first_key, i32 keys) {
    bool found = false;
    for (i32 i = threadIdx.x; i < keys * p.value_dim; i += kThreads) {
        const i64 key = first_key + i / p.value_dim;
        const u16 x = p.v[key * p.v_stride_token_elems + i % p.value_dim];
        const bool finite = (x & bfloat16::kExponentMask) != bfloat16::kExponentMask;
        p.finite_values[key * finite_value_stride(p) + i % p.value_dim] = finite ? x : (u16)0;
        found |= !finite;
    }
    return found;
}

// Copies 16 bytes at a time.
MLA_DEVICE bool copy_chunks(const LossParams& p, i32 first_key, i32 keys) {
    const i32 chunks = p.value_dim / kChunkElems;
    bool found = false;
    for (i32 i = threadIdx.x; i < keys * chunks; i += kThreads) {
        const i64 key = first_key + i / chunks;
        const i32 column = i % chunks * kChunkElems;
        uint4 chunk = *reinterpret_cast<const uint4*>(p.v + key * p.v_stride_token_elems + column);
        found |= zero_nonfinite<bfloat16>(chunk);
        *reinterpret_cast<uint4*>(p.finite_values + key * p.value_dim + column) = chunk;
    }
    return found;
}

extern "C" __global__ void __launch_bounds__(kThreads)
    mla_indexer_loss_finite_values(const __grid_constant__ LossParams p) {
    griddepcontrol_wait();
    const i32 first = blockIdx.x * kTileKeys, keys = min(kTileKeys, p.s_kv - first);
    const bool aligned = (reinterpret_cast<u64>(p.v) | (u64)p.v_stride_token_elems * sizeof(u16)) % 16 == 0;
    const bool in_chunks = aligned && p.value_dim % kChunkElems == 0;
    const bool found = __syncthreads_or(in_chunks ? copy_chunks(p, first, keys) : copy_elements(p, first, keys));
    if (threadIdx.x == 0) p.nonfinite_tiles[blockIdx.x] = found;
    griddepcontrol_launch_dependents();
}
}  // namespace mla::indexer::loss
