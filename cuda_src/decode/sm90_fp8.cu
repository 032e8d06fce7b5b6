// Dense MLA decode on Hopper with both products in FP8, over records of e4m3 with one scale for all.
//
//   S = Q K^T * scale            (rows x 576) (576 x 64) per tile of 64 tokens; Q in e4m3, with a scale for each row
//   P = 2^(8 + S log2(e) - m)    m: the tile's maximum of the row; in e4m3
//   l = sum of P,  O = P V       V is K's first 512 columns
//   out = O / l,   lse = ln 2 (m - 8 + log2 of the sum of P before it is rounded)
//
// Grid: x = blocks of up to 64 rows of all KV heads (rows of one KV head = s_q * h_q / h_kv), y = splits. One block per
// SM iterates over the work items of its split (attention/split_work.cuh). No cluster. Two math warpgroups and a warp
// that loads tiles by TMA, see attention/sm90/fp8.cuh.
//
// Source: two warpgroups that each own half of the output are FlashMLA's idea; sums that leave the tensor cores before
// they lose bits, DeepGEMM's. Here no pass transposes values, and each tile's weights have their own maximum
// (cuda_src/decode/fp8.md).
#include "attention/prefetch_inputs.cuh"
#include "attention/sm90/fp8.cuh"
#include "attention/token_record.cuh"
#include "decode/sm90_lean_load.cuh"
#include "tile/warp.cuh"

// A mask says which drafts a query sees, if a variant says so.
#ifndef MLA_TREE_MASK
#define MLA_TREE_MASK 0
#endif
// Number of e4m3 terms that sum to a weight, and to a query that came in 16 bits: one or two.
#ifndef MLA_TERMS
#define MLA_TERMS 1
#endif

namespace mla::decode {
// ---- Variant ---------------------------------------------------------------------------------------------------
using Query = MLA_DTYPE;
using BlockStorage =
    Fp8Storage<MLA_BLOCK_ROWS, MLA_TREE_MASK, /*kListed=*/false, MLA_TERMS, kIsCoded<Query> ? 1 : MLA_TERMS>;
using OwnBlock = Fp8Block<BlockStorage>;

// ---- Budget ----------------------------------------------------------------------------------------------------
// role      warps    regs, of 64 rows   does
// left      0..3     232   240          even tiles: scores, weights; O[:, :256]
// right     4..7     232   240          odd tiles;  O[:, 256:]
// load      8        40    24           tiles, page by page; 9..11 have nothing to do
//
// With 64 rows, a math thread holds 224 numbers: O, two sums in flight, their operands and factors.
constexpr i32 kBlockThreads = 3 * kWarpgroupThreads;
constexpr i32 kLoadWarp = 2 * kWarpgroupWarps;
constexpr bool kWide = MLA_BLOCK_ROWS == kFp8MmaRows;
constexpr i32 kRegsMath = kWide ? 240 : 232;
constexpr i32 kRegsLoad = kWide ? 24 : 40;
static_assert(2 * kRegsMath + kRegsLoad <= 3 * regs_at_entry(kBlockThreads), "what the block has at entry");
static_assert(sizeof(BlockStorage) <= kMaxDynamicSmem, "shared memory");

MLA_DECODE_FP8_FACTS();
MLA_FACT(threads, kBlockThreads);
MLA_FACT(smem_bytes, sizeof(BlockStorage));
MLA_FACT(block_m, MLA_BLOCK_ROWS);
MLA_RECORD_FACT(fp8);

// ---- Load role -------------------------------------------------------------------------------------------------
struct TileLoader {
    const OwnBlock& block;
    const TensorMap &latent_map, &rope_map;
    Ring<BlockStorage::kStages> phases;
    i32 stage = 0;

    MLA_DEVICE void operator()(const TileBoxes& boxes, const WorkItem&, i32) {
        BlockStorage& s = block.s;
        const u64 present = boxes.present_tokens();
        MBarrier& full = s.kv_full[stage];
        const SmemAddr to = s.tile(block.ring, stage);
        mbarrier_wait(s.kv_empty[stage], phases.empty_parity(stage));
        if (boxes.lane == 0) {
            s.present[stage] = present;
            mbarrier_arrive_expect_tx(full, block.ring.tile_bytes);
        }
        __syncwarp();
#pragma unroll
        for (i32 i = 0; i < 2; ++i) {
            if (boxes.contains(boxes.box(i))) load_box(boxes, to, full, i);
        }
        phases.advance(stage);
        stage = block.ring.next(stage);
    }

