// Sparse MLA prefill on Hopper for 65 to 128 heads: two blocks share the gather of a query's rows.
//
//   S = Q K^T * scale            (64 heads x d_qk) (d_qk x 64 rows) per tile of 64 listed rows
//   P = exp2(S log2(e) - m)      m: running row maximum
//   l = sum of P,  O = P V       V is K's first 512 columns
//   out = O / (l + exp2(sink - m)),   lse = ln 2 (m + log2 l),   max_logits = max of S
//
// Grid: x = the two blocks of 64 heads, which are the cluster; y = parts of the schedule. Both walk the queries of the
// same part (attention/split_work.cuh), tile by tile, and compute what those of sparse_forward.cu do, on the same tiles
// (attention/decode_seesaw_sm90.cuh). But each fetches half of a tile's rows only, and sends them to the other one, so
// that a row leaves the L2 once for all heads.
//
//   left    | softmax 0 | O_L += P0 V0_L |          | O_L += P1 V1_L | S0 = Q K0'            | softmax 0'
//   right   |   S1      |  softmax 1     | O_R += P0 V0_R | O_R += P1 V1_R | S1 = Q K1'      | ...
//   gather  |           |       K0'_left ->  K1'_left, K0'_right ->  K1'_right ->   ... rows 32 rank .. 32 rank + 31
//   send    |           |          K0'_left ->  K1'_left, K0'_right ->  K1'_right ->   ... the same, to the other block
//
// Source: that two blocks exchange halves of a tile is FlashMLA's idea for its fp8 decode (2025), whose threads store
// to both. What differs: 16-bit rows come by cp.async into the own block, and go on from there as bulk copies.
#include "attention/sparse_forward_variant.cuh"
constexpr bool kSparse = true;
constexpr bool kPair = true;
#include "attention/decode_seesaw_sm90.cuh"
#include "attention/gather_query_sm90.cuh"
#include "attention/gather_role_sm90.cuh"
#include "tile/warp.cuh"

// ---- Budget ----------------------------------------------------------------------------------------------------
// role          warps    regs   does
// left          0..3     224    even tiles: S0, softmax
// right         4..7     224    odd tiles:  S1, softmax
// gather        8..9     56     this block's share of each tile's rows
// send          10       56     the same share, to the other block
// query         11       56     Q of each query
constexpr i32 kRegsMath = 224;
constexpr i32 kRegsGather = 56;
constexpr i32 kShareThreads = kGatherThreads / kClusterBlocks;
constexpr u32 kSharePanelBytes = kPanelBytes / kClusterBlocks;
static_assert(2 * kRegsMath + kRegsGather <= 3 * kRegsEntry, "what the block has at entry");
static_assert(kTileTokens == kRowsPerTile && kBlockM == kPanelRows, "a tile is 64 rows, of kv and of Q");
static_assert(kSharePanelBytes % kSwizzleAtomBytes == 0, "a share is a piece of a panel");
static_assert(kPanelsLeft <= kWarpThreads, "a lane sends a panel");

// ---- Storage ---------------------------------------------------------------------------------------------------
// That of decode's block, with these barriers. "There": of the other block.
//
// barrier                arrives (count)                carries         waits        first phase
// kv_full[s].left        gather (64 copies + 1)         kLeftBytes / 2  left, right  blocked
// kv_full[s].right       gather (64 copies + 1)         kRightBytes / 2 left, right  blocked
// kv_gathered[s].left    gather (64 copies + 1)         -               send         blocked
// kv_gathered[s].right   gather (64 copies + 1)         -               send         blocked
// kv_empty[s].left       left warps here and there (8)  -               gather       free
// kv_empty[s].right      right warps here and there (8) -               gather       free
// q_full                 query (32 copies + 1)          -               left, right  blocked
// q_empty                math warps (8)                 -               query        free
// sums_ready[side]       its threads (128)              -               the other side blocked
//
// kv_empty says that the place is free in both blocks. It also says that what was sent from it has been read: the other
// block has multiplied it. Send needs no "empty" of its own: what has been gathered may be sent. And kv_gathered cannot
// run ahead of send: the stage is gathered again only after both blocks have had the whole tile.
constexpr u32 kShareArrivals = kShareThreads + 1;
constexpr u32 kQueryArrivals = kWarpThreads + 1;
MLA_FACT(cluster, kClusterBlocks);

MLA_DEVICE void init_pair_storage(Storage& s) {
    for (HalfBarriers& gathered : s.kv_gathered) {
        mbarrier_init(gathered.left, kShareArrivals);
        mbarrier_init(gathered.right, kShareArrivals);
    }
    init_storage(s, kShareArrivals, kQueryArrivals);
}

template <bool kRight>
MLA_DEVICE MBarrier& half(HalfBarriers& barriers) {
    return kRight ? barriers.right : barriers.left;
}

// ---- Gather role -----------------------------------------------------------------------------------------------
// The gather threads of both blocks are one warpgroup, as it were: `place` is a thread's number in it, and each fetches
// the rows that it would fetch there.
template <bool kRight>
MLA_DEVICE void gather_share(Storage& s, const RowSources& rows, i32 stage, u32 empty_parity, i32 place) {
    MBarrier &full = half<kRight>(s.kv_full[stage]), &gathered = half<kRight>(s.kv_gathered[stage]);
    mbarrier_wait(half<kRight>(s.kv_empty[stage]), empty_parity);
    gather_half<kRight>(smem_addr(s.kv[stage]), rows, place);
    cp_async_mbarrier_arrive_noinc(gathered);
    cp_async_mbarrier_arrive_noinc(full);
    if (place % kShareThreads == 0) {
        mbarrier_arrive(gathered);
        mbarrier_arrive_expect_tx(full, (kRight ? kRightBytes : kLeftBytes) / kClusterBlocks);
    }
}

