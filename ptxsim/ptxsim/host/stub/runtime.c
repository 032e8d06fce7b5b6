// libcudart.so.N as far as host programs of PTX kernels need it.
#define _GNU_SOURCE
#include "stub.h"

#include <stdlib.h>
#include <string.h>

typedef struct {
  Dim3 grid, block;
  size_t shared;
  void* stream;
  const LaunchAttribute* attributes;
  unsigned count;
} LaunchConfig;
typedef struct { void* pointer; size_t pitch, width, height; } Pitched;
typedef struct { size_t x, y, z; } Triple;
typedef struct { void* from_array; Triple from_at; Pitched from; void* to_array; Triple to_at; Pitched to; Triple extent; int kind; } Copy3D;

static __thread int last_error;

static int done(int status) {
  if (status) last_error = status;
  return status;
}

static unsigned* dims(Dim3* value) { return &value->x; }

EXPORT int cudaGetLastError(void) {
  int status = last_error;
  last_error = OK;
  return status;
}
EXPORT int cudaPeekAtLastError(void) { return last_error; }
EXPORT const char* cudaGetErrorString(int code) { return ptxsim_error_text(code); }
EXPORT const char* cudaGetErrorName(int code) { return ptxsim_error_name(code); }

EXPORT int cudaGetDeviceCount(int* count) { *count = 1; return OK; }
EXPORT int cudaGetDevice(int* device) { *device = 0; return OK; }
EXPORT int cudaSetDevice(int device) { return done(device ? INVALID_DEVICE : OK); }
EXPORT int cudaInitDevice(int device, unsigned options, unsigned flags) {
  (void)options, (void)flags;
  return cudaSetDevice(device);
}
EXPORT int cudaSetDeviceFlags(unsigned flags) { (void)flags; return OK; }
EXPORT int cudaGetDeviceFlags(unsigned* flags) { *flags = 0; return OK; }
EXPORT int cudaSetValidDevices(int* devices, int count) { (void)devices, (void)count; return OK; }
EXPORT int cudaChooseDevice(int* device, const void* properties) { (void)properties; *device = 0; return OK; }
EXPORT int cudaDeviceSynchronize(void) { return last_error == 719 || last_error == 700 ? last_error : OK; }
EXPORT int cudaThreadSynchronize(void) { return cudaDeviceSynchronize(); }
EXPORT int cudaDeviceReset(void) { return OK; }
EXPORT int cudaThreadExit(void) { return OK; }
EXPORT int cudaDeviceSetLimit(int limit, size_t value) { (void)limit, (void)value; return OK; }
EXPORT int cudaDeviceSetCacheConfig(int config) { (void)config; return OK; }
EXPORT int cudaDeviceSetSharedMemConfig(int config) { (void)config; return OK; }
EXPORT int cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
  if (least) *least = 0;
  if (greatest) *greatest = -5;
  return OK;
}
EXPORT int cudaDeviceCanAccessPeer(int* can, int device, int peer) { (void)device, (void)peer; *can = 0; return OK; }
EXPORT int cudaDeviceGetAttribute(int* value, int attribute, int device) {
  return done(device ? INVALID_DEVICE : ptxsim_attribute(value, attribute));
}
EXPORT int cudaDriverGetVersion(int* version) { *version = 13000; return OK; }
EXPORT int cudaRuntimeGetVersion(int* version) { *version = 1000 * CUDART; return OK; }
EXPORT int cudaMemGetInfo(size_t* free, size_t* total) {
  uint64_t both[2];
  int status = ptxsim_call(OP_MEMORY_INFO, NULL, 0, both, sizeof both, NULL);
  *free = both[0], *total = both[1];
  return done(status);
}

static int properties(void* out, int device) {
  if (device) return done(INVALID_DEVICE);
  int version = CUDART;
  return done(ptxsim_call(OP_PROPERTIES, &version, 4, out, 4096, NULL));
}
#if CUDART >= 13
EXPORT int cudaGetDeviceProperties(void* out, int device) { return properties(out, device); }
#else  // this name has the layout of CUDA 11 there
EXPORT int cudaGetDeviceProperties(void* out, int device) {
  (void)out, (void)device;
  return done(ptxsim_unsupported("cudaGetDeviceProperties of CUDA 11"));
}
#endif
EXPORT int cudaGetDeviceProperties_v2(void* out, int device) { return properties(out, device); }

