// Runs FlashAttention-3's backward kernels, and compares the gradients with attention in double.
// See run.py for how it is compiled and run. Macros: HEAD (columns), CAUSAL (0 or 1), ROWS and KEYS (tile sizes),
// SWAP_DQ (0 or 1) and WARPGROUPS_DQ (along the rows of dQ), as the dispatch by head chooses them; DETERMINISTIC (0 or
// 1: blocks add to dQ in their order).
#include "attention.h"
#include "flash_bwd_launch_template.h"

using Element = cutlass::bfloat16_t;

static int rounded(int count, int tile) { return (count + tile - 1) / tile * tile; }

int main(int, char** argv) {
    const Problem problem(argv, HEAD, HEAD, CAUSAL);
    const auto [queries, keys, heads, head, head_v, causal] = problem;
    const size_t count_q = size_t(queries) * heads * head, count_k = size_t(keys) * heads * head;
    const auto q = random_values<Element>(count_q), k = random_values<Element>(count_k);
    const auto v = random_values<Element>(count_k), dout = random_values<Element>(count_q);
    const auto result = forward(problem, to_double(q), to_double(k), to_double(v));
    const std::vector<float> lse(result.lse.begin(), result.lse.end());
    std::vector<Element> out;
    for (double value : result.out) out.push_back(Element(float(value)));

    Flash_bwd_params p = {};
    p.seqlen_q = p.total_q = queries, p.seqlen_k = p.total_k = keys, p.d = p.dv = p.d_rounded = p.dv_rounded = head;
    p.seqlen_q_rounded = rounded(queries, ROWS), p.seqlen_k_rounded = rounded(keys, KEYS);
    const size_t rows = size_t(heads) * p.seqlen_q_rounded;
    p.q_ptr = on_device(q), p.k_ptr = on_device(k), p.v_ptr = on_device(v), p.o_ptr = on_device(out);
    p.do_ptr = on_device(dout), p.softmax_lse_ptr = on_device(lse);
    p.dq_ptr = allocate<Element>(count_q), p.dk_ptr = allocate<Element>(count_k);
    p.dv_ptr = allocate<Element>(count_k), p.dq_accum_ptr = allocate<float>(rows * head);
    p.dsoftmax_sum = allocate<float>(rows), p.softmax_lse_log2_ptr = allocate<float>(rows);
    p.q_row_stride = p.k_row_stride = p.v_row_stride = p.o_row_stride = heads * head;
    p.do_row_stride = p.dq_row_stride = p.dk_row_stride = p.dv_row_stride = heads * head;
    p.q_head_stride = p.k_head_stride = p.v_head_stride = p.o_head_stride = head;
    p.do_head_stride = p.dq_head_stride = p.dk_head_stride = p.dv_head_stride = head;
    p.q_batch_stride = p.o_batch_stride = p.do_batch_stride = p.dq_batch_stride = count_q;
    p.k_batch_stride = p.v_batch_stride = p.dk_batch_stride = p.dv_batch_stride = count_k;
    p.h = p.h_k = heads, p.b = p.b_k = 1, p.scale_softmax = problem.scale();
    p.is_bf16 = true, p.is_causal = causal, p.window_size_left = -1, p.window_size_right = causal ? 0 : -1;
    p.deterministic = DETERMINISTIC, p.dq_semaphore = allocate<int>(rows / ROWS);
    p.num_splits = 1, p.arch = 90, p.num_sm = 2;
    run_flash_bwd<90, HEAD, ROWS, KEYS, Element, CAUSAL, false, false, false, DETERMINISTIC, false, 2, 2, true, false,
                  SWAP_DQ, 2, 1, 2, WARPGROUPS_DQ, false>(p, nullptr);
    if (cudaDeviceSynchronize() != cudaSuccess) return 1;

    const auto d = backward(problem, to_double(q), to_double(k), to_double(v), to_double(dout));
    bool wrong = differs("dq", from_device<Element>(p.dq_ptr, count_q), d.q, 0.02);
    wrong |= differs("dk", from_device<Element>(p.dk_ptr, count_k), d.k, 0.02);
    wrong |= differs("dv", from_device<Element>(p.dv_ptr, count_k), d.v, 0.02);
    return wrong ? 2 : 0;
}
