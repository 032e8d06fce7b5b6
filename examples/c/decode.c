// Decodes a batch through an exported module, and compares the result with numbers of the oracle.
//
//     mla-cupy export --op decode --h-q 16 --page-size 64 --arch sm_90a --out build/decode
//     gcc -std=c11 -Ibuild/decode examples/c/decode.c build/decode/*.c -ldl -lm -o build/decode/example
#include <mla_decode.h>
#include <stdio.h>
#include <stdlib.h>

#include "batch.h"
#include "cuda_driver.h"

static void check(int status) {
    if (status != 0) {
        fprintf(stderr, "%s\n", mla_decode_why());
        exit(1);
    }
}

int main(void) {
    static uint16_t q[kBatch * kHeads * kWidth], cache[kPages * kPageSize * kWidth];
    static uint16_t out[kBatch * kHeads * kValueWidth];
    static float lse[kBatch * kHeads];
    fill_elements(q, sizeof q / sizeof *q, 0);
    fill_elements(cache, sizeof cache / sizeof *cache, 1u << 20);
    cuda_start();

    mla_decode_module* module = NULL;
    check(mla_decode_open(&module));  // loads the kernels for the current context

    mla_decode_args args;
    mla_decode_defaults(&args);
    args.b = kBatch;
    args.num_pages = kPages;
    args.max_pages = kMaxPages;
    args.q = cuda_memory(q, sizeof q);
    args.kv_cache = cuda_memory(cache, sizeof cache);
    args.block_table = cuda_memory(kBlockTable, sizeof kBlockTable);
    args.seqlens = cuda_memory(kSeqlens, sizeof kSeqlens);
    args.out = cuda_memory(NULL, sizeof out);
    args.lse = cuda_memory(NULL, sizeof lse);
    args.scale = 1.0 / sqrt(192.0);  // DeepSeek-V3's
    mla_decode_contiguous(&args);
    check(mla_decode_workspace(module, &args, &args.workspace_bytes));
    args.workspace = cuda_memory(NULL, args.workspace_bytes);

    CUstream stream = NULL;  // the default stream
    check(mla_decode_call(module, &args, stream));
    cuda_fetch(out, args.out, sizeof out);
    cuda_fetch(lse, args.lse, sizeof lse);
    int wrong = wrong_results(out, lse);

    args.kv_cache = NULL;  // a mistake is told, and nothing is launched
    if (mla_decode_call(module, &args, stream) == 0) wrong++;
    printf("refused: %s\n", mla_decode_why());
    mla_decode_close(module);
    printf(wrong ? "%d wrong\n" : "all as expected\n", wrong);
    return wrong != 0;
}
