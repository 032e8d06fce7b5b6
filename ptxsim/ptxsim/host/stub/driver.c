// libcuda.so.1 as far as host programs of PTX kernels need it.
#define _GNU_SOURCE
#include "stub.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef uint64_t Pointer;
typedef struct {
  unsigned grid[3], block[3], shared;
  void* stream;
  const LaunchAttribute* attributes;
  unsigned count;
} LaunchConfig;

static int context;  // the only one: its address is its handle

EXPORT int cuInit(unsigned flags) { (void)flags; return OK; }
EXPORT int cuDriverGetVersion(int* version) { *version = 13000; return OK; }
EXPORT int cuDeviceGetCount(int* count) { *count = 1; return OK; }
EXPORT int cuDeviceGet(int* device, int ordinal) { *device = 0; return ordinal ? INVALID_DEVICE : OK; }
EXPORT int cuDeviceGetAttribute(int* value, int attribute, int device) {
  return device ? INVALID_DEVICE : ptxsim_attribute(value, attribute);
}
EXPORT int cuDeviceComputeCapability(int* major, int* minor, int device) {
  (void)device;
  int status = ptxsim_attribute(major, 75);
  return status ? status : ptxsim_attribute(minor, 76);
}
EXPORT int cuDeviceGetName(char* name, int length, int device) {
  (void)device;
  snprintf(name, length, "ptxsim");
  return OK;
}
EXPORT int cuDeviceGetUuid_v2(char* uuid, int device) { (void)device; memset(uuid, 1, 16); return OK; }
EXPORT int cuDeviceTotalMem_v2(size_t* bytes, int device) {
  (void)device;
  uint64_t both[2];
  int status = ptxsim_call(OP_MEMORY_INFO, NULL, 0, both, sizeof both, NULL);
  *bytes = both[1];
  return status;
}
EXPORT int cuMemGetInfo_v2(size_t* free, size_t* total) {
  uint64_t both[2];
  int status = ptxsim_call(OP_MEMORY_INFO, NULL, 0, both, sizeof both, NULL);
  *free = both[0], *total = both[1];
  return status;
}

EXPORT int cuCtxCreate_v2(void** out, unsigned flags, int device) {
  (void)flags;
  *out = &context;
  return device ? INVALID_DEVICE : OK;
}
EXPORT int cuCtxCreate_v4(void** out, void* parameters, unsigned flags, int device) {
  (void)parameters;
  return cuCtxCreate_v2(out, flags, device);
}
EXPORT int cuCtxDestroy_v2(void* which) { (void)which; return OK; }
EXPORT int cuCtxGetCurrent(void** out) { *out = &context; return OK; }
EXPORT int cuCtxSetCurrent(void* which) { (void)which; return OK; }
EXPORT int cuCtxPushCurrent_v2(void* which) { (void)which; return OK; }
EXPORT int cuCtxPopCurrent_v2(void** out) { if (out) *out = &context; return OK; }
EXPORT int cuCtxGetDevice(int* device) { *device = 0; return OK; }
EXPORT int cuCtxSynchronize(void) { return OK; }
EXPORT int cuCtxGetApiVersion(void* which, unsigned* version) { (void)which; *version = 13000; return OK; }
EXPORT int cuCtxSetLimit(int limit, size_t value) { (void)limit, (void)value; return OK; }
EXPORT int cuCtxSetCacheConfig(int config) { (void)config; return OK; }
EXPORT int cuCtxGetStreamPriorityRange(int* least, int* greatest) { *least = 0, *greatest = -5; return OK; }
EXPORT int cuDevicePrimaryCtxRetain(void** out, int device) { return cuCtxCreate_v2(out, 0, device); }
EXPORT int cuDevicePrimaryCtxRelease_v2(int device) { (void)device; return OK; }
EXPORT int cuDevicePrimaryCtxReset_v2(int device) { (void)device; return OK; }
EXPORT int cuDevicePrimaryCtxSetFlags_v2(int device, unsigned flags) { (void)device, (void)flags; return OK; }
EXPORT int cuDevicePrimaryCtxGetState(int device, unsigned* flags, int* active) {
  (void)device;
  *flags = 0, *active = 1;
  return OK;
}

