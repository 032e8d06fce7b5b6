// What the two stub libraries share: the connection to the simulator, and the few CUDA types whose layout they need.
// Every call that is more than bookkeeping goes to the simulator's process; builder.py defines the OP_ numbers.
#pragma once
#include <stddef.h>
#include <stdint.h>

#define EXPORT __attribute__((visibility("default")))

// Error codes that the driver and the runtime share.
enum {
  OK = 0, INVALID_VALUE = 1, OUT_OF_MEMORY = 2, NOT_INITIALIZED = 3, INVALID_CONFIGURATION = 9, INVALID_SYMBOL = 13,
  INVALID_DEVICE_POINTER = 17, INVALID_DEVICE = 101, INVALID_CONTEXT = 201, NOT_FOUND = 500, NOT_SUPPORTED = 801
};

typedef struct { unsigned x, y, z; } Dim3;
typedef struct { int id; char pad[4]; uint32_t value[16]; } LaunchAttribute;
typedef struct { uint32_t offset, size; } Parameter;

// A launch as the simulator's process receives it; the parameter buffer follows.
typedef struct {
  uint64_t function;
  uint32_t grid[3], block[3], cluster[3];
  uint32_t shared, cooperative, bytes;
} LaunchRequest;

// Sends one request; copies at most `capacity` bytes of the answer to `out`, its length to `*length` unless null.
int ptxsim_call(int op, const void* in, size_t bytes, void* out, size_t capacity, size_t* length);
int ptxsim_call_text(int op, const uint64_t* words, int count, const char* text, void* out, size_t capacity);
// Reports a function that the stub lacks; returns NOT_SUPPORTED.
int ptxsim_unsupported(const char* name);
// Tells whether a range of the shared heap lies inside one allocation (memory outside the heap is the program's own).
int ptxsim_check(const void* pointer, size_t bytes);
int ptxsim_copy(void* to, const void* from, size_t bytes);
int ptxsim_copy_2d(char* to, size_t to_pitch, const char* from, size_t from_pitch, size_t width, size_t height);
int ptxsim_fill(void* to, uint32_t value, size_t width, size_t count);
int ptxsim_allocate(void** out, size_t bytes, int kind);
int ptxsim_free(void* pointer);
int ptxsim_load(const void* image, uint64_t* handle);
int ptxsim_launch(uint64_t function, const unsigned* grid, const unsigned* block, unsigned shared, void** args,
                  const LaunchAttribute* attributes, unsigned count);
int ptxsim_launch_buffer(uint64_t function, const unsigned* grid, const unsigned* block, unsigned shared,
                         const void* buffer, size_t bytes);
int ptxsim_attribute(int* value, int attribute);
int ptxsim_function_attribute(int* value, int attribute, uint64_t function);
int ptxsim_set_function_attribute(uint64_t function, int attribute, int value);
int ptxsim_occupancy(int* blocks, uint64_t function, int threads, size_t shared);
int ptxsim_clusters(int* clusters, uint64_t function, const unsigned* grid, const unsigned* block, unsigned shared,
                    const LaunchAttribute* attributes, unsigned count);
const char* ptxsim_error_name(int code);
const char* ptxsim_error_text(int code);
double ptxsim_now(void);
void* ptxsim_entry(const char* name);

// Kinds of memory, numbered as cudaMemoryType.
enum { MEMORY_HOST = 1, MEMORY_DEVICE = 2, MEMORY_MANAGED = 3 };
typedef struct { uint64_t base, size, kind; } Range;
int ptxsim_range(const void* pointer, Range* range);

// A stream or event: all work is done when a call returns, so an event only remembers when it was recorded.
typedef struct { double time; int recorded; unsigned flags; int priority; } Handle;
int ptxsim_handle(void** out, unsigned flags, int priority);
