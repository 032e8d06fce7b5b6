// Decode as functions of TVM-FFI, over an exported module: tensors of any library that knows DLPack, the stream that
// TVM-FFI calls current, and launches with clusters and programmatic dependence.
//
//     mla-cupy export --op decode --h-q 16 --page-size 64 --arch sm_90a --out build/decode
//     gcc -std=c11 -O2 -fPIC -c build/decode/*.c
//     g++ $(tvm-ffi-config --cxxflags) -fPIC -shared -Ibuild/decode examples/tvm_ffi/decode.cc mla_decode*.o
//         $(tvm-ffi-config --ldflags --libs) -ldl -o build/decode/libdecode.so      (one command)
#include <mla_decode.h>
#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/error.h>
#include <tvm/ffi/extra/c_env_api.h>
#include <tvm/ffi/function.h>

#include <initializer_list>
#include <map>
#include <mutex>

namespace {

using tvm::ffi::TensorView;

void check(int status) {
    if (status != 0) TVM_FFI_THROW(ValueError) << mla_decode_why();
}

// The kernels, loaded once for each device. Its context must be current, as it is where a tensor has been made.
const mla_decode_module* module_of(DLDevice device) {
    static std::mutex mutex;
    static std::map<int, mla_decode_module*> opened;
    const std::lock_guard<std::mutex> lock(mutex);
    mla_decode_module*& module = opened[device.device_id];
    if (module == nullptr) check(mla_decode_open(&module));
    return module;
}

// Checks a tensor, and returns its address; strides are written to where the module reads them.
template <int kStrides>
void* take(const char* name, const TensorView& tensor, DLDevice device, DLDataType dtype,
           std::initializer_list<int64_t> shape, int64_t (&strides)[kStrides]) {
    const DLDataType got = tensor.dtype();
    if (tensor.device().device_type != kDLCUDA || tensor.device().device_id != device.device_id)
        TVM_FFI_THROW(ValueError) << name << ": expected a tensor on the GPU " << device.device_id;
    if (got.code != dtype.code || got.bits != dtype.bits || got.lanes != dtype.lanes)
        TVM_FFI_THROW(TypeError) << name << ": expected another dtype, see mla_decode.h";
    if (tensor.ndim() != static_cast<int>(shape.size()))
        TVM_FFI_THROW(ValueError) << name << ".ndim: got " << tensor.ndim() << ", expected " << shape.size();
    int axis = 0;
    for (const int64_t size : shape) {
        if (tensor.size(axis) != size)
            TVM_FFI_THROW(ValueError) << name << ".shape[" << axis << "]: got " << tensor.size(axis) << ", expected "
                                      << size;
        if (axis < kStrides) {
            strides[axis] = tensor.stride(axis);
        } else if (size > 1 && tensor.stride(axis) != 1) {
            TVM_FFI_THROW(ValueError) << name << ": expected a contiguous last axis";
        }
        axis++;
    }
    return static_cast<char*>(tensor.data_ptr()) + tensor.byte_offset();
}

constexpr DLDataType kBFloat16 = {kDLBfloat, 16, 1}, kFloat32 = {kDLFloat, 32, 1}, kInt32 = {kDLInt, 32, 1};

mla_decode_args arguments(const TensorView& q, const TensorView& kv_cache, const TensorView& block_table,
                          const TensorView& seqlens, const TensorView& out, const TensorView& lse) {
    constexpr int64_t kHeads = MLA_DECODE_H_Q, kTokens = MLA_DECODE_S_Q, kPage = MLA_DECODE_PAGE_SIZE;
    const DLDevice gpu = q.device();
    mla_decode_args args;
    mla_decode_defaults(&args);
    args.scale = 1;  // any: only calls depend on it
    const int64_t b = args.b = q.size(0), pages = args.num_pages = kv_cache.size(0);
    const int64_t max_pages = args.max_pages = block_table.size(1);
    args.q =
        static_cast<uint16_t*>(take("q", q, gpu, kBFloat16, {b, kTokens, kHeads, MLA_DECODE_D_QK}, args.q_strides));
    args.kv_cache = static_cast<uint16_t*>(
        take("kv_cache", kv_cache, gpu, kBFloat16, {pages, kPage, MLA_DECODE_WIDTH}, args.kv_cache_strides));
    args.block_table =
        static_cast<int32_t*>(take("block_table", block_table, gpu, kInt32, {b, max_pages}, args.block_table_strides));
    args.seqlens = static_cast<int32_t*>(take("seqlens", seqlens, gpu, kInt32, {b}, args.seqlens_strides));
    args.out = static_cast<uint16_t*>(
        take("out", out, gpu, kBFloat16, {b, kTokens, kHeads, MLA_DECODE_D_V}, args.out_strides));
    args.lse = static_cast<float*>(take("lse", lse, gpu, kFloat32, {b, kHeads, kTokens}, args.lse_strides));
    return args;
}

int64_t workspace_bytes(TensorView q, TensorView kv_cache, TensorView block_table, TensorView seqlens, TensorView out,
                        TensorView lse) {
    const mla_decode_args args = arguments(q, kv_cache, block_table, seqlens, out, lse);
    size_t bytes = 0;
    check(mla_decode_workspace(module_of(q.device()), &args, &bytes));
    return static_cast<int64_t>(bytes);
}

// Results and workspace, bytes of the GPU, are the caller's: nothing is allocated, so that a CUDA graph may capture it.
void decode(TensorView q, TensorView kv_cache, TensorView block_table, TensorView seqlens, TensorView out,
            TensorView lse, TensorView workspace, double scale, bool causal) {
    mla_decode_args args = arguments(q, kv_cache, block_table, seqlens, out, lse);
    int64_t contiguous[1];
    args.workspace = take("workspace", workspace, q.device(), {kDLUInt, 8, 1}, {workspace.numel()}, contiguous);
    args.workspace_bytes = static_cast<size_t>(workspace.numel());
    args.scale = scale;
    args.causal = causal;
    const DLDevice gpu = q.device();
    void* stream = TVMFFIEnvGetStream(gpu.device_type, gpu.device_id);
    check(mla_decode_call(module_of(gpu), &args, static_cast<CUstream>(stream)));
}

}  // namespace

TVM_FFI_DLL_EXPORT_TYPED_FUNC(decode, decode);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(workspace_bytes, workspace_bytes);
