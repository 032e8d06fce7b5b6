// Decodes a batch with a plan, as an engine would at each step, and compares the result with numbers of the oracle.
//
//     mla-cupy export --op decode --h-q 16 --page-size 64 --arch sm_90a --out build/decode
//     gcc -std=c11 -O2 -c build/decode/*.c
//     g++ -std=c++17 -Ibuild/decode -Iexamples/c examples/cpp/decode.cpp mla_decode.o mla_decode_images.o -ldl
#include <mla_decode.h>

#include <cmath>
#include <cstdio>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "batch.h"
#include "cuda_driver.h"

namespace {

// A status of the module as an exception.
void check(int status) {
    if (status != 0) throw std::runtime_error(std::string(mla_decode_why()));
}

struct Close {
    void operator()(mla_decode_module* module) const { mla_decode_close(module); }
};
using Module = std::unique_ptr<mla_decode_module, Close>;

Module open_module() {
    mla_decode_module* opened = nullptr;
    check(mla_decode_open(&opened));
    return Module(opened);
}

template <typename T>
T* on_gpu(const std::vector<T>& data) {
    return static_cast<T*>(cuda_memory(data.data(), data.size() * sizeof(T)));
}

std::vector<uint16_t> elements(size_t count, uint32_t first) {
    std::vector<uint16_t> made(count);
    fill_elements(made.data(), count, first);
    return made;
}

// The plan of all layers and steps: sizes at their largest, and a workspace.
mla_decode_plan make_plan(const mla_decode_module* module) {
    mla_decode_plan plan;
    mla_decode_plan_defaults(&plan);
    plan.max_b = 2 * kBatch;
    plan.max_pages = kMaxPages;
    check(mla_decode_plan_workspace(module, &plan, &plan.workspace_bytes));
    plan.workspace = cuda_memory(nullptr, plan.workspace_bytes);
    check(mla_decode_plan_make(module, &plan));
    return plan;
}

int run() {
    cuda_start();
    const Module module = open_module();
    mla_decode_plan plan = make_plan(module.get());
    std::vector<uint16_t> out(kBatch * kHeads * kValueWidth);
    std::vector<float> lse(kBatch * kHeads);

    mla_decode_args args;
    mla_decode_defaults(&args);
    args.b = kBatch;
    args.num_pages = kPages;
    args.max_pages = kMaxPages;
    args.q = on_gpu(elements(kBatch * kHeads * kWidth, 0));
    args.kv_cache = on_gpu(elements(kPages * kPageSize * kWidth, 1u << 20));
    args.block_table = static_cast<int32_t*>(cuda_memory(kBlockTable, sizeof kBlockTable));
    args.seqlens = static_cast<int32_t*>(cuda_memory(kSeqlens, sizeof kSeqlens));
    args.out = on_gpu(out);
    args.lse = on_gpu(lse);
    args.scale = 1.0 / std::sqrt(192.0);
    mla_decode_contiguous(&args);

    // Once per step, then a call per layer.
    const mla_decode_lengths lengths = {sizeof lengths, kBatch, args.seqlens, {1}};
    check(mla_decode_plan_update(module.get(), &plan, &lengths, nullptr));
    check(mla_decode_call_planned(module.get(), &args, &plan, nullptr));
    cuda_fetch(out.data(), args.out, out.size() * sizeof(uint16_t));
    cuda_fetch(lse.data(), args.lse, lse.size() * sizeof(float));
    const int wrong = wrong_results(out.data(), lse.data());
    std::printf(wrong ? "%d wrong\n" : "all as expected\n", wrong);
    return wrong;
}

}  // namespace

int main() {
    try {
        return run() != 0;
    } catch (const std::exception& error) {
        std::fprintf(stderr, "%s\n", error.what());
        return 1;
    }
}