static int load_file(const char* path, uint64_t* module) {
  FILE* file = fopen(path, "rb");
  if (!file) return 301;  // file not found
  size_t used = 0, room = 1 << 16, got;
  char* text = malloc(room + 1);
  while ((got = fread(text + used, 1, room - used, file)) > 0) {
    used += got;
    if (used == room) text = realloc(text, (room *= 2) + 1);
  }
  text[used] = 0;
  fclose(file);
  int status = ptxsim_load(text, module);
  free(text);
  return status;
}
EXPORT int cuModuleLoadData(uint64_t* module, const void* image) { return ptxsim_load(image, module); }
EXPORT int cuModuleLoadFatBinary(uint64_t* module, const void* image) { return ptxsim_load(image, module); }
EXPORT int cuModuleLoad(uint64_t* module, const char* path) { return load_file(path, module); }
EXPORT int cuModuleLoadDataEx(uint64_t* module, const void* image, unsigned count, int* options, void** values) {
  (void)count, (void)options, (void)values;
  return ptxsim_load(image, module);
}
EXPORT int cuModuleUnload(uint64_t module) { (void)module; return OK; }
EXPORT int cuModuleGetLoadingMode(int* mode) { *mode = 2; return OK; }
EXPORT int cuModuleGetFunction(uint64_t* function, uint64_t module, const char* name) {
  return ptxsim_call_text(OP_GET_FUNCTION, &module, 1, name, function, 8);
}
EXPORT int cuModuleGetGlobal_v2(Pointer* address, size_t* bytes, uint64_t module, const char* name) {
  uint64_t both[2];
  int status = ptxsim_call_text(OP_GET_VARIABLE, &module, 1, name, both, sizeof both);
  if (!status && address) *address = both[0];
  if (!status && bytes) *bytes = both[1];
  return status;
}
EXPORT int cuLibraryLoadData(uint64_t* library, const void* image, int* options, void** values, unsigned count,
                             int* more, void** others, unsigned others_count) {
  (void)options, (void)values, (void)count, (void)more, (void)others, (void)others_count;
  return ptxsim_load(image, library);
}
EXPORT int cuLibraryLoadFromFile(uint64_t* library, const char* path, int* options, void** values, unsigned count,
                                 int* more, void** others, unsigned others_count) {
  (void)options, (void)values, (void)count, (void)more, (void)others, (void)others_count;
  return load_file(path, library);
}
EXPORT int cuLibraryUnload(uint64_t library) { (void)library; return OK; }
EXPORT int cuLibraryGetModule(uint64_t* module, uint64_t library) { *module = library; return OK; }
EXPORT int cuLibraryGetKernel(uint64_t* kernel, uint64_t library, const char* name) {
  return cuModuleGetFunction(kernel, library, name);
}
EXPORT int cuLibraryGetGlobal(Pointer* address, size_t* bytes, uint64_t library, const char* name) {
  return cuModuleGetGlobal_v2(address, bytes, library, name);
}
EXPORT int cuKernelGetFunction(uint64_t* function, uint64_t kernel) { *function = kernel; return OK; }
EXPORT int cuKernelGetAttribute(int* value, int attribute, uint64_t kernel, int device) {
  (void)device;
  return ptxsim_function_attribute(value, attribute, kernel);
}
EXPORT int cuKernelSetAttribute(int attribute, int value, uint64_t kernel, int device) {
  (void)device;
  return ptxsim_set_function_attribute(kernel, attribute, value);
}
EXPORT int cuFuncGetAttribute(int* value, int attribute, uint64_t function) {
  return ptxsim_function_attribute(value, attribute, function);
}
EXPORT int cuFuncSetAttribute(uint64_t function, int attribute, int value) {
  return ptxsim_set_function_attribute(function, attribute, value);
}
EXPORT int cuFuncSetCacheConfig(uint64_t function, int config) { (void)function, (void)config; return OK; }
EXPORT int cuFuncLoad(uint64_t function) { (void)function; return OK; }

