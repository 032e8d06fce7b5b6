// ---- The handler ---------------------------------------------------------------------------------------------------
// This part is the same in every module. What a module is made of comes before it: types and functions by the names
// module, arguments, open_module, call_module, why, defaults, contiguous; the tables SIZES, ARRAYS and OPTIONS.
//
// With MLA_XLA_HOST defined buffers are the host's: they are copied to the first GPU and back, so that a program can be
// tried with XLA's CPU client. Without it they are the GPU's, and nothing is allocated, waited for or copied.

// The driver's library; a path, such as that of WSL, where it is not found by its name.
#ifndef MLA_CUDA_LIBRARY
#define MLA_CUDA_LIBRARY "libcuda.so.1"
#endif

enum { kWorkspaceAlignment = 256, kMessageBytes = 1280 };

static XLA_FFI_Error* error(const XLA_FFI_Api* api, XLA_FFI_Error_Code code, const char* format, ...) {
    char message[kMessageBytes];
    va_list values;
    va_start(values, format);
    int length = snprintf(message, sizeof message, "%s: ", TARGET_NAME);
    vsnprintf(message + length, sizeof message - (size_t)length, format, values);
    va_end(values);
    XLA_FFI_Error_Create_Args args;
    memset(&args, 0, sizeof args);
    args.struct_size = XLA_FFI_Error_Create_Args_STRUCT_SIZE;
    args.message = message;
    args.errc = code;
    return api->XLA_FFI_Error_Create(&args);
}

// A status of the module as an error of XLA, with the module's words.
static XLA_FFI_Error* checked(const XLA_FFI_Api* api, int status) {
    if (status == 0) return NULL;
    return error(api, status < 0 ? XLA_FFI_Error_Code_INVALID_ARGUMENT : XLA_FFI_Error_Code_INTERNAL, "%s", why());
}

// ---- The driver: only what finds a stream's context ----------------------------------------------------------------
static void* library;
static pthread_once_t library_once = PTHREAD_ONCE_INIT;

static void load_library(void) { library = dlopen(MLA_CUDA_LIBRARY, RTLD_NOW | RTLD_LOCAL); }

static void* driver_function(const char* name) {
    pthread_once(&library_once, load_library);
    return library == NULL ? NULL : dlsym(library, name);
}

static int driver_call(const char* name, void* first, void* second) {
    void* found = driver_function(name);
    int (*function)(void*, void*);
    if (found == NULL) return -1;
    memcpy(&function, &found, sizeof found);
    return function(first, second);
}

#ifndef MLA_XLA_HOST
// Makes the context of a stream current, if the driver tells it; what is current else may do.
static int enter(void* stream) {
    void* context = NULL;
    if (stream == NULL || driver_call("cuStreamGetCtx", stream, &context) != 0) return 0;
    return driver_call("cuCtxPushCurrent_v2", context, NULL) == 0;
}
#else
// Makes the context of the first GPU current.
static int enter(void* stream) {
    static void* context;  // retained for good
    (void)stream;
    if (driver_call("cuInit", NULL, NULL) != 0) return 0;
    if (context == NULL) driver_call("cuDevicePrimaryCtxRetain", &context, NULL);
    return driver_call("cuCtxPushCurrent_v2", context, NULL) == 0;
}
#endif

static void leave(int entered) {
    void* context;
    if (entered) driver_call("cuCtxPopCurrent_v2", &context, NULL);
}

// ---- Modules, one for each context ---------------------------------------------------------------------------------
struct opened {
    void* context;
    module* module;
    struct opened* next;
};

static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static struct opened* all_opened;  // for good: handlers are never unregistered

