// O^T = V^T P^T with P = exp2(S): the second half of an attention tile, with a race.
// Each warp writes 16 rows of P to shared memory, and wgmma reads all 64 as its operand B. __syncwarp() orders the
// rows of one warp only: a tile may multiply by what others have not written yet. -D FIXED puts the barrier in.
typedef unsigned int u32;
typedef unsigned long long u64;
constexpr int kHeads = 64, kTokens = 64, kRow = 2 * kTokens;  // bytes of a row of bfloat16

__device__ u32 swizzled(int row, int byte) { return row * kRow + (byte ^ ((row & 7) << 4)); }

__device__ u32 pack(float low, float high) {
    u32 bits;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(bits) : "f"(high), "f"(low));
    return bits;
}

__device__ u64 descriptor(u32 address) {  // 128-byte swizzle, 1,024 bytes between groups of eight rows
    return (u64)(address >> 4) | 1ull << 16 | (u64)(1024 >> 4) << 32 | 1ull << 62;
}

__device__ void multiply(float (&d)[32], u64 a, u64 b) {
    asm volatile(
        "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 "
        "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%"
        "29,%30,%31},"
        " %32, %33, 1, 1, 1, 1, 0;"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]), "+f"(d[8]),
          "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]), "+f"(d[16]),
          "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), "+f"(d[24]),
          "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31])
        : "l"(a), "l"(b));
}

extern "C" __global__ void attend(const float* scores, const u32* values, float* out, int tiles) {
    __shared__ __align__(1024) unsigned char p[kHeads * kRow], v[kTokens * kRow];
    const u32 p_at = (u32)__cvta_generic_to_shared(p), v_at = (u32)__cvta_generic_to_shared(v);
    const int t = threadIdx.x, head = t / 2, half = t % 2;
    float d[32] = {};
    for (int tile = 0; tile < tiles; tile++, scores += kHeads * kTokens, values += kTokens * kRow / 4) {
        for (int i = t; i < kTokens * kRow / 4; i += 128)  // V, one row of 64 columns per token
            *(u32*)(v + swizzled(i / 32, i % 32 * 4)) = values[i];
        __syncthreads();

        for (int i = 0; i < 32; i += 2) {  // P: two threads write the row of a head
            const int token = 32 * half + i;
            const float* s = scores + head * kTokens + token;
            *(u32*)(p + swizzled(head, 2 * token)) = pack(exp2f(s[0]), exp2f(s[1]));
        }
        asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#ifdef FIXED
        __syncthreads();
#else
        __syncwarp();
#endif
        asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
        for (int k = 0; k < kTokens / 16; k++) multiply(d, descriptor(v_at + 16 * kRow * k), descriptor(p_at + 32 * k));
        asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
        asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
        __syncthreads();
    }
    const int row = 16 * (t / 32) + t % 32 / 4, column = t % 4 * 2;
    for (int i = 0; i < 32; i++)  // wgmma's layout of D: row + 8 in every second pair of registers
        out[(row + i / 2 % 2 * 8) * kHeads + 8 * (i / 4) + column + i % 2] = d[i];
}