// A parameter buffer is given by a list of (1, its address), (2, the address of its size), 0.
static int launch_extra(uint64_t function, const LaunchConfig* config, void** extra) {
  const void* buffer = NULL;
  size_t bytes = 0;
  for (; extra && *extra; extra += 2) {
    if (*extra == (void*)1) buffer = extra[1];
    if (*extra == (void*)2) bytes = *(size_t*)extra[1];
  }
  if (config->count) return ptxsim_unsupported("launch attributes with a parameter buffer");
  return ptxsim_launch_buffer(function, config->grid, config->block, config->shared, buffer, bytes);
}
EXPORT int cuLaunchKernelEx(const LaunchConfig* config, uint64_t function, void** args, void** extra) {
  if (!args && extra) return launch_extra(function, config, extra);
  return ptxsim_launch(function, config->grid, config->block, config->shared, args, config->attributes, config->count);
}
EXPORT int cuLaunchKernel(uint64_t function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by,
                          unsigned bz, unsigned shared, void* stream, void** args, void** extra) {
  LaunchConfig config = {{gx, gy, gz}, {bx, by, bz}, shared, stream, NULL, 0};
  return cuLaunchKernelEx(&config, function, args, extra);
}
EXPORT int cuLaunchCooperativeKernel(uint64_t function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by,
                                     unsigned bz, unsigned shared, void* stream, void** args) {
  LaunchAttribute together = {.id = 2, .value = {1}};
  LaunchConfig config = {{gx, gy, gz}, {bx, by, bz}, shared, stream, &together, 1};
  return cuLaunchKernelEx(&config, function, args, NULL);
}

EXPORT int cuMemAlloc_v2(Pointer* out, size_t bytes) { return ptxsim_allocate((void**)out, bytes, MEMORY_DEVICE); }
EXPORT int cuMemAllocPitch_v2(Pointer* out, size_t* pitch, size_t width, size_t height, unsigned element) {
  (void)element;
  *pitch = (width + 511) / 512 * 512;
  return ptxsim_allocate((void**)out, *pitch * height, MEMORY_DEVICE);
}
EXPORT int cuMemAllocManaged(Pointer* out, size_t bytes, unsigned flags) {
  (void)flags;
  return ptxsim_allocate((void**)out, bytes, MEMORY_MANAGED);
}
EXPORT int cuMemAllocAsync(Pointer* out, size_t bytes, void* stream) { (void)stream; return cuMemAlloc_v2(out, bytes); }
EXPORT int cuMemFree_v2(Pointer pointer) { return ptxsim_free((void*)pointer); }
EXPORT int cuMemFreeAsync(Pointer pointer, void* stream) { (void)stream; return cuMemFree_v2(pointer); }
EXPORT int cuMemAllocHost_v2(void** out, size_t bytes) { return ptxsim_allocate(out, bytes, MEMORY_HOST); }
EXPORT int cuMemHostAlloc(void** out, size_t bytes, unsigned flags) { (void)flags; return cuMemAllocHost_v2(out, bytes); }
EXPORT int cuMemFreeHost(void* pointer) { return ptxsim_free(pointer); }
EXPORT int cuMemHostGetDevicePointer_v2(Pointer* out, void* pointer, unsigned flags) {
  (void)flags;
  *out = (Pointer)pointer;
  return ptxsim_check(pointer, 1);
}
EXPORT int cuMemGetAddressRange_v2(Pointer* base, size_t* bytes, Pointer pointer) {
  Range range;
  int status = ptxsim_range((void*)pointer, &range);
  if (base) *base = range.base;
  if (bytes) *bytes = range.size;
  return status;
}
EXPORT int cuPointerGetAttribute(void* out, int attribute, Pointer pointer) {
  Range range;
  int status = ptxsim_range((void*)pointer, &range);
  if (status) return status;
  switch (attribute) {
    case 1: memcpy(out, &(void*){&context}, 8); return OK;
    case 2: memcpy(out, &(int){range.kind == MEMORY_HOST ? 1 : 2}, 4); return OK;
    case 3: case 4: memcpy(out, &pointer, 8); return OK;
    case 8: memcpy(out, &(int){range.kind == MEMORY_MANAGED}, 4); return OK;
    case 9: memset(out, 0, 4); return OK;
    case 11: memcpy(out, &range.base, 8); return OK;
    case 12: memcpy(out, &range.size, 8); return OK;
    default: return ptxsim_unsupported("cuPointerGetAttribute with this attribute");
  }
}

