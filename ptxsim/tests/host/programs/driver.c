// A host program of the driver interface: scales an array with a kernel that it loads from a file, in one of several ways.
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef void* Handle;
typedef unsigned long long Address;
int cuInit(unsigned);
int cuDeviceGet(int*, int);
int cuDeviceGetAttribute(int*, int, int);
int cuCtxCreate_v2(Handle*, unsigned, int);
int cuModuleLoad(Handle*, const char*);
int cuModuleGetFunction(Handle*, Handle, const char*);
int cuModuleGetGlobal_v2(Address*, size_t*, Handle, const char*);
int cuFuncGetAttribute(int*, int, Handle);
int cuFuncSetAttribute(Handle, int, int);
int cuMemAlloc_v2(Address*, size_t);
int cuMemFree_v2(Address);
int cuMemcpyHtoD_v2(Address, const void*, size_t);
int cuMemcpyDtoH_v2(void*, Address, size_t);
int cuMemsetD32_v2(Address, unsigned, size_t);
int cuLaunchKernel(Handle, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, Handle, void**, void**);
int cuGetErrorName(int, const char**);
int cuGetProcAddress_v2(const char*, void**, int, uint64_t, int*);
int cuTensorMapEncodeTiled(void*, int, unsigned, void*, const uint64_t*, const uint64_t*, const unsigned*,
                           const unsigned*, int, int, int, int);

static void check(int status, const char* what) {
  if (!status) return;
  const char* name;
  cuGetErrorName(status, &name);
  printf("%s: %s\n", what, name);
  exit(3);
}
#define CHECK(call) check(call, #call)

int main(int argc, char** argv) {
  const char* how = argc > 2 ? argv[2] : "";
  int device, major, sms;
  Handle context, module, scale;
  CHECK(cuInit(0));
  CHECK(cuDeviceGet(&device, 0));
  CHECK(cuCtxCreate_v2(&context, 0, device));
  CHECK(cuModuleLoad(&module, argv[1]));
  CHECK(cuDeviceGetAttribute(&major, 75, device));
  CHECK(cuDeviceGetAttribute(&sms, 16, device));
  CHECK(cuModuleGetFunction(&scale, module, "scale"));

  float host[64];
  for (int i = 0; i < 64; i++) host[i] = i;
  Address data, offset;
  size_t bytes;
  CHECK(cuMemAlloc_v2(&data, sizeof host));
  CHECK(cuMemcpyHtoD_v2(data, host, sizeof host));
  CHECK(cuModuleGetGlobal_v2(&offset, &bytes, module, "offset"));
  CHECK(cuMemsetD32_v2(offset, 0x3f800000, bytes / 4));
  float factor = 3;
  unsigned count = strcmp(how, "bounds") ? 64 : 96;
  unsigned shared = strcmp(how, "shared") ? 256 : 50000;
  if (!strcmp(how, "opt-in")) CHECK(cuFuncSetAttribute(scale, 8, shared = 50000));
  int exchange = !strcmp(how, "exchange");
  void* args[] = {&data, &factor, &count, &exchange};
  struct __attribute__((packed)) { Address data; float factor; unsigned count; int exchange; } buffer = {data, factor, count, exchange};
  size_t size = sizeof buffer;
  void* extra[] = {(void*)1, &buffer, (void*)2, &size, NULL};
  int by_buffer = !strcmp(how, "buffer");
  CHECK(cuLaunchKernel(scale, (count + 63) / 64, 1, 1, 64, 1, 1, shared, NULL, by_buffer ? NULL : args, by_buffer ? extra : NULL));
  CHECK(cuMemcpyDtoH_v2(host, data, sizeof host));
  for (int i = 0; i < 64; i++)
    if (host[i] != 3.f * i + 1) return printf("wrong at %d: %g\n", i, host[i]), 4;
  if (!strcmp(how, "beyond")) CHECK(cuMemcpyDtoH_v2(host, data + 4, sizeof host));
  if (!strcmp(how, "map")) {
    uint64_t map[16] __attribute__((aligned(64))), dims[2] = {8, 8}, stride = 30;
    unsigned box[2] = {8, 8}, step[2] = {1, 1};
    CHECK(cuTensorMapEncodeTiled(map, 7, 2, (void*)data, dims, &stride, box, step, 0, 0, 0, 0));
  }
  CHECK(cuMemFree_v2(data));
  void* absent;
  int found;
  printf("right on %d SMs of sm_%d0, %s\n", sms, major,
         cuGetProcAddress_v2("cuMemAlloc", &absent, 13000, 0, &found) || cuGetProcAddress_v2("cuAbsent", &absent, 13000, 0, &found) != 500 ? "?" : "entries found");
  return 0;
}
