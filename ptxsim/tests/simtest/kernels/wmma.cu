// A product with wmma: the block's warps share a tile of A in shared memory, each has 16 columns of B and D. The
// functions are those that nvcuda::wmma calls; the compiler knows them, so that mma.h need not be there.
typedef unsigned short f16;

extern "C" {
__device__ void __hmma_m16n16k16_ld_a(int *fragment, int const *from, unsigned stride, int column_major);
__device__ void __hmma_m16n16k16_ld_b(int *fragment, int const *from, unsigned stride, int column_major);
__device__ void __hmma_m16n16k16_mma_f32f32(float *d, int const *a, int const *b, float const *c, int layouts, int sat);
__device__ void __hmma_m16n16k16_st_c_f32(float *to, float const *fragment, unsigned stride, int column_major);
}

#ifndef STRIDE
#define STRIDE 24
#endif

// d[16, 16 warps] = scale a[16, depth] b[depth, 16 warps]; b is column-major.
extern "C" __global__ void wmma(f16 const *a, f16 const *b, float *d, int depth, float scale) {
    __shared__ __align__(32) f16 tile[16 * 24];
    int const warp = threadIdx.x / 32;
    int left[8], right[8];
    float sum[8] = {};
    for (int k = 0; k < depth; k += 16) {
        for (int i = threadIdx.x; i < 256; i += blockDim.x) tile[i / 16 * 24 + i % 16] = a[i / 16 * depth + k + i % 16];
#ifndef NO_BARRIER
        __syncthreads();
#endif
        __hmma_m16n16k16_ld_a(left, (int const *)tile, STRIDE, 0);
        __hmma_m16n16k16_ld_b(right, (int const *)(b + 16 * warp * depth + k), depth, 1);
        __hmma_m16n16k16_mma_f32f32(sum, left, right, sum, 1, 0);
        __syncthreads();
    }
    for (int i = 0; i < 8; i++) sum[i] *= scale;
    __hmma_m16n16k16_st_c_f32(d + 16 * warp, sum, 16 * (blockDim.x / 32), 0);
}
