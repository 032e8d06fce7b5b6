// The connection to the simulator, and what the driver and runtime interfaces share.
#define _GNU_SOURCE
#include "stub.h"

#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static int connection = -1, lost;
static char* heap;
static size_t heap_bytes;

static void die(const char* what) {
  fprintf(stderr, "ptxsim run-host: %s\n", what);
  exit(97);
}

static void send_all(const void* data, size_t bytes) {
  for (const char* at = data; bytes;) {
    ssize_t sent = send(connection, at, bytes, MSG_NOSIGNAL);
    if (sent < 0 && errno == EINTR) continue;
    if (sent <= 0) die("the simulator's process has ended");
    at += sent, bytes -= sent;
  }
}

static void receive_all(void* data, size_t bytes) {
  for (char* at = data; bytes;) {
    ssize_t got = recv(connection, at, bytes, 0);
    if (got < 0 && errno == EINTR) continue;
    if (got <= 0) die("the simulator's process has ended");
    at += got, bytes -= got;
  }
}

static int exchange(int op, const void* in, size_t bytes, void* out, size_t capacity, size_t* length) {
  uint32_t head[2] = {op, 0};
  uint64_t size = bytes;
  send_all(head, sizeof head);
  send_all(&size, sizeof size);
  send_all(in, bytes);
  receive_all(head, sizeof head);
  receive_all(&size, sizeof size);
  size_t taken = size < capacity ? size : capacity;
  receive_all(out, taken);
  char rest[256];
  for (size_t left = size - taken; left;) {
    size_t some = left < sizeof rest ? left : sizeof rest;
    receive_all(rest, some);
    left -= some;
  }
  if (length) *length = size;
  return head[0];
}

static void forked(void) { lost = connection >= 0; }

// Connects, and maps the heap at the address that the simulator's process has it at.
static void start(void) {
  const char* path = getenv("PTXSIM_SOCKET");
  if (!path) die("this library only works in a program that `ptxsim run-host` has started");
  struct sockaddr_un address = {.sun_family = AF_UNIX};
  if (strlen(path) >= sizeof address.sun_path) die("PTXSIM_SOCKET is too long");
  strcpy(address.sun_path, path);
  connection = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
  if (connection < 0 || connect(connection, (struct sockaddr*)&address, sizeof address))
    die("cannot connect to the simulator's process");
  struct { uint64_t base, size; char path[256]; } info;
  memset(&info, 0, sizeof info);
  exchange(OP_HELLO, NULL, 0, &info, sizeof info - 1, NULL);
  int file = open(info.path, O_RDWR | O_CLOEXEC);
  if (file < 0) die("cannot open the simulator's memory");
  heap = mmap((void*)info.base, info.size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED_NOREPLACE, file, 0);
  if (heap != (void*)info.base) die("cannot map the simulator's memory: its addresses are taken");
  heap_bytes = info.size;
  close(file);
  pthread_atfork(NULL, NULL, forked);
}

EXPORT int ptxsim_call(int op, const void* in, size_t bytes, void* out, size_t capacity, size_t* length) {
  pthread_mutex_lock(&lock);
  if (connection < 0) start();
  int status = lost ? NOT_INITIALIZED : exchange(op, in, bytes, out, capacity, length);
  pthread_mutex_unlock(&lock);
  return status;
}

EXPORT int ptxsim_call_text(int op, const uint64_t* words, int count, const char* text, void* out, size_t capacity) {
  size_t head = 8 * count, bytes = head + strlen(text);
  char* message = malloc(bytes + 1);
  memcpy(message, words, head);
  memcpy(message + head, text, bytes - head);
  int status = ptxsim_call(op, message, bytes, out, capacity, NULL);
  free(message);
  return status;
}

EXPORT int ptxsim_unsupported(const char* name) {
  return ptxsim_call_text(OP_UNSUPPORTED, NULL, 0, name, NULL, 0);
}

static int in_heap(const void* pointer) {
  return heap && (const char*)pointer >= heap && (const char*)pointer < heap + heap_bytes;
}

EXPORT int ptxsim_range(const void* pointer, Range* range) {
  memset(range, 0, sizeof *range);
  if (!in_heap(pointer)) return INVALID_VALUE;
  uint64_t address = (uint64_t)pointer;
  return ptxsim_call(OP_RANGE, &address, 8, range, sizeof *range, NULL);
}

EXPORT int ptxsim_check(const void* pointer, size_t bytes) {
  if (!bytes || !in_heap(pointer)) return OK;
  Range range;
  int status = ptxsim_range(pointer, &range);
  if (status) return status;
  return (uint64_t)pointer + bytes <= range.base + range.size ? OK : INVALID_VALUE;
}

