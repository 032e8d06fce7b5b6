// ---- The driver ----------------------------------------------------------------------------------------------------
// This part is the same in every module. What a module is made of comes before it: TARGETS, KERNELS, KERNEL_COUNT.
//
// The declarations are those of cuda.h, as far as they are used, so that it takes neither the header nor the library to
// build a module. With MLA_CUDA_H defined the compiler compares them with the header's.
#ifdef MLA_CUDA_H
#include <cuda.h>
#endif

// The driver's library; a path, such as that of WSL, where it is not found by its name.
#ifndef MLA_CUDA_LIBRARY
#define MLA_CUDA_LIBRARY "libcuda.so.1"
#endif

enum {
    kAttributeSms = 16,
    kAttributeL2Bytes = 38,
    kAttributeMajor = 75,
    kAttributeMinor = 76,
    kAttributeSharedMost = 97,
    kFunctionDynamicShared = 8,
    kLaunchCluster = 4,
    kLaunchProgrammatic = 6,
    kDriverVersion = 12000,  // of the interfaces that are asked for
};

struct launch_attribute {
    int id;
    char padding[4];
    union {
        unsigned cluster[3];
        int flag;
        char bytes[64];
    } value;
};

struct launch_config {
    unsigned grid[3], block[3], shared_bytes;
    void* stream;
    struct launch_attribute* attributes;
    unsigned attribute_count;
};

struct tensor_map {
    _Alignas(128) uint64_t opaque[16];
};

#ifdef MLA_CUDA_H
_Static_assert(sizeof(struct launch_attribute) == sizeof(CUlaunchAttribute), "cuda.h has other attributes");
_Static_assert(sizeof(struct launch_config) == sizeof(CUlaunchConfig), "cuda.h has another launch configuration");
_Static_assert(sizeof(struct tensor_map) == sizeof(CUtensorMap), "cuda.h has another tensor map");
_Static_assert((int)kAttributeSms == (int)CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT, "cuda.h counts otherwise");
_Static_assert((int)kAttributeL2Bytes == (int)CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE, "cuda.h counts otherwise");
_Static_assert((int)kFunctionDynamicShared == (int)CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, "cuda.h counts");
_Static_assert((int)kLaunchCluster == (int)CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION, "cuda.h counts otherwise");
_Static_assert((int)kLaunchProgrammatic == (int)CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION, "cuda.h counts");
#endif

struct driver {
    void* library;
    int (*context_current)(void** context);
    int (*context_device)(int* device);
    int (*device_attribute)(int* value, int attribute, int device);
    int (*device_memory)(size_t* bytes, int device);
    int (*load)(void** image, const void* data);
    int (*unload)(void* image);
    int (*function)(void** function, void* image, const char* name);
    int (*function_set)(void* function, int attribute, int value);
    int (*encode_tiled)(struct tensor_map* map, int type, unsigned rank, void* base, const uint64_t* dims,
                        const uint64_t* strides, const unsigned* box, const unsigned* steps, int interleave,
                        int swizzle, int promotion, int fill);
    int (*launch)(const struct launch_config* config, void* function, void** parameters, void** extra);
    int (*fill)(uint64_t address, unsigned char value, size_t bytes, void* stream);
    int (*error_name)(int status, const char** name);
    int (*function_load)(void* function);  // since CUDA 12.4; else NULL
};

// What is read from the GPU; a target fixes the rest.
struct device {
    int64_t sm_count, l2_bytes, total_memory;
};

struct module {
    struct driver driver;
    struct device device;
    void* context;
    int target;
    void* images[KERNEL_COUNT];
    void* functions[KERNEL_COUNT];
};

static _Thread_local char reason[1024];

#if defined(__GNUC__)
__attribute__((format(printf, 2, 3)))
#endif
static int refuse(int status, const char* format, ...) {
    va_list values;
    va_start(values, format);
    vsnprintf(reason, sizeof reason, format, values);
    va_end(values);
    return status;
}

static int driver_refuses(const struct driver* driver, int status, const char* what) {
    const char* name = NULL;
    if (driver->error_name == NULL || driver->error_name(status, &name) != 0 || name == NULL) name = "an error";
    return refuse(status, "%s: the CUDA driver reports %s (%d)", what, name, status);
}

// Finds a function of the driver by its plain name; with the suffix where the driver cannot be asked.
static int find(void* library, void* ask, const char* name, const char* suffix, void* place) {
    void* found = NULL;
    if (ask != NULL) {
        int (*get)(const char*, void**, int, uint64_t, void*);
        memcpy(&get, &ask, sizeof get);
        if (get(name, &found, kDriverVersion, 0, NULL) != 0) found = NULL;
    } else {
        char full[64];
        snprintf(full, sizeof full, "%s%s", name, suffix);
        found = dlsym(library, full);
    }
    memcpy(place, &found, sizeof found);
    return found == NULL;
}

