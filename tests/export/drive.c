// Calls an exported module against the stub driver with the argument structs of a file, for the sanitizers.
//
//     drive FILE ENTRY PARAMETERS SIZE ...      the kernels' entries and the bytes of their parameters
//
// Compiled with -DMODULE=mla_decode and -DHEADER="<mla_decode.h>"; with -DPLANNED where the module has plans.
#include HEADER
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define PASTED(module, name) module##_##name
#define NAMED(module, name) PASTED(module, name)
#define OF(name) NAMED(MODULE, name)

typedef OF(args) Args;
typedef OF(module) Module;

enum { kModules = 2, kLogBytes = 1 << 16 };

void stub_device(int major, int minor, int sms, int shared, int l2, size_t memory);
void stub_entry(const char* name, int count, const int* sizes);
size_t stub_log(void* out, size_t room);

static int64_t launched, planned, refused;

static void fail(void) {
    puts(OF(why)());
    exit(1);
}

// True if something has been launched since the last call.
static int has_launched(void) {
    static unsigned char log[kLogBytes];
    return stub_log(log, sizeof log) > 0;
}

#ifdef PLANNED
static void call_with_a_plan(const Module* module, const Args* args, int spare) {
    OF(plan) plan;
    OF(plan_defaults)(&plan);
    plan.max_b = (int64_t)((uint64_t)args->b + (uint64_t)spare);
    plan.max_pages = args->max_pages;
    plan.cp_world = args->cp_world;
    plan.cp_rank = args->cp_rank;
    plan.workspace = args->workspace;
    plan.workspace_bytes = args->workspace_bytes;
    OF(lengths) lengths = {sizeof lengths, args->b, args->seqlens, {1}};
    size_t bytes = 0;
    OF(plan_workspace)(module, &plan, &bytes);
    if (OF(plan_make)(module, &plan) != 0 || OF(plan_update)(module, &plan, &lengths, NULL) != 0) return;
    has_launched();
    if (OF(call_planned)(module, args, &plan, NULL) > 0) fail();
    planned += has_launched();
}
#endif

static void call(const Module* module, Args* args, int spare) {
    size_t bytes = 0;
    int status = OF(call)(module, args, NULL);
    if (status > 0 || (status == 0) != (OF(check)(module, args) == 0)) fail();
    launched += has_launched();
    refused += status < 0;
    OF(workspace)(module, args, &bytes);
#ifdef PLANNED
    call_with_a_plan(module, args, spare);
#else
    (void)spare;
#endif
    OF(contiguous)(args);
}

static void open_modules(Module** modules) {
    static const int sms[kModules] = {132, 2};
    for (int i = 0; i < kModules; i++) {
        stub_device(9, 0, sms[i], 227 << 10, 50 << 20, (size_t)1 << 36);
        if (OF(open)(&modules[i]) != 0) fail();
    }
}

int main(int count, char** words) {
    for (int at = 2; at < count;) {
        int sizes[8], parameters = atoi(words[at + 1]);
        for (int i = 0; i < parameters; i++) sizes[i] = atoi(words[at + 2 + i]);
        stub_entry(words[at], parameters, sizes);
        at += 2 + parameters;
    }
    Module* modules[kModules] = {NULL};
    open_modules(modules);
    FILE* file = fopen(words[1], "rb");
    Args read;
    for (int i = 0; file != NULL && fread(&read, sizeof read, 1, file) == 1; i++) {
        Args* args = malloc(sizeof *args);  // of its own, so that what lies beyond it is not ours
        if (args == NULL) abort();
        memcpy(args, &read, sizeof read);
        call(modules[i % 5 == 0], args, i % 3);
        free(args);
    }
    if (file != NULL) fclose(file);
    for (int i = 0; i < kModules; i++) OF(close)(modules[i]);
    printf("launched %lld planned %lld refused %lld\n", (long long)launched, (long long)planned, (long long)refused);
    return 0;
}