EXPORT int ptxsim_copy(void* to, const void* from, size_t bytes) {
  if (bytes && (!to || !from)) return INVALID_VALUE;
  int status = ptxsim_check(to, bytes);
  if (!status) status = ptxsim_check(from, bytes);
  if (!status) memmove(to, from, bytes);
  return status;
}

EXPORT int ptxsim_copy_2d(char* to, size_t to_pitch, const char* from, size_t from_pitch, size_t width, size_t height) {
  if (!width || !height) return OK;
  if (width > to_pitch || width > from_pitch) return 12;  // invalid pitch
  int status = ptxsim_check(to, to_pitch * (height - 1) + width);
  if (!status) status = ptxsim_check(from, from_pitch * (height - 1) + width);
  for (size_t row = 0; !status && row < height; row++) memmove(to + row * to_pitch, from + row * from_pitch, width);
  return status;
}

EXPORT int ptxsim_fill(void* to, uint32_t value, size_t width, size_t count) {
  if (count && !to) return INVALID_VALUE;
  int status = ptxsim_check(to, width * count);
  if (status) return status;
  if (width == 1) memset(to, value, count);
  for (size_t i = 0; width > 1 && i < count; i++) memcpy((char*)to + i * width, &value, width);
  return OK;
}

EXPORT int ptxsim_allocate(void** out, size_t bytes, int kind) {
  if (!out) return INVALID_VALUE;
  uint64_t request[2] = {bytes, kind};
  return ptxsim_call(OP_ALLOCATE, request, sizeof request, out, 8, NULL);
}

EXPORT int ptxsim_free(void* pointer) {
  uint64_t address = (uint64_t)pointer;
  return pointer ? ptxsim_call(OP_FREE, &address, 8, NULL, 0, NULL) : OK;
}

// An image is a fat binary (of known length), the wrapper around one, a cubin, or PTX text.
EXPORT int ptxsim_load(const void* image, uint64_t* handle) {
  if (!image) return INVALID_VALUE;
  uint32_t magic;
  memcpy(&magic, image, 4);
  if (magic == 0x466243b1) {
    memcpy(&image, (const char*)image + 8, 8);
    memcpy(&magic, image, 4);
  }
  size_t bytes;
  if (magic == 0xba55ed50) {
    uint16_t head;
    uint64_t body;
    memcpy(&head, (const char*)image + 6, 2);
    memcpy(&body, (const char*)image + 8, 8);
    bytes = head + body;
  } else if (magic == 0x464c457f) {
    bytes = 64;  // an ELF header, which the simulator refuses with a reason
  } else {
    bytes = strlen(image);
  }
  return ptxsim_call(OP_LOAD, image, bytes, handle, 8, NULL);
}

static int send_launch(int op, LaunchRequest* request, const void* buffer, void* out, size_t capacity) {
  char* message = malloc(sizeof *request + request->bytes + 1);
  memcpy(message, request, sizeof *request);
  if (request->bytes) memcpy(message + sizeof *request, buffer, request->bytes);
  int status = ptxsim_call(op, message, sizeof *request + request->bytes, out, capacity, NULL);
  free(message);
  return status;
}

// Fills in what the launch attributes say; those about scheduling and memory policy change no result.
static int read_attributes(LaunchRequest* request, const LaunchAttribute* attributes, unsigned count) {
  for (unsigned i = 0; i < count; i++) {
    switch (attributes[i].id) {
      case 2: request->cooperative = attributes[i].value[0]; break;
      case 4: memcpy(request->cluster, attributes[i].value, sizeof request->cluster); break;
      case 0: case 1: case 3: case 5: case 6: case 8: case 9: case 10: case 11: case 14: case 16: break;
      default: {
        char text[64];
        snprintf(text, sizeof text, "launch attribute %d", attributes[i].id);
        return ptxsim_unsupported(text);
      }
    }
  }
  return OK;
}

static LaunchRequest request_of(uint64_t function, const unsigned* grid, const unsigned* block, unsigned shared) {
  LaunchRequest request = {.function = function, .shared = shared};
  memcpy(request.grid, grid, sizeof request.grid);
  memcpy(request.block, block, sizeof request.block);
  return request;
}