static int open_driver(struct driver* driver) {
    const char* file = MLA_CUDA_LIBRARY;
    void* library = driver->library = dlopen(file, RTLD_NOW | RTLD_LOCAL);
    if (library == NULL) return refuse(DEVICE_ERROR, "no CUDA driver: %s; install the driver of the GPU", dlerror());
    void* ask = dlsym(library, "cuGetProcAddress_v2");
    int missing = find(library, ask, "cuCtxGetCurrent", "", &driver->context_current) +
                  find(library, ask, "cuCtxGetDevice", "", &driver->context_device) +
                  find(library, ask, "cuDeviceGetAttribute", "", &driver->device_attribute) +
                  find(library, ask, "cuDeviceTotalMem", "_v2", &driver->device_memory) +
                  find(library, ask, "cuModuleLoadData", "", &driver->load) +
                  find(library, ask, "cuModuleUnload", "", &driver->unload) +
                  find(library, ask, "cuModuleGetFunction", "", &driver->function) +
                  find(library, ask, "cuFuncSetAttribute", "", &driver->function_set) +
                  find(library, ask, "cuTensorMapEncodeTiled", "", &driver->encode_tiled) +
                  find(library, ask, "cuLaunchKernelEx", "", &driver->launch) +
                  find(library, ask, "cuMemsetD8Async", "", &driver->fill) +
                  find(library, ask, "cuGetErrorName", "", &driver->error_name);
    find(library, ask, "cuFuncLoad", "", &driver->function_load);
    if (missing)
        return refuse(DEVICE_ERROR, "%s lacks %d functions: it takes a driver of CUDA 12 or newer", file, missing);
    return 0;
}

static int describe(struct module* module) {
    const struct driver* driver = &module->driver;
    int ordinal = 0, major = 0, minor = 0, sms = 0, l2 = 0, shared = 0;
    size_t memory = 0;
    int status = driver->context_current(&module->context);
    if (status == 0 && module->context == NULL) {
        return refuse(DEVICE_ERROR, "context: got none, expected a current one; call cuCtxSetCurrent before");
    }
    if (status == 0) status = driver->context_device(&ordinal);
    if (status == 0) status = driver->device_attribute(&major, kAttributeMajor, ordinal);
    if (status == 0) status = driver->device_attribute(&minor, kAttributeMinor, ordinal);
    if (status == 0) status = driver->device_attribute(&sms, kAttributeSms, ordinal);
    if (status == 0) status = driver->device_attribute(&l2, kAttributeL2Bytes, ordinal);
    if (status == 0) status = driver->device_attribute(&shared, kAttributeSharedMost, ordinal);
    if (status == 0) status = driver->device_memory(&memory, ordinal);
    if (status != 0) return driver_refuses(driver, status, "looking at the device");
    module->device = (struct device){sms, l2, (int64_t)memory};
    for (module->target = 0; module->target < TARGET_COUNT; module->target++) {
        const struct target* target = &TARGETS[module->target];
        if (target->major != major || target->minor != minor) continue;
        if (sms < 1 || sms > target->max_sms || shared < target->shared_bytes) break;
        return 0;
    }
    return refuse(
        UNSUPPORTED_DEVICE_ERROR,
        "device: got compute capability %d.%d with %d multiprocessors and %d bytes of shared memory per block, "
        "expected one of %s; export for this target, too",
        major, minor, sms, shared, TARGET_NAMES);
}

static int load_kernels(struct module* module) {
    const struct driver* driver = &module->driver;
    for (int i = 0; i < KERNEL_COUNT; i++) {
        const struct kernel* kernel = &KERNELS[i];
        if (kernel->target != module->target) continue;
        int status = driver->load(&module->images[i], kernel->image);
        if (status == 0) status = driver->function(&module->functions[i], module->images[i], kernel->entry);
        if (status == 0 && kernel->shared_bytes > 0) {
            status = driver->function_set(module->functions[i], kFunctionDynamicShared, kernel->shared_bytes);
        }
        // Otherwise the first launch may load it, which a capture does not allow.
        if (status == 0 && driver->function_load != NULL) status = driver->function_load(module->functions[i]);
        if (status != 0) return driver_refuses(driver, status, kernel->entry);
    }
    return 0;
}

static void close_module(struct module* module) {
    if (module == NULL) return;
    for (int i = 0; i < KERNEL_COUNT; i++) {
        if (module->images[i] != NULL) module->driver.unload(module->images[i]);
    }
    if (module->driver.library != NULL) dlclose(module->driver.library);
    free(module);
}

static int open_module(struct module** out) {
    *out = NULL;
    struct module* module = calloc(1, sizeof *module);
    if (module == NULL) return refuse(DEVICE_ERROR, "no memory for a module");
    int status = open_driver(&module->driver);
    if (status == 0) status = describe(module);
    if (status == 0) status = load_kernels(module);
    if (status != 0) {
        close_module(module);
        return status;
    }
    *out = module;
    return 0;
}

