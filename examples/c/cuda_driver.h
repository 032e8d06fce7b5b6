// The few functions of the CUDA driver that the examples use, loaded at run time: neither CUDA's headers nor its
// library is needed to compile. A program that has cuda.h includes that instead.
#ifndef CUDA_DRIVER_H
#define CUDA_DRIVER_H

#include <dlfcn.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef uint64_t CUdeviceptr;

// Points *place, a pointer to a function, at the driver's function of this name. Copied, since ISO C has no conversion
// between pointers to objects and pointers to functions.
static inline void cuda_find(const char* name, void* place) {
    void* library = dlopen("libcuda.so.1", RTLD_NOW);
    void* found = library == NULL ? NULL : dlsym(library, name);
    if (found == NULL) {
        fprintf(stderr, "%s\n", dlerror());
        exit(1);
    }
    memcpy(place, &found, sizeof found);
}

static inline void cuda_check(int status, const char* what) {
    if (status != 0) {
        fprintf(stderr, "%s: the CUDA driver reports error %d\n", what, status);
        exit(1);
    }
}

// Makes the first GPU's context current.
static inline void cuda_start(void) {
    void* context = NULL;
    int device = 0;
    int (*init)(unsigned);
    int (*get)(int*, int);
    int (*retain)(void**, int);
    int (*set_current)(void*);
    cuda_find("cuInit", &init);
    cuda_find("cuDeviceGet", &get);
    cuda_find("cuDevicePrimaryCtxRetain", &retain);
    cuda_find("cuCtxSetCurrent", &set_current);
    cuda_check(init(0), "cuInit");
    cuda_check(get(&device, 0), "cuDeviceGet");
    cuda_check(retain(&context, device), "cuDevicePrimaryCtxRetain");
    cuda_check(set_current(context), "cuCtxSetCurrent");
}

// Memory of the GPU, with a copy of what `data` points to, if it is not NULL.
static inline void* cuda_memory(const void* data, size_t bytes) {
    CUdeviceptr address = 0;
    int (*allocate)(CUdeviceptr*, size_t);
    int (*copy)(CUdeviceptr, const void*, size_t);
    if (bytes == 0) return NULL;
    cuda_find("cuMemAlloc_v2", &allocate);
    cuda_find("cuMemcpyHtoD_v2", &copy);
    cuda_check(allocate(&address, bytes), "cuMemAlloc");
    if (data != NULL) cuda_check(copy(address, data, bytes), "cuMemcpyHtoD");
    return (void*)(uintptr_t)address;
}

// Waits for everything, then copies from the GPU.
static inline void cuda_fetch(void* out, const void* address, size_t bytes) {
    int (*synchronize)(void);
    int (*copy)(void*, CUdeviceptr, size_t);
    cuda_find("cuCtxSynchronize", &synchronize);
    cuda_find("cuMemcpyDtoH_v2", &copy);
    cuda_check(synchronize(), "cuCtxSynchronize");
    cuda_check(copy(out, (CUdeviceptr)(uintptr_t)address, bytes), "cuMemcpyDtoH");
}

#endif  // CUDA_DRIVER_H
