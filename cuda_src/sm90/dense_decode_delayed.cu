// Dense MLA decode on Hopper: one warpgroup scores, the other one's products lag half a tile behind ("delayed right").
//
//   S = Q K^T * scale            (64 x 576) (576 x 64) per tile of 64 tokens
//   P = exp2(S log2(e) - m)      m: running row maximum
//   l = sum of P,  O = P V       V is K's first 512 columns
//   out = O / l,   lse = ln 2 (m + log2 l)
//
// Grid, block and storage are those of the seesaw kernel (sm90/dense_decode_seesaw.cu). The left warpgroup scores
// every tile and multiplies P with the left half of the values; the right one multiplies the right half, one tile
// late, exactly while the left one is in its softmax and would leave the tensor cores idle:
//
//   left    | softmax i         | O_L += P_i V_i,L | S = Q K_i+1          | softmax i+1       | ...
//   right   | O_R += P_i-1 V_R  |                  |                      | O_R += P_i V_R    | ...
//   load    |      K_i+1,right -> (the other stage)    K_i+2,left ->
//
// Source: the roles (one warpgroup scores) are FlashAttention-3's for wide values; delaying the right half is ours.
#include "attention/dtype_variant.cuh"
constexpr bool kSparse = false;
#include "attention/decode_load_sm90.cuh"
#include "attention/decode_math_sm90.cuh"
#include "tile/warp.cuh"

// ---- Budget ----------------------------------------------------------------------------------------------------
// role          warps    regs   does
// left          0..3     240    S, softmax, O[:, :256]
// right         4..7     224    O[:, 256:]
// load, query   8..11    40     attention/decode_load_sm90.cuh
constexpr i32 kRegsLeft = 240;
constexpr i32 kRegsRight = 224;
constexpr i32 kRegsLoad = 40;
static_assert(kRegsLeft + kRegsRight + kRegsLoad <= 3 * kRegsEntry, "what the block has at entry");

// A fact made true by the first, waited for by the second (the mbarriers stand in attention/decode_block_sm90.cuh):
// P0Ready, P1Ready   left -> right   P of the tile in that stage is in p(stage), the maximum after it in row_max
// ScoresDone         left -> right   the tensor cores are free: the left warpgroup is in its softmax
enum NamedBarrier : i32 { P0Ready = FirstFreeBarrier, P1Ready, ScoresDone };

// ---- Math roles ------------------------------------------------------------------------------------------------
MLA_DEVICE void run_left(Block& block, Math& math, const Fragment& fragment, i32 thread) {
    Storage& s = block.s;
    const float scale_log2 = block.p.scale_log2;
    start_scores(s, math, 0);
    finish<0>(math);
#pragma unroll 1
    for (i32 tile = fragment.tile_begin; tile < fragment.tile_end; ++tile) {
        opaque(thread);  // every address made of it would take a register through the whole loop
        const i32 stage = stage_of(fragment, tile);
        if (tile > fragment.tile_begin) bar_arrive(ScoresDone, kMathThreads);
        float tile_maxima[kFragmentRows], maxima[kFragmentRows];
        mask_tile(block, math, fragment, tile, stage, thread);
        tile_max(tile_maxima, math.scores, scale_log2);
        lazy_max(maxima, math.rows, tile_maxima);
        store_rows(s.row_max[stage], maxima, thread);
        const RowScale scale = math.rows.move_max(maxima);
        exponentiate<Element>(math.p_fragment, math.rows, math.scores, scale_log2);
        store_panel(s.p(stage), math.p_fragment, thread);
        bar_arrive(P0Ready + stage, kMathThreads);

        rescale(math.out, scale);
        clean_values<false>(block, fragment, tile, stage, thread);
        start_own_product<false>(s, math, stage);
        math.ring.advance(stage);
        if (tile + 1 < fragment.tile_end) {
            start_scores(s, math, stage ^ 1);
            finish<1>(math);
        } else {
            finish<0>(math);
        }
        release(s.kv_empty[stage].left, thread);
        finish<0>(math);
    }
}

MLA_DEVICE void run_right(Block& block, Math& math, const Fragment& fragment, i32 thread) {
    Storage& s = block.s;
#pragma unroll 1
    for (i32 tile = fragment.tile_begin; tile < fragment.tile_end; ++tile) {
        const i32 stage = stage_of(fragment, tile);
        float maxima[kFragmentRows];
        bar_sync(P0Ready + stage, kMathThreads);
        load_rows(maxima, s.row_max[stage], thread);
        rescale(math.out, math.rows.move_max(maxima));
        clean_values<true>(block, fragment, tile, stage, thread);
        if (tile + 1 < fragment.tile_end) bar_sync(ScoresDone, kMathThreads);
        start_other_product<true>(s, math, stage);
        finish<0>(math);
        release(s.kv_empty[stage].right, thread);
    }
}

// ---- Kernel ----------------------------------------------------------------------------------------------------
extern "C" __global__ void __launch_bounds__(kThreads, 1)
    mla_dense_decode_sm90_delayed(const __grid_constant__ DenseDecodeParams p,
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
        setmaxnreg_inc<kRegsLeft>();
        run_math_role<false, true>(
            block, thread, [&](Math& math, const Fragment& fragment) { run_left(block, math, fragment, thread); });
    } else if (warp < 8) {
        setmaxnreg_inc<kRegsRight>();
        run_math_role<true, false>(
            block, thread, [&](Math& math, const Fragment& fragment) { run_right(block, math, fragment, thread); });
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
