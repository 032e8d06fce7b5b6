// Attention with swapped operands on Blackwell: S^T = K Q^T, O^T = V^T P^T, both sums in tensor memory.
//
// Keys are rows of the scores and dims rows of the result, so that few query rows that share keys (here called heads)
// are few columns, and every operand is read as it lies in memory: tiles of 64 keys in two stages of SW128 tiles, which
// other roles fill. This file holds the product and softmax roles, for kernels that differ in where keys come from. A
// kernel chooses with a type C:
//
//   kHeads                      heads of a block
//   kSwTilesQk, kLatentSwTiles  SW128 tiles of a key's columns, and of its latent columns alone
//   kGroupSwTiles, kGroups      SW128 tiles that arrive and leave together; number of such groups
//   kQSwTileBytes               bytes of an SW128 tile of Q
//   Element, Latent, Rope       formats of the result, of keys and P, of RoPE columns
//   kWithRowMax                 also return the largest score
//
// and its Storage has, under these names:
//
// barrier         arrives (count)              waits      first phase
// kv_full[s][g]   the kernel's                 mma        blocked, a phase per kStages tiles
// kv_empty[s][g]  products (1)                 kernel     free, the same
// q_empty         products (1), the kernel's   kernel     free, a phase per work item
// s_full[s]       products (1)                 softmax    blocked, a phase per kStages tiles
// p_full[s]       softmax (128)                mma        blocked, the same
// out_full[s]     products (1)                 softmax    blocked, the same
//
// Tiles are counted through all work items of a block; tile n is in stage n % 2. "products" is a commit: it arrives
// when everything issued before it is done. So s_full of a tile also means that the products with the P of two tiles
// before are done, and hence the last phase of out_full[s]: the softmax waits for it only where it touches O^T. p_full
// of a tile also means that its S^T has been read and, for the first tile of a work item, the last item's O^T.
#pragma once
#include "attention/head_results.cuh"
#include "ptx/control.cuh"
#include "tile/tmem_product.cuh"
#include "tile/warp.cuh"

namespace mla::attention::sm100 {
constexpr i32 kTileKeys = kTileTokens;
constexpr i32 kStages = 2;  // two fit: each of nine SW128 tiles
constexpr i32 kSwTilesV = kHeadDimV / kSw128Columns;
constexpr i32 kSwTilesStage = kSwTilesV + 1;
static_assert(kTileKeys == kSw128Rows, "an SW128 tile has the columns of all keys of a tile");
constexpr i32 kTileDims = 128;
constexpr i32 kDimTiles = kHeadDimV / kTileDims;

// ---- Tensor memory ---------------------------------------------------------------------------------------------
// sum         product   lanes                   columns, N = heads
// S^T even    M = 64    0..15 of every 32       0..N-1
// S^T odd     M = 64    16..31 of every 32      0..N-1
// O^T[t]      M = 128   all                     N (t + 1) ..
constexpr u32 kUpperLanes = 16;

struct Region {
    u32 halves;  // of every 32 lanes: 1 the lower 16, 2 the upper
    u32 begin, columns;
};

template <i32 kHeads>
struct Columns {
    static constexpr u32 kScores = 0, kOut = kHeads;
    static constexpr u32 kUsed = kOut + kDimTiles * kHeads;
    static constexpr u32 kAllocated = kUsed <= 128 ? 128 : kUsed <= 256 ? 256 : 512;
    static constexpr Region kRegions[] = {
        {1, kScores, kHeads},       {2, kScores, kHeads},           {3, kOut, kHeads},
        {3, kOut + kHeads, kHeads}, {3, kOut + 2 * kHeads, kHeads}, {3, kOut + 3 * kHeads, kHeads}};
    static_assert(sizeof(kRegions) / sizeof(Region) == 2 + kDimTiles, "every sum");

    static constexpr bool are_disjoint() {
        for (const Region& a : kRegions) {
            if (a.begin + a.columns > kAllocated) return false;
            for (const Region& b : kRegions) {
                const bool apart = a.begin + a.columns <= b.begin || b.begin + b.columns <= a.begin;
                if (&a != &b && (a.halves & b.halves) != 0 && !apart) return false;
            }
        }
        return true;
    }