EXPORT int cudaMalloc(void** out, size_t bytes) { return done(ptxsim_allocate(out, bytes, MEMORY_DEVICE)); }
EXPORT int cudaMallocManaged(void** out, size_t bytes, unsigned flags) {
  (void)flags;
  return done(ptxsim_allocate(out, bytes, MEMORY_MANAGED));
}
EXPORT int cudaMallocHost(void** out, size_t bytes) { return done(ptxsim_allocate(out, bytes, MEMORY_HOST)); }
EXPORT int cudaHostAlloc(void** out, size_t bytes, unsigned flags) { (void)flags; return cudaMallocHost(out, bytes); }
EXPORT int cudaMallocAsync(void** out, size_t bytes, void* stream) { (void)stream; return cudaMalloc(out, bytes); }
EXPORT int cudaMallocAsync_ptsz(void** out, size_t bytes, void* stream) { (void)stream; return cudaMalloc(out, bytes); }
EXPORT int cudaMallocPitch(void** out, size_t* pitch, size_t width, size_t height) {
  *pitch = (width + 511) / 512 * 512;
  return cudaMalloc(out, *pitch * height);
}
EXPORT int cudaMalloc3D(Pitched* out, Triple extent) {
  out->width = extent.x, out->height = extent.y;
  return cudaMallocPitch(&out->pointer, &out->pitch, extent.x, extent.y * extent.z);
}
EXPORT int cudaFree(void* pointer) { return done(ptxsim_free(pointer)); }
EXPORT int cudaFreeHost(void* pointer) { return cudaFree(pointer); }
EXPORT int cudaFreeAsync(void* pointer, void* stream) { (void)stream; return cudaFree(pointer); }
EXPORT int cudaFreeAsync_ptsz(void* pointer, void* stream) { (void)stream; return cudaFree(pointer); }
EXPORT int cudaHostGetDevicePointer(void** out, void* pointer, unsigned flags) {
  (void)flags;
  *out = pointer;
  return done(ptxsim_check(pointer, 1));
}
EXPORT int cudaPointerGetAttributes(void* out, const void* pointer) {
  struct { int type, device; const void *on_device, *on_host; } found = {0, 0, pointer, pointer};
  Range range;
  if (ptxsim_range(pointer, &range) == OK) found.type = range.kind;
  if (found.type == MEMORY_DEVICE) found.on_host = NULL;
  if (!found.type) found.on_device = found.on_host = NULL, found.device = -2;
  memcpy(out, &found, sizeof found);
  return OK;
}

EXPORT int cudaMemcpy(void* to, const void* from, size_t bytes, int kind) {
  (void)kind;
  return done(ptxsim_copy(to, from, bytes));
}
EXPORT int cudaMemcpyAsync(void* to, const void* from, size_t bytes, int kind, void* stream) {
  (void)stream;
  return cudaMemcpy(to, from, bytes, kind);
}
EXPORT int cudaMemcpyAsync_ptsz(void* to, const void* from, size_t bytes, int kind, void* stream) {
  return cudaMemcpyAsync(to, from, bytes, kind, stream);
}
EXPORT int cudaMemcpy2D(void* to, size_t to_pitch, const void* from, size_t from_pitch, size_t width, size_t height, int kind) {
  (void)kind;
  return done(ptxsim_copy_2d(to, to_pitch, from, from_pitch, width, height));
}
EXPORT int cudaMemcpy2DAsync(void* to, size_t to_pitch, const void* from, size_t from_pitch, size_t width, size_t height,
                             int kind, void* stream) {
  (void)stream;
  return cudaMemcpy2D(to, to_pitch, from, from_pitch, width, height, kind);
}
EXPORT int cudaMemcpy3D(const Copy3D* copy) {
  if (copy->from_array || copy->to_array) return done(ptxsim_unsupported("cudaMemcpy3D of arrays"));
  int status = OK;
  for (size_t z = 0; !status && z < copy->extent.z; z++) {
    size_t from = ((copy->from_at.z + z) * copy->from.height + copy->from_at.y) * copy->from.pitch + copy->from_at.x;
    size_t to = ((copy->to_at.z + z) * copy->to.height + copy->to_at.y) * copy->to.pitch + copy->to_at.x;
    status = ptxsim_copy_2d((char*)copy->to.pointer + to, copy->to.pitch, (char*)copy->from.pointer + from,
                            copy->from.pitch, copy->extent.x, copy->extent.y);
  }
  return done(status);
}
EXPORT int cudaMemcpy3DAsync(const Copy3D* copy, void* stream) { (void)stream; return cudaMemcpy3D(copy); }
EXPORT int cudaMemset(void* to, int value, size_t bytes) { return done(ptxsim_fill(to, value & 255, 1, bytes)); }
EXPORT int cudaMemsetAsync(void* to, int value, size_t bytes, void* stream) { (void)stream; return cudaMemset(to, value, bytes); }
EXPORT int cudaMemsetAsync_ptsz(void* to, int value, size_t bytes, void* stream) {
  return cudaMemsetAsync(to, value, bytes, stream);
}
EXPORT int cudaMemset2D(void* to, size_t pitch, int value, size_t width, size_t height) {
  int status = OK;
  for (size_t row = 0; !status && row < height; row++) status = cudaMemset((char*)to + row * pitch, value, width);
  return status;
}
EXPORT int cudaMemset2DAsync(void* to, size_t pitch, int value, size_t width, size_t height, void* stream) {
  (void)stream;
  return cudaMemset2D(to, pitch, value, width, height);
}
// Managed memory lies in one place, so these hints change nothing.
EXPORT int cudaMemPrefetchAsync(void) { return OK; }
EXPORT int cudaMemAdvise(void) { return OK; }