MLA_DEVICE void run_share_role(const Block& block, i32 thread) {
    const DenseDecodeParams& p = block.p;
    i32 place = cluster_rank() * kShareThreads + thread;
    Ring<kStagesKV> ring;
    Fragment fragment;
    for (FragmentWalk walk(p, block.part); walk.next(p, fragment);) {
        if (fragment.tile_begin >= fragment.tile_end) continue;
        const i32* list = p.block_table + fragment.request * p.table_stride_b_elems;
        RowNumbers next = read_row_numbers(list + fragment.tile_begin * kTileTokens, place);
        for (i32 tile = fragment.tile_begin; tile < fragment.tile_end; ++tile) {
            opaque(place);  // what follows from it is not worth registers through the loop
            const RowSources rows = rows_by_number(p.kv, p.kv_stride_page_elems, p.num_pages, next, place);
            if (tile + 1 < fragment.tile_end) next = read_row_numbers(list + (tile + 1) * kTileTokens, place);
            const i32 stage = stage_of(fragment, tile);
            gather_share<false>(block.s, rows, stage, ring.empty_parity(stage), place);
            gather_share<true>(block.s, rows, stage, ring.empty_parity(stage), place);
            ring.advance(stage);
        }
    }
}

// ---- Send role -------------------------------------------------------------------------------------------------
// A lane sends a panel's rows. They were written by ordinary copies, hence the fence.
template <bool kRight>
MLA_DEVICE void send_share(Storage& s, i32 stage, u32 full_parity, i32 lane) {
    constexpr i32 kFirst = kRight ? kPanelsLeft : 0, kPanels = kRight ? kPanelsQk - kPanelsLeft : kPanelsLeft;
    mbarrier_wait(half<kRight>(s.kv_gathered[stage]), full_parity);
    fence_proxy_async();
    if (lane < kPanels) {
        const u32 share = panel_in_order(kFirst + lane) * kPanelBytes + cluster_rank() * kSharePanelBytes;
        const SmemAddr from = smem_addr(s.kv[stage]) + share;
        cp_async_bulk_to_cluster(there(from), from, kSharePanelBytes, there(&half<kRight>(s.kv_full[stage])));
    }
    __syncwarp();
}

MLA_DEVICE void run_send_role(const Block& block, i32 lane) {
    Ring<kStagesKV> ring;
    Fragment fragment;
    for (FragmentWalk walk(block.p, block.part); walk.next(block.p, fragment);) {
        for (i32 tile = fragment.tile_begin; tile < fragment.tile_end; ++tile) {
            const i32 stage = stage_of(fragment, tile);
            send_share<false>(block.s, stage, ring.full_parity(stage), lane);
            send_share<true>(block.s, stage, ring.full_parity(stage), lane);
            ring.advance(stage);
        }
    }
}

// ---- Query role ------------------------------------------------------------------------------------------------
// One warp does in turn what the warps of a warpgroup would do.
MLA_DEVICE void run_query_role(const Block& block, i32 lane) {
    const QueryGather query{block};
    bool others_at_work = false;
    Ring<1> ring;
    Fragment fragment;
    for (FragmentWalk walk(block.p, block.part); walk.next(block.p, fragment);) {
        if (fragment.tile_begin >= fragment.tile_end) continue;
        if (others_at_work) {  // on the query before: meanwhile the rows come into L2
#pragma unroll 1
            for (i32 t = lane; t < kGatherThreads; t += kWarpThreads) query.prefetch(fragment.request, t);
        }
        mbarrier_wait(block.s.q_empty, ring.empty_parity(0));
#pragma unroll 1
        for (i32 t = lane; t < kGatherThreads; t += kWarpThreads) query.gather(fragment.request, t);
        arrive_when_gathered(block.s.q_full, lane);
        ring.advance(0);
        others_at_work = true;
    }
}

// ---- Kernel ----------------------------------------------------------------------------------------------------
extern "C" __global__ void __launch_bounds__(kThreads, 1)
    mla_sparse_forward_pair_sm90(const __grid_constant__ DenseDecodeParams p) {
    extern __shared__ __align__(kSwizzleAtomBytes) u8 smem[];
    Storage& s = *reinterpret_cast<Storage*>(smem);
    Block block(p, s);
    if (threadIdx.x == 0) init_pair_storage(s);
    __syncthreads();
    cluster_sync();
    griddepcontrol_wait();  // before the first read of anything that an earlier kernel may have written

    const i32 warp = uniform_warp();
    const i32 thread = threadIdx.x % kWarpgroupThreads, lane = threadIdx.x % kWarpThreads;
    if (warp < 4) {
        setmaxnreg_inc<kRegsMath>();
        run_left_role(block, thread);
    } else if (warp < 8) {
        setmaxnreg_inc<kRegsMath>();
        run_right_role(block, thread);
    } else {
        setmaxnreg_dec<kRegsGather>();
        if (warp < 10) {
            run_share_role(block, thread);
        } else if (warp == 10) {
            run_send_role(block, lane);
        } else {
            run_query_role(block, lane);
        }
    }
    griddepcontrol_launch_dependents();
    cluster_sync();  // the other block may still release a stage of this one
}