    // Scores of the tiles of a stage, and dims [128 t, + 128) of the result.
    MLA_DEVICE static TmemAddr scores(TmemAddr tmem, i32 stage) {
        return tmem.lane(stage * kUpperLanes).column(kScores);
    }
    MLA_DEVICE static TmemAddr out(TmemAddr tmem, i32 t) { return tmem.column(kOut + t * kHeads); }
};
static_assert(Columns<16>::are_disjoint() && Columns<32>::are_disjoint() && Columns<64>::are_disjoint(),
              "tensor memory");

// ---- Work ------------------------------------------------------------------------------------------------------
enum NamedBarrier : i32 { SoftmaxOnly = 1 };  // within softmax: maxima, sums or factors are stored

// Calls act(item) for each work item of a split with a tile; `otherwise` for the others.
template <class Work, class Act, class Otherwise>
MLA_DEVICE void for_items(const DecodeParams& p, i32 split, Act act, Otherwise otherwise) {
    WorkItem item;
    for (WorkIteratorOf<Work> walk(p, split); walk.next(p, item);) {
        if (item.tile_begin < item.tile_end) {
            act(item);
        } else {
            otherwise(item);
        }
    }
}
template <class Work, class Act>
MLA_DEVICE void for_items(const DecodeParams& p, i32 split, Act act) {
    for_items<Work>(p, split, act, [](const WorkItem&) {});
}

// ---- Products --------------------------------------------------------------------------------------------------
// All in one thread: the scores of two tiles, then their values. A tile's softmax runs during the scores of the next
// tile or the values of the previous one; its columns are fetched anew as soon as their values are multiplied.
template <class C, class Storage>
struct Products {
    using Sums = Columns<C::kHeads>;

    Storage& s;
    TmemAddr tmem;

    template <class Format>
    using Scores = Product<Format, false, kTileKeys, C::kHeads, Major::K, Major::K>;

    // S^T, keys x heads: sums over columns.
    MLA_DEVICE void issue_scores(RingCount<kStages> ring) const {
        const i32 stage = ring.stage();
        const TmemAddr d = Sums::scores(tmem, stage);
        const auto ready = [&](i32 sw_tile) {
            if (sw_tile % C::kGroupSwTiles != 0) return;
            tmem_wait(s.kv_full[stage][sw_tile / C::kGroupSwTiles], ring.full_parity());
        };
        multiply_columns<C::kLatentSwTiles>(k_major_matrix(smem_addr(s.kv[stage])), kSw128Bytes,
                                            k_major_matrix(smem_addr(s.q)), C::kQSwTileBytes,
                                            Scores<typename C::Latent>{d}, ready);
        if constexpr (C::kSwTilesQk > C::kLatentSwTiles) {
            constexpr i32 kRope = C::kLatentSwTiles;
            ready(kRope);
            multiply_steps(k_major_matrix(smem_addr(s.kv[stage]) + kRope * kSw128Bytes), kKMajorStepBytes,
                           k_major_matrix(smem_addr(s.q) + kRope * C::kQSwTileBytes), kKMajorStepBytes, kSw128MmaSteps,
                           true, Scores<typename C::Rope>{d});
        }
        tcgen05_commit(s.s_full[stage]);
    }

    // The stage's columns of a group may be fetched anew.
    MLA_DEVICE void release_group(i32 stage, i32 group) const { tcgen05_commit(s.kv_empty[stage][group]); }