static int module_of_context(module** out) {
    void* context = NULL;
    driver_call("cuCtxGetCurrent", &context, NULL);
    pthread_mutex_lock(&mutex);
    struct opened* found = all_opened;
    while (found != NULL && found->context != context) found = found->next;
    int status = 0;
    if (found == NULL && (found = calloc(1, sizeof *found)) != NULL) {
        status = open_module(&found->module);
        if (status == 0) {
            found->context = context;
            found->next = all_opened;
            all_opened = found;
        } else {
            free(found);
            found = NULL;
        }
    }
    *out = found == NULL ? NULL : found->module;
    pthread_mutex_unlock(&mutex);
    return status;
}

// ---- What a call says ----------------------------------------------------------------------------------------------
static XLA_FFI_Error* read_option(const XLA_FFI_Api* api, const struct option* option, XLA_FFI_AttrType type,
                                  const void* attribute, arguments* args) {
    const XLA_FFI_Scalar* scalar = attribute;
    char* place = (char*)args + option->offset;
    if (type == XLA_FFI_AttrType_SCALAR && option->is_real) {
        double value;
        float narrow;
        if (scalar->dtype == XLA_FFI_DataType_F64) {
            memcpy(&value, scalar->value, sizeof value);
        } else if (scalar->dtype == XLA_FFI_DataType_F32) {
            memcpy(&narrow, scalar->value, sizeof narrow);
            value = narrow;
        } else {
            return error(api, XLA_FFI_Error_Code_INVALID_ARGUMENT, "%s: expected float64 or float32", option->name);
        }
        memcpy(place, &value, sizeof value);
        return NULL;
    }
    if (type == XLA_FFI_AttrType_SCALAR) {
        int64_t wide = 0;
        int32_t value = 0;
        if (scalar->dtype == XLA_FFI_DataType_S64) {
            memcpy(&wide, scalar->value, sizeof wide);
        } else if (scalar->dtype == XLA_FFI_DataType_S32) {
            memcpy(&value, scalar->value, sizeof value);
            wide = value;
        } else if (scalar->dtype == XLA_FFI_DataType_PRED) {
            wide = *(const unsigned char*)scalar->value != 0;
        } else {
            return error(api, XLA_FFI_Error_Code_INVALID_ARGUMENT, "%s: expected int64, int32 or bool", option->name);
        }
        value = (int32_t)wide;
        if (value != wide) {
            return error(api, XLA_FFI_Error_Code_INVALID_ARGUMENT, "%s: got %lld, expected 32 bits", option->name,
                         (long long)wide);
        }
        memcpy(place, &value, sizeof value);
        return NULL;
    }
    return error(api, XLA_FFI_Error_Code_INVALID_ARGUMENT, "%s: expected a number", option->name);
}

// Attributes by their names; an option that is left out has its default.
static XLA_FFI_Error* read_options(const XLA_FFI_CallFrame* frame, arguments* args) {
    for (int64_t i = 0; i < frame->attrs.size; i++) {
        const XLA_FFI_ByteSpan* name = frame->attrs.names[i];
        const struct option* option = NULL;
        for (int at = 0; at < OPTION_COUNT; at++) {
            const char* known = OPTIONS[at].name;
            if (strlen(known) == name->len && memcmp(known, name->ptr, name->len) == 0) option = &OPTIONS[at];
        }
        if (option == NULL) {
            return error(frame->api, XLA_FFI_Error_Code_INVALID_ARGUMENT, "attribute %.*s: expected one of %s",
                         (int)name->len, name->ptr, OPTION_NAMES);
        }
        XLA_FFI_Error* wrong = read_option(frame->api, option, frame->attrs.types[i], frame->attrs.attrs[i], args);
        if (wrong != NULL) return wrong;
    }
    return NULL;
}

// The size of an axis by those that are known; `unknown` counts the others, and is the place of the last.
static int64_t size_of_axis(const struct axis* axis, const int64_t* sizes, int* unknown, int* place) {
    int64_t product = axis->times;
    *unknown = 0;
    for (int i = 0; i < 2; i++) {
        int at = axis->sizes[i];
        if (at < 0) continue;
        if (sizes[at] < 0) {
            (*unknown)++;
            *place = at;
        } else {
            product *= sizes[at];
        }
    }
    return product;
}