static int symbol(const void* name, uint64_t* both) {
  uint64_t address = (uint64_t)name;
  return ptxsim_call(OP_SYMBOL, &address, 8, both, 16, NULL);
}
static int copy_symbol(const void* name, char* other, size_t bytes, size_t offset, int to_symbol) {
  uint64_t both[2];
  int status = symbol(name, both);
  if (status) return done(status);
  if (offset + bytes > both[1]) return done(INVALID_VALUE);
  char* place = (char*)both[0] + offset;
  return done(to_symbol ? ptxsim_copy(place, other, bytes) : ptxsim_copy(other, place, bytes));
}
EXPORT int cudaMemcpyToSymbol(const void* name, const void* from, size_t bytes, size_t offset, int kind) {
  (void)kind;
  return copy_symbol(name, (char*)from, bytes, offset, 1);
}
EXPORT int cudaMemcpyToSymbolAsync(const void* name, const void* from, size_t bytes, size_t offset, int kind, void* stream) {
  (void)stream;
  return cudaMemcpyToSymbol(name, from, bytes, offset, kind);
}
EXPORT int cudaMemcpyFromSymbol(void* to, const void* name, size_t bytes, size_t offset, int kind) {
  (void)kind;
  return copy_symbol(name, to, bytes, offset, 0);
}
EXPORT int cudaMemcpyFromSymbolAsync(void* to, const void* name, size_t bytes, size_t offset, int kind, void* stream) {
  (void)stream;
  return cudaMemcpyFromSymbol(to, name, bytes, offset, kind);
}
EXPORT int cudaGetSymbolAddress(void** out, const void* name) {
  uint64_t both[2];
  int status = symbol(name, both);
  if (!status) *out = (void*)both[0];
  return done(status);
}
EXPORT int cudaGetSymbolSize(size_t* out, const void* name) {
  uint64_t both[2];
  int status = symbol(name, both);
  if (!status) *out = both[1];
  return done(status);
}

