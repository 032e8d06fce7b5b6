// Runs FlashAttention-3's forward kernel as its launch template instantiates it, and compares with attention in double.
// See run.py for how it is compiled and run. Macros: HEAD and HEAD_V (columns), CAUSAL (0 or 1), CLUSTER (blocks).
#include "attention.h"
#include "flash_fwd_launch_template.h"

void prepare_varlen_num_blocks(Flash_fwd_params&, cudaStream_t, bool, int, int, bool) {}

using Element = cutlass::bfloat16_t;

int main(int, char** argv) {
    const Problem problem(argv, HEAD, HEAD_V, CAUSAL);
    const auto [queries, keys, heads, head, head_v, causal] = problem;
    const auto q = random_values<Element>(size_t(queries) * heads * head);
    const auto k = random_values<Element>(size_t(keys) * heads * head);
    const auto v = random_values<Element>(size_t(keys) * heads * head_v);
    const size_t outputs = size_t(queries) * heads * head_v, rows = size_t(heads) * queries;

    Flash_fwd_params p = {};
    p.q_ptr = on_device(q), p.k_ptr = on_device(k), p.v_ptr = on_device(v);
    p.o_ptr = allocate<Element>(outputs), p.softmax_lse_ptr = allocate<float>(rows);
    p.tile_count_semaphore = on_device(std::vector<int>{0});
    p.q_row_stride = p.k_row_stride = heads * head, p.v_row_stride = p.o_row_stride = heads * head_v;
    p.q_head_stride = p.k_head_stride = head, p.v_head_stride = p.o_head_stride = head_v;
    p.q_batch_stride = q.size(), p.k_batch_stride = k.size(), p.v_batch_stride = v.size(), p.o_batch_stride = outputs;
    p.v_dim_stride = 1;
    p.h = p.h_k = heads, p.b = p.b_k = 1, p.seqlen_q = queries, p.seqlen_k = keys, p.d = head, p.dv = head_v;
    p.total_q = queries, p.total_k = keys;
    p.scale_softmax = problem.scale();
    p.is_bf16 = true, p.is_causal = causal;
    p.window_size_left = -1, p.window_size_right = causal ? 0 : -1;
    p.num_splits = 1, p.arch = 90, p.num_sm = 2;
    run_flash_fwd<90, HEAD, HEAD_V, CLUSTER, Element, Element, CAUSAL, false, false, false, false, false, false, false,
                  false, false>(p, nullptr);
    if (cudaDeviceSynchronize() != cudaSuccess) return 1;

    const auto [out, lse] = forward(problem, to_double(q), to_double(k), to_double(v));
    bool wrong = differs("out", from_device<Element>(p.o_ptr, outputs), out, 0.02);
    wrong |= differs("lse", from_device<float>(p.softmax_lse_ptr, rows), lse, 1e-3);
    return wrong ? 2 : 0;
}