static XLA_FFI_Error* read_shape(const XLA_FFI_Api* api, const struct array* array, const XLA_FFI_Buffer* buffer,
                                 int64_t* sizes) {
    if (buffer->dtype != array->dtype) {
        return error(api, XLA_FFI_Error_Code_INVALID_ARGUMENT, "%s.dtype: expected %s", array->name, array->dtype_name);
    }
    if (buffer->rank != array->rank) {
        return error(api, XLA_FFI_Error_Code_INVALID_ARGUMENT, "%s.ndim: got %lld, expected %d: %s", array->name,
                     (long long)buffer->rank, array->rank, array->shape);
    }
    for (int i = 0; i < array->rank; i++) {
        const struct axis* axis = &array->axes[i];
        int unknown = 0, place = 0;
        int64_t dim = buffer->dims[i], product = size_of_axis(axis, sizes, &unknown, &place);
        int64_t rest = dim - axis->plus;
        int fits = unknown == 0 ? rest == product : unknown == 1 && product > 0 && rest >= 0 && rest % product == 0;
        if (!fits) {
            return error(api, XLA_FFI_Error_Code_INVALID_ARGUMENT, "%s.shape[%d]: got %lld, expected %s of %s",
                         array->name, i, (long long)dim, axis->name, array->shape);
        }
        if (unknown == 1) sizes[place] = rest / product;
    }
    return NULL;
}

// The number of operands and results; a result more is the workspace.
static XLA_FFI_Error* check_counts(const XLA_FFI_CallFrame* frame) {
    if (frame->args.size == OPERAND_COUNT && (frame->rets.size == RESULT_COUNT || frame->rets.size == RESULT_COUNT + 1))
        return NULL;
    return error(frame->api, XLA_FFI_Error_Code_INVALID_ARGUMENT,
                 "got %lld operands and %lld results, expected %d and %d, and one more of uint8 as workspace",
                 (long long)frame->args.size, (long long)frame->rets.size, OPERAND_COUNT, RESULT_COUNT);
}

static XLA_FFI_Error* read_arrays(const XLA_FFI_CallFrame* frame, arguments* args) {
    int64_t sizes[SIZE_COUNT];
    for (int i = 0; i < SIZE_COUNT; i++) sizes[i] = -1;
    XLA_FFI_Error* wrong = check_counts(frame);
    for (int i = 0; wrong == NULL && i < ARRAY_COUNT; i++) {
        const struct array* array = &ARRAYS[i];
        const XLA_FFI_Buffer* operand = array->operand < 0 ? NULL : frame->args.args[array->operand];
        const XLA_FFI_Buffer* result = array->result < 0 ? NULL : frame->rets.rets[array->result];
        if (operand != NULL) wrong = read_shape(frame->api, array, operand, sizes);
        if (wrong == NULL && result != NULL) wrong = read_shape(frame->api, array, result, sizes);
        if (wrong == NULL && operand != NULL && result != NULL && operand->data != result->data) {
            wrong = error(frame->api, XLA_FFI_Error_Code_INVALID_ARGUMENT,
                          "%s: expected the memory of result %d, an alias of operand %d", array->name, array->result,
                          array->operand);
        }
        memcpy((char*)args + array->offset, result != NULL ? (const void*)&result->data : (const void*)&operand->data,
               sizeof(void*));
    }
    for (int i = 0; wrong == NULL && i < SIZE_COUNT; i++) {
        memcpy((char*)args + SIZES[i].offset, &sizes[i], sizeof sizes[i]);
    }
    return wrong;
}

