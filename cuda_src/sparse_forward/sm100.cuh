// The roles of the sparse forward on Blackwell: barriers, gather, order of the products, softmax, results.
//
// A block multiplies its heads by tile after tile of 64 listed rows; two blocks of a pair share the tiles, of which
// each gathers half for both. Keys are rows of the scores and dims rows of the result (S^T = K Q^T, O^T = V^T P^T), so
// that 16 or 32 heads cost 16 or 32 columns, and that every operand is read as it lies in memory.
#pragma once
#include "attention/head_results.cuh"
#include "attention/row_list.cuh"
#include "common/limits.cuh"
#include "ptx/cluster.cuh"
#include "ptx/control.cuh"
#include "ptx/copy.cuh"
#include "ptx/gather4.cuh"
#include "tile/tmem_product.cuh"
#include "tile/warp.cuh"

namespace mla::sparse_forward::sm100 {
using namespace attention;

// ---- Budget ----------------------------------------------------------------------------------------------------
// role       warps    regs   does
// softmax    0..3     232    P; rescales O^T where a maximum moved; results
// mma        4        136    tensor memory; one thread issues every product
// query      5        136    Q; two more warps of its warpgroup do nothing
// gather     8..11    136    K, each warp its columns
constexpr i32 kMmaWarp = 4, kQueryWarp = 5, kGatherWarp = 8, kGatherWarps = 4;
constexpr i32 kThreads = (kGatherWarp + kGatherWarps) * kWarpThreads;
constexpr i32 kRegsSoftmax = 232, kRegsIssue = 136;
static_assert(kRegsSoftmax + 2 * kRegsIssue <= 3 * regs_at_entry(kThreads), "what the block has at entry");

constexpr i32 kTileKeys = kTileTokens;
constexpr i32 kStages = 2;  // what fits: each of nine SW128 tiles
constexpr i32 kSwTilesV = kHeadDimV / kSw128Columns;
constexpr i32 kSwTilesStage = kSwTilesV + 1;
static_assert(kTileKeys == kSw128Rows, "an SW128 tile has the columns of all keys of a tile");

// K comes and goes in groups of SW128 tiles: the columns that a sum of 128 dims needs, and those of RoPE.
constexpr i32 kTileDims = 128;
constexpr i32 kDimTiles = kHeadDimV / kTileDims;
constexpr i32 kGroupSwTiles = kTileDims / kSw128Columns;
constexpr i32 kRopeGroup = kDimTiles, kRopeSwTile = kSwTilesV;

// What a kernel chooses, and the sizes that follow.
template <class Element_, i32 kHeadDimQk_, i32 kHeads_, i32 kBlocks_>
struct Config {
    using Element = Element_;
    static constexpr i32 kHeadDimQk = kHeadDimQk_, kHeads = kHeads_, kBlocks = kBlocks_;
    static_assert(is_head_dim_qk(kHeadDimQk), "with or without RoPE columns");
    static_assert(kHeads == 16 || kHeads == 32 || kHeads == 64, "heads");
    static_assert(kBlocks == 1 || kBlocks == 2, "alone, or a pair");

