// Runs FlashAttention-3's forward kernel as its launch template instantiates it, and compares with attention in double.
// See run.py for how it is compiled and run. Macros: HEAD and HEAD_V (columns), CAUSAL (0 or 1).
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <vector>

#include "flash_fwd_launch_template.h"

void prepare_varlen_num_blocks(Flash_fwd_params&, cudaStream_t, bool, int, int, bool) {}

using Element = cutlass::bfloat16_t;

static std::vector<Element> random_values(size_t count) {
    std::vector<Element> values(count);
    for (auto& value : values) value = Element(float(rand()) / RAND_MAX * 2 - 1);
    return values;
}

static void* on_device(const void* host, size_t bytes) {
    void* device = nullptr;
    cudaMalloc(&device, bytes);
    cudaMemcpy(device, host, bytes, cudaMemcpyHostToDevice);
    return device;
}

int main(int, char** argv) {
    const int queries = atoi(argv[1]), keys = atoi(argv[2]), heads = atoi(argv[3]);
    auto q = random_values(size_t(queries) * heads * HEAD), k = random_values(size_t(keys) * heads * HEAD),
         v = random_values(size_t(keys) * heads * HEAD_V);
    std::vector<Element> out(size_t(queries) * heads * HEAD_V);
    std::vector<float> lse(size_t(heads) * queries);
    int semaphore = 0;

    Flash_fwd_params p = {};
    p.q_ptr = on_device(q.data(), 2 * q.size()), p.k_ptr = on_device(k.data(), 2 * k.size());
    p.v_ptr = on_device(v.data(), 2 * v.size()), p.o_ptr = on_device(out.data(), 2 * out.size());
    p.softmax_lse_ptr = on_device(lse.data(), 4 * lse.size());
    p.tile_count_semaphore = (int*)on_device(&semaphore, sizeof semaphore);
    p.q_row_stride = p.k_row_stride = heads * HEAD, p.v_row_stride = p.o_row_stride = heads * HEAD_V;
    p.q_head_stride = p.k_head_stride = HEAD, p.v_head_stride = p.o_head_stride = HEAD_V;
    p.q_batch_stride = q.size(), p.k_batch_stride = k.size(), p.v_batch_stride = v.size(),
    p.o_batch_stride = out.size();
    p.v_dim_stride = 1;
    p.h = p.h_k = heads, p.b = p.b_k = 1, p.seqlen_q = queries, p.seqlen_k = keys, p.d = HEAD, p.dv = HEAD_V;
    p.total_q = queries, p.total_k = keys;
    p.scale_softmax = 1 / std::sqrt(float(HEAD));
    p.is_bf16 = true, p.is_causal = CAUSAL;
    p.window_size_left = -1, p.window_size_right = CAUSAL ? 0 : -1;
    p.num_splits = 1, p.arch = 90, p.num_sm = 2;
    run_flash_fwd<90, HEAD, HEAD_V, 1, Element, Element, CAUSAL, false, false, false, false, false, false, false, false,
                  false>(p, nullptr);
    if (cudaDeviceSynchronize() != cudaSuccess) return 1;
    cudaMemcpy(out.data(), p.o_ptr, 2 * out.size(), cudaMemcpyDeviceToHost);

    double worst = 0;
    std::vector<double> weights(keys);
    for (int h = 0; h < heads; h++)
        for (int i = 0; i < queries; i++) {
            const int seen = CAUSAL ? std::min(keys, keys - queries + i + 1) : keys;
            double sum = 0;
            for (int j = 0; j < seen; j++) {
                double dot = 0;
                for (int c = 0; c < HEAD; c++)
                    dot += double(float(q[(i * heads + h) * HEAD + c])) * double(float(k[(j * heads + h) * HEAD + c]));
                sum += weights[j] = std::exp(dot / std::sqrt(double(HEAD)));
            }
            for (int c = 0; c < HEAD_V; c++) {
                double expected = 0;
                for (int j = 0; j < seen; j++)
                    expected += weights[j] / sum * double(float(v[(j * heads + h) * HEAD_V + c]));
                const double error = std::abs(expected - double(float(out[(i * heads + h) * HEAD_V + c])));
                if (!(error <= worst)) worst = error;
            }
        }
    printf("largest error %.2e\n", worst);
    return worst < 0.02 ? 0 : 2;
}
