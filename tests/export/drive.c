// Drives a module of dense decode against the stub driver: random arguments, sensible and not, for the sanitizers.
//
//     drive ENTRY PARAMETERS SIZE ...      the kernels' entries and the bytes of their parameters
#include <mla_decode.h>
#include <stdio.h>
#include <stdlib.h>

void stub_device(int major, int minor, int sms, int shared, int l2, size_t memory);
void stub_entry(const char* name, int count, const int* sizes);
size_t stub_log(void* out, size_t room);

static uint64_t state = 34;

static int64_t draw(int64_t below) {
    state = state * 6364136223846793005u + 1442695040888963407u;
    return (int64_t)((state >> 33) % (uint64_t)below);
}

// A number that is sensible, or an end of 64 bits, or any.
static int64_t number(int64_t sensible) {
    static const int64_t ends[] = {0, -1, INT64_MAX, INT64_MIN, 1LL << 48, 1LL << 40, 2147483647, 2147483648LL};
    switch (draw(24)) {
        case 0:
            return ends[draw(8)];
        case 1:
            return (int64_t)(state ^ (state << 31));
        default:
            return sensible;
    }
}

static void arguments(mla_decode_args* args) {
    mla_decode_defaults(args);
    args->b = draw(300);
    args->num_pages = draw(5000);
    args->max_pages = draw(3000);
    mla_decode_contiguous(args);
    args->b = number(args->b);
    args->num_pages = number(args->num_pages);
    args->max_pages = number(args->max_pages);
    args->q = (const uint16_t*)(uintptr_t)number(1LL << 44);
    args->kv_cache = (const uint16_t*)(uintptr_t)number(2LL << 44);
    args->block_table = (const int32_t*)(uintptr_t)number(3LL << 44);
    args->seqlens = (const int32_t*)(uintptr_t)number(4LL << 44);
    args->out = (uint16_t*)(uintptr_t)number(5LL << 44);
    args->lse = (float*)(uintptr_t)number(6LL << 44);
    for (int i = 0; i < 3; i++) args->q_strides[i] = number(args->q_strides[i]);
    for (int i = 0; i < 2; i++) args->kv_cache_strides[i] = number(args->kv_cache_strides[i]);
    for (int i = 0; i < 3; i++) args->out_strides[i] = number(args->out_strides[i]);
    args->causal = (int32_t)number(1);
    args->workspace = (void*)(uintptr_t)number(7LL << 44);
    args->workspace_bytes = (size_t)number(1LL << 40);
}

int main(int count, char** words) {
    int64_t launched = 0, refused = 0;
    for (int at = 1; at < count;) {
        int sizes[4], parameters = atoi(words[at + 1]);
        for (int i = 0; i < parameters; i++) sizes[i] = atoi(words[at + 2 + i]);
        stub_entry(words[at], parameters, sizes);
        at += 2 + parameters;
    }
    stub_device(9, 0, 132, 227 << 10, 50 << 20, (size_t)1 << 36);
    mla_decode_module* module = NULL;
    if (mla_decode_open(&module) != 0) return puts(mla_decode_why()), 1;
    for (int i = 0; i < 20000; i++) {
        unsigned char log[1 << 14];
        mla_decode_args args;
        arguments(&args);
        mla_decode_plan plan;
        mla_decode_plan_defaults(&plan);
        plan.max_b = number(1 + draw(300));
        plan.max_pages = number(args.max_pages);
        plan.workspace = args.workspace;
        plan.workspace_bytes = args.workspace_bytes;
        mla_decode_lengths lengths = {sizeof lengths, args.b, args.seqlens, {1}};
        int status = mla_decode_call(module, &args, NULL);
        if (mla_decode_plan_make(module, &plan) == 0) mla_decode_plan_update(module, &plan, &lengths, NULL);
        int planned = mla_decode_call_planned(module, &args, &plan, NULL);
        size_t bytes = 0;
        mla_decode_workspace(module, &args, &bytes);
        if (status > 0 || planned > 0) return puts(mla_decode_why()), 1;
        launched += stub_log(log, sizeof log) > 0;
        refused += status < 0;
    }
    mla_decode_close(module);
    printf("launched %lld refused %lld\n", (long long)launched, (long long)refused);
    return 0;
}
