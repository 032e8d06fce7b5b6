// Runs FlashAttention-2's forward kernel (mma.sync), and compares with attention in double.
// See run.py for how it is compiled and run. Macros: HEAD (columns), CAUSAL (0 or 1).
#include "attention.h"

// Variants that are not instantiated.
#define FLASHATTENTION_DISABLE_DROPOUT
#define FLASHATTENTION_DISABLE_ALIBI
#define FLASHATTENTION_DISABLE_SOFTCAP
#define FLASHATTENTION_DISABLE_LOCAL
#define FLASHATTENTION_DISABLE_UNEVEN_K

#include "flash_fwd_launch_template.h"

using Element = cutlass::bfloat16_t;
constexpr int ROUNDING = 128;

int main(int, char** argv) {
    const Problem problem(argv, HEAD, HEAD, CAUSAL);
    const auto [queries, keys, heads, head, head_v, causal] = problem;
    const size_t count_q = size_t(queries) * heads * head, count_k = size_t(keys) * heads * head;
    const auto q = random_values<Element>(count_q), k = random_values<Element>(count_k);
    const auto v = random_values<Element>(count_k);
    const size_t rows = size_t(heads) * queries;

    FLASH_NAMESPACE::Flash_fwd_params p = {};
    p.q_ptr = on_device(q), p.k_ptr = on_device(k), p.v_ptr = on_device(v);
    p.o_ptr = allocate<Element>(count_q), p.softmax_lse_ptr = allocate<float>(rows);
    p.q_row_stride = p.k_row_stride = p.v_row_stride = p.o_row_stride = heads * head;
    p.q_head_stride = p.k_head_stride = p.v_head_stride = p.o_head_stride = head;
    p.q_batch_stride = p.o_batch_stride = count_q, p.k_batch_stride = p.v_batch_stride = count_k;
    p.h = p.h_k = heads, p.h_h_k_ratio = 1, p.b = 1, p.d = p.d_rounded = head;
    p.seqlen_q = queries, p.seqlen_k = keys;
    p.seqlen_q_rounded = (queries + ROUNDING - 1) / ROUNDING * ROUNDING,
    p.seqlen_k_rounded = (keys + ROUNDING - 1) / ROUNDING * ROUNDING;
    p.scale_softmax = problem.scale(), p.scale_softmax_log2 = p.scale_softmax * M_LOG2E;
    p.p_dropout = p.rp_dropout = 1, p.p_dropout_in_uint8_t = 255, p.scale_softmax_rp_dropout = p.scale_softmax;
    p.is_bf16 = true, p.is_causal = causal, p.is_seqlens_k_cumulative = true;
    p.window_size_left = -1, p.window_size_right = causal ? 0 : -1;
    if constexpr (HEAD == 64) FLASH_NAMESPACE::run_mha_fwd_hdim64<Element, CAUSAL>(p, nullptr);
    if constexpr (HEAD == 128) FLASH_NAMESPACE::run_mha_fwd_hdim128<Element, CAUSAL>(p, nullptr);
    if (cudaDeviceSynchronize() != cudaSuccess) return 1;

    const auto [out, lse] = forward(problem, to_double(q), to_double(k), to_double(v));
    bool wrong = differs("out", from_device<Element>(p.o_ptr, count_q), out, 0.02);
    wrong |= differs("lse", from_device<float>(p.softmax_lse_ptr, rows), lse, 1e-3);
    return wrong ? 2 : 0;
}