EXPORT int ptxsim_launch(uint64_t function, const unsigned* grid, const unsigned* block, unsigned shared, void** args,
                         const LaunchAttribute* attributes, unsigned count) {
  LaunchRequest request = request_of(function, grid, block, shared);
  int status = read_attributes(&request, attributes, count);
  if (status) return status;
  Parameter layout[4096 / 4];
  size_t length;
  status = ptxsim_call(OP_PARAMETERS, &function, 8, layout, sizeof layout, &length);
  if (status) return status;
  char* buffer = calloc(1, 1 << 16);
  for (size_t i = 0; i < length / sizeof *layout; i++) {
    memcpy(buffer + layout[i].offset, args[i], layout[i].size);
    request.bytes = layout[i].offset + layout[i].size;
  }
  status = send_launch(OP_LAUNCH, &request, buffer, NULL, 0);
  free(buffer);
  return status;
}

EXPORT int ptxsim_launch_buffer(uint64_t function, const unsigned* grid, const unsigned* block, unsigned shared,
                                const void* buffer, size_t bytes) {
  LaunchRequest request = request_of(function, grid, block, shared);
  request.bytes = bytes;
  return send_launch(OP_LAUNCH, &request, buffer, NULL, 0);
}

EXPORT int ptxsim_clusters(int* clusters, uint64_t function, const unsigned* grid, const unsigned* block,
                           unsigned shared, const LaunchAttribute* attributes, unsigned count) {
  LaunchRequest request = request_of(function, grid, block, shared);
  int status = read_attributes(&request, attributes, count);
  return status ? status : send_launch(OP_CLUSTERS, &request, NULL, clusters, 4);
}

EXPORT int ptxsim_attribute(int* value, int attribute) {
  return ptxsim_call(OP_ATTRIBUTE, &attribute, 4, value, 4, NULL);
}

EXPORT int ptxsim_function_attribute(int* value, int attribute, uint64_t function) {
  uint64_t request[2] = {function, attribute};
  return ptxsim_call(OP_FUNCTION_ATTRIBUTE, request, sizeof request, value, 4, NULL);
}

EXPORT int ptxsim_set_function_attribute(uint64_t function, int attribute, int value) {
  int64_t request[3] = {(int64_t)function, attribute, value};
  return ptxsim_call(OP_SET_FUNCTION_ATTRIBUTE, request, sizeof request, NULL, 0, NULL);
}

EXPORT int ptxsim_occupancy(int* blocks, uint64_t function, int threads, size_t shared) {
  uint64_t request[3] = {function, threads, shared};
  return ptxsim_call(OP_OCCUPANCY, request, sizeof request, blocks, 4, NULL);
}

static struct { int code; char name[64], text[160]; } errors[64];

// The names and texts live in the simulator; they are kept here because callers keep the pointers.
static int error_entry(int code) {
  static pthread_mutex_t guard = PTHREAD_MUTEX_INITIALIZER;
  static int used;
  pthread_mutex_lock(&guard);
  int at = 0;
  while (at < used && errors[at].code != code) at++;
  if (at == used && used < 63) {
    char answer[224] = "";
    ptxsim_call(OP_ERROR, &code, 4, answer, sizeof answer - 1, NULL);
    char* split = strchr(answer, '\n');
    if (split) *split = 0;
    errors[at].code = code;
    snprintf(errors[at].name, sizeof errors[at].name, "%.63s", answer);
    snprintf(errors[at].text, sizeof errors[at].text, "%.159s", split ? split + 1 : "");
    used++;
  }
  pthread_mutex_unlock(&guard);
  return at;
}

EXPORT const char* ptxsim_error_name(int code) { return errors[error_entry(code)].name; }
EXPORT const char* ptxsim_error_text(int code) { return errors[error_entry(code)].text; }

EXPORT double ptxsim_now(void) {
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return 1e3 * now.tv_sec + 1e-6 * now.tv_nsec;
}

EXPORT int ptxsim_handle(void** out, unsigned flags, int priority) {
  Handle* handle = calloc(1, sizeof *handle);
  handle->flags = flags;
  handle->priority = priority;
  *out = handle;
  return OK;
}

// Finds a driver function by the name that cuGetProcAddress takes, which leaves the version out.
EXPORT void* ptxsim_entry(const char* name) {
  static const char* versions[] = {"_v4", "_v3", "_v2", ""};
  Dl_info self;
  dladdr((void*)ptxsim_entry, &self);
  void* library = dlopen(self.dli_fname, RTLD_NOW | RTLD_NOLOAD);
  char full[128];
  for (int i = 0; i < 4; i++) {
    snprintf(full, sizeof full, "%s%s", name, versions[i]);
    void* found = dlsym(library, full);
    if (found) return found;
  }
  return NULL;
}