    static constexpr i32 kSwTilesQk = kHeadDimQk / kSw128Columns;
    static constexpr i32 kGroups = kSwTilesQk > kSwTilesV ? kDimTiles + 1 : kDimTiles;
    static constexpr u32 kQSwTileBytes = kHeadSwTileBytes<kHeads>;
    static_assert(kQSwTileBytes % kSwizzleAtomBytes == 0, "SW128 tiles of Q");
};

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

// ---- Storage ---------------------------------------------------------------------------------------------------
// Tiles are counted through all work items of a block; tile n is in stage n % 2.
//
// barrier        arrives (count)              carries                waits      first phase
// q_full         query (1)                    Q                      mma        blocked, a phase per work item
// q_empty        products (1)                 -                      query      free, the same
// k_full[s][g]   gather (1)                   1 or 2 SW128 tiles     mma        blocked, a phase per kStages tiles
// k_empty[s][g]  products (1 of each block)   -                      gather     free, the same
// s_full[s]      products (1)                 -                      softmax    blocked, the same
// p_full[s]      softmax (128)                -                      mma        blocked, the same
// out_full[s]    products (1)                 -                      softmax    blocked, the same
//
// "products" is a commit: it arrives when everything issued before it is done. So s_full of a tile also means that the
// products with the P of two tiles before are done, and so the last phase of out_full[s]: the softmax waits for it only
// where it touches O^T. p_full of a tile also means that its S^T has been read and, of a work item's first one, the
// last item's O^T.
template <class C>
struct Storage {
    // The last SW128 tile of a stage has the RoPE columns until they are scored, then P: a row for each head, 64 keys.
    alignas(kSwizzleAtomBytes) u8 k[kStages][kSwTilesStage * kSw128Bytes];
    u8 q[C::kSwTilesQk * C::kQSwTileBytes];
    float warp_values[kStages][kWarpgroupWarps][C::kHeads];  // maxima, finally sums, of each warp's keys
    HeadStats<C::kHeads> stats;
    MBarrier q_full, q_empty, k_full[kStages][C::kGroups], k_empty[kStages][C::kGroups];
    MBarrier s_full[kStages], p_full[kStages], out_full[kStages];
    TmemAddr tmem;

    MLA_DEVICE u8* p(i32 stage) { return k[stage] + kRopeSwTile * kSw128Bytes; }
};

template <class C>
MLA_DEVICE void init_storage(Storage<C>& s) {
    mbarrier_init(s.q_full, 1);
    mbarrier_init(s.q_empty, 1);
    for (i32 stage = 0; stage < kStages; ++stage) {
        for (MBarrier& barrier : s.k_full[stage]) mbarrier_init(barrier, 1);
        for (MBarrier& barrier : s.k_empty[stage]) mbarrier_init(barrier, C::kBlocks);
        mbarrier_init(s.s_full[stage], 1);
        mbarrier_init(s.p_full[stage], kWarpgroupThreads);
        mbarrier_init(s.out_full[stage], 1);
    }
    fence_mbarrier_init();
}

enum NamedBarrier : i32 { SoftmaxOnly = 1 };  // within softmax: maxima, sums or factors are stored

// ---- Work ------------------------------------------------------------------------------------------------------
struct Maps {
    const TensorMap &kv, &q;
};

// The block's heads of queries, split by split.
template <class C>
struct Block {
    const DecodeParams& p;
    const Maps& maps;
    Storage<C>& s;

    MLA_DEVICE i32 split() const { return (i32)blockIdx.y; }
    MLA_DEVICE i32 head0() const { return (i32)blockIdx.x * C::kHeads; }

