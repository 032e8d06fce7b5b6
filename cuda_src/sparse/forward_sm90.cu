// Sparse MLA prefill on Hopper: each query attends to the rows of kv that its list names.
//
//   S = Q K^T * scale            (64 heads x d_qk) (d_qk x 64 rows) per tile of 64 listed rows
//   P = exp2(S log2(e) - m)      m: running row maximum
//   l = sum of P,  O = P V       V is K's first 512 columns
//   out = O / (l + exp2(sink - m)),   lse = ln 2 (m + log2 l),   max_logits = max of S
//
// Grid: x = blocks of 64 heads, y = parts of the schedule: to the schedule a query is a request, and its list a line of
// the block table, with pages of one token (attention/decode_params.cuh). One block stays on an SM and walks the
// queries of its part (attention/split_work.cuh). No cluster.
//
// The mathematics are those of dense decode's seesaw (attention/decode_seesaw_sm90.cuh). The keys are gathered, row by
// row, by a whole warpgroup:
//
//   left    | softmax 0 | O_L += P0 V0_L |          | O_L += P1 V1_L | S0 = Q K0'            | softmax 0'
//   right   |   S1      |  softmax 1     | O_R += P0 V0_R | O_R += P1 V1_R | S1 = Q K1'      | ...
//   gather  |           |       K0'_left ->  K1'_left, K0'_right ->  K1'_right ->   ... and Q of the next query
//
// Source: FlashMLA's sparse prefill (2025) gathers with a warpgroup of cp.async, too. What differs: the lists hold
// valid rows only and may be of any length, so there are no masks but at a list's end; the work is cut evenly whatever
// the lengths; Q is gathered like a tile of keys, while the last result is stored.
#include "attention/sparse_forward_variant.cuh"
constexpr bool kSparse = true;
#include "attention/decode_seesaw_sm90.cuh"
#include "attention/gather_role_sm90.cuh"
#include "tile/warp.cuh"

// ---- Budget ----------------------------------------------------------------------------------------------------
// role          warps    regs   does
// left          0..3     224    even tiles: S0, softmax
// right         4..7     224    odd tiles:  S1, softmax
// gather        8..11    56     tiles of listed rows, and Q
constexpr i32 kRegsMath = 224;
constexpr i32 kRegsGather = 56;
static_assert(2 * kRegsMath + kRegsGather <= 3 * kRegsEntry, "what the block has at entry");
static_assert(kTileTokens == kRowsPerTile && kBlockM == kPanelRows, "a tile is 64 rows, of kv and of Q");

// ---- Gather role -----------------------------------------------------------------------------------------------
// The block's heads of a query are gathered like a tile of keys; those past the last one become zeros.
struct QueryGather {
    const Block& block;

    MLA_DEVICE RowSources heads(i32 query, i32 thread) const {
        const DenseDecodeParams& p = block.p;
        RowNumbers numbers;
#pragma unroll
        for (i32 i = 0; i < kRowsPerThread; ++i) numbers.of[i] = block.row0 + first_row_of(thread) + i;
        return rows_by_number(p.q + query * p.q_stride_b_elems, p.q_stride_h_elems, p.h_q, numbers, thread);
    }

    MLA_DEVICE void prefetch(i32 query, i32 thread) const { prefetch_rows(heads(query, thread), kPanelsQk, thread); }

    MLA_DEVICE void gather(i32 query, i32 thread) const {
        const RowSources rows = heads(query, thread);
#pragma unroll
        for (i32 i = 0; i < kPanelsQk; ++i) {
            gather_panel(smem_addr(block.s.q), rows, panel_in_order(i), kQueryPolicy, thread);
        }
    }
};

// ---- Kernel ----------------------------------------------------------------------------------------------------
extern "C" __global__ void __launch_bounds__(kThreads, 1)
    mla_sparse_forward_sm90(const __grid_constant__ DenseDecodeParams p) {
    extern __shared__ __align__(kSwizzleAtomBytes) u8 smem[];
    Storage& s = *reinterpret_cast<Storage*>(smem);
    Block block(p, s);
    if (threadIdx.x == 0) init_storage(s, kGatherArrivals, kGatherArrivals);
    __syncthreads();
    griddepcontrol_wait();  // before the first read of anything that an earlier kernel may have written

    const i32 warp = uniform_warp();
    const i32 thread = threadIdx.x % kWarpgroupThreads;
    if (warp < 4) {
        setmaxnreg_inc<kRegsMath>();
        run_left_role(block, thread);
    } else if (warp < 8) {
        setmaxnreg_inc<kRegsMath>();
        run_right_role(block, thread);
    } else {
        setmaxnreg_dec<kRegsGather>();
        run_gather_role(p, s, block.part, QueryGather{block}, thread);
    }
    griddepcontrol_launch_dependents();
}
