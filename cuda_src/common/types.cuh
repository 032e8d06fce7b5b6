// Fixed-width types and the few definitions that every file needs. No CUDA header is included anywhere: NVRTC's
// built-ins and these are enough, so the same source compiles with the bare NVRTC wheel of CUDA 12 and 13.
#pragma once

#define MLA_DEVICE __device__ __forceinline__

namespace mla {
typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef int i32;
typedef long long i64;

constexpr i32 kWarpThreads = 32;
constexpr i32 kWarpgroupThreads = 128;
constexpr i32 kWarpgroupWarps = kWarpgroupThreads / kWarpThreads;
constexpr u32 kFullWarp = 0xffffffffu;

constexpr float kMaxFloat = 3.402823466e38f;
constexpr float kLog2E = 1.44269504f, kLn2 = 0.69314718f;

MLA_DEVICE constexpr i32 ceil_div(i32 a, i32 b) { return (a + b - 1) / b; }
MLA_DEVICE float negative_infinity() { return __int_as_float(0xff800000); }

// A byte address in this block's shared-memory window (32 bits), the operand type of PTX.
struct SmemAddr {
    u32 value;
    MLA_DEVICE SmemAddr operator+(u32 bytes) const { return SmemAddr{value + bytes}; }
};

MLA_DEVICE SmemAddr smem_addr(const void* pointer) { return SmemAddr{(u32)__cvta_generic_to_shared(pointer)}; }
}  // namespace mla