    MLA_DEVICE void load_box(const TileBoxes& boxes, SmemAddr to, MBarrier& full, i32 i) const {
        const u32 first = boxes.box(i) * boxes.rows, rope_row_bytes = (block.ring.tile_bytes - kFp8LatentBytes) / 64;
        const i32 page = boxes.batch.page[i], token = boxes.batch.offset[i];
        for (i32 panel = 0; panel < kFp8Panels; ++panel) {
            cp_async_bulk_tensor_4d(to + (panel * kSw128Bytes + first * kSw128RowBytes), latent_map, full,
                                    panel * kSw128ByteColumns, token, block.kv_head, page, boxes.l2_policy);
        }
        cp_async_bulk_tensor_4d(to + (kFp8LatentBytes + first * rope_row_bytes), rope_map, full, kHeadDimV, token,
                                block.kv_head, page, boxes.l2_policy);
    }
};

// ---- Before the wait -------------------------------------------------------------------------------------------
// `prefetch_inputs` of attention/prefetch_inputs.cuh for 8-bit or 16-bit queries: brings the inputs that roles read one
// after another at their start into L2 all at once. PERF(H200, 2026-11-27: 16.15 to 15.97 us with one request, no
// change with four, 58.2 to 58.6 with 16, where the first blocks read a small share).
MLA_DEVICE void prefetch_fp8_inputs(const DecodeParams& p) {
    constexpr i32 kMostRequests = 4;
    constexpr i32 kLineBytes = 128, kWords = kLineBytes / sizeof(i32), kPoints = kLineBytes / sizeof(SchedulePoint);
    using Stored = Fp8QueryType<Query>::Stored;
    constexpr i32 kElems = kLineBytes / sizeof(Stored), kLines = ceil_div(kMaxHeadDimQk, kElems);
    if (p.b > kMostRequests) return;
    LinePrefetch prefetch;
    prefetch.lines(ceil_div(p.num_splits + 1, kPoints), [&](i32 i) { return p.schedule + i * kPoints; });
    prefetch.lines(ceil_div(p.b, kWords), [&](i32 i) { return p.seqlens + i * kWords * p.seqlens_stride_elems; });
    const i32 table_lines = ceil_div(p.max_pages, kWords);
    prefetch.lines(p.b * table_lines, [&](i32 i) {
        const i32 request = i / table_lines, line = i - request * table_lines;
        return p.block_table + request * p.table_stride_b_elems + line * kWords * p.table_stride_page_elems;
    });
    prefetch.lines(p.b * p.s_q * p.h_q * kLines, [&](i32 i) {
        const i32 row = i / kLines, line = i - row * kLines;
        const i32 token = row / p.h_q, head = row - token * p.h_q, request = token / p.s_q;
        return reinterpret_cast<const Stored*>(p.q) + request * p.q_stride_b_elems +
               (token - request * p.s_q) * p.q_stride_s_elems + head * p.q_stride_h_elems + line * kElems;
    });
}

// ---- Kernel ----------------------------------------------------------------------------------------------------
extern "C" __global__ void __launch_bounds__(kBlockThreads, 1)
    mla_decode_sm90_fp8(const __grid_constant__ DecodeFp8Params p, const __grid_constant__ TensorMap latent_map,
                        const __grid_constant__ TensorMap rope_map) {
    extern __shared__ __align__(kSwizzleAtomBytes) u8 smem[];
    auto& s = *reinterpret_cast<BlockStorage*>(smem);
    const OwnBlock block(p, s);
    clear_fp8_query(s);
    if (threadIdx.x == 0) {
        prefetch_tensormap(latent_map);
        prefetch_tensormap(rope_map);
        init_fp8_storage(s, block.rows);
    }
    prefetch_fp8_inputs(p);
    __syncthreads();
    griddepcontrol_wait();  // before the first read of anything that an earlier kernel may have written

    const i32 warp = uniform_warp();
    if (warp < kLoadWarp) {
        setmaxnreg_inc<kRegsMath>();
        run_fp8_side<Query>(block, uniform_warp());  // anew: no register for it meanwhile
    } else {
        setmaxnreg_dec<kRegsLoad>();
        if (warp == kLoadWarp) run_lean_load_role(block, own_lane(), TileLoader{block, latent_map, rope_map, {}, 0});
    }
    griddepcontrol_launch_dependents();
}
}  // namespace mla::decode
