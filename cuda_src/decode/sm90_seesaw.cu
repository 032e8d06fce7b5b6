// Dense MLA decode on Hopper: two warpgroups that take turns on the tensor cores ("seesaw").
//
//   S = Q K^T * scale            (64 x 576) (576 x 64) per tile of 64 tokens
//   P = exp2(S log2(e) - m)      m: running row maximum, shared by both warpgroups
//   l = sum of P,  O = P V       V is K's first 512 columns
//   out = O / l,   lse = ln 2 (m + log2 l)
//
// Grid: x = 64-row blocks of all KV heads (rows of one KV head = s_q * h_q / h_kv), y = parts of the schedule. One
// block stays on an SM and walks the fragments of its part (attention/split_work.cuh). No cluster.
//
// Tiles go in pairs: the left warpgroup scores the even tile, the right one the odd tile, and each multiplies both P's
// with its own half of the values (attention/decode_seesaw_sm90.cuh).
//
//   left    | softmax 0 | O_L += P0 V0_L |          | O_L += P1 V1_L | S0 = Q K0'            | softmax 0'
//   right   |   S1      |  softmax 1     | O_R += P0 V0_R | O_R += P1 V1_R | S1 = Q K1'      | ...
//   load    |           |       K0'_left ->  K1'_left, K0'_right ->  K1'_right ->
//
// Source: FlashMLA's schedule (2025). What differs in the products is said there; here: a producer warp of its own, and
// one page mechanism for every page size.
#include "attention/dtype_variant.cuh"
constexpr bool kSparse = false;
#include "attention/decode_load_sm90.cuh"
#include "attention/decode_seesaw_sm90.cuh"
#include "tile/warp.cuh"

// ---- Budget ----------------------------------------------------------------------------------------------------
// role          warps    regs   does
// left          0..3     224    even tiles: S0, softmax
// right         4..7     224    odd tiles:  S1, softmax
// load, query   8..11    56     attention/decode_load_sm90.cuh
constexpr i32 kRegsMath = 224;
constexpr i32 kRegsLoad = 56;
static_assert(2 * kRegsMath + kRegsLoad <= 3 * kRegsEntry, "what the block has at entry");

// ---- Kernel ----------------------------------------------------------------------------------------------------
extern "C" __global__ void __launch_bounds__(kThreads, 1)
    mla_dense_decode_sm90_seesaw(const __grid_constant__ DenseDecodeParams p,
                                 const __grid_constant__ TensorMap kv_map) {
    extern __shared__ __align__(kSwizzleAtomBytes) u8 smem[];
    Storage& s = *reinterpret_cast<Storage*>(smem);
    Block block(p, s);
    if (threadIdx.x == 0) {
        prefetch_tensormap(kv_map);
        init_storage(s, kLoadArrivals, kQueryThreads);
    }
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
        setmaxnreg_dec<kRegsLoad>();
        if (warp == 8) {
            run_load_role(block, kv_map, thread);
        } else {
            run_query_role(block, thread - kWarpThreads);
        }
    }
    griddepcontrol_launch_dependents();
}