    // O^T, dims x heads: sums over keys.
    MLA_DEVICE void issue_values(RingCount<kStages> ring, bool accumulate) const {
        const i32 stage = ring.stage();
        tmem_wait(s.p_full[stage], ring.full_parity());
        const MatrixDesc p = k_major_matrix(smem_addr(s.p(stage)));
        i32 released = 0;
#pragma unroll
        for (i32 t = 0; t < kDimTiles; ++t) {
            constexpr i32 kSwTiles = kTileDims / kSw128Columns;
            multiply_steps(
                mn_major_matrix(smem_addr(s.kv[stage]) + t * kSwTiles * kSw128Bytes, kSw128Bytes), kMnMajorStepBytes, p,
                kKMajorStepBytes, kTileKeys / kMmaK, accumulate,
                Product<typename C::Latent, false, kTileDims, C::kHeads, Major::MN, Major::K>{Sums::out(tmem, t)});
            const i32 done = t + 1 < kDimTiles ? (t + 1) * kSwTiles / C::kGroupSwTiles : C::kGroups;  // groups
#pragma unroll
            for (; released < done; ++released) release_group(stage, released);
        }
        tcgen05_commit(s.out_full[stage]);
    }
};

// `begin` is called before each work item's first product.
template <class C, class Work, class Storage, class Begin>
MLA_DEVICE void run_mma_role(const DecodeParams& p, i32 split, Storage& s, MBarrier& q_empty, TmemAddr tmem,
                             Begin begin) {
    if (!elect_issuer()) return;
    const Products<C, Storage> products{s, tmem};
    RingCount<kStages> scored, multiplied;
    for_items<Work>(p, split, [&](const WorkItem& item) {
        begin();
        const i32 tiles = item.tile_end - item.tile_begin;
        for (i32 tile = 0; tile < tiles; tile += kStages) {
            const i32 together = min(tiles - tile, kStages);
            for (i32 i = 0; i < together; ++i) {
                products.issue_scores(scored);
                scored.advance();
            }
            if (tile + together == tiles) tcgen05_commit(q_empty);
            for (i32 i = 0; i < together; ++i) {
                products.issue_values(multiplied, tile + i > 0);
                multiplied.advance();
            }
        }
    });
}

// ---- Softmax ---------------------------------------------------------------------------------------------------
// A warp's 32 dims of each 128 in tensor memory, as fragments of 16.
MLA_DEVICE TmemAddr own_lanes(TmemAddr at, i32 thread) { return at.lane(thread / kWarpThreads * kWarpThreads); }

template <class C, class Storage>
struct SwappedSoftmax {
    static constexpr i32 kHeads = C::kHeads;
    static constexpr i32 kPieceHeads = kHeads < kWarpThreads ? kHeads : kWarpThreads;  // that are stored at once
    using Element = typename C::Element;
    using Sums = Columns<kHeads>;

    const DecodeParams& p;
    Storage& s;
    TmemAddr tmem;
    i32 thread;
    HeadState<kHeads> heads;
    RingCount<kStages> ring;

    // Products with the values of all tiles before this one are done.
    MLA_DEVICE void wait_for_out() const {
        const RingCount<kStages> last{ring.count - 1};
        tmem_wait(s.out_full[last.stage()], last.full_parity());
    }

    MLA_DEVICE void rescale_out(const HeadValues<kHeads>& scale) const {
        wait_for_out();
#pragma unroll 1
        for (i32 i = 0; i < 2 * kDimTiles; ++i) {
            const TmemAddr at = own_lanes(Sums::out(tmem, i / 2), thread).lane(i % 2 * kUpperLanes);
            float x[kHeads / 2];
            tcgen05_ld_16x256b(x, at);
            tcgen05_wait_ld();
            pin_loaded(x);
            scale.multiply(x);
            tcgen05_st_16x256b(at, x);
        }
        tcgen05_wait_st();
    }

    // `first` of the work item; `mask` turns the products into scores, and hides absent and unseen tokens.
    template <class Mask>
    MLA_DEVICE void tile(bool first, Mask mask) {
        const i32 stage = ring.stage();
        float scores[kHeads / 2];
        tmem_wait(s.s_full[stage], ring.full_parity());
        tcgen05_ld_16x256b(scores, own_lanes(Sums::scores(tmem, stage), thread));
        tcgen05_wait_ld();
        pin_loaded(scores);
        mask(scores, stage);
        auto& maxima = s.warp_values[stage];
        store_warp_maxima_by_halves<kHeads>(maxima[thread / kWarpThreads], scores, thread);
        bar_sync(SoftmaxOnly, kWarpgroupThreads);
        const HeadValues<kHeads> scale = heads.move_max(maxima, p.scale_log2, thread);
        if (scale.any_but_one() && !first) rescale_out(scale);
        store_p(typename C::Latent{}, heads, scores, smem_addr(s.p(stage)), p.scale_log2, thread);
        tcgen05_fence_before_thread_sync();
        mbarrier_arrive(s.p_full[stage]);
        ring.advance();
    }