// XLA aligns less than the workspace wants.
static XLA_FFI_Error* read_workspace(const XLA_FFI_CallFrame* frame, arguments* args) {
    if (frame->rets.size == RESULT_COUNT) return NULL;
    const XLA_FFI_Buffer* buffer = frame->rets.rets[RESULT_COUNT];
    if (buffer->dtype != XLA_FFI_DataType_U8 || buffer->rank != 1) {
        return error(frame->api, XLA_FFI_Error_Code_INVALID_ARGUMENT, "workspace: expected one axis of uint8");
    }
    uintptr_t start = (uintptr_t)buffer->data, rest = (uintptr_t)0 - start;
    size_t skipped = (size_t)(rest % kWorkspaceAlignment), bytes = (size_t)buffer->dims[0];
    args->workspace = (void*)(start + skipped);
    args->workspace_bytes = bytes > skipped ? bytes - skipped : 0;
    return NULL;
}

// ---- Buffers of the host -------------------------------------------------------------------------------------------
#ifdef MLA_XLA_HOST
static int64_t bytes_of(const struct array* array, const XLA_FFI_Buffer* buffer) {
    int64_t bytes = array->item_bytes;
    for (int64_t i = 0; i < buffer->rank; i++) bytes *= buffer->dims[i];
    return bytes;
}

static int copy(const char* name, void* to, const void* from, int64_t bytes) {
    void* found = driver_function(name);
    int (*function)(void*, const void*, size_t);
    if (found == NULL) return -1;
    memcpy(&function, &found, sizeof found);
    return bytes == 0 ? 0 : function(to, from, (size_t)bytes);
}

static XLA_FFI_Error* call_with_copies(const XLA_FFI_CallFrame* frame, const module* module, arguments* args) {
    void* memory[ARRAY_COUNT + 1] = {0};
    int status = 0;
    for (int i = 0; i < ARRAY_COUNT && status == 0; i++) {
        const struct array* array = &ARRAYS[i];
        const XLA_FFI_Buffer* buffer =
            array->operand < 0 ? frame->rets.rets[array->result] : frame->args.args[array->operand];
        int64_t bytes = bytes_of(array, buffer);
        status = driver_call("cuMemAlloc_v2", &memory[i], (void*)(uintptr_t)(bytes + 1));
        if (status == 0) status = copy("cuMemcpyHtoD_v2", memory[i], buffer->data, bytes);
        memcpy((char*)args + array->offset, &memory[i], sizeof memory[i]);
    }
    if (status == 0) {
        void* bytes = (void*)(uintptr_t)(args->workspace_bytes + 1);
        status = driver_call("cuMemAlloc_v2", &memory[ARRAY_COUNT], bytes);
        args->workspace = memory[ARRAY_COUNT];
    }
    XLA_FFI_Error* wrong = NULL;
    if (status == 0) wrong = checked(frame->api, call_module(module, args, NULL));
    if (wrong == NULL && status == 0) status = driver_call("cuCtxSynchronize", NULL, NULL);
    for (int i = 0; i < ARRAY_COUNT && wrong == NULL && status == 0; i++) {
        const struct array* array = &ARRAYS[i];
        const XLA_FFI_Buffer* buffer = array->result < 0 ? NULL : frame->rets.rets[array->result];
        if (buffer != NULL) status = copy("cuMemcpyDtoH_v2", buffer->data, memory[i], bytes_of(array, buffer));
    }
    for (int i = 0; i <= ARRAY_COUNT; i++) {
        if (memory[i] != NULL) driver_call("cuMemFree_v2", memory[i], NULL);
    }
    if (wrong == NULL && status != 0) {
        wrong = error(frame->api, XLA_FFI_Error_Code_INTERNAL, "copying: the CUDA driver reports error %d", status);
    }
    return wrong;
}
#endif

// ---- The stages ----------------------------------------------------------------------------------------------------
static XLA_FFI_Error* stream_of(const XLA_FFI_CallFrame* frame, void** stream) {
    *stream = NULL;
#ifndef MLA_XLA_HOST
    XLA_FFI_Stream_Get_Args args;
    memset(&args, 0, sizeof args);
    args.struct_size = XLA_FFI_Stream_Get_Args_STRUCT_SIZE;
    args.ctx = frame->ctx;
    XLA_FFI_Error* wrong = frame->api->XLA_FFI_Stream_Get(&args);
    *stream = args.stream;
    return wrong;
#else
    (void)frame;
    return NULL;
#endif
}

