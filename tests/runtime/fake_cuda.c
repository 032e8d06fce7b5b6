// A CUDA driver without a GPU: it records what a launch was given, so that a test can see the very bytes that the
// real driver would read. Only what CudaDriver calls.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdint.h>
#include <string.h>

typedef struct {
  uint32_t id;
  char pad[4];
  union {
    char bytes[64];
    uint32_t dim[3];
    int flag;
  } value;
} Attribute;
typedef struct {
  uint32_t grid[3], block[3], smem;
  void* stream;
  Attribute* attrs;
  uint32_t count;
} Config;

typedef struct {
  Config config;
  Attribute attrs[4];
  void *function, *first, *context;
  char argument[16];
  int launches, pushes, pops;
} Seen;

Seen mla_seen;
void* mla_context = (void*)0xC0;
int mla_status = 0;
int mla_capturing = 0;
uint64_t mla_map[32];

int cuLaunchKernelEx(const Config* config, void* function, void** arguments, void** extra) {
  mla_seen.config = *config;
  memcpy(mla_seen.attrs, config->attrs, config->count * sizeof(Attribute));
  mla_seen.function = function;
  mla_seen.first = arguments[0];
  memcpy(mla_seen.argument, arguments[0], sizeof mla_seen.argument);
  mla_seen.context = mla_context;
  mla_seen.launches++;
  return mla_status;
}
int cuCtxGetCurrent(void** context) {
  *context = mla_context;
  return 0;
}
static void* before;
int cuCtxPushCurrent(void* context) {
  before = mla_context;
  mla_context = context;
  mla_seen.pushes++;
  return 0;
}
int cuCtxPopCurrent(void** context) {
  if (context) *context = mla_context;
  mla_context = before;
  mla_seen.pops++;
  return 0;
}
int cuStreamIsCapturing(void* stream, int* state) {
  *state = mla_capturing;
  return 0;
}
int cuMemsetD8Async(uint64_t ptr, unsigned char value, uint64_t count, void* stream) {
  mla_map[0] = ptr;
  mla_map[1] = value;
  mla_map[2] = count;
  mla_map[3] = (uint64_t)stream;
  return mla_status;
}
int cuTensorMapEncodeTiled(void* map, int type, uint32_t rank, void* base, const uint64_t* dims,
                           const uint64_t* strides, const uint32_t* box, const uint32_t* steps, int interleave,
                           int swizzle, int l2, int fill) {
  uint64_t* out = map;
  memset(out, 0, 128);
  out[0] = (uint64_t)map;
  out[1] = type;
  out[2] = rank;
  out[3] = (uint64_t)base;
  out[4] = dims[0];
  out[5] = dims[rank - 1];
  out[6] = strides[rank - 2];
  out[7] = box[0];
  out[8] = box[rank - 1];
  out[9] = steps[rank - 1];
  out[10] = interleave;
  out[11] = swizzle;
  out[12] = l2;
  out[13] = fill;
  return mla_status;
}
int cuInit(unsigned flags) {
  return 0;
}
int cuGetProcAddress_v2(const char* name, void** function, int version, uint64_t flags, void* result) {
  *function = dlsym(RTLD_DEFAULT, name);
  if (!*function) {
    void* self = dlopen("libcuda.so.1", RTLD_LAZY | RTLD_NOLOAD);
    *function = self ? dlsym(self, name) : 0;
  }
  return *function ? 0 : 500;
}
