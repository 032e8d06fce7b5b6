// Shared by the Hopper kernels of the gradients by index keys: a block has a tile of keys and a split of the tokens
// from the first to the last that sees one of them.
#pragma once
#include "indexer/loss/params.cuh"

namespace mla::indexer::loss {
struct TokenRange {
    i32 begin, end;
};

template <i32 kTileKeys>
MLA_DEVICE bool is_seen(const LossParams& p, i32 token, i32 first_key) {
    const KeyRange range = p.ranges[token];
    return range.begin < first_key + kTileKeys && first_key < range.end;
}

// The chunk's tokens from the first to the last that sees a key of the tile. Called by all threads: ranges may be in
// any order.
template <i32 kTileKeys, i32 kWarps>
MLA_DEVICE TokenRange tokens_that_see(const LossParams& p, i32 first_key, TokenRange (&seen_by)[kWarps]) {
    TokenRange tokens{p.first_token + p.num_tokens, p.first_token};
#pragma unroll 8
    for (i32 i = threadIdx.x; i < p.num_tokens; i += kWarps * kWarpThreads) {
        const i32 token = p.first_token + i;
        if (!is_seen<kTileKeys>(p, token, first_key)) continue;
        tokens.begin = min(tokens.begin, token);
        tokens.end = max(tokens.end, token + 1);
    }
    tokens.begin = __reduce_min_sync(kFullWarp, tokens.begin);
    tokens.end = __reduce_max_sync(kFullWarp, tokens.end);
    if (threadIdx.x % kWarpThreads == 0) seen_by[threadIdx.x / kWarpThreads] = tokens;
    __syncthreads();
    for (const TokenRange& of_warp : seen_by) {
        tokens.begin = min(tokens.begin, of_warp.begin);
        tokens.end = max(tokens.end, of_warp.end);
    }
    return tokens;
}
}  // namespace mla::indexer::loss