EXPORT int cuMemcpy(Pointer to, Pointer from, size_t bytes) { return ptxsim_copy((void*)to, (void*)from, bytes); }
EXPORT int cuMemcpyAsync(Pointer to, Pointer from, size_t bytes, void* stream) {
  (void)stream;
  return cuMemcpy(to, from, bytes);
}
EXPORT int cuMemcpyHtoD_v2(Pointer to, const void* from, size_t bytes) { return cuMemcpy(to, (Pointer)from, bytes); }
EXPORT int cuMemcpyDtoH_v2(void* to, Pointer from, size_t bytes) { return cuMemcpy((Pointer)to, from, bytes); }
EXPORT int cuMemcpyDtoD_v2(Pointer to, Pointer from, size_t bytes) { return cuMemcpy(to, from, bytes); }
EXPORT int cuMemcpyHtoDAsync_v2(Pointer to, const void* from, size_t bytes, void* stream) {
  return cuMemcpyAsync(to, (Pointer)from, bytes, stream);
}
EXPORT int cuMemcpyDtoHAsync_v2(void* to, Pointer from, size_t bytes, void* stream) {
  return cuMemcpyAsync((Pointer)to, from, bytes, stream);
}
EXPORT int cuMemcpyDtoDAsync_v2(Pointer to, Pointer from, size_t bytes, void* stream) {
  return cuMemcpyAsync(to, from, bytes, stream);
}
EXPORT int cuMemsetD8_v2(Pointer to, unsigned char value, size_t count) { return ptxsim_fill((void*)to, value, 1, count); }
EXPORT int cuMemsetD16_v2(Pointer to, uint16_t value, size_t count) { return ptxsim_fill((void*)to, value, 2, count); }
EXPORT int cuMemsetD32_v2(Pointer to, unsigned value, size_t count) { return ptxsim_fill((void*)to, value, 4, count); }
EXPORT int cuMemsetD8Async(Pointer to, unsigned char value, size_t count, void* stream) {
  (void)stream;
  return cuMemsetD8_v2(to, value, count);
}
EXPORT int cuMemsetD16Async(Pointer to, uint16_t value, size_t count, void* stream) {
  (void)stream;
  return cuMemsetD16_v2(to, value, count);
}
EXPORT int cuMemsetD32Async(Pointer to, unsigned value, size_t count, void* stream) {
  (void)stream;
  return cuMemsetD32_v2(to, value, count);
}

EXPORT int cuStreamCreate(void** out, unsigned flags) { return ptxsim_handle(out, flags, 0); }
EXPORT int cuStreamCreateWithPriority(void** out, unsigned flags, int priority) {
  return ptxsim_handle(out, flags, priority);
}
EXPORT int cuStreamDestroy_v2(void* stream) { free(stream); return OK; }
EXPORT int cuStreamSynchronize(void* stream) { (void)stream; return OK; }
EXPORT int cuStreamQuery(void* stream) { (void)stream; return OK; }
EXPORT int cuStreamWaitEvent(void* stream, void* event, unsigned flags) { (void)stream, (void)event, (void)flags; return OK; }
EXPORT int cuStreamIsCapturing(void* stream, int* status) { (void)stream; *status = 0; return OK; }
EXPORT int cuStreamGetCtx(void* stream, void** out) { (void)stream; *out = &context; return OK; }
EXPORT int cuLaunchHostFunc(void* stream, void (*function)(void*), void* data) { (void)stream; function(data); return OK; }
EXPORT int cuEventCreate(void** out, unsigned flags) { return ptxsim_handle(out, flags, 0); }
EXPORT int cuEventDestroy_v2(void* event) { free(event); return OK; }
EXPORT int cuEventRecord(void* event, void* stream) {
  (void)stream;
  Handle* handle = event;
  handle->time = ptxsim_now();
  handle->recorded = 1;
  return OK;
}
EXPORT int cuEventSynchronize(void* event) { (void)event; return OK; }
EXPORT int cuEventQuery(void* event) { (void)event; return OK; }
EXPORT int cuEventElapsedTime_v2(float* milliseconds, void* start, void* end) {
  Handle *first = start, *last = end;
  if (!first->recorded || !last->recorded) return 400;  // invalid resource handle
  *milliseconds = last->time - first->time;
  return OK;
}
EXPORT int cuEventElapsedTime(float* milliseconds, void* start, void* end) {
  return cuEventElapsedTime_v2(milliseconds, start, end);
}