EXPORT int cudaStreamCreate(void** out) { return ptxsim_handle(out, 0, 0); }
EXPORT int cudaStreamCreateWithFlags(void** out, unsigned flags) { return ptxsim_handle(out, flags, 0); }
EXPORT int cudaStreamCreateWithPriority(void** out, unsigned flags, int priority) {
  return ptxsim_handle(out, flags, priority);
}
EXPORT int cudaStreamDestroy(void* stream) { free(stream); return OK; }
EXPORT int cudaStreamSynchronize(void* stream) { (void)stream; return cudaDeviceSynchronize(); }
EXPORT int cudaStreamSynchronize_ptsz(void* stream) { return cudaStreamSynchronize(stream); }
EXPORT int cudaStreamQuery(void* stream) { (void)stream; return cudaDeviceSynchronize(); }
EXPORT int cudaStreamWaitEvent(void* stream, void* event, unsigned flags) { (void)stream, (void)event, (void)flags; return OK; }
EXPORT int cudaStreamIsCapturing(void* stream, int* status) { (void)stream; *status = 0; return OK; }
EXPORT int cudaStreamGetPriority(void* stream, int* priority) { *priority = stream ? ((Handle*)stream)->priority : 0; return OK; }
EXPORT int cudaStreamGetFlags(void* stream, unsigned* flags) { *flags = stream ? ((Handle*)stream)->flags : 0; return OK; }
EXPORT int cudaStreamAttachMemAsync(void* stream, void* pointer, size_t bytes, unsigned flags) {
  (void)stream, (void)pointer, (void)bytes, (void)flags;
  return OK;
}
EXPORT int cudaStreamAddCallback(void* stream, void (*function)(void*, int, void*), void* data, unsigned flags) {
  (void)flags;
  function(stream, OK, data);
  return OK;
}
EXPORT int cudaLaunchHostFunc(void* stream, void (*function)(void*), void* data) { (void)stream; function(data); return OK; }
EXPORT int cudaEventCreate(void** out) { return ptxsim_handle(out, 0, 0); }
EXPORT int cudaEventCreateWithFlags(void** out, unsigned flags) { return ptxsim_handle(out, flags, 0); }
EXPORT int cudaEventDestroy(void* event) { free(event); return OK; }
EXPORT int cudaEventRecord(void* event, void* stream) {
  (void)stream;
  Handle* handle = event;
  handle->time = ptxsim_now();
  handle->recorded = 1;
  return OK;
}
EXPORT int cudaEventRecord_ptsz(void* event, void* stream) { return cudaEventRecord(event, stream); }
EXPORT int cudaEventRecordWithFlags(void* event, void* stream, unsigned flags) { (void)flags; return cudaEventRecord(event, stream); }
EXPORT int cudaEventSynchronize(void* event) { (void)event; return cudaDeviceSynchronize(); }
EXPORT int cudaEventQuery(void* event) { (void)event; return cudaDeviceSynchronize(); }
EXPORT int cudaEventElapsedTime(float* milliseconds, void* start, void* end) {
  Handle *first = start, *last = end;
  if (!first->recorded || !last->recorded) return done(400);  // invalid resource handle
  *milliseconds = last->time - first->time;
  return OK;
}
EXPORT int cudaProfilerStart(void) { return OK; }
EXPORT int cudaProfilerStop(void) { return OK; }

EXPORT int cudaFuncGetAttributes(void* out, const void* function) {
  uint64_t id = (uint64_t)function;
  return done(ptxsim_call(OP_FUNCTION_ATTRIBUTES, &id, 8, out, 256, NULL));
}
EXPORT int cudaFuncSetAttribute(const void* function, int attribute, int value) {
  return done(ptxsim_set_function_attribute((uint64_t)function, attribute, value));
}
EXPORT int cudaFuncSetCacheConfig(const void* function, int config) { (void)function, (void)config; return OK; }
EXPORT int cudaFuncSetSharedMemConfig(const void* function, int config) { (void)function, (void)config; return OK; }
EXPORT int cudaGetFuncBySymbol(const void** out, const void* symbol) { *out = symbol; return OK; }
EXPORT int cudaGetKernel(const void** out, const void* symbol) { *out = symbol; return OK; }
EXPORT int cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, const void* function, int threads, size_t shared) {
  return done(ptxsim_occupancy(blocks, (uint64_t)function, threads, shared));
}
EXPORT int cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int* blocks, const void* function, int threads,
                                                                  size_t shared, unsigned flags) {
  (void)flags;
  return cudaOccupancyMaxActiveBlocksPerMultiprocessor(blocks, function, threads, shared);
}
EXPORT int cudaOccupancyMaxActiveClusters(int* clusters, const void* function, LaunchConfig* config) {
  return done(ptxsim_clusters(clusters, (uint64_t)function, dims(&config->grid), dims(&config->block), config->shared,
                              config->attributes, config->count));
}

