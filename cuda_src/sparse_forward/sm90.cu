// Sparse MLA prefill on Hopper: each query attends to the rows of kv in its list.
//
//   S = Q K^T * scale            (64 heads x d_qk) (d_qk x 64 rows) per tile of 64 listed rows
//   P = exp2(S log2(e) - m)      m: running row maximum
//   l = sum of P,  O = P V       V is K's first 512 columns
//   out = O / (l + exp2(sink - m)),   lse = ln 2 (m + log2 l),   max_logits = max of S
//
// Grid: x = blocks of 64 heads, y = splits. To the schedule a query is a request, and its list a line of the block
// table, with one-token pages (attention/decode_params.cuh). One block per SM iterates over the queries of its split
// (attention/split_work.cuh). No cluster.
//
// The mathematics are dense decode's seesaw (attention/sm90/seesaw.cuh). A whole warpgroup gathers the keys, row by
// row:
//
//   left    | softmax 0 | O_L += P0 V0_L |          | O_L += P1 V1_L | S0 = Q K0'            | softmax 0'
//   right   |   S1      |  softmax 1     | O_R += P0 V0_R | O_R += P1 V1_R | S1 = Q K1'      | ...
//   gather  |           |       K0'_left ->  K1'_left, K0'_right ->  K1'_right ->   ... and Q of the next query
//
// Source: FlashMLA's sparse prefill (2025) also gathers with one warpgroup and cp.async. What differs: the lists hold
// valid rows only and may have any length, so only a list's last tile is masked; the work is balanced for any lengths;
// Q is gathered like a tile of keys, while the previous result is stored.
#include "attention/sm90/seesaw.cuh"
#include "common/limits.cuh"
#include "sparse_forward/sm90_gather_role.cuh"
#include "tile/warp.cuh"

namespace mla::sparse_forward {
// ---- Variant ---------------------------------------------------------------------------------------------------
using Sparse = Config<MLA_DTYPE, MLA_HEAD_DIM_QK, /*kSparse=*/true>;

// ---- Budget ----------------------------------------------------------------------------------------------------
// role          warps    regs   does
// left          0..3     224    even tiles: S0, softmax
// right         4..7     224    odd tiles:  S1, softmax
// gather        8..11    56     tiles of listed rows, and Q
constexpr i32 kRegsMath = 224;
constexpr i32 kRegsGather = 56;
static_assert(2 * kRegsMath + kRegsGather <= 3 * kRegsEntry, "what the block has at entry");
static_assert(kTileTokens == kSw128Rows && kBlockM == kSw128Rows, "a tile is 64 rows, of kv and of Q");
static_assert(sizeof(Storage<Sparse>) <= kMaxDynamicSmem, "shared memory");

MLA_DECODE_FACTS();
MLA_FACT(threads, kThreads);
MLA_FACT(smem_bytes, sizeof(Storage<Sparse>));
MLA_FACT(block_m, kBlockM);

// ---- Gather role -----------------------------------------------------------------------------------------------
// The block's heads of a query are gathered like a tile of keys; those past the last one become zeros.
struct QueryGather {
    const Block<Sparse>& block;

    MLA_DEVICE RowSources heads(i32 query, i32 thread) const {
        const DecodeParams& p = block.p;
        RowNumbers numbers;
#pragma unroll
        for (i32 i = 0; i < kRowsPerThread; ++i) numbers.of[i] = block.row0 + first_row_of(thread) + i;
        return rows_by_number(p.q + query * p.q_stride_b_elems, p.q_stride_h_elems, p.h_q, numbers, thread);
    }

    MLA_DEVICE void prefetch(i32 query, i32 thread) const {
        prefetch_rows(heads(query, thread), Sparse::kSwTilesQk, thread);
    }

    MLA_DEVICE void gather(i32 query, i32 thread) const {
        const RowSources rows = heads(query, thread);
#pragma unroll
        for (i32 i = 0; i < Sparse::kSwTilesQk; ++i) {
            gather_sw_tile(smem_addr(block.s.q), rows, Sparse::sw_tile_in_order(i), kQueryPolicy, thread);
        }
    }
};

// ---- Kernel ----------------------------------------------------------------------------------------------------
extern "C" __global__ void __launch_bounds__(kThreads, 1)
    mla_sparse_forward_sm90(const __grid_constant__ DecodeParams p) {
    extern __shared__ __align__(kSwizzleAtomBytes) u8 smem[];
    auto& s = *reinterpret_cast<Storage<Sparse>*>(smem);
    Block<Sparse> block(p, s);
    if (threadIdx.x == 0) init_storage(s, kGatherArrivals, kGatherArrivals);
    __syncthreads();
    griddepcontrol_wait();  // before the first read of anything that an earlier kernel may have written

    const i32 warp = uniform_warp();
    const i32 thread = threadIdx.x % kWarpgroupThreads;
    if (warp < kRightWarp) {
        setmaxnreg_inc<kRegsMath>();
        run_left_role(block, thread);
    } else if (warp < kLoaderWarp) {
        setmaxnreg_inc<kRegsMath>();
        run_right_role(block, thread);
    } else {
        setmaxnreg_dec<kRegsGather>();
        run_gather_role<Sparse>(p, s, block.split, QueryGather{block}, thread);
    }
    griddepcontrol_launch_dependents();
}
}  // namespace mla::sparse_forward