// Loads the kernels: before a capture, in which that is not allowed. Where there is no stream yet, the first call does.
static XLA_FFI_Error* initialize(const XLA_FFI_CallFrame* frame) {
    void* stream;
    module* module;
    XLA_FFI_Error* wrong = stream_of(frame, &stream);
    if (wrong != NULL) {
        XLA_FFI_Error_Destroy_Args args;
        memset(&args, 0, sizeof args);
        args.struct_size = XLA_FFI_Error_Destroy_Args_STRUCT_SIZE;
        args.error = wrong;
        frame->api->XLA_FFI_Error_Destroy(&args);
        return NULL;
    }
    int entered = enter(stream);
    wrong = checked(frame->api, module_of_context(&module));
    leave(entered);
    return wrong;
}

static XLA_FFI_Error* execute(const XLA_FFI_CallFrame* frame) {
    arguments args;
    module* module;
    void* stream;
    defaults(&args);
    XLA_FFI_Error* wrong = read_options(frame, &args);
    if (wrong == NULL) wrong = read_arrays(frame, &args);
    if (wrong == NULL) wrong = read_workspace(frame, &args);
    if (wrong == NULL) wrong = stream_of(frame, &stream);
    if (wrong != NULL) return wrong;
    contiguous(&args);
    int entered = enter(stream);
    wrong = checked(frame->api, module_of_context(&module));
#ifdef MLA_XLA_HOST
    if (wrong == NULL) wrong = call_with_copies(frame, module, &args);
#else
    if (wrong == NULL) wrong = checked(frame->api, call_module(module, &args, stream));
#endif
    leave(entered);
    return wrong;
}

// What XLA asks when the handler is registered.
static void introduce(const XLA_FFI_CallFrame* frame) {
    XLA_FFI_Metadata* metadata = ((XLA_FFI_Metadata_Extension*)frame->extension_start)->metadata;
    metadata->api_version.major_version = XLA_FFI_API_MAJOR;
    metadata->api_version.minor_version = XLA_FFI_API_MINOR;
    metadata->traits = XLA_FFI_HANDLER_TRAITS_COMMAND_BUFFER_COMPATIBLE;
}

static XLA_FFI_Error* handle(XLA_FFI_CallFrame* frame) {
    arguments args;
    if (frame->extension_start != NULL && frame->extension_start->type == XLA_FFI_Extension_Metadata) {
        introduce(frame);
        return NULL;
    }
    switch (frame->stage) {
        case XLA_FFI_ExecutionStage_INSTANTIATE:
            defaults(&args);
            return read_options(frame, &args);
        case XLA_FFI_ExecutionStage_INITIALIZE:
            return initialize(frame);
        case XLA_FFI_ExecutionStage_EXECUTE:
            return execute(frame);
        default:
            return NULL;
    }
}

static XLA_FFI_Error* register_handler(const XLA_FFI_Api* api, XLA_FFI_Handler* handler, const char* platform) {
    XLA_FFI_Handler_Register_Args args;
    memset(&args, 0, sizeof args);
    args.struct_size = XLA_FFI_Handler_Register_Args_STRUCT_SIZE;
    args.name = (XLA_FFI_ByteSpan){TARGET_NAME, sizeof TARGET_NAME - 1};
    args.platform = (XLA_FFI_ByteSpan){platform, strlen(platform)};
    args.bundle.instantiate = args.bundle.prepare = args.bundle.initialize = args.bundle.execute = handler;
    args.traits = XLA_FFI_HANDLER_TRAITS_COMMAND_BUFFER_COMPATIBLE;
    return api->XLA_FFI_Handler_Register(&args);
}