    // Calls act(item) for each work item with a tile; `otherwise` for the others.
    template <class Act, class Otherwise>
    MLA_DEVICE void for_items(Act act, Otherwise otherwise) const {
        WorkItem item;
        for (WorkIterator walk(p, split()); walk.next(p, item);) {
            if (item.tile_begin < item.tile_end) {
                act(item);
            } else {
                otherwise(item);
            }
        }
    }
    template <class Act>
    MLA_DEVICE void for_items(Act act) const {
        for_items(act, [](const WorkItem&) {});
    }
};

// ---- Loads -----------------------------------------------------------------------------------------------------
// Heads past the last one arrive as zeros.
template <class C>
MLA_DEVICE void run_query_role(const Block<C>& block) {
    if (!elect_one()) return;
    Storage<C>& s = block.s;
    Ring<1> ring;
    block.for_items([&](const WorkItem& item) {
        mbarrier_wait(s.q_empty, ring.empty_parity(0));
        ring.advance(0);
        mbarrier_arrive_expect_tx(s.q_full, sizeof(s.q));
        for (i32 sw_tile = 0; sw_tile < C::kSwTilesQk; ++sw_tile) {
            cp_async_bulk_tensor_3d(smem_addr(s.q) + sw_tile * C::kQSwTileBytes, block.maps.q, s.q_full,
                                    sw_tile * kSw128Columns, block.head0(), item.request, kEvictFirst);
        }
    });
}

// A lane gathers four keys. Entries past the end of the list are kNoRow, and become zeros. Of a pair each block gathers
// half of the keys, for both.
constexpr i32 kKeysOfLane = 4;
constexpr u32 kGatherBytes = kKeysOfLane * kSw128RowBytes;

template <class C>
MLA_DEVICE void gather(SmemAddr to, const TensorMap& kv, MBarrier& full, i32 column, const int4& rows) {
    if constexpr (C::kBlocks == 1) {
        cp_async_bulk_tensor_gather4(to, kv, full, column, rows, kEvictLast);
    } else {
        cp_async_bulk_tensor_gather4_multicast(to, kv, full, column, rows, (1 << C::kBlocks) - 1, kEvictLast);
    }
}

template <class C>
MLA_DEVICE void run_gather_role(const Block<C>& block, i32 warp, i32 lane) {
    constexpr i32 kLanes = kTileKeys / kKeysOfLane / C::kBlocks;
    const i32 own = (C::kBlocks == 1 ? 0 : (i32)cluster_rank() * kLanes) + lane;  // of the lanes that share a tile
    const DecodeParams& p = block.p;
    Storage<C>& s = block.s;
    RingCount<kStages> ring;
    block.for_items([&](const WorkItem& item) {
        const i32* list = p.block_table + item.request * p.table_stride_b_elems;
        for (i32 tile = item.tile_begin; tile < item.tile_end; ++tile) {
            const i32 stage = ring.stage();
            int4 rows = make_int4(kNoRow, kNoRow, kNoRow, kNoRow);
            if (lane < kLanes) rows = reinterpret_cast<const int4*>(list + tile * kTileKeys)[own];
            for (i32 group = warp; group < C::kGroups; group += kGatherWarps) {
                MBarrier& full = s.k_full[stage][group];
                const i32 first = group * kGroupSwTiles, last = min(first + kGroupSwTiles, C::kSwTilesQk);
                mbarrier_wait(s.k_empty[stage][group], ring.full_parity() ^ 1);
                if (lane == 0) mbarrier_arrive_expect_tx(full, (last - first) * kSw128Bytes);
                __syncwarp();
                for (i32 sw_tile = first; lane < kLanes && sw_tile < last; ++sw_tile) {
                    gather<C>(smem_addr(s.k[stage]) + (sw_tile * kSw128Bytes + own * kGatherBytes), block.maps.kv, full,
                              sw_tile * kSw128Columns, rows);
                }
            }
            ring.advance();
        }
    });
}

// ---- Products --------------------------------------------------------------------------------------------------
// All in one thread: the scores of two tiles, then their values. A tile's softmax runs during the scores of the next
// tile or the values of the previous one; its columns are fetched anew as soon as their values are multiplied.
template <class C>
struct Products {
    using Element = typename C::Element;
    using Sums = Columns<C::kHeads>;

    Storage<C>& s;
    TmemAddr tmem;

    // S^T, keys x heads: sums over columns.
    MLA_DEVICE void issue_scores(RingCount<kStages> ring) const {
        const i32 stage = ring.stage();
        multiply_columns<C::kSwTilesQk>(
            k_major_matrix(smem_addr(s.k[stage])), kSw128Bytes, k_major_matrix(smem_addr(s.q)), C::kQSwTileBytes,
            Product<Element, false, kTileKeys, C::kHeads, Major::K, Major::K>{Sums::scores(tmem, stage)},
            [&](i32 sw_tile) {
                if (sw_tile % kGroupSwTiles != 0) return;
                tmem_wait(s.k_full[stage][sw_tile / kGroupSwTiles], ring.full_parity());
            });
        tcgen05_commit(s.s_full[stage]);
    }

    // The stage's columns of a group may be fetched anew, by both blocks of a pair.
    MLA_DEVICE void release_group(i32 stage, i32 group) const {
        if constexpr (C::kBlocks == 1) {
            tcgen05_commit(s.k_empty[stage][group]);
        } else {
            tcgen05_commit_multicast(s.k_empty[stage][group], (1 << C::kBlocks) - 1);
        }
    }

