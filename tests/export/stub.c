// A CUDA driver that launches nothing and writes down what it is asked for, for tests of exported modules.
//
// The log is a sequence of records, which `tests/export/package.py` writes, too:
//   'L' entry[96] grid[3] block[3] shared stream count (id value[3])[count] parameters
//   'F' address value bytes stream
#define EXPORT __attribute__((visibility("default")))

#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { kMaxEntries = 256, kMaxFunctions = 4096, kMaxParameters = 8, kEntryBytes = 96, kLogBytes = 1 << 20 };

struct entry {
    char name[kEntryBytes];
    int count;
    int sizes[kMaxParameters];
};

struct function {
    const struct entry* entry;
    int shared_bytes;  // that it has been allowed
};

struct attribute {
    int id;
    char padding[4];
    unsigned value[16];
};

struct config {
    unsigned grid[3], block[3], shared_bytes;
    void* stream;
    const struct attribute* attributes;
    unsigned count;
};

static struct entry entries[kMaxEntries];
static struct function functions[kMaxFunctions];
static int entry_count, function_count, attributes_of_device[256], loaded, failing;
static size_t device_memory;
static unsigned char written[kLogBytes];
static size_t length;
static char context_one, context_two;
static void *current = &context_one, *before;

static void put(const void* data, size_t bytes) {
    if (length + bytes > sizeof written) abort();
    memcpy(written + length, data, bytes);
    length += bytes;
}

// ---- What the tests say and ask ------------------------------------------------------------------------------------
EXPORT void stub_device(int major, int minor, int sms, int shared, int l2, size_t memory) {
    attributes_of_device[75] = major, attributes_of_device[76] = minor, attributes_of_device[16] = sms;
    attributes_of_device[97] = shared, attributes_of_device[38] = l2;
    device_memory = memory;
}
EXPORT void stub_entry(const char* name, int count, const int* sizes) {
    struct entry* entry = &entries[entry_count++];
    if (entry_count > kMaxEntries || count > kMaxParameters) abort();
    snprintf(entry->name, sizeof entry->name, "%s", name);
    entry->count = count;
    memcpy(entry->sizes, sizes, sizeof(int) * (size_t)count);
}
EXPORT void stub_context(int which) { current = which == 0 ? NULL : which == 1 ? (void*)&context_one : &context_two; }
EXPORT void stub_fail(int status) { failing = status; }
EXPORT int stub_loaded(void) { return loaded; }
EXPORT size_t stub_log(void* out, size_t room) {
    size_t bytes = length < room ? length : room;
    memcpy(out, written, bytes);
    length = 0;
    return bytes;
}

// ---- The driver ----------------------------------------------------------------------------------------------------
EXPORT int cuCtxGetCurrent(void** out) {
    *out = current;
    return 0;
}
EXPORT int cuStreamGetCtx(void* stream, void** out) {
    *out = &context_one;
    return stream == NULL;
}
EXPORT int cuCtxPushCurrent_v2(void* context) {
    before = current;
    current = context;
    return 0;
}
EXPORT int cuCtxPopCurrent_v2(void** out) {
    *out = current;
    current = before;
    return 0;
}
EXPORT int cuCtxGetDevice(int* out) {
    *out = 0;
    return 0;
}
EXPORT int cuDeviceGetAttribute(int* out, int attribute, int device) {
    *out = attributes_of_device[attribute];
    return device;
}
EXPORT int cuDeviceTotalMem_v2(size_t* out, int device) {
    *out = device_memory;
    return device;
}
EXPORT int cuModuleLoadData(void** module, const void* image) {
    if (failing) return failing;
    loaded++;
    *module = (void*)(uintptr_t)image;
    return 0;
}
EXPORT int cuModuleUnload(void* module) {
    loaded--;
    return module == NULL;
}
EXPORT int cuModuleGetFunction(void** function, void* module, const char* name) {
    for (int i = entry_count - 1; i >= 0; i--) {  // as the last module says: structs of an entry's variants differ
        if (strcmp(entries[i].name, name) == 0) {
            if (function_count == kMaxFunctions) abort();
            functions[function_count].entry = &entries[i];
            *function = &functions[function_count++];
            return module == NULL;
        }
    }
    return 500;  // not found
}
EXPORT int cuFuncSetAttribute(void* function, int attribute, int value) {
    if (attribute != 8) return 1;
    ((struct function*)function)->shared_bytes = value;
    return 0;
}
EXPORT int cuFuncLoad(void* function) { return function == NULL; }
EXPORT int cuTensorMapEncodeTiled(void* map, int type, unsigned rank, void* base, const uint64_t* dims,
                                  const uint64_t* strides, const unsigned* box, const unsigned* steps, int interleave,
                                  int swizzle, int promotion, int fill) {
    if ((uintptr_t)map % 64 != 0) return 1;
    unsigned char bytes[128] = {0};
    uint64_t address = (uint64_t)(uintptr_t)base;
    unsigned char codes[6] = {(unsigned char)type,    (unsigned char)rank,      (unsigned char)interleave,
                              (unsigned char)swizzle, (unsigned char)promotion, (unsigned char)fill};
    memcpy(bytes, &address, 8);
    memcpy(bytes + 8, codes, 6);
    memcpy(bytes + 16, dims, 8 * rank);
    memcpy(bytes + 56, strides, 8 * (rank - 1));
    memcpy(bytes + 88, box, 4 * rank);
    memcpy(bytes + 108, steps, 4 * rank);
    memcpy(map, bytes, sizeof bytes);
    return 0;
}
EXPORT int cuLaunchKernelEx(const struct config* config, void* function, void** parameters, void** extra) {
    if (failing) return failing;
    const struct entry* entry = ((const struct function*)function)->entry;
    if (extra != NULL || config->shared_bytes > (unsigned)((const struct function*)function)->shared_bytes) return 1;
    put("L", 1);
    put(entry->name, kEntryBytes);
    put(config->grid, 12);
    put(config->block, 12);
    put(&config->shared_bytes, 4);
    put(&config->stream, 8);
    put(&config->count, 4);
    for (unsigned i = 0; i < config->count; i++) {
        put(&config->attributes[i].id, 4);
        put(config->attributes[i].value, 12);
    }
    for (int i = 0; i < entry->count; i++) put(parameters[i], (size_t)entry->sizes[i]);
    return 0;
}
EXPORT int cuMemsetD8Async(uint64_t address, unsigned char value, size_t bytes, void* stream) {
    uint32_t wide = value;
    uint64_t count = bytes;
    put("F", 1);
    put(&address, 8);
    put(&wide, 4);
    put(&count, 8);
    put(&stream, 8);
    return 0;
}
EXPORT int cuGetErrorName(int status, const char** name) {
    *name = status == 701 ? "CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES" : NULL;
    return *name == NULL;
}
