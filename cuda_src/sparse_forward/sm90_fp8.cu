// Sparse MLA prefill on Hopper with both products in FP8: each query attends to the rows of kv in its list, e4m3
// records with one scale for all.
//
//   S = Q K^T * scale            (64 heads x 576) (576 x 64 rows) per tile of 64 listed rows; Q in e4m3
//   P = 2^(8 + S log2(e) - m)    m: the tile's maximum of the head; in e4m3
//   l = sum of P,  O = P V       V is K's first 512 columns
//   out = O / (l + 2^(sink - m)),   lse = ln 2 (m - 8 + log2 of the sum of P before it is rounded)
//   max_logits = max of S
//
// Grid: x = blocks of 64 heads, y = splits. To the schedule a query is a request, and its list a line of the block
// table, as in sparse_forward/sm90.cu. No cluster. The math warpgroups are dense decode's (attention/sm90/fp8.cuh); the
// third one gathers rows, 16 bytes per thread:
//
//   warp    0..3 left      4..7 right      8..11 gather
//   tile    | K0 K1 K2 K3 K4 | K5 once both sides have added tile 0 -> ...
//
// Source: as decode/sm90_fp8.cu; FlashMLA's sparse prefill also gathers with one warpgroup and cp.async.
#include "attention/row_list.cuh"
#include "attention/sm90/fp8.cuh"
#include "attention/token_record.cuh"
#include "tile/gather.cuh"
#include "tile/warp.cuh"

namespace mla::sparse_forward {
using namespace attention;
using namespace attention::sm90;

// ---- Variant ---------------------------------------------------------------------------------------------------
using Query = MLA_DTYPE;
using BlockStorage = Fp8Storage<kFp8MmaRows, /*kTree=*/false, /*kListed=*/true>;
using OwnBlock = Fp8Block<BlockStorage>;

// ---- Budget ----------------------------------------------------------------------------------------------------
// role      warps    regs   does
// left      0..3     240    even tiles: scores, weights; O[:, :256]
// right     4..7     240    odd tiles;  O[:, 256:]
// gather    8..11    24     tiles of listed rows
constexpr i32 kBlockThreads = 3 * kWarpgroupThreads;
constexpr i32 kGatherWarp = 2 * kWarpgroupWarps;
constexpr i32 kRegsMath = 240;
constexpr i32 kRegsGather = 24;
static_assert(2 * kRegsMath + kRegsGather <= 3 * regs_at_entry(kBlockThreads), "what the block has at entry");
static_assert(sizeof(BlockStorage) <= kMaxDynamicSmem, "shared memory");

MLA_DECODE_FP8_FACTS();
MLA_FACT(threads, kBlockThreads);
MLA_FACT(smem_bytes, sizeof(BlockStorage));
MLA_FACT(block_m, kFp8MmaRows);
MLA_RECORD_FACT(fp8);

// ---- Gather role -----------------------------------------------------------------------------------------------
// Row `slot` of the cache; one outside it is null.
MLA_DEVICE const u8* row_of_slot(const DecodeParams& p, u32 slot) {
    u32 page = slot, token = 0;
    if (p.page_size != 1) page = slot / (u32)p.page_size, token = slot - page * p.page_size;
    if (page >= (u32)p.num_pages) return nullptr;
    return reinterpret_cast<const u8*>(p.kv) + page * p.kv_stride_page_elems + token * p.kv_stride_token_elems;
}

// One tile: eight threads copy a row, each 16 bytes of every panel; absent rows become zeros.
MLA_DEVICE void gather_tile(const DecodeParams& p, const RowNumbers& numbers, SmemAddr tile, i32 thread) {
    const i32 first = first_row_of(thread), chunk = thread % kSw128Chunks;
#pragma unroll
    for (i32 i = 0; i < kRowsPerThread; ++i) {
        const u8* const row = row_of_slot(p, (u32)numbers.of[i]);
        const bool present = row != nullptr;
        const u8* const from = (present ? row : reinterpret_cast<const u8*>(p.kv)) + chunk * sizeof(uint4);
        const SmemAddr latent = tile + sw128_offset(first + i, chunk);
#pragma unroll
        for (i32 panel = 0; panel < kFp8Panels; ++panel) {
            cp_async_16(latent + panel * kSw128Bytes, from + panel * kSw128ByteColumns, present);
        }
        if (chunk < kSw64Chunks) {
            cp_async_16(tile + (kFp8LatentBytes + sw64_offset(first + i, chunk)), from + kHeadDimV, present);
        }
    }
}

// Brings a query's rows into L2, some tiles before the math warps read them.
MLA_DEVICE void prefetch_query(const OwnBlock& block, i32 query, i32 thread) {
    constexpr i32 kLineElems = 64, kLines = kMaxHeadDimQk / kLineElems;
    const DecodeParams& p = block.p;
#pragma unroll 1
    for (i32 i = thread; i < kFp8MmaRows * kLines; i += kGatherThreads) {
        const i32 head = block.row0 + i / kLines;
        if (head >= p.h_q) break;
        prefetch_global_l2(p.q + query * p.q_stride_b_elems + head * p.q_stride_h_elems + i % kLines * kLineElems);
    }
}

// The numbers of the next tile's rows are in flight while a tile is fetched.
MLA_DEVICE void run_gather_role(const OwnBlock& block, i32 thread) {
    const DecodeParams& p = block.p;
    BlockStorage& s = block.s;
    Ring<BlockStorage::kStages> phases;
    i32 stage = 0;
    WorkItem item;
    for (auto walk = block.items(); walk.next(p, item);) {
        if (item.tile_begin >= item.tile_end) continue;
        const i32* list = p.block_table + item.request * p.table_stride_b_elems;
        RowNumbers next = read_row_numbers(list + item.tile_begin * kTileTokens, thread);
        prefetch_query(block, item.request, thread);
#pragma unroll 1
        for (i32 tile = item.tile_begin; tile < item.tile_end; ++tile) {
            opaque(thread);  // derived values are not worth registers across the loop
            const RowNumbers numbers = next;
            if (tile + 1 < item.tile_end) next = read_row_numbers(list + (tile + 1) * kTileTokens, thread);
            mbarrier_wait(s.kv_empty[stage], phases.empty_parity(stage));
            gather_tile(p, numbers, s.tile(block.ring, stage), thread);
            arrive_when_gathered(s.kv_full[stage], thread);
            phases.advance(stage);
            stage = block.ring.next(stage);
        }
    }
}

// ---- Kernel ----------------------------------------------------------------------------------------------------
extern "C" __global__ void __launch_bounds__(kBlockThreads, 1)
    mla_sparse_forward_sm90_fp8(const __grid_constant__ DecodeFp8Params p) {
    extern __shared__ __align__(kSwizzleAtomBytes) u8 smem[];
    auto& s = *reinterpret_cast<BlockStorage*>(smem);
    const OwnBlock block(p, s);
    if (threadIdx.x == 0) init_fp8_storage(s, block.rows, kGatherArrivals);
    __syncthreads();
    griddepcontrol_wait();  // before the first read of anything that an earlier kernel may have written

    const i32 warp = uniform_warp();
    if (warp < kGatherWarp) {
        setmaxnreg_inc<kRegsMath>();
        run_fp8_side<Query>(block, warp);
    } else {
        setmaxnreg_dec<kRegsGather>();
        run_gather_role(block, threadIdx.x % kWarpgroupThreads);
    }
    griddepcontrol_launch_dependents();
}
}  // namespace mla::sparse_forward