    // O^T, dims x heads: sums over keys.
    MLA_DEVICE void issue_values(RingCount<kStages> ring, bool accumulate) const {
        const i32 stage = ring.stage();
        tmem_wait(s.p_full[stage], ring.full_parity());
        const MatrixDesc p = k_major_matrix(smem_addr(s.p(stage)));
        for (i32 t = 0; t < kDimTiles; ++t) {
            multiply_steps(mn_major_matrix(smem_addr(s.k[stage]) + t * kGroupSwTiles * kSw128Bytes, kSw128Bytes),
                           kMnMajorStepBytes, p, kKMajorStepBytes, kTileKeys / kMmaK, accumulate,
                           Product<Element, false, kTileDims, C::kHeads, Major::MN, Major::K>{Sums::out(tmem, t)});
            release_group(stage, t);
        }
        if (C::kGroups > kRopeGroup) release_group(stage, kRopeGroup);
        tcgen05_commit(s.out_full[stage]);
    }
};

template <class C>
MLA_DEVICE void run_mma_role(const Block<C>& block, TmemAddr tmem) {
    if (!elect_issuer()) return;
    Storage<C>& s = block.s;
    const Products<C> products{s, tmem};
    RingCount<kStages> scored, multiplied;
    Ring<1> items;
    block.for_items([&](const WorkItem& item) {
        mbarrier_wait(s.q_full, items.full_parity(0));
        items.advance(0);
        const i32 tiles = item.tile_end - item.tile_begin;
        for (i32 tile = 0; tile < tiles; tile += kStages) {
            const i32 together = min(tiles - tile, kStages);
            for (i32 i = 0; i < together; ++i) {
                products.issue_scores(scored);
                scored.advance();
            }
            if (tile + together == tiles) tcgen05_commit(s.q_empty);
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

template <class C>
struct Softmax {
    static constexpr i32 kHeads = C::kHeads;
    static constexpr i32 kPieceHeads = kHeads < kWarpThreads ? kHeads : kWarpThreads;  // that are stored at once
    using Element = typename C::Element;
    using Sums = Columns<kHeads>;

    const DecodeParams& p;
    Storage<C>& s;
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

    // `keys` of the tile are there; `first` of the work item.
    MLA_DEVICE void tile(i32 keys, bool first) {
        const i32 stage = ring.stage();
        float scores[kHeads / 2];
        tmem_wait(s.s_full[stage], ring.full_parity());
        tcgen05_ld_16x256b(scores, own_lanes(Sums::scores(tmem, stage), thread));
        tcgen05_wait_ld();
        pin_loaded(scores);
        mask_rows(scores, keys, thread);
        auto& maxima = s.warp_values[stage];
        store_warp_maxima_by_halves<kHeads>(maxima[thread / kWarpThreads], scores, thread);
        bar_sync(SoftmaxOnly, kWarpgroupThreads);
        const HeadValues<kHeads> scale = heads.move_max(maxima, p.scale_log2, thread);
        if (scale.any_but_one() && !first) rescale_out(scale);
        store_p(Element{}, heads, scores, smem_addr(s.p(stage)), p.scale_log2, thread);
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
        finish_heads</*kWithRowMax=*/true>(p, item, block, heads, s.warp_values[ring.stage()], s.stats, true,
                                           SoftmaxOnly, thread);
        wait_for_out();
        for (i32 head = 0; head < kHeads; head += kPieceHeads) store_heads(item, block, head);
    }

    // Of a work item without a tile.
    MLA_DEVICE void store_nothing(const WorkItem& item, const BlockHeads& block) {
        HeadValues<kPieceHeads> zeros;
        zeros.fill(0.f);
        float x[2][kPieceHeads / 2] = {};
        finish_heads</*kWithRowMax=*/true>(p, item, block, heads, s.warp_values[ring.stage()], s.stats, true,
                                           SoftmaxOnly, thread);
        for (i32 head = 0; head < kHeads; head += kPieceHeads) {
            const BlockHeads piece{0, block.row0 + head, block.rows};
            if (piece.row0 >= piece.rows) return;
            for (i32 t = 0; t < kDimTiles; ++t) {
                store_out<32, 16>(Element{}, p, item, piece, x, zeros, t * kTileDims, thread);
            }
        }
    }
};

template <class C>
MLA_DEVICE void run_softmax_role(const Block<C>& block, TmemAddr tmem, i32 thread) {
    Softmax<C> softmax{block.p, block.s, tmem, thread};
    const BlockHeads heads{0, block.head0(), block.p.h_q};
    block.for_items(
        [&](const WorkItem& item) {
            softmax.heads.reset();
            for (i32 tile = item.tile_begin; tile < item.tile_end; ++tile) {
                softmax.tile(item.tokens - tile * kTileKeys, tile == item.tile_begin);
            }
            softmax.store(item, heads);
        },
        [&](const WorkItem& item) {
            softmax.heads.reset();
            softmax.store_nothing(item, heads);
        });
}

// ---- Kernel ----------------------------------------------------------------------------------------------------
// All blocks of the cluster, if there is one.
template <class C>
MLA_DEVICE void sync_blocks() {
    if constexpr (C::kBlocks == 1) {
        __syncthreads();
    } else {
        cluster_sync();
    }
}

template <class C>
MLA_DEVICE void run_block(const DecodeParams& p, const Maps& maps, Storage<C>& s) {
    const Block<C> block{p, maps, s};
    const i32 warp = uniform_warp();
    if (threadIdx.x == 0) init_storage(s);
    if (warp == kMmaWarp) {
        tcgen05_alloc<Columns<C::kHeads>::kAllocated>(s.tmem);
        tcgen05_relinquish_alloc_permit();
    }
    tcgen05_fence_before_thread_sync();
    sync_blocks<C>();
    tcgen05_fence_after_thread_sync();
    griddepcontrol_wait();  // before the first read of anything that an earlier kernel may have written
    const TmemAddr tmem = s.tmem;
    if (warp < kMmaWarp) {
        setmaxnreg_inc<kRegsSoftmax>();
        run_softmax_role(block, tmem, threadIdx.x);
    } else {
        setmaxnreg_dec<kRegsIssue>();
        if (warp == kMmaWarp) {
            run_mma_role(block, tmem);
        } else if (warp == kQueryWarp) {
            run_query_role(block);
        } else if (warp >= kGatherWarp) {
            run_gather_role(block, warp - kGatherWarp, threadIdx.x % kWarpThreads);
        }
    }
    __syncwarp();
    tcgen05_fence_before_thread_sync();
    sync_blocks<C>();  // of a pair the peer may still send to this block
    if (warp == kMmaWarp) {
        tcgen05_fence_after_thread_sync();
        tcgen05_dealloc<Columns<C::kHeads>::kAllocated>(tmem);
    }
    griddepcontrol_launch_dependents();
}
}  // namespace mla::sparse_forward::sm100

// The facts of a kernel with the choices `C`. Products: M, N and the number of K = 16 of the scores, then of the
// values, per tile.
#define MLA_FORWARD_SM100_FACTS(C)                                                                           \
    static_assert(sizeof(Storage<C>) <= kMaxDynamicSmem, "shared memory");                                   \
    MLA_DECODE_FACTS();                                                                                      \
    MLA_FACT(threads, kThreads);                                                                             \
    MLA_FACT(smem_bytes, sizeof(Storage<C>));                                                                \
    MLA_FACT(block_heads, C::kHeads);                                                                        \
    MLA_FACT(tmem_columns, Columns<C::kHeads>::kAllocated);                                                  \
    MLA_FACT(tmem_columns_used, Columns<C::kHeads>::kUsed);                                                  \
    MLA_FACT(mbarriers, (MLA_OFFSET(Storage<C>, tmem) - MLA_OFFSET(Storage<C>, q_full)) / sizeof(MBarrier)); \
    MLA_FACT_LIST(products, kTileKeys, C::kHeads, C::kSwTilesQk* kSw128MmaSteps, kTileDims, C::kHeads,       \
                  kDimTiles* kTileKeys / kMmaK)