static int check_context(const struct module* module) {
    void* context = NULL;
    if (module == NULL) return refuse(ARGUMENT_ERROR, "module: got NULL, expected one that is open");
    int status = module->driver.context_current(&context);
    if (status != 0) return driver_refuses(&module->driver, status, "cuCtxGetCurrent");
    if (context != module->context) {
        return refuse(DEVICE_ERROR,
                      "context: got another one, expected the one that was current when the module was opened");
    }
    return 0;
}

// The driver copies the parameters before it returns.
static inline int launch(const struct module* module, int index, int64_t x, int64_t y, int64_t z, void** parameters,
                         int dependent, void* stream) {
    const struct kernel* kernel = &KERNELS[index];
    struct launch_attribute attributes[2];
    struct launch_config config = {.grid = {(unsigned)x, (unsigned)y, (unsigned)z},
                                   .block = {(unsigned)kernel->threads, 1, 1},
                                   .shared_bytes = (unsigned)kernel->shared_bytes,
                                   .stream = stream,
                                   .attributes = attributes};
    memset(attributes, 0, sizeof attributes);
    if (kernel->cluster > 1) {
        struct launch_attribute* cluster = &attributes[config.attribute_count++];
        cluster->id = kLaunchCluster;
        cluster->value.cluster[0] = (unsigned)kernel->cluster;
        cluster->value.cluster[1] = cluster->value.cluster[2] = 1;
    }
    if (dependent) {
        struct launch_attribute* programmatic = &attributes[config.attribute_count++];
        programmatic->id = kLaunchProgrammatic;
        programmatic->value.flag = 1;
    }
    int status = module->driver.launch(&config, module->functions[index], parameters, NULL);
    return status == 0 ? 0 : driver_refuses(&module->driver, status, kernel->entry);
}

static inline int fill(const struct module* module, int64_t address, int64_t bytes, void* stream) {
    int status = module->driver.fill((uint64_t)address, 0, (size_t)bytes, stream);
    return status == 0 ? 0 : driver_refuses(&module->driver, status, "cuMemsetD8Async");
}

static inline int encode(const struct module* module, struct tensor_map* map, int type, unsigned rank, int64_t base,
                         const uint64_t* dims, const uint64_t* strides, const unsigned* box, int swizzle,
                         int promotion) {
    static const unsigned steps[5] = {1, 1, 1, 1, 1};
    int status = module->driver.encode_tiled(map, type, rank, (void*)(uintptr_t)base, dims, strides, box, steps, 0,
                                             swizzle, promotion, 0);
    return status == 0 ? 0 : driver_refuses(&module->driver, status, "cuTensorMapEncodeTiled");
}

// ---- Arithmetic ----------------------------------------------------------------------------------------------------
// Python's: division rounds down, and integers have no end. Where 64 bits might not do, numbers stop at their ends,
// which lie beyond every limit that they are compared with.

static inline int64_t floor_divide(int64_t a, int64_t b) {
    int64_t quotient = a / b;
    return quotient - (a % b != 0 && (a < 0) != (b < 0));
}

static inline int64_t ceiling_divide(int64_t a, int64_t b) {
    int64_t quotient = a / b;
    return quotient + (a % b != 0 && (a < 0) == (b < 0));
}

static inline int64_t modulo(int64_t a, int64_t b) {
    int64_t rest = a % b;
    return rest != 0 && (rest < 0) != (b < 0) ? rest + b : rest;
}

static inline int64_t least(int64_t a, int64_t b) { return b < a ? b : a; }
static inline int64_t greatest(int64_t a, int64_t b) { return b > a ? b : a; }
static inline int64_t magnitude(int64_t a) { return a == INT64_MIN ? INT64_MAX : a < 0 ? -a : a; }
static inline double least_real(double a, double b) { return b < a ? b : a; }
static inline double greatest_real(double a, double b) { return b > a ? b : a; }
static inline double magnitude_real(double a) { return a < 0 ? -a : a; }

static inline int64_t add(int64_t a, int64_t b) {
    if (b > 0 && a > INT64_MAX - b) return INT64_MAX;
    if (b < 0 && a < INT64_MIN - b) return INT64_MIN;
    return a + b;
}

static inline int64_t subtract(int64_t a, int64_t b) {
    if (b < 0 && a > INT64_MAX + b) return INT64_MAX;
    if (b > 0 && a < INT64_MIN + b) return INT64_MIN;
    return a - b;
}

static inline int64_t multiply(int64_t a, int64_t b) {
    if (a == 0 || b == 0) return 0;
    int negative = (a < 0) != (b < 0);
    uint64_t left = a < 0 ? 0 - (uint64_t)a : (uint64_t)a, right = b < 0 ? 0 - (uint64_t)b : (uint64_t)b;
    if (left > (uint64_t)INT64_MAX / right) return negative ? INT64_MIN : INT64_MAX;
    return negative ? -(int64_t)(left * right) : (int64_t)(left * right);
}
