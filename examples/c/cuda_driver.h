// The few functions of the CUDA driver that the examples use, loaded at run time: neither CUDA's headers nor its
// library is needed to compile. A program that has cuda.h includes that instead.
#ifndef CUDA_DRIVER_H
#define CUDA_DRIVER_H

#include <dlfcn.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

typedef uint64_t CUdeviceptr;

static inline void* cuda_function(const char* name) {
    void* library = dlopen("libcuda.so.1", RTLD_NOW);
    void* found = library == NULL ? NULL : dlsym(library, name);
    if (found == NULL) {
        fprintf(stderr, "%s\n", dlerror());
        exit(1);
    }
    return found;
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
    cuda_check(((int (*)(unsigned))cuda_function("cuInit"))(0), "cuInit");
    cuda_check(((int (*)(int*, int))cuda_function("cuDeviceGet"))(&device, 0), "cuDeviceGet");
    cuda_check(((int (*)(void**, int))cuda_function("cuDevicePrimaryCtxRetain"))(&context, device),
               "cuDevicePrimaryCtxRetain");
    cuda_check(((int (*)(void*))cuda_function("cuCtxSetCurrent"))(context), "cuCtxSetCurrent");
}

// Memory of the GPU, with a copy of what `data` points to, if it is not NULL.
static inline void* cuda_memory(const void* data, size_t bytes) {
    CUdeviceptr address = 0;
    if (bytes == 0) return NULL;
    cuda_check(((int (*)(CUdeviceptr*, size_t))cuda_function("cuMemAlloc_v2"))(&address, bytes), "cuMemAlloc");
    if (data != NULL) {
        int (*copy)(CUdeviceptr, const void*, size_t) =
            (int (*)(CUdeviceptr, const void*, size_t))cuda_function("cuMemcpyHtoD_v2");
        cuda_check(copy(address, data, bytes), "cuMemcpyHtoD");
    }
    return (void*)(uintptr_t)address;
}

// Waits for everything, then copies from the GPU.
static inline void cuda_fetch(void* out, const void* address, size_t bytes) {
    int (*copy)(void*, CUdeviceptr, size_t) = (int (*)(void*, CUdeviceptr, size_t))cuda_function("cuMemcpyDtoH_v2");
    cuda_check(((int (*)(void))cuda_function("cuCtxSynchronize"))(), "cuCtxSynchronize");
    cuda_check(copy(out, (CUdeviceptr)(uintptr_t)address, bytes), "cuMemcpyDtoH");
}

#endif  // CUDA_DRIVER_H