EXPORT int cudaLaunchKernelExC(LaunchConfig* config, const void* function, void** args) {
  return done(ptxsim_launch((uint64_t)function, dims(&config->grid), dims(&config->block), config->shared, args,
                            config->attributes, config->count));
}
EXPORT int cudaLaunchKernelExC_ptsz(LaunchConfig* config, const void* function, void** args) {
  return cudaLaunchKernelExC(config, function, args);
}
EXPORT int cudaLaunchKernel(const void* function, Dim3 grid, Dim3 block, void** args, size_t shared, void* stream) {
  (void)stream;
  return done(ptxsim_launch((uint64_t)function, dims(&grid), dims(&block), shared, args, NULL, 0));
}
EXPORT int cudaLaunchKernel_ptsz(const void* function, Dim3 grid, Dim3 block, void** args, size_t shared, void* stream) {
  return cudaLaunchKernel(function, grid, block, args, shared, stream);
}
EXPORT int cudaLaunchCooperativeKernel(const void* function, Dim3 grid, Dim3 block, void** args, size_t shared, void* stream) {
  (void)stream;
  LaunchAttribute together = {.id = 2, .value = {1}};
  return done(ptxsim_launch((uint64_t)function, dims(&grid), dims(&block), shared, args, &together, 1));
}

EXPORT int cudaGetDriverEntryPoint(const char* name, void** out, uint64_t flags, int* status) {
  (void)flags;
  *out = ptxsim_entry(name);
  if (status) *status = *out ? 0 : 1;
  return OK;
}
EXPORT int cudaGetDriverEntryPointByVersion(const char* name, void** out, unsigned version, uint64_t flags, int* status) {
  (void)version;
  return cudaGetDriverEntryPoint(name, out, flags, status);
}

// What the host code of nvcc calls: before main to register, and around each launch.
static __thread struct { Dim3 grid, block; size_t shared; void* stream; } pending[8];
static __thread int depth;

EXPORT unsigned __cudaPushCallConfiguration(Dim3 grid, Dim3 block, size_t shared, void* stream) {
  if (depth == 8) return 1;
  pending[depth].grid = grid, pending[depth].block = block;
  pending[depth].shared = shared, pending[depth++].stream = stream;
  return 0;
}
EXPORT int __cudaPopCallConfiguration(Dim3* grid, Dim3* block, size_t* shared, void** stream) {
  if (!depth) return 52;  // missing configuration
  *grid = pending[--depth].grid, *block = pending[depth].block;
  *shared = pending[depth].shared, *stream = pending[depth].stream;
  return OK;
}
EXPORT int __cudaGetKernel(const void** out, const void* symbol) { *out = symbol; return OK; }
EXPORT int __cudaLaunchKernel(const void* function, Dim3 grid, Dim3 block, void** args, size_t shared, void* stream) {
  return cudaLaunchKernel(function, grid, block, args, shared, stream);
}
EXPORT int __cudaLaunchKernel_ptsz(const void* function, Dim3 grid, Dim3 block, void** args, size_t shared, void* stream) {
  return cudaLaunchKernel(function, grid, block, args, shared, stream);
}
EXPORT void** __cudaRegisterFatBinary(const void* image) {
  uint64_t handle = 0;
  done(ptxsim_load(image, &handle));
  return (void**)handle;
}
EXPORT void __cudaRegisterFatBinaryEnd(void** handle) { (void)handle; }
EXPORT void __cudaUnregisterFatBinary(void** handle) { (void)handle; }
EXPORT char __cudaInitModule(void** handle) { (void)handle; return 1; }
EXPORT void __cudaRegisterFunction(void** handle, const void* host, char* device, const char* name, int limit, void* a,
                                   void* b, void* c, void* d, int* e) {
  (void)device, (void)limit, (void)a, (void)b, (void)c, (void)d, (void)e;
  uint64_t words[2] = {(uint64_t)handle, (uint64_t)host};
  ptxsim_call_text(OP_REGISTER_FUNCTION, words, 2, name, NULL, 0);
}
EXPORT void __cudaRegisterVar(void** handle, const void* host, char* address, const char* name, int external,
                              size_t bytes, int constant, int global) {
  (void)address, (void)external, (void)bytes, (void)constant, (void)global;
  uint64_t words[2] = {(uint64_t)handle, (uint64_t)host};
  ptxsim_call_text(OP_REGISTER_VARIABLE, words, 2, name, NULL, 0);
}
EXPORT void __cudaRegisterManagedVar(void** handle, void** host, char* address, const char* name, int external,
                                     size_t bytes, int constant, int global) {
  __cudaRegisterVar(handle, host, address, name, external, bytes, constant, global);
  uint64_t both[2];
  if (!symbol(host, both)) *host = (void*)both[0];
}
