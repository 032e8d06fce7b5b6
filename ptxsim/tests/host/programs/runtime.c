// What nvcc makes of a program of the runtime interface, by hand: a fat binary (read from the file that FATBIN names),
// a kernel and variables that are registered before main, and launches with and without attributes.
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef struct { unsigned x, y, z; } Dim3;
typedef struct { int id; char pad[4]; unsigned value[16]; } Attribute;
typedef struct { Dim3 grid, block; size_t shared; void* stream; Attribute* attributes; unsigned count; } Config;
void** __cudaRegisterFatBinary(void*);
void __cudaRegisterFatBinaryEnd(void**);
void __cudaUnregisterFatBinary(void**);
void __cudaRegisterFunction(void**, const void*, char*, const char*, int, void*, void*, void*, void*, int*);
void __cudaRegisterVar(void**, const void*, char*, const char*, int, size_t, int, int);
int cudaMalloc(void**, size_t);
int cudaFree(void*);
int cudaMemcpy(void*, const void*, size_t, int);
int cudaMemcpyAsync(void*, const void*, size_t, int, void*);
int cudaMemcpyToSymbol(const void*, const void*, size_t, size_t, int);
int cudaMemset(void*, int, size_t);
int cudaStreamCreate(void**);
int cudaStreamSynchronize(void*);
int cudaEventCreate(void**);
int cudaEventRecord(void*, void*);
int cudaEventElapsedTime(float*, void*, void*);
int cudaLaunchKernel(const void*, Dim3, Dim3, void**, size_t, void*);
int cudaLaunchKernelExC(Config*, const void*, void**);
int cudaOccupancyMaxActiveBlocksPerMultiprocessor(int*, const void*, int, size_t);
int cudaOccupancyMaxActiveClusters(int*, const void*, Config*);
int cudaGetDeviceProperties(void*, int);
int cudaFuncGetAttributes(void*, const void*);
int cudaGetDriverEntryPoint(const char*, void**, uint64_t, int*);
int cudaGraphCreate(void**, unsigned);
int cudaGetLastError(void);
const char* cudaGetErrorName(int);

static char stub;    // its address names the kernel
static float offset; // its address names the variable

static void check(int status, const char* what) {
  if (!status) return;
  printf("%s: %s\n", what, cudaGetErrorName(status));
  exit(3);
}
#define CHECK(call) check(call, #call)

int main(int argc, char** argv) {
  const char* how = argc > 1 ? argv[1] : "";
  static uint64_t image[4096], wrapper[3];
  FILE* file = fopen(getenv("FATBIN"), "rb");
  if (!fread(image, 1, sizeof image, file)) return 5;
  wrapper[0] = 0x1466243b1, wrapper[1] = (uint64_t)image;
  void** handle = __cudaRegisterFatBinary(wrapper);
  __cudaRegisterFunction(handle, &stub, "scale", "scale", -1, NULL, NULL, NULL, NULL, NULL);
  __cudaRegisterVar(handle, &offset, "offset", "offset", 0, 4, 0, 0);
  __cudaRegisterFatBinaryEnd(handle);

  float host[64], one = 1, factor = 3, *data;
  for (int i = 0; i < 64; i++) host[i] = i;
  unsigned count = 64;
  int race = 0, blocks = 0, clusters = 0;
  void *stream, *event, *entry = NULL;
  static struct { char name[256]; char rest[4096]; } properties;
  static struct { size_t sizes[3]; int threads, rest[64]; } attributes;
  CHECK(cudaGetDeviceProperties(&properties, 0));
  CHECK(cudaFuncGetAttributes(&attributes, &stub));
  CHECK(cudaStreamCreate(&stream));
  CHECK(cudaEventCreate(&event));
  CHECK(cudaMalloc((void**)&data, sizeof host));
  CHECK(cudaMemcpyAsync(data, host, sizeof host, 1, stream));
  CHECK(cudaMemcpyToSymbol(&offset, &one, 4, 0, 1));
  void* args[] = {&data, &factor, &count, &race};
  Attribute cluster = {.id = 4, .value = {2, 1, 1}};
  Config config = {{2, 1, 1}, {32, 1, 1}, 128, stream, &cluster, 1};
  if (!strcmp(how, "cluster"))
    CHECK(cudaLaunchKernelExC(&config, &stub, args));
  else
    CHECK(cudaLaunchKernel(&stub, (Dim3){2, 1, 1}, (Dim3){32, 1, 1}, args, 128, stream));
  CHECK(cudaEventRecord(event, stream));
  CHECK(cudaStreamSynchronize(stream));
  float elapsed = -1;
  CHECK(cudaEventElapsedTime(&elapsed, event, event));
  CHECK(cudaMemcpy(host, data, sizeof host, 2));
  for (int i = 0; i < 64; i++)
    if (host[i] != 3.f * i + 1) return printf("wrong at %d: %g\n", i, host[i]), 4;
  CHECK(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, &stub, 1024, 100000));
  CHECK(cudaOccupancyMaxActiveClusters(&clusters, &stub, &config));
  CHECK(cudaGetDriverEntryPoint("cuTensorMapEncodeTiled", &entry, 0, NULL));
  if (!strcmp(how, "graph")) {
    void* graph;
    printf("%s\n", cudaGetErrorName(cudaGraphCreate(&graph, 0)));
  }
  CHECK(cudaFree(data));
  printf("%s: right, %d threads, occupancy %d, %d clusters, %s\n", properties.name, attributes.threads, blocks, clusters,
         entry ? "entry" : "no entry");
  __cudaUnregisterFatBinary(handle);
  return 0;
}