EXPORT int cuOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, uint64_t function, int threads, size_t shared) {
  return ptxsim_occupancy(blocks, function, threads, shared);
}
EXPORT int cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int* blocks, uint64_t function, int threads,
                                                                size_t shared, unsigned flags) {
  (void)flags;
  return ptxsim_occupancy(blocks, function, threads, shared);
}
EXPORT int cuOccupancyMaxActiveClusters(int* clusters, uint64_t function, const LaunchConfig* config) {
  return ptxsim_clusters(clusters, function, config->grid, config->block, config->shared, config->attributes,
                         config->count);
}

// Tensor maps: the lists follow the scalars, 64-bit words all.
static int encode(int op, void* map, uint64_t* words, int count) {
  return ptxsim_call(op, words, 8 * count, map, 128, NULL);
}
EXPORT int cuTensorMapEncodeTiled(void* map, int type, unsigned rank, void* address, const uint64_t* dims,
                                  const uint64_t* strides, const unsigned* box, const unsigned* steps, int interleave,
                                  int swizzle, int promotion, int fill) {
  if (rank < 1 || rank > 5) return INVALID_VALUE;
  uint64_t words[32] = {type, rank, (uint64_t)address, interleave, swizzle, promotion, fill};
  int at = 7;
  for (unsigned i = 0; i < rank; i++) words[at++] = dims[i];
  for (unsigned i = 0; i + 1 < rank; i++) words[at++] = strides[i];
  for (unsigned i = 0; i < rank; i++) words[at++] = box[i];
  for (unsigned i = 0; i < rank; i++) words[at++] = steps[i];
  return encode(OP_TENSOR_TILED, map, words, at);
}
EXPORT int cuTensorMapEncodeIm2col(void* map, int type, unsigned rank, void* address, const uint64_t* dims,
                                   const uint64_t* strides, const int* lower, const int* upper, unsigned channels,
                                   unsigned pixels, const unsigned* steps, int interleave, int swizzle, int promotion,
                                   int fill) {
  if (rank < 3 || rank > 5) return INVALID_VALUE;
  uint64_t words[32] = {type, rank, (uint64_t)address, interleave, swizzle, promotion, fill, channels, pixels};
  int at = 9;
  for (unsigned i = 0; i < rank; i++) words[at++] = dims[i];
  for (unsigned i = 0; i + 1 < rank; i++) words[at++] = strides[i];
  for (unsigned i = 0; i + 2 < rank; i++) words[at++] = (int64_t)lower[i];
  for (unsigned i = 0; i + 2 < rank; i++) words[at++] = (int64_t)upper[i];
  for (unsigned i = 0; i < rank; i++) words[at++] = steps[i];
  return encode(OP_TENSOR_IM2COL, map, words, at);
}
EXPORT int cuTensorMapReplaceAddress(void* map, void* address) {
  uint64_t words[17];
  memcpy(words, map, 128);
  words[16] = (uint64_t)address;
  return encode(OP_TENSOR_ADDRESS, map, words, 17);
}

EXPORT int cuGetErrorName(int code, const char** out) { *out = ptxsim_error_name(code); return OK; }
EXPORT int cuGetErrorString(int code, const char** out) { *out = ptxsim_error_text(code); return OK; }
EXPORT int cuGetProcAddress_v2(const char* name, void** out, int version, uint64_t flags, int* status) {
  (void)version, (void)flags;
  *out = ptxsim_entry(name);
  if (status) *status = *out ? 0 : 1;
  return *out ? OK : NOT_FOUND;
}
EXPORT int cuGetProcAddress(const char* name, void** out, int version, uint64_t flags) {
  return cuGetProcAddress_v2(name, out, version, flags, NULL);
}
// The private tables that a statically linked runtime asks for.
EXPORT int cuGetExportTable(const void** table, const void* id) {
  (void)id;
  *table = NULL;
  return ptxsim_unsupported("cuGetExportTable (is the CUDA runtime linked statically? build with nvcc -cudart shared)");
}