    // Writes kPieceHeads heads from `head` on.
    MLA_DEVICE void store_heads(const WorkItem& item, const BlockHeads& block, i32 head) const {
        const BlockHeads piece{0, block.row0 + head, block.rows};
        if (piece.row0 >= piece.rows) return;
        const HeadValues<kPieceHeads> factors = own_factors<kPieceHeads>(s.stats.factor + head, thread);
#pragma unroll 1
        for (i32 t = 0; t < kDimTiles; ++t) {
            const TmemAddr at = own_lanes(Sums::out(tmem, t), thread).column(head);
            float x[2][kPieceHeads / 2];  // dims 0 to 15 of a warp's 32, and 16 to 31
            tcgen05_ld_16x256b(x[0], at);
            tcgen05_ld_16x256b(x[1], at.lane(kUpperLanes));
            tcgen05_wait_ld();
            pin_loaded(x[0]);
            pin_loaded(x[1]);
            store_out<32, 16>(Element{}, p, item, piece, x, factors, t * kTileDims, thread);
        }
    }

    MLA_DEVICE void store(const WorkItem& item, const BlockHeads& block) {
        finish_heads<C::kWithRowMax>(p, item, block, heads, s.warp_values[ring.stage()], s.stats, true, SoftmaxOnly,
                                     thread);
        wait_for_out();
        for (i32 head = 0; head < kHeads; head += kPieceHeads) store_heads(item, block, head);
    }

    // Stores a work item without a tile.
    MLA_DEVICE void store_nothing(const WorkItem& item, const BlockHeads& block) {
        HeadValues<kPieceHeads> zeros;
        zeros.fill(0.f);
        float x[2][kPieceHeads / 2] = {};
        finish_heads<C::kWithRowMax>(p, item, block, heads, s.warp_values[ring.stage()], s.stats, true, SoftmaxOnly,
                                     thread);
        for (i32 head = 0; head < kHeads; head += kPieceHeads) {
            const BlockHeads piece{0, block.row0 + head, block.rows};
            if (piece.row0 >= piece.rows) return;
            for (i32 t = 0; t < kDimTiles; ++t) {
                store_out<32, 16>(Element{}, p, item, piece, x, zeros, t * kTileDims, thread);
            }
        }
    }
};

// `mask(scores, stage, item, tile)`: see SwappedSoftmax::tile.
template <class C, class Work, class Storage, class Mask>
MLA_DEVICE void run_softmax_role(const DecodeParams& p, i32 split, const BlockHeads& heads, Storage& s, TmemAddr tmem,
                                 i32 thread, Mask mask) {
    SwappedSoftmax<C, Storage> softmax{p, s, tmem, thread};
    for_items<Work>(
        p, split,
        [&](const WorkItem& item) {
            softmax.heads.reset();
            for (i32 tile = item.tile_begin; tile < item.tile_end; ++tile) {
                softmax.tile(tile == item.tile_begin,
                             [&](auto& scores, i32 stage) { mask(scores, stage, item, tile); });
            }
            softmax.store(item, heads);
        },
        [&](const WorkItem& item) {
            softmax.heads.reset();
            softmax.store_nothing(item, heads);
        });
}

// ---- Kernel ----------------------------------------------------------------------------------------------------
// Calls roles(warp, tensor memory) in every thread, after `init` in one, which initialises the barriers; all roles
// reach the end.
template <class C, class Storage, class Init, class Roles>
MLA_DEVICE void run_with_tensor_memory(Storage& s, i32 mma_warp, Init init, Roles roles) {
    constexpr u32 kAllocated = Columns<C::kHeads>::kAllocated;
    const i32 warp = uniform_warp();
    if (threadIdx.x == 0) init();
    if (warp == mma_warp) {
        tcgen05_alloc<kAllocated>(s.tmem);
        tcgen05_relinquish_alloc_permit();
    }
    tcgen05_fence_before_thread_sync();
    __syncthreads();
    tcgen05_fence_after_thread_sync();
    griddepcontrol_wait();  // before the first read of anything that an earlier kernel may have written
    const TmemAddr tmem = s.tmem;
    roles(warp, tmem);
    __syncwarp();
    tcgen05_fence_before_thread_sync();
    __syncthreads();
    if (warp == mma_warp) {
        tcgen05_fence_after_thread_sync();
        tcgen05_dealloc<kAllocated>(tmem);
    }
    griddepcontrol_launch_dependents();
}
}  // namespace mla::attention::sm100
